"""What runs and validations of TRL and OpenRLHF have otherwise: `prorl convert` sets it, or tells it."""

from pathlib import Path

import pytest

from tests.migration.test_convert import GRPO, converted


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("max_prompt_length=256", "  max_prompt_length=256: a longer prompt lost its beginning there, and is left out"),
        ("loss_type='bnpo'", "  loss_type=bnpo: the mean over tokens is that of a micro-batch there, of the update"),
        (
            "num_iterations=2",
            "  num_iterations=2: a step uses its responses once here; as many updates take more steps",
        ),
    ],
)
def test_what_trl_does_otherwise_is_told(
    given: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig(warmup_steps=100, steps_per_generation=4, {given})"
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code=0 if "bnpo" in told else 2)
    assert "model.optim.sched.warmup_steps=25" in overrides  # of 4 updates each
    assert any(line.startswith(told) for line in comments)


@pytest.mark.parametrize(
    ("trainer", "file", "text", "expected"),
    [
        ("trl", "a.py", "GRPOConfig(eval_strategy='steps', eval_steps=5, temperature=0.9)", (8, 0.9, 1)),
        ("trl", "a.yaml", "eval_strategy: epoch\nnum_generations_eval: 2\n", (2, 1, 1)),
        ("trl", "a.yaml", "eval_strategy: no\neval_steps: 5\n", None),
        ("trl", "a.yaml", "beta: 0.1\n", None),
        ("openrlhf", "a.sh", "python3 -m x --eval_dataset d --eval_steps 5", (4, 0.6, 1)),
        ("openrlhf", "a.sh", "python3 -m x --eval.dataset d --eval.steps 5 --eval.temperature 0.3", (4, 0.3, 1)),
        ("openrlhf", "a.sh", "python3 -m x --eval.dataset d --eval.steps -1", None),
        ("openrlhf", "a.sh", "python3 -m x --eval.steps 5", None),
    ],
)
def test_a_validation_samples_as_an_evaluation_there(
    trainer: str,
    file: str,
    text: str,
    expected: tuple[float, ...] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides, comments = converted(trainer, text, tmp_path / file, capsys)
    names = [f"{GRPO}.validation_{key}" for key in ("samples", "temperature", "top_p")]
    words = [f"{name}={value:g}" for name, value in zip(names, expected or (), strict=False)]
    assert [word for word in sorted(overrides) if ".validation_" in word] == words
    assert any(line == f"validations sample as the evaluations there: {', '.join(words)}" for line in comments) == (
        expected is not None
    )
    off = "keeps its own value, and data.validation=[] switches validations off"
    assert any(off in line for line in comments) == (expected is None)
