"""The results of a finished run: the gain of each task on standard output, and the curves as a picture."""

import math
import sys
from pathlib import Path
from typing import Any

from nemo_prorl.errors import UNJUDGED
from nemo_prorl.files import read_object
from nemo_prorl.launcher.curves import OF_A_RUN, RunResults, draw

_BARS = "▁▂▃▄▅▆▇█"


def print_results(run_dir: Path) -> None:
    """Print the results and draw RUN/curves.png."""
    results = RunResults(run_dir)
    sys.stdout.write("\n".join(outcome(results.summary, results.metrics)) + "\n")
    if results.metrics:
        draw({run_dir.name: results}, OF_A_RUN, run_dir / "curves.png")
        sys.stdout.write(f"curves: {run_dir / 'curves.png'}\n")
    sys.stdout.flush()


def finished_step(run_dir: Path, max_steps: int) -> int | None:
    """Return the last step of a run that has reached `max_steps`; None if it has not."""
    summary = read_object(run_dir / "summary.json")
    if summary is None or not summary["finished"] or summary["step"] < max_steps:
        return None
    return int(summary["step"])


def outcome(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    """Return lines: the last step, first and last values of three metrics, and the gain on held-out problems."""
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
    if metrics and all(line.get("reward/all") is None for line in metrics):
        lines.append(f"no update was made: no response has a verdict. {UNJUDGED}")
    elif metrics and not any("policy/grad_norm" in line for line in metrics):
        lines.append(
            "no update was made: the responses of every group had equal rewards, so no step had a gradient. Fix:"
            " prorl probe says what to change"
        )
    elif heldout:
        lines.append(verdict(heldout))
    return lines


def verdict(heldout: dict[str, Any]) -> str:
    """Return the change of the held-out reward as one sentence with its uncertainty."""
    before, after = heldout["before"], heldout["after"]
    gain = after - before
    error = math.hypot(heldout["before_se"], heldout["after_se"])
    times = f", {after / before:.2f} times" if before > 0 else ""
    sigmas, meaning = significance(gain, error)
    return f"all: {before:.3f} -> {after:.3f} ({gain:+.3f}{times}, {sigmas:.1f} standard errors): {meaning}"


def significance(gain: float, error: float) -> tuple[float, str]:
    """Return a change of the held-out reward in standard errors, and what it means."""
    sigmas = gain / error if error else 0.0
    if sigmas >= 4:
        return sigmas, "the policy got better at problems it has never seen"
    return sigmas, "the policy got worse" if sigmas <= -4 else "no significant change"


def sparkline(values: list[float], width: int = 48) -> str:
    """Return a series of numbers as one line of at most `width` bars; a bar is the mean of successive values."""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((m - low) * scale)] for m in means)
