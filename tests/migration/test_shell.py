"""Shell scripts of other trainers: what follows from a script is evaluated, the rest must be set by the user."""

from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.files import read
from tests import paper_model
from tests.migration.test_convert import GRPO, converted

SHELL = r"""
# a comment with an apostrophe: don't stop here
set -x  # nor here: it's fine
size=$((1024 * 2)); export CUDA_DEVICE_MAX_CONNECTIONS=1
twice=$((size + 2*(size)/2))
BASE=${BASE:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${BASE}/models/my model's"}
NAME='$not_replaced'
cores=$(nproc --all)
if [ -z "$WORLD" ]; then
    nodes=4
fi
DATA=(
    data.max_prompt_length=${size}  # this many
    data.train_batch_size=64
)
DATA+=(data.max_response_length=$twice)
python prepare.py --local_dir /data
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer "${DATA[@]}" \
    +trainer.default_local_dir="runs/${NAME}-$size" actor_rollout_ref.rollout.n=${N:-8} \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.max-model-len=$((size * 3)) \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$MODEL_PATH" $@ 2>&1 | tee log.txt
"""


def test_what_follows_from_a_shell_script_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    overrides, comments = converted("verl", SHELL, tmp_path / "run.sh", capsys)
    assert {
        "data.max_prompt_tokens=2048",
        f"{GRPO}.max_response_tokens=4096",
        f"{GRPO}.prompts_per_step=64",
        f"{GRPO}.samples_per_prompt=8",
        "run_dir='runs/$not_replaced-2048'",
        "pretrained_checkpoint.restore_from_path='/home/me/verl/models/my model\\'s'",
    } <= set(overrides), overrides
    assert "  actor_rollout_ref.rollout.engine_kwargs.vllm.max-model-len=6144" in comments
    assert not any("tee" in line or "2>" in line for line in [*overrides, *comments])
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"
    assert settings.load([*overrides, model]).run_dir == "runs/$not_replaced-2048"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("$(nproc)", "$(nproc)"),
        ("$UNSET", "$UNSET"),
        ("${UNSET}", "${UNSET}"),
        ("`nproc`", "`nproc`"),
        ("$((UNSET * 2))", "$((UNSET * 2))"),
        ("$((size / 0))", "$((size / 0))"),
        ("${size%8}", "${size%8}"),
        ("$nodes", "$nodes"),  # only one branch sets it
        ("$cores", "$(nproc --all)"),
        ("$1", "$1"),
        ("'${data.max_response_length}'", "${data.max_response_length}"),  # a reference of Hydra
    ],
)
def test_what_does_not_follow_from_a_script_must_be_set(
    value: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SHELL.replace("data.train_batch_size=64", f"data.train_batch_size={value}")
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    assert not any("prompts_per_step" in override or "updates_per_step" in override for override in overrides)
    assert f"  {GRPO}.prompts_per_step: data.train_batch_size={shown} has no value here" in comments


def test_defaults_of_a_file_that_was_not_read_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SHELL.replace("--config-name=ppo_trainer", "--config-name mine")
    _, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    assert "  config_name=mine: what only this file sets was not read; the defaults are ppo_trainer's" in comments


TRL_COMMAND = "train.py --model_name_or_path org/model --max_steps 10 --num_generations 8"


@pytest.mark.parametrize(
    ("launcher", "sizes"),
    [
        ("accelerate launch --num_processes 4", {"devices=4", "num_nodes=1", "grpo.prompts_per_step=4"}),
        (
            "accelerate launch --num_processes=8 --num_machines 2",
            {"devices=4", "num_nodes=2", "grpo.prompts_per_step=8"},
        ),
        ("torchrun --nproc_per_node 4 --nnodes=2", {"devices=4", "num_nodes=2", "grpo.prompts_per_step=8"}),
        ("python3 -m torch.distributed.run --nproc-per-node 2", {"devices=2", "grpo.prompts_per_step=2"}),
        ("deepspeed --num_gpus 2", {"devices=2", "grpo.prompts_per_step=2"}),
        ("N=4\nCUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes $N", {"grpo.prompts_per_step=4"}),
        ("accelerate launch --config_file zero.yaml", {"devices=2", "num_nodes=1", "grpo.prompts_per_step=2"}),
        ("python", {"devices=1", "num_nodes=1", "grpo.prompts_per_step=1"}),
    ],
)
def test_the_batch_of_trl_is_that_of_all_processes(
    launcher: str, sizes: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zero.yaml").write_text("num_processes: 2\nnum_machines: 1\n")
    overrides, comments = converted("trl", f"{launcher} {TRL_COMMAND}", tmp_path / "run.sh", capsys)
    assert {f"trainer.{size}" for size in sizes} <= set(overrides)
    assert any("one process, which is assumed" in line for line in comments) == (launcher == "python")


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("accelerate launch", "(accelerate without a number of processes)"),
        ("accelerate launch --num_processes $GPUS", "($GPUS)"),
        ("accelerate launch --config_file gone.yaml", "(--config_file gone.yaml, which is not there)"),
        ("torchrun --nproc_per_node auto", "(auto of 1)"),
    ],
)
def test_an_unknown_number_of_processes_must_be_set(
    launcher: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = converted("trl", f"{launcher} {TRL_COMMAND}", tmp_path / "run.sh", capsys, code=2)
    assert not any("prompts_per_step" in one or "devices" in one for one in overrides)
    assert any(line.startswith("  trainer.grpo.prompts_per_step:") and told in line for line in comments)


@pytest.mark.parametrize(
    ("trainer", "command", "text"),
    [
        ("trl", "trl grpo --num_processes 4 --beta 0.1 --config {}", "{}model_name_or_path: my/model\nbeta: 0.3\n"),
        ("trl", "trl grpo --config {} --beta 0.1", "{}num_processes: 4\nmodel_name_or_path: my/model\nbeta: 0.3\n"),
        (
            "nemo_rl",
            "uv run python examples/run_grpo_math.py --config {} loss_fn.reference_policy_kl_penalty=0.1",
            "{}policy: {{model_name: my/model}}\nloss_fn: {{reference_policy_kl_penalty: 0.3}}\n",
        ),
    ],
)
def test_the_file_that_a_command_names_is_read_below_its_words(
    trainer: str, command: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(text.format(""))
    script = tmp_path / "scripts" / "run.sh"
    script.write_text(command.format("configs/mine.yaml"))
    assert cli.main(["convert", trainer, str(script)]) == 2  # the number of steps is missing
    printed = capsys.readouterr().out
    assert f"{GRPO}.kl_coef=0.1 " in printed
    assert "pretrained_checkpoint.restore_from_path=my/model " in printed
    if trainer == "trl":
        assert "trainer.devices=4 " in printed
    for name, told in (
        ("gone.yaml", "--config gone.yaml has the settings, and is not in"),
        ("$1", "has no value here"),
    ):
        script.write_text(command.format(name))
        with pytest.raises(ConfigError, match=told):
            read(script)
