"""Whole runs whose engine samples otherwise than the trainer computes: an alarm names the first step with the fault."""

from pathlib import Path

import pytest

from tests.whole_runs import Job, events_of, metrics_of

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

STEP = 3  # the first with the fault
# Code at the start of each process; engines do not run it.
WARMER = f"""
import sys
from dataclasses import replace
if "nemo_prorl.rank" in sys.orig_argv:
    from nemo_prorl.rollout.collector import Collector
    sampling = Collector._sampling
    def warmer(self, draw, work):
        asked = sampling(self, draw, work)
        return replace(asked, temperature=1.05 * asked.temperature) if work.step >= {STEP} else asked
    Collector._sampling = warmer
"""
ROUNDED_HEAD = f"""
import sys
if "nemo_prorl.rank" in sys.orig_argv:
    from nemo_prorl.algorithms import logprobs
    from nemo_prorl.trainer import Trainer
    train_step, chunked_logprobs, at = Trainer.train_step, logprobs.chunked_logprobs, []
    def noted(self, step):
        at.append(step)
        return train_step(self, step)
    def rounded(hidden, weight, *arguments, **options):
        if at and at[-1] >= {STEP}:
            hidden, weight, options = hidden.bfloat16(), weight.bfloat16(), options | dict(float32_head=False)
        return chunked_logprobs(hidden, weight, *arguments, **options)
    Trainer.train_step, logprobs.chunked_logprobs = noted, rounded
"""


@pytest.mark.parametrize(
    ("cluster", "fault", "says"),
    [
        ("laptop", WARMER, "the temperature of the engine is at least "),
        ("laptop_bf16", WARMER, "the temperature of the engine is at least "),
        ("laptop", ROUNDED_HEAD, "engine and trainer differ by 0.00"),
    ],
)
def test_the_first_step_with_a_fault_raises_an_alarm(
    root: Path, tmp_path: Path, cluster: str, fault: str, says: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(fault)
    overrides = [f"cluster={cluster}", "trainer.resets.at_steps=[]", "trainer.trace_steps=[]"]
    overrides += ["trainer.grpo.validate_every=10", "trainer.grpo.checkpoint_every=10"]
    job = Job(root, tmp_path / "run", *overrides, faults=tmp_path)
    assert job.wait() == 0, job.text()
    alarms = [event for event in events_of(job.run_dir) if event["event"] == "alarm"]
    steps = [alarm["step"] for alarm in alarms if alarm["what"].startswith(says)]
    assert steps == list(range(STEP, len(metrics_of(job.run_dir)) + 1)), alarms
    others = ("engine and trainer differ by ", "engine and trainer differ much in few tokens: ")
    assert all(alarm["what"].startswith((says, *others)) and alarm["step"] >= STEP for alarm in alarms), alarms
