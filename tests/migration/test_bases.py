"""The bases of a configuration of NeMo-RL: what it leaves out has their values, and no others."""

from pathlib import Path

import pytest
import yaml

from nemo_prorl import cli
from tests.migration.test_convert import GRPO, asked, converted, refused

ROOT = """
grpo: {max_num_steps: 9}
cluster: {num_nodes: 1, gpus_per_node: 8}
data: {max_input_seq_length: 512}
policy:
  model_name: org/model
  train_global_batch_size: 512
  max_total_sequence_length: 2048
  precision: bfloat16
  max_grad_norm: 0.5
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-6}}
  generation: {max_new_tokens: 1024, temperature: 0.9}
"""
CHILD = "defaults: [{}]\ngrpo: {{num_prompts_per_step: 64}}\nloss_fn: {{ratio_clip_max: 0.28}}\n"
MISSING = "defaults=mine.yaml: this file is missing, and any number may be in it. Fix: put it where the name says"


@pytest.mark.parametrize("is_root", [True, False])
def test_a_base_of_its_own_has_no_warm_up_of_another_file(
    is_root: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(ROOT)
    text = f"# no defaults: of another file\n{ROOT}" if is_root else CHILD.format("mine.yaml")
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    assert {"model.optim.sched.name=constant", "model.optim.sched.warmup_steps=0"} <= set(overrides)
    assert {f"{GRPO}.clip_low=0.2", f"{GRPO}.samples_per_prompt=16", "model.optim.weight_decay=0.01"} <= set(overrides)
    assert {"model.optim.lr=3e-06", "trainer.gradient_clip_val=0.5"} <= set(overrides)
    assert any(line.endswith("NVIDIA-NeMo/RL at 7ea279ab (August 2026), its code") for line in comments)

    (tmp_path / "mine.yaml").write_text(ROOT.replace("  max_grad_norm: 0.5\n", ""))
    text = text.replace("  max_grad_norm: 0.5\n", "")
    _, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys, code=2)
    assert asked(comments) == [
        "  trainer.gradient_clip_val: policy.max_grad_norm is in no file, and NeMo-RL has no default"
    ]


@pytest.mark.parametrize("between", [False, True])
def test_a_base_that_is_missing_is_one_error(
    between: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "between.yaml").write_text("defaults: mine.yaml\ngrpo: {num_generations_per_prompt: 4}\n")
    text = CHILD.format("between.yaml" if between else "mine.yaml")
    refused("nemo_rl", text, tmp_path / "grpo.yaml", MISSING, capsys, caplog)
    refused("nemo_rl", "uv run examples/run_grpo.py --config mine.yaml", tmp_path / "a.sh", MISSING, capsys, caplog)


