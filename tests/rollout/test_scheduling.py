"""Which engine gets what, by hand and from the pool; and the simulation, which fails where the decisions do."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import simulate

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.scheduling import is_fresh, spread
from tests.rollout.test_client import SAMPLING, Fake, run, tokens

SIZE = simulate.Size(engines=16, prompts=32, samples=8, cap=16384)


@pytest.mark.parametrize(
    ("in_flight", "responses", "most", "part", "shares"),
    [
        ([0, 0, 0], 7, 100, 1, [3, 2, 2]),
        ([5, 0, 2], 12, 100, 1, [2, 6, 4]),
        ([0, 0, 0], 16, 100, 4, [8, 4, 4]),
        ([9, 0, 2], 6, 100, 4, [0, 4, 2]),
        ([7, 8, 9], 4, 8, 4, [1, 0, 0]),  # there is room for one
        ([8, 8], 4, 8, 4, [0, 0]),
        ([0], 20, 8, 4, [8]),
        ([], 4, 8, 4, []),
    ],
)
def test_responses_go_to_the_least_loaded(
    in_flight: list[int], responses: int, most: int, part: int, shares: list[int]
) -> None:
    assert spread(in_flight, responses, most, part) == shares


def test_no_engine_is_asked_for_more_than_it_has_room_for(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, index).start() for index in range(2)]
        for fake in fakes:
            fake.hold = asyncio.Event()
        pool = EnginePool(folder, "t", engines=2, max_in_flight=8)
        requests = [
            asyncio.ensure_future(pool.generate([5], range(k, k + 4), SAMPLING, Deadline(30, "a group")))
            for k in range(10)
        ]
        while sum(fake.in_flight for fake in fakes) < 16:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert [fake.in_flight for fake in fakes] == [8, 8]  # least loaded first, then both full
        for fake in fakes:
            assert fake.hold is not None
            fake.hold.set()
        assert [tokens(await request)[0][0] for request in requests] == list(range(10))
        assert max(fake.peak for fake in fakes) <= 8
        got = await pool.generate([5], range(20), SAMPLING, Deadline(30, "more than there is room for"))
        assert len(got) == 20
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_a_request_begins_as_soon_as_another_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rollout.engines._POLL_S", 1000.0)

    async def work(folder: Path) -> None:
        fake = await Fake(folder).start()
        pool = EnginePool(folder, "t", max_in_flight=1)
        assert pool.generated_tokens == 0  # none is reported yet
        requests = (pool.generate([5], [seed], SAMPLING, Deadline(30, "a group")) for seed in range(3))
        assert [tokens(got) for got in await asyncio.gather(*requests)] == [[[seed, 2]] for seed in range(3)]
        assert (fake.peak, pool.generated_tokens) == (1, 0)
        await pool.close()
        await fake.stop()

    run(work, tmp_path)


def test_surplus_is_fresh_for_as_many_steps_as_it_may_be_old() -> None:
    assert [is_fresh(version, 5, 1) for version in (2, 3, 4)] == [False, True, True]


def means(scheduler: simulate.Scheduler) -> dict[str, float]:
    outcomes = simulate.simulate(scheduler, SIZE, steps=6, seed=3)
    return {key: sum(float(getattr(o, key)) for o in outcomes) / 6 for key in ("rollout_s", "idle_share", "late")}


def test_the_decisions_of_a_run_beat_those_they_are_compared_with() -> None:
    ours = means(simulate.OURS)
    plain = means(simulate.Scheduler("", simulate.whole_groups, simulate.NO_MARGIN))
    whole = means(simulate.Scheduler("", simulate.whole_groups))
    assert ours == means(simulate.OURS)  # the same seed, the same numbers
    assert ours["late"] < 0.25 * plain["late"]  # the margin saves second waits
    assert ours["rollout_s"] < 0.8 * plain["rollout_s"]
    assert ours["idle_share"] < 0.8 * whole["idle_share"]  # spread responses leave engines less to wait for
    assert ours["rollout_s"] < whole["rollout_s"]


def test_which_groups_are_trained_does_not_depend_on_engines() -> None:
    """Other routes, other times: the same draws, kept and carried groups."""
    routes = (simulate.fixed_split, simulate.whole_groups, simulate.spread_groups)
    told = [
        [
            (o.drawn, o.carried, o.groups, o.trained_tokens)
            for o in simulate.simulate(simulate.Scheduler("", route), SIZE, steps=6, seed=4, skip=0)
        ]
        for route in routes
    ]
    assert told[0] == told[1] == told[2]
    assert all(groups == SIZE.prompts for _, _, groups, _ in told[0])


def test_an_engine_of_the_simulation_takes_the_time_of_its_formula() -> None:
    engine = simulate.Engine()
    engine.add([(100, 0), (200, 1)])
    first = 0.003 + 100 * (4e-3 + 2 * 1.2e-5) + (100 * 600 + 2 * 100 * 100 / 2) * simulate.PER_CACHED_TOKEN_S
    assert engine.next_end() == pytest.approx(first)
    engine.advance(first / 3)  # looking at it in between changes nothing
    assert engine.next_end() == pytest.approx(first)
    engine.advance(first)
    assert engine.pop({0: 100, 1: 200}) == 0
    assert engine.next_end() - first == pytest.approx(
        100 * (4e-3 + 1.2e-5) + (100 * 400 + 100 * 100 / 2) * simulate.PER_CACHED_TOKEN_S
    )
