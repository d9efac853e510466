"""Functions of the user that a configuration names: FILE.py:FUNCTION, or MODULE:FUNCTION of an installed package.

They are found and imported by their place; `sources` tells whether their code has changed.
"""

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, did_you_mean

MODULE = "own_function_"  # beginning of the names of modules that are made from files of the user
_INSTALLED = {"site-packages", "dist-packages"}  # names of the folders of installed packages
_LEFT_OUT = {*sys.stdlib_module_names, "nemo_prorl", "prorl_sandbox"}  # top-level modules
_folders: set[str] = set()  # added to sys.path by `module_of`
_PLACE = re.compile(r"(?P<file>.+\.py):(?P<in_file>\w+)|(?P<module>[\w.]+):(?P<in_module>\w+)")


def is_place(text: Any) -> bool:
    """Return whether a value has the form FILE.py:FUNCTION or MODULE:FUNCTION."""
    return isinstance(text, str) and _PLACE.fullmatch(text) is not None


def file_of(place: str) -> Path | None:
    """Return the file of FILE.py:FUNCTION; None for another value."""
    match = _PLACE.fullmatch(place)
    return Path(match["file"]) if match and match["file"] else None


def with_absolute_path(place: str) -> str:
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
    if match["in_file"] not in _names(tree):
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        raise ConfigError(f"{key}={place}: {_no_function(match['in_file'], functions)}")


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
        known = [other for other, value in vars(module).items() if inspect.isroutine(value) and other[0] != "_"]
        raise ConfigError(f"{key}: {_no_function(name, known)}")
    return function


def _no_function(name: str, known: list[str]) -> str:
    hint = did_you_mean(name, known)
    meant = f".{hint}" if hint else f"; expected one of: {', '.join(known) or 'none is there'}"
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
        _folders.add(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: the file cannot be imported: {type(error).__name__}: {error}") from error
    return module


# --- the code that a function consists of ----------------------------------------------------------------------------


def sources(place: str) -> dict[str, str]:
    """Return the code that a function consists of: {absolute path: sha256} and {installed package: version}.

    The paths are the function's file and the files that it imports, also indirectly.  Instead of the files of an
    installed package its version is returned, unless the function itself is in that package.  Left out are Python's
    library, this project (a run records its code apart), and what a file opens or imports by a computed name.  Nothing
    is imported.

    Args:
        place: FILE.py:FUNCTION or MODULE:FUNCTION; {} for another value, or if there is no such file or module.
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        return {}
    if match["file"]:
        first, own, folder = Path(match["file"]).absolute(), None, str(Path(match["file"]).absolute().parent)
        todo = [(first, "")] if first.is_file() else []
    else:
        own, folder = match["module"].partition(".")[0], None
        specs = _specs(match["module"], None)
        todo = [(file, spec.parent or "") for spec in specs if (file := _file(spec)) is not None]
    code: dict[str, str] = {}
    while todo:
        file, package = todo.pop(0)
        if str(file) in code:
            continue
        content = file.read_bytes()
        code[str(file)] = hashlib.sha256(content).hexdigest()
        for name in _imports(content, package) if file.suffix == ".py" else ():
            top = name.partition(".")[0]
            for spec in _specs(name, folder):
                if (imported := _file(spec)) is None:
                    continue
                is_installed = not _INSTALLED.isdisjoint(imported.parts) and top != own
                if is_installed and (version := _version(top)):
                    code.update(version)
                else:
                    todo.append((imported, spec.parent or ""))
    return code


def sha256(place: str) -> str:
    """Return a sha256 over `sources`; that of the file if there is only one.  The file may be moved or renamed.

    Raises ConfigError if there is no such file or module.
    """
    code = sources(place)
    if not code:
        raise ConfigError(f"{place}: there is no such file or module")
    first = next(iter(code))
    if len(code) == 1:
        return code[first]
    folder = os.path.dirname(first)
    others = {
        os.path.relpath(name, folder) if os.path.isabs(name) else name: code[name] for name in code if name != first
    }
    return hashlib.sha256(json.dumps([code[first], others], sort_keys=True).encode()).hexdigest()


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Yield the full names of the modules that a file may import, wherever its import statements are.

    Args:
        package: the package of the file, for relative imports; "" if it has none.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            parents = parents[: len(parents) + 1 - node.level] if node.level else []
            base = [*parents, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)  # a module, or something in `base`


def _specs(name: str, folder: str | None) -> list[ModuleSpec]:
    """Return the specs of a module's packages, from the outermost, and its own, as far as they exist.  Imports nothing.

    Args:
        folder: folder that is searched after sys.path, where a file of the user finds its neighbours.
    """
    specs: list[ModuleSpec] = []
    parts = name.split(".")
    path: Sequence[str] | None = [p for p in sys.path if p not in _folders] + ([] if folder is None else [folder])
    while len(specs) < len(parts) and path is not None and parts[0] not in _LEFT_OUT:
        name = ".".join(parts[: len(specs) + 1])
        if specs:  # the finders of sys.meta_path expect that the package of a submodule has been imported
            candidates = [finder.find_spec(name) for finder in map(pkgutil.get_importer, path) if finder is not None]
        else:
            candidates = [finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec")]
        spec = next((candidate for candidate in candidates if candidate is not None), None)
        if spec is None:
            break
        specs.append(spec)
        path = spec.submodule_search_locations
    return specs


def _file(spec: ModuleSpec) -> Path | None:
    """Return the file of a module; None for a namespace package, or a module that is not in a file."""
    return Path(spec.origin).absolute() if spec.has_location and spec.origin and os.path.isfile(spec.origin) else None


@cache
def _version(module: str) -> dict[str, str]:
    """Return {name of the distribution: version} for a top-level module; {} if it belongs to none."""
    try:
        return {module: importlib.metadata.version(module)}
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name; the whole list takes a second
        names = importlib.metadata.packages_distributions().get(module, [])
        return {name: importlib.metadata.version(name) for name in names}
