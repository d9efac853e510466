"""The collector: first with a real engine, then its order, cap, masks and errors with engines of random speed."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nemo_prorl.config import DynamicSamplingConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import (
    DeadlineExceeded,
    EngineRefused,
    RewardFailure,
    RolloutAbandoned,
    StoppedCleanly,
)
from nemo_prorl.rewards.canaries import CanarySchedule
from nemo_prorl.rewards.discovery import Registry
from nemo_prorl.rewards.interface import Canary, RewardPlugin, RewardRequest, RewardResult, Verdict
from nemo_prorl.rollout.collector import WaitClock
from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import Group, TaskTally
from nemo_prorl.rollout.weight_store import WeightStore
from nemo_prorl.service import read_token
from tests.rollout.engines import EngineProcess
from tests.rollout.simulated import EvenIsRight, Simulated, collected, collector_of, config, drawn, summary, verdict_on


@pytest.mark.vllm
def test_the_whole_path_with_a_real_engine(engine: EngineProcess, models: dict[str, Path]) -> None:
    weights = WeightStore(engine.weights_dir).write(load_file(models["tied0"] / "model.safetensors").items(), 5)
    runs = []
    for delay in (0.0, 0.02):
        rewards = EvenIsRight(seed=1, delay=delay)
        pool = EnginePool(engine.endpoints, read_token(engine.token_file))
        collector = collector_of(pool, rewards, keep_rate=2 / 3)
        try:
            collector.publish(str(weights), 5)
            batch = collector.take(1, 5)
            held_out = collector.sample([drawn(100)], 2, 0.6, 0.95, step=5)
        finally:
            collector.close()
        runs.append((summary(batch), [asdict(group) for group in held_out]))
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
    runs = [collected(Simulated(s, 0.02), EvenIsRight(s, 0.02), steps=4, keep_rate=0.5) for s in range(3)]
    runs.append(collected(Simulated(), EvenIsRight(), steps=4, keep_rate=0.5))
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
    whole, state, _ = collected(Simulated(), EvenIsRight(), steps=4, keep_rate=0.5)
    first, half, drawn = collected(Simulated(), EvenIsRight(), steps=2, keep_rate=0.5)
    second, end, _ = collected(Simulated(), EvenIsRight(), steps=2, state=half, start=drawn, keep_rate=0.5)
    assert half["surplus"]  # otherwise nothing is shown
    assert [summary(b) for b in first + second] == [summary(b) for b in whole]
    assert end == state


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02, 0.05, 0.1])
def test_a_collection_that_is_given_up_leaves_no_trace(seconds: float) -> None:
    """Surplus, draws and keep rates are those of before, so that the checkpoint written then is exact."""
    collector = collector_of(Simulated(delay=0.05), EvenIsRight(delay=0.05), keep_rate=0.5)
    try:
        collector.take(1, 1)
        before = json.dumps(collector.state_dict())
        assert json.loads(before)["surplus"]
        threading.Timer(seconds, collector.abandon).start()
        with pytest.raises(RolloutAbandoned):
            for step in range(2, 50):
                before = json.dumps(collector.state_dict())
                collector.take(step, step)
        for _ in range(3):
            assert json.dumps(collector.state_dict()) == before
            time.sleep(0.05)
    finally:
        collector.close()


def test_the_mean_of_a_group_leaves_out_what_was_not_judged() -> None:
    assert group_of([1.0, None, 0.5]).mean_reward == 0.75
    assert math.isnan(group_of([None, None]).mean_reward)


class MixedIsRight(EvenIsRight):
    """Every group carries a signal: the verdicts alternate."""

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return float(position % 2)


class ThreeOfFour(EvenIsRight):
    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return float(position % 4 > 0)


@pytest.mark.parametrize(("rate", "outcome"), [(1.0, "mixed"), (0.8, "mixed"), (0.75, "solved")])
def test_a_nearly_solved_draw_counts_towards_retirement_and_is_trained_on(rate: float, outcome: str) -> None:
    cfg = config()
    cfg.data.retire_rate = rate
    (batch,), _, _ = collected(Simulated(), ThreeOfFour(), cfg)
    assert {found for _, found in batch.outcomes} == {outcome}
    assert len(batch.groups) == 6
    assert sum(tally.solved for tally in batch.tasks.values()) == 0


def test_groups_that_end_early_are_not_favoured() -> None:
    slow_first = Simulated(seconds=lambda prompt: 0.2 if prompt < 6 else 0.0)  # 12 more are done long before
    (batch,), state, drawn = collected(slow_first, MixedIsRight(), keep_rate=1 / 3)
    assert drawn == 18
    assert {(sampling.temperature, sampling.top_p) for _, sampling in slow_first.asked} == {(1.2, 1.0)}
    assert [group.draw_index for group in batch.groups] == [0, 1, 2, 3, 4, 5]
    assert state["surplus"] == list(range(6, 18))


def test_surplus_is_trained_on_first_and_dropped_when_stale() -> None:
    for staleness, groups, stale in ((1, [6, 7, 8, 9, 10, 11], 0), (0, [18, 19, 20, 21, 22, 23], 12)):
        dynamic = DynamicSamplingConfig(max_draw_factor=5.0, max_staleness=staleness)
        cfg = config(dynamic_sampling=dynamic)
        batches, _, _ = collected(Simulated(), MixedIsRight(), cfg, steps=2, keep_rate=1 / 3)
        assert [group.draw_index for group in batches[1].groups] == groups
        assert batches[1].stale == stale
        assert {group.version for group in batches[1].groups} == {0 if staleness else 1}


class FirstEightMixed(EvenIsRight):
    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return float(position % 2) if request["truth"]["k"] < 8 else 0.0


def test_a_short_batch_tells_its_own_draws_from_those_of_the_step_before(caplog: pytest.LogCaptureFixture) -> None:
    """metrics.jsonl and the live table count the first only."""
    (_, batch), _, _ = collected(Simulated(), FirstEightMixed(), steps=2, keep_rate=1 / 3)
    assert (len(batch.groups), batch.drawn, batch.carried) == (2, 18, 12)
    assert "step 2 trains on 2 of 6 groups: " in caplog.text
    assert "30 groups (18 drawn in this step, 12 left of the step before)" in caplog.text


class AllRight(EvenIsRight):
    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return 1.0


def test_at_the_cap_the_batch_is_smaller_and_the_first_dropped_groups_are_shown() -> None:
    cfg = config(dynamic_sampling=DynamicSamplingConfig(max_draw_factor=2.5))
    (batch,), _, drawn = collected(Simulated(), AllRight(), cfg)
    assert (len(batch.groups), batch.full, drawn, batch.drawn) == (0, False, 15, 15)
    assert {task: (t.decided, t.kept, t.mean_score) for task, t in batch.tasks.items()} == {
        "a": (8, 0, 1),
        "b": (7, 0, 1),
    }
    assert [(group.draw_index, group.scores) for group in batch.dropped] == [(k, [1.0] * 4) for k in range(4)]
    static = config(dynamic_sampling=DynamicSamplingConfig(enabled=False))
    (batch,), _, drawn = collected(Simulated(), AllRight(), static)
    assert (len(batch.groups), drawn) == (6, 6)


def group_of(scores: Sequence[float | None], responses: Sequence[Sequence[int]] | None = None) -> Group:
    """A judged group with these scores (None: not judged); responses of more than 3 tokens did not end."""
    tokens = responses or [[1, 2]] * len(scores)
    answers = [
        Response(i, list(ids), [-1.0] * len(ids), "length" if len(ids) > 3 else "stop", 0)
        for i, ids in enumerate(tokens)
    ]
    return Group("p", "a", {}, [1], 0, answers, [verdict_on("p", score) for score in scores], 1, 0, 0)


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
    (batch,), _, _ = collected(Simulated(), Uneven(), config(dynamic_sampling=dynamic))
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
    cfg = config(100, dynamic_sampling=DynamicSamplingConfig(max_draw_factor=2))
    (batch,), _, _ = collected(Simulated(), Broken(2), cfg)
    assert len(batch.groups) == 6
    for group in batch.groups:
        assert sorted(group.valid) == [False, False, True, True]
        assert sum(group.scores) == 1
    assert batch.tasks["a"].masked == 2 * batch.tasks["a"].decided
    assert batch.tasks["a"].mean_score == 0.5  # of those judged
    assert batch.unjudged == "the scorer broke"
    for enabled in (True, False):  # fewer than 2 valid responses: dropped, in static sampling too
        dynamic = DynamicSamplingConfig(max_draw_factor=2, enabled=enabled)
        (batch,), _, _ = collected(Simulated(), Broken(3), config(100, dynamic_sampling=dynamic))
        assert batch.groups == []


class BrokenForSome(Broken):
    """Infrastructure fails for the first `count` responses of every other prompt."""

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        broken = request["truth"]["k"] // 2 % 2 == 0
        return super().verdict(request, position) if broken else float(position % 2)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_group_that_cannot_teach_is_replaced_while_draws_are_left(
    enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dynamic = DynamicSamplingConfig(max_draw_factor=8.0, enabled=enabled)
    (batch,), _, _ = collected(Simulated(), BrokenForSome(3), config(100, dynamic_sampling=dynamic))
    assert len(batch.groups) == batch.needed == 6
    assert all(sum(group.valid) == 4 for group in batch.groups)
    assert batch.drawn > 6
    assert "trains on" not in caplog.text


def test_several_missing_verdicts_in_a_row_stop_the_run() -> None:
    with pytest.raises(RewardFailure, match=r"8 responses in a row .* prompt p\d+: the scorer broke. Fix: correct"):
        collected(Simulated(), Broken(4))


class BrokenForCanaries(EvenIsRight):
    """Infrastructure fails for some canaries; these are the only requests with this id."""

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        return None if request["id"] == "canary-a-3" else super().verdict(request, position)


class Even(RewardPlugin):
    """The rule of EvenIsRight, with one canary whose known verdict is false."""

    name, tasks = "even", ("a",)

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        return (Canary({}, "2", True), Canary({}, "3", True), Canary({}, "4", True), Canary({}, "5", False))

    def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(float(int(request.response.split()[0]) % 2 == 0))


def test_canaries_are_counted_and_change_nothing_else() -> None:
    canaries = CanarySchedule(Registry({"even": Even}, {}), ["a"], 200, seed=0)
    plain, state, drawn = collected(Simulated(), EvenIsRight(), steps=4, keep_rate=0.5)
    cfg = config(max_infrastructure_failures=1)  # a canary without a verdict is not a failure of the run
    rewards = BrokenForCanaries(delay=0.02)
    batches, other_state, other_drawn = collected(
        Simulated(delay=0.01), rewards, cfg, steps=4, keep_rate=0.5, canaries=canaries
    )
    assert sum(request["id"].startswith("canary-") for request in rewards.requests) == 8
    assert [batch.canaries for batch in batches] == 2 * [
        {"right/a": 2, "false_rejects/a": 1},
        {"wrong/a": 1, "false_accepts/a": 0},
    ]
    assert [{**summary(batch), "canaries": {}} for batch in batches] == [summary(batch) for batch in plain]
    assert (other_state, other_drawn) == (state, drawn)


class Raises(EvenIsRight):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        raise self.error


class Hangs(EvenIsRight):
    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        await asyncio.sleep(3600)
        raise AssertionError


class Refuses(Simulated):
    async def generate(self, *args: Any, **kwargs: Any) -> list[Response]:
        raise EngineRefused("512 is not a token id")


def test_what_goes_wrong_on_the_thread_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rollout.collector._GRACE_S", 0.1)
    with pytest.raises(EngineRefused, match="512 is not"):
        collected(Refuses(), EvenIsRight())
    with pytest.raises(RewardFailure, match="no server"):
        collected(Simulated(), Raises(RewardFailure("no server")))
    with pytest.raises(DeadlineExceeded, match=r"waited 0.2 s for the verdict on p\d+, task [ab]"):
        collected(Simulated(), Hangs(), config(reward_s=0.2))


class Queues(EvenIsRight):
    """A client whose requests wait longer than their deadline in the queue of a server that judges others."""

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        for _ in range(3):
            await asyncio.sleep(0.75 * deadline.seconds)
            deadline.progressed(time.monotonic())
        return await super().score(request, deadline)


def test_the_guard_of_a_verdict_counts_from_the_deadline_s_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rollout.collector._GRACE_S", 0.1)
    (batch,), _, _ = collected(Simulated(), Queues(), config(reward_s=0.8))
    assert batch.full


def test_closing_ends_a_collection_that_hangs() -> None:
    engines, rewards = Simulated(), Hangs()
    collector = collector_of(engines, rewards)
    caught: list[BaseException] = []

    def collect() -> None:
        try:
            collector.take(1, 1)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    Deadline(10, "a reward request").wait_until(lambda: bool(rewards.requests) or bool(engines.asked))
    collector.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(caught[0], StoppedCleanly)
    assert engines.closed
    assert rewards.closed
    collector.close()
    with pytest.raises(StoppedCleanly):
        collector.take(1, 1)


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
        async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
            asked.set()
            return await super().score(request, deadline)

    cfg = config(prompts_per_step=1, reward_s=20)
    collector = collector_of(WaitsForReward(), Tells(), cfg=cfg)
    try:
        assert len(collector.take(1, 1).groups) == 1
    finally:
        collector.close()


def test_the_clock_counts_reward_time_that_nothing_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nemo_prorl.rollout.collector.time.monotonic", lambda: now[0])
    clock = WaitClock()

    def passes(seconds: float) -> None:
        now[0] += seconds

    passes(100)
    with clock.open(engine=1):
        passes(10)
        with clock.open(reward=1), clock.open(reward=1):
            passes(4)
    with clock.open(reward=1):
        passes(1)
        clock.wait(False)
        passes(7)
        clock.wait(True)
        passes(2)
    passes(100)
    assert (clock.engine_s, clock.reward_s, clock.waited_s) == (14, 14, 3)


def test_sample_returns_groups_in_the_order_of_prompts_and_leaves_the_state_alone() -> None:
    engines = Simulated(1, 0.02)
    collector = collector_of(engines, EvenIsRight(2, 0.02))
    prompts = [drawn(k) for k in (7, 3, 5)]
    before = collector.state_dict()
    try:
        once = collector.sample(prompts, 3, 0.6, 0.95, step=1)
        twice = collector.sample(prompts, 3, 0.6, 0.95, step=1)
    finally:
        collector.close()
    assert [group.prompt_id for group in once] == ["p7", "p3", "p5"]
    assert once == twice
    assert {(s.temperature, s.top_p) for _, s in engines.asked} == {(0.6, 0.95)}
    assert collector.state_dict() == before
    assert decode(encode(once)) == once
