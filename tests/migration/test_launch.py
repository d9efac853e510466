"""Shell scripts that start a trainer through another program, with files: these are read, or named as missing."""

from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from tests import paper_model
from tests.migration.test_convert import GRPO, converted, refused

YAML = "model_name_or_path: org/m\nlearning_rate: 3e-6\nbeta: 0.2\nmax_steps: 5\nper_device_train_batch_size: 8\n"
GRPO_PY = "-m trl.scripts.grpo --model_name_or_path org/m --max_steps 5"


@pytest.mark.parametrize("folder", ["", "configs/"])
def test_the_file_of_an_option_is_read(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{folder}c.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(YAML)
    text = f"trl grpo --config {folder}c.yaml --learning_rate ${{LR:-1e-6}} # model_name_or_path"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    assert {"model.optim.lr=1e-06", f"{GRPO}.kl_coef=0.2", f"{GRPO}.max_steps=5"} <= set(overrides)
    path.unlink()
    overrides, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2)
    assert not any(one.startswith("pretrained_checkpoint") for one in overrides)
    assert f"  {folder}c.yaml: this file is missing: put it where the script names it, and convert again" in comments


def test_a_file_that_the_script_writes_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"KL=0.4\ncat <<EOF > c.yaml\n{YAML.replace('0.2', '${KL}')}EOF\ntrl grpo --config c.yaml"
    assert f"{GRPO}.kl_coef=0.4" in converted("trl", text, tmp_path / "run.sh", capsys)[0]
    quoted = text.replace("<<EOF", "<< 'EOF'")
    _, comments = converted("trl", quoted, tmp_path / "run.sh", capsys, code=2)
    assert f"  {GRPO}.kl_coef: beta=${{KL}} has no value here" in comments
    unset = text.replace("KL=0.4", "")
    _, comments = converted("trl", unset, tmp_path / "run.sh", capsys, code=2)
    assert f"  {GRPO}.kl_coef: beta=${{KL}} has no value here" in comments


def test_a_program_that_the_script_contains_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 - <<'EOF'\nargs = GRPOConfig(max_steps=3)\nargs.beta = 0.1\nGRPOTrainer(model='m')\nEOF"
    assert f"{GRPO}.kl_coef=0.1" in converted("trl", text, tmp_path / "run.sh", capsys)[0]


def test_the_files_of_verl_and_nemo_rl_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 6}, model: {path: m}}\n"
        "algorithm: {adv_estimator: grpo}\ntrainer: {total_training_steps: 3}\n"
    )
    text = "# rollout.n= of the file\n"
    text += "python3 -m verl.trainer.main_ppo --config-path=. --config-name='mine' actor_rollout_ref.model.path=m"
    assert f"{GRPO}.samples_per_prompt=6" in converted("verl", text, tmp_path / "run.sh", capsys)[0]

    (tmp_path / "base.yaml").write_text(
        "defaults: grpo_math_1B.yaml\ngrpo: {num_generations_per_prompt: 4, num_prompts_per_step: 64}\n"
    )
    (tmp_path / "grpo.yaml").write_text("defaults: base.yaml\ngrpo: {max_num_steps: 90}\n")
    text = "uv run examples/run_grpo_math.py --config grpo.yaml grpo.num_prompts_per_step=128"
    overrides, _ = converted("nemo_rl", text, tmp_path / "run.sh", capsys)
    expected = {f"{GRPO}.samples_per_prompt=4", f"{GRPO}.prompts_per_step=128", f"{GRPO}.max_steps=90"}
    assert expected <= set(overrides)
    slurm = f"COMMAND='{text}' \\\nCONTAINER=c \\\nsbatch --nodes=2 ray.sub"
    assert expected <= set(converted("nemo_rl", slurm, tmp_path / "run.sh", capsys)[0])
    (tmp_path / "grpo.yaml").unlink()
    refused("nemo_rl", text, tmp_path / "run.sh", "defaults=grpo.yaml: this file is missing", capsys, caplog)


@pytest.mark.parametrize(
    ("launcher", "processes", "nodes"),
    [
        ("accelerate launch --num_processes 4", 4, 1),
        ("accelerate launch --num_processes=8 --num_machines 2 --machine_rank $RANK", 8, 2),
        ("torchrun --nproc_per_node 4 --nnodes 2", 8, 2),
        ("python -m torch.distributed.run --nproc_per_node=2", 2, 1),
        ("deepspeed --num_gpus 3", 3, 1),
        ("accelerate launch --config_file acc.yaml", 6, 1),
        ("accelerate launch --config_file acc.yaml --num_processes 2", 2, 1),
        ("accelerate launch --config_file none.yaml --num_processes 2", 2, 1),
        ("accelerate launch --config_file none.yaml", None, 1),
        ("torchrun --nproc_per_node $GPUS", None, 1),
        ("torchrun --nproc_per_node gpu", None, 1),
    ],
)
def test_the_batch_of_trl_is_that_of_all_processes(
    launcher: str, processes: int | None, nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acc.yaml").write_text("num_processes: 6\nnum_machines: 1\nmixed_precision: bf16\n")
    text = f"{launcher} {GRPO_PY} --num_generations 4"
    overrides, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=0 if processes else 2)
    assert not any("one was assumed" in line for line in comments)
    if processes is None:
        assert any("does not say how many there are" in line for line in comments)
        assert not any("prompts_per_step" in one or "trainer.devices" in one for one in overrides)
    else:
        expected = {f"{GRPO}.prompts_per_step={2 * processes}", f"{GRPO}.updates_per_step=1"}
        assert expected | {f"trainer.devices={processes // nodes}", f"trainer.num_nodes={nodes}"} <= set(overrides)


