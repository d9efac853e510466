"""What a run says of a step without a group to train on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_prorl.config import Config
from nemo_prorl.lifecycle.no_signal import diagnosis
from nemo_prorl.lifecycle.records import Records
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.groups import CollectedBatch, TaskTally
from nemo_prorl.rollout.report import report_rollout
from tests.rollout.test_collector import group_of


@pytest.mark.parametrize(
    ("tally", "facts", "cure"),
    [
        (
            TaskTally(10, unsolved=10, judged=40, finished=38, tokens=800),
            "100% of the groups have only wrong",
            "warm-up",
        ),
        (
            TaskTally(10, unsolved=10, judged=40, finished=2, tokens=800),
            "95% of the responses are cut off",
            "more room",
        ),
        (
            TaskTally(10, solved=9, unsolved=1, judged=40, finished=40, score_sum=36.0, tokens=400),
            "90% only right ones; mean reward 0.90, 0% of the responses are cut off, 10 tokens per response",
            "take harder problems",
        ),
    ],
    ids=["wrong", "cut off", "right"],
)
def test_the_metrics_of_a_step_give_facts_and_a_cure(tally: TaskTally, facts: str, cure: str) -> None:
    metrics = Metrics(7, "none")
    report_rollout(metrics, CollectedBatch(7, 6, 4, tasks={"math": tally}))
    text = diagnosis(metrics)
    assert facts in text
    assert cure in text
    assert text.endswith("The responses are in rollouts/step-7.jsonl")


@pytest.mark.parametrize(("most", "stored"), [(-1, [1, 2, 3]), (2, [1, 2]), (1, [1]), (0, None)])
def test_the_first_groups_of_a_step_are_stored(most: int, stored: list[int] | None, tmp_path: Path) -> None:
    cfg = Config()
    cfg.trainer.grpo.save_rollout_groups = most
    kept, dropped = ([replace(group_of([1.0], [[k]]), draw_index=k) for k in draws] for draws in ((3, 1), (2,)))
    Records(cfg, tmp_path, writes=True).rollouts(7, kept, dropped, lambda prompt, ids: str(ids[0]))
    path = tmp_path / "rollouts" / "step-7.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else None
    assert stored == (None if found is None else [int(line["response"]) for line in found])
    assert all(line["trained"] == (line["response"] != "2") for line in found or ())


def test_the_responses_of_dropped_groups_are_stored(tmp_path: Path) -> None:
    Records(Config(), tmp_path, writes=True).rollouts(7, [], [group_of([0.0, 0.0])], lambda prompt, ids: f"said {ids}")
    lines = [json.loads(line) for line in (tmp_path / "rollouts" / "step-7.jsonl").read_text().splitlines()]
    said = [(line["response"], line["verdict"]["score"], line["trained"]) for line in lines]
    assert said == [("said [1, 2]", 0.0, False)] * 2
