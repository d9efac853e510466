"""The paper's ablations (section 5) on the laptop's model: every arm, a variant of the algorithm, with three seeds.

    .venv/train/bin/python benchmarks/ablations.py              runs what benchmarks/results/ablations.jsonl lacks
    .venv/train/bin/python benchmarks/ablations.py --commit     and commits each result when its run ends
    .venv/train/bin/python benchmarks/ablations.py --report     writes tables and pictures of the results into docs/

All arms of a seed begin with the same warmed-up policy and see the same problems.  They differ only in a named
configuration (conf/algorithm/).  A result is one line of JSON: the curves of a run by step, its tokens and seconds.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ablations.jsonl"
PAGE, PICTURES = ROOT / "docs" / "explanation" / "ablations.md", ROOT / "docs" / "images"
SEEDS = (1, 2, 3)
STEPS = 50
COMMON = [
    "data=ablations",
    f"trainer.grpo.max_steps={STEPS}",
    "trainer.grpo.prompts_per_step=32",
    "trainer.grpo.samples_per_prompt=8",
    "model.optim.lr=3e-4",
    "trainer.grpo.validate_every=10",
    "trainer.grpo.validation_samples=2",
    "trainer.grpo.validation_temperature=0.6",
    "trainer.grpo.checkpoint_every=1000",
    "trainer.grpo.keep_best=0",
    "trainer.grpo.save_rollout_groups=0",
]
# The KL coefficient sets the pull of the reference policy: at 1e-4 its effect is invisible within these steps.
_RESETS = ["trainer.grpo.kl_coef=0.02"]
_EVERY = [*_RESETS, "trainer.resets.every=20"]
ARMS: dict[str, list[str]] = {
    "prorl": [],
    "temperature_0p6": [],
    "temperature_1p0": [],
    "temperature_1p5": [],
    "clip_high_0p2": [],
    "clip_low_0p1": [],
    "clip_0p1_0p2": [],
    "static_sampling": [],
    "entropy_none": [],
    "entropy_clip_higher": [],
    "entropy_adaptive": ["trainer.grpo.adaptive_entropy.target=1.2", "trainer.grpo.adaptive_entropy.step=1e-3"]
    + ["trainer.grpo.adaptive_entropy.maximum=0.02"],
    "reset_none": _RESETS,
    "reset_reference": _EVERY,
    "reset_optimizer": _EVERY,
    "reset_both": _EVERY,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "temperature of the rollouts": ("prorl", "temperature_0p6", "temperature_1p0", "temperature_1p5"),
    "clipping": ("prorl", "clip_high_0p2", "clip_low_0p1", "clip_0p1_0p2"),
    "dynamic sampling": ("prorl", "static_sampling"),
    # clip_high_0p2 has the values of entropy_kl
    "entropy": ("entropy_none", "clip_high_0p2", "entropy_clip_higher", "entropy_adaptive"),
    "resets": ("reset_none", "reset_reference", "reset_optimizer", "reset_both"),
}
CURVES = {
    "reward": "reward/all",
    "entropy": "entropy",
    "kl": "kl",
    "keep_rate": "keep_rate/all",
    "length": "rollout/response_tokens",
    "truncated": "rollout/truncated",
}


def prorl(*words: str, jobs: int = 1) -> None:
    command = [str(Path(sys.executable).with_name("prorl")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT, env=environment)


def base_of(seed: int, out: Path) -> Path:
    """Return the folder of a seed's warmed-up policy; run the warm-up first if the folder is missing."""
    run = out / f"base-seed{seed}"
    if not (run / "base").is_dir():
        prorl("warmup", f"run_dir={run}", f"seed={seed}", "data=ablations", "trainer.warmup.steps=140")
    return run / "base"


