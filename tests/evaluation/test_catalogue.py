"""The benchmark files, and what is said of wrong ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_prorl.config import PUZZLE_FORM
from nemo_prorl.data.blend import load_sources
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.records import read_records
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.catalogue import (
    Sampling,
    catalogue,
    check_files,
    choose,
    load_records,
    part_of,
    read,
    records_sha256,
    table,
)
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.settings import load
from tests.data.preparing import prepare

ALL = catalogue()


def test_the_papers_protocol() -> None:
    paper = [one for one in ALL.values() if "paper" in one.sets]
    assert all(one.sampling == Sampling(16, 0.6, 0.95, 32768, None) for one in paper)
    assert {one.domain for one in paper} == {"math", "code", "stem", "puzzles", "instructions"}
    for one in paper:
        assert one.metric == ("pass@1" if one.domain in ("math", "code", "stem") else "reward"), one.name
    outside = {one.name for one in ALL.values() if one.out_of_distribution}
    assert outside == {"acre", "boxnet", "game_of_life_halting"}


@pytest.mark.parametrize("name", sorted(ALL))
def test_each_has_a_plugin_a_licence_and_a_place_in_the_docs(name: str) -> None:
    one = ALL[name]
    assert one.task in discover().tasks()
    assert one.licence
    assert one.source
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "howto" / "evaluation.md").read_text()


@pytest.mark.parametrize("name", sorted(name for name, one in ALL.items() if one.generate))
def test_what_is_made_on_the_spot_is_always_the_same(name: str) -> None:
    records = load_records(ALL[name], None, limit=20)
    assert len(records) == 20
    assert records_sha256(records) == records_sha256(load_records(ALL[name], None)[:20])
    assert {record["task"] for record in records} == {ALL[name].task}
    assert {part_of(record) for record in records} == {name.removeprefix("laptop_")} or ALL[name].task == "math"


@pytest.mark.starts
def test_generated_benchmarks_are_asked_in_the_form_of_training(tmp_path: Path) -> None:
    tasks = tmp_path / "acre.yaml"
    tasks.write_text("tasks:\n  acre:\n")
    given = (
        "--from",
        tasks,
        "--seed",
        30_000_000,
        "--size",
        100,
        "--holdout",
        0,
        "--check",
        0,
        "--out",
        tmp_path / "acre",
    )
    assert prepare("reasoning-gym", *given) == 0
    trained = [record["prompt"] for record in read_records(tmp_path / "acre" / "train.jsonl")]
    asked = load_records(ALL["acre"], None)
    assert [record["prompt"] for record in asked] == trained
    tokenizer = build_tokenizer(["a question and its answer"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    renderer = PromptRenderer(tmp_path, 32_768)
    text = renderer.decode(renderer.prompt_ids(asked[0]))
    question = asked[0]["truth"]["entry"]["question"].strip()
    assert text == f"<|user|>{PUZZLE_FORM}\n\n{question}<|assistant|><think>\n"
    for name in ("boxnet", "game_of_life_halting"):
        [message] = load_records(ALL[name], None, limit=1)[0]["prompt"]
        assert message["content"].startswith(PUZZLE_FORM)
    for one in choose("laptop"):  # the laptop's model knows no chat template
        prompts = [record["prompt"] for record in load_records(one, None)]
        assert all(prompt.endswith((" in \\boxed{}.", " in <answer></answer>.")) for prompt in prompts)


@pytest.mark.slow
def test_the_laptops_problems_are_those_that_its_training_holds_out() -> None:
    train, held_out = load_sources(load(["cluster=laptop"]).data)
    seen = {record["prompt"] for _, records in train for record in records}
    for source, records in held_out:
        mine = {record["prompt"] for record in load_records(ALL[f"laptop_{source.name}"], None)}
        assert mine == {record["prompt"] for record in records}
        assert not mine & seen


def test_names_and_sets_choose() -> None:
    assert [one.name for one in choose("gsm8k, acre,gsm8k")] == ["gsm8k", "acre"]
    assert len(choose("laptop")) == 5
    with pytest.raises(ConfigError, match=r"aime42: no such benchmark.*Did you mean aime2.*known|Known are acre"):
        choose("aime42")
    with pytest.raises(ConfigError, match=r"MATH-500: no such benchmark. Did you mean math500\?"):
        choose("MATH-500")
    with pytest.raises(ConfigError, match="expected at least one name"):
        choose(",")
    assert len(table(ALL.values())) == len(ALL) + 1


def test_missing_files_are_told_all_together(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").touch()
    check_files(choose("gsm8k,acre"), tmp_path)
    (tmp_path / "minerva").mkdir()
    (tmp_path / "minerva" / "validation.jsonl").touch()
    check_files(choose("minerva"), tmp_path)
    with pytest.raises(
        DataError, match=r"2 of the benchmarks.*\n  aime24: aime24.jsonl.*\n  apps: apps.jsonl or apps/val"
    ):
        check_files(choose("gsm8k,aime24,apps,acre"), tmp_path)
    with pytest.raises(DataError, match="--data DIR was not given"):
        check_files(choose("gsm8k"), None)


def test_a_record_of_another_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"id": "a", "task": "stem", "prompt": "?", "truth": {"answer": "1"}}\n')
    with pytest.raises(
        ConfigError, match=r"gsm8k: task is .math., but record .a. of .*gsm8k.jsonl has the task .stem."
    ):
        load_records(ALL["gsm8k"], tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"domain": "maths"}, "domain is 'maths': Input should be 'math', 'code'"),
        ({"metric": "bleu"}, "metric is 'bleu'"),
        ({"colour": 1}, "unknown key colour (=1). Known: task, title, "),
        ({"metrik": "pass@1"}, "unknown key metrik (=pass@1). Did you mean metric? Known: "),
        ({"prompts": None}, "expected exactly one of 'prompts'"),
        ({"generate": {"generator": "arithmetic"}}, "expected exactly one of 'prompts'"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature is -1: Input should be greater than or equal to 0"),
        ({"sampling": {"tokens": 5}}, "unknown key sampling.tokens (=5). Known: samples, temperature"),
        ({"sampling": {"max_response": 9, "context": 9}}, "max_response is 9; expected 1 to 8"),
        ({"task": ...}, "task"),
    ],
    ids=str,
)
def test_a_wrong_file_is_told_by_key(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    good = yaml.safe_load((Path(read.__code__.co_filename).parent / "benchmarks" / "gsm8k.yaml").read_text())
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(good))
    assert read(file).name == "mine"
    file.write_text(yaml.safe_dump({k: v for k, v in {**good, **change}.items() if v is not ...}))
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        read(file)
    assert str(file) in str(caught.value)


# --- the user's own benchmarks ---------------------------------------------------------------------------------------

RECORD = {"id": "a", "task": "math", "prompt": "1 + 1?", "truth": {"answer": "2"}}


def test_a_yaml_file_of_the_user_s_is_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(json.dumps(RECORD) + "\n")
    (tmp_path / "mine.yaml").write_text("{task: math, prompts: sums.jsonl, metric: pass@1, sampling: {samples: 2}}")
    (tmp_path / "other.yaml").write_text("{task: math, prompts: nothere.jsonl}")
    told = f"other: {tmp_path}/nothere.jsonl, which {tmp_path}/other.yaml names (prompts)"
    with pytest.raises(DataError, match=re.escape(told)):
        check_files(choose(str(tmp_path / "other.yaml")), None)
    [acre, mine] = choose(f"acre,{tmp_path / 'mine.yaml'}")
    assert (acre.name, mine.name, mine.metric, mine.sampling.samples) == ("acre", "mine", "pass@1", 2)
    assert mine.about()["title"] == "mine"
    check_files([mine], None)
    assert load_records(mine, None)[0]["truth"] == {"answer": "2"}


def test_a_file_of_records_is_a_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "units-val.jsonl"
    file.write_text(json.dumps(RECORD) + "\n")
    [mine] = choose(str(file))
    assert (mine.name, mine.task, mine.domain) == ("units-val", "math", "other")
    assert len(load_records(mine, None)) == 1
    assert catalogue([str(file)])["units-val"] == mine


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nowhere.yaml", None, "expected the yaml file of a benchmark"),
        ("mine.yaml", "{task: math}", "expected exactly one of 'prompts'"),
        ("mine.yaml", "{task: math, prompts: x, colour: red}", r"unknown key colour \(=red\)"),
        ("mine.jsonl", '{"question": "1?", "answer": "1"}', "mine.jsonl:1: .*'id'"),
        ("mine.jsonl", "", "mine.jsonl: the file has no records"),
        ("q.csv", None, "q.csv: prompt records are .* math --from .*q.csv --holdout all --out DIR .* take DIR/valid"),
        ("acre.yaml", "{task: math, prompts: x}", "another benchmark has this name"),
    ],
)
def test_a_wrong_file_is_refused(name: str, text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises((ConfigError, DataError), match=says):
        choose(str(tmp_path / name))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / name / "validation.jsonl" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(json.dumps({"id": "1", "task": "math", "prompt": "1?", "truth": {"answer": "1"}}) + "\n")
    with pytest.raises(
        ConfigError, match=r"a/validation.jsonl and .*b/validation.jsonl are both named validation. Fix"
    ):
        choose(f"{files[0]},{files[1]}")
    assert [one.name for one in choose(f"{files[0]},{files[0]}")] == ["validation"]


def test_an_installed_package_brings_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "theirs.yaml").write_text("{task: math, prompts: theirs.jsonl}")
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text("[nemo_prorl.benchmarks]\na = their_benchmarks\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert catalogue()["theirs"].file == str(package / "theirs.yaml")
    assert catalogue([str(package / "theirs.yaml")])["theirs"] == catalogue()["theirs"]  # as a manifest names it
