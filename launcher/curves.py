"""Curves of a run, or of the runs of a chain in order, as a picture with marks at hard resets and stages."""

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

Panel = tuple[str, dict[str, str]]  # title; key of metrics.jsonl: label.  A final * in a key matches any ending.

VALIDATION: Panel = ("mean reward on unseen problems", {"validation/*": ""})
REWARD: Panel = ("reward in training (T of the rollout)", {"reward/*": ""})
SAMPLING: Panel = (
    "dynamic sampling",
    {"keep_rate/all": "groups with a signal", "rollout/truncated": "responses cut off"},
)
ENTROPY: Panel = ("entropy, nats per token", {"entropy": "entropy"})
KL: Panel = ("KL to the reference policy, nats per token", {"kl": "KL"})
SECONDS: Panel = (
    "seconds per step",
    {f"time/{phase}": phase for phase in ("rollout", "logprobs", "updates", "ahead", "publish")},
)
LENGTH: Panel = ("response length, tokens", {"rollout/response_tokens": "mean length"})
OF_A_RUN = [VALIDATION, REWARD, SAMPLING, ENTROPY, KL, SECONDS]
OF_A_CHAIN = [KL, ENTROPY, LENGTH, REWARD, VALIDATION, SAMPLING]


class RunResults:
    """The summary and the metrics of a finished run."""

    def __init__(self, folder: Path) -> None:
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        self.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics by step, preceded by a row for step 0 with the validation before the first step."""
        heldout = self.summary["heldout"]
        before = {f"validation/{name}": score["before"] for name, score in heldout.get("tasks", {}).items()}
        return [{"step": 0, **before, "validation/all": heldout.get("before")}, *self.metrics]


def draw(runs: Mapping[str, RunResults], panels: list[Panel], path: Path) -> None:
    """Draw six panels into a PNG file.

    Args:
        runs: runs by name, drawn one after the other on the axis of steps.
        panels: six pairs (title, {key of a metric: label of its curve}).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    begins = list(accumulate((run.summary["step"] for run in runs.values()), initial=0))[:-1]
    for axis, (title, keys) in zip(axes.flat, panels, strict=True):
        for key, label in _curves(keys, runs):
            points = [
                (begin + row["step"], row[key])
                for begin, run in zip(begins, runs.values(), strict=True)
                for row in run.rows
                if row.get(key) is not None
            ]
            style = {"color": "black", "linewidth": 2} if label == "all" else {"linewidth": 1}
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="." if "validation" in key else "", **style)
        for (name, run), begin in zip(runs.items(), begins, strict=True):
            if len(runs) > 1:
                axis.axvline(begin + 0.5, color="grey", linewidth=0.5)
                axis.text(begin + 0.5, 1.0, name, transform=axis.get_xaxis_transform(), fontsize=7, va="bottom")
            for reset in run.summary["resets"]:
                axis.axvline(begin + reset["step"] + 0.5, color="firebrick", linestyle="--", linewidth=1)
        axis.set_title(title, pad=14, fontsize=10)
        axis.set_xlabel("step (dashed: hard reset)")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(keys: Mapping[str, str], runs: Mapping[str, RunResults]) -> Iterator[tuple[str, str]]:
    """Yield each key with its label.  A key that ends in * yields all matching keys except `reward/shaped`."""
    for key, label in keys.items():
        if not key.endswith("*"):
            yield key, label
            continue
        begin = key.removesuffix("*")
        names = {name for run in runs.values() for row in run.rows for name in row if name.startswith(begin)}
        yield from ((name, name.removeprefix(begin)) for name in sorted(names - {"reward/shaped"}))
