"""The blend's order: proportions at any prefix, each record once an epoch, exact continuation."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.blend import Blend, LoadedSource, ids_hash, load_sources, of_tasks, prompt_key
from nemo_prorl.errors import CheckpointError, ConfigError, DataError
from nemo_prorl.settings import load
from tests.data.made import loaded, sources
from tests.lines import read_lines, write_lines


def draw(blend: Blend, count: int) -> list[tuple[str, int]]:
    return [(record["id"], visit) for record, visit in (blend.next() for _ in range(count))]


def test_every_prefix_holds_the_proportions() -> None:
    blend = Blend(sources(), seed=1)
    counts: Counter[str] = Counter()
    for total in range(1, 500):
        counts[blend.next()[0]["id"][0]] += 1
        for name, share in (("a", 3 / 5.5), ("b", 1 / 5.5), ("c", 1.5 / 5.5)):
            assert abs(counts[name] - share * total) < 2


def test_the_source_furthest_behind_its_share_is_next_and_of_equals_the_first() -> None:
    assert "".join(one[0] for one, _ in draw(Blend([loaded("a", 7, 3.0), loaded("b", 5)], seed=1), 12)) == "aaba" * 3


def test_each_record_once_an_epoch_in_another_order() -> None:
    drawn = [(name, visit) for name, visit in draw(Blend(sources(), seed=1), 300) if name.startswith("b")]
    epochs = [drawn[i : i + 5] for i in range(0, len(drawn) - 5, 5)]
    assert len(epochs) > 5
    for visit, epoch in enumerate(epochs):
        assert {name for name, _ in epoch} == {f"b-{i}" for i in range(5)}
        assert {seen for _, seen in epoch} == {visit}
    assert len({tuple(name for name, _ in epoch) for epoch in epochs}) > 3


@pytest.mark.parametrize("stop", [0, 1, 6, 23, 100])
def test_resume_continues_exactly(stop: int) -> None:
    whole = draw(Blend(sources(), seed=1), 200)
    first = Blend(sources(), seed=1)
    draw(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = Blend(sources(), seed=1)
    draw(second, 17)  # whatever it did before
    second.load_state_dict(state)
    assert draw(second, 200 - stop) == whole[stop:]
    assert draw(first, 200 - stop) == whole[stop:]


def test_seed_changes_the_order() -> None:
    assert draw(Blend(sources(), seed=1), 30) != draw(Blend(sources(), seed=2), 30)


@pytest.mark.parametrize(
    ("changed", "seed", "message"),
    [
        ([loaded("a", 8, 3.0), *sources()[1:]], 1, "'a': its records was 7"),
        ([loaded("a", 7, 2.0), *sources()[1:]], 1, "'a': its weight was 3.0"),
        (sources()[:2], 1, "sources of the checkpoint, a, b, c; got a, b"),
        (sources(), 2, "seed=2: expected seed=1"),
    ],
)
def test_changed_data_is_refused(changed: list[LoadedSource], seed: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Blend(changed, seed).load_state_dict(Blend(sources(), seed=1).state_dict())


def test_changed_record_is_refused() -> None:
    changed = sources()
    changed[1][1][2]["truth"] = {"answer": "other"}
    with pytest.raises(CheckpointError, match="'b': its hash"):
        Blend(changed, 1).load_state_dict(Blend(sources(), seed=1).state_dict())


def test_the_order_of_a_truth_s_fields_is_no_change() -> None:
    one, other = {"answer": "1", "unit": "m"}, {"unit": "m", "answer": "1"}
    records = [{"id": "a", "prompt": "?", "truth": truth} for truth in (one, other)]
    assert ids_hash(records[:1]) == ids_hash(records[1:]) != ids_hash(records)


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ([], DataError, "at least one source"),
        ([*sources(), loaded("d", 0)], DataError, r"'d' \(d.jsonl\) has no records"),
        ([*sources(), loaded("a", 2)], ConfigError, "'a': 2 sources have this name"),
        ([loaded("a", 2, 0.0)], ConfigError, "weight is 0.0"),
        ([loaded("a", 2, float("nan"))], ConfigError, "weight is nan"),
        ([loaded("a", 2), (DataSource(name="z"), loaded("a", 1)[1])], DataError, "'z': id 'a-0' is also in 'a'"),
    ],
)
def test_bad_sources_are_named(bad: list[LoadedSource], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Blend(bad, seed=1)


def arithmetic(name: str, size: int, seed: int, **options: Any) -> DataSource:
    return DataSource(name=name, generator="arithmetic", size=size, seed=seed, options=options)


def test_training_never_sees_a_held_out_prompt() -> None:
    """140 of the 200 problems there are: without care, most of the held-out ones would be trained on."""
    options = {"max_values": [9, 9]}
    data = DataConfig(train=[arithmetic("sums", 140, 1, **options)], validation=[arithmetic("sums", 50, 2, **options)])
    train, validation = load_sources(data)
    assert (len(train[0][1]), len(validation[0][1])) == (140, 50)
    assert not {r["prompt"] for r in train[0][1]} & {r["prompt"] for r in validation[0][1]}
    assert not {r["id"] for r in train[0][1]} & {r["id"] for r in validation[0][1]}
    assert all(record["id"].startswith("heldout-sums-") for record in validation[0][1])


def test_a_held_out_prompt_may_have_another_form() -> None:
    user = {"role": "user", "content": "How many?"}
    forms: list[Any] = ["How many?", [user], [{**user, "name": "ann"}]]
    assert {prompt_key({"prompt": form}) for form in forms} == {"How many?"}
    others: list[Any] = ["How many ?", [{"role": "system", "content": "How many?"}], [user, user]]
    assert len({prompt_key({"prompt": form}) for form in [*others, "How many?"]}) == 4


def write(path: Path, numbers: range, prefix: str) -> str:
    lines = [
        {
            "id": f"{prefix}-{i}",
            "task": "math",
            "prompt": f"What is {i}?",
            "truth": {"answer": str(i)},
            "source": "t",
            "meta": {},
        }
        for i in numbers
    ]
    write_lines(path, lines)
    return str(path)


def test_files_are_split_too(tmp_path: Path) -> None:
    data = DataConfig(
        train=[DataSource(name="t", path=write(tmp_path / "train.jsonl", range(10), "t"), size=6)],
        validation=[DataSource(name="v", path=write(tmp_path / "held.jsonl", range(3, 6), "v"))],
    )
    train, validation = load_sources(data)
    assert [record["id"] for record in train[0][1]] == ["t-0", "t-1", "t-2", "t-6", "t-7", "t-8"]
    assert [record["id"] for record in validation[0][1]] == ["v-3", "v-4", "v-5"]
    data.train[0].path = data.validation[0].path
    with pytest.raises(DataError, match=r"'t': no record of .*held\.jsonl is left"):
        load_sources(data)
    other = Path(write(tmp_path / "other.jsonl", range(3, 6), "v"))
    other.write_text(other.read_text().replace("What is", "Name"))
    data.train[0].path = str(other)
    with pytest.raises(DataError, match="'v': id 'v-3' is also in 't'"):
        load_sources(data)


def test_source_needs_a_path_or_a_generator() -> None:
    for source in (DataSource(name="x"), DataSource(name="x", path="x.jsonl", generator="stem", size=1)):
        with pytest.raises(ConfigError, match="'x': expected either a path or a generator"):
            load_sources(DataConfig(train=[source]))


@pytest.mark.starts
def test_the_laptop_job_holds_out_512_problems_with_names_of_their_own() -> None:
    train, validation = load_sources(load([]).data)
    assert sum(len(records) for _, records in validation) == 512
    assert all(len(records) >= 4000 for _, records in train)
    held_out = {record["prompt"] for _, records in validation for record in records}
    assert len(held_out) == 512
    assert not held_out & {record["prompt"] for _, records in train for record in records}
    tasks = [record["truth"].get("dataset", "math") for _, records in train for record in records[:1]]
    assert len(set(tasks)) == len(tasks) >= 4
    assert "math" in tasks


# --- stages ----------------------------------------------------------------------------------------------------------


def stage_sources() -> tuple[list[LoadedSource], list[LoadedSource]]:
    """What a stage trains on, and the stage after it: one source more, in front."""
    first = [loaded("a", 7, 3.0), loaded("b", 50, 1.0)]
    return first, [loaded("new", 40, 1.5), *first]


@pytest.mark.parametrize("stop", [0, 1, 23, 60, 130])
def test_a_stage_goes_on_in_the_orders_of_the_one_before(stop: int) -> None:
    first, second = stage_sources()
    before = Blend(first, seed=1)
    head = draw(before, stop)
    after = Blend(second, seed=1)
    after.begin_stage(json.loads(json.dumps(before.state_dict())))
    tail = draw(after, 200)
    for name, size in (("a", 7), ("b", 50), ("new", 40)):
        drawn = [(one, visit) for one, visit in [*head, *tail] if one.split("-")[0] == name]
        assert [visit for _, visit in drawn] == [at // size for at in range(len(drawn))]
        for start in range(0, len(drawn), size):
            epoch = [one for one, _ in drawn[start : start + size]]
            assert len(set(epoch)) == len(epoch)  # none again before the epoch is over
    alone = Blend(first, seed=1)  # and in the very order that the stage before would have gone on in
    expected = [one for one, _ in draw(alone, 1000) if one.startswith("b")]
    got = [one for one, _ in [*head, *tail] if one.startswith("b")]
    assert got == expected[: len(got)]


def test_shares_of_a_stage_hold_from_its_first_draw() -> None:
    first, second = stage_sources()
    before = Blend(first, seed=1)
    draw(before, 400)
    after = Blend(second, seed=1)
    after.begin_stage(before.state_dict())
    counts: Counter[str] = Counter()
    for total in range(1, 300):
        counts[after.next()[0]["id"].split("-")[0]] += 1
        for name, share in (("a", 3 / 5.5), ("b", 1 / 5.5), ("new", 1.5 / 5.5)):
            assert abs(counts[name] - share * total) < 2


@pytest.mark.parametrize("stop", [0, 1, 37])
def test_a_carried_stage_resumes_exactly_and_is_carried_on(stop: int) -> None:
    first, second = stage_sources()
    before = Blend(first, seed=1)
    draw(before, 45)
    whole, resumed = Blend(second, seed=1), Blend(second, seed=1)
    whole.begin_stage(before.state_dict())
    expected = draw(whole, 150)
    other = Blend(second, seed=1)
    other.begin_stage(before.state_dict())
    draw(other, stop)
    resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert draw(resumed, 150 - stop) == expected[stop:]
    third = Blend(first, seed=1)  # a stage without the new source again
    third.begin_stage(whole.state_dict())
    for name, entry in third.state_dict()["sources"].items():
        drawn = whole.state_dict()["sources"][name]["drawn"]
        assert (entry["drawn"], entry["carried"]) == (drawn, drawn)


def test_other_records_or_another_seed_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    before = Blend(sources(), seed=1)
    draw(before, 30)
    state = before.state_dict()
    changed = sources()
    changed[1][1][2]["truth"] = {"answer": "other"}
    after = Blend(changed, seed=1)
    with caplog.at_level(logging.INFO):
        after.begin_stage(state)
    assert [r.getMessage() for r in caplog.records] == [
        "data source 'b': its records differ from the previous stage's; it starts again"
    ]
    carried = {name: entry["drawn"] for name, entry in after.state_dict()["sources"].items()}
    assert carried == {"a": state["sources"]["a"]["drawn"], "b": 0, "c": state["sources"]["c"]["drawn"]}
    other = Blend(sources(), seed=2)
    with caplog.at_level(logging.INFO):
        other.begin_stage(state)
    assert "had seed 1, this stage has 2" in caplog.text
    assert draw(other, 50) == draw(Blend(sources(), seed=2), 50)


def test_training_takes_the_named_tasks_only_and_validation_all(caplog: pytest.LogCaptureFixture) -> None:
    puzzles = DataSource(name="gcd", generator="reasoning_gym:gcd", size=6, options={"max_numbers": 2})
    data = DataConfig(
        train=[arithmetic("sums", 9, 1), puzzles, DataSource(name="code", generator="code", size=5)],
        validation=[arithmetic("sums", 4, 2), DataSource(name="code", generator="code", size=3, seed=2)],
    )

    def names(tasks: list[str] | None) -> list[list[str]]:
        data.tasks = tasks
        train, validation = load_sources(data)
        assert len(train) == 3, "loading is for all tasks: a warm-up takes them all"
        return [[source.name for source, _ in part] for part in (of_tasks(train, data), validation)]

    assert names(None) == [["sums", "gcd", "code"], ["sums", "code"]]
    assert names(["math", "code"]) == [["sums", "code"], ["sums", "code"]]
    assert not caplog.records
    with pytest.raises(ConfigError, match="have records of code, math, puzzles, but not of stem, instructions"):
        names(["puzzles", "stem", "instructions"])
    for tasks in (["stem", "maths"], []):
        with pytest.raises(
            ConfigError, match=r"data\.tasks=\[.*\]: the training sources have records of code, math, puzzles"
        ):
            names(tasks)


def test_a_file_of_several_tasks_is_reduced_to_the_named_ones(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "mixed.jsonl", range(6), "m"))
    lines = read_lines(path)
    for line in lines[::2]:
        line["task"] = "stem"
    write_lines(path, lines)
    data = DataConfig(train=[DataSource(name="m", path=str(path))], tasks=["stem"])
    train = of_tasks(load_sources(data).train, data)
    assert [record["id"] for record in train[0][1]] == ["m-0", "m-2", "m-4"]


def test_what_was_given_up_is_drawn_again() -> None:
    blend, other = Blend(sources(), seed=1), Blend(sources(), seed=1)
    assert draw(blend, 9) == draw(other, 9)
    position = blend.position()
    draw(blend, 20)
    blend.return_to(position)
    assert blend.state_dict() == other.state_dict()
    assert draw(blend, 50) == draw(other, 50)
