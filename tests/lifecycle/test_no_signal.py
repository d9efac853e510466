"""What a run says of a step without a group to train on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import Config
from nemo_prorl.errors import StoppedCleanly
from nemo_prorl.lifecycle.no_signal import diagnosis
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.metrics import Metrics
from nemo_prorl.rewards.interface import RewardResult
from nemo_prorl.rollout.groups import CollectedBatch, TaskTally
from nemo_prorl.rollout.report import report_rollout
from nemo_prorl.trainer import Trainer
from tests.lifecycle.small_run import SmallRun, config, score_of
from tests.lines import read_lines
from tests.rollout.test_collector import group_of

SHORT, LONG, WHOLE = 4, 5, 60  # tokens of context, 3 of them the prompt's: 92 %, 84 % and few responses are cut off


def right_until(last: int, judge: Callable[[Mapping[str, Any]], float], detail: str = "") -> Any:
    """Return a preparation: from the step after `last` on no response is right; `detail` is then the verdict's."""

    def prepare(run: SmallRun, trainer: Trainer) -> None:
        run.verifier.judge = lambda request: (
            RewardResult(judge(request)) if trainer.progress.step < last else RewardResult(0.0, detail=detail)
        )

    return prepare


def share_of_fives(request: Mapping[str, Any]) -> float:
    words = request["response"].split()
    return words.count("5") / len(words)


@pytest.mark.parametrize(
    ("context", "prepare", "cause", "fix"),
    [
        (WHOLE, right_until(9, lambda _: 1.0), "the prompts are solved", "take harder problems"),
        (SHORT, right_until(9, lambda _: 1.0), "the prompts are solved", "take harder problems"),
        (WHOLE, right_until(60, share_of_fives), "the policy has collapsed: its entropy fell from 2", "start_from=RUN"),
        (LONG, right_until(2, score_of), "cut off before their answer", "more room (trainer.grpo.max_response_tokens"),
        (SHORT, right_until(0, score_of), "hardly ever ends a response, and no response was ever", "with a warm-up"),
        (
            *(WHOLE, right_until(0, score_of, "no answer in <answer></answer>")),
            "no answer in the form that is asked for; the verdict is 'no answer in <answer></answer>'",
            "state the form in the prompts (data.templates)",
        ),
        (WHOLE, right_until(2, score_of, "wrong number"), "too hard for this model", "take easier problems"),
    ],
    ids=["solved", "solved and cut off", "collapsed", "cut off", "noise", "form", "hard"],
)
def test_a_run_without_a_signal_names_its_cause(
    context: int, prepare: Any, cause: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(
        config(tmp_path, max_steps=200, max_steps_without_signal=2, validate_every=500, context_tokens=context)
    )
    trainer = run.start(monkeypatch)
    prepare(run, trainer)
    try:
        with pytest.raises(StoppedCleanly) as stopped:
            trainer.train()
    finally:
        run.close()
    assert cause in str(stopped.value).partition("Cause: ")[2]
    assert fix in str(stopped.value)
    assert cause in run.alarms()[-1]


def test_the_facts_of_a_step_and_where_its_responses_are() -> None:
    metrics = Metrics(7, "none")
    tally = TaskTally(10, solved=9, unsolved=1, judged=40, finished=40, score_sum=36.0, tokens=400)
    report_rollout(metrics, CollectedBatch(7, 6, 4, tasks={"math": tally}))
    facts = "90% only right ones; mean reward 0.90, 0% of the responses are cut off, 10 tokens per response"
    assert facts in diagnosis(metrics, [], [])
    assert "rollouts" not in diagnosis(metrics, [], [])  # none are stored
    verdict = {"verdict": {"detail": ""}}
    assert diagnosis(metrics, [], [verdict]).endswith("The responses are in rollouts/step-7.jsonl")


def test_a_step_whose_reward_failed_blames_the_reward_and_not_the_model(tmp_path: Path) -> None:
    metrics, tally = Metrics(1, "none"), TaskTally(2, masked=8, finished=0, tokens=400)
    report_rollout(metrics, CollectedBatch(1, 0, 2, tasks={"math": tally}))
    unjudged = {"verdict": {"score": None, "detail": "KeyError: 'answer'"}}
    text = diagnosis(metrics, [], [unjudged])
    assert text.startswith("no response has a verdict; the first: KeyError: 'answer'. Cause: the reward failed, not")
    assert "Fix: correct the reward function (docs/howto/reward_function.md) or the reward server" in text
    assert "hardly ever ends" not in text


@pytest.mark.parametrize(("most", "stored"), [(-1, [1, 2, 3]), (2, [1, 2]), (1, [1]), (0, None)])
def test_the_first_groups_of_a_step_are_stored(most: int, stored: list[int] | None, tmp_path: Path) -> None:
    cfg = Config()
    cfg.trainer.grpo.save_rollout_groups = most
    kept, dropped = ([replace(group_of([1.0], [[k]]), draw_index=k) for k in draws] for draws in ((3, 1), (2,)))
    Records(cfg, tmp_path, writes=True).rollouts(7, kept, dropped, lambda prompt, ids: str(ids[0]))
    path = tmp_path / "rollouts" / "step-7.jsonl"
    found = read_lines(path) if path.exists() else None
    assert stored == (None if found is None else [int(line["response"]) for line in found])
    assert all(line["trained"] == (line["response"] != "2") for line in found or ())


def test_the_responses_of_dropped_groups_are_stored(tmp_path: Path) -> None:
    Records(Config(), tmp_path, writes=True).rollouts(7, [], [group_of([0.0, 0.0])], lambda prompt, ids: f"said {ids}")
    lines = read_lines(tmp_path / "rollouts" / "step-7.jsonl")
    said = [(line["response"], line["verdict"]["score"], line["trained"]) for line in lines]
    assert said == [("said [1, 2]", 0.0, False)] * 2
