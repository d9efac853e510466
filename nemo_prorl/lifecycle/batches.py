"""The stored batches of a run: the groups that a step trains on, in RUN/batches/step-N.safetensors.

The files have the format of `rollout.group_arrays`, and a thread writes them while the step trains.  The trainer's
log-probabilities follow in trainer-N.safetensors: `gap_M`, in the order of the batch's `token_M`, their differences
from the engine's in one byte, which keeps them to 6 %, or to 0.0001 nats near 0.  The newest
`trainer.grpo.keep_batches` are kept, and those of each `trainer.grpo.keep_batches_every`-th step.  `prorl control RUN
keep-batches` moves those that are there to RUN/batches/kept, where they stay.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from nemo_prorl.config import GRPOConfig
from nemo_prorl.errors import DataError
from nemo_prorl.files import new_file
from nemo_prorl.lifecycle.retention import step_of
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import Group

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_WAIT_S = 60.0  # seconds for the last file at the end of a process
_GAP_UNITS = 16.0  # a difference of 1 nat in the units of `gap_M`: float8 resolves 2**-9 of them near 0


class Batches:
    """A writer of a run's batches, on rank 0."""

    def __init__(self, run_dir: Path, config: GRPOConfig, alarm: Callable[[int, str], None]) -> None:
        """Write nothing yet.  `alarm` is called with the step and a text if a batch cannot be written."""
        self.folder = run_dir / "batches"
        self._config, self._alarm = config, alarm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._last: Future[None] | None = None
        self._told = False

    def store(self, step: int, groups: Sequence[Group]) -> None:
        """Write the batch of a step in the background, and then remove those that need not stay."""
        if self.stores(step):
            self._submit(batch_file(self.folder, step), partial(encode, list(groups)))

    def store_gaps(self, step: int, gaps: Sequence[NDArray[np.uint8]]) -> None:
        """Write the `gap_bytes` of all responses of a step that is stored, in the background."""
        self._submit(_trainer_file(self.folder, step), lambda: save({"gap_M": np.concatenate(gaps)}))

    def stores(self, step: int) -> bool:
        """Return whether the batch of this step is stored."""
        return self._config.keep_batches > 0 or self._stays(step)

    def _submit(self, file: Path, content: Callable[[], bytes]) -> None:
        self._last = self._thread.submit(self._write, file, content)

    def _stays(self, step: int) -> bool:
        every = self._config.keep_batches_every
        return every is not None and step % every == 0

    def _write(self, file: Path, content: Callable[[], bytes]) -> None:
        step = step_of(file)
        try:
            self.folder.mkdir(exist_ok=True)
            with new_file(file) as temporary:
                temporary.write_bytes(content())
            for old in self.folder.glob("*.safetensors"):
                if step_of(old) <= step - self._config.keep_batches and not self._stays(step_of(old)):
                    old.unlink(missing_ok=True)
        except Exception as error:  # a full disk, for example, must not end the training
            if not self._told:
                cause = getattr(error, "strerror", None) or error
                self._alarm(step, f"{file} was not written: {cause}")
            self._told = True

    def cut(self, step: int) -> None:
        """Remove the batches after `step`, at the start of a process: their steps are computed again."""
        for file in self.folder.glob("*.safetensors"):
            if step_of(file) > step:
                file.unlink(missing_ok=True)

    def keep(self) -> list[int]:
        """Move the batches that are there to the folder `kept`; return their steps."""
        self.wait()
        kept = self.folder / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        return sorted({step_of(file.rename(kept / file.name)) for file in self.folder.glob("*.safetensors")})

    def wait(self) -> None:
        """Wait until the last batch is written, at most a minute."""
        if self._last is not None and wait([self._last], _WAIT_S).not_done:
            _log.warning("%s: the last batch was not written within %g s", self.folder, _WAIT_S)


def gap_bytes(gap: "Tensor") -> "Tensor":
    """Return differences in nats as uint8 of the same shape: 16 times as much as float8, at most 28 nats."""
    import torch

    most = torch.finfo(torch.float8_e4m3fn).max
    return (gap * _GAP_UNITS).clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)


def batch_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def _trainer_file(folder: Path, step: int) -> Path:
    return folder / f"trainer-{step:06d}.safetensors"


def stored_batch(run_dir: Path, step: int) -> Path | None:
    """Return the file of a step's batch; None if it was not kept."""
    folders = run_dir / "batches", run_dir / "batches" / "kept"
    return next((file for folder in folders if (file := batch_file(folder, step)).exists()), None)


def read_batch(run_dir: Path, step: int) -> list[Group]:
    """Return the groups that a step trained on.  Raises DataError if they were not kept, or cannot be read."""
    file = stored_batch(run_dir, step)
    if file is None:
        there = sorted(map(step_of, (run_dir / "batches").rglob("step-*.safetensors")))
        raise DataError(
            f"{run_dir / 'batches'}: step {step} has no stored batch (stored: {', '.join(map(str, there)) or 'none'})."
            " Fix: keep more with trainer.grpo.keep_batches=N, or `prorl control RUN keep-batches` while they are there"
        )
    try:
        return decode(file.read_bytes())
    except Exception as error:  # safetensors raises an error type of its own
        raise DataError(f"{file} cannot be read: {error}") from error


def read_trainer_logprobs(run_dir: Path, step: int, groups: Sequence[Group]) -> list[list[float]] | None:
    """Return the trainer's log-probabilities of each response's tokens; None if they were not measured or not kept.

    Args:
        groups: result of `read_batch`.
    """
    stored = stored_batch(run_dir, step)
    if stored is None or not (file := _trainer_file(stored.parent, step)).exists():
        return None
    import torch

    engine = [response.logprobs for group in groups for response in group.responses]
    gap_M = torch.from_numpy(load(file.read_bytes())["gap_M"]).view(torch.float8_e4m3fn).float() / _GAP_UNITS
    ends = accumulate(map(len, engine), initial=0)
    parts = (gap_M[begin:end].tolist() for begin, end in pairwise(ends))
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(engine, parts, strict=True)]
