"""Plugins are found by entry point; a broken one is reported by name and harms no other."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP
from nemo_prorl.rewards.service import plan_pools, share_out


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
        plan_pools(registry, ["echo"], 1, {"ecco": {}})


def test_two_packages_with_one_name_or_one_task_are_both_named(plugins: Path) -> None:
    point = EntryPoint("echo", "misbehaving_plugins:Echo", ENTRY_POINT_GROUP)
    again = EntryPoint("echo", "misbehaving_plugins:Echo ", ENTRY_POINT_GROUP)
    assert "two installed packages" in discover([point, again]).broken["echo"]
    renamed = EntryPoint("ecco", "misbehaving_plugins:Echo", ENTRY_POINT_GROUP)
    assert "its class has name = 'echo'" in discover([renamed]).broken["ecco"]


def test_settings_are_checked() -> None:
    math = discover().plugin("math")
    assert make_plugin(math, {"time_budget_s": 2}).time_budget_s == 2.0
    with pytest.raises(ConfigError, match=r"rewards\.plugins\.math\.budget=2: unknown setting; known: time_budget_s"):
        make_plugin(math, {"budget": 2})
    with pytest.raises(ConfigError, match=r"rewards\.plugins\.math\.time_budget_s='no': must be float"):
        make_plugin(math, {"time_budget_s": "no"})
    with pytest.raises(ConfigError, match=r"must be above 0"):
        make_plugin(math, {"time_budget_s": 0})


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
