"""Second verifiers: a real server with two plugins behind a real client, the responses of simulated engines."""

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nemo_prorl import cli
from nemo_prorl.config import Config, DynamicSamplingConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.metrics import Metrics
from nemo_prorl.report.data import page_data
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.discovery import Registry, discover
from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult, Verdict, failed_verdict, is_right
from nemo_prorl.rewards.judging import pool_specs
from nemo_prorl.rewards.second import (
    KEPT_PER_STEP,
    MOST_PER_STEP,
    RESPONSES_PER_SECOND,
    WAIT_S,
    SecondVerdicts,
    SecondVerifiers,
)
from nemo_prorl.rollout.groups import CollectedBatch
from nemo_prorl.rollout.report import report_rollout
from tests.lines import write_lines
from tests.report.made import make_run
from tests.rewards.conftest import ROOT, StartServer, request_of
from tests.rollout.simulated import Simulated, collected, config, summary

PLUGINS = '''
import time
from nemo_prorl.rewards.interface import RewardPlugin, RewardResult

def even(request):
    return int(request.response.split()[0]) % 2 == 0

class First(RewardPlugin):
    """Accepts an even first token."""
    name, tasks, second = "first", ("a", "b"), "again"
    def score(self, request):
        return RewardResult(float(even(request)))

class Again(RewardPlugin):
    """The same by other means, with an error, an exception, and prompts that it cannot judge."""
    name, tasks = "again", ("again",)
    def validate_truth(self, truth):
        if truth["k"] % 5 == 0:
            raise ValueError("truth.k must not be a multiple of 5")
    def score(self, request):
        token = int(request.response.split()[0])
        if token % 7 == 0:
            raise RuntimeError("out of order")
        return RewardResult(float(even(request) and token % 3 > 0))

class Hangs(RewardPlugin):
    name, tasks, time_budget_s = "again", ("again",), 60.0
    def score(self, request):
        time.sleep(100)
'''


def collect(rewards: Any, second: SecondVerifiers | None, steps: int = 3, **more: Any) -> tuple[Any, ...]:
    """Collect steps of 400 responses, every group kept."""
    cfg = config(prompts_per_step=100, samples_per_prompt=4, dynamic_sampling=DynamicSamplingConfig(enabled=False))
    return collected(Simulated(delay=0.01), rewards, cfg, steps=steps, second=second, **more)


@pytest.fixture
def verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> Callable[[str], tuple[RewardClient, SecondVerifiers]]:
    """Starts a server of `First` and the named class as its second verifier; returns its client and the sample."""

    def start(second: str) -> tuple[RewardClient, SecondVerifiers]:
        info = tmp_path / "site" / "two_plugins-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-plugins\nVersion: 1.0\n")
        points = f"first = two_plugins:First\nagain = two_plugins:{second}\n"
        (info / "entry_points.txt").write_text(f"[nemo_prorl.rewards]\n{points}")
        (tmp_path / "site" / "two_plugins.py").write_text(PLUGINS)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{ROOT}")
        monkeypatch.delitem(sys.modules, "two_plugins", raising=False)
        start_server("a,b,again")
        return RewardClient(tmp_path / "endpoints", tmp_path / "token"), SecondVerifiers(discover(), "ab", {}, seed=1)

    return start


def without_second(batches: list[CollectedBatch]) -> list[dict[str, Any]]:
    return [{**summary(batch), "second": {}, "disagreements": []} for batch in batches]


