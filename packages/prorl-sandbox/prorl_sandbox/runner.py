"""The child of the sandbox process: runs a program's tests.  The caller trusts none of its reports.

A child runs its tests one after the other, until a test does not end cleanly.  The caller then starts a new child for
the tests without a final result.  Results go to the caller's memory files: standard output as written, and a report of
JSON lines: `{"compiled": true}`, `{"start": i}`, `{"end": i, "ok": bool, "more": bool, "detail": str, "result": str}`.
`more`: whether the next test may run in this child.  A child without tests reports `{"independent": bool}` after the
first line.
"""

import atexit
import builtins
import contextlib
import fcntl
import gc
import io
import json
import marshal
import os
import resource
import signal
import sys
import threading
import types
from _thread import _count as count_threads
from dataclasses import dataclass
from typing import Any

from prorl_sandbox import kernel, prelude, shims
from prorl_sandbox.independent import independent
from prorl_sandbox.syscalls import for_process

RECURSION_LIMIT = 1000  # Python's default
MAX_DEPTH = 200  # levels of nesting in a result
_AS_THEY_ARE = frozenset({int, float, str, bool, type(None)})


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one child.  `seconds`: time to compute or sleep; `queued_s`: additional seconds to wait for a CPU."""

    seconds: float
    queued_s: float
    memory_mb: int
    output_mb: int
    threads: int
    descriptors: int

    def apply(self) -> None:
        """Set the hard and soft limits of this process.  The limit on the stack, set by the caller, stays."""
        mb = 1 << 20
        values = {
            resource.RLIMIT_AS: self.memory_mb * mb,
            resource.RLIMIT_FSIZE: self.output_mb * mb,
            resource.RLIMIT_CPU: int(self.seconds) + 2,
            resource.RLIMIT_NOFILE: self.descriptors,
            resource.RLIMIT_NPROC: self.threads,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_RTPRIO: 0,
        }
        for kind, value in values.items():
            _, hard = resource.getrlimit(kind)
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))


@dataclass(frozen=True)
class Files:
    """File descriptors of a run: job, report and compiled code; for style `stdin`, input and output of each test."""

    job: int
    report: int
    code: int
    stdin: tuple[int, ...] = ()
    stdout: tuple[int, ...] = ()

    def all(self) -> set[int]:
        return {self.job, self.report, self.code, *self.stdin, *self.stdout}


class _Report:
    def __init__(self, fd: int) -> None:
        self._fd, self._write, self._dumps = fd, os.write, json.dumps

    def __call__(self, **line: Any) -> None:
        self._write(self._fd, self._dumps(line).encode() + b"\n")


@dataclass(frozen=True)
class InterpreterState:
    """The interpreter's state before any program ran.

    It is recorded before the fork, because recording it in each child would copy memory pages of the parent.
    """

    builtins: dict[str, Any]
    modules: dict[str, Any]
    path: list[str]
    environ: dict[str, str]

    @classmethod
    def now(cls) -> "InterpreterState":
        """Set the state that every program starts with, and return it."""
        sys.argv[:] = ["main.py"]
        os.umask(0o022)
        return cls(dict(builtins.__dict__), dict(sys.modules), list(sys.path), dict(os.environ))


def run_child(
    files: Files,
    first: int,
    count: int,
    go_on: bool,
    limits: ProgramLimits,
    program: bytes | None,
    folder: str,
    state: InterpreterState,
) -> None:
    """Confine this newly forked process, run tests `first` to `first + count - 1`, and exit.

    Args:
        count: Number of tests.  With 0, only report whether the program's tests are independent.
        go_on: Continue with the next test after an ordinary exception.
        program: The seccomp filter; None at level "none".
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    kernel.close_all_but({0, 1, 2, *files.all()})
    os.chdir(folder)
    limits.apply()
    if program is not None:
        kernel.install_filter(for_process(program, os.getpid()))
    job = _read_job(files.job)
    report = _Report(files.report)
    path = os.path.join(folder, "main.py")
    code = _compiled(job, files.code, report, path)
    if code is None:
        os._exit(0)
    gc.enable()
    if count == 0:
        report(independent=_is_independent(job))
    shims.add_for(job["source"], path)
    tests = _Tests(job, files, code, report, path, state)
    for position in range(count):
        if not tests.run(first + position, position, position == count - 1, go_on):
            break
    os._exit(0)


