"""The collector: fills a step's batch with groups of judged responses (paper sec. 3.3).  Rank 0 has it.

    prompt --draw--> GENERATING --its responses end--> JUDGING --its verdicts are there--> JUDGED
                                                                                              |
             decided in the order in which they were drawn, as long as the batch has room     |
                                                                                              v
    no signal: DROPPED, perhaps another is drawn  <--  decide  -->  signal: KEPT, in the batch
                                                          |
                                 the batch is full: SURPLUS, decided first in the next step; not decided then if it is
                                     TOO OLD (dynamic_sampling.max_staleness) or the run was ROLLED BACK (`drop`)

Each response goes to the reward server the moment it ends.  What is drawn and what is trained on depend on the verdicts
in draw order and never on timing, so short responses are not favoured.  Which groups carry a signal, and when another
prompt is drawn, is decided by `algorithms.dynamic_sampling`.

Suffixes: G groups, N responses of a group.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from nemo_prorl.algorithms.dynamic_sampling import DynamicSampler, KeepRates, carries_signal
from nemo_prorl.config import Config
from nemo_prorl.data.blend import Blend
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import RewardFailure, RolloutAbandoned
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rollout.background import BackgroundLoop
from nemo_prorl.rollout.endpoints import Response, SamplingParams, response_seed
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.groups import CollectedBatch, Group, PromptDraw, TaskTally
from nemo_prorl.rollout.scheduling import is_fresh
from nemo_prorl.schema import Amount, Constraint, Count

_log = logging.getLogger(__name__)

_GRACE_S = 5.0  # extra seconds: a reward client returns by its deadline, if need be with an infrastructure failure


@dataclass
class _Before:
    """State of the collector before a collection, restored when the collection is abandoned."""

    position: list[tuple[int, int]]  # position in the blend
    surplus: list[Group]
    draws: int
    keep_rates: dict[str, Any]


class CollectorState(TypedDict):
    """Fields of the collector in a checkpoint."""

    surplus: list[dict[str, Any]]
    """groups left for the next step"""
    draws: Count
    keep_rates: dict[str, Annotated[list[Amount], Constraint(minItems=2, maxItems=2)]]
    """by task: groups kept, groups decided"""
    waiting: NotRequired[dict[str, Any] | None]
    """batch of the next step, if collected ahead"""


class Collector:
    """Collects batches of judged groups on a background thread; its methods wait for the result.

    All methods raise the errors of that thread: DeadlineExceeded, EngineRefused, RewardFailure, DataError.
    """

    def __init__(
        self,
        cfg: Config,
        engines: EnginePool,
        rewards: RewardClient,
        blend: Blend,
        renderer: PromptRenderer,
    ) -> None:
        self.cfg, self.keep_rates, self.renderer = cfg, KeepRates(), renderer
        self._engines, self._rewards, self._blend = engines, rewards, blend
        self._surplus: list[Group] = []
        self._draws = 0
        self._failures_in_a_row = 0
        self._clock = WaitClock()
        self._background = BackgroundLoop("rollouts")

    # --- a step's batch --------------------------------------------------------------------------------------------

    def take(self, step: int, version: int) -> CollectedBatch:
        """Return the groups to train on in this step, of these weights or from an earlier step's surplus.

        Returns when every request has ended, so that nothing is in flight between steps.

        Raises:
            RolloutAbandoned: `abandon` was called; the collector is in the state from before this call.
        """
        begun = self._begin(step, version)
        return self._end(begun)

    def _begin(self, step: int, version: int) -> "tuple[_Before, Future[CollectedBatch]]":
        before = _Before(self._blend.position(), self._surplus, self._draws, self.keep_rates.state_dict())
        self._clock = WaitClock()
        self._engines.load.begin()
        return before, self._background.start(self._collect(step, version))

    def _end(self, begun: "tuple[_Before, Future[CollectedBatch]]") -> CollectedBatch:
        before, future = begun
        try:
            return self._background.result(future)
        except RolloutAbandoned:  # restore the state from before this collection
            self._blend.return_to(before.position)
            self._surplus, self._draws = before.surplus, before.draws
            self.keep_rates.load_state_dict(before.keep_rates)
            raise

    async def _collect(self, step: int, version: int) -> CollectedBatch:
        grpo = self.cfg.trainer.grpo
        dynamic, needed = grpo.dynamic_sampling, grpo.prompts_per_step
        work = _Work(
            step,
            version,
            grpo.samples_per_prompt,
            grpo.temperature,
            1.0,
            self._deadline("the rollout", step),
            self._clock,
        )
        fresh = [group for group in self._surplus if is_fresh(group.version, step, dynamic.max_staleness)]
        batch = CollectedBatch(step, version, needed, stale=len(self._surplus) - len(fresh))
        sampler = DynamicSampler(needed, self.keep_rates, dynamic)
        for group in fresh:
            sampler.carry(group.task)
        undecided: deque[Group | asyncio.Task[Group]] = deque(fresh)
        began = time.monotonic()
        async with asyncio.TaskGroup() as running:
            while not sampler.done:
                while sampler.wants_more():
                    undecided.append(self._draw(sampler, running, work))
                self._decide(await _judged(undecided[0]), sampler, batch)
                undecided.popleft()
            self._surplus = [await _judged(group) for group in undecided]
        batch.wall_s = time.monotonic() - began
        batch.load = self._engines.load.end()
        batch.carried, batch.drawn, batch.surplus = sampler.carried, sampler.started, len(self._surplus)
        batch.generated_tokens, batch.engine_s = work.generated_tokens, work.clock.engine_s
        batch.reward_open_s, batch.reward_wait_s = work.clock.reward_s, work.clock.waited_s
        if not batch.full:
            _log.warning(
                "step %d trains on %d of %d groups: %d draws held no more with a signal (keep rates %s)",
                step,
                len(batch.groups),
                batch.needed,
                sampler.drawn,
                {task: round(tally.keep_rate, 3) for task, tally in sorted(batch.tasks.items())},
            )
        return batch

    def _draw(self, sampler: DynamicSampler, running: asyncio.TaskGroup, work: "_Work") -> "asyncio.Task[Group]":
        record, visit = self._blend.next()
        draw = PromptDraw(record, self.renderer.prompt_ids(record), visit)
        sampler.dispatched(record["task"])
        self._draws += 1
        return running.create_task(self._group(draw, self._draws - 1, work))

    def _decide(self, group: Group, sampler: DynamicSampler, batch: CollectedBatch) -> None:
        """Decide the oldest undecided group.  This is the only place where a group is kept or dropped."""
        tolerance = self.cfg.trainer.grpo.dynamic_sampling.tolerance
        kept = sampler.decide(_carries_signal(group, tolerance), usable=_can_teach(group))
        batch.tasks.setdefault(group.task, TaskTally()).add(group, kept, tolerance)
        batch.outcomes.append((group.prompt_id, group.outcome(tolerance)))
        if kept:
            batch.groups.append(group)

    def drop(self) -> None:
        """Discard the groups that were left for the next step."""
        self._surplus = []

    # --- one group -------------------------------------------------------------------------------------------------

    async def _group(self, draw: PromptDraw, draw_index: int, work: "_Work") -> Group:
        """Generate and judge one group.  Each response is sent to the reward server as soon as it ends."""
        record = draw.record
        seeds = [response_seed(self.cfg.seed, record["id"], draw.visit, sample) for sample in range(work.samples)]
        open_verdicts: dict[int, asyncio.Task[Verdict]] = {}
        async with asyncio.TaskGroup() as judging:

            def on_response(response: Response) -> None:
                work.generated_tokens += len(response.token_ids)
                open_verdicts[response.index] = judging.create_task(self._judge(draw, response, work.clock))

            with work.clock.open(engine=1):
                responses = await self._engines.generate(
                    draw.prompt_ids,
                    seeds,
                    self._sampling(draw, work),
                    work.deadline,
                    on_response=on_response,
                    version=work.version,
                )
        verdicts = [open_verdicts[index].result() for index in range(len(responses))]
        values = (record["id"], record["task"], record, list(draw.prompt_ids), draw.visit, responses, verdicts)
        return Group(*values, work.step, work.version, draw_index)

    def _sampling(self, draw: PromptDraw, work: "_Work") -> SamplingParams:
        grpo = self.cfg.trainer.grpo
        room = grpo.context_tokens - len(draw.prompt_ids)  # above 0: the renderer checks it
        most = grpo.max_response_tokens
        return SamplingParams(
            temperature=work.temperature,
            top_p=work.top_p,
            max_tokens=room if most is None else min(room, most),
            stop_token_ids=(self.renderer.eos_id,),
        )

    async def _judge(self, draw: PromptDraw, response: Response, clock: "WaitClock") -> Verdict:
        """Return the verdict on one response.  Missing scores are counted; several in a row stop the run."""
        record, text = draw.record, self.renderer.judged_text(draw.prompt_ids, response.token_ids)
        request = {**record, "response": text, "finished": response.finished}
        what = f"the verdict on {record['id']}, task {record['task']} (trainer.deadlines.reward_s)"
        deadline = Deadline(self.cfg.trainer.deadlines.reward_s, what)
        with clock.open(reward=1):
            try:
                async with asyncio.timeout(deadline.remaining + _GRACE_S):
                    verdict = await self._rewards.score(request, deadline)
            except TimeoutError as error:
                raise deadline.error() from error
        score = verdict["score"]
        self._failures_in_a_row = self._failures_in_a_row + 1 if score is None else 0
        if self._failures_in_a_row >= self.cfg.rewards.max_infrastructure_failures:
            raise RewardFailure(
                f"{self._failures_in_a_row} responses in a row could not be judged "
                f"(rewards.max_infrastructure_failures); the last: task {record['task']}, prompt {record['id']}: "
                f"{verdict['detail']}"
            )
        return verdict

    def sample(
        self, prompts: Sequence[PromptDraw], samples: int, temperature: float, top_p: float, step: int
    ) -> list[Group]:
        """Return judged responses to each prompt, in the order of prompts, without dynamic sampling (for validation).

        The responses are generated by the weights after `step`.
        """
        work = _Work(step, step, samples, temperature, top_p, self._deadline("validation", step), WaitClock())
        return self._background.run(self._sample(prompts, work))

    async def _sample(self, prompts: Sequence[PromptDraw], work: "_Work") -> list[Group]:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._group(draw, index, work)) for index, draw in enumerate(prompts)]
        return [task.result() for task in tasks]

    # --- engines ---------------------------------------------------------------------------------------------------

    def publish(self, path: str, version: int) -> list[tuple[str, str]]:
        """Load a weights file into all engines and wake sleeping ones.  Returns when every engine has the weights.

        The supervisor restarts an engine that fails to wake, and this method waits for it.

        Returns:
            (engine, error) of each engine that failed to wake.
        """
        self._background.run(self._engines.publish(path, version, self._change(f"publication of weights {version}")))
        return sorted(self._engines.wake_failures.items())

    def sleep(self) -> int:
        """Make the engines release device memory until the next publication; return the bytes released."""
        level = self.cfg.rollout.sleep
        assert level is not None
        return self._background.run(self._engines.sleep(level, self._change("the engines' sleep")))

    def _change(self, what: str) -> Deadline:
        """Return the deadline of a change to all engines; where engines sleep, it allows for one restart."""
        deadlines = self.cfg.trainer.deadlines
        if self.cfg.rollout.sleep is None:
            return Deadline(deadlines.publish_s, f"{what} (trainer.deadlines.publish_s)")
        seconds = deadlines.publish_s + deadlines.startup_s
        return Deadline(seconds, f"{what} (trainer.deadlines.publish_s + startup_s)")

    def _deadline(self, what: str, step: int) -> Deadline:
        return Deadline(self.cfg.trainer.deadlines.rollout_s, f"{what} at step {step} (trainer.deadlines.rollout_s)")

    # --- stopping, and in a checkpoint -----------------------------------------------------------------------------

    def abandon(self) -> None:
        """Give up the collection from another thread, for good.  Every waiting thread gets RolloutAbandoned."""
        self._background.abandon()

    def close(self) -> None:
        """Cancel the running work and end the thread.  Every waiting thread gets StoppedCleanly."""
        self._background.close(self._disconnect())

    async def _disconnect(self) -> None:
        await self._engines.close()
        await self._rewards.close()

    def state_dict(self) -> CollectorState:
        """Return the exact state as JSON values.  Call it only while no collection runs."""
        return {
            "surplus": [asdict(group) for group in self._surplus],
            "draws": self._draws,
            "keep_rates": self.keep_rates.state_dict(),
        }

    def load_state_dict(self, state: CollectorState) -> None:
        self._surplus = [Group.from_json(value) for value in state["surplus"]]
        self._draws = int(state["draws"])
        self.keep_rates.load_state_dict(state["keep_rates"])


@dataclass
class _Work:
    """Settings common to all groups of one collection or validation, and the sum of their generated tokens."""

    step: int
    version: int
    samples: int
    temperature: float
    top_p: float
    deadline: Deadline
    clock: "WaitClock"
    generated_tokens: int = 0


@dataclass
class WaitClock:
    """Seconds with an engine request open, with a reward request open, and spent waiting for rewards alone.

    Any thread may use it.  `waited_for` is False while no thread waits for the collection.
    """

    engine_s: float = 0.0
    reward_s: float = 0.0
    waited_s: float = 0.0
    _engine: int = 0
    _reward: int = 0
    _waited_for: bool = True
    _since: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _change(self, engine: int = 0, reward: int = 0, waited_for: bool | None = None) -> None:
        with self._lock:
            now = time.monotonic()
            passed, self._since = now - self._since, now
            self.engine_s += passed if self._engine else 0.0
            self.reward_s += passed if self._reward else 0.0
            self.waited_s += passed if self._reward and not self._engine and self._waited_for else 0.0
            self._engine += engine
            self._reward += reward
            self._waited_for = self._waited_for if waited_for is None else waited_for

    def wait(self, waited_for: bool) -> None:
        """Note whether a thread waits for the collection from now on."""
        self._change(waited_for=waited_for)

    @contextmanager
    def open(self, engine: int = 0, reward: int = 0) -> Iterator[None]:
        """Count this many additional open requests inside the context."""
        self._change(engine, reward)
        try:
            yield
        finally:
            self._change(-engine, -reward)


def _carries_signal(group: Group, tolerance: float) -> bool:
    rewards_GN, valid_GN = torch.tensor([group.scores], dtype=torch.float64), torch.tensor([group.valid])
    return bool(carries_signal(rewards_GN, valid_GN, tolerance)[0])


def _can_teach(group: Group) -> bool:
    """Return whether the group has at least 2 valid responses, without which no advantage exists."""
    return sum(group.valid) >= min(2, len(group.valid))


async def _judged(group: "Group | asyncio.Task[Group]") -> Group:
    return group if isinstance(group, Group) else await group
