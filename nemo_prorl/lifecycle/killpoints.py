"""Points at which a test kills this process, to show that a run continues from any state on disk.

Inactive unless the environment variable PRORL_KILL_AT names a point: `NAME`, or
`NAME#k` for the k-th time (from 1) that the process reaches the point.  The process then
sends itself SIGKILL there, as the out-of-memory killer or a scheduler would.
"""

import os
import signal

from nemo_prorl.errors import ConfigError

VARIABLE = "PRORL_KILL_AT"
POINTS = (
    "checkpoint:begin",  # the snapshot is taken, nothing is on disk
    "checkpoint:tensors",  # weights, optimizer and reference are on disk
    "checkpoint:state",  # all files are on disk, under the temporary name
    "checkpoint:rename",  # just before the folder gets its final name
    "checkpoint:exchange",  # an older one of the same step is set aside; the new one is not yet in place
    "checkpoint:renamed",  # just after the folder got its final name
    "checkpoint:prune",  # before older checkpoints are removed
    "reset:intent",  # journalled
    "reset:reference",  # the reference policy is replaced
    "reset:optimizer",  # moments and step count are reset
    "reset:checkpointed",  # the checkpoint with the reset is complete
    "reset:committed",  # journalled
    "trial:records",  # the records of the arm without the reset are put away
    "trial:back",  # its checkpoints, too; the run has not yet gone back
    "trial:lost",  # the records of the arm with the reset are put away
    "trial:checkpoints back",  # the other arm's checkpoints are in place
    "trial:records back",  # its records, too
)


_WANTED, _, _PASSING = os.environ.get(VARIABLE, "").partition("#")
_passed = 0


def killpoint(name: str) -> None:
    """Kill this process with SIGKILL if PRORL_KILL_AT selects this point; otherwise do nothing."""
    global _passed
    assert name in POINTS, name
    if name == _WANTED:
        _passed += 1
        if _passed == int(_PASSING or 1):
            os.kill(os.getpid(), signal.SIGKILL)


if _WANTED and _WANTED not in POINTS:
    raise ConfigError(f"{VARIABLE}={_WANTED}: expected NAME or NAME#k (k from 1) with one of {', '.join(POINTS)}")
