"""What hard resets are for (paper sections 3.3.1 and 4), as an experiment: four arms, three seeds, 3,000 steps each.

    .venv/train/bin/python benchmarks/resets.py --pilot          the choice of the KL coefficient, on seed 1
    .venv/train/bin/python benchmarks/resets.py [--commit]       runs what benchmarks/results/resets.jsonl lacks

All runs of a seed begin with the same warmed-up policy of the laptop's model.  A run that was interrupted continues.  A
result is one line of JSON: validations, the means of other metrics over 50 steps, resets, and pass@k up to 256 of the
base, the middle and the end on the five trained tasks and on three task families that no run has trained.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ablations import prorl
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resets.jsonl"
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
# The KL coefficient is the smallest of PILOT at which the pilot's score of seed 1 after 1,000 steps lies two standard
# errors below that of coefficient 0: there the reference policy holds the policy back.
PILOT, PILOT_STEPS = (0.0, 0.01, 0.03, 0.1), 1000
KL = "trainer.grpo.kl_coef=0.03"
ARMS: dict[str, list[str]] = {
    "no reset": [KL],
    "reset every 500": [KL, "trainer.resets.every=500"],
    "reset by the rules": [KL, "trainer.resets.mode=auto"],
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
            f"title: {name}\ndomain: puzzles\ntask: puzzles\nmetric: reward\ngenerate: {generate}\n"
            "sampling: {samples: 256, temperature: 1.0, top_p: 1.0, context: 64, max_response: 16}\n"
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
    run = out / f"{arm.replace(' ', '_')}-seed{seed}"
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
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
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
        "tokens": int(sum(line.get("rollout/generated_tokens") or 0 for line in lines)),
        "means": means,
        "sessions": [json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines()],
    }


def results() -> list[dict[str, Any]]:
    """Return the results of the arms, and those of the pilot, in the order in which they were made."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def keep(result: dict[str, Any], commit: bool) -> None:
    """Append a result to RESULTS and, if asked to, commit that file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    if commit:
        message = f"Results: {result['arm']}, seed {result['seed']}"
        subprocess.run(["git", "add", str(RESULTS)], cwd=ROOT, check=True)
        subprocess.run(["git", "commit", "-q", "-m", message, "--", str(RESULTS)], cwd=ROOT, check=True)


def missing(pilot: bool) -> Iterator[tuple[str, int]]:
    """Yield (arm, seed) of the runs that RESULTS lacks, all arms of a seed together."""
    done = {(result["arm"], result["seed"]) for result in results()}
    wanted = [(f"pilot {kl:g}", 1) for kl in PILOT] if pilot else [(arm, seed) for seed in SEEDS for arm in ARMS]
    yield from (one for one in wanted if one not in done)


def run_pilot(arm: str, seed: int, out: Path) -> dict[str, Any]:
    run = out / f"{arm.replace(' ', '_')}-seed{seed}"
    overrides = overrides_of(base_of(seed, out), seed, [f"trainer.grpo.kl_coef={arm.split()[1]}"])
    train(run, overrides, PILOT_STEPS)
    return {"arm": arm, "seed": seed, "overrides": overrides[2:], **curves(run)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", action="store_true", help="make the four runs that choose the KL coefficient")
    parser.add_argument("--commit", action="store_true", help="commit each result when its run ends")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "resets", help="folder of the runs")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    for arm, seed in missing(args.pilot):
        result = (run_pilot if args.pilot else run_arm)(arm, seed, out)
        keep(result, args.commit)
        sys.stderr.write(f"{arm}, seed {seed}: {list(result['validation'].values())[-1]:.3f} at the end\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
