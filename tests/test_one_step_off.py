"""The main job with an engine on cores of its own, one step off: killed, failing, and stopped meanwhile."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_formats import against
from tests.whole_runs import STEPS, Job, engine_process, metrics_of, stopped_without_patience, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

AHEAD = ["cluster=laptop_split", "trainer.grpo.dynamic_sampling.max_staleness=2"]


@pytest.mark.parametrize("devices", [1, 2])
def test_killed_while_it_generates_ahead_and_resumed_it_is_equal_to_the_bit(
    root: Path, tmp_path: Path, devices: int
) -> None:
    options = [*AHEAD, f"trainer.devices={devices}", "trainer.grpo.save_rollout_groups=-1"]
    whole = Job(root, tmp_path / "whole", *options)
    assert whole.wait() == 0, whole.text()
    first = Job(root, tmp_path / "killed", *options)
    first.until(lambda: len(metrics_of(first.run_dir)) >= STEPS - 1)
    first.kill_supervisor()
    again = Job(root, first.run_dir, *options)
    assert again.wait() == 0, again.text()

    wanted, found = metrics_of(whole.run_dir), metrics_of(again.run_dir)
    assert [without_time(m) for m in found] == [without_time(m) for m in wanted]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole.run_dir, again.run_dir)]
    assert without_time(summaries[1]) == without_time(summaries[0])  # hashes of weights and reference
    for step in range(1, STEPS + 1):
        one, other = (run / "rollouts" / f"step-{step}.jsonl" for run in (whole.run_dir, again.run_dir))
        assert one.read_text() == other.read_text()
    checkpoint = json.loads((whole.run_dir / "checkpoints" / "step-000002" / "state.json").read_text())
    assert against("state", checkpoint) == []
    assert checkpoint["rollouts"]["waiting"]["step"] == 3
    assert all(against("metrics", m) == [] for m in found)
    _only_the_first_batch_is_of_present_weights(found)


def _only_the_first_batch_is_of_present_weights(steps: list[dict[str, Any]]) -> None:
    assert [m["rollout/staleness"] >= 1 for m in steps] == [False, *[True] * (STEPS - 1)]
    assert ["engine_gap/mean_abs" in m for m in steps] == [True, *[False] * (STEPS - 1)]
    assert [m.get("stale_gap/share") for m in steps] == [None, *[1.0] * (STEPS - 1)]
    assert steps[0]["engine_gap/mean_abs"] < 1e-5 < steps[1]["stale_gap/mean_abs"]
    assert all(m["correction/mean_abs"] == pytest.approx(m["stale_gap/mean_abs"]) for m in steps[1:])
    assert [m["step"] for m in steps if "time/ahead" in m] == list(range(1, STEPS))
    for m in steps:
        phases = sum(value for key, value in m.items() if key.startswith("time/") and key.count("/") == 1)
        assert phases == pytest.approx(2 * m["time/step"])
    assert {m["step"]: m["kl"] == 0.0 for m in steps} == {1: True, 2: False, 3: True, 4: False}  # a reset after 2


def test_a_failure_while_it_generates_ahead_reaches_all_ranks(root: Path, tmp_path: Path) -> None:
    options = [*AHEAD, "trainer.devices=2", "trainer.grpo.max_steps=40", "trainer.grpo.validate_every=40"]
    options.append("trainer.grpo.prompts_per_step=64")  # some seconds of generation, right after the publication
    job = Job(root, tmp_path / "stuck", *options, "trainer.resets.at_steps=[]", "trainer.deadlines.rollout_s=20")
    job.until(lambda: bool(metrics_of(job.run_dir)))
    time.sleep(1.5)
    engine_process(job).suspend()
    assert job.wait(120) == 1, job.text()
    for rank in range(2):
        log = (job.run_dir / "logs" / f"trainer-{rank}.log").read_text()
        expected = r"DeadlineExceeded: waited 20 s for a new token or response in the rollout at step \d+ .*missing"
        assert re.search(expected, log), log


def test_stops_that_give_a_batch_up_go_on(root: Path, tmp_path: Path) -> None:
    """SIGTERM with no patience: the step under way ends, and the next one collects for itself."""
    run = tmp_path / "impatient"
    stops = stopped_without_patience(root, run, (0.1, 0.6, 1.2), *AHEAD)
    assert (stops[0], stops[-1]) == (75, 0)
    steps = metrics_of(run)
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    assert all(m["rollout/staleness"] <= 2 for m in steps)
