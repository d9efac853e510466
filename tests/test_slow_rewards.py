"""Rewards that take long: nothing of the run depends on how long they take."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from reward_latency import install, run

from tests.whole_runs import without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ["deterministic=true", "trainer.grpo.max_response_tokens=48"]


def test_how_long_rewards_take_changes_nothing(tmp_path: Path) -> None:
    records = install(tmp_path / "plugin")
    fast, slow = (run(tmp_path / str(s), records, s, 40, 64, 3, *SHORT) for s in (0.0, 2.0))
    assert [without_time(m) for m in slow] == [without_time(m) for m in fast]
    assert all(0.0 < m["time/rollout/reward_wait_s"] < m["time/rollout/reward_open_s"] for m in slow)
