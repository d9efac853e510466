"""What the trainer is given before a collection is over: when, in which blocks, and with which engines asleep."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nemo_prorl.config import DynamicSamplingConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, RolloutAbandoned
from nemo_prorl.rollout.collected import Group
from nemo_prorl.rollout.groups import Rollouts
from nemo_prorl.rollout.one_engine import Response
from tests.rollout.simulated import SETTINGS, EvenIsRight, Numbered, Simulated, decode
from tests.rollout.test_groups import MixedIsRight, group_of


@pytest.mark.parametrize("enabled", [True, False])
def test_groups_are_handed_out_when_they_are_judged_and_none_that_is_dropped(enabled: bool) -> None:
    """While others are generated: the last prompt's responses wait until somebody was told of a group."""
    told: list[Group] = []

    class WaitsForHook(Simulated):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Response]:
            last = len(self.asked) == 5
            responses = await super().generate(*args, **kwargs)
            while last and not told:
                await asyncio.sleep(0.01)
            return responses

    dynamic = DynamicSamplingConfig(max_draw_factor=5.0, oversubscription=2.0, enabled=enabled)
    settings = replace(SETTINGS, dynamic_sampling=dynamic, own_devices=True)
    rollouts = Rollouts(WaitsForHook(), EvenIsRight(), Numbered(), decode, settings)
    try:
        batch = rollouts.collect(1, 0, on_block=told.extend)
        surplus = [group["draw_index"] for group in rollouts.state_dict()["surplus"]]
    finally:
        rollouts.close()
    ours = {group.draw_index: group for group in told}
    assert [ours[group.draw_index] for group in batch.groups] == batch.groups
    assert set(ours) <= {group.draw_index for group in batch.groups} | set(surplus)
    assert surplus
    assert batch.blocks == [1] * len(batch.groups)


class Busy(Simulated):
    """Engines that note when they work and when they sleep; asked while they sleep, they refuse."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, delay=0.02)
        self.working = 0
        self.events: list[str] = []

    async def generate(self, *args: Any, **kwargs: Any) -> list[Response]:
        assert "asleep" not in self.events
        self.working += 1
        responses = await super().generate(*args, **kwargs)
        self.working -= 1
        return responses

    async def sleep(self, level: int, deadline: Deadline) -> int:
        assert not self.working
        self.events.append(f"sleep {level}")
        await asyncio.sleep(0.01)
        self.events.append("asleep")
        return 7


class OneIsSlow(MixedIsRight):
    """All groups carry a signal, but for some; the verdicts on one prompt wait until the trainer has begun."""

    def __init__(self, slow: str, begun: Any, without_signal: Sequence[str] = ()) -> None:
        super().__init__()
        self.slow, self.begun, self.without_signal = slow, begun, without_signal

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return 1.0 if request["id"] in self.without_signal else super().verdict(request, position)

    async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        while request["id"] == self.slow and not self.begun():
            await asyncio.sleep(0.01)
        return await super().score(request, deadline)


@pytest.mark.parametrize("sleep", [None, 2])
@pytest.mark.parametrize(
    ("slow", "without_signal", "blocks", "ahead"),
    [
        ("p3", [], [[0, 1], [2, 3], [4, 5]], [[0, 1], [4, 5]]),  # the others need not wait for it
        ("p11", [], [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]),  # it is surplus
        ("p7", ["p1", "p4", "p5"], [[0], [2, 3], [6, 7], [8]], [[0], [2, 3]]),  # 6, 7, 8, 9: are they in the batch?
    ],
)
def test_while_verdicts_are_open_the_trainer_begins_with_blocks_that_are_sure(
    sleep: int | None, slow: str, without_signal: list[str], blocks: list[list[int]], ahead: list[list[int]]
) -> None:
    """Trainer and engines share devices, 12 prompts at most are drawn for 6.  A deadlock if nothing were handed out."""
    told: list[list[int]] = []
    engines = Busy(seed=1)

    def on_block(block: list[Group]) -> None:
        assert not engines.working
        assert engines.events == ([] if sleep is None else ["sleep 2", "asleep"])
        told.append([group.draw_index for group in block])

    dynamic = DynamicSamplingConfig(max_draw_factor=2.0, oversubscription=2.0)
    settings = replace(SETTINGS, dynamic_sampling=dynamic, sleep=sleep, block_draws=2)
    rewards = OneIsSlow(slow, lambda: len(told) >= len(ahead), without_signal)
    rollouts = Rollouts(engines, rewards, Numbered(), decode, settings)
    try:
        batch = rollouts.collect(1, 0, on_block)
        assert rollouts.sleep() == (0 if sleep is None else 7)
        assert engines.events.count("asleep") == (0 if sleep is None else 1)
        if sleep is not None:
            assert rollouts.sleep() == 7
            assert engines.events.count("asleep") == 2  # what was freed early is told once
    finally:
        rollouts.close()
    draws = [group.draw_index for group in batch.groups]
    assert [[*map(draws.__getitem__, part)] for part in _parts(batch.blocks)] == blocks
    assert sorted(told[: len(ahead)]) == ahead
    assert all(block in blocks for block in told)


def _parts(sizes: Sequence[int]) -> list[range]:
    return [range(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]


def test_engines_that_stay_awake_are_disturbed_where_verdicts_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group may be dropped and another drawn; the trainer begins all the same, but not at once."""
    monkeypatch.setattr("nemo_prorl.rollout.groups._PATIENCE_S", 0.2)
    told: list[float] = []
    engines = Busy(seed=3)
    rewards = OneIsSlow("p5", lambda: bool(told))
    rollouts = Rollouts(engines, rewards, Numbered(), decode, replace(SETTINGS, block_draws=2))
    began = time.monotonic()
    try:
        batch = rollouts.collect(1, 0, lambda _: told.append(time.monotonic() - began))
    finally:
        rollouts.close()
    assert min(told) > 0.2
    assert batch.blocks == [2, 2, 2]


