"""Killing at a point: nothing without the variable, SIGKILL at the passing it names, an error for a wrong name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_prorl.lifecycle.killpoints import POINTS, VARIABLE, killpoint

PASSES = (
    "from nemo_prorl.lifecycle.killpoints import killpoint\n"
    "for name in ('checkpoint:begin', 'checkpoint:state') * 3:\n"
    "    killpoint(name)\n"
    "    print(name, flush=True)\n"
)


def passes(value: str | None) -> tuple[int, list[str]]:
    """(exit status, points passed alive) of a process that passes two points three times each."""
    env = {k: v for k, v in os.environ.items() if k != VARIABLE} | ({} if value is None else {VARIABLE: value})
    done = subprocess.run(
        [sys.executable, "-c", PASSES], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize(
    ("value", "alive"),
    [("checkpoint:begin", 0), ("checkpoint:state", 1), ("checkpoint:begin#1", 0), ("checkpoint:state#3", 5)],
)
def test_the_process_is_killed_at_the_passing_that_is_named(value: str, alive: int) -> None:
    status, passed = passes(value)
    assert status == -signal.SIGKILL
    assert len(passed) == alive


@pytest.mark.parametrize("value", [None, "", "reset:intent", "checkpoint:begin#4"])
def test_nothing_happens_elsewhere(value: str | None) -> None:
    status, passed = passes(value)
    assert status == 0
    assert len(passed) == 6


@pytest.mark.parametrize("value", ["checkpoint", "checkpoint:nowhere#2", "checkpoint:begin #1"])
def test_a_wrong_name_ends_a_run_when_it_begins(value: str) -> None:
    assert passes(value) == (1, [])


def test_every_point_stands_once_in_the_code(root: Path) -> None:
    source = "".join(path.read_text() for path in (root / "nemo_prorl").rglob("*.py"))
    for point in POINTS:
        assert source.count(f'killpoint("{point}")') == 1, point


def test_a_point_in_the_code_must_be_listed() -> None:
    with pytest.raises(AssertionError):
        killpoint("checkpoint:nowhere")
