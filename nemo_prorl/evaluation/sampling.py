"""The work of an evaluation: what is still to draw and to judge, and doing it, each response stored as it comes.

A response is drawn once for equal (model, prompt, sampling, seed), also where two benchmarks share a prompt, and judged
once for equal (prompt record, text).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_prorl.evaluation.catalogue import Benchmark, Sampling
from nemo_prorl.evaluation.formats import EvaluationSample
from nemo_prorl.evaluation.sources import Reply, ResponseSource
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rollout.endpoints import response_seed

_log = logging.getLogger(__name__)

_TELL_EVERY_S = 10.0

Judge = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]  # reward request -> verdict; never raises
_Answer = tuple[int, str, str, bool]  # which store, prompt id, response, whether it ended


@dataclass(frozen=True)
class StoredPlace:
    """Where a response belongs."""

    store: Store
    record: dict[str, Any]
    sample: int


@dataclass
class Draw:
    """Responses to draw for one prompt: seeds, and for each all places that wait for it."""

    record: dict[str, Any]
    sampling: Sampling
    identity: str
    seeds: list[int] = field(default_factory=list)
    places: list[list[StoredPlace]] = field(default_factory=list)


@dataclass
class EvaluationPlan:
    """What an evaluation still has to do."""

    draws: list[Draw]
    unjudged: list[StoredPlace]
    there: int  # responses that were there, or came from an equal one

    @property
    def to_draw(self) -> int:
        return sum(len(draw.seeds) for draw in self.draws)


def seed_of(run_seed: int, record: Mapping[str, Any], sample: int) -> int:
    """Of one response: by prompt and number, so the same in every benchmark, for every model, in every order."""
    return response_seed(run_seed, str(record["prompt"]), 0, sample)


def plan(
    benchmarks: Sequence[tuple[Benchmark, Store, Sequence[dict[str, Any]]]], source: ResponseSource, run_seed: int
) -> EvaluationPlan:
    """Compares what is asked for with what is stored; copies what an equal piece of work has made already."""
    made = {(line["work"], line["seed"]): line for _, store, _ in benchmarks for line in store.lines.values()}
    draws: dict[str, Draw] = {}
    waiting: dict[tuple[str, int], list[StoredPlace]] = {}
    found = EvaluationPlan([], [], 0)
    for benchmark, store, records in benchmarks:
        for record in records:
            identity = source.identity(record, benchmark.sampling)
            for sample in range(benchmark.sampling.samples):
                key, place = (record["id"], sample), StoredPlace(store, record, sample)
                work = identity, seed_of(run_seed, record, sample)
                line = store.lines.get(key)
                if line is None and work in made:
                    store.add({**made[work], "id": record["id"], "sample": sample})
                if line is not None or work in made:
                    found.there += 1
                    if (store.verdicts.get(key) or {"score": None})["score"] is None:
                        found.unjudged.append(place)
                elif work in waiting:
                    waiting[work].append(place)
                else:
                    waiting[work] = [place]
                    draw = draws.setdefault(identity, Draw(record, benchmark.sampling, identity))
                    draw.seeds.append(work[1])
                    draw.places.append(waiting[work])
    found.draws = list(draws.values())
    return found


class Work:
    """Does a plan.  Everything is stored the moment it is known, so a kill loses what was under way and no more."""

    def __init__(self, source: ResponseSource, judge: Judge) -> None:
        self._source, self._judge = source, judge
        self._judging: set[asyncio.Task[None]] = set()
        self._verdicts: dict[_Answer, dict[str, Any]] = {}
        self._unjudged: dict[_Answer, list[StoredPlace]] = {}  # by what is being judged
        self.drawn = self.tokens = self.judged = 0
        self.seconds = 0.0
        self._failed: BaseException | None = None

    async def do(self, todo: EvaluationPlan) -> None:
        """Raises what the source raises; what came before is stored."""
        began = time.monotonic()
        telling = asyncio.ensure_future(self._tell(todo, began))
        room = _Room(self._source.at_a_time)
        drawing = [asyncio.ensure_future(self._draw(draw, room)) for draw in todo.draws]
        try:
            for place in todo.unjudged:
                self._start_judging(place)
            await asyncio.gather(*drawing)
            while self._judging:
                await asyncio.wait(self._judging)
            self._raise_failed()
        finally:
            telling.cancel()
            under_way: list[asyncio.Future[Any]] = [*drawing, *self._judging]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            self.seconds = time.monotonic() - began

    async def _draw(self, draw: Draw, room: "_Room") -> None:
        left = len(draw.seeds)

        def arrived(index: int, reply: Reply) -> None:
            nonlocal left
            left -= 1
            room.leave(1)
            self.drawn += 1
            self.tokens += reply.tokens or 0
            for place in draw.places[index]:
                line: EvaluationSample = {
                    "id": place.record["id"],
                    "sample": place.sample,
                    "seed": draw.seeds[index],
                    "work": draw.identity,
                    "response": reply.text,
                    "finished": reply.finished,
                    "tokens": reply.tokens,
                }
                place.store.add(line)
                self._start_judging(place)

        await room.enter(left)
        try:
            self._raise_failed()
            await self._source.generate(draw.record, draw.sampling, draw.seeds, arrived)
        finally:
            room.leave(left)

    def _raise_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _start_judging(self, place: StoredPlace) -> None:
        """An equal response to the same record takes over what the first one got."""
        line = place.store.lines[place.record["id"], place.sample]
        key: _Answer = (id(place.store), place.record["id"], line["response"], line["finished"])
        if key in self._verdicts:
            self._keep(place, self._verdicts[key])
        elif key in self._unjudged:
            self._unjudged[key].append(place)
        else:
            self._unjudged[key] = [place]
            task = asyncio.ensure_future(self._judge_one(key, place.record))
            self._judging.add(task)
            task.add_done_callback(self._judged_one)

    def _judged_one(self, task: "asyncio.Task[None]") -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failed is None:
            self._failed = error  # such as a full disk

    async def _judge_one(self, key: "_Answer", record: dict[str, Any]) -> None:
        verdict = await self._judge({**record, "response": key[2], "finished": key[3]})
        self._verdicts[key] = verdict
        for place in self._unjudged.pop(key):
            self._keep(place, verdict)

    def _keep(self, place: StoredPlace, verdict: dict[str, Any]) -> None:
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
    """For so many responses at a time, whichever prompt they belong to; prompts enter in their order."""

    def __init__(self, most: int) -> None:
        self._most, self._inside = most, 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    async def enter(self, responses: int) -> None:
        """An empty room takes any number."""
        async with self._turn:
            while self._inside and self._inside + responses > self._most:
                self._left.clear()
                await self._left.wait()
            self._inside += responses

    def leave(self, responses: int) -> None:
        self._inside -= responses
        self._left.set()
