"""What hard resets are for (paper sections 3.3.1 and 4), as an experiment: six arms, three seeds, 3,000 steps each.

    .venv/train/bin/python benchmarks/resets.py --pilot          the choice of the KL coefficient, on seed 1
    .venv/train/bin/python benchmarks/resets.py [--commit]       runs what benchmarks/results/resets.jsonl lacks
    .venv/train/bin/python benchmarks/resets.py --report         writes tables and a picture of the results into docs/
    ... --arms "no reset" --seeds 2                              only some of the runs

All runs of a seed begin with the same warmed-up policy of the laptop's model.  A run that was interrupted continues.  A
result is one line of JSON: validations, the means of other metrics over 50 steps, resets, and pass@k up to 256 of the
base, the middle and the end on the five trained tasks and on three task families that no run has trained.
"""

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ablations import prorl, with_error
from machine import describe

from nemo_prorl.algorithms.reset_rules import replay
from nemo_prorl.config import ResetRulesConfig
from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.journal_events import standing
from nemo_prorl.report.forecast import Segment, backtests

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resets.jsonl"
PAGE, PICTURE = ROOT / "docs" / "explanation" / "reset_experiment.md", ROOT / "docs" / "images" / "resets.png"
SEEDS, STEPS, MIDDLE, EVERY = (1, 2, 3), 3000, 1500, 50
COMMON = [
    # Small steps, as in endurance.py: there the score stops to grow between 4,000 and 5,000 steps.
    "trainer.grpo.prompts_per_step=4",
    "trainer.grpo.samples_per_prompt=4",
    "trainer.grpo.updates_per_step=1",
    "trainer.grpo.max_response_tokens=12",
    f"trainer.grpo.validate_every={EVERY}",
    "trainer.grpo.checkpoint_every=100",
    "trainer.grpo.keep_checkpoints=1",
    "trainer.grpo.keep_best=0",
    "trainer.grpo.save_rollout_groups=0",
    "trainer.grpo.max_steps_without_signal=0",
]
# The KL coefficient was to be the smallest of PILOT at which the pilot's score of seed 1 after 1,000 steps lies two
# standard errors below that of coefficient 0.  None did: it is the largest (docs/explanation/reset_experiment.md).
PILOT, PILOT_STEPS = (0.0, 0.01, 0.03, 0.1, 0.3), 1000
KL = "trainer.grpo.kl_coef=0.3"
ARMS: dict[str, list[str]] = {
    "no reset": [KL],
    "reset every 500": [KL, "trainer.resets.every=500"],
    "reset every 500, the reference alone": [KL, "trainer.resets.every=500", "trainer.resets.parts=reference"],
    "reset every 500, the optimizer alone": [KL, "trainer.resets.every=500", "trainer.resets.parts=optimizer"],
    "reset by the rules": [KL, "trainer.resets.mode=auto"],
    "reset by trials": [
        KL,
        "trainer.resets.mode=trial",
        "trainer.resets.every=500",
        "trainer.resets.trial_steps=250",
    ],
    "no reference": ["trainer.grpo.kl_coef=0"],
}
MEANS = ("reward/all", "keep_rate/all", "entropy", "kl", "policy/grad_norm")
HELD_OUT = {
    "lcm": "{generator: reasoning_gym:lcm, size: 32, seed: 20000000,"
    " options: {min_numbers: 2, max_numbers: 2, min_value: 2, max_value: 20}}",
    "spell_long": "{generator: reasoning_gym:spell_backward, size: 32, seed: 20000000,"
    " options: {min_word_len: 8, max_word_len: 9}}",
    "three_terms": "{generator: reasoning_gym:chain_sum, size: 32, seed: 20000000,"
    " options: {min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}}",
}
TRAINED = ("laptop_chain_sum", "laptop_spell_backward", "laptop_aiw", "laptop_gcd", "laptop_arithmetic")
SAMPLES = 256
T95 = {2: 12.7062, 3: 4.3027}  # Student's t, 95 % on both sides, by the number of seeds


def base_of(seed: int, out: Path) -> Path:
    """Return the folder of a seed's warmed-up policy, made if it is missing."""
    run = out / f"base-seed{seed}"
    if not (run / "base").is_dir():
        prorl("warmup", f"run_dir={run}", f"seed={seed}")
    return run / "base"


