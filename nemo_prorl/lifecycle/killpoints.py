"""Points at which a test kills this process, to show that a run continues from whatever is on disk then.

Inert unless the environment variable PRORL_KILL_AT names a point: `NAME`, or `NAME#k` for its k-th passing (from 1).
The process then sends itself SIGKILL there, as the out-of-memory killer or a scheduler would.
"""

import os
import signal

from nemo_prorl.errors import ConfigError

VARIABLE = "PRORL_KILL_AT"
POINTS = (
    "checkpoint:begin",  # the snapshot is taken, nothing is on disk
    "checkpoint:tensors",  # weights, optimizer and reference are
    "checkpoint:state",  # every file is, under the temporary name
    "checkpoint:rename",  # just before the folder gets its own name
    "checkpoint:exchange",  # only where one of the same step stood: it is set aside, the new one not yet in its place
    "checkpoint:renamed",  # just after the folder got its name
    "checkpoint:prune",  # before older checkpoints are removed
    "reset:intent",  # journalled
    "reset:reference",  # the reference policy is the new one
    "reset:optimizer",  # moments and step count are new
    "reset:checkpointed",  # the checkpoint that holds the reset is complete
    "reset:committed",  # journalled
)


_WANTED, _, _PASSING = os.environ.get(VARIABLE, "").partition("#")
_passed = 0


def killpoint(name: str) -> None:
    """Do nothing, or kill this process with SIGKILL.  A name that is not in POINTS is an error in the caller."""
    global _passed
    assert name in POINTS, name
    if name == _WANTED:
        _passed += 1
        if _passed == int(_PASSING or 1):
            os.kill(os.getpid(), signal.SIGKILL)


if _WANTED and _WANTED not in POINTS:
    raise ConfigError(f"{VARIABLE}={_WANTED}: expected NAME or NAME#k (k from 1) with one of {', '.join(POINTS)}")
