"""Shaped rewards by hand."""

import math

import pytest
import torch

from nemo_prorl.algorithms.shaping import (
    cosine_length_reward,
    in_schedule,
    shape_rewards,
    shaped_rewards,
    soft_overlong_penalty,
)
from nemo_prorl.config import GRPOConfig, ShapingConfig


def test_unfinished_responses_lose_the_penalty() -> None:
    reward = torch.tensor([[1.0, 0.25], [0.0, math.nan]])
    ended = torch.tensor([[True, False], [False, False]])
    shaped = shape_rewards(reward, ended, 0.5)
    assert shaped[0].tolist() == [1.0, -0.25]
    assert shaped[1, 0].item() == -0.5
    assert shaped[1, 1].isnan()
    assert reward[0].tolist() == [1.0, 0.25]
    assert torch.equal(shape_rewards(reward[:1], ended[:1], 0.0), reward[:1])
    assert shape_rewards(torch.ones(1, 2, dtype=torch.int64), ended[:1], 0.5).tolist() == [[1.0, 0.5]]
    assert shape_rewards(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool), 0.5).shape == (0, 4)
    with pytest.raises(ValueError, match=r"unfinished_penalty is -0\.5"):
        shape_rewards(reward, ended, -0.5)
    with pytest.raises(ValueError, match="ended_GN must be bool"):
        shape_rewards(reward, ended.long(), 0.5)


def test_unfinished_responses_keep_a_share_of_their_reward() -> None:
    reward = torch.tensor([[1.0, 0.8, 0.5, math.nan]])
    ended = torch.tensor([[True, False, False, False]])
    assert shape_rewards(reward, ended, 0.0, 0.0)[0, :3].tolist() == [1.0, 0.0, 0.0]
    assert shape_rewards(reward, ended, 0.5, 0.5)[0, :3].tolist() == pytest.approx([1.0, -0.1, -0.25])
    shaped, changes = shaped_rewards(
        reward, ended, torch.ones(1, 4), torch.full((1, 4), 9.0), GRPOConfig(unfinished_factor=0.0), 1
    )
    assert shaped[0, :3].tolist() == [1.0, 0.0, 0.0]
    assert shaped[0, 3].isnan()
    assert list(changes) == ["unfinished"]
    with pytest.raises(ValueError, match="unfinished_factor is 2"):
        shape_rewards(reward, ended, 0.0, 2.0)


def test_soft_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: 20,480 tokens at most, of which 4,096 are the soft part."""
    length = torch.tensor([0, 16384, 17408, 18432, 20480, 30000])
    assert soft_overlong_penalty(length, 20480, 4096).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    for cache in (0, 20481):
        with pytest.raises(ValueError, match=f"cache is {cache}"):
            soft_overlong_penalty(length, 20480, cache)


def test_cosine_reward_by_hand() -> None:
    length = torch.tensor([0, 25, 50, 75, 99, 100, 200])
    correct = torch.ones(7, dtype=torch.bool)

    def along(short: float, long: float) -> list[float]:
        inside = [long + 0.5 * (short - long) * (1 + math.cos(math.pi * n / 100)) for n in (0, 25, 50, 75, 99)]
        return [*inside, -10.0, -10.0]

    assert cosine_length_reward(correct, length, 100).tolist() == pytest.approx(along(2.0, 1.0))
    assert cosine_length_reward(~correct, length, 100).tolist() == pytest.approx(along(-10.0, 0.0), abs=1e-5)
    assert cosine_length_reward(correct, length, 100)[2].item() == pytest.approx(1.5)
    with pytest.raises(ValueError, match="max_length is 0"):
        cosine_length_reward(correct, length, 0)


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
