"""The KL of other trainers: in the rewards or in the loss, and what each estimator means there."""

from pathlib import Path

import pytest
import torch

from nemo_prorl.algorithms.losses import kl_estimate
from tests.migration.test_convert import GRPO, converted

OPEN = "python3 -m openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 --init_kl_coef 0.01 --advantage_estimator "


@pytest.mark.parametrize(
    ("flags", "estimator", "told"),
    [
        ("rloo", "k2", "(k1) is subtracted from the rewards there; here it is a term of the loss"),
        ("rloo --kl_estimator k2", "k2", "(k2) is subtracted from the rewards there, which no override does"),
        ("rloo --kl_estimator k3", "k2", "(k3) is subtracted from the rewards there, which no override does"),
        ("reinforce_baseline", "k2", "the std of the advantages divides it there, too"),
        ("rloo --use_kl_loss", "k1", "the expected gradient of k1 as a loss is 0, there as here"),
        ("rloo --use_kl_loss --kl_estimator k2", "k2", None),
        ("rloo --use_kl_loss --kl_estimator k3", "k3", None),
        ("group_norm --use_kl_loss --use_kl_estimator_k3", "k3", None),
        ("rloo --init_kl_coef 0", "k2", None),
    ],
)
def test_the_kl_of_openrlhf_has_the_note_of_its_estimator(
    flags: str, estimator: str, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 2 if "k3" in flags.split("_") else 0  # of an older release
    overrides, comments = converted("openrlhf", OPEN + flags, tmp_path / "run.sh", capsys, code)
    assert f"{GRPO}.kl_estimator={estimator}" in overrides
    found = [line for line in comments if line.lstrip().startswith("algo.kl") or "kl_estimator=" in line]
    assert len(found) == (told is not None)
    assert all(str(told) in line for line in found)
    assert any("the std of the advantages divides it" in line for line in comments) == ("baseline" in flags)


@pytest.mark.parametrize(
    ("advantage", "coefficient", "told"),
    [
        ("{name: reinforce_plus_plus}", "0.01", "(k3) is subtracted from the rewards there, which no override does"),
        ("{name: grpo}", "0", "only adv_estimator.name=reinforce_plus_plus subtracts the KL there"),
    ],
)
def test_the_kl_of_nemo_rl_may_be_in_the_rewards(
    advantage: str, coefficient: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"grpo: {{max_num_steps: 90, adv_estimator: {advantage}}}\nloss_fn: {{use_kl_in_reward: true}}"
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    assert f"{GRPO}.kl_coef={coefficient}" in overrides
    assert [told in line for line in comments if "loss_fn.use_kl_in_reward: " in line] == [True]
    assert not any("weighs tokens by their probability" in line for line in comments)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("algorithm.kl_ctrl.kl_coef=0.002", "algorithm.kl_ctrl.kl_coef=0.002 has no effect there, without algor"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.02", "actor_rollout_ref.actor.kl_loss_coef=0.02 has no effect"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "no override needed for 1 settings: 1 without an effect there"),
        ("algorithm.kl_ctrl.kl_coef=0.001 algorithm.use_kl_in_reward=True", None),
        ("trainer.nnodes=1", None),
    ],
)
def test_a_kl_coefficient_of_verl_without_an_effect_is_told(
    words: str, line: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {words}"
    _, comments = converted("verl", text, tmp_path / "run.sh", capsys)
    found = [one for one in comments if "has no effect there, without" in one or "no override needed" in one]
    assert [one.startswith(str(line)) for one in found] == ([True] if line else [])


def test_k1_as_a_loss_of_verl_has_the_note_of_k1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("kl", "low_var_kl"):
        text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True"
        _, comments = converted(
            "verl", f"{text} actor_rollout_ref.actor.kl_loss_type={kind}", tmp_path / "run.sh", capsys
        )
        assert any(line.startswith("kl_loss_type=k1: the expected gr") for line in comments) == (kind == "kl")


def test_the_kl_penalty_of_verl_decides_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True"
    for penalty, told in (("kl", "(k1)"), ("mse", "(k2)"), ("low_var_kl", "(k3)"), ("k3+", "(k3)"), ("abs", "(abs)")):
        words = f"{text} algorithm.kl_penalty={penalty}"
        overrides, comments = converted("verl", words, tmp_path / "run.sh", capsys)
        start = f"  algorithm.use_kl_in_reward: the KL {told} is subtracted"
        assert [line.startswith(start) for line in comments if "kl_in_reward" in line] == [True]
        assert f"{GRPO}.kl_estimator=k2" in overrides


@pytest.mark.parametrize(
    ("estimator", "told"),
    [
        ("k1", "plus a term whose mean is 0"),
        ("k2", "k2's is the one here times 1 + d/2"),
        ("k3", "k3's is exactly that of trainer.grpo.kl_estimator=k2"),
    ],
)
def test_the_weight_of_nemo_rl_s_kl_makes_its_gradient_that_of_k2(
    estimator: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logp, d = torch.tensor([-0.2, -1.0, -3.0], dtype=torch.float64, requires_grad=True), torch.tensor([2.0, 0.1, -1.0])
    kl = kl_estimate(logp, logp.detach() + d, estimator)
    weighed, k2 = (torch.exp(logp - logp.detach()) * kl).sum(), kl_estimate(logp, logp.detach() + d, "k2").sum()
    there, here = (torch.autograd.grad(loss, logp)[0] for loss in (weighed, k2))
    more = {"k1": torch.ones(3), "k2": d.square() / 2, "k3": torch.zeros(3)}[estimator]
    assert torch.allclose(there, here + more)
    text = f"grpo: {{max_num_steps: 90}}\nloss_fn: {{reference_policy_kl_type: {estimator}}}"
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    assert f"{GRPO}.kl_estimator=k2" in overrides
    assert [told in line for line in comments if "reference_policy_kl_type" in line] == [True]
    assert any("kl_input_clamp_value=20.0, kl_output_clamp_value=10.0: a token beyond" in line for line in comments)


@pytest.mark.parametrize(
    ("given", "estimator", "told", "code"),
    [
        ("beta=0.1", "k2", "use_bias_correction_kl: the weight, a token's ratio, has a gradient there", 0),
        ("beta=0.1, importance_sampling_level='sequence'", "k3", "  use_bias_correction_kl=True: with importance", 2),
    ],
)
def test_the_ratio_of_trl_s_kl_makes_its_gradient_that_of_k2(
    given: str, estimator: str, told: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig(max_steps=9, use_bias_correction_kl=True, {given})"
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code)
    assert f"{GRPO}.kl_estimator={estimator}" in overrides
    assert any(line.startswith(told) for line in comments)
