"""Sampling and judging for an evaluation: plans the missing work and does it, storing each response when it ends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from nemo_prorl.deadlines import Deadline
from nemo_prorl.evaluation.catalogue import Benchmark, Sampling
from nemo_prorl.evaluation.services import Services
from nemo_prorl.evaluation.sources import LocalEngines, Reply, ResponseSource
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rollout.endpoints import response_seed
from nemo_prorl.service import read_token

_log = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0

Judge = Callable[[dict[str, Any]], Awaitable[Verdict]]  # reward request -> verdict


class BenchmarkWork(NamedTuple):
    """One benchmark of an evaluation with its store and its prompt records."""

    benchmark: Benchmark
    store: Store
    records: Sequence[dict[str, Any]]


@dataclass
class PromptWork:
    """The samples of one prompt that are still to draw, and those that are stored without a verdict."""

    store: Store
    sampling: Sampling
    record: dict[str, Any]
    to_draw: list[int] = field(default_factory=list)
    to_judge: list[int] = field(default_factory=list)


def seed_of(run_seed: int, record: Mapping[str, Any], sample: int) -> int:
    """Return the seed of one response, which depends only on the run's seed, the prompt and the sample number."""
    return response_seed(run_seed, str(record["prompt"]), 0, sample)


def missing_work(parts: Sequence[BenchmarkWork], source: ResponseSource | None) -> list[PromptWork]:
    """Return each prompt with its missing samples and verdicts.  Raises DataError for a prompt without room to respond.

    A verdict that the infrastructure failed to give counts as missing.  Without a source, no sample does.
    """
    prompts = []
    for benchmark, store, records in parts:
        rooms: list[int | None] = []
        for record in records:
            if source is not None:
                rooms.append(source.check(record, benchmark.sampling))
            prompt = PromptWork(store, benchmark.sampling, record)
            for sample in range(benchmark.sampling.samples):
                verdict = store.verdicts.get((record["id"], sample))
                if (record["id"], sample) not in store.lines:
                    prompt.to_draw += [] if source is None else [sample]
                elif verdict is None or verdict["score"] is None:
                    prompt.to_judge.append(sample)
            prompts.append(prompt)
        _warn_of_full_contexts(benchmark, rooms)
    return prompts


