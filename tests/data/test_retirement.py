"""Curriculum retirement: solved prompts are drawn no more, in an order that a checkpoint continues exactly."""

import json
import logging
import random
from collections import Counter
from typing import Any

import pytest

from nemo_prorl.data.blend import Blend
from tests.data.made import loaded, sources


def steps(blend: Blend, count: int, rng: random.Random, solve: float = 0.5) -> list[tuple[str, int]]:
    """Steps of four draws each, whose outcomes are told afterwards, as a run does."""
    drawn = []
    for _ in range(count):
        ids = []
        for _ in range(4):
            record, visit = blend.next()
            drawn.append((record["id"], visit))
            ids.append(record["id"])
        blend.observe([(one, "solved" if rng.random() < solve else rng.choice(["mixed", "unjudged"])) for one in ids])
    return drawn


def test_only_draws_solved_in_a_row_retire() -> None:
    blend = Blend([loaded("a", 3)], seed=1, retire_after=2)
    told = [("a-0", "solved"), ("a-1", "solved"), ("a-1", "mixed"), ("a-1", "solved"), ("a-2", "solved")]
    assert blend.observe(told) == 0
    assert blend.observe([("a-2", "unjudged"), ("a-2", "solved")]) == 1  # no verdict breaks no row
    drawn = Counter(blend.next()[0]["id"] for _ in range(40))
    assert drawn == {"a-0": 20, "a-1": 20}
    assert blend.observe([("a-0", "unsolved"), ("a-0", "solved"), ("a-2", "unsolved")]) == 1
    assert blend.observe([("a-0", "solved")]) == 2
    assert {blend.next()[0]["id"] for _ in range(9)} == {"a-1"}


def test_without_the_key_nothing_retires() -> None:
    blend = Blend([loaded("a", 3)], seed=1)
    assert blend.observe([("a-0", "solved")] * 9) == 0
    assert {blend.next()[0]["id"] for _ in range(3)} == {"a-0", "a-1", "a-2"}
    assert "retired" not in blend.state_dict()["sources"]["a"]


@pytest.mark.parametrize("stop", [0, 1, 7, 18, 33])
def test_a_resume_continues_exactly(stop: int) -> None:
    """The same draws and the same retirements, whenever it was stopped; and something does retire on the way."""
    whole = Blend(sources(), seed=1, retire_after=2)
    expected = steps(whole, 40, random.Random(5))
    first, rng = Blend(sources(), seed=1, retire_after=2), random.Random(5)
    head = steps(first, stop, rng)
    state = json.loads(json.dumps(first.state_dict()))
    second = Blend(sources(), seed=1, retire_after=2)
    steps(second, 9, random.Random(0))  # whatever it did before
    second.load_state_dict(state)
    assert head + steps(second, 40 - stop, rng) == expected
    assert second.state_dict() == whole.state_dict()
    assert whole.retired


def test_the_others_keep_coming_once_an_epoch() -> None:
    blend = Blend(sources(), seed=3, retire_after=1)
    blend.observe([("a-2", "solved"), ("a-5", "solved"), ("b-0", "solved")])
    drawn = [(record["id"], visit) for record, visit in (blend.next() for _ in range(300))]
    assert len(set(drawn)) == len(drawn)  # a visit is a seed: never the same twice
    for name, left in (("a", {0, 1, 3, 4, 6}), ("b", {1, 2, 3, 4}), ("c", set(range(11)))):
        mine = [(one, visit) for one, visit in drawn if one[0] == name]
        epochs = [{one for one, at in mine if at == epoch} for epoch in range(mine[-1][1])]
        assert len(epochs) > 3
        assert all(epoch == {f"{name}-{i}" for i in left} for epoch in epochs)


def test_a_source_without_records_leaves_its_share_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    blend = Blend(sources(), seed=1, retire_after=1)
    for _ in range(100):
        blend.next()
    with caplog.at_level(logging.INFO):
        assert blend.observe([(f"a-{i}", "solved") for i in range(7)]) == 7
    assert "data source 'a': all its records are retired" in caplog.text
    counts: Counter[str] = Counter()
    for total in range(1, 200):
        counts[blend.next()[0]["id"][0]] += 1
        assert abs(counts["b"] - total / 2.5) < 2
        assert counts["a"] == 0


def test_when_all_are_retired_all_come_back(caplog: pytest.LogCaptureFixture) -> None:
    blend = Blend([loaded("a", 2, 3.0), loaded("b", 2)], seed=1, retire_after=1)
    everything = [(f"{name}-{i}", "solved") for name in "ab" for i in range(2)]
    assert blend.observe(everything[:3]) == 3
    assert {blend.next()[0]["id"] for _ in range(5)} == {"b-1"}
    assert blend.observe(everything[3:]) == 0
    assert "all 4 training prompts are retired; from now on all are drawn again" in caplog.text
    counts = Counter(blend.next()[0]["id"] for _ in range(80))
    assert counts == {"a-0": 30, "a-1": 30, "b-0": 10, "b-1": 10}


def test_what_was_given_up_is_drawn_again() -> None:
    blend, other = (Blend(sources(), seed=1, retire_after=1) for _ in range(2))
    for one in (blend, other):
        one.observe([(f"c-{i}", "solved") for i in range(6)])
    position = blend.position()
    given_up = [blend.next()[0]["id"] for _ in range(30)]
    blend.return_to(position)
    assert blend.state_dict() == other.state_dict()
    assert [blend.next()[0]["id"] for _ in range(30)] == given_up


def test_the_next_stage_keeps_what_is_retired() -> None:
    before = Blend(sources(), seed=1, retire_after=1)
    steps(before, 3, random.Random(1), solve=0.0)
    before.observe([("a-1", "solved"), ("b-2", "solved")])
    state: Any = json.loads(json.dumps(before.state_dict()))
    after = Blend([loaded("new", 4), *sources()[:2]], seed=1, retire_after=1)
    after.begin_stage(state)
    assert after.retired == 2
    assert not {after.next()[0]["id"] for _ in range(200)} & {"a-1", "b-2"}
    changed = sources()[:2]
    changed[0][1][0]["truth"] = {"answer": "other"}
    after = Blend(changed, seed=1, retire_after=1)
    after.begin_stage(state)
    assert after.retired == 1  # of other records nothing is known
    without = Blend(sources(), seed=1)
    without.begin_stage(state)
    assert without.retired == 0
    assert "a-1" in {without.next()[0]["id"] for _ in range(100)}


def test_a_source_that_is_retired_as_a_whole_has_no_share_of_a_resume_or_a_stage_unless_it_is_alone() -> None:
    before = Blend(sources(), seed=1, retire_after=1)
    before.observe([(f"a-{i}", "solved") for i in range(7)])
    alone = Blend(sources()[:1], seed=1, retire_after=1)
    alone.begin_stage(before.state_dict())
    assert alone.retired == 0
    assert {alone.next()[0]["id"] for _ in range(7)} == {f"a-{i}" for i in range(7)}
    after = Blend([*sources()[:1], loaded("new", 40)], seed=1, retire_after=1)
    after.begin_stage(before.state_dict())
    assert after.retired == 7
    resumed = Blend([*sources()[:1], loaded("new", 40)], seed=1, retire_after=1)
    resumed.load_state_dict(after.state_dict())
    for blend in (after, resumed):
        assert {blend.next()[0]["id"][:3] for _ in range(40)} == {"new"}