def test_a_generation_batch_of_trl_is_that_of_all_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"accelerate launch --num_processes 2 {GRPO_PY} --generation_batch_size 64 --num_generations 8"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    assert {f"{GRPO}.prompts_per_step=8", f"{GRPO}.updates_per_step=4"} <= set(overrides)


def test_a_file_that_names_no_launcher_says_what_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, comments = converted("trl", "GRPOConfig(max_steps=1)", tmp_path / "a.py", capsys)
    first = next(k for k, line in enumerate(comments) if "not the same as in TRL:" in line) + 1
    assert "one process was assumed, because no file says how many there are" in comments[first], comments


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m trainer.total_training_steps=3"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('if [ $1 = a ]; then\nA+=(data.train_batch_size=64)\nfi\nVERL "${A[@]}"', "data.train_batch_size=64 has no"),
        ("VERL data.train_batch_size=64\nVERL data.train_batch_size=32", "64 or 32 (of two commands) has no value"),
        ("VERL $EXTRA", "$EXTRA: what it sets or deletes has no value here"),
        ("VERL ~data.train_batch_size", "~data.train_batch_size: what it sets or deletes has no value here"),
    ],
)
def test_a_setting_of_a_branch_or_of_two_commands_is_not_known(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, comments = converted("verl", f"A=()\n{text}".replace("VERL", VERL), tmp_path / "run.sh", capsys, code=2)
    assert any(told in line for line in comments), comments


@pytest.mark.parametrize(
    "text",
    [
        'VERL data.train_batch_size=512 "$@"',
        'VERL data.train_batch_size=512 "${@:2}"',
        'srun bash -c "VERL data.train_batch_size=512"',
        'CMD="VERL data.train_batch_size=512"\neval "$CMD"',
        "ray job submit --address=x -- VERL data.train_batch_size=512",
        "vllm serve m --port 1 &\ncurl --data x y\nVERL data.train_batch_size=512",
        "read -r -d '' CMD <<EOF\nVERL \\\n data.train_batch_size=512\nEOF\n$CMD",
        "bash <<EOF\nVERL data.train_batch_size=512\nEOF",
    ],
)
def test_a_command_is_found_in_any_form(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = converted("verl", text.replace("VERL", VERL), tmp_path / "run.sh", capsys)
    assert f"{GRPO}.prompts_per_step=512" in overrides
    assert not any("without a counterpart" in line for line in comments)


def test_what_only_one_of_several_values_says_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "python3 -m openrlhf.cli.train_ppo_ray --n_samples_per_prompt 8 --eps_clip_low_high 0.2 $HIGH"
    overrides, _ = converted("openrlhf", text, tmp_path / "run.sh", capsys, code=2)
    assert not any("clip_high" in one for one in overrides)


@pytest.mark.parametrize(
    ("trainer", "text", "told"),
    [
        ("verl", "VERL reward_model.enable=True", "reward_model.enable=True: a reward model is not supported here"),
        ("openrlhf", "python3 -m x --n_samples_per_prompt 8 --reward_pretrain org/r", "org/r: a reward model is not"),
        (
            "verl",
            "VERL actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
            " actor_rollout_ref.actor.loss_scale_factor=4 trainer.use_legacy_worker_impl=disable",
            "with its KL term, is divided by 4 there",
        ),
        (
            "verl",
            "VERL actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "loss_mode=clip_cov has no counterpart",
        ),
    ],
)
def test_what_has_no_counterpart_is_told(
    trainer: str, text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 2 if "divided by" in told or "model" in told or "mode" in told else 0
    overrides, comments = converted(trainer, text.replace("VERL", VERL), tmp_path / "run.sh", capsys, code)
    assert any(told in line and line.startswith("  ") for line in comments)
    assert trainer == "verl" or {"trainer.devices=8", "trainer.num_nodes=1"} <= set(overrides)


def test_the_help_says_when_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    assert "exit code 2 if a value is missing or a key unknown" in " ".join(capsys.readouterr().out.split())


PROGRAM = "python3 -m {} trainer.total_training_steps=9 actor_rollout_ref.model.path=m "
STEP_OFF = PROGRAM.format("verl.experimental.one_step_off_policy.main_ppo")
SPLIT = "trainer.n_gpus_per_node=6 rollout.nnodes=1 rollout.n_gpus_per_node=2"
CORRECT = "algorithm.rollout_correction."
FILTER = "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=3"
MEGATRON = "actor_rollout_ref.actor.optim.clip_grad=0.5 --config-path=config --config-name="


@pytest.mark.parametrize(
    ("program", "words", "expected", "told", "code"),
    [
        ("verl.trainer.main_ppo", FILTER, [f"{GRPO}.dynamic_sampling.enabled=false"], "only main_dapo draws more", 0),
        ("recipe.dapo.main_dapo", FILTER, [f"{GRPO}.dynamic_sampling.max_draw_factor=3"], None, 0),
        (STEP_OFF, f"{SPLIT} data.train_batch_size=512", ["rollout.engines=1", "trainer.devices=6"], None, 0),
        (STEP_OFF, f"{SPLIT} data.train_batch_size=256", [], "old log-probabilities are the actor's own there", 0),
        (STEP_OFF, "", [], "rollout.engines: 1 x 8 GPUs train there and 1 x 8 generate; here each node", 2),
        (STEP_OFF, f"{SPLIT} {CORRECT}bypass_mode=False", [], "old log-probabilities are the actor's own there", 0),
        (
            "verl.experimental.fully_async_policy.fully_async_main",
            "data.train_batch_size=0",
            [],
            f"{GRPO}.prompts_per_step: data.train_batch_size=0, of fully_async_policy",
            2,
        ),
        ("recipe.entropy.main_entropy", "", [], "recipe.entropy.main_entropy: what this program sets or does other", 2),
        ("verl.trainer.main_ppo", f"{MEGATRON}ppo_megatron_trainer.yaml", ["trainer.gradient_clip_val=0.5"], None, 0),
        (STEP_OFF, f"{SPLIT} {MEGATRON}one_step_off_ppo_megatron_trainer", ["trainer.gradient_clip_val=0.5"], None, 0),
    ],
)
def test_the_program_of_verl_decides(
    program: str,
    words: str,
    expected: list[str],
    told: str | None,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_ahead = program == STEP_OFF
    expected = [*expected, "rollout.own_devices=true", "rollout.sleep=null"] if is_ahead else expected
    expected += [f"{GRPO}.old_logp=engine", f"{GRPO}.correction.kind=none"] if is_ahead else []
    text = f"{program if is_ahead else PROGRAM.format(program)} {words}"
    overrides, comments = converted("verl", text, tmp_path / "run.sh", capsys, code)
    assert set(expected) <= set(overrides)
    lines = [line for line in comments if "filter_groups" in line] if told is None else comments
    assert lines == [] if told is None else any(told in line for line in lines)


def test_a_step_off_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, _ = converted("verl", f"{STEP_OFF} {SPLIT}", tmp_path / "run.sh", capsys)
    model = f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"
    cfg = settings.load(["cluster=h100_4x8", *overrides, model])
    assert (cfg.rollout.own_devices, cfg.trainer.grpo.old_logp, cfg.rollout.engines) == (True, "engine", 1)


@pytest.mark.parametrize("start", ["", "defaults: [ppo_trainer, _self_]\n"])
def test_a_configuration_of_a_step_off_needs_no_script(
    start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{start}trainer: {{n_gpus_per_node: 6, total_training_steps: 9}}\nalgorithm: {{adv_estimator: grpo}}\n"
    text += "rollout: {nnodes: 1, n_gpus_per_node: 2}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 8}}\n"
    overrides, _ = converted("verl", text, tmp_path / "one_step_off_ppo_trainer.yaml", capsys)
    assert {"rollout.own_devices=true", "rollout.sleep=null", f"{GRPO}.old_logp=engine"} <= set(overrides)


@pytest.mark.parametrize(
    ("trainer", "text", "told"),
    [
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --pretrain m --max_len 8", "by supervised fine-tuning"),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_rm --pretrain m --max_len 8", "train_rm trains a reward m"),
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer model.path=m", "fsdp_sft_trainer trains by supervised"),
        ("nemo_rl", "uv run examples/run_sft.py policy.model_name=m", "examples/run_sft.py trains by supervised fine"),
        (
            "trl",
            "accelerate launch trl/scripts/dpo.py --learning_rate 1e-6",
            "trl/scripts/dpo.py trains on preferences",
        ),
        ("trl", "trl sft --learning_rate 1e-6", "trl sft trains by supervised fine-tuning; expected the command of an"),
        ("nemo_rl", "uv run examples/run_ppo.py policy.model_name=m", "examples/run_ppo.py trains a value model, too"),
        ("trl", "accelerate launch examples/scripts/ppo/ppo.py --learning_rate 1e-6", "ppo.py trains a value model"),
    ],
)
def test_another_training_is_refused(
    trainer: str, text: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert cli.main(["convert", trainer, str(tmp_path / "run.sh")]) == 2
    assert told in caplog.text


def test_another_training_before_the_run_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"torchrun -m verl.trainer.fsdp_sft_trainer optim.lr=1e-5 data.train_batch_size=8\n{PROGRAM}"
    overrides, _ = converted("verl", text.format("verl.trainer.main_ppo"), tmp_path / "run.sh", capsys)
    assert f"{GRPO}.prompts_per_step=1024" in overrides