def _warn_of_full_contexts(benchmark: Benchmark, rooms: Sequence[int | None]) -> None:
    """Warn if prompts take so much of the context that responses end before their limit."""
    sampling = benchmark.sampling
    wanted = min(sampling.max_response or sampling.context, sampling.context // 2)
    if short := [room for room in rooms if room is not None and room < wanted]:
        _log.warning(
            "%s: %d of %d prompts leave fewer than %d tokens to a response, the longest %d, with --context %d; longer"
            " responses are cut off and count as wrong. Fix: a larger --context, at most the model's, or shorter"
            " prompts (prorl data prepare --tokenizer MODEL --max-prompt-tokens N)",
            *(benchmark.name, len(short), len(rooms), wanted, min(short), sampling.context),
        )


async def sample_and_judge(
    cfg: DictConfig,
    out: Path,
    parts: Sequence[BenchmarkWork],
    source: ResponseSource | None,
    seed: int,
    num_engines: int,
) -> "Work | None":
    """Sample and judge the responses that the stores lack; return the finished work, or None if they lack nothing.

    Args:
        cfg: settings of the services.
        out: folder for logs and endpoint files.
        source: is closed at the end; None: judge stored responses only.
        num_engines: engines to start if anything has to be sampled; 0 for a model on a server.
    """
    try:
        prompts = missing_work(parts, source)
        to_draw, to_judge = sum(len(one.to_draw) for one in prompts), sum(len(one.to_judge) for one in prompts)
        stored = sum(len(part.store.lines) for part in parts)
        counted = sum(len(part.records) * part.benchmark.sampling.samples for part in parts)
        surplus = stored + to_draw - counted
        rest = f" ({surplus} of them do not count: --samples is smaller now)" if surplus > 0 else ""
        _log.info("%d responses are stored%s; %d to sample, %d to judge", stored, rest, to_draw, to_judge)
        if not to_draw and not to_judge:
            return None
        tasks = sorted({record["task"] for part in parts for record in part.records})
        engines = num_engines if to_draw else 0
        async with Services(cfg, out, tasks, engines) as services, services.reward_client() as rewards:
            if isinstance(source, LocalEngines):
                source.connect(services.endpoints, read_token(services.token_file), engines)

            async def judge(request: dict[str, Any]) -> Verdict:
                verdict = f"the verdict on {request['id']!r} (trainer.deadlines.reward_s)"
                return await rewards.score(request, Deadline(cfg.trainer.deadlines.reward_s, verdict))

            work = Work(source, judge, seed)

            async def run() -> None:
                await services.ready()
                await work.run(prompts)

            await services.watching(run())
            return work
    finally:
        if source is not None:
            await source.close()


class Work:
    """Samples and judges the responses that prompts lack.

    A response is stored once it has ended, and a verdict once it is known; a kill loses only unfinished work.
    """

    def __init__(self, source: ResponseSource | None, judge: Judge, run_seed: int) -> None:
        self.source, self._judge, self._run_seed = source, judge, run_seed
        self._room = asyncio.Semaphore(0 if source is None else source.max_concurrent)
        self._turn = asyncio.Lock()
        self.drawn = self.tokens = self.judged = 0
        self.sampling_s = 0.0  # until the last response ended
        self.seconds = 0.0

    async def run(self, prompts: Sequence[PromptWork]) -> None:
        """Sample and judge what the prompts lack.  Raises the first error; responses that ended before are stored."""
        began = time.monotonic()
        progress = asyncio.ensure_future(self._log_progress(prompts, began))
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    for sample in prompt.to_judge:
                        group.create_task(self._judge_one(prompt, sample))
                for prompt in prompts:
                    if prompt.to_draw:
                        group.create_task(self._draw(prompt, group, began))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            progress.cancel()
            self.seconds = time.monotonic() - began

    async def _draw(self, prompt: PromptWork, group: asyncio.TaskGroup, began: float) -> None:
        seeds = [seed_of(self._run_seed, prompt.record, sample) for sample in prompt.to_draw]
        assert self.source is not None
        open_responses = len(seeds)
        held = min(open_responses, self.source.max_concurrent)
        async with self._turn:  # prompts begin in order, each once there is room for all its responses
            for _ in range(held):
                await self._room.acquire()

        def arrived(index: int, reply: Reply) -> None:
            nonlocal open_responses, held
            open_responses -= 1
            if open_responses < held:
                held -= 1
                self._room.release()
            self.drawn += 1
            self.tokens += reply.tokens or 0
            self.sampling_s = time.monotonic() - began
            sample = prompt.to_draw[index]
            prompt.store.add(
                {
                    "id": prompt.record["id"],
                    "sample": sample,
                    "seed": seeds[index],
                    "response": reply.text,
                    "finished": reply.finished,
                    "tokens": reply.tokens,
                }
            )
            group.create_task(self._judge_one(prompt, sample))

        await self.source.generate(prompt.record, prompt.sampling, seeds, arrived)

    async def _judge_one(self, prompt: PromptWork, sample: int) -> None:
        line = prompt.store.lines[prompt.record["id"], sample]
        verdict = await self._judge({**prompt.record, "response": line["response"], "finished": line["finished"]})
        prompt.store.judge(sample, verdict)
        self.judged += 1

    async def _log_progress(self, prompts: Sequence[PromptWork], began: float) -> None:
        to_draw = sum(len(prompt.to_draw) for prompt in prompts)
        longest = max((one.sampling.max_response or one.sampling.context for one in prompts if one.to_draw), default=0)
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            seconds = time.monotonic() - began
            tokens = max(self.tokens, 0 if self.source is None else self.source.generated_tokens)
            # Short responses end first, so all tokens, over the finished responses, estimate the mean length.
            length = min(longest, tokens / max(1, self.drawn))
            left = max(0.0, to_draw * length - tokens) * seconds / max(1, tokens)
            _log.info(
                "sampled %d of %d responses, judged %d; %d tokens, %.0f tokens/s, about %.0f s left",
                *(self.drawn, to_draw, self.judged, tokens, tokens / seconds, left),
            )