def run_arm(arm: str, seed: int, out: Path, jobs: int) -> dict[str, Any]:
    """Train one arm with one seed; return the result, which is a line of RESULTS.

    Args:
        out: folder of the runs.
        jobs: number of concurrent runs, this run included; each gets an equal share of the cores.
    """
    base, run = base_of(seed, out).absolute(), out / f"{arm}-seed{seed}"
    shutil.rmtree(run, ignore_errors=True)  # an incomplete run would count its start twice
    overrides = [f"algorithm={arm}", *COMMON, f"seed={seed}", *ARMS[arm]]
    began = time.monotonic()
    model = [f"pretrained_checkpoint.restore_from_path={base}", "trainer.warmup.steps=0"]
    prorl("train", f"run_dir={run}", *model, *overrides, jobs=jobs)
    wall_s = time.monotonic() - began
    metrics = read_objects(run / "metrics.jsonl")
    events = read_objects(run / "journal.jsonl")
    validations = {e["step"]: round(e["all"]["mean"], 5) for e in events if e["event"] == "validation"}
    curves = {name: [_rounded(m.get(key)) for m in metrics] for name, key in CURVES.items()}
    seconds = [m["time/step"] - (m.get("time/validate") or 0.0) for m in metrics]
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return {
        "arm": arm,
        "seed": seed,
        "overrides": overrides,
        "machine": describe(),
        "wall_s": round(wall_s, 1),
        "validation": validations,
        "validation_se": round(next(e["all"]["se"] for e in events if e["event"] == "validation"), 5),
        "tokens": _sums([m["rollout/generated_tokens"] for m in metrics]),
        "seconds": _sums(seconds),
        **curves,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _sums(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(round(total, 2))
    return sums


def results() -> list[dict[str, Any]]:
    return read_objects(RESULTS)


# --- tables and charts ------------------------------------------------------------------------------------------------


def gain(result: dict[str, Any]) -> float:
    """Return the mean of the last two validation scores minus the first score."""
    scores = [score for _, score in sorted((int(step), score) for step, score in result["validation"].items())]
    return (scores[-1] + scores[-2]) / 2 - scores[0]


def tail_mean(values: Sequence[float | None], count: int = 10) -> float:
    return statistics.mean(value for value in values[-count:] if value is not None)


def with_error(values: Sequence[float], form: str) -> str:
    """Return mean ± standard error over seeds as text; `form` is the format of the mean, such as ".2f"."""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else mean


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the arms, each compared seed by seed with the first arm of its group."""
    lines = []
    for group, arms in GROUPS.items():
        lines += [f"\n**{group}**\n"]
        lines += [
            "| configuration | seeds | gain | against the first | entropy at the end | KL | keep rate | tokens | s |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        first = {r["seed"]: gain(r) for r in found if r["arm"] == arms[0]}
        for arm in arms:
            mine = sorted((r for r in found if r["arm"] == arm), key=lambda r: r["seed"])
            if not mine:
                continue
            pairs = [gain(r) - first[r["seed"]] for r in mine if r["seed"] in first]
            against = with_error(pairs, "+.3f") if arm != arms[0] and pairs else "-"
            cells = [
                f"`{arm}`",
                str(len(mine)),
                with_error([gain(r) for r in mine], "+.3f"),
                against,
                with_error([tail_mean(r["entropy"]) for r in mine], ".2f"),
                f"{statistics.mean(tail_mean(r['kl']) for r in mine):.2f}",
                f"{statistics.mean(statistics.mean(k for k in r['keep_rate'] if k is not None) for r in mine):.2f}",
                f"{statistics.mean(r['tokens'][-1] for r in mine) / 1000:.0f}k",
                f"{statistics.mean(r['seconds'][-1] for r in mine):.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).strip() + "\n"


def draw(found: list[dict[str, Any]], group: str, arms: Sequence[str], path: Path) -> None:
    """Write a picture of the arms to `path`: validation scores over steps, tokens and seconds; entropy over steps.

    Each thin line is a seed; each thick line is the mean over seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, axes = plt.subplots(1, 4, figsize=(17, 3.8), constrained_layout=True)
    for color, arm in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], arms, strict=False):
        mine = [r for r in found if r["arm"] == arm]
        for axis, unit in zip(axes[:3], (None, "tokens", "seconds"), strict=True):
            lines = []
            for r in mine:
                steps = sorted(int(step) for step in r["validation"])
                x = [float(s) if unit is None else 0.0 if s == 0 else r[unit][s - 1] for s in steps]
                lines.append((x, [r["validation"][str(s)] for s in steps]))
            _lines(axis, lines, arm, color)
        _lines(axes[3], [(list(range(1, len(r["entropy"]) + 1)), r["entropy"]) for r in mine], arm, color)
    for axis, title in zip(axes, ("step", "generated tokens", "seconds (without validation)", "step"), strict=True):
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward on unseen problems")
    axes[3].set_ylabel("entropy, nats per token")
    axes[3].legend(fontsize=8)
    figure.suptitle(group)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(40, kmeans=1).save(path, optimize=True)  # the site stays small


def _lines(axis: Any, lines: list[tuple[list[float], list[float]]], label: str, color: str) -> None:
    for x, y in lines:
        axis.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
    if lines and len({len(y) for _, y in lines}) == 1:
        mean = [[statistics.mean(values) for values in zip(*part, strict=True)] for part in zip(*lines, strict=True)]
        axis.plot(mean[0], mean[1], color=color, linewidth=2, label=label)


def report(found: list[dict[str, Any]]) -> None:
    """Print the tables, insert them into the file PAGE, and write a picture of each group into the folder PICTURES."""
    found = [json.loads(json.dumps(r)) for r in found]
    text = table(found)
    sys.stdout.write(text)
    for group, arms in GROUPS.items():
        draw(found, group, arms, PICTURES / f"ablations-{group.split()[0]}.png")
    page = PAGE.read_text()
    marked = re.sub(r"(<!-- table -->\n).*?(<!-- /table -->)", lambda m: f"{m[1]}{text}{m[2]}", page, flags=re.S)
    PAGE.write_text(marked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", action="store_true", help="commit each result when its run ends")
    parser.add_argument("--report", action="store_true", help="run nothing; write tables and pictures of the results")
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="concurrent runs; compare seconds only of results with the same number; default: 1",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ablations", help="folder of the runs")
    args = parser.parse_args()
    if args.report:
        report(results())
        return 0
    done = {(r["arm"], r["seed"]) for r in results()}
    open_runs = [(arm, seed) for seed in args.seeds for arm in args.arms if (arm, seed) not in done]
    for seed in args.seeds:
        base_of(seed, args.out)
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda one: run_arm(one[0], one[1], args.out, args.jobs), open_runs):
            arm, seed = result["arm"], result["seed"]
            with RESULTS.open("a") as f:
                f.write(json.dumps({**result, "side_by_side": args.jobs}) + "\n")
            sys.stderr.write(
                f"{arm} seed {seed}: gain {gain(json.loads(json.dumps(result))):+.3f}, {result['wall_s']} s\n"
            )
            if args.commit:
                message = f"Results: ablation {arm}, seed {seed}"
                subprocess.run(["git", "add", str(RESULTS)], cwd=ROOT, check=True)
                subprocess.run(["git", "commit", "-q", "-m", message, "--", str(RESULTS)], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