@pytest.mark.parametrize(
    ("base", "place", "words"),
    [
        ("../../mine.yaml", "recipes/mine.yaml", "run_grpo.py --config recipes/a.yaml"),  # beside the file
        ("../../mine.yaml", "mine.yaml", "run_grpo.py --config recipes/a.yaml"),  # beside the script
        (None, "examples/configs/vlm_grpo_3B.yaml", "examples/run_vlm_grpo.py grpo.num_prompts_per_step=64"),
        (None, "examples/configs/grpo_math_1B.yaml", "examples/run_grpo.py grpo.num_prompts_per_step=64"),
    ],
)
def test_a_base_is_read_where_it_lies(
    base: str | None, place: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, text in {"recipes/a.yaml": CHILD.format(base), place: ROOT}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    overrides, comments = converted("nemo_rl", f"uv run {words}", tmp_path / "run.sh", capsys)
    assert {"model.optim.lr=3e-06", f"{GRPO}.prompts_per_step=64", f"{GRPO}.max_steps=9"} <= set(overrides)
    assert not any("takes its place" in line for line in comments)


def test_a_later_base_counts_more_and_a_section_may_stand_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(f"{ROOT}loss_fn: {{ratio_clip_min: 0.1, ratio_clip_c: 5}}\n")
    (tmp_path / "more.yaml").write_text("grpo: {max_num_steps: 5, num_prompts_per_step: 32}\n")
    text = CHILD.format("mine.yaml, more.yaml")
    overrides, _ = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    steps = {f"{GRPO}.max_steps=5", f"{GRPO}.prompts_per_step=64"}
    assert {*steps, f"{GRPO}.clip_low=0.1", f"{GRPO}.clip_high=0.28"} <= set(overrides)
    text = text.replace("loss_fn: {", "loss_fn: {_override_: true, ")
    overrides, comments = converted("nemo_rl", text, tmp_path / "grpo.yaml", capsys)
    assert {*steps, f"{GRPO}.clip_low=0.2", f"{GRPO}.dual_clip=null"} <= set(overrides)
    assert not any("_override_" in line for line in comments)


def test_the_base_of_a_script_is_that_of_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "uv run examples/run_grpo.py grpo.max_num_steps=60"
    overrides, _ = converted("nemo_rl", text, tmp_path / "run.sh", capsys)
    assert {"model.optim.sched.warmup_steps=50", f"{GRPO}.max_steps=60"} <= set(overrides)
    text = text.replace("run_grpo", "run_vlm_grpo")
    refused(
        "nemo_rl",
        text,
        tmp_path / "run.sh",
        "defaults=examples/configs/vlm_grpo_3B.yaml: this file is missing",
        capsys,
        caplog,
    )


@pytest.mark.parametrize(
    ("enabled", "lr", "decay", "clip"), [(True, "1e-06", "0.2", "0.3"), (False, "3e-06", "0.01", "0.5")]
)
def test_the_numbers_of_the_back_end_that_is_on_count(
    enabled: bool, lr: str, decay: str, clip: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (
        f"  megatron_cfg:\n    enabled: {str(enabled).lower()}\n"
        "    optimizer: {optimizer: sgd, lr: 1.0e-6, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.999,"
        " adam_eps: 1.0e-8, clip_grad: 0.3}\n    scheduler: {lr_decay_style: constant, end_weight_decay: 0.2}\n"
    )
    overrides, comments = converted(
        "nemo_rl", f"# no defaults:\n{ROOT}{more}", tmp_path / "grpo.yaml", capsys, 2 if enabled else 0
    )
    wanted = {f"model.optim.lr={lr}", f"model.optim.weight_decay={decay}", f"trainer.gradient_clip_val={clip}"}
    assert wanted <= set(overrides)
    other = "policy.optimizer.kwargs.lr=3e-06" if enabled else "policy.megatron_cfg.optimizer.lr=1e-06"
    told = f"{other} has no effect there, with policy.megatron_cfg.enabled={str(enabled).lower()}"
    assert told in comments
    assert any("optimizer=sgd: the optimizer is AdamW here" in line for line in comments) == enabled


def test_bases_in_a_circle_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "grpo.yaml").write_text("defaults: grpo.yaml\n")
    assert cli.main(["convert", "nemo_rl", str(tmp_path / "grpo.yaml")]) == 2
    assert "its defaults lead back to itself" in caplog.text


def test_a_script_s_overrides_reach_the_references_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the same keys in a YAML file do: NeMo-RL resolves references last."""
    base = {
        "policy": {
            "model_name": "org/model",
            "max_total_sequence_length": 512,
            "generation": {
                "max_new_tokens": "${policy.max_total_sequence_length}",
                "temperature": 1.0,
                "val_temperature": "${policy.generation.temperature}",
            },
        },
        "data": {"max_input_seq_length": "${policy.max_total_sequence_length}"},
        "grpo": {
            "normalize_rewards": True,
            "max_num_steps": 100,
            "adv_estimator": {"name": "grpo", "normalize_rewards": "${grpo.normalize_rewards}"},
        },
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    words = "policy.max_total_sequence_length=8192 grpo.normalize_rewards=false policy.generation.temperature=0.9"
    script = f"uv run examples/run_grpo.py --config base.yaml {words}\n"
    of_script = converted("nemo_rl", script, tmp_path / "run.sh", capsys, code=2)[0]
    above = {
        "defaults": "base.yaml",
        "policy": {"max_total_sequence_length": 8192, "generation": {"temperature": 0.9}},
        "grpo": {"normalize_rewards": False},
    }
    assert of_script == converted("nemo_rl", yaml.safe_dump(above), tmp_path / "above.yaml", capsys, code=2)[0]
    assert {"trainer.grpo.max_response_tokens=null", "trainer.grpo.validation_temperature=0.9"} <= set(of_script)
