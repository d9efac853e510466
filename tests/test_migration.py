"""Settings of other trainers: what `prorl convert` makes of their files, and what an unknown key suggests."""

import json
import shlex
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.config import all_keys
from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.files import read
from nemo_prorl.migration.names import meant, names
from nemo_prorl.migration.rules import convert
from tests import paper_model

TRL = """
from trl import GRPOConfig
config = GRPOConfig(learning_rate=1e-6, num_generations=8, max_completion_length=512, max_prompt_length=256,
    per_device_train_batch_size=16, gradient_accumulation_steps=4, beta=0.04, epsilon_high=0.28, loss_type="dapo",
    reward_weights=[1, 0.5], report_to="wandb")
trainer = trl.GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=length, args=config,
    train_dataset=load_dataset("trl-lib/tldr"), callbacks=[unknown])
"""
VERL = r"""
data=/data/gsm8k
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=${data}/train.parquet data.train_batch_size=1024 \
    data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.rollout.n=4 +trainer.val_before_train=False trainer.total_epochs=15 $@
"""
OPENRLHF = r"""
python3 -m openrlhf.cli.train_ppo_ray \
    --actor_num_gpus_per_node 8 --init_kl_coef 1e-4 --kl_estimator k2 --advantage_estimator reinforce_baseline \
    --dynamic_filtering --eps_clip_low_high 0.2 0.27 --train_batch_size 1024 --rollout_batch_size 512 \
    --n_samples_per_prompt 16 --prompt_max_len 1024 --generate_max_len=4096 --enable_vllm_is_correction \
    --vllm_is_truncated_threshold 0.5 5.0 --use_icepop --prompt_data OpenRLHF/dapo-math-17k --num_episodes 100
"""
NEMO_RL = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, use_leave_one_out_baseline: true,
       normalize_rewards: false, max_num_steps: 500}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true}
policy: {train_global_batch_size: 128, max_total_sequence_length: 512, precision: bfloat16,
         generation: {max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0}}
"""
GRPO = "trainer.grpo"


@pytest.mark.parametrize(
    ("trainer", "file", "text", "expected", "left"),
    [
        (
            "trl",
            "train.py",
            TRL,
            {
                "model.optim.lr": 1e-6,
                f"{GRPO}.prompts_per_step": 8,
                f"{GRPO}.updates_per_step": 1,
                f"{GRPO}.samples_per_prompt": 8,
                f"{GRPO}.context_tokens": 768,
                f"{GRPO}.kl_coef": 0.04,
                f"{GRPO}.clip_low": 0.2,
                f"{GRPO}.clip_high": 0.28,
                f"{GRPO}.aggregation": "token",
                f"{GRPO}.temperature": 1.0,
                "pretrained_checkpoint.restore_from_path": "Qwen/Qwen2-0.5B-Instruct",
                "exp_manager.create_wandb_logger": True,
            },
            {
                "reward_weights": [1, 0.5],
                "reward_funcs": "length",
                "train_dataset": "load_dataset('trl-lib/tldr')",
                "callbacks": "[unknown]",
            },
        ),
        (
            "verl",
            "run.sh",
            VERL,
            {
                f"{GRPO}.prompts_per_step": 1024,
                f"{GRPO}.samples_per_prompt": 4,
                f"{GRPO}.updates_per_step": 4,
                f"{GRPO}.context_tokens": 1536,
                f"{GRPO}.kl_coef": 0.001,
                f"{GRPO}.kl_estimator": "k3",
                f"{GRPO}.clip_low": 0.1,
                f"{GRPO}.clip_high": 0.1,
                f"{GRPO}.advantage": "group_norm",
                f"{GRPO}.aggregation": "sequence",
            },
            {"trainer.total_epochs": 15, "trainer.val_before_train": False},
        ),
        (
            "openrlhf",
            "run.sh",
            OPENRLHF,
            {
                "trainer.devices": 8,
                f"{GRPO}.prompts_per_step": 512,
                f"{GRPO}.updates_per_step": 8,
                f"{GRPO}.context_tokens": 5120,
                f"{GRPO}.clip_low": 0.2,
                f"{GRPO}.clip_high": 0.27,
                f"{GRPO}.kl_estimator": "k2",
                f"{GRPO}.advantage": "reinforce_pp_baseline",
                f"{GRPO}.dynamic_sampling.enabled": True,
                f"{GRPO}.correction.kind": "icepop",
                f"{GRPO}.correction.floor": 0.5,
                f"{GRPO}.correction.cap": 5.0,
            },
            {"num_episodes": 100},
        ),
        (
            "nemo_rl",
            "grpo.yaml",
            NEMO_RL,
            {
                f"{GRPO}.max_steps": 500,
                f"{GRPO}.updates_per_step": 4,
                f"{GRPO}.context_tokens": 512,
                f"{GRPO}.max_response_tokens": 512,
                f"{GRPO}.clip_high": 0.28,
                f"{GRPO}.advantage": "leave_one_out",
                f"{GRPO}.aggregation": "token",
                f"{GRPO}.correction.kind": "none",
                "trainer.precision": "bf16",
            },
            {},
        ),
    ],
)
def test_a_configuration_is_converted(
    trainer: str,
    file: str,
    text: str,
    expected: dict[str, object],
    left: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / file).write_text(text)
    made = convert(trainer, read(tmp_path / file))
    assert expected.items() <= made.overrides.items()
    assert made.left == left

    assert cli.main(["convert", trainer, str(tmp_path / file)]) == 0
    printed = capsys.readouterr().out
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    assert words[:2] == ["prorl", "train"]
    model = paper_model.write(tmp_path / "model")
    short = ["trainer.grpo.max_response_tokens=500"] if trainer == "nemo_rl" else []  # a prompt needs room here
    few = ["trainer.devices=8", "trainer.num_nodes=1", "rollout.engines=8", "data.max_prompt_tokens=null"]
    cfg = settings.load([*words[2:], *short, *few, f"pretrained_checkpoint.restore_from_path={model}"])
    assert cfg.trainer.grpo.samples_per_prompt == made.overrides[f"{GRPO}.samples_per_prompt"]
    assert all(key in printed for key in left)


TRL_SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BS = 16
STEPS: int = BS // 4

def main(group):
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    training_args = GRPOConfig(output_dir="out", learning_rate=1e-6, per_device_train_batch_size=BS,
        gradient_accumulation_steps=STEPS * 2, num_generations=8, max_prompt_length=256,
        max_completion_length=BS * 32, beta=0.01, reward_weights=[0.1, 1.0], bf16=True, gradient_checkpointing=True,
        use_vllm=True, logging_steps=10)
    trainer = GRPOTrainer(model=MODEL, reward_funcs=[form, accuracy], args=training_args, train_dataset=dataset)
    trainer.train()
"""


