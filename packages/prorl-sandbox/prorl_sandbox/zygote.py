"""The sandbox process: confines itself once, then forks a child for each run of a program's tests.

It is a new process without the caller's memory.  It never reads programs or tests: it passes them to the child as
memory files.  Messages on its socket are JSON with descriptors; `->` is from this process to the caller:

    {"first", "count", "tests", "go_on", "watched", "limits": {...}}  + job, report, code, stdin..., stdout...
    -> {"watch": true} + the child's pidfd, only if "watched": the caller then counts the child's threads
    -> {"queued": true} + the child's pidfd: asks how long the child waited for a CPU; reply: {"queued_s": seconds}
    -> {"status": wait status, "killed": null or the reason, "used_s": seconds, "queued_s": seconds}
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from prorl_sandbox import confine, kernel, shims
from prorl_sandbox.runner import Files, InterpreterState, ProgramLimits, run_child
from prorl_sandbox.syscalls import build_filter

MAX_FDS, MESSAGE_BYTES = 250, 4096
STACK_MB, THREAD_STACK_MB = 512, 8
_POLL_S = 0.02  # seconds between checks of disk use, at levels where the kernel does not limit it
_IDLE = 0.05  # a child idle for longer than this share of its limit is checked for CPU starvation

_PRELOADED = (
    "abc array bisect cmath codecs collections collections.abc contextlib copy dataclasses datetime decimal enum"
    " fractions functools heapq io itertools json math numbers operator os pprint queue random re statistics string"
    " struct textwrap threading time traceback typing unicodedata warnings weakref"
    " encodings.utf_8 encodings.ascii encodings.latin_1"
)


@dataclass(frozen=True)
class SandboxPlan:
    """Settings of the sandbox, which the parent process sends.

    `folder`: for temporary files, unused at level "full"; `tmp_mb`: size limit of the temporary files; `uid`: user id
    for the programs.
    """

    level: str
    folder: str
    tmp_mb: int
    uid: int
    packages: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Confine this process, and run programs until the caller closes the socket; return the exit code.

    `arguments`: descriptor of the socket, process id of the parent, and the `SandboxPlan` as JSON.
    """
    sock = socket.socket(fileno=int(arguments[0]))
    kernel.die_with_parent(int(arguments[1]))
    plan = SandboxPlan(**json.loads(arguments[2]))
    for name in _PRELOADED.split():
        importlib.import_module(name)
    shims.add_builtins()
    kernel.set_default_thread_stack(THREAD_STACK_MB << 20)
    try:
        if plan.level == "full":
            confine.enter_namespaces()
            kernel.die_with_parent(int(arguments[1]))  # entering namespaces reset it
            return _serve_as_init(sock, plan)
        return _serve_confined(sock, plan)
    except OSError as error:
        return _fail(sock, error)


def _fail(sock: socket.socket, error: OSError) -> int:
    sock.send(json.dumps({"failed": str(error)}).encode())
    return 1


def _serve_as_init(sock: socket.socket, plan: SandboxPlan) -> int:
    """Fork a child, the first process of the new namespace, and let it serve; return the child's exit code."""
    alive, kept_open = os.pipe()
    init = os.fork()
    if init:
        sock.close()
        os.close(alive)
        return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF
    code = 1
    try:
        os.close(kept_open)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        code = _serve_confined(sock, plan, alive)
    except OSError as error:
        _fail(sock, error)
    finally:
        os._exit(code)


def _serve_confined(sock: socket.socket, plan: SandboxPlan, alive: int | None = None) -> int:
    """Confine this process, report it to the caller, and serve.  `alive`: a pipe that closes when the parent ends."""
    view = confine.host_view(tuple(plan.packages))
    folder, full = plan.folder, plan.level == "full"
    layers: dict[str, Any] = {"namespaces": full}
    if full:
        confine.build_root(view, plan.tmp_mb)
        folder = "/tmp"
        view = replace(view, packages=tuple(f"{confine.PACKAGES}/{os.path.basename(p)}" for p in view.packages))
    sys.meta_path.append(shims.Packages(view.packages))
    if plan.level != "none":
        layers["identity"] = confine.drop_identity(view, folder, plan.uid)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        layers["landlock"] = confine.restrict_files(view, folder)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user reset it
    empty_folder(folder)
    if alive is not None and select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.environ.update({"HOME": folder, "TMPDIR": folder, "PWD": folder})
    program = None if plan.level == "none" else build_filter(own_root=full)
    layers["seccomp"] = program is not None
    sock.send(json.dumps({"ready": layers}).encode())
    server = _ChildServer(sock, plan, folder, program)
    gc.collect()
    gc.disable()
    gc.freeze()
    server.serve()
    return 0


