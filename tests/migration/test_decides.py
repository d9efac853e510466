"""What decides the algorithm, the layout or the validations there: `prorl convert` sets it, or asks for it."""

from pathlib import Path

import pytest

from nemo_prorl import cli
from tests.migration.test_convert import GRPO, converted

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=9 "
ACTOR, CORRECTION = "actor_rollout_ref.actor", f"{GRPO}.correction"
NEMO = "grpo: {max_num_steps: 90}\n"
MASK = f"{VERL}actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.rollout_"


def of(text: str, folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[set[str], str]:
    """Return the overrides and all comments of a script of verl or OpenRLHF, Python of TRL, or YAML of NeMo-RL."""
    words = {"main_ppo": "verl", "train_ppo_ray": "openrlhf", "GRPOConfig": "trl"}
    trainer = next((one for word, one in words.items() if word in text), "nemo_rl")
    name = {"trl": "a.py", "nemo_rl": "grpo.yaml"}.get(trainer, "run.sh")
    overrides, comments = converted(trainer, text, folder / name, capsys, code)
    return set(overrides), "\n".join(comments)


@pytest.mark.parametrize("period", ["", " trainer.test_freq=5"])
def test_verl_validates_greedily(period: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = of(VERL + period, tmp_path, capsys)
    values = {"samples": 1, "temperature": 0, "top_p": 1}
    assert {f"{GRPO}.validation_{key}={value}" for key, value in values.items()} <= overrides
    assert (f"{GRPO}.validate_every=5" in overrides) == bool(period)
    assert ("trainer.test_freq=-1 (the default) means never" in comments) == (not period)
    assert "trainer.save_freq=-1 (the default) means never" in comments


@pytest.mark.parametrize(
    ("words", "told", "clip"),
    [
        (".ppo_micro_batch_size_per_gpu=16", "has one more factor: their number, 16", 1 / 32),
        (
            ".use_dynamic_bsz=True",
            "has one more factor: a response's is their number, which use_dynamic_bsz changes",
            None,
        ),
    ],
)
def test_a_sum_over_a_micro_batch_is_told(
    words: str, told: str, clip: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{VERL}{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}{words}"
    overrides, comments = of(text, tmp_path, capsys, 2 if clip is None else 0)
    assert f"{GRPO}.aggregation=constant" in overrides
    assert [one for one in overrides if "clip_val" in one] == (
        [] if clip is None else [f"trainer.gradient_clip_val={clip:g}"]
    )
    unknown = f"trainer.gradient_clip_val: {ACTOR}.grad_clip=1.0 * what divides a response there / "
    assert (unknown in comments) == (clip is None)
    assert told in comments


def test_a_layout_must_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{VERL}trainer.n_gpus_per_node=8 {ACTOR}.ulysses_sequence_parallel_size=2"
    text += f" {ACTOR}.fsdp_config.param_offload=True {ACTOR}.fsdp_config.optimizer_offload=False"
    overrides, comments = of(text, tmp_path, capsys)
    assert {"rollout.tensor_parallel_size=2", "rollout.engines=4"} <= overrides  # 2 is the default there
    used = f"{ACTOR}.ulysses_sequence_parallel_size=2, {ACTOR}.fsdp_config.param_offload=True"
    assert f"layout ({used}): verl's FSDP shards the weights over the GPUs; here only the optimizer" in comments
    assert "optimizer_offload" not in comments
    sizes = f"{VERL}{ACTOR}.megatron.tensor_model_parallel_size=2"
    assert "layout" not in of(sizes, tmp_path, capsys)[1]
    assert "layout (" in of(f"{sizes} {ACTOR}.megatron.param_offload=True", tmp_path, capsys)[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rs=geometric {}rs_threshold=1.25", {"cap=1.25", "floor=0.8"}),
        ("rs=seq_mean_k1 {}rs_threshold=0.8_1.6", {"cap=1.25", "floor=0.625"}),  # of the inverse ratio
    ],
)
def test_a_mask_by_the_geometric_mean_is_set(
    words: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MASK + words.format("algorithm.rollout_correction.rollout_")
    overrides, comments = of(text, tmp_path, capsys)
    assert {f"{CORRECTION}.{one}" for one in (*expected, "kind=sequence_mask")} <= overrides
    assert "the loss's mean leaves out a masked response there" in comments


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "rs=seq_mean_k1 {0}rs_threshold=2 {0}is=token",
            f"{CORRECTION}.kind=sequence_mask, {CORRECTION}.cap=2, {CORRECTION}.floor=0.5, without the weights of",
        ),
        ("rs=token_k1 {0}rs_threshold=2", f"{CORRECTION}.kind=icepop, {CORRECTION}.cap=2, {CORRECTION}.floor=0.5 is"),
        ("rs=seq_max_k2 {0}rs_threshold=2", "this mask has no counterpart"),
    ],
)
def test_another_mask_names_what_comes_nearest(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MASK + words.format("algorithm.rollout_correction.rollout_")
    overrides, comments = of(text, tmp_path, capsys, code=2)
    assert told in comments
    assert not any(one.startswith(CORRECTION) for one in overrides)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{VERL}{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_epochs=2: a step uses its responses once here"),
        (f"{VERL}actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank=8: all weights are trained"),
        (
            VERL.replace("=grpo", "=gae"),
            f"{GRPO}.advantage: algorithm.adv_estimator=gae has no counterpart here; group_norm is what comes nearest",
        ),
        (VERL.replace("=grpo", "=reinforce_plus_plus"), "no counterpart here; reinforce_pp_baseline is what comes"),
        (f"{VERL}$MORE", "$MORE: what it sets or deletes has no value here, and may be any number here"),
        (
            "grpo: {max_num_steps: 90, async_grpo: {enabled: true, max_trajectory_age_steps: 2}}",
            "rollout.own_devices: grpo.async_grpo.enabled=True, grpo.async_grpo.max_trajectory_age_steps=2: ",
        ),
        (
            f"{NEMO}async_rl: {{sampler: {{name: windowed, max_staleness_versions: 3}}}}",
            "rollout.own_devices: async_rl.sampler.name=windowed, async_rl.sampler.max_staleness_versions=3: ",
        ),
        (
            f"{NEMO}async_rl: {{sampler: {{max_staleness_versions: 3}}}}",
            "rollout.own_devices: async_rl.sampler.name=in_order, async_rl.sampler.max_staleness_versions=3: ",
        ),
        (
            f"{NEMO}policy: {{scheduler: {{name: torch.optim.lr_scheduler.OneCycleLR, kwargs: {{max_lr: 0.1}}}}}}",
            "model.optim.sched.name: policy.scheduler=OneCycleLR(max_lr=0.1) has no counterpart here",
        ),
        (
            f"{NEMO}policy: {{tokenizer: {{chat_template_kwargs: {{enable_thinking: false}}}}}}",
            "enable_thinking=False: the chat template has its own default here",
        ),
        (f"{VERL}+data.apply_chat_template_kwargs.enable_thinking=False", "enable_thinking=False: the chat template"),
        ("GRPOConfig(max_steps=9, chat_template_kwargs={'enable_thinking': False})", "enable_thinking=False: the chat"),
        ("grpo: {max_num_steps: 90, adv_estimator: {name: gdpo}}", "adv_estimator.name=gdpo has no counterpart here"),
        (
            "grpo: {max_num_steps: 90, normalize_rewards: false, reward_scaling: {enabled: true, target_max: 4.0}}",
            f"let the reward function do it, or divide {GRPO}.kl_coef and trainer.gradient_clip_val by 4",
        ),
    ],
)
def test_what_decides_and_has_no_override_is_asked_for(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comments = of(text, tmp_path, capsys, code=2)[1]
    assert told in comments.split("not the same as in")[0]
    assert "unknown to" not in comments


def test_validations_and_checkpoints_of_nemo_rl_are_not_needless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "grpo: {max_num_steps: 90, val_at_start: false, val_at_end: true}\ncheckpointing: {enabled: false}\n"
    text += "data: {shuffle: false, default: {prompt_file: cot.txt}}\npolicy: {hf_config_overrides: {rope: 1}}\n"
    overrides, comments = of(text, tmp_path, capsys)
    values = {"validation_samples=1", "validation_temperature=1", "validation_top_p=1", "validate_every=10"}
    assert {f"{GRPO}.{value}" for value in values} <= overrides
    assert "grpo.val_at_start=False: step 0 is always validated here" in comments
    assert "checkpointing.enabled=false means never" in comments
    assert not any("checkpoint_every" in one for one in overrides)
    assert "data.shuffle=False: prompts are drawn in random order here" in comments
    assert "data.default.prompt_file=cot.txt" in comments


@pytest.mark.parametrize(
    ("text", "penalty", "told"),
    [
        (f"{VERL}reward_model.overlong_buffer.", "0.5", "half of it, 0.5, weighs the same"),
        (f"{VERL}custom_reward_function.path=a.py reward_model.overlong_buffer.", "1", "the same is set"),
    ],
)
def test_an_overlong_penalty_is_that_of_the_words(
    text: str, penalty: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, key = text.rsplit(" ", 1)
    text = f"{start} {key}enable=True {key}len=64 {key}penalty_factor=1.0"
    overrides, comments = of(text, tmp_path, capsys)
    assert f"{GRPO}.shaping.overlong_penalty={penalty}" in overrides
    assert told in comments


OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."
OVERLONG = f"data.max_response_length=4096 {OVERLONG}enable=True {OVERLONG}len=1024 {OVERLONG}penalty_factor=1.0"
BYPASS = "algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction."
GSPO, NORM = f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
GLOBAL = "trainer.use_legacy_worker_impl=disable"
TWO, OPTIM = "data.train_batch_size=512", f"{ACTOR}.optim"  # two updates of 256
CLIP, SHAPING = "trainer.gradient_clip_val", f"{GRPO}.shaping.overlong"
GSM8K, DAPO = (
    "data.train_files=[data/gsm8k/train.parquet,data/math/train.parquet]",
    "data.train_files=d/dapo-17k.parquet",
)


@pytest.mark.parametrize(
    ("words", "expected", "told", "code"),
    [
        (f"{DAPO} {OVERLONG}", [f"{SHAPING}_tokens=1024", f"{SHAPING}_penalty=0.5"], "half of it, 0.5, weighs", 0),
        (f"{GSM8K} {OVERLONG}", [f"{SHAPING}_tokens=1024", f"{SHAPING}_penalty=1"], None, 0),
        (OVERLONG, [f"{SHAPING}_penalty=0.5"], "where they are 1 and 0 (gsm8k, MATH, geo3k), the whole does", 0),
        (
            f"{DAPO} {OVERLONG} reward_model.reward_kwargs.max_resp_len=3072",
            [f"{SHAPING}_tokens=2048", f"{SHAPING}_penalty=1"],
            "reward_model.reward_kwargs.max_resp_len=3072: the penalty begins at 2048 tokens there",
            0,
        ),
        (f"{GSM8K} {OVERLONG} reward_model.reward_kwargs.max_resp_len=6144", [f"{SHAPING}_tokens=0"], "at 5120", 0),
        (f"{BYPASS}rollout_is=token {TWO}", [f"{GRPO}.old_logp=engine", f"{CORRECTION}.kind=none"], "with bypass", 0),
        (f"{BYPASS}rollout_rs=token_k1 {TWO}", [], f"{CORRECTION}.kind: algorithm.rollout_correction.rollout_rs=t", 2),
        (
            f"{BYPASS}loss_type=reinforce algorithm.rollout_correction.rollout_is=token {TWO}",
            [f"{GRPO}.old_logp=engine"],
            f"with rollout_is=token alone it is cispo with {GRPO}.clip_high=1, and no other has a counterpart",
            2,
        ),
        (
            f"{BYPASS}loss_type=reinforce {BYPASS}rollout_is_threshold=null {TWO}",
            [],
            f"{GRPO}.loss: algorithm.rollout_correction.loss_type=reinforce: its loss is not clipped",
            2,
        ),
        (
            f"{BYPASS}loss_type=reinforce data.train_batch_size=256",
            [f"{CORRECTION}.kind=none", f"{GRPO}.loss=clip"],
            "loss_type=reinforce has no effect there, where a step's only update takes the actor's own",
            0,
        ),
        (f"{BYPASS}loss_type=ppo_clip {ACTOR}.policy_loss.loss_mode=gspo {TWO}", [], "of loss_mode=vanilla there", 0),
        (f"{ACTOR}.grad_clip=0.5 {OPTIM}.clip_grad=0.3", [f"{CLIP}=0.5"], "clip_grad=0.3 has no effect there", 0),
        (
            f"{ACTOR}.strategy=megatron {OPTIM}.clip_grad=0.3 {OPTIM}.betas=[0.9,0.95]",
            [f"{CLIP}=0.3", "model.optim.betas=[0.9,0.999]"],
            "betas=[0.9, 0.95] has no effect there",
            0,
        ),
        (
            f"model_engine=megatron +{OPTIM}.override_optimizer_config.adam_beta2=0.98",
            [f"{CLIP}=1", "model.optim.betas=[0.9,0.98]"],
            None,
            0,
        ),
        (f"trainer.use_legacy_worker_impl=disable {OPTIM}.clip_grad=0.3", [f"{CLIP}=0.3"], None, 0),
        ("algorithm.norm_adv_by_std_in_grpo=False", [], ": where rewards are 1 and -1 there, 1 and 0 here, adv", 0),
        (f"{DAPO} algorithm.norm_adv_by_std_in_grpo=False", [], "without a std: rewards are 1 and -1 there", 0),
        (f"{GSM8K} algorithm.norm_adv_by_std_in_grpo=False", [f"{GRPO}.advantage=mean_only"], None, 0),
        (f"{ACTOR}.fsdp_config.dtype=float16", [], "dtype=float16: trainer.precision is bf16 or 32 here", 2),
        (f"{OPTIM}.optimizer=Adafactor", [], "optimizer=Adafactor: the optimizer is AdamW here", 2),
        (f"{ACTOR}.fsdp_config.model_dtype=bfloat16", [], "the optimizer has float32 weights here", 0),
        ("actor_rollout_ref.model.mtp.enable_train=True", [], "there is no multi-token prediction here", 2),
        (f"{ACTOR}.megatron.expert_model_parallel_size=8", [], "no run has a mixture of experts here", 2),
        ("data.image_key=images", [], "prompts with images are not read here", 0),
        ("data.train_batch_size=0", [], f"{GRPO}.prompts_per_step: data.train_batch_size=0, of fully_async_policy", 2),
        ("actor_rollout_ref.model.lora.rank=8", [], "lora.rank=8: all weights are trained here", 2),
        ("actor_rollout_ref.model.lora_adapter_path=a", [], "lora_adapter_path=a: all weights are trained here", 2),
        ("trainer.critic_warmup=5", [], "critic_warmup=5: no step before this one updates the actor there", 2),
        ("trainer.critic_warmup=1", [], "no override needed for 1 settings: 1 the same here", 0),
        (
            "data.gen_batch_size=1536 data.train_batch_size=512",
            [f"{GRPO}.prompts_per_step=1536", f"{GRPO}.updates_per_step=6"],
            "train_batch_size=512 has no effect there, where a step trains on all prompts of data.gen_batch_size=1536",
            0,
        ),
        ("data.gen_batch_size=$MORE", [], f"{GRPO}.prompts_per_step: data.gen_batch_size=$MORE has no value here", 2),
        (
            "actor_rollout_ref.rollout.response_length=256 data.max_response_length=1024",
            [f"{GRPO}.max_response_tokens=256", f"{GRPO}.context_tokens=768"],
            "data.max_response_length=1024 has no effect there, where rollout.response_length=256 cuts responses",
            0,
        ),
        ("actor_rollout_ref.rollout.max_model_len=900", [f"{GRPO}.context_tokens=900"], None, 0),
        (
            "actor_rollout_ref.rollout.max_model_len=1024",
            [f"{GRPO}.context_tokens=1024"],
            "1 as long as prompt and response",
            0,
        ),
        (f"{GSPO} {ACTOR}.use_kl_loss=True", [], f"averages responses, but for {GRPO}.kl_coef, which average", 0),
        (f"{GSPO} {ACTOR}.entropy_coeff=0.1", [], f"averages responses, but for {GRPO}.entropy_coef, which", 0),
        (f"{GSPO} algorithm.use_kl_in_reward=True", [], "with loss_mode=gspo, which averages responses\n", 0),
        (f"{ACTOR}.loss_scale_factor=4 {NORM}", [], "divided by data.max_response_length there", 2),
        (
            f"{ACTOR}.loss_scale_factor=4 {NORM}",
            [],
            "loss_scale_factor=4 has no effect there, without loss_agg_mode=",
            2,
        ),
        (f"{NORM} {GLOBAL}", [], "the responses of an update on a data-parallel rank are added there", 2),
    ],
)
def test_numbers_of_verl_are_those_of_its_source(
    words: str, expected: list[str], told: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = of(f"{VERL} {words}", tmp_path, capsys, code)
    assert set(expected) <= overrides
    assert "penalty_factor" not in comments and "without a std" not in comments if told is None else told in comments


@pytest.mark.parametrize(("metric", "overlong"), [("acc", OVERLONG), ("seq_reward", ""), ("seq_reward", OVERLONG)])
def test_groups_whose_overlong_penalties_differ_are_told(
    metric: str, overlong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"algorithm.filter_groups.enable=True algorithm.filter_groups.metric={metric} {overlong}"
    text = f"{VERL.replace('verl.trainer.main_ppo', 'recipe.dapo.main_dapo')} {words} # main_ppo"
    told = "algorithm.filter_groups.metric=seq_reward: a reward has its overlong penalty there, so a group whose"
    assert (told in of(text, tmp_path, capsys)[1]) == (metric == "seq_reward" and bool(overlong))


def test_a_mean_over_the_update_is_that_of_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{VERL}{GLOBAL} {ACTOR}.ppo_micro_batch_size_per_gpu=1"
    overrides, comments = of(text, tmp_path, capsys)
    assert f"{GRPO}.aggregation=token" in overrides
    assert "token-mean" not in comments


@pytest.mark.parametrize(("manager", "penalty"), [("naive", False), ("dapo", True), ("mine", True)])
def test_the_reward_manager_decides_whether_there_is_a_penalty(
    manager: str, penalty: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = of(f"{VERL}{OVERLONG} reward_model.reward_manager={manager}", tmp_path, capsys)
    assert any("overlong_penalty" in one for one in overrides) == penalty
    assert ("has no effect there, with reward_model.reward_manager=naive" in comments) == (not penalty)


def test_gpus_that_only_generate_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "enabled: false, resources: {num_nodes: 1, gpus_per_node: 4}"
    comments = of(f"{NEMO}policy: {{generation: {{colocated: {{{sizes}}}}}}}", tmp_path, capsys)[1]
    own = "policy.generation.colocated"
    told = f"{own}.enabled=False, {own}.resources.gpus_per_node=4, {own}.resources.num_nodes=1: these GPUs"
    assert [line[: len(told) + 2] for line in comments.splitlines() if own in line] == [f"  {told}"]


def test_settings_of_a_missing_base_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "part.yaml").write_text("grpo: {max_num_steps: 90}\n")
    assert cli.main(["convert", "nemo_rl", str(tmp_path / "part.yaml")]) == 2
    lines = capsys.readouterr().out.split("not the same as in")[0].splitlines()
    [line] = [one for one in lines[lines.index("# set this yourself:") + 1 :] if one.startswith("#  ")]
    assert "model.optim.lr, " in line
    assert "policy.optimizer.kwargs.lr, " in line
    assert line.endswith(": no file has them; let this one name its base (defaults: FILE)")


def test_what_is_as_here_is_not_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{NEMO}async_rl: {{sampler: {{name: in_order, max_lookahead_versions: 0}}}}\n"
    name = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
    text += f"policy: {{optimizer: {{name: {name}, kwargs: {{master_weights: true}}}}}}\n"
    comments = of(text, tmp_path, capsys)[1]
    assert f"policy.optimizer.name={name}" not in comments
    assert "  policy.optimizer.kwargs.master_weights=True" in comments


def test_scaled_rewards_of_nemo_rl_scale_the_overlong_penalty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "grpo: {max_num_steps: 90, reward_scaling: {enabled: true, target_min: -1.0},"
    text += " reward_shaping: {enabled: true, overlong_buffer_penalty: 1.0}}"
    overrides, comments = of(text, tmp_path, capsys)
    assert f"{GRPO}.shaping.overlong_penalty=0.5" in overrides
    assert "divided by the factor 2 of grpo.reward_scaling here" in comments


@pytest.mark.parametrize(
    ("given", "every", "told"),
    [
        ("eval_steps=5", None, "eval_steps=5 without eval_strategy=steps: TRL never evaluates"),
        ("eval_strategy='steps'", 10, None),
        ("eval_strategy='steps', logging_steps=20, steps_per_generation=4", 5, None),
    ],
)
def test_trl_evaluates_only_with_a_strategy(
    given: str, every: int | None, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = of(f"GRPOConfig(max_steps=100, {given})", tmp_path, capsys)
    assert [one for one in overrides if "validate_every" in one] == (
        [f"{GRPO}.validate_every={every}"] if every else []
    )
    assert ("never evaluates" in comments) == (told is not None)
    assert told is None or told in comments


TRAINER = "GRPOTrainer('org/model'"
SPLIT = "per_device_train_batch_size=8, num_generations=8"


@pytest.mark.parametrize(
    ("given", "told", "code"),
    [
        (
            "importance_sampling_level='sequence_token'",
            f"  {GRPO}.loss: importance_sampling_level=sequence_token has",
            2,
        ),
        ("loss_type='cispo', epsilon_high=5., importance_sampling_level='x'", "importance_sampling_level=x has no", 2),
        ("scale_rewards='std'", f"  {GRPO}.advantage: scale_rewards=std has no counterpart here; group_norm is", 2),
        ("multi_objective_aggregation='normalize_then_sum'", "  multi_objective_aggregation=normalize_then_sum: ", 2),
        (
            "loss_type='dr_grpo', entropy_coef=0.01",
            ".entropy_coef: the entropy is a mean over tokens there, and its",
            2,
        ),
        ("loss_type='dr_grpo', entropy_coef=0.01", "0.01 * max_completion_length / (mean tokens of a response)", 2),
        ("loss_type='dr_grpo', use_adaptive_entropy=True", ".step: the entropy is a mean over tokens there", 2),
        ("loss_type='grpo', entropy_coef=0.01", "entropy bonus: the mean over a micro-batch's tokens there", 0),
        ("use_adaptive_entropy=True, entropy_coef=0.01", "begins at 0.01 there, and is at least 0; here both are 0", 0),
        ("use_adaptive_entropy=True, steps_per_generation=4", "0.005: of an update there, of a step's 4 updates", 0),
        (f"beta=0.)\n{TRAINER}, tools=[multiply]", "  tools: tools=[multiply] has no value here; unless it is None", 2),
        (f"beta=0.)\n{TRAINER}, environment_factory=Env", "a response is one turn here", 2),
        (f"beta=0.)\n{TRAINER}, rollout_func=f", "it makes the responses there, of several turns perhaps", 2),
        (
            "generation_kwargs={'top_p': 0.9, 'temperature': 0.7}",
            "  generation_kwargs.top_p=0.9: training samples from",
            2,
        ),
        ("generation_kwargs={'temperature': 0.7}", "the loss has log-probabilities of temperature=1.0 there", 0),
        ("generation_kwargs={'do_sample': False}", "  generation_kwargs.do_sample=False: training samples here", 2),
        ("generation_kwargs=OPTIONS", "  generation_kwargs: generation_kwargs=OPTIONS has no value here", 2),
        (f"{SPLIT}, steps_per_generation=4", "a gradient there is 0.25 of that here, which Adam hides, but not", 0),
        (f"{SPLIT}, steps_per_generation=4", "trainer.gradient_clip_val=4 clips as there", 0),
        (f"{SPLIT}, gradient_accumulation_steps=4, steps_per_generation=2", "trainer.gradient_clip_val=0.5 clips", 0),
        (f"{SPLIT}, steps_per_generation=2, max_grad_norm=C", "trainer.gradient_clip_val=max_grad_norm * 2 clips", 2),
        (
            "save_strategy='epoch', save_steps=5",
            f"save_strategy=epoch: not after a number of steps there; set {GRPO}",
            0,
        ),
        ("eval_strategy='epoch'", f"eval_strategy=epoch: not after a number of steps there; set {GRPO}.validate_ev", 0),
        ("optim='adafactor'", "  optim=adafactor: the optimizer is AdamW here", 2),
        ("optim='adamw_8bit'", "  optim=adamw_8bit: AdamW's moments have fewer bits there", 0),
        ("loss_type='dr_grpo', max_grad_norm=0.3", "gradient_clip_val=0.1 is max_grad_norm=0.3 * 512 / trainer.grp", 0),
        ("loss_type='dr_grpo', max_grad_norm=C", "max_grad_norm=C has no value here", 2),
        (
            "loss_type='dr_grpo', max_completion_length=C",
            "clip_val: max_grad_norm=1.0 * what divides a response there / trainer.grpo.context",
            2,
        ),
        ("scale_rewards='batch'", f"{GRPO}.advantage: scale_rewards=batch has no counterpart here; reinforce_pp", 2),
        ("top_k=50", "  top_k=50: training samples from all tokens here", 2),
        ("fp16=True", "  fp16=True: the numbers are bf16 or float32 here", 2),
        ("use_vllm=True", "bound b there is b^(1/tokens) here, so the same number, which is set, leaves out long", 0),
        ("neftune_noise_alpha=5", "  neftune_noise_alpha=5: no noise is added to the embeddings here", 2),
        (f"beta=0.)\n{TRAINER}, [..., sop]", "reward (reward_funcs=[FUNCTION, sop]): add", 0),
        (
            f"beta=0.)\n{TRAINER}, [a, get_soft_overlong_punishment(512, soft_punish_cache=99)]",
            f"in its place, {GRPO}.shaping.overlong_tokens=99 with {GRPO}.shaping.overlong_penalty=(its weight) / (sum",
            0,
        ),
    ],
)
def test_what_trl_does_otherwise_is_told(
    given: str, told: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comments = of(f"GRPOConfig(max_steps=100, {given})", tmp_path, capsys, code)[1]
    assert told in comments
    assert "unknown to" not in comments


OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path org/m --algo.advantage.estimator group_norm"
)
OPENRLHF += " --rollout.n_samples_per_prompt 8"
FILTER = "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range"
CUT_OFF = "--reward.stop_properly_penalty_coef"
IS = "--algo.advantage.is_correction"
BONUS = "--algo.kl.use_loss --algo.kl.estimator k2 --actor.policy_loss_type gspo"


@pytest.mark.parametrize(
    ("words", "told", "is_asked"),
    [
        (f"{CUT_OFF} 0.5 --reward.overlong_buffer_len 9", "has 0.5 of that penalty there, 1 here", False),
        (f"{CUT_OFF} -0.5 --reward.overlong_buffer_len 9", "has 0 of that penalty there, 1 here", False),
        ("--reward.overlong_buffer_len 9", "ends at a response of data.max_len", False),
        ("--train.agent_func_path a.py", "  train.agent_func_path=a.py: its file makes the responses there", True),
        ("--ds.param_dtype fp16", "  trainer.precision: ds.param_dtype=fp16 has no counterpart here", True),
        ("--actor.optim muon --actor.muon.lr 0.02", "  actor.optim=muon: the optimizer is AdamW here", True),
        (BONUS, f"actor.policy_loss_type=gspo: {GRPO}.kl_coef weighs a mean over tokens there", False),
        (f"{BONUS} --actor.entropy_coef 0.1", f"gspo: {GRPO}.entropy_coef weighs a mean over tokens there", False),
        (
            f"{IS}_enable {IS}_type reinforce_pro",
            "is_correction_type=reinforce_pro: this method has no counterpart",
            True,
        ),
        (
            "--train.async_enable --train.async_queue_size 3",
            "  train.async_enable=True: a batch may be train.asy",
            True,
        ),
        ("--train.async_enable --async_queue_size 3", "  async_queue_size=3: so many steps ahead generates", False),
        ("--algo.advantage.gamma 0.9", "algo.advantage.gamma=0.9 has no effect there, with algo.advantage.est", False),
        ("--data.input_template Q:{}", "  data.input_template=Q:{}: without data.apply_chat_template it is", False),
        ("--critic.freezing_steps 5", "  critic.freezing_steps=5: so many steps do not train the actor there", True),
        (
            "--dynamic_filtering",
            "  algo.dynamic_filtering_range=[0, 1]: a group is kept there if its mean score is between",
            False,
        ),
        (f"{FILTER} 0.2 0.8", "of 0 and 1 a mean of 0.125 is left out, 0.875 is left out there, and not here", True),
        (f"{FILTER} -1 0.9", "with scores of 0 and 1 a mean of 0 is kept there, and not here", True),
        (f"{FILTER} 0.1 0.9", "algo.dynamic_filtering_range=[0.1, 0.9]: a group is kept there if its mean", False),
        ("--algo.dynamic_filtering_range 0 0.9", "has no effect there, without algo.dynamic_filtering_enable", False),
        ("--logger.wandb.key {wandb_token}", "Weights & Biases: run `wandb login`", False),
        ("--data.max_images_per_prompt 2", "  data.max_images_per_prompt=2: prompts are text here", True),
    ],
)
def test_what_openrlhf_does_otherwise_is_told(
    words: str, told: str, is_asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comments = of(f"{OPENRLHF} {words}", tmp_path, capsys, code=2)[1]  # its runs have epochs
    asked = comments.split("not the same as in")[0]
    assert (told in asked) == is_asked
    assert told in comments
    assert "unknown to" not in comments
    assert "wandb_token" not in comments


def test_gspo_with_a_correction_has_the_engine_s_log_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ratio is policy / engine there, and neither type nor threshold has an effect."""
    ours = {f"{GRPO}.old_logp=engine", f"{CORRECTION}.kind=none"}
    words = f"{OPENRLHF} --actor.policy_loss_type gspo {IS}_threshold 0.5 2.0 {IS}_type icepop"
    overrides, comments = of(f"{words} {IS}_enable", tmp_path, capsys, code=2)
    assert ours <= overrides
    assert "ratios are to the engine's probabilities there, and so they are here" in comments
    assert f"{IS[2:]}_type=icepop, {IS[2:]}_threshold=[0.5, 2.0] has no effect there, with actor.policy_" in comments
    assert f"{GRPO}.old_logp=engine" not in of(words, tmp_path, capsys, code=2)[0]


def test_no_engine_there_is_no_number_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rollout.engines=8" in of(f"{OPENRLHF} --vllm.num_engines 0", tmp_path, capsys, code=2)[0]


def test_a_fixed_reward_of_cut_off_responses_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = of(f"{OPENRLHF} {CUT_OFF} -0.5", tmp_path, capsys, code=2)
    assert {f"{GRPO}.unfinished_factor=0", f"{GRPO}.unfinished_penalty=0.5"} <= overrides
    assert "stop_properly" not in comments


def test_an_unknown_scale_of_several_rewards_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"GRPOConfig(max_steps=9, scale_rewards=how)\n{TRAINER}, [a, b])"
    assert f"{GRPO}.advantage: scale_rewards=how has no value" in of(text, tmp_path, capsys, code=2)[1]


@pytest.mark.parametrize(
    ("given", "expected", "absent"),
    [
        (
            "generation_kwargs={'temperature': 0.7, 'max_tokens': 99}",
            {"temperature=0.7", "max_response_tokens=99"},
            "=",
        ),
        ("use_adaptive_entropy=True, steps_per_generation=4", {"adaptive_entropy.step=0.02"}, "="),
        ("save_steps=0.1, eval_strategy='steps', eval_steps=0.055", {"checkpoint_every=10", "validate_every=6"}, "="),
        ("save_strategy='epoch', save_steps=5", set(), "checkpoint_every"),
        ("eval_strategy='epoch', eval_steps=5", {"validation_samples=8"}, "validate_every"),
        ("evaluation_strategy='steps'", {"validate_every=10"}, "kl_coef"),
    ],
)
def test_what_trl_has_elsewhere_is_set(
    given: str, expected: set[str], absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, code = f"GRPOConfig(max_steps=100, per_device_train_batch_size=8, {given})", 2 * ("evaluation_" in given)
    overrides = of(text, tmp_path, capsys, code)[0]
    assert {f"{GRPO}.{one}" for one in expected} <= overrides
    assert "model.micro_batch_size=8" in overrides
    assert not any(one.startswith(f"{GRPO}.{absent}") for one in overrides)


OLDER = "GRPOConfig(max_steps=9, use_vllm=True, vllm_device='auto', max_completion_length=99, bf16=True"


def test_defaults_that_have_changed_are_asked_for_in_an_older_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = of(f"{OLDER})", tmp_path, capsys, 2)
    keys = {"kl_coef", "temperature", "aggregation", "correction.kind", "correction.cap"}
    assert not any(one.startswith(f"{GRPO}.{key}=") for one in overrides for key in keys)
    assert all(f"  {GRPO}.{key}: " in comments for key in keys)
    assert f"{GRPO}.kl_coef: beta is not in the file; its default was 0.04 up to release 0.18, and is 0.0" in comments
    assert "vllm_device: of older releases" in comments
    assert {f"{GRPO}.loss=clip", f"{GRPO}.max_response_tokens=99", "trainer.precision=bf16"} <= overrides
    given = "beta=0.1, temperature=1, loss_type='grpo', max_prompt_length=512, top_k=0"
    overrides, comments = of(f"{OLDER}, {given})".replace("use_vllm=True", "use_vllm=False"), tmp_path, capsys)
    assert {f"{GRPO}.kl_coef=0.1", f"{GRPO}.aggregation=sequence", f"{GRPO}.correction.kind=tis"} <= overrides


PPO_RAY = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_max_len 512 --advantage_estimator group_norm "


def test_the_mean_of_older_releases_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = of(f"{PPO_RAY}--flash_attn --max_samples 64", tmp_path, capsys, 2)
    key = f"{GRPO}.aggregation"
    assert not any(one.startswith(f"{key}=") for one in overrides)
    assert f"  {key}: token_level_loss is not in the file; its default was False (sequence here) up" in comments
    assert f"  {GRPO}.max_response_tokens: rollout.max_new_tokens is not in the file; its default" in comments
    assert f"  {GRPO}.correction" not in comments
    overrides, comments = of(f"{PPO_RAY}--max_samples 64", tmp_path, capsys, 2)  # any release up to 0.9
    assert f"{key}=token" in overrides
    assert f"up to 0.6 the loss was the mean of the responses' means: {key}=sequence" in comments
    overrides, comments = of(f"{PPO_RAY}--flash_attn --policy_loss_type gspo", tmp_path, capsys, 2)
    assert f"{key}=sequence" in overrides
    assert "the responses' means" not in comments


@pytest.mark.parametrize("start", [VERL, VERL.replace("trainer.main_ppo", "experimental.one_step_off_policy.main_ppo")])
@pytest.mark.parametrize("words", ["is=token {0}is_threshold=3.0", "rs=seq_mean_k1 {0}rs_threshold=2.0"])
def test_no_correction_is_set_without_the_engine_s_log_probabilities(
    start: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, is_ahead = "algorithm.rollout_correction.rollout_", start != VERL
    words = f"{start}algorithm.rollout_correction.bypass_mode=False {prefix}{words.format(prefix)} "
    logged = "actor_rollout_ref.rollout.calculate_log_probs="
    _, comments = of(f"{words}{logged}$1", tmp_path, capsys, 2)
    assert f"  {CORRECTION}.kind: {logged}$1 has no value here; without it verl corrects nothing" in comments
    for given, is_logged in (("", is_ahead), (f"{logged}False", False), (f"{logged}True", True)):
        overrides, comments = of(words + given, tmp_path, capsys, 2 * is_ahead)  # its numbers of GPUs
        assert (f"{CORRECTION}.kind=none" in overrides) == (not is_logged)
        assert (f"has no effect there, without {logged}True" in comments) == (not is_logged)


def test_a_mask_of_cut_off_responses_is_not_called_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = of("GRPOConfig(max_steps=9, mask_truncated_completions=True)", tmp_path, capsys, 2)
    assert not any("unfinished_factor" in one for one in overrides)
    assert "mask_truncated_completions=True: no override leaves cut-off responses out" in comments


@pytest.mark.parametrize(
    ("condition", "lr"),
    [
        ('[[ $backend == "megatron" ]]', "2e-06"),
        ('[ "$backend" != megatron ]', "1e-06"),
        ("! [ -z $backend ]", "1e-06"),
        ("[[ $GPUS -eq 8 ]]", "1e-06"),
        ("[[ $backend == fsdp ]] && [[ $OTHER == 1 ]]", None),  # the environment decides
        ("[[ $OTHER == 1 ]]", None),
        ("[[ $backend == fsdp* ]]", None),
    ],
)
def test_words_built_in_an_if_are_read(
    condition: str, lr: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"{ACTOR}.optim.lr"
    text = f'backend=fsdp\nGPUS=8\nif {condition}; then\n  MORE="{key}=1e-6 \\\n  data.seed=7"\n  A=(data.seed=7)\n'
    text += f'elif [ $GPUS = 4 ]; then MORE="data.seed=9"\nelse # others\n  MORE="{key}=2e-6"\nfi\n{VERL} $MORE'
    overrides, comments = of(text, tmp_path, capsys, code=0 if lr else 2)
    assert lr is None or f"model.optim.lr={lr}" in overrides
    assert ("seed=7" in overrides) == (lr == "1e-06")
    assert ("$MORE: what it sets" in comments) == (lr is None)


MEGATRON = "policy: {megatron_cfg: {enabled: true, "
SHAPED = "reward_shaping: {enabled: true, overlong_buffer_length: 64, overlong_buffer_penalty: 1, max_response_length: "


@pytest.mark.parametrize(
    ("text", "expected", "told", "code"),
    [
        ("policy: {precision: bfloat16}", ["trainer.precision=bf16", "model.megatron_amp_O2=true"], None, 0),
        ("policy: {precision: float32}", ["trainer.precision=32", "model.megatron_amp_O2=false"], None, 0),
        ("policy: {precision: float16}", [], "trainer.precision: policy.precision=float16: it is bf16 or 32 here", 2),
        (
            f"grpo: {{max_num_steps: 90, {SHAPED}192}}}}\npolicy: {{max_total_sequence_length: 512,"
            " generation: {max_new_tokens: 256}}\ndata: {max_input_seq_length: 256}",
            [f"{SHAPING}_tokens=128", f"{SHAPING}_penalty=2"],
            "max_response_length=192: the penalty begins at 128 tokens there, and grows to the longest response",
            0,
        ),
        (
            f"grpo: {{max_num_steps: 90, {SHAPED}448}}}}\npolicy: {{max_total_sequence_length: 512}}",
            [f"{SHAPING}_tokens=128", f"{SHAPING}_penalty=2"],
            "=448: where the context limits a response, its penalty begins earlier here by the tokens of its prompt",
            0,
        ),
        ("loss_fn: {positive_example_nll_weight: 0.1}", [], "nll_weight=0.1: there is no such term here", 2),
        ("grpo: {max_num_steps: 90, advantage_clip_low: -5}", [], "low=-5: advantages are not clipped here", 2),
        ("grpo: {max_num_steps: 90, overlong_filtering: true}", [], "no override leaves cut-off responses out", 2),
        ("policy: {optimizer: {name: torch.optim.SGD}}", [], "torch.optim.SGD: the optimizer is AdamW here", 2),
        ("data: {validation: {repeat: 16}}", [f"{GRPO}.validation_samples=16"], None, 0),
        ("policy: {model_name: Qwen/Qwen3-30B-A3B}", [], "Qwen/Qwen3-30B-A3B: a mixture of experts or a vision", 2),
        *(
            (f"policy: {{model_name: {name}}}", [], f"{name}: of another family, by its name", 2)
            for name in ("zai-org/GLM-4.7-Flash", "google/gemma-3-1b-it", "nvidia/NVIDIA-Nemotron-Nano-9B-v2")
        ),
        *(
            (f"policy: {{model_name: {name}}}", [f"pretrained_checkpoint.restore_from_path={name}"], None, 0)
            for name in ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", "/data/gemma-3-1b-it/last", "org/Phi-made-of-Qwen")
        ),
        ("loss_fn: {kl_input_clamp_value: null, kl_output_clamp_value: null}", [], None, 0),
        (
            "loss_fn: {kl_input_clamp_value: 5}",
            [],
            "kl_input_clamp_value=5, kl_output_clamp_value=10.0: a token beyond has no gradient",
            0,
        ),
        ("grpo: {max_num_steps: 90}", [], "  kl_input_clamp_value=20.0, kl_output_clamp_value=10.0: a token", 0),
        ("policy: {optimizer: {kwargs: {amsgrad: true}}}", [], "  policy.optimizer.kwargs.amsgrad=True: the opt", 2),
        ("policy: {optimizer: {kwargs: {exp_avg_dtype: torch.bfloat16}}}", [], "AdamW's moments have 32 bits here", 0),
        (f"{MEGATRON}optimizer: {{decoupled_weight_decay: false}}}}}}", [], "decoupled_weight_decay=False: the wei", 2),
        (f"{MEGATRON}scheduler: {{weight_decay_incr_style: linear}}}}}}", [], "incr_style=linear: the weight decay", 2),
        (
            f"{MEGATRON}optimizer: {{weigth_decay: 3}}}}}}",
            [],
            "  policy.megatron_cfg.optimizer.weigth_decay=3: did you mean weight_decay",
            2,
        ),
        ("policy: {lr: 1e-6}", [], "  policy.lr=1e-06: did you mean policy.optimizer.kwargs.lr?", 2),
        ("env: {reward_model: {model_name: m, max_model_len: 8}}", [], "model_name=m: a reward model is not", 2),
        (f"{MEGATRON}mtp_num_layers: 2, mtp_loss_scaling_factor: 0.1}}}}", [], "mtp_num_layers=2: such layers and", 2),
        (f"{MEGATRON}mtp_num_layers: 2, mtp_loss_scaling_factor: 0.0}}}}", [], None, 0),
        (
            "policy: {max_total_sequence_length: 512, generation: {vllm_cfg: {max_model_len: 256}}}",
            [f"{GRPO}.context_tokens=256"],
            "max_model_len=256 ends a response before 512 tokens",
            0,
        ),
        ("policy: {tokenizer: {chat_template: x}}", [], "  policy.tokenizer.chat_template=x: prompts have the", 0),
        ("policy: {tokenizer: {name: org/other}}", [], "  policy.tokenizer.name=org/other: the model's own tokeniz", 0),
        (
            "policy: {generation: {vllm_kwargs: {seed: 3}}}",
            [],
            "  policy.generation.vllm_kwargs.seed=3: an argument of the engine",
            0,
        ),
        ("policy: {model_name: Qwen/Qwen2.5-VL-3B-Instruct}", [], "a mixture of experts or a vision model", 2),
    ],
)
def test_numbers_of_nemo_rl_are_those_of_its_source(
    text: str, expected: list[str], told: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = "" if text.startswith("grpo") else NEMO
    overrides, comments = of(start + text, tmp_path, capsys, code)
    assert set(expected) <= overrides
    assert told is None or told in comments


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("grpo.yaml", "ppo: {max_num_steps: 90}\npolicy: {precision: bfloat16}", "got those of run_ppo, which also"),
        (
            "run.sh",
            "source common.env\nuv run run_grpo.py --config $CONFIG grpo.max_num_steps=9",
            "=$CONFIG: this file",
        ),
    ],
)
def test_what_cannot_be_read_of_nemo_rl_is_refused(
    file: str, text: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / file).write_text(text)
    assert cli.main(["convert", "nemo_rl", str(tmp_path / file)]) == 2
    assert told in caplog.text


@pytest.mark.parametrize(
    ("subject", "lr", "seed"),
    [
        ("fsdp", "1e-06", False),
        ("fsdp2", "1e-06", False),
        ("megatron", "2e-06", True),
        ("other", "9e-06", False),
        ("$(date)", None, None),
    ],
)
def test_words_built_in_a_case_are_read(
    subject: str, lr: str | None, seed: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'backend={subject}\nlr=3e-6\ncase "$backend" in\n  fsdp | fsdp2) lr=1e-6 ;;\n  (mega*)\n    lr=2e-6\n'
    text += f"    case $lr in 2e-6) A+=(data.seed=7) ;; esac\n    ;;\n  *) lr=9e-6;;\nesac\n{VERL} {ACTOR}.optim.lr=$lr"
    overrides, comments = of(f'{text} "${{A[@]}}"', tmp_path, capsys, code=0 if lr else 2)
    assert {one for one in overrides if one.startswith("model.optim.lr=")} == (
        {f"model.optim.lr={lr}"} if lr else set()
    )
    assert ("seed=7" in overrides) == bool(seed)
    assert ("data.seed=7 has no value here" in comments) == (seed is None)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (f"{ACTOR}.fsdp_config.grad_offload=False", 2),
        (f"{ACTOR}.ppo_micro_batch_size=8", 2),
        (f"{ACTOR}.ppo_micro_batch_size=8 {ACTOR}.entropy_coeff=0", 0),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", 0),
    ],
)
def test_the_entropy_coefficient_of_an_older_script_of_verl_is_asked_for(
    words: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = of(f"{VERL}{words}", tmp_path, capsys, code)
    told = f"  {GRPO}.entropy_coef: {ACTOR}.entropy_coeff is not in the file; its default was 0.001 up to release 0.3"
    assert (told in comments) == (code == 2)
    assert (f"{GRPO}.entropy_coef=0" in overrides) == (code == 0)


def test_the_adaptive_entropy_of_skywork_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"enabled": "True", "target_entropy": "0.3", "max_ent_coef": "0.01", "delta_ent_coef": "0.0002"}
    words = " ".join(f"{ACTOR}.adaptive_entropy.{key}={value}" for key, value in values.items())
    overrides, comments = of(f"{VERL}{words} {ACTOR}.adaptive_entropy.min_ent_coef=0", tmp_path, capsys)
    found = {"enabled": "true", "target": "0.3", "maximum": "0.01", "step": "0.0002"}
    assert {f"{GRPO}.adaptive_entropy.{key}={value}" for key, value in found.items()} <= overrides
    assert "unknown to verl" not in comments


@pytest.mark.parametrize("model", ["[PATH,TO,YOUR,MODEL]", "TO_BE_FILLED/Qwen2.5-7B", "'<MODEL>'", "my/model"])
def test_a_placeholder_of_a_model_is_asked_for(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    is_model = model == "my/model"
    text = f"{VERL}actor_rollout_ref.model.path={model}"
    comments = of(text, tmp_path, capsys, 0 if is_model else 2)[1]
    assert ("a placeholder, not a model" in comments) == (not is_model)


@pytest.mark.parametrize(("batch", "is_told"), [(512, False), (256, True)])
def test_a_forced_ratio_is_told_only_where_it_differs(
    batch: int, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{NEMO}policy: {{train_global_batch_size: {batch}}}\nloss_fn: {{force_on_policy_ratio: true}}"
    assert ("force_on_policy_ratio=True: the surrogate" in of(text, tmp_path, capsys)[1]) == is_told


def test_engines_are_asked_for_with_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comments = of(f"{VERL}trainer.nnodes=$NODES", tmp_path, capsys, code=2)[1]
    assert "  rollout.engines: trainer.num_nodes * trainer.devices / rollout.tensor_parallel_size of them" in comments


@pytest.mark.parametrize(
    "text",
    [
        f"{VERL}actor_rollout_ref.rollout.top_p=0.9",
        f"{VERL}actor_rollout_ref.rollout.top_k=50",
        f"{NEMO}policy: {{generation: {{top_p: 0.9}}}}",
        f"{NEMO}policy: {{generation: {{top_k: 50}}}}",
        "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo --rollout.top_p 0.9",
    ],
)
def test_truncated_sampling_is_asked_for(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comments = of(text, tmp_path, capsys, code=2)[1]
    assert "training samples from all tokens here" in comments.split("not the same as in")[0]
