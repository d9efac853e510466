"""No process left behind: a small process that ends all others of an engine when its server or its launcher is gone.

vLLM starts an engine core and workers of its own and leaves them, with gigabytes, when its server is killed; a death
signal (prctl) in them is not enough, and they exist before any code of ours runs in them.  The guard is forked before
anything else, shares their process group, and needs nothing from them.

The resource tracker of Python's multiprocessing is left to end by itself: it takes away the shared memory and the
semaphores of the killed, which would stay in /dev/shm for good.

What it does not stop: the guard and the server killed in the same instant.  A supervisor kills the whole group.
Linux only (pidfd, kernel 5.3).
"""

import contextlib
import os
import select
import signal
import time

import psutil

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
    while (others := _others()) and time.monotonic() < end:
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.02)


def _others() -> list[psutil.Process]:
    """Living processes of this one's group; zombies do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found
