"""Shaped rewards by hand."""

import math

import pytest
import torch

from nemo_prorl.algorithms.shaping import (
    cosine_length_reward,
    in_schedule,
    shaped_rewards,
    soft_overlong_penalty,
)
from nemo_prorl.config import GRPOConfig, ShapingConfig


def unfinished(reward: list[float], penalty: float, factor: float = 1.0) -> torch.Tensor:
    """Shape the rewards of responses of which only the first ended."""
    reward_GN, ones_GN = torch.tensor([reward]), torch.ones(1, len(reward))
    ended_GN = torch.arange(len(reward))[None] == 0
    config = GRPOConfig(unfinished_penalty=penalty, unfinished_factor=factor)
    shaped, changes = shaped_rewards(reward_GN, ended_GN, ones_GN, 9 * ones_GN, config, 1)
    assert list(changes) == ["unfinished"]
    assert reward_GN.nan_to_num(7.0).tolist() == torch.tensor([reward]).nan_to_num(7.0).tolist()
    return shaped[0]


def test_unfinished_responses_lose_the_penalty() -> None:
    shaped = unfinished([1.0, 0.25, 0.0, math.nan], 0.5)
    assert shaped[:3].tolist() == [1.0, -0.25, -0.5]
    assert shaped[3].isnan()


def test_unfinished_responses_keep_a_share_of_their_reward() -> None:
    shaped = unfinished([1.0, 0.8, 0.5, math.nan], 0.0, 0.0)
    assert shaped[:3].tolist() == [1.0, 0.0, 0.0]
    assert shaped[3].isnan()
    assert unfinished([1.0, 0.8, 0.5], 0.5, 0.5).tolist() == pytest.approx([1.0, -0.1, -0.25])


def test_soft_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: 20,480 tokens at most, of which 4,096 are the soft part."""
    length = torch.tensor([0, 16384, 17408, 18432, 20480, 30000])
    assert soft_overlong_penalty(length, torch.tensor(20480), 4096).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_cosine_reward_by_hand() -> None:
    length = torch.tensor([0, 25, 50, 75, 99, 100, 200])
    ones = torch.ones(7)

    def along(short: float, long: float) -> list[float]:
        inside = [long + 0.5 * (short - long) * (1 + math.cos(math.pi * n / 100)) for n in (0, 25, 50, 75, 99)]
        return [*inside, -10.0, -10.0]

    def cosine(score: torch.Tensor) -> list[float]:
        cut_off = torch.zeros(7, dtype=torch.bool)
        return cosine_length_reward(score, length, torch.tensor(100), cut_off, ShapingConfig()).tolist()

    assert cosine(ones) == pytest.approx(along(2.0, 1.0))
    assert cosine(0 * ones) == pytest.approx(along(-10.0, 0.0), abs=1e-5)
    assert cosine(ones)[2] == pytest.approx(1.5)


def test_eos_on_the_very_last_token_does_not_exceed() -> None:
    """A response that fills the room and ends there is complete: only one that was cut off exceeded it."""
    full = torch.full((1, 4), 100)
    reward, ended = torch.tensor([[1.0, 0.0, 1.0, 0.0]]), torch.tensor([[True, True, False, False]])
    shaped, _ = shaped_rewards(reward, ended, full, full, GRPOConfig(shaping=ShapingConfig(cosine=True)), 1)
    assert shaped[0].tolist() == pytest.approx([1.0, 0.0, -10.0, -10.0], abs=1e-5)


def test_shapings_add_up_and_are_told_apart() -> None:
    reward = torch.tensor([[1.0, 0.5, 0.0, math.nan]], dtype=torch.float64)
    ended = torch.tensor([[True, False, False, False]])
    length, longest = torch.tensor([[10, 90, 100, 0]]), torch.tensor([[100, 100, 100, 50]])
    shaping = GRPOConfig(
        unfinished_penalty=0.5, shaping=ShapingConfig(overlong_tokens=20, overlong_penalty=0.4, cosine=True)
    )
    shaped, changes = shaped_rewards(reward, ended, length, longest, shaping, 1)

    def at(share: float, score: float) -> float:
        c = 0.5 * (1 + math.cos(math.pi * share))
        return score * (1 + c) + (1 - score) * (-10 * c)

    expected = [at(0.1, 1.0), at(0.9, 0.5) - 0.5 - 0.2, -10.0 - 0.5 - 0.4]
    assert shaped[0, :3].tolist() == pytest.approx(expected, abs=1e-5)
    assert shaped[0, 3].isnan()
    assert shaped.dtype == torch.float64
    assert list(changes) == ["cosine", "unfinished", "overlong"]
    total = reward + torch.stack(list(changes.values())).sum(0)
    assert torch.allclose(total, shaped, equal_nan=True)
    assert changes["unfinished"][0, :3].tolist() == pytest.approx([0.0, -0.5, -0.5])
    assert changes["overlong"][0, :3].tolist() == pytest.approx([0.0, -0.2, -0.4])


def test_without_shaping_the_raw_reward_stays() -> None:
    reward = torch.tensor([[1.0, 0.25]])
    ended, length = torch.tensor([[True, False]]), torch.tensor([[1, 2]])
    shaped, changes = shaped_rewards(reward, ended, length, length + 5, GRPOConfig(), 1)
    assert torch.equal(shaped, reward)
    assert changes == {}


def test_a_schedule_takes_the_last_steps_of_each_period() -> None:
    assert [step for step in range(1, 13) if in_schedule(step, 5, 2)] == [4, 5, 9, 10]
    assert all(in_schedule(step, 0, 0) for step in range(1, 5))
    assert all(in_schedule(step, 3, 3) for step in range(1, 8))