def pass_at_k(model: Path, out: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return {benchmark: {k: pass@k}} of a model, from 256 responses to each of 32 prompts of each benchmark."""
    names = list(TRAINED)
    for name, generate in HELD_OUT.items():
        file = out.parent / f"{name}.yaml"
        file.write_text(
            f"title: {name}\ndomain: puzzles\ntask: puzzles\nmetric: reward\nsets: [laptop]\ngenerate: {generate}\n"
            "sampling: {samples: 256, temperature: 1.0, top_p: 1.0, context: 128, max_response: 16}\n"
        )
        names.append(str(file))
    words = ["evaluate", str(model), "--benchmarks", ",".join(names), "--out", str(out), "--seed", str(seed)]
    prorl(*words, "--samples", str(SAMPLES), "--limit", "32")
    found = json.loads((out / "results.json").read_text())["benchmarks"]
    return {
        name: {k: round(value["mean"], 4) for k, value in result["pass@k"].items()} for name, result in found.items()
    }


def train(run: Path, overrides: list[str], steps: int) -> None:
    """Continue a run to step `steps`; add the seconds and the commit to sessions.jsonl in its folder."""
    began = time.monotonic()
    try:
        prorl("train", f"run_dir={run}", *overrides, f"trainer.grpo.max_steps={steps}")
    finally:
        if run.is_dir():
            session = {"machine": describe(), "until": steps, "wall_s": round(time.monotonic() - began, 1)}
            with (run / "sessions.jsonl").open("a") as file:
                file.write(json.dumps(session) + "\n")


def run_arm(arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one arm with one seed and evaluate its middle and its end; return its result."""
    base = base_of(seed, out)
    run = out / f"{arm.replace(',', '').replace(' ', '_')}-seed{seed}"
    overrides = overrides_of(base, seed, ARMS[arm])
    passes = {}
    for name, steps in (("base", 0), ("middle", MIDDLE), ("end", STEPS)):
        model = base if name == "base" else run / name
        if name != "base" and not model.is_dir():
            train(run, overrides, steps)
            prorl("export-hf", str(run), str(model))
        folder = out / f"base-seed{seed}" / "passes" if name == "base" else run / f"passes-{name}"
        passes[name] = pass_at_k(model, folder, seed)
    result = {"arm": arm, "seed": seed, "overrides": overrides[2:], **curves(run), "pass_at_k": passes}
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return result


def overrides_of(base: Path, seed: int, arm: list[str]) -> list[str]:
    model = [f"pretrained_checkpoint.restore_from_path={base}", "trainer.warmup.steps=0"]
    return [*model, f"seed={seed}", *COMMON, *arm]


def curves(run: Path) -> dict[str, Any]:
    """Return a run's validations, resets, sessions, tokens, and the means of MEANS over each 50 steps."""
    lines = read_objects(run / "metrics.jsonl")
    events = standing(read_objects(run / "journal.jsonl"))
    trials = [event for event in events if event["event"] == "trial_end"]
    validations = {event["step"]: event for event in events if event["event"] == "validation"}
    means: dict[str, list[float]] = {}
    for key in MEANS:
        for begin in range(0, len(lines), EVERY):
            values = [line[key] for line in lines[begin : begin + EVERY] if line.get(key) is not None]
            means.setdefault(key, []).append(float(f"{statistics.mean(values):.4g}") if values else math.nan)
    return {
        "steps": len(lines),
        "validation": {step: round(event["all"]["mean"], 5) for step, event in sorted(validations.items())},
        "validation_se": {step: round(event["all"]["se"], 5) for step, event in sorted(validations.items())},
        "tasks": {
            step: {name: round(task["mean"], 4) for name, task in event["tasks"].items()}
            for step, event in sorted(validations.items())
        },
        "resets": sorted({event["step"] for event in events if event["event"] == "reset_commit"}),
        # with those of the arms that lost
        "tokens": int(
            sum(line.get("rollout/generated_tokens") or 0 for line in lines) + sum(t["tokens"] for t in trials)
        ),
        "trials": [
            {key: t[key] for key in ("trial", "winner", "difference", "se", "because", "tokens")} for t in trials
        ],
        "means": means,
        "sessions": read_objects(run / "sessions.jsonl"),
    }


def plateaus(result: dict[str, Any]) -> list[int]:
    """Return the steps at which the plateau rule finds that a run stagnates; after a find, the rule waits."""
    lines = [
        {"step": int(step), **{f"validation/{name}": mean for name, mean in tasks.items()}}
        for step, tasks in result["tasks"].items()
        if int(step) > 0
    ]
    found = replay(lines, ResetRulesConfig(), resets=result["resets"])
    return [finding.step for finding in found if finding.rule == "plateau"]


def results() -> list[dict[str, Any]]:
    """Return the results of the arms, and those of the pilot, in the order in which they were made."""
    return read_objects(RESULTS)


def keep(result: dict[str, Any], commit: bool) -> None:
    """Append a result to RESULTS and, if asked to, commit that file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    if commit:
        message = f"Results: {result['arm']}, seed {result['seed']}"
        subprocess.run(["git", "add", str(RESULTS)], cwd=ROOT, check=True)
        subprocess.run(["git", "commit", "-q", "-m", message, "--", str(RESULTS)], cwd=ROOT, check=True)


def missing(pilot: bool, arms: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (arm, seed) of the runs that RESULTS lacks, all arms of a seed together."""
    done = {(result["arm"], result["seed"]) for result in results()}
    wanted = [(f"pilot {kl:g}", 1) for kl in PILOT] if pilot else [(arm, seed) for seed in seeds for arm in arms]
    yield from (one for one in wanted if one not in done)


def run_pilot(arm: str, seed: int, out: Path) -> dict[str, Any]:
    run = out / f"{arm.replace(' ', '_')}-seed{seed}"
    overrides = overrides_of(base_of(seed, out), seed, [f"trainer.grpo.kl_coef={arm.split()[1]}"])
    train(run, overrides, PILOT_STEPS)
    return {"arm": arm, "seed": seed, "overrides": overrides[2:], **curves(run)}


# --- tables and the picture ------------------------------------------------------------------------------------------


def score(result: dict[str, Any], steps: Sequence[int]) -> float:
    """Return the mean of a run's validations after these steps."""
    return statistics.mean(result["validation"][str(step)] for step in steps)


def after_resets(found: list[dict[str, Any]], arm: str) -> list[float]:
    """Return, for each reset of an arm, the gain over the next 200 steps less that of the same steps without resets.

    A score is the mean of four validations: those before the reset, and those 50 to 200 steps after it.
    """
    plain = {result["seed"]: result for result in found if result["arm"] == "no reset"}
    gains = []
    for result in (result for result in found if result["arm"] == arm and result["seed"] in plain):
        for step in (step for step in result["resets"] if 4 * EVERY <= step <= STEPS - 4 * EVERY):
            last = step - step % EVERY
            before, after = range(last - 3 * EVERY, last + 1, EVERY), range(last + EVERY, last + 5 * EVERY, EVERY)
            gains.append(
                score(result, after)
                - score(result, before)
                - (score(plain[result["seed"]], after) - score(plain[result["seed"]], before))
            )
    return gains


def with_interval(pairs: list[float]) -> str:
    """Return the mean of differences between twins and its 95 % interval by Student's t; of one seed the difference."""
    mean = statistics.mean(pairs)
    if len(pairs) < 2:
        return f"{mean:+.3f}"
    half = T95[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def table(found: list[dict[str, Any]]) -> str:
    """Return Markdown: the pilot, the arms, and pass@k of their base, middle and end."""
    last = range(STEPS - 3 * EVERY, STEPS + 1, EVERY)
    first = {result["seed"]: score(result, last) for result in found if result["arm"] == "no reset"}
    lines = ["| KL coefficient | score after 850 to 1,000 steps | KL there |", "|---|---|---|"]
    for result in (result for result in found if result["arm"].startswith("pilot")):
        ends = range(PILOT_STEPS - 3 * EVERY, PILOT_STEPS + 1, EVERY)
        kl = statistics.mean(result["means"]["kl"][-3:])
        lines.append(f"| {result['arm'].split()[1]} | {score(result, ends):.3f} | {kl:.3f} |")
    lines += [
        "",
        "| arm | seeds | score at the end | against no reset | stagnates at | resets | gain of a reset | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        if mine := [result for result in found if result["arm"] == arm]:
            pairs = [score(r, last) - first[r["seed"]] for r in mine if r["seed"] in first]
            gains = after_resets(found, arm)
            cells = [
                arm,
                str(len(mine)),
                with_error([score(r, last) for r in mine], ".3f"),
                with_interval(pairs) if arm != "no reset" and pairs else "-",
                ", ".join(str(next(iter(plateaus(r)), "not")) for r in mine),
                ", ".join(str(len(r["resets"])) for r in mine),
                with_error(gains, "+.3f") if gains else "-",
                f"{statistics.mean(r['tokens'] for r in mine) / 1e6:.2f} M",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *passes(found), "", *forecasts(found)]) + "\n"


def passes(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of pass@k."""
    shown = ("1", "16", "256")
    yield "| arm | problems | " + " | ".join(f"pass@{k}: base, middle, end" for k in shown) + " |"
    yield "|---|---|" + "---|" * len(shown)
    for arm in ARMS:
        mine = [result for result in found if result["arm"] == arm]
        for title, names in (("trained", list(TRAINED)), ("held-out families", list(HELD_OUT))):
            if mine:
                cells = [
                    ", ".join(
                        f"{statistics.mean(_pass(r, when, names, k) for r in mine):.3f}"
                        for when in ("base", "middle", "end")
                    )
                    for k in shown
                ]
                yield f"| {arm} | {title} | {' | '.join(cells)} |"


def _pass(result: dict[str, Any], when: str, names: Sequence[str], k: str) -> float:
    return statistics.mean(result["pass_at_k"][when][name][k] for name in names)


def forecasts(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of forecasts, made from the beginning of each run that has no resets.

    Compute is counted in steps.  A run with the same validations as an earlier one is left out.
    """
    yield "| run | from 40 % | from 60 % | from 80 % | it became |"
    yield "|---|---|---|---|---|"
    seen: list[dict[str, float]] = []
    hits, tests = [0, 0, 0], 0
    for result in found:
        if result["resets"] or result["validation"] in seen:
            continue
        seen.append(result["validation"])
        steps = sorted(map(int, result["validation"]))
        scores, errors = (tuple(result[key][str(step)] for step in steps) for key in ("validation", "validation_se"))
        tested = backtests(Segment(0, tuple(steps), tuple(map(float, steps)), scores, errors, None))
        cells = [
            f"{max(0.0, test['interval'][0]):.3f} to {test['interval'][1]:.3f}{'' if test['hit'] else ', missed'}"
            for test in tested
        ]
        hits, tests = [sum(pair) for pair in zip(hits, (test["hit"] for test in tested), strict=True)], tests + 1
        yield f"| {result['arm']}, seed {result['seed']} | {' | '.join(cells)} | {tested[0]['end']:.3f} |"
    yield f"| held the end | {' | '.join(f'{hit} of {tests}' for hit in hits)} | |"


def draw(found: list[dict[str, Any]]) -> None:
    """Write the picture: scores and KL by step; a line is the mean over seeds, the band its least and greatest seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True)
    for color, arm in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], ARMS, strict=False):
        mine = [result for result in found if result["arm"] == arm]
        if not mine:
            continue
        steps = sorted(int(step) for step in mine[0]["validation"])
        scores = [[result["validation"][str(step)] for result in mine] for step in steps]
        kls = [list(values) for values in zip(*(result["means"]["kl"] for result in mine), strict=True)]
        for axis, x, values in ((axes[0], steps, scores), (axes[1], steps[1:], kls)):
            axis.plot(x, [statistics.mean(v) for v in values], color=color, label=f"{arm}, {len(mine)} seeds")
            axis.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.15)
    for axis, title in zip(
        axes, ("mean reward on unseen problems", "KL to the reference, nats per token"), strict=True
    ):
        axis.set_xlabel("step")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=90)
    plt.close(figure)
    Image.open(PICTURE).convert("RGB").quantize(40, kmeans=1).save(PICTURE, optimize=True)  # the site stays small


def report(found: list[dict[str, Any]]) -> None:
    """Print the tables, insert them into PAGE, and write PICTURE."""
    text = table(found)
    sys.stdout.write(text)
    draw(found)
    page = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"(<!-- table -->\n).*?(<!-- /table -->)", lambda m: f"{m[1]}{text}{m[2]}", page, flags=re.S)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", action="store_true", help="make the four runs that choose the KL coefficient")
    parser.add_argument("--commit", action="store_true", help="commit each result when its run ends")
    parser.add_argument("--report", action="store_true", help="run nothing; write tables and a picture of the results")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "resets", help="folder of the runs")
    args = parser.parse_args()
    if args.report:
        report(results())
        return 0
    out: Path = args.out.absolute()
    for arm, seed in missing(args.pilot, args.arms, args.seeds):
        result = (run_pilot if args.pilot else run_arm)(arm, seed, out)
        keep(result, args.commit)
        sys.stderr.write(f"{arm}, seed {seed}: {list(result['validation'].values())[-1]:.3f} at the end\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
