"""Prompts, engines and rewards without a model or a server, for tests of the collector."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from nemo_prorl.algorithms.dynamic_sampling import KeepRates
from nemo_prorl.config import Config, DeadlinesConfig, DynamicSamplingConfig, GRPOConfig, RewardsConfig, TrainerConfig
from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.interface import RewardResult, Verdict, failed_verdict, verdict_of
from nemo_prorl.rollout.collector import Collector
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import CollectedBatch, PromptDraw
from nemo_prorl.rollout.open_responses import OpenResponses

_LOGP = -11184811 / 2**25  # about -1 / 3; as from an engine, a float32


def config(max_infrastructure_failures: int = 8, reward_s: float = 30.0, **grpo: Any) -> Config:
    """A configuration of the collector; `grpo`: keys of `trainer.grpo` that differ from these."""
    sampling = DynamicSamplingConfig(max_draw_factor=5.0)
    few: dict[str, Any] = {"prompts_per_step": 6, "samples_per_prompt": 4, "context_tokens": 64}
    trainer = TrainerConfig(
        grpo=GRPOConfig(**{**few, "dynamic_sampling": sampling, **grpo}),
        deadlines=DeadlinesConfig(rollout_s=60, reward_s=reward_s),
    )
    rewards = RewardsConfig(max_infrastructure_failures=max_infrastructure_failures)
    return Config(seed=1, trainer=trainer, rewards=rewards)


class Numbered:
    """Prompts p0, p1, ... of two tasks."""

    def __init__(self, start: int = 0) -> None:
        self.drawn = start

    def next(self) -> tuple[dict[str, Any], int]:
        k, self.drawn = self.drawn, self.drawn + 1
        return {"id": f"p{k}", "task": "ab"[k % 2], "prompt": "?", "truth": {"k": k}}, k // 100

    def position(self) -> int:
        return self.drawn

    def return_to(self, position: int) -> None:
        self.drawn = position


class Plain:
    """Renders a prompt of 8 tokens that depend on its number, and a response as its token ids."""

    eos_id = 2

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        return [3 + (5 * record["truth"]["k"] + j) % 500 for j in range(8)]

    def judged_text(self, prompt_ids: list[int], ids: list[int]) -> str:
        return " ".join(map(str, ids))


def expecting(keep_rate: float) -> KeepRates:
    """Return keep rates that verdicts do not change: below 1, more groups are drawn than needed where all are kept."""
    rates = KeepRates()
    rates.prior, rates.strength = keep_rate + 1e-9, 1e12
    return rates


def drawn(k: int) -> PromptDraw:
    """Draw the prompt pK."""
    record, visit = Numbered(k).next()
    return PromptDraw(record, Plain().prompt_ids(record), visit)


def collector_of(
    engines: Any,
    rewards: Any,
    prompts: Any = None,
    cfg: Config | None = None,
    keep_rate: float | None = None,
    canaries: Any = None,
    second: Any = None,
) -> Collector:
    """Return a collector of these stand-ins."""
    drawn_from: Any = prompts or Numbered()
    plain: Any = Plain()
    collector = Collector(cfg or config(), engines, rewards, drawn_from, plain, canaries, second)
    if keep_rate is not None:
        collector.keep_rates = expecting(keep_rate)
    return collector


class EvenIsRight:
    """Scores 1 for an even first token: a real function of the response, judged after a random delay."""

    def __init__(self, seed: int = 0, delay: float = 0.0) -> None:
        self.random, self.delay = random.Random(seed), delay
        self.requests: list[dict[str, Any]] = []
        self.closed = False

    async def close(self) -> None:
        self.closed = True

    def verdict(self, request: dict[str, Any], position: int) -> float | None:
        """`position`: how many responses to this prompt came before."""
        return float(int(request["response"].split()[0]) % 2 == 0)

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        position = sum(earlier["id"] == request["id"] for earlier in self.requests)
        self.requests.append(request)
        await asyncio.sleep(self.random.random() * self.delay)
        return verdict_on(request["id"], self.verdict(request, position))


def verdict_on(request_id: str, score: float | None) -> Verdict:
    """Return a verdict with this score; None: the infrastructure failed."""
    if score is None:
        return failed_verdict(request_id, "infrastructure", "the scorer broke")
    return verdict_of(request_id, RewardResult(score))


class Simulated:
    """Engines whose tokens follow from the seeds, and whose speed is random, or given for each prompt."""

    def __init__(self, seed: int = 0, delay: float = 0.0, seconds: Callable[[int], float] | None = None) -> None:
        self.random, self.delay, self.seconds = random.Random(seed), delay, seconds
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.closed = False
        self.open_responses = OpenResponses(1)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        deadline: Deadline,
        on_response: Callable[[Response], None] | None = None,
        version: int | None = None,
    ) -> list[Response]:
        self.asked.append((list(prompt_ids), sampling))
        prompt = len(self.asked) - 1

        async def one(index: int, seed: int) -> Response:
            await asyncio.sleep(self.seconds(prompt) if self.seconds else self.random.random() * self.delay)
            rng = random.Random(seed)
            ids = [rng.randrange(512) for _ in range(rng.randint(1, 5))]
            response = Response(index, ids, [_LOGP] * len(ids), rng.choice(["stop", "length"]), version or 0)
            if on_response is not None:
                on_response(response)
            return response

        return list(await asyncio.gather(*(one(i, s) for i, s in enumerate(seeds))))

    async def publish(self, path: str, version: int, deadline: Deadline) -> None:
        return None

    async def announce(self, path: str, version: int) -> None:
        return None

    wake_failures: dict[str, str] = {}  # noqa: RUF012
    unread: dict[str, list[str]] = {}  # noqa: RUF012

    async def sleep(self, level: int, deadline: Deadline) -> int:
        return 0

    async def close(self) -> None:
        self.closed = True


def summary(batch: CollectedBatch) -> dict[str, Any]:
    """All of a batch but the clock and the engines' load, which depend on the machine."""
    apart = ("groups", "tasks", "load", "kv_cache_peak")
    counts = {k: v for k, v in vars(batch).items() if k not in apart and not k.endswith("_s")}
    return {
        **counts,
        "tasks": {k: vars(v) for k, v in batch.tasks.items()},
        "groups": [asdict(group) for group in batch.groups],
    }


def state_of(collector: Collector) -> dict[str, Any]:
    """Return the state as a checkpoint has it: JSON values, and the bytes of the groups."""
    return {**json.loads(json.dumps(collector.state_dict())), "groups": encode(collector.groups())}


def load_state(collector: Collector, state: Any) -> None:
    collector.load_state_dict(state, {group.draw_index: group for group in decode(state["groups"])})


def collected(
    engines: Any,
    rewards: Any,
    cfg: Config | None = None,
    steps: int = 1,
    state: Any = None,
    start: int = 0,
    keep_rate: float | None = None,
    canaries: Any = None,
    second: Any = None,
) -> tuple[list[CollectedBatch], dict[str, Any], int]:
    """Batches of some steps, the state after them, and how many prompts were drawn."""
    prompts = Numbered(start)
    collector = collector_of(engines, rewards, prompts, cfg, keep_rate, canaries, second)
    if state is not None:
        load_state(collector, state)
    first = 1 if state is None else state["next"]
    try:
        batches = [collector.take(step, step - 1) for step in range(first, first + steps)]
        after = {**state_of(collector), "next": first + steps}
    finally:
        collector.close()
    return batches, after, prompts.drawn
