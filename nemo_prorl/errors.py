"""The errors that cross a boundary of ours.  Each names the boundary, and is a standard exception too."""

from __future__ import annotations

import errno


class ProrlError(Exception):
    """Base of all errors that a user can meet; `exit_code` is what the `prorl` command leaves with."""

    exit_code = 1


def disk_full(error: BaseException) -> str | None:
    """What to say where a write failed for want of room, whichever library failed; None for any other error."""
    out_of_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    signs = ("No space left on device", "PytorchStreamWriter failed")  # safetensors and torch have errors of their own
    if not out_of_room and not any(sign in str(error) for sign in signs):
        return None
    reason = str(error).splitlines()[0]
    return (
        f"no space left on the disk, or it cannot be written ({reason}); what was half written does not count, the last"
        " checkpoint stands: free some room and run the same command again"
    )


class ConfigError(ProrlError, ValueError):
    """Wrong use or configuration: names the key, the value, and what would be right."""

    exit_code = 2


class UnfitMachine(ProrlError, RuntimeError):
    """This machine or cluster cannot run the job: names what is missing and how to get it."""

    exit_code = 3


class DataError(ProrlError, ValueError):
    """A data file is bad: names the file, the line and the field."""

    exit_code = 4


class StoppedCleanly(ProrlError):
    """The run was asked to stop and saved its state: the same command continues it."""

    exit_code = 75


class RolloutAbandoned(StoppedCleanly):
    """The run was asked to stop and a rollout took too long: it was given up, and nothing of it counts."""


class DeadlineExceeded(ProrlError, TimeoutError):
    """A wait ran out: names what was waited for and for how long."""


class EngineFailure(ProrlError, ConnectionError):
    """A rollout engine refused, broke off or did not answer a request."""


class EngineRefused(ProrlError, ValueError):
    """A rollout engine called a request wrong (HTTP 4xx): sending it again cannot help."""


class RewardFailure(ProrlError, ConnectionError):
    """The reward service could not judge a response.  Never a reward of 0."""


class NonFiniteUpdate(ProrlError, ArithmeticError):
    """Loss or gradient norm is inf or nan; weights and optimizer are those of before the step."""


class CheckpointError(ProrlError, RuntimeError):
    """A checkpoint cannot be written, found, or continued by this code and configuration."""


class ResetFailure(ProrlError, RuntimeError):
    """A hard reset left something other than what it promises (KL about 0 on the next step)."""
