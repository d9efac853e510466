"""Batches one step off: what is collected while a step trains, and what becomes of it at stops, kills and failures."""

import json
import threading
import time
from typing import Any

import pytest

from nemo_prorl.config import DynamicSamplingConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineRefused, RolloutAbandoned
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import CollectedBatch
from nemo_prorl.rollout.overlap import OneStepOff
from tests.rollout.simulated import (
    EvenIsRight,
    Numbered,
    Plain,
    Simulated,
    config,
    expecting,
    load_state,
    state_of,
    summary,
)


class Trained:
    """Some steps of a run without a trainer: takes a batch, begins the next, finishes it."""

    def __init__(
        self,
        engines: Any = None,
        rewards: Any = None,
        state: Any = None,
        keep_rate: float | None = None,
        **dynamic: Any,
    ) -> None:
        sampling = DynamicSamplingConfig(**{"max_draw_factor": 5.0, "max_staleness": 2, **dynamic})
        self.prompts, cfg = Numbered(), config(dynamic_sampling=sampling)
        self.collector = OneStepOff(cfg, engines or Simulated(), rewards or EvenIsRight(), self.prompts, Plain())
        if keep_rate is not None:
            self.collector.keep_rates = expecting(keep_rate)
        if state is not None:
            self.prompts.return_to(state["position"])
            load_state(self.collector, state["collector"])

    def step(self, step: int, last: bool = False) -> CollectedBatch:
        batch = self.collector.take(step, step - 1)
        if not last:
            self.collector.begin_next(step + 1, step - 1)
        self.collector.finish_next()
        return batch

    def state(self) -> Any:
        """As a checkpoint has it."""
        return {"position": self.prompts.position(), "collector": state_of(self.collector)}


def shown(batch: CollectedBatch) -> dict[str, Any]:
    return {key: value for key, value in summary(batch).items() if key != "load"}


def without_clock(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: without_clock(v) for k, v in state.items() if k != "load" and not k.endswith("_s")}
    return [without_clock(v) for v in state] if isinstance(state, list) else state


def run(steps: int, **options: Any) -> tuple[list[CollectedBatch], list[Any]]:
    """Batches of all steps, and the state after each."""
    trained = Trained(**options)
    try:
        batches, states = [], []
        for step in range(1, steps + 1):
            batches.append(trained.step(step, last=step == steps))
            states.append(trained.state())
    finally:
        trained.collector.close()
    return batches, states


def test_a_batch_is_made_by_the_weights_of_the_step_before_and_speed_changes_nothing() -> None:
    batches, states = run(4)
    assert [(b.step, b.version) for b in batches] == [(1, 0), (2, 0), (3, 1), (4, 2)]
    assert all({g.version for g in b.groups} <= {b.version, b.version - 1} for b in batches)
    assert [state["collector"]["waiting"] is None for state in states] == [False, False, False, True]
    slow, others = run(4, engines=Simulated(3, 0.02), rewards=EvenIsRight(3, 0.02))
    assert [shown(b) for b in slow] == [shown(b) for b in batches]
    assert without_clock(others) == without_clock(states)


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(killed_after: int) -> None:
    """Also one that was killed while it generated ahead: what it drew since the checkpoint is drawn again."""
    whole, states = run(4, keep_rate=0.5)
    assert any(batch.carried for batch in whole)
    again = Trained(state=states[killed_after - 1], keep_rate=0.5)
    try:
        for step in range(killed_after + 1, 5):
            assert shown(again.step(step, last=step == 4)) == shown(whole[step - 1])
            assert without_clock(again.state()) == without_clock(states[step - 1])
    finally:
        again.collector.close()


def test_rewards_that_nobody_waits_for_are_hidden() -> None:
    trained = Trained(rewards=EvenIsRight(delay=0.2))
    try:
        trained.collector.begin_next(1, 0)
        Deadline(60, "the batch").wait_until(lambda: trained.collector._ended_at is not None)
        trained.collector.finish_next()
        meanwhile = trained.collector.take(1, 0)
        at_once = trained.collector.take(2, 1)
        trained.collector.begin_next(3, 1)
        trained.collector.finish_next()
        awaited = trained.collector.take(3, 2)
    finally:
        trained.collector.close()
    assert meanwhile.reward_open_s > 0.0
    assert meanwhile.reward_wait_s < meanwhile.reward_open_s / 2  # before `begin_next` returned
    assert at_once.reward_wait_s > meanwhile.reward_wait_s
    assert awaited.reward_wait_s > awaited.reward_open_s / 2


