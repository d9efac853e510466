"""Discovery of the installed reward plugins by their entry points.

Imports the modules of plugins, but not the heavy packages that plugins import in `prepare`.
"""

import dataclasses
import hashlib
import importlib.metadata
import logging
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.functions import function_plugin, identity, is_function, name_of
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, RewardPlugin

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registry:
    """The installed reward plugins."""

    plugins: dict[str, type[RewardPlugin]]  # working plugins by name
    broken: dict[str, str]  # name of each broken plugin -> reason

    def plugin(self, name: str) -> type[RewardPlugin]:
        """Return the plugin class of that name.

        Raises:
            ConfigError: The name is unknown (the message lists the known names), or the plugin is broken.
        """
        if name in self.broken:
            raise ConfigError(f"reward plugin {name!r} is broken: {self.broken[name]}")
        if name not in self.plugins:
            raise ConfigError(f"unknown reward plugin {name!r}; known: {_names(self.plugins)}. Fix: pip install it")
        return self.plugins[name]

    def tasks(self) -> dict[str, str]:
        """Return the name of the responsible plugin for each known task."""
        return {task: name for name, plugin in sorted(self.plugins.items()) for task in plugin.tasks}

    def seconds(self) -> dict[str, str]:
        """Return the name of the plugin that names it for each task of a second verifier, installed or not."""
        return {plugin.second: name for name, plugin in sorted(self.plugins.items()) if plugin.second}

    def second_of(self, task: str) -> str:
        """Return the task of the second verifier that judges a sample of a task's responses; empty if there is none.

        Raises:
            ConfigError: No working plugin judges the task, or that of its second verifier.
        """
        plugin = self.plugin_of_task(task)
        if plugin.second and plugin.second not in self.tasks():
            raise ConfigError(
                f"reward plugin {plugin.name!r} names a second verifier, second={plugin.second!r}, that is not there:"
                f" {self.unknown(plugin.second)}. Fix: install the plugin of task {plugin.second!r} (its package may"
                f" have to be installed again), or correct `second` of {plugin.__module__}:{plugin.__qualname__}"
            )
        return plugin.second

    def plugin_of_task(self, task: str) -> type[RewardPlugin]:
        """Return the plugin class that judges a task.

        Raises:
            ConfigError: No working plugin judges the task.  The message lists the known tasks, and the broken plugins,
                because one of these may be the plugin of this task.
        """
        known = self.tasks()
        if task not in known:
            raise ConfigError(
                f"{self.unknown(task)}. Fix: install the plugin of this task, correct the field 'task' of the records,"
                f" or rewards.functions.{task}=FILE.py:FUNCTION for a function of your own"
            )
        return self.plugins[known[task]]

    def unknown(self, task: str) -> str:
        """Return the message for a task that no plugin judges, without the fix."""
        broken = "".join(f"; plugin {name!r} is broken: {reason}" for name, reason in sorted(self.broken.items()))
        seconds = self.seconds()
        tasks = (f"{name} (second verifier of {seconds[name]})" if name in seconds else name for name in self.tasks())
        return f"no reward plugin judges task {task!r}; known: {_names(tasks)}{broken}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none (install one, for example from reward_plugins/)"


def _fault(name: str, plugin: Any) -> str | None:
    """Return the reason why `plugin` cannot be registered under `name`; None if it can."""
    if not (isinstance(plugin, type) and issubclass(plugin, RewardPlugin)):
        return f"its entry point is {plugin!r}; it must be a subclass of nemo_prorl.rewards.interface.RewardPlugin"
    if getattr(plugin, "name", None) != name:
        return f"its class has name = {getattr(plugin, 'name', None)!r}; it must be the entry point's name {name!r}"
    tasks = getattr(plugin, "tasks", None)
    if not (isinstance(tasks, tuple) and tasks and all(isinstance(task, str) for task in tasks)):
        return f"tasks is {tasks!r}; it must be a tuple of task names"
    if not isinstance(plugin.second, str) or plugin.second in tasks:
        return f"second is {plugin.second!r}; it must be a task of another plugin, or empty"
    if getattr(plugin, "__abstractmethods__", None):
        return f"it does not define {', '.join(sorted(plugin.__abstractmethods__))}"
    if not dataclasses.is_dataclass(plugin.Config):
        return "Config must be a dataclass"
    try:
        budget = plugin(plugin.Config()).time_budget_s
    except Exception as error:
        return f"it cannot be created with its default settings: {type(error).__name__}: {error}"
    return None if budget > 0 else f"time_budget_s is {budget!r}; it must be above 0"


