"""`prorl plan` shows every key that decides the algorithm, with its value."""

import dataclasses
import json
import re

import pytest

from nemo_prorl import cli, config, settings
from nemo_prorl.config_changes import changes, may_change
from nemo_prorl.planning import algorithm

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

# Sections that say on which data and machine, with which model and after which run the algorithm works.
OTHER = r"(run_dir|stage|seed|deterministic|model|pretrained_checkpoint|rewards|chain|trainer\.accelerator)(\..*)?"
OTHER_DATA = r"data\.(train|validation|tasks|prompt|system|templates|folder)(\..*)?"


def test_no_key_is_missing() -> None:
    """A key that a continued run may not change is shown, unless it is about data, model or machine."""
    shown = algorithm.algorithm(settings.load([])).keys()
    names = [key.name for key in config.all_keys()]
    decides = {name for name in names if not may_change(name) and not re.fullmatch(f"{OTHER}|{OTHER_DATA}", name)}
    decides |= {name for name in names if name.startswith(("trainer.resets.", "model.optim.")) and ".*" not in name}
    assert decides - shown == {"trainer.resets.rules"}  # a section, whose keys are shown
    assert len(decides) > 70


def test_a_new_key_of_the_schema_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = list(config.all_keys())
    new = dataclasses.replace(keys[0].rule, meaning="a new number")
    monkeypatch.setattr(algorithm, "all_keys", lambda: [*keys, keys[0]._replace(name="fresh.number", rule=new)])
    assert "fresh.number" in algorithm.algorithm(settings.load([]))


def test_the_plan_prints_them_as_they_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "trainer.grpo.entropy_coef": 0.003,
        "trainer.grpo.dual_clip": 3.5,
        "trainer.grpo.shaping.overlong_penalty": 0.75,
        "trainer.grpo.kl_estimator": "k2",
        "model.optim.weight_decay": 0.07,
        "model.optim.betas": [0.8, 0.95],
        "trainer.resets.rules.drop_sigma": 4.25,
    }
    words = [f"{key}={value}".replace(" ", "") for key, value in given.items()]
    assert cli.main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    for key, value in given.items():
        text = str(value).replace(" ", "")
        assert re.search(rf"\b{key.split('.')[-1]} {re.escape(text)}(,|$)", printed, re.MULTILINE), key
    assert cli.main(["plan", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["algorithm"]
    assert {key: told[key] for key in given} == given


def test_a_missing_key_of_a_data_source_equals_its_default() -> None:
    given, none = settings.load(["data.validation=[{name: held, generator: arithmetic, size: 8}]"]), settings.load([])
    none.data.validation = []
    told = "data.validation.0.generator=None (was arithmetic), data.validation.0.name=None (was held)"
    assert changes(given, none, ("data.validation.",)) == f"{told}, data.validation.0.size=None (was 8)"