def test_after_another_draw_they_are_left_alone_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict on p1 takes longer than the patience and has one more drawn; what is ready after that waits anew."""
    monkeypatch.setattr("nemo_prorl.rollout.groups._PATIENCE_S", 0.3)
    told: dict[tuple[int, ...], float] = {}
    drawn_at: list[float] = []

    class Counts(Busy):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Response]:
            drawn_at.append(time.monotonic())
            return await super().generate(*args, **kwargs)

    class Slow(MixedIsRight):
        def may_end(self, prompt: str) -> bool:
            return {"p1": bool(told), "p5": len(drawn_at) > 6}.get(prompt, prompt < "p6" or (4, 5) in told)

        def verdict(self, request: dict[str, Any], position: int) -> float | None:
            return 1.0 if request["id"] == "p1" else super().verdict(request, position)

        async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
            while not self.may_end(request["id"]):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            return await super().score(request, deadline)

    dynamic = DynamicSamplingConfig(
        max_draw_factor=5.0, oversubscription=0.99
    )  # one that is dropped makes for one draw
    settings = replace(SETTINGS, block_draws=2, dynamic_sampling=dynamic)
    rollouts = Rollouts(Counts(seed=4), Slow(), Numbered(), decode, settings)
    for _ in range(100):
        rollouts.keep_rates.update("b", True)
    try:
        batch = rollouts.collect(
            1, 0, lambda block: told.update({tuple(group.draw_index for group in block): time.monotonic()})
        )
    finally:
        rollouts.close()
    assert (batch.blocks, batch.drawn) == ([1, 2, 2, 1], 7)
    assert next(iter(told)) == (2, 3)
    assert told[4, 5] - drawn_at[6] > 0.3


def test_static_sampling_hands_out_what_is_judged_and_carried_groups_too() -> None:
    """Without a signal, too; a group of which one response was judged takes its place and is not learnt from."""
    told: list[list[int]] = []

    class Partly(OneIsSlow):
        def verdict(self, request: dict[str, Any], position: int) -> float | None:
            return None if request["id"] == "p1" and position else 1.0

    dynamic = DynamicSamplingConfig(enabled=False)
    settings = replace(SETTINGS, dynamic_sampling=dynamic, block_draws=2, max_infrastructure_failures=99)
    rewards = Partly("p5", lambda: len(told) >= 2)
    rollouts = Rollouts(Busy(seed=5), rewards, Numbered(), decode, settings)
    surplus = [{**group_of([0.0, 1.0, 1.0, 0.0]).to_json(), "draw_index": -1, "version": 0}]
    rollouts.load_state_dict({"surplus": surplus, "draws": 0, "keep_rates": {}})
    try:
        batch = rollouts.collect(1, 0, lambda block: told.append([group.draw_index for group in block]))
    finally:
        rollouts.close()
    assert batch.carried == 1
    assert [group.draw_index for group in batch.groups] == [-1, 0, 2, 3, 4]
    assert batch.blocks == [2, 1, 2]
    assert sorted(told) == [[-1, 0], [2], [3, 4]]


@pytest.mark.parametrize("end", ["given up", "the sleep fails"])
def test_a_collection_that_ends_while_its_engines_fall_asleep(end: str) -> None:
    class Drowsy(Busy):
        async def sleep(self, level: int, deadline: Deadline) -> int:
            self.events.append("falling asleep")
            if end == "the sleep fails":
                raise DeadlineExceeded("waited 1 s for the engines' sleep")
            await asyncio.sleep(30)
            raise AssertionError

    engines = Drowsy(seed=6)
    dynamic = DynamicSamplingConfig(max_draw_factor=2.0, oversubscription=2.0)
    settings = replace(SETTINGS, dynamic_sampling=dynamic, sleep=2, block_draws=2)
    rollouts = Rollouts(engines, OneIsSlow("p11", lambda: False), Numbered(), decode, settings)
    before = rollouts.state_dict()
    try:
        future = rollouts.begin(1, 0, lambda block: None)
        Deadline(20, "falling asleep").wait_until(lambda: bool(engines.events))
        if end == "given up":
            rollouts.abandon()
        with pytest.raises(RolloutAbandoned if end == "given up" else DeadlineExceeded):
            rollouts.end()
        assert future.done()
        if end == "given up":
            assert rollouts.state_dict() == before
    finally:
        rollouts.close()


def test_engines_stay_awake_while_something_may_still_be_drawn() -> None:
    """The slow verdict says that its group carries no signal, so that another prompt is drawn."""
    told: list[list[Group]] = []
    engines = Busy(seed=2)
    asked = asyncio.Event()

    class Late(OneIsSlow):
        async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
            if request["id"] == self.slow and not asked.is_set():
                await asyncio.sleep(0.3)
                assert not told
                assert not engines.events
                asked.set()
            return await super().score(request, deadline)

    settings = replace(SETTINGS, sleep=1, block_draws=2)
    rollouts = Rollouts(engines, Late("p5", lambda: True, ["p5"]), Numbered(), decode, settings)
    try:
        batch = rollouts.collect(1, 0, told.append)
    finally:
        rollouts.close()
    assert [group.draw_index for group in batch.groups] == [0, 1, 2, 3, 4, 6]
    assert batch.blocks == [2, 2, 1, 1]
