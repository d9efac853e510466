"""Settings of other trainers that need more than another name: what `prorl convert` makes of their meaning."""

import re
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.cautions import cautions
from tests import paper_model
from tests.migration.test_convert import GRPO, converted, with_model


def test_steps_per_generation_of_trl_are_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "args = GRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=8,"
    text += " max_steps=101, num_generations="
    overrides, comments = converted("trl", f"{text}4)", tmp_path / "train.py", capsys)
    assert {f"{GRPO}.prompts_per_step=16", f"{GRPO}.updates_per_step=2", f"{GRPO}.max_steps=51"} <= set(overrides)
    assert any(line.startswith("a step here makes 2 of TRL's steps: numbers of steps are divided") for line in comments)

    overrides, comments = converted("trl", f"{text}6)", tmp_path / "train.py", capsys, code=2)
    assert not any("prompts_per_step" in override for override in overrides)
    assert f"  {GRPO}.prompts_per_step: 64 responses of a process are no whole groups of 6" in comments


def test_generations_within_an_update_of_trl_are_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=32, steps_per_generation=8)"
    overrides, _ = converted("trl", text, tmp_path / "train.py", capsys)
    assert {f"{GRPO}.prompts_per_step=16", f"{GRPO}.updates_per_step=1"} <= set(overrides)


@pytest.mark.parametrize(
    ("processes", "sizes", "expected"),
    [
        (None, "generation_batch_size=64", ["prompts_per_step=8", "updates_per_step=8"]),
        (4, "generation_batch_size=64", ["prompts_per_step=8", "updates_per_step=2"]),
        (16, "generation_batch_size=128, gradient_accumulation_steps=2", ["prompts_per_step=32", "updates_per_step=1"]),
        (3, "generation_batch_size=64", "generation_batch_size=64: TRL refuses it, because it is no multiple of 24"),
        (4, "generation_batch_size=64, steps_per_generation=2", "TRL refuses it, because steps_per_generation is set"),
        (
            1,
            "steps_per_generation=2, gradient_accumulation_steps=3",
            "an update of 24 responses is no multiple of the 16",
        ),
    ],
)
def test_a_generation_batch_of_trl_is_that_of_all_processes(
    processes: int | None, sizes: str, expected: list[str] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        f"GRPOConfig({sizes}, per_device_train_batch_size=8, max_steps=8)\nGRPOTrainer('org/model')"
    )
    told = expected if isinstance(expected, str) else None
    if processes is None:
        overrides, comments = converted("trl", (tmp_path / "train.py").read_text(), tmp_path / "train.py", capsys)
        text = "N processes have N times the responses of an update, and so trainer.grpo.updates_per_step / N: gener"
        assert any(text in line for line in comments)
    else:
        text = f"model_name_or_path=org/model accelerate launch --num_processes {processes} train.py"
        overrides, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2 if told else 0)
    if told:
        assert any(line.startswith(f"  {GRPO}.prompts_per_step: ") and told in line for line in comments)
    else:
        assert {f"{GRPO}.{one}" for one in expected} <= set(overrides)


@pytest.mark.parametrize(
    ("words", "coefficient", "estimator"),
    [
        ("", "0", "k3"),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse", "0.001", "k2"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02", "0.02", "k2"),
    ],
)
def test_the_kl_of_verl_is_where_the_script_puts_it(
    words: str, coefficient: str, estimator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {words}"
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys)
    assert {f"{GRPO}.kl_coef={coefficient}", f"{GRPO}.kl_estimator={estimator}"} <= set(overrides)
    assert any("algorithm.use_kl_in_reward: the KL (k1) is subtracted" in line for line in comments) == (
        "reward" in words
    )


def test_a_clip_ratio_of_verl_without_an_effect_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ("clip_ratio=0.1", True),
        ("clip_ratio=0.1 actor_rollout_ref.actor.clip_ratio_low=null", False),
    ):
        text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.{words}"
        overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys)
        assert (f"{GRPO}.clip_low=0.2" if told else f"{GRPO}.clip_low=0.1") in overrides
        assert any("actor.clip_ratio=0.1 has no effect there" in line for line in comments) == told


