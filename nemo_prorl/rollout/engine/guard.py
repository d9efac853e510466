"""No process left behind: a small process that ends all others of an engine when its server or its launcher is gone.

vLLM starts an engine core and workers of its own and leaves them, with gigabytes, when its server is killed; a death
signal (prctl) in them is not enough, and they exist before any code of ours runs in them.  The guard is forked before
anything else, shares their process group, and needs nothing from them.

The resource tracker of Python's multiprocessing is left to end by itself: it takes away the shared memory and the
semaphores of the killed, which would stay in /dev/shm for good.

What it does not stop: the guard and the server killed in the same instant.  A supervisor kills the whole group.
Standard library only, Linux only (pidfd, kernel 5.3).
"""

import contextlib
import os
import select
import signal
import time

TRACKER_S = 5.0  # for the resource trackers to clean up


class Guard:
    """The guard of this process, which becomes the leader of a process group of its own."""

    def __init__(self, parent: int | None) -> None:
        """Forks the guard.  `parent`: a process without which this one must not go on, such as the launcher.

        Call it before threads are started.  Raises ProcessLookupError if the parent is gone already.
        """
        watched = [os.pidfd_open(os.getpid())]
        if parent is not None:
            watched.append(os.pidfd_open(parent))
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        self.pid = os.fork()
        if self.pid == 0:
            _keep_watch(watched)
        for descriptor in watched:
            os.close(descriptor)

    @property
    def lost(self) -> bool:
        """Whether the guard itself was killed: the engine should stop, as nothing would end its processes."""
        if self.pid < 0:
            return True
        try:
            ended, _ = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            ended = self.pid
        if ended:
            self.pid = -1
        return bool(ended)


def _keep_watch(watched: list[int]) -> None:
    """Waits for the end of any watched process, then kills the group, itself included.  Does not return."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # a stop of the group is the server's affair
        select.select(watched, [], [])
        _end_all_but_trackers()
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)


def _end_all_but_trackers() -> None:
    """Kills the group's processes, then gives the trackers, whose pipes are closed by that, time to clean up."""
    end = time.monotonic() + TRACKER_S
    while time.monotonic() < end:
        others = [pid for pid in _members(os.getpgrp()) if pid != os.getpid()]
        if not others:
            return
        for pid in others:
            if b"multiprocessing.resource_tracker" not in _read(f"/proc/{pid}/cmdline"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _members(group: int) -> list[int]:
    """Living processes of a process group; zombies do not count."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()  # state, parent, group, ...
            if len(fields) > 2 and fields[0] != b"Z" and int(fields[2]) == group:
                found.append(int(name))
    return found


def _read(path: str) -> bytes:
    """Empty for a process that has just ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