def converted(trainer: str, text: str, file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    """Return the overrides and the comment lines that `prorl convert` prints for a file with this text."""
    file.write_text(text)
    assert cli.main(["convert", trainer, str(file)]) == 0
    printed = capsys.readouterr().out
    comments = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#")]
    return shlex.split(printed.replace("\\\n", " "), comments=True)[2:], comments


def test_constants_of_a_script_are_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, _ = converted("trl", TRL_SCRIPT, tmp_path / "train.py", capsys)
    assert {
        f"{GRPO}.prompts_per_step=16",
        f"{GRPO}.max_response_tokens=512",
        "pretrained_checkpoint.restore_from_path=Qwen/Qwen2.5-0.5B-Instruct",
    } <= set(overrides)


@pytest.mark.parametrize(
    ("was", "becomes", "comment", "absent"),
    [
        ("BS = 16", "BS = args.batch", "per_device_train_batch_size=BS", "prompts_per_step"),
        ("BS = 16", "BS = 16; BS += 1", "per_device_train_batch_size=BS", "prompts_per_step"),
        ("_steps=STEPS", "_steps=args.steps", "gradient_accumulation_steps=args.steps * 2", "prompts_per_step"),
        ("num_generations=8", "num_generations=group", "num_generations=group", "prompts_per_step"),
        ("beta=0.01", "beta=args.beta", "beta=args.beta", "kl_coef"),
    ],
)
def test_a_value_that_is_not_a_literal_has_no_default_in_its_place(
    was: str, becomes: str, comment: str, absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRL_SCRIPT.replace(was, becomes)
    assert text != TRL_SCRIPT
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys)
    assert not [override for override in overrides if absent in override]
    assert absent == "kl_coef" or not [override for override in overrides if "updates_per_step" in override]
    assert any(line.startswith(f"{comment} is not a literal: set trainer.grpo.") for line in comments)


def test_every_key_of_the_table_is_a_key_here() -> None:
    known = {key.name for key in all_keys()}
    for keys in names().values():
        for ours in keys.values():
            assert ours in known or ours.startswith("model."), ours


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("lr", "model.optim.lr"),
        ("trainer.lr", "model.optim.lr"),
        ("trainer.grpo.lr", "model.optim.lr"),
        ("optim.lr", "model.optim.lr"),
        ("learning_rate", "model.optim.lr"),
        ("trainer.grpo.beta", "trainer.grpo.kl_coef"),
        ("trainer.grpo.batch_size", "trainer.grpo.prompts_per_step"),
        ("num_generations", "trainer.grpo.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "trainer.grpo.samples_per_prompt"),
        ("max_completion_length", "trainer.grpo.max_response_tokens"),
        ("trainer.grpo.max_step", "trainer.grpo.max_steps"),
        ("trainer.gropo.max_steps", "trainer.grpo.max_steps"),
    ],
)
def test_an_unknown_key_suggests_the_key_of_its_meaning(key: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {expected}\?"):
        settings.load([f"{key}=1"])


def test_a_name_without_a_meaning_here_has_none() -> None:
    assert meant("trainer.colour") is None


@pytest.mark.parametrize(
    ("file", "text"), [("a.yaml", "a: ["), ("b.py", "x ="), ("c.sh", "echo 'open"), ("d.json", "{}")]
)
def test_what_cannot_be_read_is_refused(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=file):
        read(tmp_path / file)
    (tmp_path / "other.json").write_text(json.dumps({"colour": "red"}))
    assert cli.main(["convert", "verl", str(tmp_path / "other.json")]) == 2
