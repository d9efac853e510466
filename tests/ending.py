"""Long runs end with the session of tests that started them, however that ends."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before a fork, where a lock may be held


def end_with_session() -> None:
    """As a process's `preexec_fn`: the kernel kills it when the process that started it ends (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