def expected(batch: CollectedBatch, second: SecondVerifiers) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return counts and (id, response) of disagreements, computed from all responses of a batch."""
    counts: dict[str, int] = {}
    differing = []
    for group in sorted(batch.groups, key=lambda group: group.draw_index):
        for response in group.responses:
            token = response.token_ids[0]
            chosen = second.chooses(4 * group.draw_index + response.index)
            if not chosen or group.record["truth"]["k"] % 5 == 0 or token % 7 == 0:
                continue
            disagrees = token % 2 == 0 and token % 3 == 0
            for name, count in (("judged", 1), ("disagreed", int(disagrees))):
                counts[f"{name}/{group.task}"] = counts.get(f"{name}/{group.task}", 0) + count
            if disagrees:
                differing.append((group.prompt_id, " ".join(map(str, response.token_ids))))
    return counts, differing


@pytest.mark.slow
@pytest.mark.starts
def test_a_disagreement_is_counted_and_shown_and_changes_nothing(
    tmp_path: Path, verifiers: Callable[[str], tuple[RewardClient, SecondVerifiers]]
) -> None:
    client, second = verifiers("Again")
    batches, state, drawn = collect(client, second, steps=8)
    plain, plain_state, plain_drawn = collect(RewardClient(tmp_path / "endpoints", tmp_path / "token"), None, steps=8)
    assert without_second(batches) == [summary(batch) for batch in plain]
    assert (state, drawn) == (plain_state, plain_drawn)

    run = make_run(tmp_path / "run", steps=8)
    records, lines = Records(Config(), run, writes=True), []
    found = []
    for batch in batches:
        counts, differing = expected(batch, second)
        assert batch.second == counts
        assert [(one["id"], one["response"]) for one in batch.disagreements] == differing[:KEPT_PER_STEP]
        records.disagreements(batch.step, batch.disagreements)
        metrics = Metrics(batch.step, "none")
        report_rollout(metrics, batch)
        lines.append(json.dumps(metrics.as_json()) + "\n")
        found += [(batch.step, one["id"]) for one in batch.disagreements]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert len(found) >= 2
    shown = page_data([run], [], 10)["curves"][0]["second"]
    assert [(item["step"], item["id"]) for item in shown["items"]] == sorted(found, key=lambda one: -one[0])
    assert {item["first"]["score"] - item["second"]["score"] for item in shown["items"]} == {1.0}
    rows = {row["task"]: row for row in shown["rows"]}
    for task, row in rows.items():
        assert row["judged"] == sum(batch.second.get(f"judged/{task}", 0) for batch in batches)
        assert row["low"] <= row["errors"] / row["judged"] <= row["high"]
    assert sum(row["errors"] for row in rows.values()) >= len(found)


@pytest.mark.starts
def test_a_second_verifier_that_hangs_delays_a_step_by_two_seconds_at_most_and_counts_as_nothing(
    tmp_path: Path, verifiers: Callable[[str], tuple[RewardClient, SecondVerifiers]]
) -> None:
    client, second = verifiers("Hangs")
    began = time.monotonic()
    plain, _, _ = collect(RewardClient(tmp_path / "endpoints", tmp_path / "token"), None, steps=1)
    undisturbed_s, began = time.monotonic() - began, time.monotonic()
    batches, _, _ = collect(client, second, steps=1)
    assert time.monotonic() - began < undisturbed_s + WAIT_S + 5.0
    assert batches[0].second == {}
    assert without_second(batches) == [summary(batch) for batch in plain]


class Raises:
    """Judges by the rule of `First` without a server; an error of this client itself ends nothing."""

    async def score(self, request: dict[str, Any], deadline: object) -> Verdict:
        if request["task"] == "again":
            raise OSError("no connection")
        score = float(int(request["response"].split()[0]) % 2 == 0)
        return {"id": request["id"], "score": score, "correct": None, "parts": {}, "detail": "", "failure": None}

    async def close(self) -> None:
        return None


class First(RewardPlugin):
    name, second = "first", "again"
    tasks: ClassVar[tuple[str, ...]] = ("a", "b")

    def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(0.0)


class Again(First):
    name, second = "again", ""
    tasks: ClassVar[tuple[str, ...]] = ("again",)


BOTH = Registry({"first": First, "again": Again}, {})


class TimesOut(Raises):
    async def score(self, request: dict[str, Any], deadline: object) -> Verdict:
        if request["task"] == "again":
            return failed_verdict(request["id"], "timeout", "too slow")
        return await super().score(request, deadline)


@pytest.mark.parametrize("client", [Raises, TimesOut])
def test_a_second_verdict_that_fails_counts_as_nothing(client: type[Raises]) -> None:
    batches, _, _ = collect(client(), SecondVerifiers(BOTH, ["a", "b"], {}, seed=1), steps=1)
    assert batches[0].second == {}


class JudgesSome(Raises):
    """Fails for each seventh first token: hardly for 8 in a row, which would end the run.  Its two verdicts agree."""

    async def score(self, request: dict[str, Any], deadline: object) -> Verdict:
        if request["task"] != "again" and int(request["response"].split()[0]) % 7 == 0:
            return failed_verdict(request["id"], "infrastructure", "out of order")
        return await super().score({**request, "task": "a"}, deadline)


def test_a_response_without_a_first_verdict_gets_no_second_one() -> None:
    batches, _, _ = collect(JudgesSome(), SecondVerifiers(BOTH, ["a", "b"], {}, seed=1))
    assert 0 < sum(sum(batch.second.values()) for batch in batches) < 12
    assert not any(batch.disagreements for batch in batches)


def test_one_response_of_each_hundred_is_chosen_and_the_same_ones_after_a_resume() -> None:
    def sample(seed: int) -> list[int]:
        second = SecondVerifiers(BOTH, ["a"], {}, seed)
        return [number for number in range(40_000) if second.chooses(number)]

    assert [number // RESPONSES_PER_SECOND for number in sample(3)] == list(range(400))
    assert sample(3) == sample(3) != sample(4)
    places = [number % RESPONSES_PER_SECOND for number in sample(3)]
    assert abs(sum(places) / 400 - 49.5) < 4 * math.sqrt(100**2 / 12 / 400)

    class Counts(Raises):
        def __init__(self) -> None:
            self.asked: list[tuple[str, str]] = []

        async def score(self, request: dict[str, Any], deadline: object) -> Verdict:
            if request["task"] == "again":
                self.asked.append((request["id"], request["response"]))
            return await super().score({**request, "task": "a"}, deadline)

    second = SecondVerifiers(BOTH, ["a", "b"], {}, seed=1)
    whole, part = Counts(), Counts()
    batches, _, _ = collect(whole, second, steps=3)
    _, state, drawn = collect(part, second, steps=2)
    resumed, _, _ = collect(part, second, steps=1, state=state, start=drawn)
    assert sorted(part.asked) == sorted(whole.asked)
    assert len(whole.asked) == 12
    assert resumed[0].second == batches[2].second
    assert sum(batches[2].second.values()) == 4  # all agree


def test_a_step_asks_for_a_limited_number_of_second_verdicts() -> None:
    grpo: dict[str, Any] = {
        "prompts_per_step": 700,
        "samples_per_prompt": 8,
        "dynamic_sampling": DynamicSamplingConfig(enabled=False),
    }
    second = SecondVerifiers(BOTH, ["a", "b"], {}, seed=1)

    class Agrees(Raises):
        async def score(self, request: dict[str, Any], deadline: object) -> Verdict:
            return await super().score({**request, "task": "a"}, deadline)

    batches, _, _ = collected(Simulated(), Agrees(), config(**grpo), steps=2, second=second)
    assert [sum(batch.second.values()) for batch in batches] == [MOST_PER_STEP, MOST_PER_STEP]


def test_a_step_waits_for_its_second_verdicts_but_not_after_an_error() -> None:
    """The first verifier says 1 to all, the second to those whose number is even."""

    def verdict(score: float | None, failure: str | None = None) -> Verdict:
        return {"id": "x", "score": score, "correct": None, "parts": {}, "detail": "", "failure": failure}

    class All(SecondVerifiers):
        def chooses(self, number: int) -> bool:
            return number != 1

    asked: list[str] = []

    async def score(request: dict[str, Any], deadline: object) -> Verdict:
        await asyncio.sleep(0.01)
        asked.append(request["task"])
        number = int(request["response"])
        return verdict(None, "infrastructure") if number == 9 else verdict(float(number % 2 == 0))

    async def step(error: BaseException | None) -> SecondVerdicts:
        seconds = SecondVerdicts(All(BOTH, ["a"], {}, seed=1), score, 5.0, first=100 - MOST_PER_STEP * 100)
        with contextlib.suppress(KeyError):
            async with seconds as entered:
                assert entered is seconds
                for number in (*range(12), 101):  # one that is not chosen, and one behind the step's last
                    first = verdict(None if number == 3 else 1.0)
                    seconds.offer(number, request_of("a", str(number)), first)
                if error is not None:
                    raise error
        return seconds

    found = asyncio.run(step(None))
    assert set(asked) == {"again"}
    assert found.counts == {"judged/a": 9, "disagreed/a": 3}
    assert [one["response"] for one in found.disagreements] == ["5", "7", "11"][:KEPT_PER_STEP]
    assert {
        (one["second_task"], one["verdict"]["score"], one["second_verdict"]["score"]) for one in found.disagreements
    } == {("again", 1.0, 0.0)}
    assert asyncio.run(step(KeyError("x"))).counts == {}


def test_right_is_what_the_plugin_calls_correct_or_else_a_full_score() -> None:
    def verdict(score: float | None, correct: bool | None) -> Verdict:
        return {"id": "x", "score": score, "correct": correct, "parts": {}, "detail": "", "failure": None}

    given = [(1.0, None), (0.9, None), (0.9, True), (1.0, False), (None, None)]
    assert [is_right(verdict(*one)) for one in given] == [True, False, True, False, None]


def test_a_missing_second_verifier_is_named_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = r"plugin 'first' names a second verifier, second='again'.*install the plugin of task 'again'.*First"
    with pytest.raises(ConfigError, match=named):
        SecondVerifiers(Registry({"first": First}, {}), ["a"], {}, seed=0)
    with pytest.raises(ConfigError, match="rewards.plugins.again.speed=1: unknown setting"):
        SecondVerifiers(BOTH, ["a"], {"again": {"speed": 1}}, seed=0)
    # the plugin math as it was installed before it had a second verifier
    info = tmp_path / "prorl_reward_math-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prorl-reward-math\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[nemo_prorl.rewards]\nmath = prorl_reward_math.plugin:MathReward\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for command in (["plan"], ["train", "--dry-run"]):
        said: list[str] = []
        monkeypatch.setattr("nemo_prorl.cli._log.error", lambda text, *more, said=said: said.append(text % more))
        assert cli.main(command) == 2
        assert "plugin 'math' names a second verifier, second='math_second'" in said[-1]


def test_data_of_a_second_verifier_beside_that_of_its_task_is_refused(tmp_path: Path) -> None:
    from nemo_prorl import settings
    from nemo_prorl.launcher.run_data import check_files

    overrides = ["data.tasks=null"]
    for part, text in (("train", "1 = ?"), ("validation", "2 = ?")):
        file = tmp_path / f"{part}.jsonl"
        lines = [
            {"id": f"{part} {task}", "task": task, "prompt": f"{task} {text}", "truth": {"answer": "1"}}
            for task in ("math", "math_second")
        ]
        write_lines(file, lines)
        overrides.append(f"data.{part}=[{{name: x, path: {file}}}]")
    with pytest.raises(ConfigError, match=r"task 'math_second', the second verifier of task 'math'"):
        check_files(settings.load(overrides))


def test_a_second_verifier_gets_one_worker_beside_the_others() -> None:
    def workers(tasks: list[str]) -> dict[str, int]:
        return {spec.plugin: spec.workers for spec in pool_specs(BOTH, tasks, 4)}

    assert workers(["a", "b", "again"]) == {"first": 4, "again": 1}
    assert workers(["again"]) == {"again": 4}
    assert workers([]) == {"first": 4, "again": 1}


def test_the_list_of_plugins_says_which_is_a_second_verifier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewards", "list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "second verifier: math_second" in lines["math"]
    assert "the second verifier of math, not for training" in lines["math_second"]
    assert "second" not in lines["puzzles"] + lines["stem"]
    with pytest.raises(ConfigError, match=r"math_second \(second verifier of math\)"):
        discover().plugin_of_task("algebra")


@pytest.mark.starts
def test_the_second_verifier_of_math_judges_alone() -> None:
    from prorl_reward_math.second import MathSecond

    plugin = MathSecond()
    plugin.prepare()
    right = {"\\frac{3}{4}": "so $\\boxed{0.75}$", "2\\sqrt{3}": "\\boxed{\\sqrt{12}}", "(x-1)(x+1)": "\\boxed{x^2-1}"}
    wrong = {"7": "The answer is 7.", "\\frac{2}{3}": "\\boxed{\\frac{3}{2}}", "5": "<think>\\boxed{5}"}

    def score(truth: str, response: str) -> float:
        return plugin.score(RewardRequest("x", "math_second", "?", {"answer": truth}, response)).score

    assert {truth: score(truth, response) for truth, response in right.items()} == dict.fromkeys(right, 1.0)
    assert {truth: score(truth, response) for truth, response in wrong.items()} == dict.fromkeys(wrong, 0.0)
    for truth in ({"all_of": ["1", "2"]}, {"answer": "9.8", "tolerance": 0.01}, {"answer": "5", "unit": "m"}):
        with pytest.raises(ValueError, match=r"truth\.(answer|tolerance|unit)"):
            plugin.validate_truth(truth)
