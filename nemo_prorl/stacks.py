"""Stacks of all processes of a run, written to one file per node while something hangs.

Every Python process of a run calls `register` at its start.  The supervisor of the node then signals one process after
another, and each writes its own stacks (`launcher.stack_writer`).  Standard library only, because the engine imports
this file in another environment.
"""

import contextlib
import faulthandler
import os
import signal

VARIABLE = "PRORL_STACKS"  # path of the node's file; the supervisor sets it for all processes
SUPERVISOR = "PRORL_SUPERVISOR_PID"  # set for trainer ranks
SIGNAL = signal.SIGUSR2


def register() -> None:
    """Make SIGUSR2 append the stacks of all threads to the file that PRORL_STACKS names; nothing if it is not set.

    The handler is C code that needs no lock of the interpreter, so it also works while an event loop or a library
    hangs.  Forked processes inherit the handler, other child processes do not.
    """
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):  # a run works without the file, too
            faulthandler.register(SIGNAL, open(path, "a"), all_threads=True)  # noqa: SIM115  it keeps the file open


def request() -> None:
    """Ask the supervisor that started this rank for the stacks of all processes on the node."""
    if supervisor := os.environ.get(SUPERVISOR):
        with contextlib.suppress(OSError):
            os.kill(int(supervisor), SIGNAL)
