"""The collector: first with a real engine, then its order, cap, masks and errors with engines of random speed."""

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_prorl.config import DynamicSamplingConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import (
    DataError,
    DeadlineExceeded,
    EngineRefused,
    RewardFailure,
    RolloutAbandoned,
    StoppedCleanly,
)
from nemo_prorl.rollout.background import OpenClock
from nemo_prorl.rollout.client import EnginePool
from nemo_prorl.rollout.collected import CollectedBatch, Group, TaskTally
from nemo_prorl.rollout.groups import Rollouts
from nemo_prorl.rollout.one_engine import Response, read_token
from nemo_prorl.rollout.publication import WeightStore
from tests.rollout.engines import EngineProcess
from tests.rollout.simulated import SETTINGS, EvenIsRight, Numbered, Simulated, collected, decode, summary


@pytest.mark.vllm
def test_the_whole_path_with_a_real_engine(engine: EngineProcess, models: dict[str, Path]) -> None:
    weights = WeightStore(engine.weights_dir).write(load_file(models["tied0"] / "model.safetensors").items(), 5)
    runs = []
    for delay in (0.0, 0.02):
        rewards = EvenIsRight(seed=1, delay=delay)
        pool = EnginePool(engine.endpoints, read_token(engine.token_file))
        settings = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(oversubscription=1.5))
        rollouts = Rollouts(pool, rewards, Numbered(), decode, settings)
        try:
            rollouts.publish(str(weights), 5)
            assert rollouts.health()["engine-0"]["weight_version"] == 5
            batch = rollouts.collect(1, 5)
            held_out = rollouts.sample([Numbered(100).next()], 2, temperature=0.6, top_p=0.95, seed=9, version=5)
        finally:
            rollouts.close()
        runs.append((summary(batch), [group.to_json() for group in held_out]))
    assert runs[0] == runs[1]
    assert batch.full
    assert [g.draw_index for g in batch.groups] == sorted(g.draw_index for g in batch.groups)
    for group in batch.groups:
        assert 0 < sum(group.scores) < 4
        assert len(group.prompt_ids) + max(len(r.token_ids) for r in group.responses) <= 64
        for response, score in zip(group.responses, group.scores, strict=True):
            assert score == float(response.token_ids[0] % 2 == 0)
            assert response.weight_version == 5
    assert all(r["finished"] == r["response"].endswith(" 2") or r["response"] == "2" for r in rewards.requests)
    assert batch.generated_tokens > 0
    assert batch.reward_wait_s <= batch.reward_open_s
    assert len(held_out[0].responses) == len(held_out[0].verdicts) == 2


def test_what_is_drawn_and_kept_does_not_depend_on_speed() -> None:
    dynamic = DynamicSamplingConfig(oversubscription=2.0, max_draw_factor=5.0)
    settings = replace(SETTINGS, dynamic_sampling=dynamic)
    runs = [collected(Simulated(seed, 0.02), EvenIsRight(seed, 0.02), settings, steps=4) for seed in range(3)] + [
        collected(Simulated(), EvenIsRight(), settings, steps=4)
    ]
    (batches, state, drawn), *others = runs
    assert any(tally.kept < tally.decided for batch in batches for tally in batch.tasks.values())  # some are dropped
    assert any(batch.carried for batch in batches)
    assert all(batch.full for batch in batches)
    assert all(len(b.outcomes) == sum(tally.decided for tally in b.tasks.values()) for b in batches)
    for other_batches, other_state, other_drawn in others:
        assert [summary(b) for b in other_batches] == [summary(b) for b in batches]
        assert [b.outcomes for b in other_batches] == [b.outcomes for b in batches]
        assert (other_state, other_drawn) == (state, drawn)


