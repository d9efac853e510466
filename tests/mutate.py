"""Breaks the code in small ways, one at a time, and lists the mutants that no quick test notices.

    make mutate ARGS="--sample 40 --seed 1 trainer lifecycle"      folders: see FOLDERS; none: all

Works in a copy of the tree.  Results are added to --results, and a mutant that is there is not tried again, so a run
can be interrupted and continued.  tests/mutants.txt has the reason of each survivor that nobody needs to notice.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "tests/lifecycle/test_training_step.py",
    "tests/lifecycle/test_hard_resets.py",
    "tests/lifecycle/test_wiring.py",
]
# Folder: its files, and the tests that belong to it.
FOLDERS: dict[str, tuple[str, list[str]]] = {
    "trainer": ("nemo_prorl/trainer.py", [*SMALL, "tests/rollout/test_report.py"]),
    "lifecycle": ("nemo_prorl/lifecycle/*.py", ["tests/lifecycle", "tests/planning/test_replay.py"]),
    "rollout": ("nemo_prorl/rollout/*.py", ["tests/rollout", *SMALL]),
    "algorithms": ("nemo_prorl/algorithms/*.py", ["tests/algorithms", *SMALL]),
    "policy": ("nemo_prorl/policy/*.py", ["tests/policy"]),
    "rewards": ("nemo_prorl/rewards/**/*.py", ["tests/rewards"]),
    "data": ("nemo_prorl/data/*.py", ["tests/data"]),
    "scaling": ("nemo_prorl/report/scaling.py", ["tests/report/test_scaling.py", "tests/report/test_forecast.py"]),
}
MARKS = {"policy": "not slow and not vllm"}  # the others: not nemo, too
OPPOSITE: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},  # codespell:ignore
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}
QUIET = ("_log.", "RECORDER.", "warnings.", "sys.stdout.", "logging.")  # calls that change no result


class Mutant(NamedTuple):
    """A replacement of the source between two positions (line from 1, column in bytes)."""

    file: str
    begin: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str

    @property
    def key(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

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
    found = []
    for node in walk(ast.parse(source)):
        for old, new in changes(node):
            begin, end = (old.lineno, old.col_offset), (old.end_lineno or 0, old.end_col_offset or 0)
            found.append(Mutant(file, begin, end, ast.get_source_segment(source, old) or "", new))
    return sorted(set(found))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes whose change can matter: no docstrings, annotations, decorators, errors' texts or log calls."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(
            node, ast.Raise | ast.JoinedStr
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            quiet = isinstance(child, ast.Expr) and ast.unparse(child).startswith((*QUIET, "'", '"'))
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.AST) and not quiet and not checked:
                yield from walk(child)


def changes(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield (node to replace, source of its replacement)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, ast.unparse(ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators))
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


def tests_of(root: Path, folder: str, file: str) -> list[str]:
    """Return the tests of a file of a folder: first those that name its module, because they notice most."""
    module = file.removesuffix(".py").replace("/", ".")
    paths = [root / path for path in FOLDERS[folder][1]]
    files = [path for part in paths for path in (sorted(part.glob("test_*.py")) if part.is_dir() else [part])]
    named = [
        path
        for path in files
        if module in path.read_text() or f"import {module.rpartition('.')[2]}" in path.read_text()
    ]
    return [str(path.relative_to(root)) for path in dict.fromkeys([*named, *files])]


def run_tests(root: Path, tests: list[str], marks: str, seconds: float) -> tuple[str, float]:
    """Run tests in a fork of this process, which has imported what is slow to import; return outcome and seconds."""
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(root)
        plugins = [str(path) for path in sorted((root / "reward_plugins").iterdir())]
        sys.path[:0] = [str(root), *plugins]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *plugins])
        sys.dont_write_bytecode = True
        with open(root / "output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, *tests])))
    while time.monotonic() - began < seconds:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", 1: "killed", 5: "no test"}.get(code, "killed"), time.monotonic() - began
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timeout", time.monotonic() - began


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
        left = [row for row in own if row["outcome"] in ("survived", "no test")]
        excused = sum(row["key"] in known for row in left)
        if own:
            lines.append(f"| {folder} | {len(own)} | {len(left)} ({len(left) / len(own):.0%}) | {excused} |")
    lines += ["", "| survivor | line | reason |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["key"], row["line"])):
        if row["outcome"] in ("survived", "no test"):
            text = row["key"].replace("|", "\\|")
            lines.append(f"| `{text[:200]}` | {row['line']} | {known.get(row['key'], row['outcome'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try the mutants, and print the table of all results so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", choices=[[], *FOLDERS], default=[])
    parser.add_argument("--sample", type=int, help="number of mutants, spread evenly over the folders; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutants.jsonl")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.is_file() else []
    tried = {(row["key"], row["line"]) for row in rows}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in ("numpy", "scipy", "torch", "torch.utils._pytree", "safetensors.torch", "omegaconf", "pytest"):
        __import__(module)
    with tempfile.TemporaryDirectory(prefix="prorl-mutants-") as name:
        root = Path(name)
        copy_tree(root)
        chosen = sample(root, args.folders or list(FOLDERS), args.sample, random.Random(args.seed))
        usual: dict[str, float] = {}  # seconds of a folder's tests
        for number, (folder, mutant) in enumerate(chosen, 1):
            if (mutant.key, mutant.begin[0]) in tried:
                continue
            marks = MARKS.get(folder, "not slow and not vllm and not nemo")
            tests = tests_of(root, folder, mutant.file)
            if folder not in usual:
                outcome, usual[folder] = run_tests(root, tests, marks, 3600.0)
                if outcome != "survived":
                    output = (root / "output.txt").read_text()
                    sys.exit(f"{folder}: the tests must pass without a mutation:\n{output[-2000:]}")
            source = (root / mutant.file).read_bytes()
            (root / mutant.file).write_bytes(mutant.applied(source))
            outcome, seconds = run_tests(root, tests, marks, 60.0 + 4.0 * usual[folder])
            (root / mutant.file).write_bytes(source)
            row = {
                "folder": folder,
                "key": mutant.key,
                "line": mutant.begin[0],
                "outcome": outcome,
                "seconds": round(seconds, 1),
            }
            rows.append(row)
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            sys.stderr.write(f"{number}/{len(chosen)} {outcome} in {seconds:.0f} s: {mutant.key[:150]}\n")
    sys.stdout.write(table(rows))


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
