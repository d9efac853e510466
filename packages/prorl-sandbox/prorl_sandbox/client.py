"""The caller's side of the sandbox: sends programs to the sandbox process, reads the results and repeats failed tests.

Tests run one after the other in one child, which costs one fork.  The result of a child's first test is final.  The
result of a later test is final if it passed; if it failed, the test runs once more alone, so that no test can spoil it.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prorl_sandbox import folders, processes
from prorl_sandbox.processes import QUEUED_S
from prorl_sandbox.programs import Program, ProgramRun, SandboxFailure
from prorl_sandbox.runner import ProgramLimits
from prorl_sandbox.zygote import MESSAGE_BYTES, STACK_MB, SandboxPlan

TESTS_PER_CHILD = 100  # two descriptors per test; a message can carry 253
OUTPUT_MB_PER_CHILD = 512  # for all tests of a child: with large outputs, fewer tests share a child
KEPT_OUTPUT = 1 << 20  # bytes: a wrong output is kept only up to this size
EXTRA_TIME = 0.5  # share of the time limit that repeated tests may take together, at most EXTRA_TIME_S
EXTRA_TIME_S = 2.0
START_S, ANSWER_S = 30.0, 5.0
THREADS, DESCRIPTORS = 256, 512
_WATCH_S = 0.01
_FIRST_UID = 1_000_000_000  # users without files, one per sandbox, so that thread limits are separate
_ROOT = str(Path(__file__).resolve().parents[1])
# The folder comes last: next to an installed package there may be packages with names of the standard library.
_START = "import sys; sys.path.append(sys.argv.pop(1)); from prorl_sandbox import zygote; " + (
    "sys.path.pop(); sys.exit(zygote.main(sys.argv[1:]))"
)
_KNOWN = Program("print(int(input()) + 1)", "stdin", ("41\n",), time_limit_s=5.0)


class _Broken(Exception):
    """The sandbox process ended or does not answer."""


@dataclass
class _Child:
    """How one child ended, with its times, reports and outputs.

    `ends`, `started` and `outputs` are not trusted: the program runs in the child and can fake them.
    """

    status: int  # wait status of the process
    killed: str | None  # why the sandbox killed it, such as "time"; None: the sandbox did not kill it
    used_s: float
    queued_s: float  # seconds of waiting for a busy CPU, not included in used_s
    compiled: bool | None = None  # whether the program compiles; None: not reported
    detail: str = ""  # error of the compiler
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)  # report on the end of a test, by number of the test
    started: int = -1  # largest number of a test that was reported as started
    independent: bool = False  # tests cannot influence each other; reported only by a child without tests
    outputs: dict[int, bytes] = field(default_factory=dict)  # by number of the test

    @property
    def ended_well(self) -> bool:
        return self.killed is None and self.status == 0


class Sandbox:
    """A sandbox process at one level, restarted when it breaks.  Not for use by several threads."""

    def __init__(self, level: str, tmp_mb: int = 64, packages: Sequence[str] = ()) -> None:
        self.level = level
        self._packages = tuple(place for name in packages for place in places_of(name))
        self._tmp_mb = tmp_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.layers: dict[str, Any] = {}
        self.folder = ""

    def start(self) -> None:
        """Start the process and wait until it has confined itself.  Raises SandboxFailure."""
        try:
            self._start()
        except (_Broken, OSError) as error:
            self.close()
            raise SandboxFailure(f"sandbox level {self.level!r} does not start: {error}") from error

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its folder."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            if self._process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                self._process.kill()
            self._process.wait()
        if self.folder:
            folders.remove(self.folder)
        self._process = self._socket = None
        self.folder = ""

    def _start(self) -> None:
        self.folder = "" if self.level == "full" else folders.make()
        plan = SandboxPlan(self.level, self.folder, self._tmp_mb, _FIRST_UID + os.getpid(), self._packages)
        own_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = getattr(sys, "_base_executable", None) or sys.executable
        arguments = [str(zygote_end.fileno()), str(os.getpid()), json.dumps(asdict(plan))]
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        room = STACK_MB << 20 if hard == resource.RLIM_INFINITY else min(STACK_MB << 20, hard)
        self._socket = own_end
        try:
            resource.setrlimit(resource.RLIMIT_STACK, (room, hard))  # inherited at start, for deep recursion
            self._process = subprocess.Popen(
                [python, "-S", "-s", "-P", "-B", "-c", _START, _ROOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(zygote_end.fileno(),),
                env=environment,
                cwd="/",
            )
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
            zygote_end.close()
        first = self._receive(START_S)
        if "failed" in first:
            raise _Broken(first["failed"])
        self.layers = first["ready"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._socket is not None
        if not select.select([self._socket], [], [], seconds)[0]:
            raise _Broken(f"no answer within {seconds:g} s")
        message = self._socket.recv(MESSAGE_BYTES)
        if not message:
            raise _Broken("its process ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def run(self, program: Program, passes: Callable[[int, bytes], bool]) -> ProgramRun:
        """Run the program on each of its inputs.  If the sandbox process breaks, restart it and try once more.

        Args:
            passes: Called with the index of an input and its output; returns whether the output is right.  If an
                output is wrong and the process ran other inputs before, the input is run again alone, because the
                other inputs may have caused the error.

        Raises:
            SandboxFailure: The process cannot be restarted; both tries broke it, and a known program fails, too; or
                the program waited over QUEUED_S for a busy CPU, or to be compiled.
        """
        for _ in range(2):
            try:
                return _ProgramRun(self, program, passes).result()
            except SandboxFailure:  # also an OSError
                raise
            except (_Broken, OSError):
                self.close()
                self.start()
        if not self.is_sound():
            raise SandboxFailure(f"sandbox level {self.level!r} fails to run a trivial test program")
        reason = "the sandbox's process ended twice on this program"
        return ProgramRun((None,) * len(program.inputs), (reason,) * len(program.inputs))

    def is_sound(self) -> bool:
        """Return whether a known program gives its known output."""
        try:
            run = _ProgramRun(self, _KNOWN, lambda _, output: output == b"42\n", trusted=True).result()
        except (_Broken, OSError):
            return False
        return run.outputs == (b"42\n",)

    def run_child(
        self,
        program: Program,
        first: int,
        count: int,
        job: int,
        code: int,
        seconds: float,
        queued_s: float,
        go_on: bool,
    ) -> _Child:
        """Run tests `first` to `first + count - 1` in one child.  Raises _Broken and OSError.

        Args:
            count: Number of tests.  With 0, the child reports only whether the program's tests are independent.
            job: Memory file with the program and its inputs.
            code: Memory file for the compiled program, written by the first child.
            go_on: Continue with the next test after an ordinary exception.
        """
        if self._socket is None:
            self._start()
        assert self._socket is not None
        report = os.memfd_create("report")
        pairs: list[tuple[int, int]] = []
        try:
            if program.style == "stdin":
                for text in program.inputs[first : first + count]:
                    pairs.append((_memory_file("stdin", text), os.memfd_create("stdout")))
            descriptors = self._descriptor_limit(3 + 2 * len(pairs), program.output_mb)
            limits = ProgramLimits(
                seconds, queued_s, program.memory_mb, program.output_mb, self._thread_limit(), descriptors
            )
            order = {"first": first, "count": count, "tests": len(pairs), "limits": asdict(limits)}
            order |= {"watched": self._watches, "go_on": go_on}
            fds = [job, report, code, *(pair[0] for pair in pairs), *(pair[1] for pair in pairs)]
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            child = self._await_child(seconds + queued_s + ANSWER_S)
            _read_report(child, _contents(report, program.output_mb), first, count)
            for index, (_, stdout) in enumerate(pairs, first):
                if index in child.ends or index == child.started:
                    child.outputs[index] = _contents(stdout, program.output_mb)
        finally:
            for fd in (report, *(fd for pair in pairs for fd in pair)):
                os.close(fd)
        return child

    def _descriptor_limit(self, in_use: int, output_mb: int) -> int:
        """Return the limit on a child's open descriptors; `in_use`: descriptors for the files of the tests.

        A deleted file uses disk space as long as it is open, and cannot be counted.  At level "full" the kernel limits
        the disk space; at the other levels, a low limit on descriptors must limit the space of such files.
        """
        return DESCRIPTORS if self.level == "full" else min(DESCRIPTORS, in_use + 3 + max(32, 256 // output_mb))

    @property
    def _watches(self) -> bool:
        """Return whether this process must count the child's threads.

        If the sandbox has a separate user, the kernel limits the threads (RLIMIT_NPROC) instead.
        """
        return not self.layers.get("identity")

    def _thread_limit(self) -> int:
        return THREADS if not self._watches else 8 * THREADS + processes.tasks_of_user()

    def _await_child(self, seconds: float) -> _Child:
        """Wait until the child of the sandbox process ends, and return its results; kill a child with too many threads.

        Meanwhile the sandbox process may ask how long the child waited for a CPU, and gets the answer.

        Raises:
            _Broken: The sandbox process ended, or the child did not end within `seconds`.
        """
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        watched, killed = -1, False
        try:
            while True:
                left = deadline - time.monotonic()
                if select.select([self._socket], [], [], max(0.0, left if watched < 0 else min(left, _WATCH_S)))[0]:
                    message, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
                    if not message:
                        raise _Broken("its process ended")
                    answer = json.loads(message)
                    if "watch" in answer:
                        watched = fds[0]
                    elif "queued" in answer:
                        self._socket.send(
                            json.dumps({"queued_s": processes.queued_s(processes.pid_behind(fds[0]))}).encode()
                        )
                        os.close(fds[0])
                    else:
                        child = _child_of(answer)
                        child.killed = "threads" if killed else child.killed
                        return child
                elif left <= 0:
                    raise _Broken(f"no answer within {seconds:g} s")
                if watched >= 0 and not killed and processes.threads_behind(watched) > THREADS:
                    killed = True
                    signal.pidfd_send_signal(watched, signal.SIGKILL)
        finally:
            if watched >= 0:
                os.close(watched)


def _child_of(answer: dict[str, Any]) -> _Child:
    if "failed" in answer:
        raise _Broken(answer["failed"])
    return _Child(**answer)


def places_of(package: str) -> list[str]:
    """Return the folder of an installed package and the folder of its wheel's libraries; [] if not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = os.path.realpath(spec.submodule_search_locations[0])
    return [folder, *(libs for libs in (f"{folder}.libs",) if os.path.isdir(libs))]


