"""Runs of a fixed seed compute what they computed when they were recorded, on every machine.

On a processor with the abilities of the recorded one they are equal to the bit.  On others, which round otherwise,
everything that is counted is equal, and the other numbers differ by rounding.  Where a change is meant to change a
number, record the run again and say in the commit which number and why:

    python -m tests.test_frozen small RUN        RUN: made by `tests.whole_runs.run_undisturbed`
    python -m tests.test_frozen twelve RUN       the same with the overrides TWELVE
    python -m tests.test_frozen guarded RUN      the same with the overrides GUARDED

The twelve steps are those of the commit before the redesign (f490a69) except for last bits of log-probabilities: its
engines and trainer computed them in blocks of complete groups, hence in micro-batches of other rows.  With one row in
each micro-batch both were equal to the bit.
"""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lines import read_lines
from tests.whole_runs import Job, metrics_of, run_undisturbed, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]

RECORDS = Path(__file__).parent / "frozen"
TWELVE = (
    "trainer.grpo.max_steps=12",
    "trainer.resets.at_steps=[6]",
    "trainer.grpo.validate_every=4",
    "trainer.trace_steps=[]",
)


GUARDED = (  # shaping, two roll-backs, a validation after each step
    "trainer.grpo.max_steps=6",
    "trainer.grpo.validate_every=1",
    "trainer.grpo.keep_best=2",
    "trainer.grpo.max_response_tokens=5",
    "trainer.grpo.unfinished_penalty=0.5",
    "trainer.grpo.shaping.overlong_tokens=2",
    "trainer.resets.at_steps=[3,5]",
    "trainer.resets.roll_back=true",
    "trainer.resets.lr_factor=0.5",
    "trainer.resets.lr_warmup_steps=2",
    "trainer.trace_steps=[]",
)
# With kernels for AVX2 instead of AVX-512, numbers of the first 6 steps differ by up to 8.2e-7 of the larger of 1 and
# the number, and extremes of a batch (max_, min_, p999) by up to 2.9e-6.  Steps multiply the difference: 2.7e-6 and
# 1.7e-5 after 12.
COMPARED_STEPS, TOLERANCE, EXTREME = 6, 1e-6, 1e-5


def processor() -> str:
    """Return what decides how numbers are rounded: the processor's maker and vector instructions, and torch."""
    about = dict(
        re.split(r"\s*:\s*", line, maxsplit=1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line
    )
    flags = about.get("flags", about.get("Features", "")).split()
    vectors = sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c", "sse4", "sve", "asimd")))
    maker = " ".join(about.get(key, "") for key in ("vendor_id", "cpu family", "model"))
    return f"{maker}, {' '.join(vectors)}, torch {torch.__version__}"


def account_of(run: Path) -> dict[str, Any]:
    """Return all that a run computed, without times."""
    summary = json.loads((run / "summary.json").read_text())
    rollouts = read_lines(run / "rollouts" / "step-1.jsonl")
    return {
        "processor": processor(),
        "prompts of step 1": sorted({rollout["id"] for rollout in rollouts if rollout["trained"]}),
        "metrics": [without_time(metrics) for metrics in metrics_of(run)],
        **{key: summary[key] for key in ("weights_sha256", "reference_sha256", "heldout", "resets")},
    }


def assert_recorded(name: str, found: dict[str, Any]) -> None:
    """Compare an account with the recorded one."""
    recorded = json.loads((RECORDS / f"{name}.json").read_text())
    exact = found["processor"] == recorded["processor"]
    assert different(recorded, found, exact) == {}
    if exact:
        assert found == recorded


def different(recorded: dict[str, Any], found: dict[str, Any], exact: bool) -> dict[str, Any]:
    """Return what two accounts do not share: to the bit if `exact`, otherwise beyond what rounding explains.

    Hashes of weights are compared if `exact` only, and so are steps after COMPARED_STEPS.
    """
    apart: dict[str, Any] = {}
    steps = None if exact else COMPARED_STEPS
    for before, now in zip(recorded["metrics"][:steps], found["metrics"][:steps], strict=True):
        if set(before) != set(now):
            apart[f"names of step {before['step']}"] = sorted(set(before) ^ set(now))
        for key in before.keys() & now.keys():
            if not equal(key, before[key], now[key], exact):
                apart[f"{key} of step {before['step']}"] = (before[key], now[key])
    for key in ("prompts of step 1", "heldout"):
        if recorded[key] != found[key]:
            apart[key] = (recorded[key], found[key])
    resets = [[{**reset, "reference_sha256": ""} for reset in account["resets"]] for account in (recorded, found)]
    if resets[0] != resets[1]:
        apart["resets"] = resets
    return apart


def equal(key: str, before: Any, now: Any, exact: bool) -> bool:
    """Return whether a number is the recorded one; a whole number and a text must be equal, rounding or not."""
    if exact or not isinstance(before, float) or before == int(before) or not isinstance(now, float):
        return bool(before == now)
    extreme = key.rpartition("/")[2].startswith(("max_", "min_", "p999"))
    tolerance = (EXTREME if extreme else TOLERANCE) * (1.0 + abs(before))
    return abs(now - before) <= tolerance


def test_another_processor_is_still_compared() -> None:
    """A different seed, a step without its update, or one response that is judged otherwise is seen on any machine."""
    recorded = json.loads((RECORDS / "guarded.json").read_text())
    assert different(recorded, recorded, exact=False) == {}
    for key, change in (("policy/loss", 1e-5), ("kl", 1e-5), ("reward/all", 0.01), ("rollout/groups", 1.0)):
        other = copy.deepcopy(recorded)
        other["metrics"][1][key] += change
        assert list(different(recorded, other, exact=False)) == [f"{key} of step 2"]
    other = copy.deepcopy(recorded)
    other["metrics"][1]["policy/loss"] += 1e-9
    assert different(recorded, other, exact=False) == {}
    assert different(recorded, other, exact=True) != {}


def test_the_run_is_the_recorded_one(undisturbed: Path) -> None:
    assert_recorded("small", account_of(undisturbed))


@pytest.mark.slow
def test_twelve_steps_are_the_recorded_ones_also_when_killed_in_their_reset(root: Path, tmp_path: Path) -> None:
    """Four validations, a hard reset after step 6, and a kill inside it."""
    undisturbed = run_undisturbed(root, tmp_path, *TWELVE)
    assert Job(root, tmp_path / "killed", *TWELVE, kill_at="reset:checkpointed").wait() == 1
    resumed = Job(root, tmp_path / "killed", *TWELVE)
    assert resumed.wait() == 0, resumed.text()
    assert account_of(resumed.run_dir) == account_of(undisturbed)
    assert_recorded("twelve", account_of(undisturbed))


@pytest.mark.slow
def test_shaping_roll_backs_and_a_kill_are_the_recorded_ones(root: Path, tmp_path: Path) -> None:
    """Killed inside its first reset, which goes back to the weights of step 0, and continued."""
    assert Job(root, tmp_path / "killed", *GUARDED, kill_at="reset:optimizer").wait() == 1
    resumed = Job(root, tmp_path / "killed", *GUARDED)
    assert resumed.wait() == 0, resumed.text()
    account = account_of(resumed.run_dir)
    assert [reset["rolled_back_to"] for reset in account["resets"]] == [0, 3]
    assert all(step["shaping/unfinished"] < 0.0 and step["shaping/overlong"] < 0.0 for step in account["metrics"])
    assert_recorded("guarded", account)


if __name__ == "__main__":
    (RECORDS / f"{sys.argv[1]}.json").write_text(json.dumps(account_of(Path(sys.argv[2])), indent=1) + "\n")
