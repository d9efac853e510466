"""The work of an evaluation: what is still to draw and to judge, and doing it.  Each response is stored as it comes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nemo_prorl.evaluation.catalogue import Benchmark, Sampling
from nemo_prorl.evaluation.sources import Reply, ResponseSource
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rollout.endpoints import response_seed

_log = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0

Judge = Callable[[dict[str, Any]], Awaitable[Verdict]]  # reward request -> verdict; never raises


class BenchmarkWork(NamedTuple):
    """One benchmark of an evaluation, what is stored of it, and its prompt records."""

    benchmark: Benchmark
    store: Store
    records: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class StoredPlace:
    """Where a response belongs."""

    store: Store
    record: dict[str, Any]
    sample: int


@dataclass
class Draw:
    """Responses to draw for one prompt."""

    sampling: Sampling
    record: dict[str, Any]
    places: list[StoredPlace]


@dataclass
class EvaluationPlan:
    """What an evaluation still has to do."""

    draws: list[Draw] = field(default_factory=list)
    unjudged: list[StoredPlace] = field(default_factory=list)
    there: int = 0  # stored responses

    @property
    def to_draw(self) -> int:
        return sum(len(draw.places) for draw in self.draws)


def seed_of(run_seed: int, record: Mapping[str, Any], sample: int) -> int:
    """Return the seed of one response: the same in every benchmark, for every model, in every order."""
    return response_seed(run_seed, str(record["prompt"]), 0, sample)


def plan(parts: Sequence[BenchmarkWork], source: ResponseSource) -> EvaluationPlan:
    """Compare what is asked for with what is stored.  Raises DataError for a prompt that the source cannot answer."""
    found = EvaluationPlan()
    for benchmark, store, records in parts:
        for record in records:
            source.check(record, benchmark.sampling)
            draw = Draw(benchmark.sampling, record, [])
            for sample in range(benchmark.sampling.samples):
                place = StoredPlace(store, record, sample)
                if (record["id"], sample) not in store.lines:
                    draw.places.append(place)
                    continue
                found.there += 1
                verdict = store.verdicts.get((record["id"], sample))
                if verdict is None or verdict["score"] is None:
                    found.unjudged.append(place)
            if draw.places:
                found.draws.append(draw)
    return found


class Work:
    """Does a plan.  Everything is stored the moment it is known: a kill loses only what was under way."""

    def __init__(self, source: ResponseSource, judge: Judge, run_seed: int) -> None:
        self._source, self._judge, self._run_seed = source, judge, run_seed
        self.drawn = self.tokens = self.judged = 0
        self.seconds = 0.0

    async def do(self, todo: EvaluationPlan) -> None:
        """Raises the first error of the source or of the store, such as a full disk; what came before is stored."""
        began = time.monotonic()
        telling = asyncio.ensure_future(self._tell(todo, began))
        room = _Room(self._source.at_a_time)
        try:
            async with asyncio.TaskGroup() as group:
                for place in todo.unjudged:
                    group.create_task(self._judge_one(place))
                for draw in todo.draws:
                    group.create_task(self._draw(draw, room, group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            telling.cancel()
            self.seconds = time.monotonic() - began

    async def _draw(self, draw: Draw, room: "_Room", group: asyncio.TaskGroup) -> None:
        seeds = [seed_of(self._run_seed, draw.record, place.sample) for place in draw.places]

        async with room.entered(len(seeds)) as leave:

            def arrived(index: int, reply: Reply) -> None:
                leave()
                self.drawn += 1
                self.tokens += reply.tokens or 0
                place = draw.places[index]
                place.store.add(
                    {
                        "id": draw.record["id"],
                        "sample": place.sample,
                        "seed": seeds[index],
                        "response": reply.text,
                        "finished": reply.finished,
                        "tokens": reply.tokens,
                    }
                )
                group.create_task(self._judge_one(place))

            await self._source.generate(draw.record, draw.sampling, seeds, arrived)

    async def _judge_one(self, place: StoredPlace) -> None:
        line = place.store.lines[place.record["id"], place.sample]
        verdict = await self._judge({**place.record, "response": line["response"], "finished": line["finished"]})
        place.store.judge(place.sample, verdict)
        self.judged += 1

    async def _tell(self, todo: EvaluationPlan, began: float) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            seconds = time.monotonic() - began
            left = (todo.to_draw - self.drawn) * seconds / max(1, self.drawn)
            _log.info(
                "%d of %d responses, %d judged, %.0f tokens/s, about %.0f s left",
                *(self.drawn, todo.to_draw, self.judged, self.tokens / seconds, left),
            )


class _Room:
    """Room for this many responses at a time, whichever prompt they belong to; prompts enter in their order."""

    def __init__(self, most: int) -> None:
        self._most, self._inside = most, 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def entered(self, responses: int) -> AsyncIterator[Callable[[], None]]:
        """Wait for room; an empty room takes any number.  Yields what is called when one of the responses ends."""
        async with self._turn:
            while self._inside and self._inside + responses > self._most:
                self._left.clear()
                await self._left.wait()
            self._inside += responses
        left = responses

        def leave(number: int = 1) -> None:
            nonlocal left
            left -= number
            self._inside -= number
            self._left.set()

        try:
            yield leave
        finally:
            leave(left)
