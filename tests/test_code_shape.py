"""What no linter checks: class names are unique, classes and functions stay small."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_METHODS, LINES, POSITIONAL = 15, 60, 5
# Calls whose arguments have no names: of logging, of a partial, of torch, and of what torch compiles.
NAMELESS = ("info", "warning", "partial", "apply", "_linear_pointwise", "wrapped", "_gradient_block")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """Return the code of nemo_prorl/ and launcher/ by file."""
    files = sorted([*ROOT.glob("nemo_prorl/**/*.py"), *ROOT.glob("launcher/**/*.py")])
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def lines_of(function: Function) -> int:
    """Return the lines of a function without its docstring: one that is documented well is not a long one."""
    assert function.end_lineno is not None
    first, docstring = function.body[0], ast.get_docstring(function, clean=False) is not None
    documented = first.end_lineno - first.lineno + 1 if docstring and first.end_lineno is not None else 0
    return function.end_lineno - function.lineno + 1 - documented


def test_no_class_name_is_used_twice() -> None:
    """A class in a class or in a function is named by that, too."""
    names = [node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_no_class_has_many_public_methods() -> None:
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    public = {
        one.name: sum(isinstance(node, Function) and not node.name.startswith("_") for node in one.body)
        for one in classes
    }
    assert {name: methods for name, methods in public.items() if methods > PUBLIC_METHODS} == {}


def test_calls_with_many_arguments_name_them() -> None:
    """Who reads a call with six places must count; logging, partials and compiled functions have no names."""
    many = [
        f"{file}:{node.lineno}: {ast.unparse(node.func)}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and sum(not isinstance(arg, ast.Starred) for arg in node.args) > POSITIONAL
    ]
    assert [place for place in many if not place.rpartition(": ")[2].rpartition(".")[2].startswith(NAMELESS)] == []


def test_no_function_is_long() -> None:
    functions = [
        (file, node) for file, tree in trees().items() for node in ast.walk(tree) if isinstance(node, Function)
    ]
    assert {f"{file}:{node.name}": lines_of(node) for file, node in functions if lines_of(node) > LINES} == {}


# Modules whose name stands twice; the folders say what each is of.  A new file takes another name.
TWICE = {
    *("__init__", "cli", "devices", "files", "formats", "instructions", "manifest", "model", "probe", "second"),
    *("server", "sources"),
}


def test_a_new_module_does_not_take_a_name_that_exists() -> None:
    names = Counter(Path(file).stem for file in trees())
    assert sorted(name for name, count in names.items() if count > 1 and name not in TWICE) == []
    assert max(count for name, count in names.items() if name not in ("__init__", "cli")) == 2


# --- what the whole costs its readers --------------------------------------------------------------------------------

# The values of today.  Who adds code or keys removes others, or changes the number and says why in the commit.
MOST_LINES, MOST_KEYS = 50_980, 197


def test_the_code_does_not_grow_unnoticed() -> None:
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in trees())
    assert MOST_LINES - 300 <= lines <= MOST_LINES, f"MOST_LINES={lines}"


def test_the_configuration_does_not_grow_unnoticed() -> None:
    from nemo_prorl.config import all_keys

    assert len(list(all_keys())) == MOST_KEYS
