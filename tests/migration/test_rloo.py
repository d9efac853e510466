"""RLOOConfig and RLOOTrainer of TRL: what of them is set here, and what the user must decide."""

from pathlib import Path

import pytest

from tests.migration.test_convert import GRPO, converted

SCRIPT = "from trl import GRPOConfig, RLOOConfig, RLOOTrainer\n"
SCRIPT += "RLOOTrainer(model='org/m', reward_funcs=f, args=RLOOConfig(max_steps=9{}))"
ALWAYS = {"samples_per_prompt=2", "clip_low=0.2", "aggregation=constant", "kl_estimator=k2", "correction.kind=none"}


@pytest.mark.parametrize(
    ("given", "expected", "asked"),
    [
        (
            "",
            {"advantage=leave_one_out", "kl_coef=0.05", "loss=clip"},
            [],
        ),
        (", max_grad_norm=0, beta=0.1, epsilon_high=0.3", {"clip_high=0.3", "kl_coef=0.1", "loss=clip"}, []),
        (", max_grad_norm=0, normalize_advantages=True", {"advantage=reinforce_pp_baseline"}, []),
        (", max_grad_norm=0, reward_clip_range=(-1, 1)", {"loss=clip"}, ["reward_clip_range=(-1, 1): rewards are not"]),
        (
            ", max_grad_norm=0, steps_per_generation=4",
            {"prompts_per_step=16", "updates_per_step=4"},
            [f"{GRPO}.loss: from a step's second update on, RLOO clips the product"],
        ),
    ],
)
def test_a_script_with_rloo_is_converted(
    given: str, expected: set[str], asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCRIPT.format(f", use_vllm=True{given}")
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code=2 if asked else 0)
    assert {f"{GRPO}.{one}" for one in ALWAYS | expected} <= set(overrides)
    assert all(any(line.strip().startswith(one) for line in comments) for one in asked)
    assert any("beta: the KL (k1) is subtracted from the rewards there" in line for line in comments)
    assert any("trl/trainer/rloo_config.py" in line for line in comments)
    assert not any("loss_type" in line or "unknown to" in line for line in comments)


def test_the_clipping_of_a_loss_that_is_a_sum_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, comments = converted("trl", SCRIPT.format(", max_grad_norm=0.3"), tmp_path / "a.py", capsys)
    assert "trainer.gradient_clip_val=0.000195312" in overrides  # 0.3 / 1536
    assert any("divided by 1 (a sum over a response's tokens) there" in line for line in comments)


def test_rewards_that_are_added_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCRIPT.format(", max_grad_norm=0").replace("=f,", "=[f, g],")
    _, comments = converted("trl", text, tmp_path / "a.py", capsys)
    assert any("divided by 2, and so are advantages without a std" in line for line in comments)


@pytest.mark.parametrize(
    "text", ["trl rloo", "python -m trl.scripts.rloo", "accelerate launch trl/scripts/rloo.py", "python a.py"]
)
def test_the_command_of_rloo_has_its_defaults(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "from trl import *\nparser = TrlParser((RLOOConfig, ModelConfig))\na, m = parser.parse_args_and_config()\n"
    (tmp_path / "a.py").write_text(f"{script}RLOOTrainer(m.model_name_or_path, f, a)")
    words = "--model_name_or_path org/m --max_steps 9 --max_grad_norm 0 --normalize_advantages true --use_vllm true"
    overrides, comments = converted("trl", f"{text} {words}", tmp_path / "run.sh", capsys)
    expected = {"advantage=reinforce_pp_baseline", "kl_coef=0.05", "max_steps=9"}
    assert {f"{GRPO}.{one}" for one in ALWAYS | expected} <= set(overrides)
    assert not any("this file is missing" in line for line in comments)
