"""Breaks the code in small ways, one at a time, and lists the mutants that no quick test notices.

    make mutate ARGS="--sample 40 --seed 1 trainer lifecycle"      folders: see FOLDERS; none: all

Works in a copy of the tree.  Results are added to --results, and a mutant that is there is not tried again, so a run
can be interrupted and continued.  tests/mutants.txt has the reason of each survivor that nobody needs to notice.
"""

import argparse
import ast
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from mutation import in_fork  # type: ignore[import-not-found]  # noqa: E402

SMALL = [
    "tests/lifecycle/test_training_step.py",
    "tests/lifecycle/test_hard_resets.py",
    "tests/lifecycle/test_wiring.py",
    "tests/lifecycle/test_loop.py",
]
TIMES = ["tests/test_tracing.py", "tests/test_usage.py"]
RECORDS = [
    "tests/test_formats.py::test_summary_fits",
    "tests/launcher/test_events.py::test_a_tail_reads_whole_lines_that_came_since",
]
DATA = [
    *(f"tests/data/test_{name}.py" for name in ("blend", "hf_config", "hub", "laptop_model", "lengths", "parquet")),
    *(f"tests/data/test_{name}.py" for name in ("prepare_hub", "prepared", "prompt_forms", "records", "retirement")),
    "tests/rewards/test_open_thought.py",
]
REWARDS = [
    f"tests/rewards/test_{name}.py"
    for name in (
        *("interface", "discovery", "functions", "canaries", "second", "server", "client", "pool", "conformance"),
        *("scaffold", "cli", "reverify"),
    )
]
# Folder: its files, and the tests that belong to it.
FOLDERS: dict[str, tuple[str, list[str]]] = {
    "trainer": ("nemo_prorl/trainer.py", [*SMALL, "tests/rollout/test_report.py"]),
    "lifecycle": ("nemo_prorl/lifecycle/*.py", ["tests/lifecycle", "tests/planning/test_replay.py", *TIMES, *RECORDS]),
    "rollout": ("nemo_prorl/rollout/*.py", ["tests/rollout", *SMALL, *TIMES, "tests/lifecycle/test_stopping.py"]),
    "algorithms": ("nemo_prorl/algorithms/*.py", ["tests/algorithms", *SMALL]),
    "policy": ("nemo_prorl/policy/*.py", ["tests/policy"]),
    "rewards": ("nemo_prorl/rewards/*.py", REWARDS),
    "sandbox": ("packages/prorl-sandbox/prorl_sandbox/*.py", ["packages/prorl-sandbox/tests"]),
    "data": ("nemo_prorl/data/*.py", DATA),
    "scaling": ("nemo_prorl/report/scaling.py", ["tests/report/test_scaling.py", "tests/report/test_forecast.py"]),
}
MARKS = {"policy": "not slow and not vllm"}  # the others: not nemo, too
# Files of tests whose fixtures start ranks: these run the folder's code in processes that no coverage sees.
STARTED = {"policy": [f"tests/policy/test_{name}.py" for name in ("layouts", "wiring", "checkpoints", "half", "te")]}
OPPOSITE: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},  # codespell:ignore
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
# For comparisons with a float or a quotient, whose two sides are never equal by chance.
MIRRORED: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
SURVIVED = ("survived", "no test")
QUIET = ("_log.", "RECORDER.", "warnings.", "sys.stdout.", "logging.")  # calls that change no result


class Mutant(NamedTuple):
    """A replacement of the source between two positions (line from 1, column in bytes).

    `statement`: the line of a constant, without which `1 -> 2` would name all of a file's; otherwise empty.
    """

    file: str
    begin: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    statement: str = ""

    @property
    def key(self) -> str:
        key = f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"
        return f"{key}  in: {self.statement}" if self.statement else key

    def applied(self, source: bytes) -> bytes:
        """Return the source with the replacement."""
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        begin, end = (starts[line - 1] + column for line, column in (self.begin, self.end))
        return source[:begin] + self.new.encode() + source[end:]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    source = (root / file).read_text()
    found, tree, lines = [], ast.parse(source), source.encode().splitlines(keepends=True)
    floats = frozenset(
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is float
        for target in node.targets
        if isinstance(target, ast.Name)
    )
    for node in walk(tree):
        for old, new in changes(node, floats):
            begin, end = (old.lineno, old.col_offset), (old.end_lineno or 0, old.end_col_offset or 0)
            line = lines[old.lineno - 1].decode().strip() if isinstance(old, ast.Constant) else ""
            found.append(Mutant(file, begin, end, segment(lines, begin, end), new, line))
    return sorted(set(found))


