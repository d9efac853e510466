"""Reward functions: plain Python functions in a file of the user, which become plugins without a package.

    # units.py
    def score(prompt, response, truth):
        return 1.0 if response.strip() == truth["answer"] else 0.0

    rewards.functions.units=units.py:score

With this setting the function judges the records of the task `units`.  It runs in a worker process, with the time
budget `rewards.functions_time_s`.  It gets there by name: `settings.load` makes the file's path absolute,
`NodeSupervisor._rewards` gives name and budget to the reward server as arguments, `discovery.discover` registers a
plugin with the name `units=/.../units.py:score`, `judging.pool_specs` configures a pool for it, `pool._Worker` starts a
process with this name as an argument, and `worker.load` imports the file there by `function_plugin`.
The command, the reward server and rank 0 import the file, too, to check it; only the worker calls the function.

Several functions with weights give their weighted mean:

    rewards.functions.units=units.py:score*0.9 + units.py:short*0.1
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import MODULE, function_in, module_of, sha256, sources
from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult, WrongValue, no_answer

_PARAMETERS = 3  # prompt, response, truth
_AND = " + "  # between the functions of a task
_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)(\*(?P<weight>[\d.]+))?")
_TASK = re.compile(r"([\w.-]+)=(.+)")


def is_function(name: str) -> bool:
    """Return whether a plugin's name has the form TASK=FILE.py:FUNCTION, or several of them with weights."""
    match = _TASK.fullmatch(name)
    return match is not None and all(_FUNCTION.fullmatch(part) for part in match[2].split(_AND))


def with_absolute_paths(place: str) -> str:
    """Return the value of `rewards.functions.TASK` with absolute paths."""
    return _AND.join(os.path.abspath(os.path.expanduser(part.strip())) for part in place.split(_AND))


def place_of(function: Callable[..., Any], key: str) -> str:
    """Return FILE.py:FUNCTION for a function of this process, which worker processes import from its file.

    Raises:
        ConfigError: Another process could not find the function by file and name; the message names `key`.
    """
    name, home = getattr(function, "__name__", repr(function)), getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    file = getattr(module, "__file__", None) or ""
    own = f"def {name if name.isidentifier() else 'score'}(prompt, response, truth)"
    if home.startswith(MODULE):
        fault, fix = f"{file} starts a run while workers import it", 'start the run below `if __name__ == "__main__":`'
    elif getattr(module, name, None) is not function:
        fault = "expected a function at the top level of a file; got a lambda, a method, a nested or a changed function"
        fix = f"write {own} at the top level of a file"
    elif not file.endswith(".py") or not os.path.isfile(file):
        fault = "expected a function of a file; got a function of a notebook or an interactive session"
        fix = f"write {own} into a file, and import it or name it as FILE.py:{name}"
    else:
        return f"{file}:{name}"
    raise ConfigError(f"{key}={name}: {fault}. Worker processes import the function's file. Fix: {fix}")


def places(functions: Mapping[str, str]) -> list[str]:
    """Return FILE.py:FUNCTION of each function in `rewards.functions`."""
    matches = [_FUNCTION.fullmatch(part.strip()) for place in functions.values() for part in place.split(_AND)]
    return [f"{match['file']}:{match['function']}" for match in matches if match is not None]


def files_of(place: str) -> list[Path]:
    """Return the files in the value of `rewards.functions.TASK`; another value has none."""
    return [Path(part.rpartition(":")[0]).absolute() for part in places({"": place})]


def code_of(cfg: Any) -> dict[str, str]:
    """Return `own_functions.sources` of all functions that a configuration names: rewards, loss, advantage, rules."""
    grpo = cfg.trainer.grpo
    own = [*places(cfg.rewards.functions), grpo.loss, grpo.advantage, *cfg.trainer.resets.rules.asks]
    return {name: value for place in own for name, value in sources(place).items()}


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files and packages of two results of `code_of` that both have, with another code."""
    return [name for name, value in before.items() if now.get(name, value) != value]


def identity(place: str) -> str:
    """Return the value of `rewards.functions.TASK` with `own_functions.sha256` of each function instead of its path."""
    matches = [_FUNCTION.fullmatch(part.strip()) for part in place.split(_AND)]
    parts = [(match["file"], match[0].removeprefix(match["file"])) for match in matches if match is not None]
    return _AND.join(sha256(f"{file}:_") + function for file, function in parts)


def name_of(task: str, place: str) -> str:
    """Return the name of the plugin that is made from the functions of a task: `TASK=PLACE`.

    `place`: value of rewards.functions.TASK.  Raises ConfigError if it does not have the form FILE.py:FUNCTION.
    """
    if "," in place or not is_function(name := f"{task}={place}"):
        raise ConfigError(
            f"rewards.functions.{task}={place}: expected FILE.py:FUNCTION, or several with weights,"
            " FILE.py:FUNCTION*0.9 + FILE.py:FUNCTION*0.1; without a comma"
        )
    return name


def settings_of(rewards: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of plugins by name, with those of the user's functions.

    `rewards`: that part of the configuration.
    """
    budget = {"time_budget_s": float(rewards["functions_time_s"])}
    return rewards["plugins"] | {name_of(task, place): budget for task, place in rewards["functions"].items()}


