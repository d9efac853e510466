"""Rewards that take long: the trainer works meanwhile, and nothing of the run depends on how long they take."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from reward_latency import install, run

from tests.whole_runs import without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ["deterministic=true", "trainer.grpo.max_response_tokens=48"]


def test_they_are_hidden_behind_log_probabilities_and_change_nothing(tmp_path: Path) -> None:
    """Engines that sleep do so before the trainer begins.  Two seconds are longer than the log-probabilities take."""
    records = install(tmp_path / "plugin")
    fast, slow, asleep = (
        run(tmp_path / name, records, latency, 40, 64, 3, *SHORT, *more)
        for name, latency, more in (
            ("fast", 0.0, []),
            ("slow", 2.0, []),
            ("asleep", 2.0, ["rollout.sleep=2", "trainer.grpo.dynamic_sampling.margin=3"]),
        )
    )
    assert [without_time(m) for m in slow] == [without_time(m) for m in fast]
    for m in slow:
        assert m["time/logprobs/ahead_share"] > 0.3
        assert m["time/logprobs/wasted_share"] == 0.0
        assert 0.0 < m["time/rollout/reward_wait_s"] < m["time/rollout/reward_open_s"]
    assert any(m["time/logprobs/ahead_share"] > 0.3 and m["time/rollout/sleep_s"] < 0.5 for m in asleep)