def test_a_resumed_collector_goes_on_as_if_nothing_had_been() -> None:
    settings = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(oversubscription=2.0, max_draw_factor=5.0))
    whole, state, _ = collected(Simulated(), EvenIsRight(), settings, steps=4)
    first, half, drawn = collected(Simulated(), EvenIsRight(), settings, steps=2)
    second, end, _ = collected(Simulated(), EvenIsRight(), settings, steps=2, state=half, start=drawn)
    assert half["surplus"]  # otherwise nothing is shown
    assert [summary(b) for b in first + second] == [summary(b) for b in whole]
    assert end == state


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_a_collection_that_is_given_up_leaves_no_trace(seconds: float) -> None:
    """Surplus, draws and keep rates are those of before, so that the checkpoint written then is exact."""
    settings = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(oversubscription=2.0, max_draw_factor=5.0))
    rollouts = Rollouts(Simulated(delay=0.05), EvenIsRight(delay=0.05), Numbered(), decode, settings)
    try:
        rollouts.collect(1, 1)
        before = json.dumps(rollouts.state_dict())
        assert json.loads(before)["surplus"]
        threading.Timer(seconds, rollouts.abandon).start()
        with pytest.raises(RolloutAbandoned):
            for step in range(2, 50):
                before = json.dumps(rollouts.state_dict())
                rollouts.collect(step, step)
        for _ in range(3):
            assert json.dumps(rollouts.state_dict()) == before
            time.sleep(0.05)
    finally:
        rollouts.close()


class MixedIsRight(EvenIsRight):
    """Every group carries a signal: the verdicts alternate."""

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return float(position % 2)


def test_groups_that_end_early_are_not_favoured() -> None:
    settings = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(oversubscription=3.0, max_draw_factor=5.0))
    slow_first = Simulated(seconds=lambda prompt: 0.2 if prompt < 6 else 0.0)  # 12 more are done long before
    (batch,), state, drawn = collected(slow_first, MixedIsRight(), settings)
    assert drawn == 18
    assert [group.draw_index for group in batch.groups] == [0, 1, 2, 3, 4, 5]
    assert [value["draw_index"] for value in state["surplus"]] == list(range(6, 18))


def test_surplus_is_trained_on_first_and_dropped_when_stale() -> None:
    for staleness, groups, stale in ((1, [6, 7, 8, 9, 10, 11], 0), (0, [18, 19, 20, 21, 22, 23], 12)):
        dynamic = DynamicSamplingConfig(oversubscription=3.0, max_draw_factor=5.0, max_staleness=staleness)
        settings = replace(SETTINGS, dynamic_sampling=dynamic)
        batches, _, _ = collected(Simulated(), MixedIsRight(), settings, steps=2)
        assert [group.draw_index for group in batches[1].groups] == groups
        assert batches[1].stale == stale
        assert {group.version for group in batches[1].groups} == {0 if staleness else 1}


class AllRight(EvenIsRight):
    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return 1.0


def test_at_the_cap_the_batch_is_smaller_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(max_draw_factor=2.5))
    (batch,), _, drawn = collected(Simulated(), AllRight(), settings)
    assert (len(batch.groups), batch.full, drawn, batch.drawn) == (0, False, 15, 15)
    assert {task: (t.decided, t.kept, t.mean_score) for task, t in batch.tasks.items()} == {
        "a": (8, 0, 1),
        "b": (7, 0, 1),
    }
    assert "trains on 0 of 6 groups" in caplog.text
    static = replace(SETTINGS, dynamic_sampling=DynamicSamplingConfig(enabled=False))
    (batch,), _, drawn = collected(Simulated(), AllRight(), static)
    assert (len(batch.groups), drawn) == (6, 6)


def group_of(scores: Sequence[float | None], responses: Sequence[Sequence[int]] | None = None) -> Group:
    """A judged group with these scores (None: not judged); responses of more than 3 tokens did not end."""
    tokens = responses or [[1, 2]] * len(scores)
    answers = [
        Response(i, list(ids), [-1.0] * len(ids), "length" if len(ids) > 3 else "stop", 0)
        for i, ids in enumerate(tokens)
    ]
    return Group("p", "a", {}, [1], 0, answers, [{"score": score, "detail": ""} for score in scores], 1, 0, 0)


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [
        ([1.0, 1.0 - 0.9e-6, 1.0], "solved"),
        ([0.0, 0.9e-6], "unsolved"),
        ([0.5, 0.5 + 0.9e-6], "tied"),
        ([0.0, 1.1e-6], "mixed"),
        ([1.0, 0.0, 1.0], "mixed"),
        ([1.0, None, None], "solved"),
        ([None, 0.0], "unsolved"),
        ([0.5, None], "tied"),
        ([0.5, None, 1.0], "mixed"),
        ([None, None], "unjudged"),
    ],
)
def test_the_outcome_of_a_group_by_hand(scores: list[float | None], outcome: str) -> None:
    assert group_of(scores).outcome(1e-6) == outcome


