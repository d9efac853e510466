"""Tries mutants in a pytest session: measures which tests reach which lines, then breaks one function at a time.

Everything is imported once.  For each mutant a fork of the session gets the changed functions, and runs only the tests
that reach the changed lines until one fails, first those that are quick or have noticed many mutants.  The file is
changed, too, for the processes that tests start.  A mutant outside of functions (a constant, a default) is tried in a
session of its own.
"""

import ast
import gc
import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import pytest
from _pytest.runner import runtestprotocol

PATIENCE_S = 10.0  # and ten times what a test usually takes: then it hangs
MOST_SECONDS = 40.0  # CPU time of the tests of one mutant; the slowest are left out
STARTS = re.compile(r"\bsubprocess\.|create_subprocess_exec")  # what starts processes
FUNCTION = 0x1  # CO_OPTIMIZED: the code object is a function's, not a class's or module's


class Reached(NamedTuple):
    """What one test needs and does: seconds, those of CPU time, and the lines (file, line) that it runs.

    `shared`: seconds that its shared fixtures took, which another test may have begun.
    """

    seconds: float
    cpu: float
    lines: frozenset[tuple[str, int]]
    shared: float = 0.0


# --- which tests reach which lines -----------------------------------------------------------------------------------


class Coverage:
    """A plugin that notes which lines of some files each test runs, with those of the fixtures that it shares."""

    def __init__(self, files: Sequence[str]) -> None:
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=list(files))
        self.test, self.shared = "", dict[str, float]()  # a shared fixture -> the seconds it took
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        began = time.monotonic()
        self.coverage.switch_context(fixturedef.argname)
        try:
            return (yield)
        finally:
            self.shared[fixturedef.argname] = time.monotonic() - began
            self.coverage.switch_context(self.test)

    def run(self, item: Any, following: Any) -> tuple[bool, tuple[float, float]]:
        """Run a test; return whether it passed, its seconds, and those of CPU time with its processes."""
        self.test, began, before = item.nodeid, time.monotonic(), sum(os.times()[:4])
        self.coverage.switch_context(self.test)
        reports = runtestprotocol(item, log=False, nextitem=following)
        failed = [report.longreprtext for report in reports if report.failed]
        if failed:
            sys.stderr.write(f"{item.nodeid}:\n{failed[0][-2000:]}\n")
        return not failed, (time.monotonic() - began, sum(os.times()[:4]) - before)

    def lines(self) -> dict[str, set[tuple[str, int]]]:
        """Return the lines that ran, by test or shared fixture."""
        self.coverage.stop()
        data, found = self.coverage.get_data(), defaultdict(set)
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    found[context].add((file, line))
        return found


def statement_lines(source: str) -> dict[int, tuple[int, int]]:
    """Return, for each line, the first and last line of the simple statement or header that the line is in."""
    spans: dict[int, tuple[int, int]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            for line in range(node.lineno, max(last, node.lineno) + 1):
                before = spans.get(line)
                if before is None or last - node.lineno <= before[1] - before[0]:
                    spans[line] = (node.lineno, max(last, node.lineno))
    return spans


# --- changing functions in a running process -------------------------------------------------------------------------


def changed_functions(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]] | None:
    """Return pairs of the functions' codes that differ between two modules; None if other code differs, too."""
    pairs: list[tuple[CodeType, CodeType]] = []
    return iter(pairs) if _compare(old, new, pairs) else None


def _compare(old: CodeType, new: CodeType, pairs: list[tuple[CodeType, CodeType]]) -> bool:
    if len(old.co_consts) != len(new.co_consts):
        return False
    for one, other in zip(old.co_consts, new.co_consts, strict=True):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            if one.co_flags & FUNCTION:
                if one != other:
                    pairs.append((one, other))
                    _nested(one, other, pairs)
            elif not _compare(one, other, pairs):
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return old.co_code == new.co_code and old.co_names == new.co_names


