"""Sampling and judging for an evaluation: plans the missing work and does it, storing each response when it ends."""

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

_PROGRESS_EVERY_S = 10.0

Judge = Callable[[dict[str, Any]], Awaitable[Verdict]]  # reward request -> verdict


class BenchmarkWork(NamedTuple):
    """One benchmark of an evaluation with its store and its prompt records."""

    benchmark: Benchmark
    store: Store
    records: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class StoredPlace:
    """The place of one response: its store, prompt record and sample number."""

    store: Store
    record: dict[str, Any]
    sample: int


@dataclass
class Draw:
    """The responses still to sample for one prompt, and the place to store each."""

    sampling: Sampling
    record: dict[str, Any]
    places: list[StoredPlace]


@dataclass
class EvaluationPlan:
    """The responses that an evaluation still has to sample or to judge."""

    draws: list[Draw] = field(default_factory=list)
    unjudged: list[StoredPlace] = field(default_factory=list)
    num_stored: int = 0  # responses

    @property
    def to_draw(self) -> int:
        return sum(len(draw.places) for draw in self.draws)


def seed_of(run_seed: int, record: Mapping[str, Any], sample: int) -> int:
    """Return the seed of one response, which depends only on the run's seed, the prompt and the sample number."""
    return response_seed(run_seed, str(record["prompt"]), 0, sample)


def plan(parts: Sequence[BenchmarkWork], source: ResponseSource) -> EvaluationPlan:
    """List the responses without a stored sample or verdict.  Raises DataError for a prompt without room to respond."""
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
                found.num_stored += 1
                verdict = store.verdicts.get((record["id"], sample))
                if verdict is None or verdict["score"] is None:
                    found.unjudged.append(place)
            if draw.places:
                found.draws.append(draw)
    return found


class Work:
    """Samples and judges the responses of a plan.

    A response is stored once it has ended, and a verdict once it is known; a kill loses only unfinished work.
    """

    def __init__(self, source: ResponseSource, judge: Judge, run_seed: int) -> None:
        self._source, self._judge, self._run_seed = source, judge, run_seed
        self.drawn = self.tokens = self.judged = 0
        self.seconds = 0.0

    async def run(self, todo: EvaluationPlan) -> None:
        """Sample and judge what `todo` lists.  Raises the first error; responses that ended before it are stored."""
        began = time.monotonic()
        progress = asyncio.ensure_future(self._log_progress(todo, began))
        room = _Room(self._source.max_concurrent)
        try:
            async with asyncio.TaskGroup() as group:
                for place in todo.unjudged:
                    group.create_task(self._judge_one(place))
                for draw in todo.draws:
                    group.create_task(self._draw(draw, room, group))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            progress.cancel()
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

    async def _log_progress(self, todo: EvaluationPlan, began: float) -> None:
        longest = max((draw.sampling.max_response or draw.sampling.context for draw in todo.draws), default=0)
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            seconds = time.monotonic() - began
            tokens = max(self.tokens, self._source.generated_tokens)
            # Short responses end first, so all tokens, over the finished responses, estimate the mean length.
            length = min(longest, tokens / max(1, self.drawn))
            left = max(0.0, todo.to_draw * length - tokens) * seconds / max(1, tokens)
            _log.info(
                "sampled %d of %d responses, judged %d; %d tokens, %.0f tokens/s, about %.0f s left",
                *(self.drawn, todo.to_draw, self.judged, tokens, tokens / seconds, left),
            )


class _Room:
    """A limit on concurrent responses over all prompts.  Prompts are admitted in the order of their requests."""

    def __init__(self, most: int) -> None:
        self._most, self._inside = most, 0
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def entered(self, responses: int) -> AsyncIterator[Callable[[], None]]:
        """Context manager that waits until this many more responses fit under the limit, or no response is running.

        Yields a function.  Call it whenever a response has ended, to make room for another response.
        """
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
