"""Functions of the user that a configuration names: FILE.py:FUNCTION, or MODULE:FUNCTION of an installed package."""

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError

MODULE = "own_function_"  # beginning of the names of modules that are made from files of the user
_PLACE = re.compile(r"(?P<file>.+\.py):(?P<in_file>\w+)|(?P<module>[\w.]+):(?P<in_module>\w+)")


def is_place(text: Any) -> bool:
    """Return whether a value has the form FILE.py:FUNCTION or MODULE:FUNCTION."""
    return isinstance(text, str) and _PLACE.fullmatch(text) is not None


def file_of(place: str) -> Path | None:
    """Return the file of FILE.py:FUNCTION; None for another value."""
    match = _PLACE.fullmatch(place)
    return Path(match["file"]) if match and match["file"] else None


def sources(file: Path) -> list[Path]:
    """Return `file` and the modules in its folder that it imports, directly or not; missing files are left out.

    Of a package in the folder, all modules count.  A file that is not Python has no imports.
    """
    found, open_files = list[Path](), [file.absolute()]
    while open_files:
        one = open_files.pop()
        if one in found or not one.is_file():
            continue
        found.append(one)
        try:
            nodes = list(ast.walk(ast.parse(one.read_bytes())))
        except (SyntaxError, ValueError):
            continue
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        for name in {name.partition(".")[0] for name in names if name}:
            package = one.parent / name
            open_files += package.rglob("*.py") if (package / "__init__.py").is_file() else [package.with_suffix(".py")]
    return found[:1] + sorted(found[1:])


def absolute(place: str) -> str:
    """Return FILE.py:FUNCTION with an absolute path; other values unchanged."""
    file = file_of(place)
    return place if file is None else f"{file.absolute()}:{place.rpartition(':')[2]}"


def check_place(place: str, key: str) -> None:
    """Raise ConfigError, which names `key`, if the file or module of a function is missing.  Imports nothing of it."""
    match = _PLACE.fullmatch(place)
    assert match is not None, place
    if match["file"] is None:
        try:
            spec = importlib.util.find_spec(match["module"].partition(".")[0])
        except ValueError:
            spec = None
        if spec is None:
            raise ConfigError(f"{key}={place}: there is no module {match['module']}. Fix: install its package")
        return
    try:
        tree = ast.parse(Path(match["file"]).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}={place}: {match['file']} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}={place}: {match['file']} is not Python: {error}") from error
    if match["in_file"] not in (names := _names(tree)):
        raise ConfigError(f"{key}={place}: {_no_function(match['in_file'], names)}")


def _names(tree: ast.Module) -> list[str]:
    """Return the names that the top level of a file defines, imports or assigns."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


@cache
def function_at(place: str, key: str) -> Callable[..., Any]:
    """Import a function.  Raises ConfigError, which names `key`, if it does not exist or the import fails."""
    match = _PLACE.fullmatch(place)
    if match is None:
        raise ConfigError(f"{key}={place}: expected FILE.py:FUNCTION or MODULE:FUNCTION")
    if match["file"]:
        return function_in(module_of(Path(match["file"]), key), match["in_file"], key)
    try:
        module = importlib.import_module(match["module"])
    except Exception as error:
        raise ConfigError(f"{key}={place}: {match['module']} cannot be imported: {error}") from error
    return function_in(module, match["in_module"], key)


def function_in(module: Any, name: str, key: str) -> Callable[..., Any]:
    """Return a function of a module by name.  Raises ConfigError, which names `key` and similar names."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        raise ConfigError(f"{key}: {_no_function(name, known)}")
    return function


def _no_function(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    meant = f". Did you mean {near[0]}?" if near else f"; expected one of: {', '.join(known) or 'none is there'}"
    return f"the file has no function {name}{meant}"


def module_of(file: Path, key: str) -> Any:
    """Import a file of the user as a separate module.  Raises ConfigError, which names `key`, if the import fails.

    The folder of the file is added to sys.path, so that the file may import other files of the folder.
    """
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}")
    name = MODULE + re.sub(r"\W", "_", str(file.absolute().with_suffix("")))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if (folder := str(file.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: the file cannot be imported: {type(error).__name__}: {error}") from error
    return module
