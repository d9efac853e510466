"""What a batch says of itself in metrics.jsonl, by hand."""

import math
from typing import Any

import pytest

from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.groups import CollectedBatch, TaskTally
from nemo_prorl.rollout.report import report_rollout
from tests.rollout.test_groups import group_of

MATH: dict[str, Any] = {
    "decided": 8,
    "kept": 2,
    "solved": 3,
    "unsolved": 2,
    "tied": 1,
    "judged": 15,
    "masked": 1,
    "score_sum": 9.0,
}
MATH |= {"finished": 12, "tokens": 480, "repetition_sum": 2.0}
CODE: dict[str, Any] = {"decided": 2, "kept": 2, "judged": 4, "score_sum": 1.0, "finished": 4, "tokens": 20}


def reported(batch: CollectedBatch) -> dict[str, float]:
    metrics = Metrics(3, "none")
    report_rollout(metrics, batch)
    values = metrics.as_json()
    assert (values.pop("step"), values.pop("stage")) == (3, "none")
    return values


def test_a_batch_by_hand() -> None:
    groups = [group_of([1.0, 0.0])] * 3  # of weights 0
    counts: dict[str, Any] = {"drawn": 9, "carried": 1, "stale": 2, "surplus": 4, "generated_tokens": 700}
    seconds: dict[str, Any] = {"wall_s": 2.0, "engine_s": 1.5, "reward_open_s": 1.0, "reward_wait_s": 0.5}
    tasks = {"math": TaskTally(**MATH), "code": TaskTally(**CODE)}
    assert reported(CollectedBatch(3, 2, 4, groups, tasks, **counts, **seconds)) == {
        **{"reward/math": 9 / 15, "reward/code": 0.25, "reward/all": 10 / 19},
        **{"keep_rate/math": 0.25, "keep_rate/code": 1.0, "keep_rate/all": 0.4},
        **{"solved/math": 3 / 8, "solved/code": 0.0, "solved/all": 0.3},
        **{"unsolved/math": 0.25, "unsolved/code": 0.0, "unsolved/all": 0.2},
        **{"tied/math": 0.125, "tied/code": 0.0, "tied/all": 0.1},
        **{"response_tokens/math": 30.0, "response_tokens/code": 5.0, "rollout/response_tokens": 25.0},
        **{"truncated/math": 0.25, "truncated/code": 0.0, "rollout/truncated": pytest.approx(0.2)},
        **{"repetition/math": 0.125, "repetition/code": 0.0, "rollout/repetition": 0.1},
        **{"rollout/groups": 3, "rollout/masked": 1, "rollout/staleness": 2.0},
        **{f"rollout/{name}": value for name, value in counts.items()},
        **{"time/rollout/engine_s": 1.5, "time/rollout/reward_open_s": 1.0, "time/rollout/reward_wait_s": 0.5},
        "time/rollout/tokens_per_s": 350.0,
    }


def test_nothing_judged_has_no_reward() -> None:
    tally = TaskTally(decided=1, masked=2, finished=1, tokens=6)
    values = reported(CollectedBatch(3, 2, 4, tasks={"math": tally}))
    assert (values["reward/math"], values["reward/all"]) == (None, None)
    assert (values["keep_rate/all"], values["rollout/truncated"], values["rollout/staleness"]) == (0, 0.5, 0)
    assert math.isfinite(values["time/rollout/tokens_per_s"])


def test_the_order_in_which_tasks_came_does_not_matter() -> None:
    tasks = {"math": TaskTally(**MATH), "code": TaskTally(**CODE)}
    one = reported(CollectedBatch(3, 2, 4, tasks=tasks, wall_s=1.0))
    other = reported(CollectedBatch(3, 2, 4, tasks=dict(reversed(tasks.items())), wall_s=1.0))
    assert list(one.items()) == list(other.items())
