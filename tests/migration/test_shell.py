"""Shell scripts of other trainers: what follows from a script is evaluated, the rest must be set by the user."""

from pathlib import Path

import pytest

from nemo_prorl import settings
from tests import paper_model
from tests.migration.test_convert import GRPO, converted, with_model

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
    assert any("actor_rollout_ref.rollout.engine_kwargs.vllm.max-model-len=6144: an arg" in line for line in comments)
    assert '  the script has arguments of its own ("$@"): what you give it is not read here' in comments
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


def test_defaults_of_an_unread_file_are_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SHELL.replace("--config-name=ppo_trainer", "--config-name mine")
    _, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    assert "  config_name=mine: what only this file sets was not read; the defaults are ppo_trainer's" in comments


ONE = "python3 -m verl.trainer.main_ppo trainer.total_training_steps=9"


@pytest.mark.parametrize(
    ("text", "lr"),
    [
        ("LR=1e-6; LR=2e-6\n{one} {lr}=$LR", "2e-06"),
        ("LR=1e-6; {one} {lr}=$LR", "1e-06"),
        ("LR=; {one} {lr}=${{LR:-2e-6}}", "2e-06"),
        ("cd here && LR=2e-6 && {one} {lr}=$LR  # once; or twice", "2e-06"),
        ('LR=1e-6\n[ "$BIG" = 1 ] && LR=5e-6\n{one} {lr}=$LR', None),
        ('LR=1e-6\n[[ -n "$BIG" && -n "$MORE" ]] || LR=5e-6\n{one} {lr}=$LR', None),
        ('LR=1e-6\n[ "$BIG" = 1 ] && LR=1e-6\n{one} {lr}=$LR', "1e-06"),
        ('if [ "$BIG" = 1 ]; then A+=({lr}=2e-6); else A+=({lr}=1e-6); fi\n{one} "${{A[@]}}"', None),
        ('[ "$BIG" = 1 ] && A+=({lr}=2e-6) || A+=({lr}=1e-6)\n{one} "${{A[@]}}"', None),
        ('if true; then :; fi; A=({lr}=2e-6)\n{one} "${{A[@]}}"', "2e-06"),
        ("for i in 1 2; do LR=$i; done\n{one} {lr}=$LR", None),
        ("{{ LR=2e-6; }}\n{one} {lr}=$LR", "2e-06"),
        ("NAME='a; b && c'\n{one} {lr}=2e-6 +trainer.default_local_dir=\"$NAME\"", "2e-06"),
    ],
)
def test_commands_of_one_line_are_read_one_after_the_other(
    text: str, lr: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that a branch or a test decides must be set."""
    script = text.format(one=ONE, lr="actor_rollout_ref.actor.optim.lr")
    overrides, comments = converted("verl", script, tmp_path / "run.sh", capsys, code=0 if lr else 2)
    assert [one for one in overrides if one.startswith("model.optim.lr=")] == ([f"model.optim.lr={lr}"] if lr else [])
    assert any(line.startswith("  model.optim.lr: ") for line in comments) == (lr is None)


LOOP = r"""
LR=5e-7
while [[ "$#" -gt 0 ]]; do
  case "$1" in
    --lr) LR="$2"; shift 2 ;;
    *) echo "Unknown option: $1"; exit 1 ;;
  esac
done
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=9 \
    trainer.nnodes=TO_BE_FILLED    actor_rollout_ref.model.path=org/m actor_rollout_ref.actor.optim.lr=$LR
"""


@pytest.mark.parametrize("test", ['[[ "$#" -gt 0 ]]', '[ "$#" -gt 0 ]', "[ $# -ne 0 ]"])
def test_a_loop_over_arguments_leaves_values(test: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LOOP.replace('[[ "$#" -gt 0 ]]', test)
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys, code=2)
    assert "model.optim.lr=5e-07" in overrides
    assert "  trainer.num_nodes: trainer.nnodes is 'TO_BE_FILLED'; expected a value such as the default, 1" in comments
    assert any("the script has arguments of its own" in line for line in comments)
    assert not any("$1" in line for line in comments)


_ACTOR, _OF_NEMO_RL = "actor_rollout_ref.actor", "uv run examples/run_grpo_math.py grpo.max_num_steps=90"
_OF_TRL, _OF_OPENRLHF = "trl grpo --max_steps 9 --model_name_or_path org/m", "python3 -m openrlhf.cli.train_ppo_ray"
START = {  # command, learning rate, upper clip range, name in the logs
    "trl": [_OF_TRL, "--learning_rate 5e-6", "--epsilon_high 0.28", "--run_name "],
    "verl": [ONE, f"{_ACTOR}.optim.lr=5e-6", f"{_ACTOR}.clip_ratio_high=0.28", "trainer.experiment_name="],
    "openrlhf": [_OF_OPENRLHF, "--actor.adam.lr 5e-6", "--eps_clip_low_high 0.2 0.28", "--logger.wandb.run_name "],
    "nemo_rl": [_OF_NEMO_RL, "policy.optimizer.kwargs.lr=5e-6", "loss_fn.ratio_clip_max=0.28", "logger.wandb.name="],
}


@pytest.mark.parametrize("trainer", list(START))
@pytest.mark.parametrize("begin", ["", "\n    "])
def test_a_variable_is_divided(begin: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, lr, clip, logs = START[trainer]
    text = f'OPTS="{begin}{clip} \\\n {{lr}} \\\n {logs}$USER-$(date +%m %d)"\nX=1 {start} $OPTS'
    overrides, _ = converted(trainer, text.format(lr=lr), tmp_path / "run.sh", capsys)
    assert {"model.optim.lr=5e-06", f"{GRPO}.clip_high=0.28"} <= set(overrides)
    text = text.format(lr=lr.replace("5e-6", "$(cat lr of mine)"))
    overrides, comments = converted(trainer, text, tmp_path / "run.sh", capsys, code=2)
    assert f"{GRPO}.clip_high=0.28" in overrides
    assert any("optim.lr: " in line and "$(cat lr of mine) has no value here" in line for line in comments)


@pytest.mark.parametrize("trainer", list(START))
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{0} $OPTS", "$OPTS"),
        ('if [ -n "$BIG" ]; then MORE="{1}"; fi\n{0} $MORE', "$MORE"),
        ("{0} {3}x $MORE", "$MORE"),
        ('MORE="\n {1} {3}me"\n{0} "$MORE"', "{1} {3}me"),
    ],
)
def test_words_that_have_no_value_are_named(
    text: str, shown: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, shown = (one.format(*START[trainer]) for one in (text, shown))
    _, comments = converted(trainer, text, tmp_path / "run.sh", capsys, code=2)
    assert any(line.startswith(f"  {shown}: what it sets or deletes has no value") for line in comments), comments


@pytest.mark.parametrize("trainer", list(START))
def test_other_programs_do_not_count(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = with_model(trainer, " ".join(START[trainer][:3]))
    alone = converted(trainer, command, tmp_path / "run.sh", capsys)
    for program in ("-m openrlhf.models.remote_rm.math_verifier", "-m judge.api", "judge/api.py"):
        other = f"python {program} --dataset d --seed 7 --beta 1 &"
        for text in (f"{command}\n{other}", f"{other}\n{command}"):
            assert converted(trainer, text, tmp_path / "run.sh", capsys) == alone