def test_a_batch_comes_back_from_json_as_it_was() -> None:
    (batch, *_), _ = run(2)
    value, groups = json.loads(json.dumps(batch.to_json())), decode(encode(batch.groups + batch.dropped))
    assert value["groups"] == [group.draw_index for group in batch.groups]
    assert CollectedBatch.from_json(value, {group.draw_index: group for group in groups}) == batch


@pytest.mark.parametrize(("staleness", "carried"), [(1, 0), (2, 12)])
def test_what_is_left_over_is_one_version_older_than_its_batch(staleness: int, carried: int) -> None:
    class Mixed(EvenIsRight):
        def verdict(self, request: dict[str, Any], position: int) -> float | None:
            return float(position % 2)

    (_, second, third), _ = run(3, rewards=Mixed(), keep_rate=1 / 3, max_staleness=staleness)
    assert (third.carried, third.stale) == (carried, 12 - carried)
    assert {third.step - 1 - group.version for group in third.groups} == {2 if carried else 1}
    assert second.carried == 12  # from step 1, by the same weights


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05])
def test_a_batch_given_up_while_a_step_trains_was_never_begun(seconds: float) -> None:
    engines = Simulated(delay=0.05)
    trained = Trained(engines, EvenIsRight(delay=0.05), keep_rate=0.5)
    try:
        trained.step(1)
        batch = trained.collector.take(2, 1)
        engines.delay = 5.0  # the next batch does not end before it is given up
        before = trained.state()
        threading.Timer(seconds, trained.collector.abandon).start()
        trained.collector.begin_next(3, 1)
        assert trained.collector.finish_next() == 0.0
        assert trained.state() == before
        assert before["collector"]["waiting"] is None
        with pytest.raises(RolloutAbandoned):
            trained.collector.take(3, 2)
        assert trained.state() == before
        assert len(batch.groups) == 6
    finally:
        trained.collector.close()


def test_a_batch_that_waits_is_not_taken_once_the_run_stops() -> None:
    trained = Trained()
    try:
        trained.step(1)
        before = trained.state()
        trained.collector.abandon()
        with pytest.raises(RolloutAbandoned):
            trained.collector.take(2, 1)
        assert trained.state() == before
        assert before["collector"]["waiting"]["step"] == 2
    finally:
        trained.collector.close()


def test_what_fails_while_a_step_trains_is_said_at_its_end() -> None:
    class Refuses(Simulated):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            if len(self.asked) >= 20:
                raise EngineRefused("engine-0 refused: no such token")
            return await super().generate(*args, **kwargs)

    trained = Trained(Refuses())
    try:
        trained.collector.take(1, 0)
        with pytest.raises(EngineRefused, match="no such token"):
            for step in range(2, 6):
                trained.collector.begin_next(step, step - 2)
                trained.collector.finish_next()
                trained.collector.take(step, step - 1)
    finally:
        trained.collector.close()


def test_engines_wait_for_a_slow_trainer_and_are_counted_busy_until_then() -> None:
    trained = Trained()
    try:
        trained.collector.take(1, 0)
        began = time.monotonic()
        trained.collector.begin_next(2, 0)
        Deadline(20, "the batch").wait_until(lambda: trained.collector._ended_at is not None)
        over = trained.collector._ended_at
        assert over is not None
        time.sleep(0.3)
        assert 0.3 <= trained.collector.finish_next() <= time.monotonic() - over
        assert trained.collector.take(2, 1).load["idle_s"] <= over - began
        assert trained.collector.finish_next() == 0.0  # nothing was begun
    finally:
        trained.collector.close()


def test_after_a_roll_back_nothing_of_the_bad_weights_is_left() -> None:
    trained = Trained(keep_rate=0.5)
    try:
        trained.step(1)
        trained.collector.discard()
        state = trained.state()["collector"]
        assert (state["waiting"], state["surplus"]) == (None, [])
        assert {group.version for group in trained.step(2, last=True).groups} == {1}
    finally:
        trained.collector.close()
