"""A step that takes too long is reported once, with what each rank does."""

import threading
import time
from pathlib import Path

import pytest

from nemo_prorl.lifecycle.watchdog import Watchdog
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.endpoints import EngineClient
from nemo_prorl.rollout.engines import EnginePool, _Slot

Alarms = list[tuple[int, str]]


def watchdog(folder: Path, alarms: Alarms, rank: int = 0, steps: int = 3) -> Watchdog:
    """A watchdog that reports after 0.2 s, once it has seen three quick steps."""
    made = Watchdog(rank, folder, lambda step, what: alarms.append((step, what)), least_s=0.2)
    for step in range(1, 1 + steps):
        with made.step(step):
            pass
    return made


def hang(dog: Watchdog, phase: str, seconds: float = 0.6) -> None:
    with dog.step(9), Metrics(9, "none").phase(phase):
        time.sleep(seconds)


def test_a_hang_is_reported_once_with_phase_and_stacks(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms), "updates")
    [(step, what)] = alarms
    assert step == 9
    assert what.startswith("no progress for 0 s, 5 times the longest of the last steps, in phase updates; what each")
    first, *rest = (tmp_path / "stacks-0.txt").read_text().splitlines()
    assert first == "step 9, phase updates, after 0 s"
    assert any("time.sleep(seconds)" in line for line in rest)
    assert threading.main_thread().name in "".join(rest)


def test_in_a_rollout_it_says_what_is_open(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms)
    dog.set_waiting(lambda: "engine-3 has 12 open responses, no token for 400 s")
    hang(dog, "rollout")
    assert "in phase rollout; engine-3 has 12 open responses, no token for 400 s;" in alarms[0][1]


def test_another_rank_only_writes_its_stacks(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms, rank=5), "updates")
    assert alarms == []
    assert (tmp_path / "stacks-5.txt").read_text().startswith("step 9, phase updates")


def test_a_step_like_those_before_is_not_reported(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms)
    hang(dog, "updates", 0.1)
    hang(dog, "updates", 0.3)  # more than 0.2 s, but less than 5 times the longest
    assert alarms == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_past_there_is_no_limit(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms, steps=2), "updates")
    assert alarms == []


def test_a_step_that_fails_is_no_past(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms, steps=2)
    with pytest.raises(ZeroDivisionError), dog.step(3):
        raise ZeroDivisionError
    hang(dog, "updates")
    assert alarms == []


def test_the_pool_names_the_slowest_engine_first(tmp_path: Path) -> None:
    pool, now = EnginePool(tmp_path, "t" * 16, 3), time.monotonic()
    client = EngineClient(None, "http://nowhere", "t")
    for name, in_flight, ago in (("engine-0", 4, 5.0), ("engine-1", 2, 300.0), ("engine-2", 0, 900.0)):
        pool._slots[name] = _Slot(name, 1, client, in_flight=in_flight, progress_at=now - ago)
    assert pool.waiting() == (
        "engine-1 has 2 open responses, no token for 300 s, engine-0 has 4 open responses, no token for 5 s"
    )