def test_a_tally_by_hand() -> None:
    tally = TaskTally()
    tally.add(group_of([1.0, 1.0]), False, 1e-6)
    tally.add(group_of([0.0, 0.0]), False, 1e-6)
    tally.add(group_of([0.25, None]), False, 1e-6)
    tally.add(group_of([None, None]), False, 1e-6)
    tally.add(group_of([0.0, 1.0], [[5] * 8, [6, 7, 8]]), True, 1e-6)
    assert vars(tally) == {
        **{"decided": 5, "kept": 1, "solved": 1, "unsolved": 1, "tied": 1},
        **{"judged": 7, "masked": 3, "score_sum": 3.25, "finished": 9, "tokens": 8 * 2 + 8 + 3},
        "repetition_sum": pytest.approx(0.8),  # of [5] * 8: five 4-grams, one of them new
    }
    assert tally.responses == 10
    assert vars(TaskTally.total([tally, tally, TaskTally()])) == {
        k: pytest.approx(2 * v) for k, v in vars(tally).items()
    }
    assert vars(TaskTally.total([])) == vars(TaskTally())


class Uneven(EvenIsRight):
    """Prompts in turn: all right, all wrong, all half right, and mixed."""

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return (1.0, 0.0, 0.5, float(position % 2))[request["truth"]["k"] // 2 % 4]


@pytest.mark.parametrize("enabled", [True, False])
def test_what_dynamic_sampling_drops_is_counted_by_kind(enabled: bool) -> None:
    dynamic = DynamicSamplingConfig(enabled=enabled, max_draw_factor=8.0)
    (batch,), _, _ = collected(Simulated(), Uneven(), replace(SETTINGS, dynamic_sampling=dynamic))
    total = TaskTally.total(batch.tasks.values())
    assert total.decided == (24 if enabled else 6)
    kinds = (total.solved, total.unsolved, total.tied, total.decided - total.solved - total.unsolved - total.tied)
    assert kinds == ((6, 6, 6, 6) if enabled else (2, 2, 2, 0))
    assert total.kept == 6
    assert batch.tasks["a"].solved == batch.tasks["b"].solved == total.solved // 2


class Broken(EvenIsRight):
    """Infrastructure fails for the first `count` responses of each prompt."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return None if position < self.count else float(position % 2)


def test_a_missing_verdict_masks_its_response_only() -> None:
    settings = replace(
        SETTINGS, max_infrastructure_failures=100, dynamic_sampling=DynamicSamplingConfig(max_draw_factor=2)
    )
    (batch,), _, _ = collected(Simulated(), Broken(2), settings)
    assert len(batch.groups) == 6
    for group in batch.groups:
        assert sorted(group.valid) == [False, False, True, True]
        assert sum(group.scores) == 1
    assert batch.tasks["a"].masked == 2 * batch.tasks["a"].decided
    assert batch.tasks["a"].mean_score == 0.5  # of those judged
    for enabled in (True, False):  # fewer than 2 valid responses: dropped, in static sampling too
        dynamic = DynamicSamplingConfig(max_draw_factor=2, enabled=enabled)
        (batch,), _, _ = collected(Simulated(), Broken(3), replace(settings, dynamic_sampling=dynamic))
        assert batch.groups == []


def test_several_missing_verdicts_in_a_row_stop_the_run() -> None:
    with pytest.raises(RewardFailure, match=r"8 responses in a row .* task [ab], prompt p\d+: the scorer broke"):
        collected(Simulated(), Broken(4))


class Raises(EvenIsRight):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        raise self.error


class Hangs(EvenIsRight):
    async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
        await asyncio.sleep(3600)
        raise AssertionError


class Refuses(Simulated):
    async def generate(self, *args: Any, **kwargs: Any) -> list[Response]:
        raise EngineRefused("512 is not a token id")


class TooMuch(EvenIsRight):
    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return 1.5


def test_what_goes_wrong_on_the_thread_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rollout.groups._GRACE_S", 0.1)
    with pytest.raises(EngineRefused, match="512 is not"):
        collected(Refuses(), EvenIsRight())
    with pytest.raises(RewardFailure, match="no server"):
        collected(Simulated(), Raises(RewardFailure("no server")))
    with pytest.raises(RewardFailure, match=r"score 1.5 of p\d+ is outside 0..1".replace("..1", r"\.\.1")):
        collected(Simulated(), TooMuch())
    with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s for the verdict on p\d+, task [ab]"):
        collected(Simulated(), Hangs(), replace(SETTINGS, reward_s=0.2))
    with pytest.raises(DataError, match="prompt p0: 8 tokens leave no room"):
        collected(Simulated(), EvenIsRight(), replace(SETTINGS, context_tokens=8))


def test_closing_ends_a_collection_that_hangs() -> None:
    engines, rewards = Simulated(), Hangs()
    rollouts = Rollouts(engines, rewards, Numbered(), decode, SETTINGS)
    caught: list[BaseException] = []

    def collect() -> None:
        try:
            rollouts.collect(1, 1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    Deadline(10, "a reward request").wait_until(lambda: bool(rewards.requests) or bool(engines.asked))
    rollouts.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(caught[0], StoppedCleanly)
    assert engines.closed
    assert rewards.closed
    rollouts.close()
    with pytest.raises(StoppedCleanly):
        rollouts.collect(1, 1)


def test_a_response_is_judged_while_others_are_generated() -> None:
    """Bounded by a deadline: the first is with the rewards before the others have ended."""
    asked = asyncio.Event()

    class WaitsForReward(Simulated):
        async def generate(
            self,
            prompt_ids: Any,
            seeds: Any,
            sampling: Any,
            deadline: Any,
            on_response: Any = None,
            version: Any = None,
        ) -> list[Response]:
            responses = [Response(i, [i], [-1.0], "stop", version) for i in range(len(seeds))]
            on_response(responses[0])
            await asyncio.wait_for(asked.wait(), 10)
            for response in responses[1:]:
                on_response(response)
            return responses

    class Tells(EvenIsRight):
        async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]:
            asked.set()
            return await super().score(request, deadline)

    settings = replace(SETTINGS, prompts_per_step=1, reward_s=20)
    rollouts = Rollouts(WaitsForReward(), Tells(), Numbered(), decode, settings)
    try:
        assert len(rollouts.collect(1, 1).groups) == 1
    finally:
        rollouts.close()


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


def test_the_clock_counts_reward_time_that_nothing_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nemo_prorl.rollout.background.time.monotonic", lambda: now[0])
    clock = OpenClock()

    def passes(seconds: float) -> None:
        now[0] += seconds

    passes(100)
    with clock.engine():
        passes(10)
        with clock.reward(), clock.reward():
            passes(4)
    with clock.reward():
        passes(1)
        with clock.trainer():
            passes(7)
    with clock.trainer():
        passes(100)
    with clock.engine(), clock.trainer():
        passes(3)
    assert (clock.engine_s, clock.reward_s, clock.reward_only_s, clock.trainer_s) == (17, 12, 1, 107)
    batch = CollectedBatch(1, 1, 1, reward_open_s=5, reward_wait_s=1)
    assert batch.reward_hidden_share == pytest.approx(0.8)


def test_sample_returns_groups_in_the_order_of_prompts_and_leaves_the_state_alone() -> None:
    engines = Simulated(1, 0.02)
    rollouts = Rollouts(engines, EvenIsRight(2, 0.02), Numbered(), decode, SETTINGS)
    prompts = [Numbered(k).next() for k in (7, 3, 5)]
    before = rollouts.state_dict()
    try:
        once = rollouts.sample(prompts, 3, 0.6, 0.95, seed=5, version=1)
        twice = rollouts.sample(prompts, 3, 0.6, 0.95, seed=5, version=1)
        other = rollouts.sample(prompts, 3, 0.6, 0.95, seed=6, version=1)
    finally:
        rollouts.close()
    assert [group.prompt_id for group in once] == ["p7", "p3", "p5"]
    assert once == twice != other
    assert {(s.temperature, s.top_p) for _, s in engines.asked} == {(0.6, 0.95)}
    assert rollouts.state_dict() == before
    assert [Group.from_json(json.loads(json.dumps(group.to_json()))) for group in once] == once
