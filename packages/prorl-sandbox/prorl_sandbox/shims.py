"""Replacements for parts of Python that the sandbox removes: `exit`, /dev/stdin, the program's own file, locks.

The replacements are only a convenience: they protect nothing, and a program may undo them.
"""

import _sitebuiltins
import builtins
import contextlib
import importlib.util
import io
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

_STANDARD = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_BY_NUMBER = re.compile(r"/(?:dev|proc/self)/fd/(\d{1,3})")


def add_builtins() -> None:
    """Add the builtins of the module `site`, which is not imported because it searches for installed packages."""
    names: dict[str, Any] = {name: _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)") for name in ("exit", "quit")}
    names["copyright"] = _sitebuiltins._Printer("copyright", sys.copyright)
    names["credits"] = _sitebuiltins._Printer("credits", "See www.python.org for more information.")
    names["license"] = _sitebuiltins._Printer("license", "See https://www.python.org/psf/license/")
    names["help"] = _sitebuiltins._Helper()
    builtins.__dict__.update(names)


def add_for(source: str, path: str) -> None:
    """Add the replacements that the source of a program needs.  `path`: the program's `__file__`."""
    for name in ("chmod", "utime"):
        setattr(os, name, _ignoring_refusal(getattr(os, name), os.path.dirname(path)))
    linecache.cache[path] = (lambda: source,)  # for `inspect` and tracebacks
    if "__file__" in source:
        with open(path, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(source)
    if "/dev/std" in source or "/fd/" in source:
        builtins.open = io.open = _with_standard_files(io.open)
        os.open = _with_standard_files(os.open)
    if "multiprocessing" in source:  # multiprocessing's locks and shared values need /dev/shm
        with contextlib.suppress(ImportError):
            importlib.import_module("_multiprocessing").__dict__["SemLock"] = SemLock
            if "Value" in source or "Array" in source:  # only threads share values: use the folder for temporary files
                importlib.import_module("multiprocessing.heap").__dict__["Arena"]._dir_candidates = []


class Packages:
    """A finder of the allowed third-party packages, and of no other module in their folders."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = {os.path.basename(folder): folder for folder in folders}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        folder = self._folders.get(name) if path is None else None
        if folder is None:
            return None
        start = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, start, submodule_search_locations=[folder])


def _with_standard_files(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a version of the open function `real` that opens /dev/stdin and similar paths without /proc."""

    def open(file: Any, *arguments: Any, **options: Any) -> Any:
        path = os.fspath(file) if isinstance(file, os.PathLike) else file
        if isinstance(path, str):
            number = _STANDARD.get(path)
            if number is None and (named := _BY_NUMBER.fullmatch(path)):
                number = int(named[1])
            if number is not None:
                fd = os.dup(number)
                return fd if real is _os_open else real(fd, *arguments, **options)
        return real(file, *arguments, **options)

    return open


_os_open = os.open


def _ignoring_refusal(real: Callable[..., None], folder: str) -> Callable[..., None]:
    """Return a version of `os.chmod` or `os.utime` that ignores PermissionError for paths in `folder`.

    Some sandbox levels forbid these calls.  Functions that copy or unpack files call them last and would fail.
    """

    def change(path: Any, *arguments: Any, **options: Any) -> None:
        try:
            real(path, *arguments, **options)
        except PermissionError:
            if isinstance(path, int) or not os.path.realpath(os.fsdecode(path)).startswith(folder + "/"):
                raise

    return change


class SemLock:
    """A replacement for `_multiprocessing.SemLock` that works only between the threads of one process."""

    SEM_VALUE_MAX = 2**31 - 1

    def __init__(self, kind: int, value: int, maxvalue: int, *_: object) -> None:
        self.kind, self.maxvalue, self.handle, self.name = kind, maxvalue, 0, None
        self._value, self._owner = value, 0
        self._held = 0
        self._changed = threading.Condition()

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        me = threading.get_ident()
        with self._changed:
            again = self.kind == 0 and self._held > 0 and self._owner == me
            if not again:
                if not self._changed.wait_for(lambda: self._value > 0, timeout if block else 0):
                    return False
                self._value -= 1
            self._owner, self._held = me, self._held + 1
            return True

    def release(self) -> None:
        with self._changed:
            if self.kind == 0 and not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            self._held -= 1
            if self.kind == 0 and self._held > 0:
                return
            if self._value >= self.maxvalue:
                raise ValueError("semaphore or lock released too many times")
            self._value += 1
            self._changed.notify()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_mine(self) -> bool:
        return self._held > 0 and self._owner == threading.get_ident()

    def _count(self) -> int:
        return self._held

    def _get_value(self) -> int:
        return self._value

    def _is_zero(self) -> bool:
        return self._value == 0

    def _after_fork(self) -> None:
        pass
