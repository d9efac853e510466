"""Warnings about settings without effect and about unusual numbers: `plan` and `train` log the same."""

import json
import logging
from pathlib import Path

import pytest

from nemo_prorl import __version__, cli
from nemo_prorl.algorithms.reset_rules import best_policy
from nemo_prorl.cautions import cautions
from nemo_prorl.lifecycle.retention import FORMAT
from nemo_prorl.rewards.functions import code_of
from nemo_prorl.settings import group_options, load, resolved_yaml
from tests.policy.models import QWEN2, write_model

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

BASE = "pretrained_checkpoint.restore_from_path=null"


RESETS = [
    (
        ["every=121"],
        "trainer.resets.every=121: no regular reset before the last step, because trainer.grpo.max_steps=120. Fix",
    ),
    (["at_steps=[3,120]"], "trainer.resets.at_steps=[3, 120]: the reset after step 120 has no use in this run"),
    (
        ["lr_warmup_steps=5"],
        "trainer.resets.lr_warmup_steps=5: no effect, because no reset of the optimizer is planned",
    ),
    (
        ["lr_warmup_steps=5", "at_steps=[3]", "parts=reference"],
        "leaves the optimizer as it is. Fix: trainer.resets.parts=both",
    ),
    (["lr_factor=0.5"], "trainer.resets.lr_factor=0.5: no effect, because no reset is planned"),
    (
        ["lr_factor=0.1", "every=10"],
        "trainer.resets.lr_factor=0.1: after 11 resets model.optim.lr=0.0002 is 2e-15; expected 1e-06 to 0.01",
    ),
    (
        ["lr_factor_steps=5", "every=10"],
        "trainer.resets.lr_factor_steps=5: no effect, because trainer.resets.lr_factor=1",
    ),
    (["parts=none", "every=10"], "trainer.resets.parts=none: resets have no effect. Fix: trainer.resets.lr_factor=0.5"),
    (["every=1"], "trainer.resets.every=1: a reset after each step leaves the KL to the reference at 0"),
    (["roll_back=true", "data.validation=[]"], "trainer.resets.roll_back=true: no effect, because data.validation is"),
    (["roll_back=true"], "trainer.resets.roll_back=true: no effect, because no reset is planned; only `prorl control"),
    (
        ["mode=advise", "rules.asks=[entropy]"],
        "trainer.resets.rules.asks=['entropy']: no reset, because with trainer.resets.mode=advise rules only alarm",
    ),
    (
        ["roll_back=true", "every=20", "trainer.grpo.validate_every=30"],
        "the reset after 20, 80: each goes back to where these steps began, and undoes what they trained. Fix:"
        " trainer.grpo.validate_every=20 or less",
    ),
    (
        ["roll_back=true", "mode=auto", "rules.asks=[kl_spike]", "trainer.grpo.validate_every=60"],
        "with kl_spike in trainer.resets.rules.asks: a reset may come 50 steps after the one before, without a"
        " validation between them (trainer.grpo.validate_every=60); it goes back to where these steps began",
    ),
    (
        ["roll_back=true", "mode=auto", "rules.asks=[entropy]", "rules.cooldown_steps=5"],
        "Fix: trainer.grpo.validate_every=5 or less, or trainer.resets.rules.cooldown_steps=20",
    ),
    (
        ["mode=auto", "rules.asks=[validation_drop]", "data.validation=[]"],
        "trainer.resets.mode=auto with validation_drop in trainer.resets.rules.asks: no rule can ask for a reset:"
        " data.validation is empty",
    ),
    (
        ["mode=manual", "rules.drop_sigma=3", "rules.asks=[plateau]"],
        "trainer.resets.rules.asks=['plateau'], trainer.resets.rules.drop_sigma=3.0: no effect, because"
        " trainer.resets.mode=manual asks no rule. Fix: trainer.resets.mode=advise",
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


def test_a_reset_without_a_validation_since_the_last_one_goes_back_to_it() -> None:
    scores = {0: {"all": {"mean": 0.1}}}  # the start is always validated
    assert best_policy(scores, []) == 0
    assert best_policy(scores, [{"step": 20, "rolled_back_to": 0}]) == 20


def words(given: list[str]) -> list[str]:
    return [word if word.startswith(("data.", "trainer.")) else f"trainer.resets.{word}" for word in given]


@pytest.mark.parametrize(("given", "said"), RESETS, ids=[" ".join(given) for given, _ in RESETS])
def test_resets_without_effect_are_named(given: list[str], said: str) -> None:
    [text] = cautions(load(words(given)))
    assert said in text
    assert "Fix: " in text


def test_resets_with_an_effect_are_not() -> None:
    Path("mine.py").write_text("def rule(history, rules):\n    return []\n")
    for given in (
        ["every=119"],
        ["lr_warmup_steps=5", "lr_factor=0.5", "at_steps=[3]"],
        ["lr_warmup_steps=5", "chain.start_from=runs/old"],
        ["roll_back=true", "every=20", "trainer.grpo.validate_every=20"],
        ["roll_back=true", "mode=auto", "rules.asks=[kl_spike]", "trainer.grpo.validate_every=50"],
        ["roll_back=true", "mode=auto", "rules.asks=[validation_drop]", "rules.cooldown_steps=1"],
        ["roll_back=true", "chain.start_from=runs/old"],
        ["mode=advise", "rules.asks=[mine.py:rule]"],
        ["roll_back=true", "data.validation=[]", "trainer.resets.at_steps=[3]", "chain.start_from=runs/old"],
        ["mode=auto", "rules.asks=[validation_drop,kl_spike]"],
        ["mode=auto", "rules.asks=[plateau]", "rules.plateau_steps=100"],
        ["mode=advise", "data.validation=[]", "rules.drop_sigma=3"],
        ["mode=manual"],
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
        "trainer.resets.kl_after_reset=0",
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


def test_a_warm_up_over_weights_of_the_user_s_is_told(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    given = [f"pretrained_checkpoint.restore_from_path={model}", f"run_dir={tmp_path / 'run'}"]
    [text] = cautions(load(given))
    start = "trainer.warmup.steps=110: before reinforcement learning, supervised steps train over the weights of"
    assert text.startswith(f"{start} {given[0]}. Fix: trainer.warmup.steps=0;")
    assert not list(cautions(load([*given, "trainer.warmup.steps=0"])))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "step": 2, "resets": {"done": []}}))
    assert not [text for text in cautions(load(given)) if "warmup.steps" in text]


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


def test_a_folder_that_is_not_a_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A start that failed leaves only files of a run there."""
    mine = Path("mine")
    for name in ("base", "logs", "endpoints", "init.tmp"):
        (mine / name).mkdir(parents=True)
    (mine / ".lock").touch()
    assert list(cautions(load(["run_dir=mine"]))) == []
    for name in ("a.txt", "thesis.tex", "b.txt", "c.txt", "d.txt"):
        (mine / name).touch()
    for command in (["plan"], ["train", "--dry-run"]):
        caplog.clear()
        assert cli.main([*command, "run_dir=mine"]) == 0
        [text] = [text for text in caplog.messages if text.startswith("run_dir=mine: expected a new folder")]
        assert "no config.yaml, but a.txt, b.txt, c.txt, d.txt and 1 more" in text
        assert "Fix: run_dir=FOLDER" in text


def write_run(steps: int, done: list[int], *overrides: str) -> None:
    """Write the part of a run that the warnings read: `steps` steps made, resets after those of `done`."""
    checkpoint = Path("runs/laptop/checkpoints") / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    state = {"format": FORMAT, "version": __version__, "step": steps, "resets": {"done": [{"step": n} for n in done]}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    Path("runs/laptop/config.yaml").write_text(resolved_yaml(load(list(overrides))))


def test_a_reset_in_the_past_of_a_run_is_named() -> None:
    write_run(10, [3])
    [text] = cautions(load(["trainer.resets.at_steps=[3,5,10,20]"]))
    assert "[3, 5, 10, 20]: no reset after 5, 10, because the run has made 10 steps. Fix: later steps, or a " in text
    assert "prorl control runs/laptop reset" in text
    assert list(cautions(load(["trainer.resets.at_steps=[3,20]"]))) == []


RISES = [
    (
        ["trainer.resets.every=20", "trainer.resets.lr_warmup_steps=30"],
        ["trainer.resets.lr_warmup_steps=30: the learning rate that rises after the reset of step 20 does", "20 steps"],
    ),
    (
        ["trainer.resets.at_steps=[60,110]", "trainer.resets.lr_warmup_steps=11"],
        ["the last step (trainer.grpo.max_steps=120) comes 10 steps later. Fix: trainer.resets.lr_warmup_steps=10 or"],
    ),
    (
        ["trainer.resets.at_steps=[20]", "model.optim.sched.warmup_steps=30"],
        ["sched.warmup_steps=30: the learning rate that rises at the start does not", "Fix: at most 20 steps, or r"],
    ),
    (
        ["trainer.resets.at_steps=[100]", "model.optim.sched.warmup_ratio=0.25"],
        ["model.optim.sched.warmup_ratio=0.25 (30 steps): the learning rate that rises after the reset of step 100"],
    ),
    (
        ["model.optim.sched.warmup_ratio=1", "model.optim.sched.name=cosine"],
        [
            "model.optim.sched.warmup_ratio=1: the learning rate rises until the last step",
            "=120), and never falls (mod",
        ],
    ),
    (
        ["trainer.resets.mode=auto", "trainer.resets.rules.asks=[kl_spike]", "trainer.resets.lr_warmup_steps=51"],
        ["trainer.resets.lr_warmup_steps=51: after a reset a rule may", "Fix: trainer.resets.rules.cooldown_steps=51"],
    ),
    (
        ["trainer.resets.lr_warmup_steps=121", "chain.start_from=runs/x"],
        [
            "trainer.resets.lr_warmup_steps=121: the learning rate that rises at the start",
            "max_steps=120) comes 120 steps later",
        ],
    ),
]


@pytest.mark.parametrize(("given", "said"), RISES, ids=[" ".join(given) for given, _ in RISES])
def test_a_rise_of_the_rate_that_is_cut_off_is_named(given: list[str], said: list[str]) -> None:
    [text] = cautions(load(given))
    assert [part for part in said if part not in text] == []


def test_a_rise_that_ends_in_time_is_not() -> None:
    resets, sched = "trainer.resets", "model.optim.sched"
    for given in (
        [f"{resets}.every=20", f"{resets}.lr_warmup_steps=20"],
        [f"{resets}.at_steps=[110]", f"{resets}.lr_warmup_steps=10", f"{sched}.warmup_steps=30"],
        [f"{resets}.at_steps=[110]", f"{resets}.parts=reference", f"{sched}.warmup_steps=30"],
        [f"{sched}.warmup_steps=119"],
        [f"{sched}.warmup_steps=119", "chain.start_from=runs/x", f"{resets}.parts=reference"],
        [f"{sched}.warmup_ratio=0.1", "trainer.grpo.max_steps=1"],
        [f"{resets}.mode=auto", f"{resets}.rules.asks=[kl_spike]", f"{resets}.lr_warmup_steps=50"],
    ):
        assert list(cautions(load(given))) == [], given
    write_run(60, [50])
    assert list(cautions(load([f"{resets}.every=10", f"{resets}.lr_warmup_steps=10"]))) == []
    [text] = cautions(load([f"{resets}.at_steps=[70]", f"{resets}.lr_warmup_steps=30"]))
    assert text.endswith("the next reset comes 20 steps later. Fix: resets at other steps")


@pytest.mark.parametrize(
    ("sched", "rates"),
    [
        (["name=linear"], "step 61's learning rate becomes 0.00015 instead of 0.0001"),
        (["warmup_ratio=0.6"], "step 61's learning rate becomes 8.47e-05 instead of 0.000169"),
        (["warmup_steps=5"], None),
    ],
)
def test_other_steps_that_change_the_next_rate_are_named(
    sched: list[str], rates: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(60, [], *(f"model.optim.sched.{word}" for word in sched))
    for command in (["plan"], ["train", "--dry-run"]):
        for more in (["trainer.grpo.max_steps=240"], []):
            caplog.clear()
            assert cli.main([*command, *more]) == 0
            said = [text for text in caplog.messages if "learning rate becomes" in text]
            assert len(said) == (1 if rates and more else 0)
            assert not said or (rates or "") in said[0]


def test_the_rate_before_a_change_is_the_run_s_own(caplog: pytest.LogCaptureFixture) -> None:
    """A plan may change what a continued run may not; after the last step, no next one had a rate."""
    write_run(60, [], "model.optim.sched.name=linear")
    what_if = ["--config", "runs/laptop/config.yaml", "model.optim.sched.name=constant", "trainer.grpo.max_steps=240"]
    cli.main(["plan", *what_if])
    [text] = [text for text in caplog.messages if "learning rate becomes" in text]
    assert text.startswith(
        "model.optim.sched.name=constant (the run has linear): step 61's learning rate becomes 0.0002 instead of 0.0001"
    )
    write_run(120, [], "model.optim.sched.name=linear")
    sched = ["model.optim.sched.name=linear", "trainer.grpo.max_steps=240"]
    [text] = cautions(load(sched), load(sched[:1]))
    assert "step 121's learning rate becomes 0.0001, after 1.67e-06 in step 120, because the schedule" in text


def test_a_function_that_has_changed_since_the_checkpoint_is_named(caplog: pytest.LogCaptureFixture) -> None:
    files = [Path(name).absolute() for name in ("one.py", "two.py")]
    for file in files:
        file.write_text("def score(prompt, response, truth):\n    return 1.0\n")
    given = [f"+rewards.functions.{file.stem}={file}:score" for file in files]
    write_run(10, [], *given)
    state = Path("runs/laptop/checkpoints/step-000010/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"functions": code_of(load(given))}))
    for changed in ([], files):
        for file in changed:
            file.write_text("def score(prompt, response, truth):\n    return 0.0\n")
        for command in (["plan"], ["train", "--dry-run"]):
            caplog.clear()
            assert cli.main(command) == 0
            said = [text for text in caplog.messages if "was changed" in text]
            assert [text.split(": ")[0] for text in said] == [
                f"{file} was changed after step-000010" for file in changed
            ]
            assert not said or said[0].endswith(f"run_dir=NEW chain.start_from={state.parent}")


def test_a_key_given_twice_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["plan", "seed=3", "trainer.grpo.kl_coef=0", "seed=4", "trainer.grpo.kl_coef=0"]) == 0
    assert [text for text in caplog.messages if "twice" in text] == [
        "seed is given twice, as 3 and as 4: the last is used"
    ]


def test_a_reset_of_a_reference_without_weight_has_no_effect() -> None:
    reset = ["trainer.resets.at_steps=[20]", "trainer.resets.parts=reference"]
    assert [text.partition(":")[0] for text in cautions(load([*reset, "trainer.grpo.kl_coef=0"]))] == [
        "trainer.resets.parts=reference"
    ]
    assert list(cautions(load(reset))) == []
    assert list(cautions(load(["trainer.grpo.kl_coef=0", "trainer.resets.at_steps=[20]"]))) == []
