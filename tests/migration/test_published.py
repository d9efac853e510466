"""Published examples of other trainers: what `prorl convert` makes of each is the same, or the output names it."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from nemo_prorl.migration.files import read
from nemo_prorl.migration.names import table
from tests.migration import published
from tests.migration.published import BASE, DATA, EXAMPLES, PAGE, TITLES, compare, overrides, run, write

IDS = [f"{example['trainer']}-{Path(example['path']).stem}-{index}" for index, example in enumerate(EXAMPLES)]
SCRIPTS = [example for example in EXAMPLES if example["trainer"] == "verl"]


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_each_number_is_that_of_the_source_or_is_named(example: dict, tmp_path: Path) -> None:
    code, output, numbers = compare(example, tmp_path)
    assert len(numbers) >= 20
    assert {one.number.name: one for one in numbers if not one.is_same and not one.is_named} == {}
    missing = any(one.here is None and one.there is not None for one in numbers)
    missing |= example["trainer"] == "openrlhf"  # the steps of its episodes
    assert code == (2 if missing else 0)
    assert ("# set this yourself:" in output) == missing


def test_there_are_twelve_examples_and_some_of_each_trainer() -> None:
    trainers = [example["trainer"] for example in EXAMPLES]
    assert len(trainers) >= 12
    assert min(trainers.count(trainer) for trainer in TITLES) >= 3


@pytest.mark.parametrize("trainer", TITLES)
def test_the_defaults_are_those_of_the_source(trainer: str) -> None:
    ours, source = table(trainer)["defaults"], DATA["defaults"][trainer]["settings"]
    if trainer == "nemo_rl":  # null there: another key's value, which the rules take
        ours = {key: value for key, value in ours.items() if value is not None}
    shared = ours.keys() & source.keys()
    assert len(shared) >= 25
    differing = {
        key: (ours[key], source[key]) for key in shared if published._plain(ours[key]) != published._plain(source[key])
    }
    assert differing == {}


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one["trainer"] == "trl"], ids=lambda e: e["path"])
def test_yaml_and_python_of_trl_say_the_same(example: dict, tmp_path: Path) -> None:
    assert run("trl", write(example, tmp_path, "yaml")) == run("trl", write(example, tmp_path, "py"))


@pytest.mark.parametrize("example", SCRIPTS, ids=lambda e: e["path"])
def test_the_words_of_a_script_are_those_of_bash(example: dict, tmp_path: Path) -> None:
    path = write(example, tmp_path)
    script = "python3() { printf '%s\\n' \"$@\"; }\n" + path.read_text().replace("set -x\n", "")
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={"PATH": os.defpath})
    words = [line.partition("=") for line in told.stdout.splitlines() if "=" in line]
    settings = published.MODEL["verl"] | example["settings"]
    assert {key: yaml.safe_load(value) for key, _, value in words}.keys() == settings.keys()
    found = read(path)
    for key, _, value in words:
        assert (
            published._plain(found[key]) == published._plain(yaml.safe_load(value)) == published._plain(settings[key])
        ), key


def test_a_file_of_nemo_rl_takes_the_defaults_of_its_base_or_of_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [example] = [one for one in EXAMPLES if one["path"].endswith("grpo-deepscaler-1.5b-8K.yaml")]
    path = write(example, tmp_path)
    with_base = overrides(run("nemo_rl", path)[1])
    (tmp_path / BASE).unlink()
    code, output = run("nemo_rl", path)
    assert code == 0
    assert f"defaults={BASE} is not beside the file" in output
    assert set(with_base) - set(overrides(output)) <= {"trainer.num_nodes=1"}  # cluster.num_nodes of the base

    path.write_text(path.read_text().replace(BASE, "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("grpo: {num_generations_per_prompt: 4, num_prompts_per_step: 2}\n")
    found = overrides(run("nemo_rl", path)[1])
    assert {"trainer.grpo.samples_per_prompt=8", "trainer.grpo.prompts_per_step=128"} <= set(found)
    path.write_text("defaults: mine.yaml\ngrpo: {num_prompts_per_step: 128}\n")
    found = overrides(run("nemo_rl", path)[1])
    assert {"trainer.grpo.samples_per_prompt=4", "trainer.grpo.prompts_per_step=128"} <= set(found)
    (tmp_path / "mine.yaml").unlink()
    assert run("nemo_rl", path) == (2, "")
    assert "defaults=mine.yaml: this file is missing" in caplog.text


def test_the_page_is_that_of_the_examples() -> None:
    text = PAGE.read_text()
    assert text == published.page()
    assert len(text.replace("|", " ").split()) <= 1500
    assert PAGE.name in (PAGE.parent / "migration.md").read_text()
