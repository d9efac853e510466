"""Dynamic sampling: what is kept, how much is drawn, and that timing changes neither."""

import json
import math
import random
from collections import deque

import pytest
import torch

from nemo_prorl.algorithms.dynamic_sampling import DynamicSampler, KeepRates, carries_signal
from nemo_prorl.config import DynamicSamplingConfig


def test_signal_is_a_spread_of_valid_rewards_above_the_tolerance() -> None:
    reward = torch.tensor(
        [
            [0.0, 0.0, 1.0],
            [1.0, 1.0, 1.0],
            [0.5, 0.5, 0.5 + 1e-7],
            [0.5, 0.5, 0.501],
            [0.0, 0.0, 1.0],
            [0.0, math.nan, 1.0],
            [math.nan, math.nan, 1.0],
        ],
        dtype=torch.float64,
    )
    valid = torch.ones(7, 3, dtype=torch.bool)
    valid[4, 2] = valid[5, 1] = False
    valid[6, :2] = False
    assert carries_signal(reward, valid, 1e-6).tolist() == [True, False, False, True, False, True, False]
    assert carries_signal(reward[:4], valid[:4], 0.0).tolist() == [True, False, True, True]
    assert carries_signal(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), 0.0).tolist() == []
    assert carries_signal(torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), 0.0).tolist() == [False, False]


def keep_rates(prior: float = 1.0, strength: float = 1.0, decay: float = 0.98) -> KeepRates:
    rates = KeepRates()
    rates.prior, rates.strength, rates.decay = prior, strength, decay
    return rates


def test_keep_rate_by_hand() -> None:
    rates = keep_rates(decay=0.5)
    assert rates["math"] == 1.0
    rates.update("math", False)
    assert rates["math"] == 1.0 / 2.0
    rates.update("math", True)  # kept: 1; decisions: 0.5 + 1
    assert rates["math"] == (1.0 + 1.0) / (1.0 + 1.5)
    rates.update("math", False)  # kept: 0.5; decisions: 0.75 + 1
    assert rates["math"] == (1.0 + 0.5) / (1.0 + 1.75)
    assert rates["code"] == 1.0
    assert list(rates.state_dict()) == ["math"]
    usual = KeepRates()
    usual.update("math", False)
    usual.update("math", False)
    assert usual["math"] == 1.0 / (1.0 + 1.98)


def test_keep_rate_converges_forgets_and_never_reaches_zero() -> None:
    rates, generator = KeepRates(), random.Random(0)
    for _ in range(1000):
        rates.update("a", generator.random() < 0.3)
    assert rates["a"] == pytest.approx(0.3, abs=0.15)
    for _ in range(500):
        rates.update("a", False)
    assert 0.0 < rates["a"] < 0.03
    for _ in range(200):
        rates.update("a", True)
    assert rates["a"] > 0.95


def play(
    verdicts: list[bool],
    rates: KeepRates,
    needed: int = 4,
    max_drawn: int = 16,
    enabled: bool = True,
    carried: list[int] | None = None,
    tasks: str = "ab",
    margin: float = 0.0,
) -> tuple[DynamicSampler, list[int], list[int], list[int]]:
    """One step as the docstring tells; returns prompts kept, prompts left over, and draws before each decision."""
    dynamic = DynamicSamplingConfig(enabled=enabled, max_draw_factor=max_drawn / needed, margin=margin)
    sampler = DynamicSampler(needed, rates, dynamic)
    pending = deque(carried or [])
    for prompt in pending:
        sampler.carry(tasks[prompt % len(tasks)])
    following = max(pending, default=-1) + 1
    kept, draws = [], []
    while not sampler.done:
        while sampler.wants_more():
            sampler.dispatched(tasks[following % len(tasks)])
            pending.append(following)
            following += 1
        draws.append(sampler.drawn)
        prompt = pending.popleft()
        if sampler.decide(verdicts[prompt]):
            kept.append(prompt)
    assert len(pending) == sampler.undecided
    return sampler, kept, list(pending), draws


def test_all_kept_draws_no_more_than_needed() -> None:
    sampler, kept, surplus, draws = play([True] * 16, KeepRates())
    assert kept == [0, 1, 2, 3]
    assert surplus == []
    assert draws == [4, 4, 4, 4]
    assert sampler.full
    assert sampler.done
    assert not sampler.exhausted
    assert not sampler.wants_more()


def test_drops_are_refilled_in_proportion_to_the_keep_rate() -> None:
    """One task, decay so close to 1 that the rate is (1 + kept) / (1 + decided)."""
    verdicts = [False, False, True, True, True, True, True, True, True, True, True]
    _, kept, surplus, draws = play(verdicts, keep_rates(decay=1 - 1e-12), tasks="a")
    # After the first drop the rate is 1/2: 3 undecided stand for 1.5, 8 would for 4.  After the second it is 1/3.
    assert draws[:3] == [4, 9, 14]
    assert kept == [2, 3, 4, 5]
    assert surplus == list(range(6, 14))


def test_at_the_cap_the_smaller_batch_is_what_there_is() -> None:
    verdicts = [i in (3, 7) for i in range(16)]
    sampler, kept, surplus, draws = play(verdicts, KeepRates())
    assert kept == [3, 7]
    assert surplus == []
    assert sampler.exhausted
    assert sampler.done
    assert not sampler.full
    assert sampler.drawn == sampler.decided == 16
    assert (sampler.kept, sampler.dropped) == (2, 14)
    assert max(draws) == 16
    nothing = play([False] * 16, KeepRates())[0]
    assert nothing.exhausted
    assert nothing.kept == 0


