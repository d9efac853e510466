"""Guard process that ends all other processes of an engine when the engine's server or launcher is gone.

vLLM starts an engine core and workers.  Without the guard, these processes would keep running after the server is
killed, with gigabytes of memory.  A death signal (prctl) is not enough, because the processes exist before any of our
code runs in them.  The guard is forked first, is in the same process group, and needs no code in the processes.

The resource tracker of Python's multiprocessing is left to end on its own, because it removes the shared memory and
semaphores of killed processes, which would otherwise stay in /dev/shm.

If guard and server are killed at the same instant, the guard cannot help; a supervisor must then kill the whole group.
Linux only (pidfd, kernel 5.3).
"""

import contextlib
import os
import select
import signal
import time

import psutil

TRACKER_S = 5.0  # seconds for the resource trackers to clean up


class Guard:
    """The guard of the calling process, which becomes the leader of a new process group."""

    def __init__(self, parent: int | None) -> None:
        """Fork the guard.  Call this before any thread is started.

        Args:
            parent: pid of a process, such as the launcher, whose end must end this process, too.

        Raises:
            ProcessLookupError: the parent has already ended.
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
        """Return whether the guard has ended.  Then the engine should stop: nothing else would end its processes."""
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
    """Wait until one of the watched processes (pidfds) ends, then kill the process group, including this process."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the server handles signals to the group
        select.select(watched, [], [])
        _end_all_but_trackers()
    finally:
        os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)


def _end_all_but_trackers() -> None:
    """Kill the group's other processes except resource trackers; give the trackers at most 5 s to end."""
    end = time.monotonic() + TRACKER_S
    while (others := _others()) and time.monotonic() < end:
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        time.sleep(0.02)


def _others() -> list[psutil.Process]:
    """Return the other living processes of this process group, without this process and without zombies."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                processes += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return processes