def test_what_verl_s_own_scripts_have_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = "python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer.yaml'"
    start += " algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_"
    _, comments = converted(
        "verl", f"{start}high=0.28 actor_rollout_ref.actor.clip_ratio_low=0.1", tmp_path / "run.sh", capsys
    )
    assert not any("clip_ratio=0.2" in line or "ppo_megatron" in line for line in comments)
    text = f"{start}low=0.1 algorithm.rollout_correction.rollout_is=token"
    text += " actor_rollout_ref.rollout.calculate_log_probs=True"
    text += " algorithm.rollout_correction.rollout_is_batch_normalize=True"
    _, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    told = [line.split("=")[0].rsplit(".", 1)[-1] for line in comments if line.startswith("  algorithm.rollout_corr")]
    assert told == ["rollout_is_batch_normalize"]


@pytest.mark.parametrize(
    ("trainer", "file", "text", "seed"),
    [
        ("trl", "a.py", "GRPOConfig(beta=0)", "seed=42"),
        ("openrlhf", "a.sh", "python3 -m x --l2 0", "seed=42"),
        ("nemo_rl", "a.yaml", "grpo: {max_num_steps: 90}", "seed=42"),
        ("openrlhf", "a.sh", "python3 -m x --seed 7", "seed=7"),
    ],
)
def test_a_seed_is_that_of_the_file_or_the_default(
    trainer: str, file: str, text: str, seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert seed in converted(trainer, text, tmp_path / file, capsys)[0]


@pytest.mark.parametrize(
    ("trainer", "file", "text", "told"),
    [
        (
            "trl",
            "a.py",
            "GRPOConfig(max_steps=30, warmup_steps=50)",
            "model.optim.sched.warmup_steps: the run there ends after 30 steps, within its warm-up of 50; a run",
        ),
        (
            "verl",
            "a.sh",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=1 data.train_batch_size=256",
            f"{GRPO}.samples_per_prompt: 1 there; here the responses to a prompt are compared, so at least 2",
        ),
    ],
)
def test_what_a_plan_would_refuse_must_be_set(
    trainer: str, file: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = converted(trainer, text, tmp_path / file, capsys, code=2)
    assert any(line.startswith(f"  {told}") for line in comments)
    assert not any(one.startswith(told.split(":")[0]) for one in overrides)


def test_engines_have_the_gpus_of_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m x --actor_num_gpus_per_node 2 --vllm_tensor_parallel_size 2 --vllm_num_engines"
    for engines, told in ((1, False), (3, True)):
        overrides, comments = converted("openrlhf", f"{text} {engines}", tmp_path / "run.sh", capsys)
        assert "rollout.engines=1" in overrides
        assert any(line.startswith("rollout.engines=1 in place of 3, which have") for line in comments) == told


def test_an_update_has_whole_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m openrlhf.cli.train_ppo_ray --rollout.batch_size 6 --rollout.n_samples_per_prompt 4"
    text += " --train.batch_size"
    overrides, _ = converted("openrlhf", f"{text} 8", tmp_path / "run.sh", capsys)
    assert f"{GRPO}.updates_per_step=3" in overrides
    overrides, comments = converted("openrlhf", f"{text} 6", tmp_path / "run.sh", capsys, code=2)
    assert not any("updates_per_step" in override for override in overrides)
    assert any(
        "the 24 responses of a step do not make whole updates of 6 with whole groups" in line for line in comments
    )


SYNC = "sync_ref_model=True, ref_model_sync_steps=64"


@pytest.mark.parametrize(
    ("arguments", "set_", "comment"),
    [
        (
            f"{SYNC}, beta=0.1",
            False,
            "  trainer.resets.every: sync_ref_model: every 64 steps the reference becomes 0.6 (ref_mod",
        ),
        (f"{SYNC}, beta=0.1, ref_model_mixup_alpha=1", True, None),
        (SYNC, False, "sync_ref_model has no effect with beta=0, which needs no reference policy"),
        ("ref_model_sync_steps=64, beta=0.1", False, None),
    ],
)
def test_a_synchronized_reference_of_trl_resets_the_reference_only(
    arguments: str, set_: bool, comment: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 2 * bool(comment and "becomes" in comment)
    text = f"GRPOConfig(max_steps=9, {arguments})"
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys, code)
    resets = [override for override in overrides if override.startswith("trainer.resets")]
    assert resets == (["trainer.resets.every=64", "trainer.resets.parts=reference"] if set_ else [])
    found = [line for line in comments if "sync_ref_model" in line and "without sync_ref_model" not in line]
    assert len(found) == (comment is not None)
    assert all(line.startswith(str(comment)) for line in found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("vllm_importance_sampling_correction=False", ["kind=none"]),
        ("vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_cap=2.0", ["cap=2", "kind=tis"]),
        (
            "vllm_importance_sampling_mode='token_mask', vllm_importance_sampling_clip_min=0.5",
            ["cap=3", "floor=0.5", "kind=icepop"],
        ),
    ],
)
def test_the_correction_of_trl_is_that_of_here(
    arguments: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = converted("trl", f"GRPOConfig(use_vllm=True, {arguments})", tmp_path / "train.py", capsys)
    found = [one.removeprefix(f"{GRPO}.correction.") for one in overrides if one.startswith(f"{GRPO}.correction.")]
    assert found == expected
    assert not any("vllm_importance" in line for line in comments)


def test_a_correction_without_an_upper_bound_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So the plan has no caution about a number that the user does not know."""
    ends = "vllm_importance_sampling_clip_max=None, vllm_importance_sampling_clip_min=0.5"
    overrides, _ = converted("trl", f"GRPOConfig(use_vllm=True, max_steps=9, {ends})", tmp_path / "train.py", capsys)
    assert {f"{GRPO}.correction.{one}" for one in ("cap=null", "floor=0.5", "kind=sequence_mask")} <= set(overrides)
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"
    few = ["trainer.devices=8", "rollout.engines=8", model]
    cfg = settings.load(["cluster=h100_4x8", *overrides, *few])
    assert cfg.trainer.grpo.correction.cap is None
    assert not [text for text in cautions(cfg) if "correction" in text]


@pytest.mark.parametrize(
    ("trainer", "file", "text", "named"),
    [
        ("trl", "train.py", "GRPOConfig(scale_rewards=False)", "scale_rewards=false"),
        (
            "verl",
            "run.sh",
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false",
            "algorithm.norm_adv_by_std_in_grpo=false",
        ),
        (
            "openrlhf",
            "run.sh",
            "python3 -m x --algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8",
            "algo.advantage.estimator=dr_grpo",
        ),
    ],
)
def test_advantages_without_a_std_are_mean_only(
    trainer: str, file: str, text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = converted(trainer, text, tmp_path / file, capsys)
    assert f"{GRPO}.advantage=mean_only" in overrides
    assert not any(named in line for line in comments)


def test_a_setting_without_an_effect_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, comments = converted("trl", "GRPOConfig(num_iterations=1, top_p=1.0, top_k=0)", tmp_path / "train.py", capsys)
    assert "no override needed for 3 settings: 3 the same here" in comments
    assert not any("without a counterpart" in line for line in comments)
    _, comments = converted("trl", "GRPOConfig(num_iterations=2, top_p=0.9)", tmp_path / "train.py", capsys, code=2)
    assert {line.split(":")[0] for line in comments} >= {"  top_p=0.9", "  num_iterations=2"}


def test_all_numbers_of_steps_of_trl_are_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "GRPOConfig(max_steps=400, steps_per_generation=4, gradient_accumulation_steps=1, sync_ref_model=True,"
    text += " ref_model_sync_steps=512, ref_model_mixup_alpha=1, beta=0.1"
    text += ", save_steps=100, eval_steps=40, eval_strategy='steps')"
    overrides, _ = converted("trl", text, tmp_path / "train.py", capsys)
    periods = {f"{GRPO}.max_steps=100", f"{GRPO}.checkpoint_every=25", f"{GRPO}.validate_every=10"}
    assert {*periods, "trainer.resets.every=128"} <= set(overrides)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "told"),
    [
        ("trl", "a.py", "GRPOConfig(beta=0)", "num_train_epochs=3.0 (the default): 3.0 * (prompts"),
        ("trl", "a.py", "GRPOConfig(max_steps=-1)", "num_train_epochs=3.0 (the default): 3.0 * (prompts"),
        (
            "verl",
            "a.sh",
            "python3 -m verl.trainer.main_ppo data.train_batch_size=256 trainer.total_epochs=15",
            "trainer.total_epochs=15: 15 *",
        ),
        ("openrlhf", "a.sh", "python3 -m x --num_episodes 20", "num_episodes=20: 20 * (prompts"),
        (
            "openrlhf",
            "a.sh",
            "python3 -m x --num_episodes 2 --max_samples 1e4 --rollout_batch_size 8",
            "num_episodes=2: 2 * min(max_samples=10000, prompts of the training data) / 8 steps, which",
        ),
        (
            "verl",
            "a.sh",
            "python3 -m recipe.dapo.main_dapo data.train_max_samples=99 trainer.total_epochs=2 data.gen_batch_size=12"
            " data.train_batch_size=4 algorithm.filter_groups.enable=True",
            "trainer.total_epochs=2: 2 * min(data.train_max_samples=99, prompts of the training data) / 12 steps, which"
            " also decide the schedule of the learning rate; the run there ends earlier",
        ),
        (
            "nemo_rl",
            "a.yaml",
            "grpo: {num_prompts_per_step: 8, use_dynamic_sampling: true, batch_multiplier: 1.5}",
            "grpo.max_num_epochs=1 (the default): 1 * (prompts of the training data) / 12 steps",
        ),
        ("nemo_rl", "a.yaml", "grpo: {num_prompts_per_step: 8}", "grpo.max_num_epochs=1 (the default): 1 * (prompts"),
    ],
)
def test_a_number_of_steps_that_depends_on_the_data_must_be_set(
    trainer: str, file: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(with_model(trainer, text))
    assert cli.main(["convert", trainer, str(tmp_path / file)]) == 2
    printed = capsys.readouterr().out
    assert f"#   {GRPO}.max_steps: {told}" in printed
    assert f"{GRPO}.max_steps=" not in printed


@pytest.mark.parametrize(
    ("arguments", "told", "is_difference"),
    [
        ("scale_rewards=False", "divided by 2, and so are advantages without a std", True),
        ("scale_rewards=False, reward_weights=[1, 0.5]", "divided by 1.5, and so are", True),
        ("scale_rewards='group'", "divided by 2, which cancels", False),
        ("scale_rewards=False, reward_weights=[0.5, 0.5]", None, False),
    ],
)
def test_a_sum_of_rewards_of_trl_becomes_a_mean(
    arguments: str, told: str | None, is_difference: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig({arguments})\nGRPOTrainer(model='m', reward_funcs=[a, b])"
    _, comments = converted("trl", text, tmp_path / "train.py", capsys)
    found = [line for line in comments if "a sum of rewards becomes a mean" in line]
    assert len(found) == (told is not None)
    assert all(str(told) in line and line.startswith("  ") == is_difference for line in found)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "expected"),
    [
        ("trl", "a.py", "GRPOConfig(importance_sampling_level='sequence', loss_type='grpo')", ["loss=gspo"]),
        ("trl", "a.py", "GRPOConfig(loss_type='cispo', epsilon_high=5.0)", ["loss=cispo", "clip_high=4"]),
        ("verl", "a.sh", "policy_loss.loss_mode=gspo", ["loss=gspo", "aggregation=sequence", "dual_clip=null"]),
        ("verl", "a.sh", "policy_loss.loss_mode=cispo", ["loss=cispo", "dual_clip=null"]),
        ("verl", "a.sh", "tis_imp_ratio_cap=2.5", ["correction.kind=tis", "correction.cap=2.5"]),
        ("openrlhf", "a.sh", "--policy_loss_type gspo", ["loss=gspo", "aggregation=sequence"]),
        ("nemo_rl", "a.yaml", "{sequence_level_importance_ratios: true, token_level_loss: false}", ["loss=gspo"]),
    ],
)
def test_losses_have_the_name_of_here(
    trainer: str, file: str, text: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = {
        "verl": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.",
        "nemo_rl": "loss_fn: ",
    }
    starts["openrlhf"] = "python3 -m x --n_samples_per_prompt 8 "
    overrides, comments = converted(trainer, starts.get(trainer, "") + text, tmp_path / file, capsys)
    assert {f"{GRPO}.{one}" for one in expected} <= set(overrides)
    assert any("raised to it there" in line for line in comments) == (text == "policy_loss.loss_mode=cispo")


LOGGED = "actor_rollout_ref.rollout.calculate_log_probs=True"


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (f"rollout_is=True algorithm.rollout_is_threshold=3 {LOGGED}", "tis", 0),
        ("rollout_is=True algorithm.rollout_is_threshold=3", "none", 0),
        ("rollout_is_threshold=3", "none", 0),
        (f"rollout_is=True algorithm.rollout_is_threshold=3 algorithm.rollout_is_mode=mask {LOGGED}", None, 2),
    ],
)
def test_the_older_correction_of_verl_is_converted(
    words: str, kind: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.{words}"
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys, code)
    assert [one for one in overrides if "correction.kind" in one] == (
        [f"{GRPO}.correction.kind={kind}"] if kind else []
    )
    assert any("rollout_is_veto_threshold=0.0001" in line for line in comments) == (kind != "none")


@pytest.mark.parametrize(
    ("trainer", "file", "text", "told"),
    [
        ("trl", "a.py", "GRPOConfig(beta=0, learn_rate=5e-6)", "learn_rate=5e-06: did you mean learning_rate?"),
        ("trl", "a.py", "GRPOConfig(beta=0, temprature=0.5)", "temprature=0.5: did you mean temperature?"),
        ("trl", "a.py", "GRPOConfig(beta=0, gradient_clip=0.5)", "gradient_clip=0.5: did you mean max_grad_norm?"),
        (
            "verl",
            "a.sh",
            "python3 -m verl.trainer.main_ppo data.train_batch_sise=8",
            "data.train_batch_sise=8: did you mean train_batch_size?",
        ),
        (
            "verl",
            "a.sh",
            "python3 -m verl.trainer.main_ppo data.seed=1 custom_test_function.path=f.py",
            "custom_test_function.path=f.py: did you mean custom_reward_function?",
        ),
        ("openrlhf", "a.sh", "python3 -m x --l2 0 --temprature 0.5", "temprature=0.5: did you mean temperature?"),
        (
            "openrlhf",
            "a.sh",
            "python3 -m x --l2 0 --min_lr_ratio 0.05",
            "min_lr_ratio=0.05: did you mean actor.min_lr_ratio?",
        ),
        ("nemo_rl", "a.yaml", "policy: {generation: {temprature: 1}}", "temprature=1: did you mean temperature?"),
        (
            "nemo_rl",
            "a.yaml",
            "policy: {optimizer: {kwargs: {learning_rate: 1.0e-6}}}",
            "policy.optimizer.kwargs.learning_rate=1e-06: AdamW has lr, weight_decay, betas and eps",
        ),
    ],
)
def test_a_misspelt_key_is_told(
    trainer: str, file: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text + "\ngrpo: {seed: 1}" if trainer == "nemo_rl" else text.replace(" data", " data.seed=1 data")
    _, comments = converted(trainer, text, tmp_path / file, capsys, code=2)
    at = next(index for index, line in enumerate(comments) if line.startswith("unknown to "))
    assert comments[at + 1].endswith(told)


def test_a_file_without_a_model_and_one_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo")
    assert cli.main(["convert", "verl", str(tmp_path / "run.sh")]) == 2
    told = "pretrained_checkpoint.restore_from_path: the file has no model (actor_rollout_ref.model.path)"
    assert told in capsys.readouterr().out
    text = "GRPOConfig(beta=0)\nGRPOTrainer(model='m', peft_config=LoraConfig(r=8))"
    _, comments = converted("trl", text, tmp_path / "train.py", capsys, code=2)
    assert "  peft_config=LoraConfig(r=8): all weights are trained here" in comments
    text = "python3 -m x --n_samples_per_prompt 8 --bf16"
    overrides, comments = converted("openrlhf", text, tmp_path / "run.sh", capsys)
    assert "trainer.precision=bf16" in overrides
    assert not any("bf16=" in line for line in comments)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("trainer.epsilon_low = 0.1", "trainer.epsilon_low: this attribute of the trainer may change the algorithm"),
        ("args.__dict__['beta'] = 0.1", "args.__dict__['beta']: set it as an attribute, and convert again"),
        ("vars(args)['beta'] = 0.1", "vars(args)['beta']: set it as an attribute, and convert again"),
        (
            "GRPOTrainer('m', f, args, d, optimizers=(opt, None))",
            "model.optim.lr: optimizers=(opt, None): the script's own optimizer and schedule decide it",
        ),
    ],
)
def test_what_a_script_sets_elsewhere_is_not_lost(
    change: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"args = GRPOConfig(max_steps=9)\ntrainer = GRPOTrainer('org/model', f, args, d)\n{change}"
    _, comments = converted("trl", text, tmp_path / "train.py", capsys, code=2)
    assert f"  {told}" in comments


def test_steps_that_no_run_makes_are_no_number_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, is_known in ((1000000, False), (100, True)):
        text = f"defaults: grpo_math_1B.yaml\ngrpo: {{max_num_epochs: 2, max_num_steps: {steps}}}"
        (tmp_path / "grpo.yaml").write_text(text)
        assert cli.main(["convert", "nemo_rl", str(tmp_path / "grpo.yaml")]) == (0 if is_known else 2)
        printed = capsys.readouterr().out
        assert (f"{GRPO}.max_steps={steps}" in printed) == is_known
        assert (f"#   {GRPO}.max_steps: grpo.max_num_epochs=2: 2 * (prompts" in printed) != is_known
        assert (f"max_num_epochs=2: the run ends there if the data end before {GRPO}.max_steps" in printed) == is_known


def test_a_sum_over_tokens_is_not_one_that_is_divided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
    _, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    assert any("a response's sum is not divided there" in line for line in comments)
    assert not any("divided by data.max_response_length" in line for line in comments)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "override", "told"),
    [
        (
            "verl",
            "run.sh",
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo algorithm.gamma=0.99"
            " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
            "trainer.grpo.aggregation=sequence",
            r"algorithm.gamma=0.99 has no effect there, with algorithm.adv_estimator=grpo",
        ),
        (
            "verl",
            "run.sh",
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
            " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.use_dynamic_bsz=True",
            "trainer.grpo.aggregation=token",
            r"loss_agg_mode=token-mean: verl's FSDP and Megatron actors average over the tokens of a micro-batch",
        ),
        (
            "nemo_rl",
            "grpo.yaml",
            "policy: {dtensor_cfg: {tensor_parallel_size: 2, activation_checkpointing: true},"
            " megatron_cfg: {enabled: false, tensor_model_parallel_size: 4}}",
            "model.tensor_model_parallel_size=2",
            r"activation_checkpointing=True: add .model.activations_checkpoint_granularity=full",
        ),
        (
            "nemo_rl",
            "grpo.yaml",
            "policy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 4},"
            " dtensor_cfg: {tensor_parallel_size: 2}, generation: {colocated: {enabled: false}}}",
            "model.tensor_model_parallel_size=4",
            r"policy.generation.colocated.enabled=False: these GPUs of the cluster generate only there",
        ),
    ],
    ids=["micro-batch of one", "micro-batches", "dtensor", "megatron"],
)
def test_what_the_back_end_decides(
    trainer: str,
    file: str,
    text: str,
    override: str,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, comments = converted(trainer, text, tmp_path / file, capsys)
    assert override in overrides
    assert re.search(told, " ".join(comments)), comments