def _memory_file(name: str, text: str) -> int:
    """Return the descriptor of a sealed, read-only memory file that contains `text`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _contents(fd: int, mb: int) -> bytes:
    """Return the content of a memory file, at most `mb` MiB."""
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read(mb << 20)


def _printable(text: str) -> str:
    """Return the first 300 characters of a program's text, with spaces for unprintable characters."""
    return "".join(char if char.isprintable() else " " for char in text[:300])


def _read_report(child: _Child, text: bytes, first: int, count: int) -> None:
    """Read the valid lines of a report into `child`; the program may have written other lines between them."""
    for line in text.split(b"\n", 4 * count + 16)[: 4 * count + 16]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError, MemoryError):
            continue
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("compiled"), bool):
            child.compiled = entry["compiled"] if child.compiled is None else child.compiled
            child.detail = _printable(str(entry.get("detail", "")))
        if count == 0:
            child.independent = entry.get("independent") is True
        index = entry.get("start", entry.get("end"))
        if type(index) is not int or not first <= index < first + count:
            continue
        if "start" in entry:
            child.started = max(child.started, index)
        elif index <= child.started and index not in child.ends:
            child.ends[index] = entry
            if isinstance(entry.get("result"), str):
                child.outputs[index] = entry["result"].encode("utf-8", "surrogatepass")