def test_a_margin_is_drawn_at_once_and_then_left_alone_while_enough_is_expected() -> None:
    """Known rates of 1/2: 8 groups stand for 4 with a deviation of sqrt(8 / 4), 16 for 8 with one of 2."""
    half = keep_rates(prior=0.500001, strength=1e12)
    verdicts = [False, True] * 30
    sampler, kept, surplus, draws = play(verdicts, half, margin=2.0, tasks="a", max_drawn=30)
    assert draws == [16] * 8  # 16 / 2 - 2 * 2 = 4; with 15 it would be 3.6
    assert (kept, surplus) == ([1, 3, 5, 7], list(range(8, 16)))
    sampler, _, _, draws = play([False] * 10 + [True] * 20, half, margin=2.0, tasks="a", max_drawn=30)
    assert draws[:10] == [16] * 9 + [25]  # after 9 drops 7 stand for 3.5: up to the margin again, 9 + 16
    assert sampler.full
    static = play([False] * 8, KeepRates(), enabled=False, margin=9.0)
    assert static[3] == [4, 4, 4, 4]


def test_a_surplus_is_judged_first_by_the_next_step() -> None:
    """Groups that were drawn for a rate of 1/2; 1 is what the next step begins with."""
    rates = KeepRates()
    verdicts = [True, True, True, True, False, True, True, False] + [True] * 20
    sampler, kept, surplus, _ = play(verdicts, keep_rates(prior=0.5, strength=1e12))
    assert kept == [0, 1, 2, 3]
    assert surplus == [4, 5, 6, 7]
    with pytest.raises(RuntimeError, match="surplus"):
        sampler.decide(True)
    before = rates.state_dict()
    following, kept, surplus, draws = play(verdicts, rates, carried=surplus)
    assert draws[0] == 4  # what is in hand may be enough: nothing is drawn yet
    assert kept == [5, 6, 8, 9]
    assert following.carried == 4
    assert following.drawn == 4 + following.started
    assert rates.state_dict() != before


def test_carried_groups_count_as_draws() -> None:
    sampler, kept, surplus, _ = play([False] * 10 + [True], KeepRates(), needed=2, max_drawn=4, carried=list(range(6)))
    assert (kept, surplus, sampler.started) == ([], [], 0)
    assert sampler.exhausted


def test_static_sampling_keeps_everything_but_still_measures() -> None:
    rates = KeepRates()
    sampler, kept, surplus, draws = play([False] * 8, rates, enabled=False, max_drawn=4)
    assert (kept, surplus, draws) == ([0, 1, 2, 3], [], [4, 4, 4, 4])
    assert sampler.full
    assert rates["a"] < 1.0


def simulate(seed: int, timing: int, steps: int, rates: KeepRates, state: list[int]) -> list[tuple[list[int], int]]:
    """Groups finish at random times; the loop acts on whatever has finished, one event after another.

    `seed` fixes the prompts' verdicts, `timing` when they finish.  `state` is [next prompt, surplus...].
    """
    clock = random.Random(timing)
    log = []
    for _ in range(steps):
        sampler = DynamicSampler(6, rates, DynamicSamplingConfig(margin=2.0))
        queue = deque(state[1:])
        for prompt in queue:
            sampler.carry("abc"[prompt % 3])
        following, kept = state[0], []
        running, finished = set(queue), set()
        while not sampler.done:
            while sampler.wants_more():
                sampler.dispatched("abc"[following % 3])
                queue.append(following)
                running.add(following)
                following += 1
            if running:  # some groups finish, in an order that has nothing to do with the draws'
                for prompt in clock.sample(sorted(running), clock.randint(1, len(running))):
                    running.discard(prompt)
                    finished.add(prompt)
            while queue and queue[0] in finished and not sampler.done and not sampler.wants_more():
                prompt = queue.popleft()
                if sampler.decide(random.Random(seed * 7919 + prompt).random() < (0.9, 0.5, 0.2)[prompt % 3]):
                    kept.append(prompt)
        state[:] = [following, *queue]
        log.append((kept, following))
    return log


@pytest.mark.parametrize("seed", range(5))
def test_timing_never_changes_what_is_drawn_or_kept(seed: int) -> None:
    runs = [simulate(seed, timing, steps=12, rates=KeepRates(), state=[0]) for timing in range(6)]
    assert all(run == runs[0] for run in runs)
    assert any(run != runs[0] for run in [simulate(seed + 100, 0, 12, KeepRates(), [0])])


@pytest.mark.parametrize("seed", range(3))
def test_resume_from_json_is_exact(seed: int) -> None:
    straight = simulate(seed, 1, steps=14, rates=KeepRates(), state=[0])
    rates, state = KeepRates(), [0]
    first = simulate(seed, 2, steps=5, rates=rates, state=state)
    saved = json.loads(json.dumps({"rates": rates.state_dict(), "state": state}))
    fresh = KeepRates()
    fresh.load_state_dict(saved["rates"])
    assert fresh.state_dict() == rates.state_dict()
    assert first + simulate(seed, 3, steps=9, rates=fresh, state=saved["state"]) == straight


def test_deciding_before_drawing_is_refused() -> None:
    """Else a verdict that comes early would be decided on before the draws that belong before it."""
    sampler = DynamicSampler(2, KeepRates(), DynamicSamplingConfig())
    sampler.dispatched("a")
    with pytest.raises(RuntimeError, match=r"expected dispatched\(\) first"):
        sampler.decide(True)
    sampler.dispatched("a")
    with pytest.raises(RuntimeError, match="wants_more"):
        sampler.dispatched("a")
    sampler.decide(True)
    with pytest.raises(RuntimeError, match=r"expected all calls of carry\(\) before"):
        sampler.carry("a")
    sampler.decide(True)
    empty = DynamicSampler(2, KeepRates(), DynamicSamplingConfig())
    with pytest.raises(RuntimeError, match="no group is undecided"):
        empty.decide(True)