def _nested(old: CodeType, new: CodeType, pairs: list[tuple[CodeType, CodeType]]) -> None:
    inner = [[code for code in outer.co_consts if isinstance(code, CodeType)] for outer in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for one, other in zip(*inner, strict=True):
            pairs.append((one, other))
            _nested(one, other, pairs)


def live_functions(files: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return the functions that exist now, by the file, name and first line of their code."""
    found = defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename in files:
            code = function.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(function)
    return dict(found)


# --- the session -----------------------------------------------------------------------------------------------------


class Session:
    """A plugin that tries mutants in place of running the tests.

    `later`: (mutant, node ids, their seconds) of the mutants that need a session of their own.  `started`: see Tests.
    """

    def __init__(
        self, root: Path, mutants: Sequence[Any], report: Callable[[Any, str, float], None], started: Collection[str]
    ) -> None:
        self.root, self.mutants, self.report, self.started = root, mutants, report, started
        self.later: list[tuple[Any, list[str], float]] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        files = sorted({mutant.file for mutant in self.mutants})
        beside = {path for file in files for path in (self.root / file).parent.glob("*.py")}  # see Tests._starters
        names = {str(path): str(path.relative_to(self.root)) for path in beside}
        reached = measured(list(items.values()), names, self.root)
        functions = live_functions({str(self.root / file) for file in files})
        tests = Tests(self.root, reached, self.started)
        for mutant in self.mutants:
            source = (self.root / mutant.file).read_bytes()
            swaps = self._swaps(mutant, source, functions)
            chosen = tests.of(mutant)
            if not chosen:
                self.report(mutant, "no test", 0.0)
            elif swaps is None:
                self.later.append((mutant, chosen, sum(reached[node].seconds for node in chosen)))
            else:
                (self.root / mutant.file).write_bytes(mutant.applied(source))
                run = [(items[node], reached[node].seconds + reached[node].shared) for node in chosen]
                noticed = self.root / "noticed"
                self.report(mutant, *in_fork(self.root, lambda s=swaps, r=run, n=noticed: _trial(s, r, n)))  # type: ignore[misc]
                if noticed.is_file():
                    tests.kills[noticed.read_text()] += 1
                    noticed.unlink()
                (self.root / mutant.file).write_bytes(source)
        return True

    def _swaps(self, mutant: Any, source: bytes, functions: dict[Any, list[FunctionType]]) -> Any:
        """Return (function, its changed code), or None where that is not enough."""
        name = str(self.root / mutant.file)
        old = compile(source, name, "exec", dont_inherit=True)
        pairs = changed_functions(old, compile(mutant.applied(source), name, "exec", dont_inherit=True))
        swaps = []
        for one, other in pairs or ():
            for function in functions.get((name, one.co_qualname, one.co_firstlineno), []):
                if len(function.__code__.co_freevars) != len(other.co_freevars):
                    return None
                swaps.append((function, other))
        return swaps if pairs is not None and swaps else None


class Tests:
    """The tests that a mutant has to pass, in their order.  `kills`: mutants that each test has noticed.

    `started`: files of tests whose fixtures start processes that run the code; all their tests come last.
    """

    __test__ = False

    def __init__(self, root: Path, reached: dict[str, Reached], started: Collection[str] = ()) -> None:
        self.root, self.reached, self.kills = root, reached, Counter[str]()
        self.started = [node for node in reached if node.split("::")[0] in started]
        self.of_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        for node, one in reached.items():
            for line in one.lines:
                self.of_line[line].add(node)

    def of(self, mutant: Any) -> list[str]:
        """Return node ids: tests that reach the changed statement; if none does, those that reach its file at all.

        The latter are for constants: there, the tests that reach a line which names the constant come alone.  For code
        that only other processes run, the tests that reach a file which starts these processes come, too, and those in
        files that name the module, which may start them.
        """
        source = (self.root / mutant.file).read_text()
        begin, end = statement_lines(source).get(mutant.begin[0], (mutant.begin[0], mutant.end[0]))
        body = source.splitlines()
        chosen = set().union(*(self.of_line[mutant.file, line] for line in range(begin, end + 1)))
        if not chosen and (match := re.match(r"\s*(\w+)(:.*)? = ", body[begin - 1])):
            named = [k for k, line in enumerate(body, 1) if re.search(rf"\b{match[1]}\b", line)]
            chosen = set().union(*(self.of_line[mutant.file, line] for line in named))
        if not chosen:
            files = {mutant.file} | self._starters(mutant.file)
            chosen = {node for node, one in self.reached.items() if any(file in files for file, _ in one.lines)}
            chosen |= set(self._naming(mutant.file))
        ordered = sorted(chosen, key=lambda node: self.reached[node].cpu / (1 + self.kills[node]))
        seconds, most = 0.0, list[str]()
        for node in ordered:
            seconds += self.reached[node].cpu
            if seconds <= MOST_SECONDS or not most:
                most.append(node)
        return most + [node for node in self.started if node not in most]

    def _starters(self, file: str) -> set[str]:
        """Return the files of the folder that start processes and name a module, directly or through others."""
        folder, found, new = Path(file).parent, set[str](), {Path(file).stem}
        package = re.escape(".".join(folder.parts))
        text = {path.stem: path.read_text() for path in (self.root / folder).glob("*.py")}
        while new:
            found |= new
            named = rf"\b{package}(\.| import (.*, )?)({'|'.join(map(re.escape, found))})\b"
            new = {stem for stem in text if re.search(named, text[stem])} - found
        return {str(folder / f"{stem}.py") for stem in found if STARTS.search(text[stem])}

    def _naming(self, file: str) -> Iterator[str]:
        """Yield the tests in files that name a module."""
        module = file.removesuffix(".py").replace("/", ".")
        words = (module, f"{module.rpartition('.')[2]}")
        naming: dict[str, bool] = {}
        for node in self.reached:
            path = node.split("::")[0]
            if path not in naming:
                naming[path] = any(re.search(rf"\b{re.escape(w)}\b", (self.root / path).read_text()) for w in words)
            if naming[path]:
                yield node


def measured(items: list[Any], names: dict[str, str], root: Path) -> dict[str, Reached]:
    """Run all tests in a fork; return what each reached.  Exits if one fails."""
    file = root / "reached.pickle"

    def measure() -> bool:
        plugin, seconds, passed = Coverage(list(names)), {}, True
        items[0].config.pluginmanager.register(plugin)
        for item, following in zip(items, [*items[1:], None], strict=True):
            good, seconds[item.nodeid] = plugin.run(item, following)
            passed &= good
        lines, reached = plugin.lines(), {}
        for item in items:
            shared = plugin.shared.keys() & item._fixtureinfo.name2fixturedefs.keys()
            own = set().union(*(lines[context] for context in (item.nodeid, *shared)))
            own_lines = frozenset((names[name], k) for name, k in own)
            waits = sum(plugin.shared[name] for name in shared)
            reached[item.nodeid] = Reached(*seconds[item.nodeid], own_lines, waits)
        file.write_bytes(pickle.dumps(reached))
        return passed

    outcome, _ = in_fork(root, measure)
    if outcome != "survived":
        sys.exit("the tests must pass without a mutation")
    found: dict[str, Reached] = pickle.loads(file.read_bytes())
    return found


def _trial(swaps: list[tuple[FunctionType, CodeType]], run: list[tuple[Any, float]], noticed: Path) -> bool:
    """Change the functions and run tests; return whether all pass, or write which failed into a file.

    A test that takes too long ends the process.
    """
    for function, code in swaps:
        function.__code__ = code
    items = [item for item, _ in run]
    for (item, seconds), following in zip(run, [*items[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S + 10.0 * seconds)
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            noticed.write_text(item.nodeid)
            return False
    return True


def in_fork(root: Path, work: Callable[[], bool]) -> tuple[str, float]:
    """Do something in a fork of this process; return "survived" if it returns True, and the seconds it took."""
    began, folder = time.monotonic(), root / "temporary"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            folder.mkdir(exist_ok=True)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
            code = 0 if work() else 1
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)  # what its tests left
    except ProcessLookupError:
        pass
    shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    outcome = {0: "survived", -signal.SIGALRM: "timeout"}.get(code, "killed")
    return outcome, time.monotonic() - began
