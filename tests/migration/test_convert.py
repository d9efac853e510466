"""Settings of other trainers: what `prorl convert` makes of their files, and what an unknown key suggests."""

import json
import re
import shlex
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.migration.files import read
from nemo_prorl.migration.rules import convert
from tests import paper_model
from tests.conftest import ROOT

TRL = """
from trl import GRPOConfig
config = GRPOConfig(learning_rate=1e-6, num_generations=8, max_completion_length=512,
    per_device_train_batch_size=16, gradient_accumulation_steps=4, beta=0.04, epsilon_high=0.28, loss_type="dapo",
    reward_weights=[1], report_to="wandb")
trainer = trl.GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=length, args=config,
    train_dataset=load_dataset("trl-lib/tldr"), callbacks=[unknown])
"""
VERL = r"""
data=/data/gsm8k
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=${data}/train.parquet data.train_batch_size=1024 \
    data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.path=org/model \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.rollout.n=4 +trainer.val_before_train=False trainer.total_epochs=15 $@
"""
OPENRLHF = r"""
python3 -m openrlhf.cli.train_ppo_ray --pretrain org/model \
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
                f"{GRPO}.context_tokens": 1536,
                f"{GRPO}.kl_coef": 0.04,
                f"{GRPO}.clip_low": 0.2,
                f"{GRPO}.clip_high": 0.28,
                f"{GRPO}.aggregation": "token",
                f"{GRPO}.temperature": 1.0,
                "pretrained_checkpoint.restore_from_path": "Qwen/Qwen2-0.5B-Instruct",
                "exp_manager.create_wandb_logger": True,
            },
            {"callbacks": "[unknown]"},
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
                f"{GRPO}.clip_low": 0.2,  # clip_ratio has no effect beside the defaults of its two halves
                f"{GRPO}.clip_high": 0.2,
                f"{GRPO}.dual_clip": 3.0,
                f"{GRPO}.temperature": 1.0,
                f"{GRPO}.dynamic_sampling.enabled": False,
                f"{GRPO}.advantage": "group_norm",
                f"{GRPO}.aggregation": "sequence",
            },
            {},
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
                f"{GRPO}.temperature": 1.0,
                "model.optim.betas": [0.9, 0.95],
            },
            {},
        ),
        (
            "nemo_rl",
            "grpo.yaml",
            NEMO_RL,
            {
                f"{GRPO}.max_steps": 500,
                f"{GRPO}.updates_per_step": 4,
                f"{GRPO}.context_tokens": 512,
                f"{GRPO}.max_response_tokens": None,  # the context limits it
                f"{GRPO}.kl_estimator": "k2",
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
    (tmp_path / file).write_text(with_model(trainer, text) if trainer == "nemo_rl" else text)
    made = convert(trainer, read(tmp_path / file))
    assert {key: made.overrides.get(key, "absent") for key in expected} == expected
    assert made.left == left

    code = cli.main(["convert", trainer, str(tmp_path / file)])
    assert code == (0 if trainer == "nemo_rl" else 2)  # the others have epochs
    printed = capsys.readouterr().out
    words = shlex.split(printed.replace("\\\n", " "), comments=True)
    assert words[:2] == ["prorl", "train"]
    model = paper_model.write(tmp_path / "model")
    few = ["trainer.devices=8", "trainer.num_nodes=1", f"rollout.engines={4 if trainer == 'verl' else 8}"]
    cfg = settings.load([*words[2:], *few, f"pretrained_checkpoint.restore_from_path={model}"])
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
        gradient_accumulation_steps=STEPS * 2, num_generations=8,
        max_completion_length=BS * 32, beta=0.01, reward_weights=[0.1, 1.0], bf16=True, gradient_checkpointing=True,
        use_vllm=True, logging_steps=10)
    trainer = GRPOTrainer(model=MODEL, reward_funcs=[form, accuracy], args=training_args, train_dataset=dataset)
    trainer.train()
"""
VERL_SCRIPT = r"""
set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=False \
    custom_reward_function.path=my_reward.py \
    custom_reward_function.name=compute_score \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo_example_gsm8k' \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 $@
"""


