"""The live display of a run on standard error: one line per step, and the current activity."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl.files import Tail
from nemo_prorl.lifecycle.bottleneck import bottleneck

_PHASES = ("rollout", "logprobs", "updates", "ahead", "publish", "validate")
_OURS = re.compile(r"^(\S+ \S+?)(?:,\d+)? (INFO|WARNING|ERROR) nemo_prorl\S*: (.*)$")


class Progress:
    """A display that follows new lines of metrics.jsonl and the trainer's log."""

    def __init__(self, cfg: DictConfig, run_dir: Path, engines: bool = True) -> None:
        """Show that the processes start.  `engines`: whether engines are among them."""
        self._total = cfg.trainer.grpo.max_steps
        self._lines = Tail(run_dir / "metrics.jsonl")
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._status = (
            f"starting the trainer, which imports NeMo{', and the engines' if engines else ''} (on a laptop about 20 s)"
        )
        self._shown = 0.0
        if not self._terminal:  # a terminal shows the status with its seconds
            self._print(self._status)
        self._header = False

    def line(self, text: str) -> None:
        """Show a line of the trainer's log if it comes from this project; lines of NeMo appear in the log file only.

        In a file, such as that of a Slurm job, warnings have their time.
        """
        if match := _OURS.match(text):
            stamp = "" if self._terminal else f"{match[1]} "
            self._print(match[3] if match[2] == "INFO" else f"{stamp}{match[2]}: {match[3]}")
            if not self._header:
                self._status = match[3]

    def update(self) -> None:
        """Print new steps, and on a terminal the current activity."""
        for line in self._lines.read():
            self._step(line)
        if self._terminal and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            sys.stderr.write(f"\r\033[K[{self._shown - self._began:5.0f} s] {self._status}")
            sys.stderr.flush()

    def _step(self, m: dict[str, Any]) -> None:
        if not self._header:
            self._header = True
            self._print("    step  reward  held-out      kl  entropy  groups  tokens/s   s/step  where the time goes")
        seconds = m.get("time/step") or 0.0
        shares = ", ".join(
            f"{name} {100 * (m.get(f'time/{name}') or 0.0) / seconds:.0f} %"
            for name in _PHASES
            if seconds and (m.get(f"time/{name}") or 0.0) / seconds >= 0.005
        )
        words, heldout = (shares, bottleneck([m])), m.get("validation/all")
        self._print(
            f"{m['step']:4d}/{self._total:<4d} {_number(m.get('reward/all'), '6.3f')}"
            f"  {'' if heldout is None else format(heldout, '.3f'):>8} {_number(m.get('kl'), '8.1e')}"
            f" {_number(m.get('entropy'), '7.3f')}"
            f" {m.get('rollout/groups') or 0:4.0f}/{m.get('rollout/drawn') or 0:<4.0f}"
            f"{_number(m.get('time/rollout/tokens_per_s'), '8.0f')} {seconds:8.2f}  {'; '.join(filter(None, words))}"
        )
        self._status = f"step {m['step'] + 1} of {self._total}"

    def _print(self, text: str) -> None:
        clear = "\r\033[K" if self._terminal else ""
        sys.stderr.write(f"{clear}{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _number(value: float | None, form: str) -> str:
    width = int(re.match(r"\d+", form)[0])  # type: ignore[index]
    return format(value, form) if value is not None else "-".rjust(width)
