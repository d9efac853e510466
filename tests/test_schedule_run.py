"""A schedule of the learning rate in a whole run: NeMo's model, a hard reset in its middle, kills."""

import math
from pathlib import Path

import pytest

from tests.test_frozen import account_of
from tests.whole_runs import Job, metrics_of, run_undisturbed

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

LR, LEAST = 2e-4, 1e-5
SCHEDULED = (
    "trainer.grpo.max_steps=5",
    "trainer.resets.at_steps=[3]",
    "trainer.trace_steps=[]",
    f"model.optim.lr={LR}",
    "model.optim.sched.name=cosine",
    "model.optim.sched.warmup_steps=2",
    f"model.optim.sched.min_lr={LEAST}",
)


def test_killed_in_a_reset_and_after_it_the_rates_and_the_weights_are_those_of_the_schedule(
    root: Path, tmp_path: Path
) -> None:
    """Two steps of rise, a fall over the other three, and the rise again after the reset of step 3."""
    fall = [LEAST + (LR - LEAST) * 0.5 * (1 + math.cos(math.pi * x / 3)) for x in (0, 1, 2)]
    wanted = [LR / 2, LR, fall[0], fall[1] / 2, fall[2]]
    undisturbed = run_undisturbed(root, tmp_path, *SCHEDULED)
    assert [line["policy/lr"] for line in metrics_of(undisturbed)] == pytest.approx(wanted, rel=1e-12)

    run = tmp_path / "killed"
    assert Job(root, run, *SCHEDULED, kill_at="reset:checkpointed").wait() == 1
    second = Job(root, run, *SCHEDULED)
    second.until(lambda: len(metrics_of(run)) >= 4)
    second.kill_supervisor()
    third = Job(root, run, *SCHEDULED)
    assert third.wait() == 0, third.text()
    assert account_of(run) == account_of(undisturbed)
