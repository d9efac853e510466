"""Canaries: exact error probabilities of the alarm, and a verifier that errs at random behind a real reward server."""

import asyncio
import random
from collections import Counter
from math import comb
from pathlib import Path

import numpy as np
import pytest

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.canaries import (
    ALARM_RATE,
    BOUND,
    ERROR,
    FULL,
    MOST_PER_STEP,
    CanarySchedule,
    CanaryWatch,
    SentCanary,
    Tally,
    ask,
    interval,
    requests_of,
    total,
)
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.discovery import Registry, discover
from nemo_prorl.rewards.interface import Canary, RewardPlugin, RewardRequest, RewardResult, Verdict
from nemo_prorl.rewards.judging import RewardService, pool_specs
from tests.rewards.conftest import ROOT, StartServer, request_of

SHIPPED = ("code", "instructions", "math", "puzzles", "stem")
MOST_VERDICTS = 1000 * MOST_PER_STEP  # in 1,000 steps, over all tasks and sides
FOUND_WITHIN = {0.01: 1280, 0.05: 160}  # verdicts of a task and side, by error rate, with power 0.9


def alarm_probabilities(rate: float, verdicts: int, per_step: int = 1) -> np.ndarray:
    """Return the exact probability that the alarm of one tally has come, after each step, by its distribution."""
    level, come = np.zeros(FULL), []
    level[0] = 1.0
    for _ in range(verdicts // per_step):
        after = np.zeros(FULL)
        for errors in range(min(per_step, 2 * FULL // ERROR) + 1):  # more errors than this fill the level anyway
            chance = comb(per_step, errors) * rate**errors * (1.0 - rate) ** (per_step - errors)
            change = ERROR * errors - (per_step - errors)
            if change < 0:
                after[: FULL + change] += chance * level[-change:]
                after[0] += chance * level[:-change].sum()
            elif change < FULL:
                after[change:] += chance * level[: FULL - change]
        level = after
        come.append(1.0 - level.sum())
    return np.array(come)


@pytest.mark.starts
def test_false_alarms_are_rare_over_1000_steps_and_an_error_rate_is_found_with_power_90_percent() -> None:
    """The exact numbers of the module's docstring.

    Several tallies with these verdicts together have at most the false alarms of one tally with all of them: a tally
    starts at the lowest level, so its chance of no alarm in m + n verdicts is at most the product of those in m and n.
    """
    false = {size: alarm_probabilities(BOUND, MOST_VERDICTS, size)[-1] for size in (1, 4, 40)}
    assert max(false.values()) == false[1] == pytest.approx(0.00744, abs=5e-6)
    for rate, verdicts in FOUND_WITHIN.items():
        for size in (1, 4, 10, 20, 40):  # the verdicts of a tally in a step
            assert alarm_probabilities(rate, verdicts, size)[-1] >= 0.9
    assert alarm_probabilities(ALARM_RATE, 1280 - 40, 40)[-1] < 0.9


def test_the_tally_has_the_exact_probabilities() -> None:
    """Simulated with 4 verdicts per step, against the exact number; 4 standard errors."""
    rng, runs = np.random.default_rng(0), 1000
    exact = alarm_probabilities(0.02, 400, 4)[-1]
    come = 0
    for errors in rng.binomial(4, 0.02, (runs, 100)):
        tally = Tally()
        come += sum(tally.add(4, int(found)) for found in errors) > 0
        assert (tally.judged, tally.errors) == (400, errors.sum())
    assert 0.1 < exact < 0.9
    assert abs(come / runs - exact) < 4 * (exact * (1 - exact) / runs) ** 0.5


def test_an_alarm_comes_once_until_the_errors_have_stopped() -> None:
    tally = Tally()
    assert [tally.add(1, 1) for _ in range(8)] == [False] * 4 + [True] + [False] * 3
    assert not tally.add(FULL - 1, 0)
    assert not tally.add(5, 5)  # the level was not 0 since
    assert not tally.add(FULL, 0)
    assert tally.add(5, 5)
    assert tally.text("false_accepts") == f"18 false accepts in {tally.judged} canaries (0.00505 to 0.0134)"


def test_a_long_healthy_time_does_not_delay_the_alarm() -> None:
    tally = Tally()
    assert not any(tally.add(1000, 0) for _ in range(100))
    assert tally.level == 0
    assert [tally.add(1, 1) for _ in range(5)] == [False] * 4 + [True]


@pytest.mark.parametrize(("errors", "judged"), [(0, 1), (0, 300), (1, 40), (7, 1000), (30, 30)])
def test_the_interval_is_exact(errors: int, judged: int) -> None:
    """At each end the observed count, or one further away, has probability 2.5 %."""

    def at_most(most: int, rate: float) -> float:
        return sum(comb(judged, k) * rate**k * (1 - rate) ** (judged - k) for k in range(most + 1))

    low, high = interval(errors, judged)
    assert low == 0.0 if errors == 0 else 1.0 - at_most(errors - 1, low) == pytest.approx(0.025, rel=1e-6)
    assert high == 1.0 if errors == judged else at_most(errors, high) == pytest.approx(0.025, rel=1e-6)


class Words(RewardPlugin):
    """Accepts the word of the truth."""

    name, tasks = "words", ("words", "more_words")

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        return tuple(Canary({"word": str(k)}, str(k), k % 2 == 0, cls.tasks[k // 4]) for k in range(7))

    def score(self, request: RewardRequest) -> RewardResult:
        return RewardResult(float(request.response == request.truth["word"]))


def test_a_step_sends_one_canary_per_100_responses_and_each_gets_its_turn() -> None:
    registry = Registry({"words": Words}, {})
    schedule = CanarySchedule(registry, Words.tasks, 250, seed=3)
    steps = [schedule.of_step(step) for step in range(1, 401)]
    assert [len(sent) for sent in steps[:4]] == [2, 3, 2, 3]
    assert steps == [CanarySchedule(registry, Words.tasks, 250, seed=3).of_step(step) for step in range(1, 401)]
    ids = Counter(one.request["id"] for sent in steps for one in sent)
    assert sum(ids.values()) == 1000
    assert {k: round(n, -1) for k, n in ids.items()} == {
        **{f"canary-words-{k}": 120 for k in (1, 2, 3, 4)},
        **{f"canary-more_words-{k}": 170 for k in (5, 6, 7)},
    }
    assert {one.request["task"] for one in CanarySchedule(registry, ["words"], 999, 0).of_step(7)} == {"words"}
    assert [
        sum(len(CanarySchedule(registry, ["words"], n, 0).of_step(s)) for s in range(1, 101)) for n in (1, 10**6)
    ] == [
        1,
        100 * MOST_PER_STEP,
    ]


def test_a_verdict_that_the_infrastructure_failed_to_give_counts_as_neither() -> None:
    sent = SentCanary(request_of("words", "x", "canary"), right=True)

    def counts(score: float | None, seconds: float = 9.0, hangs_s: float = 0.0) -> Counter[str]:
        async def verdict(request: dict[str, object], deadline: Deadline) -> Verdict:
            await asyncio.sleep(hangs_s)
            return {"id": "x", "score": score, "correct": None, "parts": {}, "detail": "", "failure": None}

        return asyncio.run(ask(sent, verdict, seconds))

    assert counts(1.0) == {"right/words": 1, "false_rejects/words": 0}
    assert counts(0.5) == {"right/words": 1, "false_rejects/words": 1}
    assert counts(None) == {}
    assert counts(1.0, seconds=-4.9, hangs_s=60.0) == {}


def test_the_watch_after_a_resume_is_that_of_the_undisturbed_run() -> None:
    rng, watch, lines, alarms = random.Random(0), CanaryWatch(), [], []
    for step in range(200):
        errors = [rng.random() < 0.1 for _ in range(3)]
        counts = {"right/a": 3, "false_rejects/a": sum(errors), "wrong/b": 2, "false_accepts/b": 0}
        lines.append({"step": step, "kl": 0.1, **{f"canaries/{key}": float(n) for key, n in counts.items()}})
        alarms += [(step, *alarm) for alarm in watch.observe(counts)]
    assert len(alarms) >= 1
    assert {task for _, task, _ in alarms} == {"a"}
    assert "false rejects" in alarms[0][2]
    resumed = CanaryWatch.replay(lines[:100])
    again = [(at, *alarm) for at in range(100, 200) for alarm in resumed.observe(_counts(lines[at]))]
    assert again == [alarm for alarm in alarms if alarm[0] >= 100]
    assert resumed.tallies == watch.tallies


def _counts(line: dict[str, float]) -> dict[str, int]:
    return {key.removeprefix("canaries/"): int(n) for key, n in line.items() if key.startswith("canaries/")}


@pytest.mark.slow
@pytest.mark.starts
def test_the_canaries_of_all_shipped_plugins_have_their_verdicts() -> None:
    registry = discover()
    sent = [
        one for name in SHIPPED for one in requests_of(registry.plugin(name).tasks, registry.plugin(name).canaries())
    ]
    assert all(
        4 <= sum(one.right is side and one.request["task"] == n for one in sent) <= 8
        for n in SHIPPED
        for side in (True, False)
    )

    async def counts() -> Counter[str]:
        service = RewardService(pool_specs(registry, SHIPPED, len(SHIPPED)), registry)
        await service.start()
        try:
            verdicts = [await service.submit(RewardRequest.from_json(one.request)) for one in sent]
        finally:
            await service.close()
        return Counter(
            {
                one.request["id"]: one.right == (verdict["score"] == 1.0)
                for one, verdict in zip(sent, verdicts, strict=True)
            }
        )

    assert [name for name, is_as_known in asyncio.run(counts()).items() if not is_as_known] == []


CORRUPTED = '''
import random
from nemo_prorl.rewards.interface import Canary, RewardPlugin, RewardResult

class Corrupted(RewardPlugin):
    """Is right, but for a share of its verdicts at random; the same verdicts in any order of requests."""
    name, tasks = "corrupted", ("corrupted",)
    @classmethod
    def canaries(cls):
        return tuple(Canary({"word": "yes"}, word, word == "yes") for word in ("yes", "no"))
    def score(self, request):
        errs = random.Random(request.meta["number"]).random() < request.meta["rates"][request.response]
        return RewardResult(float((request.response == request.truth["word"]) != errs))
'''


@pytest.mark.starts
@pytest.mark.parametrize("rate", [pytest.param(0.01, marks=pytest.mark.slow), 0.05])
@pytest.mark.parametrize("side", ["right", "wrong"])
def test_a_verifier_that_errs_at_random_is_found(
    rate: float, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    """Ten runs each, through a real client, server and worker, with the number of verdicts computed beforehand.

    With power 0.9, seven or more of ten runs have the alarm with probability 0.987.  The verifier errs on one side
    only, and the other side must stay silent.
    """
    info = tmp_path / "site" / "corrupted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: corrupted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nemo_prorl.rewards]\ncorrupted = corrupted_plugin:Corrupted\n")
    (tmp_path / "site" / "corrupted_plugin.py").write_text(CORRUPTED)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    start_server("corrupted")
    steps = FOUND_WITHIN[rate] // 20
    schedule = CanarySchedule(discover(), ["corrupted"], 4000, seed=0)  # 40 canaries per step, 20 of each side
    rates = {"yes": rate * (side == "right"), "no": rate * (side == "wrong")}

    async def run(client: RewardClient, name: str) -> list[tuple[str, str]]:
        watch, alarms = CanaryWatch(), []
        for step in range(1, steps + 1):
            metas = ({"rates": rates, "number": f"{name} {step} {k}"} for k in range(40))
            pairs = zip(schedule.of_step(step), metas, strict=True)
            sent = [SentCanary({**one.request, "meta": meta}, one.right) for one, meta in pairs]
            counts = await asyncio.gather(*(ask(one, client.score, 60) for one in sent))
            alarms += watch.observe(total(counts))
        assert sum(tally.judged for tally in watch.tallies.values()) == 40 * steps
        return alarms

    async def main() -> list[list[tuple[str, str]]]:
        async with RewardClient(tmp_path / "endpoints", tmp_path / "token") as client:
            return await asyncio.gather(*(run(client, f"run {k}") for k in range(10)))

    runs = asyncio.run(main())
    assert sum(map(bool, runs)) >= 7
    found = {what for alarms in runs for _, what in alarms}
    assert all({"right": "false rejects", "wrong": "false accepts"}[side] in what for what in found)
