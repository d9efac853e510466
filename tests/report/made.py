"""Run directories as a run leaves them, made quickly and as odd as a test wants."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

from tests.lines import write_lines

TASKS = ("code", "math")
HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<!--<script>",
    '<img src=x onerror="window.broken = 2">',
    "]]>\u2028\u2029\u0000\u001b[31m\u202eevil\u2066\ud800\ufeff",
    "\"'`${window.broken = 3}{{data}}&lt;b&gt;",
)


def metrics_line(step: int, **changed: Any) -> dict[str, Any]:
    """A step with the keys that the report's panels look at."""
    wave = math.sin(step / 7)
    line: dict[str, Any] = {"step": step, "stage": "none", "kl": 0.001 * (step - 1), "entropy": 2.0 - 0.01 * step}
    for task in (*TASKS, "all"):
        line |= {f"reward/{task}": 0.4 + 0.1 * wave, f"keep_rate/{task}": 0.6, f"solved/{task}": 0.1}
        line |= {f"unsolved/{task}": 0.3, f"tied/{task}": 0.0}
    line |= {"reward/shaped": 0.5, "rollout/response_tokens": 100.0 + step, "rollout/truncated": 0.01}
    line |= {"rollout/generated_tokens": 5000.0, "policy/grad_norm": 1.0, "policy/max_grad_norm": 2.0 + wave}
    line |= {"engine_gap/mean_abs": 1e-3, "time/rollout": 3.0, "time/updates": 1.0, "time/step": 4.0}
    line |= {"canaries/wrong/math": 4.0, "canaries/false_accepts/math": float(step == 2)}
    line |= {"second/judged/math": 4.0, "second/disagreed/math": float(step in (2, 3))}
    if step % 5 == 0:
        line |= {"validation/all": 0.3, "time/validate": 2.0}
    return line | changed