MODEL = {"trl": "model_name_or_path", "verl": "actor_rollout_ref.model.path", "openrlhf": "--pretrain"}
STEPS = "trainer.grpo.max_steps: "  # what the user must set where a file has epochs


NEEDED = {  # name: what a short script has, too, because the other trainer's default has no counterpart
    "verl": {"rollout.n=": "actor_rollout_ref.rollout.n=8", "adv_estimator": "algorithm.adv_estimator=grpo"},
    "openrlhf": {"samples_per": "--n_samples_per_prompt 8", "estimator ": "--advantage_estimator group_norm"},
}


def with_model(trainer: str, text: str) -> str:
    """Return the text of a file with a model, a group of responses and an estimator of advantages, if it has none.

    NeMo-RL's base has all.
    """
    if trainer == "nemo_rl":
        return text if "run_grpo" in text or "defaults:" in text else f"defaults: grpo_math_1B.yaml\n{text}"
    has_model = re.search(r"\bmodel=|model_name_or_path|model\.path|--pretrain", text)
    if trainer == "trl" and not has_model:
        return ('GRPOTrainer(model="org/model")\n' if "(" in text else "model_name_or_path: org/model\n") + text
    if trainer == "trl":
        return text
    more = "" if has_model else f" {MODEL[trainer]}{'=' if trainer == 'verl' else ' '}org/model"
    more += "".join(f" {word}" for name, word in NEEDED[trainer].items() if name not in text)
    return re.sub(r"-m \S+", rf"\g<0>{more}", text)


def asked(comments: list[str]) -> list[str]:
    """Return the lines of what the user must set or has misspelt, but for the number of steps."""
    found, is_asked = [], False
    for line in comments:
        is_asked = is_asked if line.startswith(" ") else line.startswith(("set this", "unknown to"))
        found += [line] if is_asked and line.startswith(" ") and STEPS not in line else []
    return found


def converted(
    trainer: str, text: str, file: Path, capsys: pytest.CaptureFixture[str], code: int = 0
) -> tuple[list[str], list[str]]:
    """Return the overrides and the comment lines that `prorl convert` prints for a file with this text and a model.

    Args:
        code: expected exit code; the number of steps, which many short files leave to the data, does not count.
    """
    file.write_text(with_model(trainer, text))
    found = cli.main(["convert", trainer, str(file)])
    printed = capsys.readouterr().out
    comments = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("#")]
    assert found == (2 if any(STEPS in line for line in comments) else code), printed
    if code == 0:
        assert asked(comments) == [], printed
    return shlex.split(printed.replace("\\\n", " "), comments=True)[2:], comments