def function_plugin(name: str) -> type[RewardPlugin]:
    """Return the plugin class of the functions of a task; `name` is TASK=FILE.py:FUNCTION, or several with weights.

    Raises:
        ConfigError: A file or function is missing, a file cannot be imported, a function does not take prompt, response
            and truth, or all weights are 0.
    """
    match = _TASK.fullmatch(name)
    assert match is not None, name
    task, key = match[1], f"rewards.functions.{name}"
    functions = [_function(part, key) for part in match[2].split(_AND)]
    names = _distinct([_name_of(function) for function, _ in functions])
    whole = sum(weight for _, weight in functions)
    if whole <= 0:
        raise ConfigError(f"{key}: expected a weight above 0 for at least one function")

    class FunctionPlugin(RewardPlugin):
        """A plugin that judges one task; the score is the weighted mean of what the user's functions return."""

        @dataclass(frozen=True)
        class Config:
            time_budget_s: float = 10.0  # rewards.functions_time_s

        tasks = (task,)
        _noun = "your reward function"

        def score(self, request: RewardRequest) -> RewardResult:
            if (text := request.answer_text) is None:
                return no_answer()
            values = [_number(function, function(request.prompt, text, request.truth)) for function, _ in functions]
            if len(functions) == 1:
                return RewardResult(score=values[0], correct=values[0] >= 1.0)
            parts = dict(zip(names, values, strict=True))
            score = sum(w * value for (_, w), value in zip(functions, values, strict=True)) / whole
            return RewardResult(score=min(1.0, score), correct=all(value >= 1.0 for value in values), parts=parts)

    FunctionPlugin.name = name
    # An exception is located in the user's file.
    FunctionPlugin.__module__ = getattr(functions[0][0], "func", functions[0][0]).__module__
    return FunctionPlugin


def _number(function: Callable[..., Any], value: Any) -> float:
    """Return the value of a reward function as a float.  Raises WrongValue unless it is a number from 0 to 1.

    Truth values, and scalars of numpy and torch, are numbers; text is not, although `float` would read it.
    """
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if 0.0 <= number <= 1.0:
        return number
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = _name_of(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    got = f"{_name_of(function)} returned {value!r:.80} ({type(value).__name__})"
    raise WrongValue(f"{got}: expected a number from 0 to 1", place)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; of a `functools.partial` that of its function, of an object that of its class."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def _distinct(names: list[str]) -> list[str]:
    """Return the names; a repeated name gets a numeric suffix: score, score_2."""
    return [f"{name}_{count}" if (count := names[: k + 1].count(name)) > 1 else name for k, name in enumerate(names)]


def _function(place: str, key: str) -> tuple[Callable[..., Any], float]:
    """Return the function that FILE.py:FUNCTION*WEIGHT names, and its weight (default: 1)."""
    match = _FUNCTION.fullmatch(place)
    assert match is not None, place
    function = function_in(module_of(Path(match["file"]), key), match["function"], key)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"{key}: `async def {match['function']}` returns no number. Fix: def {match['function']}")
    try:
        if "completions" in inspect.signature(function).parameters:  # a third parameter would take the truth
            fix = "Fix: docs/howto/reward_function.md#a-reward-function-of-trl"
            raise TypeError(f"`completions` is a parameter of a reward function of TRL. {fix}")
        inspect.signature(function).bind(*range(_PARAMETERS))
        weight = float(match["weight"] or 1.0)
    except TypeError as error:
        raise ConfigError(f"{key}: expected a function of (prompt, response, truth): {error}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: expected a number as weight; got {match['weight']}") from error
    return function, weight