def make_run(folder: Path, steps: int = 12, config: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A run of so many steps with a hard reset after step 6, an alarm and stored responses; `changed` in every line."""
    folder.mkdir(parents=True)
    grpo = {
        "max_steps": steps,
        "unfinished_penalty": 0.5,
        "unfinished_factor": 1.0,
        "shaping": {"overlong_tokens": 0, "cosine": False},
    }
    whole: dict[str, Any] = {"run_dir": str(folder), "stage": "none", "seed": 1, "trainer": {"grpo": grpo}}
    (folder / "config.yaml").write_text(yaml.safe_dump(whole | (config or {})))
    write_lines(folder / "metrics.jsonl", [metrics_line(step, **changed) for step in range(1, steps + 1)])
    write_lines(folder / "journal.jsonl", journal(steps))
    (folder / "summary.json").write_text(json.dumps({"finished": True, "step": steps, "time": {"tokens_per_s": 10.0}}))
    (folder / "rollouts").mkdir()
    (folder / "probe").mkdir()
    (folder / "probe" / "probe.json").write_text(json.dumps(probe()))
    for step in range(1, min(steps, 12) + 1):
        write_lines(folder / "rollouts" / f"step-{step}.jsonl", rollouts(step))
    (folder / "disagreements").mkdir()
    for step in (2, 3):
        write_lines(folder / "disagreements" / f"step-{step}.jsonl", [disagreement(rollouts(step)[-2])])
    return folder


def disagreement(line: dict[str, Any]) -> dict[str, Any]:
    """The response of a line of rollouts/ with a second verdict of the same texts: right."""
    right = line["verdict"] | {"score": 1.0, "correct": True}
    return line | {"second_task": f"{line['task']}_second", "second_verdict": right}


def probe(text: str = "one and one is 2") -> dict[str, Any]:
    """What `prorl probe` writes, with one source; `text` is its every word."""
    facts = {"source": text, "task": "math", "prompts": 2, "responses": 8, "reward": 0.25, "keep_rate": 0.5}
    facts |= {"solved": 0.0, "pass_at_n": 0.5, "cut_off": 0.125, "tokens": 31.5, "without_form": 0.75, "unjudged": 0.0}
    response = {"text": text, "finished": False, "tokens": 40, "score": 1.0, "detail": text}
    return {
        "format": 1,
        "model": text,
        "samples": 4,
        "sources": [facts | {"advice": f"change {text}"}],
        "estimate": {"tokens_per_step": 1000.0, "generation_s_per_step": 50.0, "tokens_per_s": 20.0},
        "responses": [{"source": text, "groups": [], "examples": [response] * 3}],
    }


def journal(steps: int) -> list[dict[str, Any]]:
    mean = {"mean": 0.25, "se": 0.02, "prompts": 64}
    events: list[dict[str, Any]] = [
        {"event": "start", "step": 0, "stage": "none", "version": "0.1.0"},
        {"event": "validation", "step": 0, "all": mean, "tasks": {"sums": mean, "words": mean}},
    ]
    if steps >= 6:
        events += [
            {"event": "reset_intent", "step": 6, "reason": "at_steps"},
            {"event": "reset_commit", "step": 6, "reason": "at_steps", "reference_sha256": "0" * 64},
            {"event": "alarm", "step": 6, "what": "engine gap 0.2 is beyond 0.05"},
        ]
    return [event | {"time": 1.75e9 + number} for number, event in enumerate(events)]


def rollouts(step: int, responses: int = 4) -> list[dict[str, Any]]:
    """A group of each task; the last response was cut off, the first is right."""
    lines = []
    for task in TASKS:
        for number in range(responses):
            score = 1.0 if number == 0 else 0.25 * (number % 2)
            lines.append(
                {
                    "id": f"{task}-{step}",
                    "task": task,
                    "prompt": f"{task} prompt of step {step}",
                    "truth": {"answer": "7"},
                    "response": f"response {number} of step {step}",
                    "finished": number < responses - 1,
                    "verdict": {"score": score, "correct": score == 1.0, "parts": {}, "detail": "ok", "failure": None},
                    "trained": task != TASKS[0],
                    "version": step - 1,
                }
            )
    return lines


def make_hostile(folder: Path) -> Path:
    """A run in which every text that a page shows tries to break out of it."""
    text = "".join(HOSTILE)
    make_run(folder, 7, {"stage": text, "note": text}, **{f"reward/{HOSTILE[0]}": 0.5, HOSTILE[2]: 1.0})
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"event": "alarm", "step": 7, "time": 1.75e9, "what": text}) + "\n")
        file.write(json.dumps({"event": HOSTILE[0], "step": 7, "time": 1.75e9, text: text}) + "\n")
        file.write(f"not JSON {HOSTILE[0]}\n{{}}\n")
    (folder / "probe" / "probe.json").write_text(json.dumps(probe(text)))
    lines = rollouts(7)
    for line in lines:
        verdict = line["verdict"] | {"detail": text, "failure": None, "parts": {text: 1.0}}
        line |= {"id": text, "task": HOSTILE[0], "prompt": text, "response": text, "truth": {text: text}}
        line |= {"source": text, "verdict": verdict}
    write_lines(folder / "rollouts" / "step-7.jsonl", lines)
    write_lines(folder / "disagreements" / "step-7.jsonl", [disagreement(lines[0])])
    return folder


def evaluation(folder: Path, mean: float) -> Path:
    """results.json of a small evaluation."""
    folder.mkdir()
    scores = {str(k): {"mean": min(1.0, mean * k**0.5), "se": 0.02} for k in (1, 2, 4, 8)}
    entry: dict[str, Any] = {"title": "Sums", "domain": "math", "metric": "pass@1", "out_of_distribution": False}
    entry |= {"pass@1": scores["1"], "reward": scores["1"], "pass@k": scores, "tokens": {"mean": 20.0, "se": 1.0}}
    entry |= {"prompts": 50, "samples": 8, "unjudged": 0, "truncated": 0.01, "parts": {}}
    other = entry | {"title": HOSTILE[0], "out_of_distribution": True, "pass@1": None, "pass@k": {}}
    whole = {"format": 1, "complete": False, "model": {"name": "some/model"}, "benchmarks": {"sums": entry, "o": other}}
    (folder / "results.json").write_text(json.dumps(whole | {"domains": {"math": entry}, "out_of_distribution": None}))
    return folder


def comparison() -> dict[str, Any]:
    """comparison.json of the two."""
    gain = {"difference": 0.2, "low": 0.1, "high": 0.3}
    told = {"model": "final", "prompts": 50, "pass@1": gain, "reward": gain, "pass@k": {"1": gain, "8": gain}}
    told |= {"solved": {"both": 5, "gained": 10, "lost": 1, "neither": 34}, "base_k": 4, "reading": "new solutions"}
    models = {
        name: {"pass@k": {str(k): {"mean": mean * k**0.5, "se": 0.01} for k in (1, 2, 4, 8)}}
        for name, mean in (("base", 0.1), ("final", 0.3))
    }
    entry = {"title": "Sums", "out_of_distribution": False, "models": models, "differences": [told], "parts": {}}
    whole = {"format": 1, "base": "base", "models": [], "bootstrap": {"level": 0.95}, "skipped": ["other"]}
    return whole | {
        "benchmarks": {"sums": entry},
        "domains": {"math": {"differences": [told]}},
        "out_of_distribution": None,
    }


def made_evaluations(folder: Path) -> Path:
    """results.json and comparison.json in one folder."""
    evaluation(folder, 0.1)
    (folder / "comparison.json").write_text(json.dumps(comparison()))
    return folder


ODD: tuple[Any, ...] = (None, True, -1, 0, 10**400, 1e308, -1e308, math.nan, "", "1e999", [], [[]], {}, {"a": {}})


def spoilt(value: Any, draw: random.Random, chance: float) -> Any:
    """The same with some parts of it turned into something else."""
    if draw.random() < chance:
        return draw.choice(ODD)
    if isinstance(value, dict):
        return {key: spoilt(inner, draw, chance) for key, inner in value.items()}
    return [spoilt(inner, draw, chance) for inner in value] if isinstance(value, list) else value


def make_spoilt(chain: Path, seed: int) -> Path:
    """A chain of one stage, any part of whose files may be anything."""
    draw = random.Random(seed)
    folder = make_run(chain / "run1", 7)
    launches = [{"event": "begin", "job": "1", "attempt": 1, "nodes": ["a"], "time": 1.0}, {"event": "end", "code": 1}]
    write_lines(folder / "launches.jsonl", launches)
    for path in (*folder.glob("*.jsonl"), *folder.glob("rollouts/*.jsonl"), *folder.glob("disagreements/*.jsonl")):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        write_lines(path, [spoilt(line, draw, 0.1) for line in lines])
    for path in (folder / "summary.json", folder / "config.yaml", folder / "probe" / "probe.json"):
        value = yaml.safe_load(path.read_text())
        path.write_text(json.dumps(spoilt(value, draw, 0.15)))
    return chain


def make_fork(folder: Path, gains: dict[str, float], noise: float | None = None, prompts: int = 40) -> Path:
    """The finished arms of a fork, and what each scores more than the first on held-out prompts, by its folder."""
    for arm, gain in gains.items():
        make_run(folder / arm)
        (folder / arm / "validations").mkdir()
        for step in (3, 6, 9, 12):
            draw = random.Random(step)
            scores = {str(k): 0.3 + 0.01 * k + gain * (1 + draw.uniform(-0.1, 0.1)) for k in range(prompts)}
            (folder / arm / "validations" / f"step-{step:06d}.json").write_text(json.dumps(scores))
    record = {"format": 1, "checkpoint": "run/checkpoints/step-000100", "steps": 12, "early_noise": noise}
    record |= {"arms": [{"text": arm.replace("_", " "), "folder": arm, "job": None} for arm in gains]}
    (folder / "fork.json").write_text(json.dumps(record))
    return folder


STEP_TEXTS = ("the answer is 4", "<b> 5")


def make_step(folder: Path, step: int = 3, groups: int = 3, trainer: bool = True, *overrides: str) -> list[Any]:
    """A run with one stored batch: groups of two responses, the first right and the second wrong; returns the groups.

    `trainer`: the trainer's log-probabilities are stored, too; each is 0.5 below the engine's.
    """

    import torch

    from nemo_prorl import settings
    from nemo_prorl.config import GRPOConfig
    from nemo_prorl.data.laptop.model import build_tokenizer
    from nemo_prorl.lifecycle.batches import Batches, gap_bytes
    from nemo_prorl.rollout.endpoints import Response
    from nemo_prorl.rollout.groups import Group

    (folder / "init").mkdir(parents=True, exist_ok=True)
    base = [f"run_dir={folder}", "pretrained_checkpoint.restore_from_path=null", *overrides]
    (folder / "config.yaml").write_text(settings.resolved_yaml(settings.load(base)))
    tokenizer = build_tokenizer([*STEP_TEXTS, "what is 2 + 2 ?"])
    tokenizer.save_pretrained(folder / "init")
    made = []
    for draw in range(groups):
        ids = [tokenizer.encode(text) for text in STEP_TEXTS]
        logps = [[-0.25 * (n % 9) for n in range(len(one))] for one in ids]
        responses = [Response(k, one, logps[k], "stop" if k == 0 else "length", step - 1) for k, one in enumerate(ids)]
        verdicts: list[Any] = [
            {"id": f"p{draw}", "score": score, "correct": score == 1, "parts": {}, "detail": detail, "failure": None}
            for score, detail in ((1.0, "accepted: 4"), (0.0, f"not accepted: {HOSTILE[0]}{HOSTILE[3]}"))
        ]
        record = {"id": f"p{draw}", "task": "math", "prompt": "what is 2 + 2 ?", "truth": {"answer": "4"}}
        prompt = tokenizer.encode("what is 2 + 2 ?")
        made.append(Group(f"p{draw}", "math", record, prompt, 0, responses, verdicts, step, step - 1, 10 + draw))
    batches = Batches(folder, GRPOConfig(), lambda step, what: None)
    batches.store(step, made)
    if trainer:
        every = [response.logprobs for group in made for response in group.responses]
        batches.store_gaps(step, [gap_bytes(torch.full((len(logps),), -0.5)).numpy() for logps in every])
    batches.wait()
    return made