class _ChildServer:
    """Server that runs one child at a time."""

    def __init__(self, sock: socket.socket, plan: SandboxPlan, folder: str, program: bytes | None) -> None:
        self._sock, self._plan, self._folder, self._program = sock, plan, folder, program
        self._state = InterpreterState.now()
        self._watch = plan.level != "full"

    def serve(self) -> None:
        """Run children as ordered until the caller closes its end of the socket."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES, MAX_FDS)
            if not message:
                return
            order = json.loads(message)
            count = order["tests"]
            files = Files(fds[0], fds[1], fds[2], tuple(fds[3 : 3 + count]), tuple(fds[3 + count : 3 + 2 * count]))
            try:
                answer = self._run(order, files)
            finally:
                for fd in fds:
                    os.close(fd)
            self._sock.send(json.dumps(answer).encode())

    def _run(self, order: dict[str, Any], files: Files) -> dict[str, Any]:
        limits = ProgramLimits(**order["limits"])
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            try:
                run_child(
                    files,
                    order["first"],
                    order["count"],
                    order["go_on"],
                    limits,
                    self._program,
                    self._folder,
                    self._state,
                )
            finally:
                os._exit(121)
        pidfd = os.pidfd_open(pid)
        try:
            if order["watched"]:
                socket.send_fds(self._sock, [b'{"watch": true}'], [pidfd])
            clock = _Clock(self._sock, pid, pidfd, began, limits)
            killed = self._wait(pidfd, clock)
            used_s = clock.used_s()
        finally:
            os.close(pidfd)
        status = os.waitpid(pid, 0)[1]
        empty_folder(self._folder)
        return {"status": status, "killed": killed, "used_s": used_s, "queued_s": clock.queued_s}

    def _wait(self, pidfd: int, clock: "_Clock") -> str | None:
        """Wait for the end of the child; kill it at a limit.  Return the reason of the kill, or None."""
        reason = None
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._sock, select.POLLRDHUP)
        while reason is None:
            left = clock.left_s()
            wait = min(left, _POLL_S) if self._watch else left
            ready = dict(poll.poll(max(0.0, wait) * 1000))
            if pidfd in ready:
                return None
            if self._sock.fileno() in ready:
                reason = "caller"
            elif left <= 0:
                reason = clock.why_over()
            elif self._watch and _exceeds_disk(self._folder, self._plan.tmp_mb << 20):
                reason = "disk"
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return reason


class _Clock:
    """Clock of a child: the time that passed, without the time of waiting for a busy CPU.

    Otherwise, a good program could fail on a busy machine.  Only the caller can read the waiting time, from /proc, so
    the clock asks the caller, and only if the child was idle for long.  A program cannot lengthen its waiting time by
    its own threads: while one of them computes, it is not idle.
    """

    def __init__(self, sock: socket.socket, pid: int, pidfd: int, began: float, limits: ProgramLimits) -> None:
        self.queued_s = 0.0
        self._sock, self._pidfd, self._began, self._limits = sock, pidfd, began, limits
        self._cpu = (~pid << 3) | 2  # clock_getcpuclockid(3), which Python does not have

    def left_s(self) -> float:
        """Return the seconds that the child may still run; 0 or less: its time is over.

        Time in which the child waited for a CPU does not count, up to the limit of such time.
        """
        if self._left_s() <= 0:
            self._update_queued()
        return min(self._left_s(), self._limits.seconds + self._limits.queued_s - self._passed_s())

    def why_over(self) -> str:
        """Return how the child spent its time: computing ("time"), partly idle ("idle"), or without a CPU ("starved").

        A child is idle while it sleeps, and also while it is stopped from outside.
        """
        if self._left_s() > 0:
            return "starved"
        return "idle" if self._idle_s() - self.queued_s >= _IDLE * self._limits.seconds else "time"

    def used_s(self) -> float:
        """Return the seconds that the child has used, after its end."""
        self._update_queued()
        return self._limits.seconds - self._left_s()

    def _left_s(self) -> float:
        return self._limits.seconds - (self._passed_s() - self.queued_s)

    def _passed_s(self) -> float:
        return time.monotonic() - self._began

    def _idle_s(self) -> float:
        """Return the seconds in which the child did not compute, waiting for a CPU included."""
        return self._passed_s() - time.clock_gettime(self._cpu)

    def _update_queued(self) -> None:
        """Ask the caller how long the child waited for a CPU, if the child was idle for long."""
        idle = self._idle_s()
        if idle - self.queued_s < _IDLE * self._limits.seconds:
            return
        socket.send_fds(self._sock, [b'{"queued": true}'], [self._pidfd])
        if answer := self._sock.recv(MESSAGE_BYTES):
            self.queued_s = min(idle, json.loads(answer)["queued_s"])


def _exceeds_disk(folder: str, limit: int) -> bool:
    """Return whether the files in `folder` exceed `limit` bytes or a count of 4,096, or cannot be counted."""
    total = number = 0
    pending = [folder]
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except FileNotFoundError:
            continue
        except OSError:  # a path that is too long, or a locked folder
            return True
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                return True
            number += 1
            total += status.st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
        if total > limit or number > 4096:
            return True
    return False


def empty_folder(folder: str) -> None:
    """Empty `folder`, however deep or locked its contents are, and reset its mode and times; follow no link."""
    os.chmod(folder, 0o700)
    number, moved = 0, f".moved-{os.urandom(16).hex()}"  # a name that no program can have used
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):  # moved up, so that any depth works
                number += 1
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # moving a folder requires permission to write to it
                    os.rename(inner.path, os.path.join(folder, f"{moved}-{number}"))
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.utime(folder, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
