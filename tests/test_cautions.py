"""Warnings about settings without effect and about unusual numbers: `plan` and `train` log the same."""

import logging
from pathlib import Path

import pytest

from nemo_prorl import cli
from nemo_prorl.cautions import cautions
from nemo_prorl.settings import group_options, load

BASE = "pretrained_checkpoint.restore_from_path=null"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


RESETS = [
    (["every=121"], "trainer.resets.every=121: no regular reset, because trainer.grpo.max_steps=120. Fix: at most 120"),
    (["roll_back=true", "data.validation=[]"], "trainer.resets.roll_back=true: no effect, because data.validation is"),
    (
        ["mode=auto", "rules.asks=[validation_drop]", "data.validation=[]"],
        "trainer.resets.mode=auto with validation_drop in trainer.resets.rules.asks: no rule can ask for a reset:"
        " data.validation is empty",
    ),
    (
        ["mode=auto", "rules.asks=[kl_spike]", "rules.cooldown_steps=121"],
        "rules.cooldown_steps=121 is more than trainer",
    ),
    (
        ["mode=auto"],
        "plateau in trainer.resets.rules.asks: it cannot ask: trainer.resets.rules.plateau_steps=300 is more",
    ),
    (
        ["mode=auto", "rules.asks=[validation_drop]", "trainer.grpo.validate_every=30"],
        "trainer.grpo.max_steps=120 has 4 validations (trainer.grpo.validate_every=30), of 6 needed",
    ),
    (
        ["mode=auto", "rules.asks=[kl_spike]", "rules.cooldown_steps=1", "trainer.grpo.max_steps=15"],
        "its least of 16 st",
    ),
]


def words(given: list[str]) -> list[str]:
    return [word if word.startswith(("data.", "trainer.")) else f"trainer.resets.{word}" for word in given]


@pytest.mark.parametrize(("given", "said"), RESETS, ids=[" ".join(given) for given, _ in RESETS])
def test_resets_without_effect_are_named(given: list[str], said: str) -> None:
    [text] = cautions(load(words(given)))
    assert said in text
    assert "Fix: " in text


def test_resets_with_an_effect_are_not() -> None:
    for given in (
        ["every=120"],
        ["roll_back=true"],
        ["roll_back=true", "data.validation=[]", "trainer.resets.at_steps=[3]", "chain.start_from=runs/old"],
        ["mode=auto", "rules.asks=[validation_drop,kl_spike]"],
        ["mode=auto", "rules.asks=[plateau]", "rules.plateau_steps=100"],
        ["mode=advise", "data.validation=[]"],
    ):
        texts = [
            word if "." in word.split("=")[0] and not word.startswith("rules") else f"trainer.resets.{word}"
            for word in given
        ]
        assert list(cautions(load(texts))) == [], given


@pytest.mark.parametrize(
    "given",
    [
        "model.optim.lr=2",
        "model.optim.weight_decay=5",
        "trainer.grpo.temperature=20",
        "trainer.grpo.clip_high=5",
        "trainer.grpo.kl_coef=10",
        "trainer.grpo.entropy_coef=1",
        "trainer.gradient_clip_val=1000",
    ],
)
def test_an_unusual_number_is_named_with_the_usual_range(given: str) -> None:
    [text] = cautions(load([given]))
    assert text.startswith(f"{given}: expected ")


def test_the_range_depends_on_the_size_of_the_model_and_on_the_loss() -> None:
    large = ["cluster=h100_4x8", BASE]
    assert list(cautions(load([*large, "model.optim.lr=1e-3"])))
    assert not list(cautions(load(["model.optim.lr=1e-3"])))
    assert not list(cautions(load(["trainer.grpo.loss=cispo", "trainer.grpo.clip_high=5"])))
    gspo = ["trainer.grpo.loss=gspo", "trainer.grpo.clip_low=3e-4", "trainer.grpo.clip_high=4e-4"]
    assert not list(cautions(load(gspo)))
    assert list(cautions(load(gspo[1:])))


def test_no_shipped_number_is_unusual() -> None:
    for group, others in (("algorithm", ["cluster=h100_4x8", BASE]), ("cluster", [BASE])):
        for name in group_options()[group]:
            texts = cautions(load([*others, f"{group}={name}"]))
            assert [text for text in texts if "trainer.resets.every" not in text] == [], name


def test_plan_and_train_warn_alike(caplog: pytest.LogCaptureFixture) -> None:
    given = ["model.optim.lr=2", "trainer.resets.every=500"]
    said = []
    for command in (["plan", *given], ["train", "--dry-run", *given]):
        caplog.clear()
        assert cli.main(command) == 0
        said.append([r.getMessage() for r in caplog.records if r.levelno == logging.WARNING])
    assert said[0] == said[1]
    assert [text.split(":")[0] for text in said[0]] == ["trainer.resets.every=500", "model.optim.lr=2"]


def test_a_reset_of_a_reference_without_weight_has_no_effect() -> None:
    reset = ["trainer.resets.at_steps=[20]", "trainer.resets.parts=reference"]
    assert [text.partition(":")[0] for text in cautions(load([*reset, "trainer.grpo.kl_coef=0"]))] == [
        "trainer.resets.parts=reference"
    ]
    assert list(cautions(load(reset))) == []
    assert list(cautions(load(["trainer.grpo.kl_coef=0", "trainer.resets.at_steps=[20]"]))) == []