def _is_independent(job: dict[str, Any]) -> bool:
    """Return whether the tests cannot influence each other.

    The answer can be trusted: the judged program has not run yet, so it cannot have changed the job.
    """
    try:
        return not job["setup"] and independent(job["source"].removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False


def _read_job(fd: int) -> dict[str, Any]:
    size = os.fstat(fd).st_size
    job: dict[str, Any] = json.loads(os.pread(fd, size, 0))
    return job


def _compiled(job: dict[str, Any], fd: int, report: _Report, path: str) -> Any:
    """Return the compiled setup and program; None if the setup or the program does not compile.

    The first child writes the compiled code to the memory file `fd`, and later children read it from there.
    """
    if size := os.fstat(fd).st_size:
        report(compiled=True)
        return marshal.loads(os.pread(fd, size, 0))
    try:
        setup = compile(job["setup"], "setup.py", "exec", dont_inherit=True)
        code = setup, compile(job["source"].removeprefix("\ufeff"), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        report(compiled=False, detail=f"{type(error).__name__}: {error}"[:300])
        return None
    dumped = marshal.dumps(code)
    if os.write(fd, dumped) < len(dumped):  # the code exceeds the limit on file size: each child compiles
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
    else:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    report(compiled=True)
    return code


class _Tests:
    """The tests of a program, and the state of this process that is reset before each test."""

    def __init__(
        self, job: dict[str, Any], files: Files, code: Any, report: _Report, path: str, state: InterpreterState
    ) -> None:
        self.job, self.files, self.code, self.report, self.path = job, files, code, report, path
        self._folder = os.path.dirname(path)
        self._entries = os.listdir(self._folder)
        self._state = state
        own_open = builtins.open is not state.builtins["open"]  # replaced by `shims`
        self._builtins = {**state.builtins, "open": builtins.open} if own_open else state.builtins
        self._namespace: dict[str, Any] | None = None
        self._finalizes = any(word in job["source"] for word in ("__del__", "weakref", "finalize"))

    def run(self, index: int, position: int, last: bool, go_on: bool) -> bool:
        """Run a test and report its result.  Return whether the next test may run in this process.

        `index`: number of the test in the program.  `position`: number of the test in this child, from 0.  `go_on`: the
        next test may also run after an ordinary exception.
        """
        if position:
            self._renew()
        self.report(start=index)
        style = self.job["style"]
        result, detail, ordinary = "", "", True
        try:
            if style == "stdin":
                self._connect(position)
                self._main()
            elif style == "call":
                self._namespace = None if go_on else self._namespace  # go_on: new names for each test
                result = self._call(json.loads(self.job["inputs"][index]))
            else:
                self._namespace = None if go_on else self._namespace
                self._assert(self.job["inputs"][index])
        except SystemExit as error:
            if style != "stdin" or error.code not in (None, 0):
                detail = f"SystemExit: {error.code!r}"[:300]
        except BaseException as error:
            detail = _describe(error)
            ordinary = isinstance(error, Exception) and not isinstance(error, (RecursionError, MemoryError))
        if style == "stdin":
            ended = self._finish() if go_on or not detail else ""
            detail = detail or ended
        more = (not detail or (go_on and ordinary)) and (last or self._is_clean())
        try:
            self.report(end=index, ok=not detail, more=more, detail=detail, result=result)
        except OSError:  # the program closed the report: the exit status gives the result
            os._exit(1 if detail else 0)
        return more

    def _renew(self) -> None:
        """Undo changes of the previous test.  `_is_clean` detects changes that cannot be undone."""
        sys.setrecursionlimit(RECURSION_LIMIT)
        sys.settrace(None)
        sys.setprofile(None)
        os.umask(0o022)
        sys.path[:] = self._state.path
        sys.argv[:] = ["main.py"]
        if os.environ != self._state.environ:
            os.environ.clear()
            os.environ.update(self._state.environ)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _is_clean(self) -> bool:
        """Return whether the test left no change that the next test could notice."""
        try:
            moved = os.getcwd() != self._folder or os.listdir(self._folder) != self._entries
        except OSError:  # no free descriptor, or the folder is gone
            return False
        return (
            not moved
            and threading.active_count() == 1
            and count_threads() == 0  # includes threads of `_thread`
            and "concurrent.futures.thread" not in sys.modules  # executors accept no work after the exit functions ran
            and builtins.__dict__ == self._builtins
            and all(
                sys.modules.get(name) is module for name, module in self._state.modules.items() if name != "__main__"
            )
        )

    def _connect(self, position: int) -> None:
        sys.stdin = sys.stdout = sys.__stdin__ = sys.__stdout__ = None  # type: ignore[misc]  # closes the old streams
        os.dup2(self.files.stdin[position], 0)
        os.dup2(self.files.stdout[position], 1)
        sys.stdin = sys.__stdin__ = _stream(0, "r", "<stdin>")  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = _stream(1, "w", "<stdout>")  # type: ignore[misc]
        if getattr(sys.stderr, "closed", True):
            sys.stderr = sys.__stderr__ = _stream(2, "w", "<stderr>")  # type: ignore[misc]

    def _module(self, name: str) -> dict[str, Any]:
        module = types.ModuleType(name)
        module.__dict__["__builtins__"] = builtins
        module.__dict__["__file__"] = self.path
        sys.modules[name] = module
        return module.__dict__

    def _main(self) -> None:
        self._namespace = self._module("__main__")
        self._execute(self._namespace)

    def _execute(self, namespace: dict[str, Any]) -> None:
        """Execute the setup, then the program.  A setup that needs the program's names (in MBPP) runs last."""
        setup, program = self.code
        late = False
        try:
            exec(setup, namespace)
        except NameError:
            late = True
        exec(program, namespace)
        if late:
            exec(setup, namespace)

    def _finish(self) -> str:
        """End the program as Python would: join threads, call exit functions, flush.  Return the error text, or ''."""
        try:
            for end in reversed(getattr(threading, "_threading_atexits", ())):  # from concurrent.futures
                end()
            while waiting := [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]:
                waiting[0].join()
            atexit._run_exitfuncs()
            self._flush()
            sys.stdout = sys.__stdout__  # as the interpreter does; the program's own stream may need its names
            names = self._namespace or {}
            for name in [name for name, value in names.items() if hasattr(type(value), "__del__")]:
                del names[name]  # a finalizer may use the other names, so delete these first
            names.clear()
            if self._finalizes:
                gc.collect()
            self._flush()  # output of finalizers
        except BaseException as error:
            return _describe(error)
        return ""

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.__stdout__):
            with contextlib.suppress(ValueError):  # closed
                if stream is not None:
                    stream.flush()

    def _loaded(self) -> dict[str, Any]:
        """Return the program's global names with their values; run the program on the first call."""
        if self._namespace is None:
            namespace = self._module("solution")
            sys.modules["__main__"] = sys.modules["solution"]
            namespace["__builtins__"] = {**builtins.__dict__, **prelude.FOR_PROGRAMS}
            self._execute(namespace)
            self._namespace = namespace
        return self._namespace

    def _call(self, arguments: list[Any]) -> str:
        namespace = self._loaded()
        name = self.job["function"]
        owner = namespace.get("Solution")
        function = getattr(owner(), name) if owner is not None and hasattr(owner, name) else namespace.get(name)
        if function is None:
            raise NameError(f"the program has no function {name!r}")
        return _as_json(function(*arguments))

    def _assert(self, statement: str) -> None:
        names = {**self._loaded(), "__builtins__": {**builtins.__dict__, **prelude.FOR_TESTS}}
        exec(compile(statement, "test.py", "exec", dont_inherit=True), names)


def _stream(fd: int, mode: str, name: str) -> io.TextIOWrapper:
    """Return a standard stream with the same attributes as the interpreter's."""
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = name
    buffer: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(buffer, "utf-8", "backslashreplace" if fd == 2 else "strict")
    stream.__dict__["mode"] = mode  # same attribute as in the interpreter
    return stream


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return "an error that cannot be shown"


def _as_json(value: Any) -> str:
    """Return the result as JSON.  An instance of a subclass is read as its base type, without overridden methods."""
    return json.dumps(_plain(value, 0), allow_nan=False)


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"the result is nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool:
        return value
    for base, read in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if issubclass(kind, base):
            return read(value)
    if issubclass(kind, dict):
        return {_key(k): _plain(v, depth + 1) for k, v in dict.items(value)}
    if issubclass(kind, (list, tuple)):
        items = list(list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value))
        if _AS_THEY_ARE.issuperset(map(type, items)):
            return items
        return [_plain(item, depth + 1) for item in items]
    raise TypeError(f"the result holds a {kind.__name__}, which JSON cannot represent")


def _key(key: Any) -> str:
    if issubclass(type(key), str):
        return str.__str__(key)
    if key is None or type(key) in (bool, int, float):
        return json.dumps(key)
    raise TypeError(f"the result has a key of type {type(key).__name__}, which JSON cannot represent")