def segment(lines: list[bytes], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two positions; `ast.get_source_segment` would split the whole source each time."""
    first, last = begin[0] - 1, end[0] - 1
    if first == last:
        return lines[first][begin[1] : end[1]].decode()
    return b"".join([lines[first][begin[1] :], *lines[first + 1 : last], lines[last][: end[1]]]).decode()


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose change can matter: no docstrings, annotations, decorators, errors' texts or log calls."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(
            node, ast.Raise | ast.JoinedStr
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            quiet = isinstance(child, ast.Expr) and ast.unparse(child).startswith((*QUIET, "'", '"', "..."))
            quiet |= isinstance(child, ast.keyword) and child.arg == "strict"  # of zip, beside equal lengths
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.AST) and not quiet and not checked:
                yield from walk(child)


def changes(node: ast.AST, floats: frozenset[str]) -> Iterator[tuple[Any, str]]:
    """Yield (node to replace, source of its replacement).  `floats`: the module's constants that are floats."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        table = MIRRORED if has_float(node, floats) and type(node.ops[0]) in MIRRORED else OPPOSITE
        yield node, ast.unparse(ast.Compare(node.left, [table[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        yield node, f"({ast.unparse(ast.BoolOp(OPPOSITE[type(node.op)](), node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
        yield node, f"({ast.unparse(ast.BinOp(node.left, OPPOSITE[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield node, repr(other(node.value))
    elif isinstance(node, ast.IfExp):
        yield node, f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.If | ast.While):
        yield node.test, f"not ({ast.unparse(node.test)})"
    else:
        yield from changed_statements(node)


def has_float(node: ast.Compare, floats: frozenset[str]) -> bool:
    """Return whether a comparison shows that it compares floats."""
    return any(
        isinstance(one, ast.Div)
        or (isinstance(one, ast.Constant) and type(one.value) is float)
        or (isinstance(one, ast.Name) and one.id in floats)
        for one in ast.walk(node)
    )


def changed_statements(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield statements to leave out, and returns that come early or without their value."""
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise) or is_field(node):
        yield node, "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        yield node, "return None"
    elif isinstance(node, ast.FunctionDef) and is_none(node.returns) and len(node.body) > 1:
        yield node.body[1] if isinstance(node.body[0], ast.Expr) else node.body[0], "return"


def other(value: bool | int | float) -> bool | int | float:
    """Return another constant."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 2 * value + 0.5


def is_field(node: ast.AST) -> bool:
    """Return whether a statement sets an attribute or an item, which may be left out."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return bool(targets) and isinstance(targets[0], ast.Attribute | ast.Subscript)


def is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# --- running tests ---------------------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> None:
    """Copy the files that git knows, and link the environments."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())


def run_tests(root: Path, tests: list[str], seconds: float) -> str:
    """Run tests in a fork of this process, which has imported what is slow to import; return the outcome."""

    def run() -> bool:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return session(root, tests, "", ["-x"]) == 0

    return in_fork(root, run)[0]


def session(root: Path, tests: list[str], marks: str, options: list[Any]) -> int:
    """Run pytest in a copy of the tree, with its modules and plugins; return its exit code."""
    os.chdir(root)
    folders = (root / "packages", root / "reward_plugins")
    plugins = [str(path) for folder in folders for path in sorted(folder.glob("*"))]
    sys.path[:0] = [str(root), *plugins]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *plugins])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    words = [word for word in options if isinstance(word, str)]
    import pytest

    words += ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-m", marks] if marks else []), *tests]
    return int(pytest.main(words, plugins=[plugin for plugin in options if not isinstance(plugin, str)]))


def try_folder(root: Path, folder: str, mutants: list[Mutant], report: Callable[[Mutant, str, float], None]) -> None:
    """Try the mutants of one folder: those of functions in one session, the others in a session each."""
    marks = MARKS.get(folder, "not slow and not vllm and not nemo")
    later, tests = root / "later.pickle", FOLDERS[folder][1]

    def try_functions() -> bool:
        from mutation import Session

        plugin = Session(root, mutants, report, STARTED.get(folder, ()))
        code = session(root, tests, marks, [plugin])
        later.write_bytes(pickle.dumps(plugin.later))
        return code == 0

    outcome, _ = in_fork(root, try_functions)
    if outcome != "survived":
        sys.exit(f"{folder}: the session of the tests failed; without a mutation they must pass")
    for mutant, chosen, seconds in pickle.loads(later.read_bytes()):
        began, source = time.monotonic(), (root / mutant.file).read_bytes()
        (root / mutant.file).write_bytes(mutant.applied(source))
        outcome = run_tests(root, chosen, 60.0 + 10.0 * seconds)
        (root / mutant.file).write_bytes(source)
        report(mutant, outcome, time.monotonic() - began)


def reasons() -> dict[str, str]:
    """Return the reasons of tests/mutants.txt: lines `KEY  # REASON`."""
    file = ROOT / "tests" / "mutants.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = (line.rpartition("  # ") for line in lines if "  # " in line)
    return {key.strip(): reason.strip() for key, _, reason in pairs}


def table(rows: list[dict[str, Any]]) -> str:
    """Return counts by folder, and the survivors with their reasons."""
    known, lines = reasons(), ["| folder | mutants | survived | with a reason |", "|---|---|---|---|"]
    for folder in FOLDERS:
        own = [row for row in rows if row["folder"] == folder]
        left = [row for row in own if row["outcome"] in SURVIVED]
        excused = sum(row["key"] in known for row in left)
        if own:
            lines.append(f"| {folder} | {len(own)} | {len(left)} ({len(left) / len(own):.0%}) | {excused} |")
    lines += ["", "| survivor | line | reason |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["key"], row["line"])):
        if row["outcome"] in SURVIVED:
            text = row["key"].replace("|", "\\|")
            lines.append(f"| `{text[:200]}` | {row['line']} | {known.get(row['key'], row['outcome'])} |")
    return "\n".join(lines) + "\n"


def read(results: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results, one for each mutant that was tried."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def main() -> None:
    """Try the mutants, and print the table of all results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", choices=[[], *FOLDERS], default=[])
    parser.add_argument("--sample", type=int, help="number of mutants, spread evenly over the folders; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="try those again that survived and have no reason")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    args = parser.parse_args()
    args.results = args.results.absolute()  # the session of the tests changes the working directory
    args.results.parent.mkdir(parents=True, exist_ok=True)
    every = {(m.key, m.begin[0]) for _, m in sample(ROOT, list(FOLDERS), None, random.Random(0))}
    rows = [row for row in read(args.results) if (row["key"], row["line"]) in every]  # the code may have changed
    if args.again:
        rows = [row for row in rows if row["outcome"] not in SURVIVED or row["key"] in reasons()]
    args.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tried = {(row["key"], row["line"]) for row in rows}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in ("numpy", "scipy", "torch", "torch.utils._pytree", "safetensors.torch", "omegaconf", "pytest"):
        __import__(module)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)  # pytest captures the other
    with tempfile.TemporaryDirectory(prefix="prorl-mutants-") as name:
        root = Path(name)
        copy_tree(root)
        chosen = sample(root, args.folders or list(FOLDERS), args.sample, random.Random(args.seed))
        new = [(folder, mutant) for folder, mutant in chosen if (mutant.key, mutant.begin[0]) not in tried]
        for folder in dict.fromkeys(folder for folder, _ in new):
            mine = [mutant for one, mutant in new if one == folder]

            def report(mutant: Mutant, outcome: str, seconds: float, folder: str = folder) -> None:
                row = {"folder": folder, "key": mutant.key, "line": mutant.begin[0], "outcome": outcome}
                with args.results.open("a") as file:
                    file.write(json.dumps({**row, "seconds": round(seconds, 1)}) + "\n")
                terminal.write(f"{folder}: {outcome} in {seconds:.1f} s: {mutant.begin[0]} {mutant.key[:150]}\n")

            known = reasons()
            for mutant in (mutant for mutant in mine if mutant.key in known):
                report(mutant, "survived", 0.0)  # as its reason says
            try_folder(root, folder, [mutant for mutant in mine if mutant.key not in known], report)
    sys.stdout.write(table(read(args.results)))


def sample(root: Path, folders: list[str], count: int | None, chance: random.Random) -> list[tuple[str, Mutant]]:
    """Return (folder, mutant), `count` of them, or all; the same for the same seed and source."""
    of_folder = {}
    for folder in folders:
        files = sorted(str(path.relative_to(root)) for path in root.glob(FOLDERS[folder][0]))
        found = [(folder, mutant) for file in files for mutant in mutants_of(root, file)]
        of_folder[folder] = chance.sample(found, len(found))
    most = max(map(len, of_folder.values()))
    turns = [found[turn] for turn in range(most) for found in of_folder.values() if turn < len(found)]
    return turns[:count]


if __name__ == "__main__":
    main()
