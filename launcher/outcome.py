"""The outcome of a finished run: what was learnt, task by task, on standard output, and its curves as a picture."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"


def tell(run_dir: Path) -> None:
    """Print the outcome and draw RUN/curves.png."""
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    sys.stdout.write("\n".join(outcome(summary, metrics)) + "\n")
    if metrics:
        draw(summary, metrics, run_dir / "curves.png")
        sys.stdout.write(f"curves: {run_dir / 'curves.png'}\n")
    sys.stdout.flush()


def outcome(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    """Return the lines to print."""
    lines = [f"step {summary['step']}, stage {summary['stage']}, seed {summary['seed']}"]
    for key, name in (("reward/all", "reward in training"), ("entropy", "entropy"), ("kl", "KL to reference")):
        values = [m[key] for m in metrics if m.get(key) is not None]
        if values:
            lines.append(f"  {name:20s} {sparkline(values)}  {values[0]:.3g} -> {values[-1]:.3g}")
    heldout = summary["heldout"]
    if heldout:
        lines.append(f"held-out mean reward, {heldout['prompts']} unseen problems:")
        width = max(len(name) for name in heldout["tasks"])
        for name, score in heldout["tasks"].items():
            gain = score["after"] - score["before"]
            lines.append(f"  {name:{width}s}  {score['before']:.3f} -> {score['after']:.3f}  ({gain:+.3f})")
        lines.append(verdict(heldout))
    return lines


def verdict(heldout: dict[str, Any]) -> str:
    """Return what was learnt, in one sentence with its uncertainty."""
    before, after = heldout["before"], heldout["after"]
    gain = after - before
    error = math.hypot(heldout["before_se"], heldout["after_se"])
    sigmas = gain / error if error else 0.0
    times = f", {after / before:.2f} times" if before > 0 else ""
    measured = f"{before:.3f} -> {after:.3f} ({gain:+.3f}{times}, {sigmas:.1f} standard errors)"
    if sigmas >= 4:
        return f"all: {measured}: the policy got better at problems it has never seen"
    if sigmas <= -4:
        return f"all: {measured}: the policy got worse"
    return f"all: {measured}: no change that can be told from chance"


def sparkline(values: list[float], width: int = 48) -> str:
    """Return the course of a number as one line of text."""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((m - low) * scale)] for m in means)


def draw(summary: dict[str, Any], metrics: list[dict[str, Any]], path: Path) -> None:
    """Draw held-out and training reward by task, entropy, KL and time as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), constrained_layout=True)
    heldout = summary["heldout"]
    first = {"step": 0, **{f"validation/{n}": s["before"] for n, s in heldout.get("tasks", {}).items()}}
    first["validation/all"] = heldout.get("before")
    rows = [first, *metrics]

    def curve(axis: Any, key: str, label: str, **style: Any) -> None:
        points = [(m["step"], m[key]) for m in rows if m.get(key) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, **style)

    for name in heldout.get("tasks", {}):
        curve(axes[0, 0], f"validation/{name}", name, marker=".", alpha=0.7)
    curve(axes[0, 0], "validation/all", "all", marker="o", color="black", linewidth=2)
    axes[0, 0].set_title("mean reward on unseen problems")
    for key in sorted({k for m in metrics for k in m if k.startswith("reward/") and not k.endswith("shaped")}):
        curve(axes[0, 1], key, key.removeprefix("reward/"))
    axes[0, 1].set_title("reward in training (T of the rollout)")
    curve(axes[0, 2], "keep_rate/all", "groups with a signal")
    curve(axes[0, 2], "rollout/truncated", "responses cut off")
    axes[0, 2].set_title("dynamic sampling")
    curve(axes[1, 0], "entropy", "entropy")
    axes[1, 0].set_title("entropy, nats a token")
    curve(axes[1, 1], "kl", "KL to the reference policy")
    axes[1, 1].set_title("KL to the reference policy")
    for phase in ("rollout", "logprobs", "updates", "ahead", "publish"):
        curve(axes[1, 2], f"time/{phase}", phase)
    axes[1, 2].set_title("seconds a step")
    for axis in axes.flat:
        for reset in summary["resets"]:
            axis.axvline(reset["step"] + 0.5, color="grey", linestyle="--", linewidth=1)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
