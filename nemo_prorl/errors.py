"""The errors that users and other components can receive: one class per cause, each also a standard exception."""

from __future__ import annotations

import difflib
import errno
import json
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DAMAGED = ".damaged"  # suffix of the folder of a checkpoint that was set aside
# The end of a message about responses without a verdict.
UNJUDGED = "Fix: correct the reward function (docs/howto/reward_function.md) or the reward server, and start again"


class ProrlError(Exception):
    """Base class of the project's errors.  `exit_code` is the exit code of the `prorl` command on this error."""

    exit_code = 1


def disk_full(error: BaseException) -> str | None:
    """Return the message for a write that failed because the disk is full; None for any other error."""
    no_space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    signs = ("No space left on device", "PytorchStreamWriter failed")  # safetensors and torch raise other error types
    if not no_space and not any(sign in str(error) for sign in signs):
        return None
    reason = str(error).splitlines()[0]
    return (
        f"no space left on the disk, or the disk cannot be written ({reason}). The incomplete file is ignored and the"
        " last checkpoint is intact. Fix: free disk space and run the same command again"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suggestion with a space before it; empty if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


class ConfigError(ProrlError, ValueError):
    """Wrong use or configuration.  The message names the key, its value, and the expected value."""

    exit_code = 2


class UnfitMachine(ProrlError, RuntimeError):
    """A machine or cluster that cannot run the job.  The message names the missing part and how to get it."""

    exit_code = 3


class DataError(ProrlError, ValueError):
    """A bad data file.  The message names the file, the line and the field."""

    exit_code = 4


class StoppedCleanly(ProrlError):
    """A requested stop after which the run has saved its state; the same command continues the run."""

    exit_code = 75


class RolloutAbandoned(StoppedCleanly):
    """A requested stop during a rollout that took too long to finish; the responses of that rollout are discarded."""


class DeadlineExceeded(ProrlError, TimeoutError):
    """A wait that reached its deadline.  The message names the awaited thing and the seconds waited."""


class EngineFailure(ProrlError, ConnectionError):
    """A request to a rollout engine that was refused, was cut off, or got no reply.  A retry may help."""


class EngineRefused(ProrlError, ValueError):
    """A request that a rollout engine rejected as invalid (HTTP 4xx).  A retry cannot help."""


class RewardFailure(ProrlError, ConnectionError):
    """A response that the reward service could not judge.  It never counts as a reward of 0."""


class NonFiniteUpdate(ProrlError, ArithmeticError):
    """A loss or gradient norm that is inf or nan.  Weights and optimizer are as before the update."""


class RunFailed(ProrlError, RuntimeError):
    """A run that the Python API started and that ended with an error.  The message names its log."""


class CheckpointError(ProrlError, RuntimeError):
    """A checkpoint that cannot be written, found, or continued with this code and configuration."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint with a file that is missing, truncated or changed.  The one before it may still be whole."""

    def __init__(self, folder: Path, fault: str) -> None:
        """`fault` has the name of the file."""
        super().__init__(
            f"{fault}. Fix: mv {quote(str(folder))} {quote(f'{folder}{DAMAGED}')}; the same command then continues from"
            " the checkpoint before it"
        )


class ResetFailure(ProrlError, RuntimeError):
    """A hard reset that did not work: the KL divergence to the new reference is not about 0 on the next step."""


def json_fault(error: Exception) -> str:
    """Describe the error in a line of JSON with its character.  The parser's own line number would mislead."""
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