class _ProgramRun:
    """The run of a program on all its inputs, in as many children as needed."""

    def __init__(
        self, box: Sandbox, program: Program, passes: Callable[[int, bytes], bool], trusted: bool = False
    ) -> None:
        self._box, self._program, self._passes, self._trusted = box, program, passes, trusted
        number = len(program.inputs)
        self._outputs: list[bytes | None] = [None] * number
        self._details = ["not run"] * number
        self._to_repeat: list[int] = []  # tests that failed after others in a child, to be repeated
        self._independent: bool | None = None
        self._idle_retries = 1
        self._retries = 2  # after kills by others: the kernel kills a process that takes too much memory
        self._left_s = program.time_limit_s
        self._extra_s = min(EXTRA_TIME_S, EXTRA_TIME * program.time_limit_s)
        self._queue_left_s = QUEUED_S

    def result(self) -> ProgramRun:
        job = {
            "source": self._program.source,
            "style": self._program.style,
            "function": self._program.function,
            "setup": self._program.setup,
            "inputs": [] if self._program.style == "stdin" else self._program.inputs,
        }
        job_fd, code_fd = (
            _memory_file("job", json.dumps(job)),
            os.memfd_create("code", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
        )
        try:
            return self._all(job_fd, code_fd)
        finally:
            os.close(job_fd)
            os.close(code_fd)

    def _all(self, job: int, code: int) -> ProgramRun:
        at, number = 0, len(self._program.inputs)
        while at < number:
            count = min(TESTS_PER_CHILD, max(1, OUTPUT_MB_PER_CHILD // self._program.output_mb), number - at)
            go_on = bool(self._independent)
            child = self._child(at, count, job, code, max(0.01, self._left_s), go_on)
            if child.compiled is not True:
                return self._finished(refused=self._why_not_compiled(child))
            if child.killed in ("time", "idle") or child.used_s >= self._left_s:
                return self._finished(over_time=True)
            self._left_s -= child.used_s
            at = self._take(child, at, count)
            if self._to_repeat or at < number:
                self._ask_independent(job, code)
        self._extra_s += self._left_s
        self._repeat(job, code)
        return self._finished()

    def _child(self, first: int, count: int, job: int, code: int, seconds: float, go_on: bool = False) -> _Child:
        """Run tests in a child.  Run them again if something else may be at fault for the child's end.

        Something other than the sandbox killed the child, or the child was idle until its time was over: it may have
        been stopped from outside.  A program can do both to itself, so one that fails each time has failed.

        Raises:
            SandboxFailure: The child waited too long for a busy CPU.
        """
        while True:
            child = self._box.run_child(self._program, first, count, job, code, seconds, self._queue_left_s, go_on)
            if child.killed == "starved":
                raise SandboxFailure(f"the machine is too busy: a program waited over {QUEUED_S:g} s for a CPU")
            self._queue_left_s = max(0.0, self._queue_left_s - child.queued_s)
            if child.killed == "idle" and self._idle_retries:
                self._idle_retries -= 1
            elif self._retries and _killed_by_others(child):
                self._retries -= 1
            else:
                return child

    def _repeat(self, job: int, code: int) -> None:
        """Repeat the failed tests that another test in the same child may have spoiled, and record their new results.

        If the tests of the program are independent, they are repeated together in one child, otherwise each in its own
        child.  Independent tests of style "stdin" are not repeated, because each of them already ran in a new
        namespace.  Independent tests of the other styles are repeated, because they shared one namespace.
        """
        pending = self._to_repeat
        if self._independent and self._program.style == "stdin":
            return
        if self._independent and len(pending) > 1:
            first, count = pending[0], pending[-1] - pending[0] + 1
            child = self._child(first, count, job, code, self._extra_s, go_on=True)
            self._extra_s -= child.used_s
            for index in [index for index in pending if index in child.ends]:
                self._record(child, index)
                pending.remove(index)
        for index in pending:
            if self._extra_s <= 0:
                break
            child = self._child(index, 1, job, code, self._extra_s)
            self._extra_s -= child.used_s
            self._record_final(child, index)

    def _ask_independent(self, job: int, code: int) -> None:
        """Determine in a child, once per program, whether tests can influence each other."""
        if self._independent is None:
            child = self._child(0, 0, job, code, 1.0)
            self._independent = child.ended_well and child.independent

    def _finished(self, over_time: bool = False, refused: str = "") -> ProgramRun:
        return ProgramRun(tuple(self._outputs), tuple(self._details), over_time, refused)

    def _why_not_compiled(self, child: _Child) -> str:
        if child.compiled is False:
            return child.detail
        self._raise_if_broken(child)
        if child.killed == "idle":  # the compiler waits only for the machine, such as for a disk that stands still
            raise SandboxFailure("the machine is too busy: a program waited too long to be compiled")
        return "compiling took too long" if child.killed == "time" else "the compiler broke on it"

    def _take(self, child: _Child, first: int, count: int) -> int:
        """Record the results of a child's tests, up to a test that must run again in a new child.

        Returns:
            The index of the test to run next.
        """
        for index in range(first, first + count):
            end = child.ends.get(index)
            if index == first:
                self._record_final(child, index)
            elif end is None or (end.get("ok") is not True and not (self._independent and end.get("more") is True)):
                return self._retry_from(child, index)
            else:
                self._record(child, index)
                if not self._passed(index):
                    self._to_repeat.append(index)
            if end is None or end.get("more") is not True:
                return index + 1
        return first + count

    def _retry_from(self, child: _Child, index: int) -> int:
        """Give the program more time, because test `index` must run again in a new child; return `index`.

        The time given is half of the seconds that the old child used, but not more than is left of the extra time for
        repetitions.
        """
        back = min(self._extra_s, child.used_s / 2)
        self._extra_s -= back
        self._left_s += back
        return index

    def _record_final(self, child: _Child, index: int) -> None:
        """Record the final result of a test that ran alone or first in its child."""
        end = child.ends.get(index)
        self._record(child, index)
        if end is None:  # the process ended in this test; `os._exit(0)` after printing is a valid end
            self._raise_if_broken(child)
            if not child.ended_well or self._program.style != "stdin" or child.started != index:
                self._outputs[index] = None
                self._details[index] = _how_it_ended(child)

    def _record(self, child: _Child, index: int) -> None:
        end = child.ends.get(index, {"ok": True})
        good = end.get("ok") is True
        empty = b"" if self._program.style != "call" else None
        output = child.outputs.pop(index, empty) if good else None
        if output is not None and len(output) > KEPT_OUTPUT and not self._passes(index, output):
            output = None
        self._outputs[index] = output
        self._details[index] = "" if good else _printable(str(end.get("detail")))

    def _passed(self, index: int) -> bool:
        output = self._outputs[index]
        return output is not None and self._passes(index, output)

    def _raise_if_broken(self, child: _Child) -> None:
        """Raise _Broken if something other than the sandbox killed the child, and a known program fails, too."""
        if _killed_by_others(child) and not self._trusted and not self._box.is_sound():
            raise _Broken("the sandbox also fails to run a known program")


def _killed_by_others(child: _Child) -> bool:
    killed = os.WIFSIGNALED(child.status) and os.WTERMSIG(child.status) == signal.SIGKILL
    return killed and child.killed is None


def _how_it_ended(child: _Child) -> str:
    if child.killed is not None:
        return dict.fromkeys(("time", "idle"), "over the time limit").get(
            child.killed, f"over the limit of {child.killed}"
        )
    if os.WIFSIGNALED(child.status):
        return f"ended by {signal.Signals(os.WTERMSIG(child.status)).name}"
    return f"ended with status {os.waitstatus_to_exitcode(child.status)}"
