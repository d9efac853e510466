"""`trainer.grpo.old_logp=engine`: pi_old is the engine's, and the trainer's pass now and then bounds the gap."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl.config import ResetsConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.settings import load
from tests.lifecycle.small_run import SmallRun, config


def engines_own(folder: Path, resets: ResetsConfig | None = None, **grpo: Any) -> SmallRun:
    run = SmallRun(config(folder, resets, **{"max_steps": 12, "old_logp": "engine", **grpo}))
    run.cfg.trainer.grpo.correction.kind = "none"
    return run


def passes(run: SmallRun, monkeypatch: pytest.MonkeyPatch, noise: float = 0.0) -> list[int]:
    """Run to the end; return the steps in which the trainer computed its policy's log-probabilities."""
    steps: list[int] = []

    def prepare(trainer: Any) -> None:
        compute = run.policy.logprobs

        def counted(batch: Any) -> Any:
            steps.append(trainer.progress.step)
            return compute(batch)

        run.policy.logprobs = counted  # type: ignore[method-assign]
        run.engines.noise = noise

    run.process(monkeypatch, prepare)
    return steps


def test_the_trainers_pass_is_made_in_every_tenth_step_and_after_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engines_own(tmp_path, ResetsConfig(at_steps=[4]))
    assert passes(run, monkeypatch) == [1, 5, 11]
    lines = run.lines()
    measured = [line["step"] for line in lines if "engine_gap/mean_abs" in line]
    assert measured == [line["step"] for line in lines if "entropy" in line] == [1, 5, 11]
    assert measured == [line["step"] for line in lines if "correction/mean_abs" in line]
    assert all("kl" in line for line in lines)
    assert passes(engines_own(tmp_path / "trainer", old_logp="trainer"), monkeypatch) == list(range(1, 13))


def test_updates_compare_with_the_engines_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step with the trainer's pass; every weight is 1."""
    run = engines_own(tmp_path)
    passes(run, monkeypatch, noise=1e-4)
    assert len(run.policy.updates) == 2 * 12
    for batch, _, _ in run.policy.updates:
        assert torch.equal(batch.old_logp_BT, batch.engine_logp_BT)
        assert torch.equal(batch.weight_BT[batch.mask_BT], torch.ones(int(batch.mask_BT.sum())))


def test_a_large_gap_ends_the_run_before_an_update_and_the_fix_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engines_own(tmp_path)
    with pytest.raises(ConfigError, match=r"in step 1 engine and trainer differ by 0.5 .* Fix: old_logp=trainer"):
        passes(run, monkeypatch, noise=0.5)
    assert run.policy.updates == []
    run.cfg.trainer.grpo.old_logp = "trainer"
    assert len(passes(run, monkeypatch)) == 12


def test_a_stopped_run_is_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = engines_own(tmp_path / "whole"), engines_own(tmp_path / "parts", max_steps=5)
    assert passes(whole, monkeypatch) == [1, 11]
    assert passes(parts, monkeypatch) == [1]
    parts.cfg.trainer.grpo.max_steps = 12
    assert passes(parts, monkeypatch) == [11]
    assert parts.policy.weights_sha256() == whole.policy.weights_sha256()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], r"correction.kind=tis weighs .* Fix: trainer.grpo.correction.kind=none"),
        (["trainer.grpo.correction.kind=none", "trainer.grpo.adaptive_entropy.enabled=true"], "entropy in each step"),
    ],
)
def test_what_needs_the_trainers_pass_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(["trainer.grpo.old_logp=engine", *overrides])


def test_one_step_off_needs_no_correction_with_the_engines_policy() -> None:
    one_step_off = ["rollout.own_devices=true", "trainer.grpo.dynamic_sampling.max_staleness=1"]
    none = "trainer.grpo.correction.kind=none"
    with pytest.raises(ConfigError, match="rollout.own_devices.*older weights"):
        load([*one_step_off, none])
    load([*one_step_off, none, "trainer.grpo.old_logp=engine"])
