"""Reward functions: plain Python functions in a file of the user, which become plugins without a package.

    # units.py
    def score(prompt, response, truth):
        return 1.0 if response.strip() == truth["answer"] else 0.0

    rewards.functions.units=units.py:score

With this setting the function judges the records of the task `units`.  It runs in a worker process, with the default
time budget of a plugin.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult, no_answer

_PARAMETERS = 3  # prompt, response, truth
_NAME = re.compile(r"(?P<task>[\w.-]+)=(?P<file>.+\.py):(?P<function>\w+)")


def is_function(name: str) -> bool:
    """Return whether a plugin's name has the form TASK=FILE.py:FUNCTION."""
    return _NAME.fullmatch(name) is not None


def name_of(task: str, place: str) -> str:
    """Return the plugin name of a function.  Raises ConfigError if `place` does not have the form FILE.py:FUNCTION."""
    if "," in place or not is_function(name := f"{task}={place}"):
        raise ConfigError(f"rewards.functions.{task}={place}: expected FILE.py:FUNCTION, without a comma")
    return name


def function_plugin(name: str) -> type[RewardPlugin]:
    """Return the plugin class of a function; `name` is TASK=FILE.py:FUNCTION.

    Raises:
        ConfigError: The file or the function is missing, the file cannot be imported, or the function does not take
            prompt, response and truth.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    task, key = match["task"], f"rewards.functions.{name}"
    module = _module(Path(match["file"]), key)
    if not callable(found := getattr(module, match["function"], None)):
        raise ConfigError(f"{key}: the file has no function {match['function']}")
    function: Callable[..., Any] = found
    try:
        inspect.signature(function).bind(*range(_PARAMETERS))
    except TypeError as error:
        raise ConfigError(f"{key}: expected a function of (prompt, response, truth): {error}") from error

    class FunctionPlugin(RewardPlugin):
        """A plugin that judges one task; the score is the value that the user's function returns."""

        tasks = (task,)

        def score(self, request: RewardRequest) -> RewardResult:
            if request.answer_text is None:
                return no_answer()
            value = float(function(request.prompt, request.answer_text, request.truth))
            return RewardResult(score=value, correct=value >= 1.0)

    FunctionPlugin.name = name
    FunctionPlugin.__module__ = module.__name__  # an exception is located in the user's file
    return FunctionPlugin


def _module(file: Path, key: str) -> Any:
    """Import the user's file as a separate module.  Raises ConfigError, which names `key`, if the import fails.

    The folder of the file is added to sys.path, so that the file may import other files of the folder.
    """
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {file}")
    known = f"reward_function_{file.stem}"
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    if (folder := str(file.absolute().parent)) not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{key}: the file cannot be imported: {type(error).__name__}: {error}") from error
    return module
