"""Plugins are found by entry point; a broken one is reported by name and harms no other."""

import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, RewardPlugin, RewardRequest, RewardResult
from nemo_prorl.rewards.judging import pool_specs, share_out


def test_a_broken_plugin_is_reported_and_the_others_work(broken_plugins: Path) -> None:
    registry = discover()
    assert "misbehaving_missing_module" in registry.broken["broken"]
    assert "subclass of nemo_prorl.rewards.interface.RewardPlugin" in registry.broken["not_a_plugin"]
    assert {"echo", "odd"} <= set(registry.plugins)
    assert not {"broken", "not_a_plugin"} & set(registry.plugins)
    with pytest.raises(ConfigError, match=r"'broken' is broken: ModuleNotFoundError"):
        registry.plugin("broken")


def test_the_shipped_plugins_are_found() -> None:
    registry = discover()
    assert registry.tasks() == {"math": "math", "puzzles": "puzzles"} | registry.tasks()
    assert {"math", "puzzles"} <= set(registry.plugins)


def test_unknown_names_list_the_known(plugins: Path) -> None:
    registry = discover()
    with pytest.raises(ConfigError, match=r"unknown reward plugin 'ecco'; known: .*echo.*odd"):
        registry.plugin("ecco")
    with pytest.raises(ConfigError, match=r"no reward plugin judges task 'ecco'; known: .*echo.*odd"):
        registry.plugin_of_task("ecco")
    with pytest.raises(ConfigError, match=r"unknown reward plugin 'ecco'"):
        pool_specs(registry, ["echo"], 1, {"ecco": {}})


def test_two_packages_with_one_name_or_one_task_are_both_named(plugins: Path) -> None:
    point = EntryPoint("echo", "misbehaving_plugins:Echo", ENTRY_POINT_GROUP)
    again = EntryPoint("echo", "misbehaving_plugins:Echo ", ENTRY_POINT_GROUP)
    assert "two installed packages" in discover([point, again]).broken["echo"]
    renamed = EntryPoint("ecco", "misbehaving_plugins:Echo", ENTRY_POINT_GROUP)
    assert "its class has name = 'echo'" in discover([renamed]).broken["ecco"]


class Own(RewardPlugin):
    """A plugin that can be registered."""

    name: ClassVar[str] = "own"
    tasks: ClassVar[tuple[str, ...]] = ("own task",)

    @dataclass(frozen=True)
    class Config:
        words: int = 2
        share: float = 0.5
        quick: bool = False
        place: str = ""

    def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(0.0)


class Plain:
    """No dataclass."""


def no_default(self: Any, config: Any = None) -> None:
    raise KeyError("word list")


class Point:
    """An entry point of a class in this file."""

    def __init__(self, plugin: Any, name: str = "own") -> None:
        self.name, self.value, self._plugin = name, "here", plugin

    def load(self) -> Any:
        return self._plugin


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"second": "another"}, None),
        ({"tasks": "own task"}, "tasks is 'own task'; it must be a tuple of task names"),
        ({"tasks": ()}, "tasks is (); it must be a tuple of task names"),
        ({"tasks": ("own task", 1)}, "tasks is ('own task', 1); it must be a tuple of task names"),
        ({"second": None}, "second is None; it must be a task of another plugin, or empty"),
        ({"second": "own task"}, "second is 'own task'; it must be a task of another plugin, or empty"),
        ({"score": RewardPlugin.score}, "it does not define score"),
        ({"Config": Plain}, "Config must be a dataclass"),
        ({"__init__": no_default}, "it cannot be created with its default settings: KeyError: 'word list'"),
        ({"time_budget_s": 0.0}, "time_budget_s is 0.0; it must be above 0"),
    ],
)
def test_a_class_that_breaks_a_rule_is_told_which(change: dict[str, Any], why: str | None) -> None:
    points: Any = [Point(type("Changed", (Own,), change))]
    registry = discover(points)
    assert registry.broken == ({} if why is None else {"own": why})
    assert list(registry.plugins) == (["own"] if why is None else [])


def test_a_task_has_one_plugin() -> None:
    again = type("Again", (Own,), {"name": "second"})
    points: Any = [Point(again, "second"), Point(Own)]
    registry = discover(points)
    assert registry.broken == {"second": "task 'own task' is already judged by plugin 'own'; uninstall one of them"}
    assert registry.tasks() == {"own task": "own"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"words": 1, "share": 1, "quick": True, "place": "x"}, None),
        ({"words": True}, "rewards.plugins.own.words=True: must be int"),
        ({"words": 1.0}, "rewards.plugins.own.words=1.0: must be int"),
        ({"share": False}, "rewards.plugins.own.share=False: must be float"),
        ({"quick": 1}, "rewards.plugins.own.quick=1: must be bool"),
        ({"place": 1}, "rewards.plugins.own.place=1: must be str"),
    ],
)
def test_a_setting_has_the_type_of_its_field(settings: dict[str, Any], says: str | None) -> None:
    if says is None:
        assert make_plugin(Own, settings).config == Own.Config(**settings)
    else:
        with pytest.raises(ConfigError, match=re.escape(says)):
            make_plugin(Own, settings)


def test_settings_are_checked() -> None:
    math = discover().plugin("math")
    assert make_plugin(math, {"time_budget_s": 2}).time_budget_s == 2.0
    with pytest.raises(ConfigError, match=r"rewards\.plugins\.math\.budget=2: unknown setting; known: time_budget_s"):
        make_plugin(math, {"budget": 2})
    with pytest.raises(ConfigError, match=r"rewards\.plugins\.math\.time_budget_s='no': must be float"):
        make_plugin(math, {"time_budget_s": "no"})
    with pytest.raises(ConfigError, match=r"must be above 0"):
        make_plugin(math, {"time_budget_s": 0})

    class Refuses(Own):
        def __init__(self, config: Any) -> None:
            if config.words > 9:
                raise ValueError(f"words={config.words} are too many")
            super().__init__(config)

    assert make_plugin(Refuses, {"words": 9}).config == Own.Config(words=9)
    with pytest.raises(ConfigError, match=r"rewards\.plugins\.own=\{'words': 10\}: words=10 are too many"):
        make_plugin(Refuses, {"words": 10})


def test_workers_are_shared_out_at_least_one_each() -> None:
    assert share_out(1, ["a", "b"]) == {"a": 1, "b": 1}
    assert share_out(5, ["a", "b"]) == {"a": 3, "b": 2}
    with pytest.raises(ConfigError, match=r"--workers 0"):
        share_out(0, ["a"])


def test_discovery_and_the_server_import_nothing_heavy() -> None:
    code = (
        "import sys; from nemo_prorl.rewards.discovery import discover; import nemo_prorl.rewards.server; "
        "import nemo_prorl.rewards.client; assert 'math' in discover().plugins; "
        "print(*{m.partition('.')[0] for m in sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "sympy", "math_verify", "reasoning_gym", "nemo", "vllm"} & set(found)
