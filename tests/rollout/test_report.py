"""What a batch says of itself in metrics.jsonl, by hand."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_prorl.algorithms.diagnostics import means_by_task, merge, sums_by_task
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.config import Config, GRPOConfig
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.groups import CollectedBatch, TaskTally
from nemo_prorl.rollout.report import report_rollout
from nemo_prorl.rollout.rollouts import Rollouts
from nemo_prorl.trainer import advantages, report_update
from tests.rollout.test_collector import group_of

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
    seconds: dict[str, Any] = {
        "wall_s": 0.25,
        "engine_s": 1.5,
        "reward_open_s": 1.0,
        "reward_wait_s": 0.5,
    }
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
        "time/rollout/tokens_per_s": 2800.0,
    }


def test_what_is_not_collected_yet_is_nothing() -> None:
    assert {name for name, value in vars(CollectedBatch(3, 2, 4)).items() if value} == {"step", "version", "needed"}
    assert not any(vars(TaskTally()).values())


def test_the_use_of_the_kv_cache_is_absent_if_no_engine_told_it() -> None:
    key = "system/engine_kv_cache_peak"
    assert reported(CollectedBatch(3, 2, 4, kv_cache_peak=0.75))[key] == 0.75
    assert reported(CollectedBatch(3, 2, 4, kv_cache_peak=0.0))[key] == 0.0
    assert key not in reported(CollectedBatch(3, 2, 4))


def test_nothing_judged_has_no_reward() -> None:
    tally = TaskTally(decided=1, masked=1, finished=1, tokens=6)
    values = reported(CollectedBatch(3, 2, 4, tasks={"math": tally}))
    assert (values["reward/math"], values["reward/all"]) == (None, None)
    assert (values["keep_rate/all"], values["rollout/truncated"], values["rollout/staleness"]) == (0, 0, 0)
    assert values["rollout/response_tokens"] == 6
    assert math.isfinite(values["time/rollout/tokens_per_s"])


def test_the_order_in_which_tasks_came_does_not_matter() -> None:
    tasks = {"math": TaskTally(**MATH), "code": TaskTally(**CODE)}
    one = reported(CollectedBatch(3, 2, 4, tasks=tasks, wall_s=1.0))
    other = reported(CollectedBatch(3, 2, 4, tasks=dict(reversed(tasks.items())), wall_s=1.0))
    assert list(one.items()) == list(other.items())


def judged_of_two_tasks() -> JudgedGroups:
    """Task b, then a twice; a response of 4 tokens did not end, one has no verdict."""
    ended, cut = [5, 6], [5, 6, 7, 8]
    return JudgedGroups.of(
        [
            replace(group_of([1.0, 0.0, None], [ended, cut, cut]), task="b"),
            replace(group_of([0.5, 1.0, 0.0], [ended, cut, ended]), task="a"),
            replace(group_of([0.0, 0.5, 0.0], [ended, ended, cut]), task="a"),
        ]
    )


def test_shaped_reward_by_task_by_hand() -> None:
    judged = judged_of_two_tasks()
    assert judged.tasks == ("a", "b")
    assert judged.task_B.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    metrics = Metrics(1, "none")
    advantages(judged, GRPOConfig(context_tokens=32, unfinished_penalty=0.5), metrics)
    assert metrics["reward_shaped/b"] == pytest.approx((1.0 - 0.5) / 2)
    assert metrics["reward_shaped/a"] == pytest.approx((0.5 + 0.5 + 0.0 + 0.0 + 0.5 - 0.5) / 6)
    assert metrics["reward/shaped"] == pytest.approx(1.5 / 8)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_entropy_and_kl_by_task_do_not_depend_on_how_rows_are_dealt_out(ranks: int) -> None:
    judged = judged_of_two_tasks()
    generator = torch.Generator().manual_seed(1)
    old, ref, entropy = torch.randn(3, *judged.batch().mask_BT.shape, generator=generator)

    def of_rank(rank: int, size: int) -> dict[str, torch.Tensor]:
        rows = torch.cat(judged.rows_of_updates(2, size)[rank])
        mask = judged.batch().mask_BT[rows]
        return sums_by_task(old[rows], ref[rows], entropy[rows], mask, judged.task_B[rows], judged.tasks)

    parts = [of_rank(rank, ranks) for rank in range(ranks)]
    assert ranks == 2 or any(part["tokens/b"] == 0 for part in parts)  # some hold no row of a task
    means = [
        means_by_task({key: float(value) for key, value in sums.items()}, judged.tasks)
        for sums in (of_rank(0, 1), functools.reduce(merge, parts))
    ]
    assert means[0].keys() == {"entropy", "entropy/a", "entropy/b", "kl", "kl/a", "kl/b"}
    assert means[1] == pytest.approx(means[0], rel=1e-12)


def test_shares_of_updates_are_over_their_tokens() -> None:
    metrics = Metrics(1, "none")
    per_token = ("surrogate", "kl", "weight", "clipped_high", "clipped_low", "dual_clipped", "ratio", "approx_kl")
    other = {"loss": 1.0, "grad_norm": 2.0, "max_ratio": 1.5, "min_ratio": 0.5, "nonfinite": 0.0}
    other |= {"positions": 100.0, "padding": 10.0, "max_shapes": 3.0}
    report_update(metrics, {**dict.fromkeys(per_token, 3.0), **other, "tokens": 10.0})
    more = {"tokens": 80.0, "grad_norm": 4.0, "max_ratio": 1.2, "positions": 300.0, "padding": 0.0, "max_shapes": 5.0}
    report_update(metrics, {**dict.fromkeys(per_token, 6.0), **other, **more})
    assert metrics["policy/padding"] == pytest.approx(0.025)  # 10 of 400 positions
    assert metrics["system/max_shapes"] == 5.0
    assert metrics["policy/clipped_low"] == metrics["policy/ratio"] == pytest.approx(0.1)
    assert [metrics[f"policy/{key}"] for key in ("grad_norm", "max_grad_norm", "max_ratio")] == [3.0, 4.0, 1.5]


class OneBatch:
    """The collector of a rank, which always returns the same batch."""

    def __init__(self, batch: CollectedBatch) -> None:
        self.batch = batch

    def share(self, work: object) -> tuple[CollectedBatch, None]:
        return self.batch, None

    def call(self, work: object) -> None:
        return None


def test_responses_without_a_verdict_are_an_alarm_once_in_a_row_of_steps() -> None:
    alarms: list[tuple[int, str]] = []
    lines: list[dict[str, Any]] = []
    cfg = Config()
    cfg.rollout.sleep = None
    records = SimpleNamespace(alarm=lambda step, what: alarms.append((step, what)), lines=lambda: lines)
    for step, masked in enumerate([0, 2, 1, 0, 1], 1):
        tasks = {"a": TaskTally(judged=8 - masked, masked=masked), "b": TaskTally(judged=4)}
        leader: Any = OneBatch(CollectedBatch(step, 0, 1, tasks=tasks, unjudged="it hung" if masked else ""))
        metrics = Metrics(step, "none")
        Rollouts(cfg, Path("run"), None, None, leader, records, None, None).collect(metrics)  # type: ignore[arg-type]
        lines.append(metrics.as_json())
    assert alarms == [
        (2, "2 of 12 responses have no verdict and are masked; the first: it hung"),
        (5, "1 of 12 responses have no verdict and are masked; the first: it hung"),
    ]
    assert [line["rollout/masked"] for line in lines] == [0, 2, 1, 0, 1]


def test_a_verifier_that_errs_on_canaries_is_an_alarm_also_across_a_resume() -> None:
    alarms: list[tuple[int, str]] = []
    lines: list[dict[str, Any]] = []
    cfg = Config()
    cfg.rollout.sleep = None

    def rollouts() -> Rollouts:
        batch = CollectedBatch(1, 0, 1, canaries={"right/math": 1, "false_rejects/math": 1})
        records = SimpleNamespace(alarm=lambda step, what: alarms.append((step, what)), lines=lambda: lines)
        leader: Any = OneBatch(batch)
        made = Rollouts(cfg, Path("run"), None, None, leader, records, None, None)  # type: ignore[arg-type]
        made.load_state_dict({})
        return made

    part = rollouts()
    for step in range(1, 8):
        metrics = Metrics(step, "none")
        part.collect(metrics)
        lines.append(metrics.as_json())
        if step == 3:
            part = rollouts()
    assert lines[0]["canaries/false_rejects/math"] == 1.0
    assert alarms == [
        (
            5,
            "the verifier of task math errs on responses whose verdict is known: 5 false rejects in 5 canaries"
            " (0.478 to 1); 0.001 is tolerated",
        )
    ]