def discover(
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None, functions: Mapping[str, str] | None = None
) -> Registry:
    """Load every entry point of the group `nemo_prorl.rewards`, and the user's reward functions.

    A broken plugin is logged and recorded in `Registry.broken`; the other plugins stay usable.

    Args:
        entry_points: Entry points to load; None: the group's entry points of all installed packages.
        functions: FILE.py:FUNCTION by task (rewards.functions).

    Raises:
        ConfigError: A function cannot be loaded, or its task has a plugin already.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points is None else entry_points
    plugins: dict[str, type[RewardPlugin]] = {}
    broken: dict[str, str] = {}
    owner: dict[str, str] = {}
    for point in sorted(set(points), key=lambda point: (point.name, point.value)):
        try:
            plugin = point.load()
            fault = _fault(point.name, plugin)
        except Exception as error:
            fault = f"{type(error).__name__}: {error} (entry point {point.value})"
        if fault is None and point.name in plugins:
            fault = f"two installed packages register it, the second as {point.value}; uninstall one"
            del plugins[point.name]
        taken = [] if fault else [task for task in plugin.tasks if task in owner]
        if taken:
            fault = f"task {taken[0]!r} is already judged by plugin {owner[taken[0]]!r}; uninstall one of them"
        if fault is not None:
            broken[point.name] = fault
            _log.warning("reward plugin %r is broken: %s", point.name, fault)
            continue
        plugins[point.name] = plugin
        owner.update(dict.fromkeys(plugin.tasks, point.name))
    for task, place in (functions or {}).items():
        if task in owner:
            raise ConfigError(
                f"rewards.functions.{task}={place}: task {task!r} is judged by plugin {owner[task]!r}. Fix: use"
                " another task name, here and in the prompt records (field 'task')"
            )
        own = function_plugin(name_of(task, place))
        plugins[own.name] = own
    return Registry(plugins, broken)


def scorer_of(plugin: type[RewardPlugin]) -> str:
    """Return a text that changes when the code of a plugin changes, as the manifest of an evaluation records it.

    For the user's functions, it is the sha256 of their files with their names; otherwise `plugin NAME SHA256`, over the
    Python files of the plugin's top-level package.
    """
    if is_function(plugin.name):
        return identity(plugin.name.partition("=")[2])
    top = sys.modules[plugin.__module__.partition(".")[0]]
    file = Path(top.__file__ or sys.modules[plugin.__module__].__file__ or "")
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(file.parent)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"plugin {plugin.name} {digest.hexdigest()}"


def make_plugin(plugin: type[RewardPlugin], settings: dict[str, Any] | None = None) -> RewardPlugin:
    """Return a plugin object with the given settings.

    Raises:
        ConfigError: A key is unknown or a value is wrong; the message names plugin, key, value and the known keys.
    """
    settings = settings or {}
    hints = typing.get_type_hints(plugin.Config)
    for key, value in settings.items():
        if key not in hints:
            known = ", ".join(sorted(hints)) or "none"
            raise ConfigError(f"rewards.plugins.{plugin.name}.{key}={value!r}: unknown setting; known: {known}")
        kind = hints[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            continue
        if isinstance(kind, type) and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
            raise ConfigError(f"rewards.plugins.{plugin.name}.{key}={value!r}: must be {kind.__name__}")
    try:
        instance = plugin(plugin.Config(**settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rewards.plugins.{plugin.name}={settings!r}: {error}") from error
    if not instance.time_budget_s > 0:
        raise ConfigError(f"rewards.plugins.{plugin.name}.time_budget_s={instance.time_budget_s!r}: must be above 0")
    return instance