def refused(
    trainer: str,
    text: str,
    file: Path,
    told: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that `prorl convert` prints one error for a file with this text, and nothing else."""
    file.write_text(with_model(trainer, text))
    assert cli.main(["convert", trainer, str(file)]) == 2
    assert told in caplog.text
    assert capsys.readouterr().out == ""


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
        ("BS = 16", "BS = args.batch", "prompts_per_step: per_device_train_batch_size=BS has", "prompts_per_step"),
        ("BS = 16", "BS = 16; BS += 1", "prompts_per_step: per_device_train_batch_size=BS has", "prompts_per_step"),
        (
            "_steps=STEPS",
            "_steps=args.n",
            "prompts_per_step: gradient_accumulation_steps=args.n * 2",
            "prompts_per_step",
        ),
        (
            "num_generations=8",
            "num_generations=group",
            "samples_per_prompt: num_generations=group has",
            "prompts_per_step",
        ),
        ("beta=0.01", "beta=args.beta", "kl_coef: beta=args.beta has no value here", "kl_coef"),
    ],
)
def test_a_value_that_is_not_a_literal_must_be_set(
    was: str, becomes: str, comment: str, absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRL_SCRIPT.replace(was, becomes)
    assert text != TRL_SCRIPT
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys, code=2)
    assert not [override for override in overrides if absent in override]
    assert absent == "kl_coef" or not [override for override in overrides if "updates_per_step" in override]
    assert comments[0] == "set this yourself:"
    assert any(line.startswith(f"  trainer.grpo.{comment}") for line in comments)


def test_rewards_and_data_of_trl_are_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = converted("trl", TRL_SCRIPT, tmp_path / "train.py", capsys)
    reward = next(
        line for line in comments if line.startswith("reward (reward_funcs=[form, accuracy], reward_weights=")
    )
    assert "'rewards.functions.TASK=FILE.py:form*0.1 + FILE.py:accuracy*1'" in reward
    assert 'docs/howto/reward_function.md, "A reward function of TRL"' in reward
    assert "## A reward function of TRL\n" in (ROOT / "docs/howto/reward_function.md").read_text()
    data = next(line for line in comments if line.startswith("data (train_dataset=dataset): make prompt records with"))
    assert "without data.train=[...] cluster=h100_4x8 looks for the paper's ten files in data.folder" in data
    assert "trainer.grpo.dynamic_sampling.enabled=false" in overrides
    assert "no override needed for 1 settings: 1 logs and names" in comments
    assert not any(line.startswith("run_dir=DIR") for line in comments)  # output_dir names it
    assert not any("without a counterpart" in line for line in comments)


def test_an_empty_folder_is_left_out_and_another_program_s_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "output_dir: ''\nmax_steps: 9\nsystem_prompt: Think.\ndataset_prompt_column: problem"
    overrides, comments = converted("trl", text, tmp_path / "a.yaml", capsys, 2)
    assert not any(one.startswith("run_dir") for one in overrides)
    assert any(line.startswith("run_dir=DIR") for line in comments)
    told = [line for line in comments if "of another program, such as open-r1: convert the command" in line]
    assert [line.split("=")[0].strip() for line in told] == ["system_prompt", "dataset_prompt_column"]


def test_scaled_rewards_of_trl_are_group_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_SCRIPT.replace("GRPOConfig(", 'GRPOConfig(scale_rewards="group", ', 1)
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys)
    assert "trainer.grpo.advantage=group_norm" in overrides
    assert not any("scale_rewards" in line for line in comments)


def test_a_reward_model_of_trl_is_for_the_user_to_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_SCRIPT.replace("[form, accuracy]", '"org/reward-model"')
    _, comments = converted("trl", text, tmp_path / "train.py", capsys, 2)
    told = "a reward model is not supported here; a reward that asks a server: docs/howto/reward_server.md"
    assert f"  reward_funcs='org/reward-model': {told}" in comments
    assert not any(line.startswith("reward (") for line in comments)


def test_a_script_of_unsloth_is_not_one_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"from unsloth import FastLanguageModel\n{TRL_SCRIPT}"
    _, comments = converted("trl", text, tmp_path / "train.py", capsys, 2)
    assert "  unsloth: it changes TRL's trainer and some of its defaults: only TRL's were read" in comments


@pytest.mark.parametrize(
    ("functions", "code"),
    [("reward_funcs=None", 2), ("reward_funcs=[None]", 2), ("", 0), ("reward_funcs=[a, None]", 0)],
)
def test_a_script_of_trl_without_a_reward_function(
    functions: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig(max_steps=9, reward_weights=[0.5])\nGRPOTrainer(model='m', {functions})"
    overrides, comments = converted("trl", text, tmp_path / "train.py", capsys, code)
    told = "  rewards.functions.TASK: reward_funcs=None: no reward function was found; set rewards.functions.TASK=FILE"
    assert any(line.startswith(told) for line in comments) == (code == 2)
    weights = [line for line in comments if "reward_weights=[0.5]" in line]
    assert [("FILE.py:FIRST*0.5" in line) != ("FILE.py:a*0.5" in line) for line in weights] == [True]
    assert not any("FILE.py:None" in line for line in [*overrides, *comments])


def test_no_setting_of_verl_vanishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = converted("verl", VERL_SCRIPT, tmp_path / "run.sh", capsys)
    assert {"rollout.engines=2", "trainer.num_nodes=1", "exp_manager.create_wandb_logger=true"} <= set(overrides)
    assert "exp_manager.wandb_logger_kwargs.project=verl_grpo_example_gsm8k" in overrides
    assert any("WANDB_API_KEY" in line for line in comments)
    assert any("`--task TASK` for a reward function of your own" in line for line in comments)
    for start in (
        "actor_rollout_ref.model.enable_gradient_checkpointing=True: add +model.activations_checkpoint_granul",
        "reward (custom_reward_function.path=my_reward.py, custom_reward_function.name=compute_score): add rewards.fun",
        "data (data.train_files=",
        "run_dir=DIR names the folder of the run",
        "no override needed for ",
    ):
        assert any(line.startswith(start) for line in comments), start

    more = "custom_reward_function.path=my_reward.py algorithm.filter_groups.enable=True"
    text = VERL_SCRIPT.replace("custom_reward_function.path=my_reward.py", more).replace("wandb", "swanlab")
    text = text.replace("trainer.nnodes=1", "").replace("=sglang", "=vllm")
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys)
    assert {"trainer.grpo.dynamic_sampling.enabled=false", "trainer.num_nodes=1"} <= set(overrides)
    assert not any("create_wandb_logger" in line for line in overrides)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "message"),
    [
        (
            "verl",
            "train.py",
            TRL_SCRIPT,
            r"settings of verl; this looks like TRL \(.*Fix: prorl convert trl .*train.py",
        ),
        ("trl", "run.sh", VERL_SCRIPT, r"settings of TRL; this looks like verl \(.*Fix: prorl convert verl .*run.sh"),
    ],
)
def test_a_file_of_another_trainer_is_refused(
    trainer: str, file: str, text: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / file).write_text(text)
    assert cli.main(["convert", trainer, str(tmp_path / file)]) == 2
    assert re.search(message, caplog.text)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "cluster", "rows"),
    [
        ("trl", "train.py", TRL_SCRIPT, "laptop", ["machines 1 x 1 cpu", "a step 16 prompts x 8 = 128 responses"]),
        ("verl", "run.sh", VERL_SCRIPT, "h100_4x8", ["machines 1 x 4 gpu", "rollout engines 2 x TP 2"]),
    ],
)
def test_the_printed_command_can_be_planned(
    trainer: str,
    file: str,
    text: str,
    cluster: str,
    rows: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, comments = converted(trainer, text, tmp_path / file, capsys)
    (functions,) = re.findall(r"rewards\.functions\.TASK=[^',]*", " ".join(comments))
    source = "".join(
        f"def {name}(prompt, response, truth):\n    return 1.0\n" for name in ("form", "accuracy", "score")
    )
    (tmp_path / "wrapped.py").write_text(source)
    functions = functions.replace("TASK", "mine").replace("FILE.py", str(tmp_path / "wrapped.py"))
    record = {"id": "1", "task": "mine", "prompt": "How many?", "truth": {"answer": "3"}}
    (tmp_path / "mine.jsonl").write_text(json.dumps(record) + "\n")
    data = [f"data.train=[{{name: mine, path: {tmp_path / 'mine.jsonl'}}}]", "data.validation=[]"]
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"
    build_tokenizer(["How many?"]).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    run = [] if any(word.startswith("run_dir=") for word in overrides) else [f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["plan", *overrides, *run, f"cluster={cluster}", model, functions, *data]) == 0
    shown = capsys.readouterr()
    assert all(row in " ".join(shown.out.split()) for row in rows), shown.err
