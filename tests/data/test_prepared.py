"""A run whose data is not there is refused by every command, with each file and the command that makes it."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.config import DataSource
from nemo_prorl.config_changes import check_same_run
from nemo_prorl.data.laptop.generators import generate
from nemo_prorl.data.prepare import cli as cli_of_data
from nemo_prorl.data.prepare.sources import SOURCES
from nemo_prorl.data.prepared import (
    PAPER,
    faults,
    generated_tasks,
    missing_tasks,
    preparing,
    reasoning_gym_names,
    reasoning_gym_options,
    task_of,
)
from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation.catalogue import catalogue
from tests.conftest import ROOT
from tests.data.preparing import touch_prepared

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("in_an_empty_folder")]

GPU = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null"]


def trained_on() -> set[str]:
    """Return the folders of data=prorl."""
    cfg = settings.load(GPU)
    return {Path(source.path).parent.name for source in (*cfg.data.train, *cfg.data.validation)}


def refused(text: str) -> None:
    """Assert that the text names every file of data=prorl with its command, and the command that makes all."""
    assert "prorl data prepare paper --out prepared" in text
    for name, command in PAPER.items():
        if name not in trained_on():
            assert f"prepared/{name}/" not in text
            continue
        assert f"prepared/{name}/" in text
        assert f"prorl data prepare {command} --out prepared/{name}" in text


@pytest.mark.parametrize("cluster", [name for name in settings.group_options()["cluster"] if name.startswith("h100")])
def test_a_gpu_cluster_trains_on_the_papers_data_unless_told_otherwise(cluster: str) -> None:
    given = [f"cluster={cluster}", *GPU[1:]]
    cfg = settings.load(given)
    assert {Path(source.path).parent.name for source in (*cfg.data.train, *cfg.data.validation)} <= set(PAPER)
    assert settings.load([*given, "data=laptop"]).data.train[0].name == "chain_sum"
    assert settings.load(["cluster=laptop"]).data.train[0].name == "chain_sum"


@pytest.mark.parametrize("stage", ["none", "run1"])
def test_every_command_that_starts_a_run_refuses_it(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    for words in (
        ["train", "--dry-run", f"stage={stage}", *GPU],
        ["train", f"stage={stage}", *GPU, "trainer.num_nodes=1", "rollout.engines=8"],
        ["launch", "--stages", "run1", "--dry-run", *GPU],
        ["launch", "--stages", "run1", "--here", "--dry-run", *GPU],
    ):
        caplog.clear()
        assert cli.main(words) == 2, words
        refused(caplog.text)
    touch_prepared(Path("prepared"))
    assert cli.main(["train", "--dry-run", f"stage={stage}", *GPU]) == 0


def test_a_slurm_job_refuses_it_before_any_node_starts(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nemo_prorl.launcher.allocation", "stage=run1", *GPU]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    told = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 2
    refused(told.stderr)


def test_a_plan_is_made_and_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["plan", *GPU, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["data files"].startswith("10 of 10 missing")
    refused(caplog.text)


def test_the_doctor_names_them_as_a_failed_check() -> None:
    from nemo_prorl.launcher.doctor import data, model

    cfg = settings.load_run(GPU, need_files=False)
    check, records = data(cfg)
    assert (check.name, check.state) == ("data", "fail")
    assert records.text == "lengths of prompts: not checked: the data files are missing"
    refused(check.text)
    assert model.source_with_messages(cfg) is None  # looks into the files that are there
    touch_prepared(Path("prepared"))
    assert [(check.name, check.state) for check in data(cfg)] == [("data", "pass"), ("records", "pass")]


def test_the_doctor_names_each_source_that_the_run_reads_once() -> None:
    from nemo_prorl.launcher.doctor import data

    held_out = "data.validation=[{name: instructions, generator: instructions, size: 9}]"
    cfg = settings.load(["data=domains", "data.tasks=[instructions]", held_out])
    assert next(data(cfg)).text == "instructions"


def test_a_file_of_ones_own_is_named_too() -> None:
    with pytest.raises(
        ConfigError, match=r"1 file is missing.*\n  data\.train\.0\.path=gone\.jsonl: no such file"
    ) as e:
        settings.load_run(["data.train=[{name: x, path: gone.jsonl}]"])
    assert str(e.value).endswith("Fix: data.train.0.path=FILE; docs/tutorial/data.md makes FILE from your own problems")
    Path("here.jsonl").touch()
    settings.load_run(["data.train=[{name: x, path: gone.jsonl}]", "data.train.0.path=here.jsonl"])
    assert preparing("gone.jsonl") is None


def test_a_folder_with_the_records_is_told_from_a_missing_file() -> None:
    Path("own").mkdir()
    with pytest.raises(ConfigError, match=r"path=own: it is a folder; expected one prompt record"):
        settings.load_run(["data.train=[{name: x, path: own}]"])
    Path("own/train.jsonl").touch()
    with pytest.raises(ConfigError, match=r"path=own: it is a folder. Fix: data.train.0.path=own/train.jsonl$"):
        settings.load_run(["data.train=[{name: x, path: own}]"])


def test_a_stage_refuses_data_that_lacks_a_task_it_names() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.tasks=\['math', 'code', 'stem', 'puzzles'\].*has records of code, stem"
    ):
        settings.load_run(["stage=run1"])
    assert missing_tasks(settings.load(["stage=run3"])) == ["code", "stem", "instructions"]
    assert settings.load_run(["stage=run1", "data.tasks=[math,puzzles]"]).stage == "run1"
    for cluster in ("slurm_dev", "laptop data=domains"):
        for stage in (name for name in settings.group_options()["stage"]):
            assert faults(settings.load([f"stage={stage}", *f"cluster={cluster}".split()])) == []


def test_the_tasks_that_a_run_generates() -> None:
    made = "{name: a, generator: arithmetic, size: 1}, {name: g, generator: reasoning_gym:gcd, size: 1}"
    own = f"data.train=[{made}, {{name: f, path: F}}]"
    assert generated_tasks(settings.load([own])) == {"math", "puzzles"}
    assert generated_tasks(settings.load([own, "data.tasks=[math,code]"])) == {"math"}
    assert missing_tasks(settings.load([own, "data.tasks=[math,code]"])) == []  # the file may have it


def test_the_task_of_a_generator_is_that_of_its_records() -> None:
    for name in ("arithmetic", "code", "stem", "instructions", "reasoning_gym:gcd"):
        [record] = generate(DataSource(name="x", generator=name, size=1))
        assert task_of(name) == record["task"]


def test_the_page_names_every_source_with_its_folder() -> None:
    page = (ROOT / "docs" / "howto" / "prepare_data.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    for name, command in PAPER.items():
        assert f"`{name}`" in rows[command.split()[0]], name
    assert {name for name, source in SOURCES.items() if source.repo} <= set(rows)


def test_a_source_of_the_hub_has_files_columns_and_a_word_on_its_origin() -> None:
    for source in SOURCES.values():
        if source.repo:
            assert all((source.files, source.columns, source.known_from)), source.name
            assert re.fullmatch(r"([0-9a-f]{40})?", source.revision), source.name
    unpinned = {source.name for source in SOURCES.values() if source.repo and not source.revision}
    assert unpinned == {"scp-116k", "gpqa-open", "codeforces-submissions"}  # the page says: newest, recorded


def test_every_benchmark_of_the_paper_names_its_origin_and_a_command_that_works() -> None:
    parser = argparse.ArgumentParser()
    cli_of_data._add_options(parser)
    for one in catalogue().values():
        if "paper" not in one.sets or one.prompts is None:
            continue
        assert one.prepare == f"prorl data prepare {PAPER[one.prompts]} --out DIR/{one.prompts}", one.name
        given = parser.parse_args(shlex.split(one.prepare)[3:])
        source = SOURCES[given.source]
        assert cli_of_data._options(given).source == source
        assert source.repo in one.source


def test_a_run_goes_on_where_a_slurm_job_made_its_paths_absolute(tmp_path: Path) -> None:
    """A job in a container names the same folder by its absolute path."""
    old, new, other = (
        settings.load([*GPU, f"run_dir={tmp_path}", f"data.folder={folder}"])
        for folder in (Path("prepared").absolute(), "prepared", "elsewhere")
    )
    check_same_run(old, new)
    with pytest.raises(ConfigError, match="data.folder=elsewhere"):
        check_same_run(old, other)


def test_the_page_of_the_cluster_has_each_file_of_the_papers_data_with_its_origin_and_command() -> None:
    page = (ROOT / "docs" / "tutorial" / "cluster.md").read_text()
    cfg = settings.load(GPU)
    for path in (source.path.removeprefix("prepared/") for source in (*cfg.data.train, *cfg.data.validation)):
        folder = Path(path).parent.name
        command = PAPER[folder]
        origin = SOURCES[command.split()[0]].repo or "generated"
        row = rf"\| `{path}` \| {origin}.* \| `prorl data prepare {re.escape(command)} --out prepared/{folder}` \|"
        assert re.search(row, page), path


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"], ["train"]], ids=" ".join)
def test_a_misspelt_dataset_is_refused_with_near_names(
    part: str, command: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main([*command, f"data.{part}=[{{name: a, generator: 'reasoning_gym:chain_summ', size: 10}}]"]) == 2
    assert f"data.{part}.0.generator=reasoning_gym:chain_summ: expected a dataset of reasoning-gym." in caplog.text
    assert "Did you mean reasoning_gym:chain_sum or reasoning_gym:" in caplog.text


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]], ids=" ".join)
def test_a_misspelt_option_of_a_generator_is_refused(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for generator, told in (
        ("reasoning_gym:chain_sum", "unknown option min_word; expected one of .*min_terms"),
        ("arithmetic", "unknown option min_word; expected one of max_values"),
    ):
        source = f"{{name: a, generator: '{generator}', size: 10, options: {{min_word: 3}}}}"
        assert cli.main([*command, f"run_dir={tmp_path}/run", f"data.train=[{source}]"]) == 2
        assert re.search(f"data source 'a': {generator}: {told}", caplog.text)


def test_the_names_of_datasets_are_those_of_the_package() -> None:
    from reasoning_gym.factory import DATASETS

    assert reasoning_gym_names() == sorted(DATASETS)
    for name, (_, config) in DATASETS.items():
        assert {field.name for field in fields(config)} - {"seed", "size"} <= reasoning_gym_options(name), name
