"""Collector that fills the batch of a step with groups of judged responses (paper sec. 3.3).  It runs on rank 0.

    prompt --draw--> GENERATING --all responses ended--> JUDGING --all verdicts received--> JUDGED
                                                                                              |
                              in draw order, until the batch is full: `_decide`  <------------+
                                              |                   |                           |
         no signal, or fewer than 2 scores    |                   |                           |  the batch is full
                                              v                   v                           v
                                           DROPPED      KEPT, in the batch                 SURPLUS

A group has a signal if its rewards differ by more than `dynamic_sampling.tolerance`.  A verdict may be without a score
(`_can_teach`; a group of one response needs one).  After a DROPPED group another prompt may be drawn; without dynamic
sampling, groups without a signal are kept, too.
The SURPLUS is decided first in the next step.  It is lost before that if it is too old then
(`dynamic_sampling.max_staleness`), at a roll-back (`discard`), and at a new stage, which begins without it.

Each response is sent to the reward server as soon as it ends.  The draws and the kept groups depend on the verdicts in
draw order and never on timing, so short responses are not favoured.  The rule which groups are kept and when another
prompt is drawn is `DynamicSampler` in `algorithms.dynamic_sampling`.

Suffixes: G groups, N responses of a group.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

import torch

from nemo_prorl.algorithms.dynamic_sampling import DynamicSampler, KeepRates, carries_signal
from nemo_prorl.config import Config
from nemo_prorl.data.blend import Blend
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import UNJUDGED, RewardFailure, RolloutAbandoned
from nemo_prorl.rewards.canaries import CanarySchedule, ask, total
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rewards.second import SecondVerdicts, SecondVerifiers
from nemo_prorl.rollout.background import BackgroundLoop
from nemo_prorl.rollout.endpoints import Response, SamplingParams, response_seed
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.groups import CollectedBatch, Group, PromptDraw, TaskTally, draws_of
from nemo_prorl.rollout.scheduling import is_fresh
from nemo_prorl.schema import Amount, Constraint, Count

_log = logging.getLogger(__name__)

# Seconds after the deadline of a verdict.  The reward client returns by the deadline, so a longer wait means it hangs.
_GRACE_S = 5.0


@dataclass
class _StateBefore:
    """State of the collector before a collection, restored when the collection is abandoned."""

    position: list[tuple[int, int]]  # (records drawn, records skipped) of each source of the blend
    surplus: list[Group]  # groups left over from the step before
    draws: int  # prompts drawn since the start of the run
    keep_rates: dict[str, Any]  # by task: sum of kept groups, sum of decided groups


class CollectorState(TypedDict):
    """Fields of the collector in a checkpoint."""

    surplus: list[Count]
    """draw numbers of the groups left for the next step; the groups are in groups.safetensors"""
    draws: Count
    """prompts drawn since the start of the run"""
    keep_rates: dict[str, Annotated[list[Amount], Constraint(minItems=2, maxItems=2)]]
    """by task: sum of kept groups, sum of decided groups; older groups count less"""
    waiting: NotRequired[dict[str, Any] | None]
    """batch of the next step, if it was collected while the last step trained; its groups as draw numbers"""


class Collector:
    """Collects batches of judged groups.  Requests run on a background thread; methods wait for their result.

    All methods raise the errors of that thread: DeadlineExceeded, EngineRefused, RewardFailure, DataError.
    """

    def __init__(
        self,
        cfg: Config,
        engines: EnginePool,
        rewards: RewardClient,
        blend: Blend,
        renderer: PromptRenderer,
        canaries: CanarySchedule | None = None,
        second: SecondVerifiers | None = None,
    ) -> None:
        self.cfg, self.keep_rates, self.renderer = cfg, KeepRates(), renderer
        self._engines, self._rewards, self._blend, self._canaries = engines, rewards, blend, canaries
        self._second = second or SecondVerifiers.none()
        self._surplus: list[Group] = []
        self._draws = 0
        self._failures_in_a_row = 0
        self._clock = WaitClock()
        self._background = BackgroundLoop("rollouts")

    # --- a step's batch --------------------------------------------------------------------------------------------

    def take(self, step: int, version: int) -> CollectedBatch:
        """Return the groups to train on in this step, generated by weights `version` or left over from an earlier step.

        Returns when every request has ended, so that nothing is in flight between steps.

        Raises:
            RolloutAbandoned: `abandon` was called; the collector is in the state from before this call.
        """
        begun = self._begin(step, version)
        return self._end(begun)

    def _begin(self, step: int, version: int) -> "tuple[_StateBefore, Future[CollectedBatch]]":
        snapshot = _StateBefore(self._blend.position(), self._surplus, self._draws, self.keep_rates.state_dict())
        self._clock = WaitClock()
        self._engines.open_responses.begin()
        return snapshot, self._background.start(self._collect(step, version))

    def _end(self, begun: "tuple[_StateBefore, Future[CollectedBatch]]") -> CollectedBatch:
        snapshot, future = begun
        try:
            return self._background.result(future)
        except RolloutAbandoned:
            self._blend.return_to(snapshot.position)
            self._surplus, self._draws = snapshot.surplus, snapshot.draws
            self.keep_rates.load_state_dict(snapshot.keep_rates)
            raise

    async def _collect(self, step: int, version: int) -> CollectedBatch:
        grpo = self.cfg.trainer.grpo
        dynamic, needed = grpo.dynamic_sampling, grpo.prompts_per_step
        work = _Collection(
            step,
            version,
            samples=grpo.samples_per_prompt,
            temperature=grpo.temperature,
            top_p=1.0,
            deadline=self._deadline("the rollout", step),
            clock=self._clock,
            second=(second := self._second_verdicts()),
        )
        fresh = [group for group in self._surplus if is_fresh(group.version, step, dynamic.max_staleness)]
        batch = CollectedBatch(step, version, needed, stale=len(self._surplus) - len(fresh))
        sampler = DynamicSampler(needed, self.keep_rates, dynamic)
        for group in fresh:
            sampler.carry(group.task)
        undecided: deque[Group | asyncio.Task[Group]] = deque(fresh)
        began = time.monotonic()
        async with second, asyncio.TaskGroup() as running:
            canaries = self._send_canaries(step, running)
            while not sampler.done:
                while sampler.wants_more():
                    undecided.append(self._draw(sampler, running, work))
                self._decide(await _judged(undecided[0]), sampler, batch)
                undecided.popleft()
            self._surplus = [await _judged(group) for group in undecided]
        batch.canaries = total(task.result() for task in canaries)
        batch.second, batch.disagreements = second.counts, second.disagreements
        batch.wall_s = time.monotonic() - began
        batch.load, batch.kv_cache_peak = self._engines.open_responses.end(), self._engines.open_responses.kv_cache_peak
        batch.carried, batch.drawn, batch.surplus = sampler.carried, sampler.started, len(self._surplus)
        batch.generated_tokens, batch.engine_s = work.generated_tokens, work.clock.engine_s
        batch.reward_open_s, batch.reward_wait_s = work.clock.reward_s, work.clock.waited_s
        if batch.groups and not batch.full:  # without any group, the trainer reports the reasons
            _log.warning(
                "step %d trains on %d of %d groups: the limit of draws was reached after %d groups (%d drawn in"
                " this step, %d left of the step before), and no others carry a signal (share of groups kept, by task:"
                " %s)",
                step,
                len(batch.groups),
                batch.needed,
                sampler.drawn,
                sampler.started,
                sampler.carried,
                {task: round(tally.keep_rate, 3) for task, tally in sorted(batch.tasks.items())},
            )
        return batch

    def _send_canaries(self, step: int, running: asyncio.TaskGroup) -> "list[asyncio.Task[Counter[str]]]":
        """Send the canaries of a step.  They go first, so their verdicts are known long before the last response."""
        sent = self._canaries.of_step(step) if self._canaries else []
        seconds = self.cfg.trainer.deadlines.reward_s
        return [running.create_task(ask(canary, self._rewards.score, seconds)) for canary in sent]

    def _second_verdicts(self) -> SecondVerdicts:
        first = self._draws * self.cfg.trainer.grpo.samples_per_prompt
        return SecondVerdicts(self._second, self._rewards.score, self.cfg.trainer.deadlines.reward_s, first)

    def _draw(self, sampler: DynamicSampler, running: asyncio.TaskGroup, work: "_Collection") -> "asyncio.Task[Group]":
        record, visit = self._blend.next()
        draw = PromptDraw(record, self.renderer.prompt_ids(record), visit)
        sampler.dispatched(record["task"])
        self._draws += 1
        return running.create_task(self._group(draw, self._draws - 1, work))

    def _decide(self, group: Group, sampler: DynamicSampler, batch: CollectedBatch) -> None:
        """Keep the oldest undecided group for the batch, or drop it.

        Surplus that is lost (see the head of this file) never comes here.
        """
        tolerance = self.cfg.trainer.grpo.dynamic_sampling.tolerance
        kept = sampler.decide(_carries_signal(group, tolerance), usable=_can_teach(group))
        batch.tasks.setdefault(group.task, TaskTally()).add(group, kept, tolerance)
        batch.unjudged = batch.unjudged or group.unjudged
        rate = self.cfg.data.retire_rate
        mastered = rate < 1.0 and group.mean_reward >= rate - tolerance  # false for nan
        batch.outcomes.append((group.prompt_id, "solved" if mastered else group.outcome(tolerance)))
        shown = self.cfg.trainer.grpo.save_rollout_groups
        if kept:
            batch.groups.append(group)
        elif shown < 0 or len(batch.outcomes) <= shown:
            batch.dropped.append(group)

    def discard(self) -> None:
        """Discard the surplus groups that were left for the next step, at a roll-back."""
        self._surplus = []

    def waiting(self) -> str:
        """Return what the rollout in progress waits for, as text.  Any thread may call this."""
        return ", ".join(filter(None, (self._engines.waiting(), self._rewards.waiting()))) or "no request is open"

    # --- one group -------------------------------------------------------------------------------------------------

    async def _group(self, draw: PromptDraw, draw_index: int, work: "_Collection") -> Group:
        """Generate and judge one group.  Each response is sent to the reward server as soon as it ends."""
        record = draw.record
        seeds = [response_seed(self.cfg.seed, record["id"], draw.visit, sample) for sample in range(work.samples)]
        open_verdicts: dict[int, asyncio.Task[Verdict]] = {}
        async with asyncio.TaskGroup() as judging:

            def on_response(response: Response) -> None:
                work.generated_tokens += len(response.token_ids)
                number = draw_index * work.samples + response.index
                open_verdicts[response.index] = judging.create_task(self._judge(draw, response, number, work))

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

    def _sampling(self, draw: PromptDraw, work: "_Collection") -> SamplingParams:
        grpo = self.cfg.trainer.grpo
        room = grpo.context_tokens - len(draw.prompt_ids)  # positive: the renderer refuses longer prompts
        limit = grpo.max_response_tokens
        return SamplingParams(
            temperature=work.temperature,
            top_p=work.top_p,
            max_tokens=room if limit is None else min(room, limit),
            stop_token_ids=(self.renderer.eos_id,),
        )

    async def _judge(self, draw: PromptDraw, response: Response, number: int, work: "_Collection") -> Verdict:
        """Return the verdict on one response; have it judged again if it is in the sample for second verifiers.

        Args:
            number: Number of the response in the run.

        Raises:
            RewardFailure: Too many responses in a row have no score.
        """
        record, text = draw.record, self.renderer.judged_text(draw.prompt_ids, response.token_ids)
        request = {**record, "response": text, "finished": response.finished}
        awaited = f"the verdict on {record['id']}, task {record['task']} (trainer.deadlines.reward_s)"
        deadline = Deadline(self.cfg.trainer.deadlines.reward_s, awaited)
        with work.clock.open(reward=1):
            scoring = asyncio.ensure_future(self._rewards.score(request, deadline))
            try:
                while not (await asyncio.wait({scoring}, timeout=deadline.remaining + _GRACE_S))[0]:
                    deadline.check()  # the client counts it from the server's last verdict
                verdict = scoring.result()
            finally:
                scoring.cancel()
        score = verdict["score"]
        self._failures_in_a_row = self._failures_in_a_row + 1 if score is None else 0
        if self._failures_in_a_row >= self.cfg.rewards.max_infrastructure_failures:
            raise RewardFailure(
                f"{self._failures_in_a_row} responses in a row could not be judged, the limit of"
                f" rewards.max_infrastructure_failures; the last: task {record['task']}, prompt {record['id']}:"
                f" {verdict['detail']}. {UNJUDGED}"
            )
        if work.second is not None:
            work.second.offer(number, request, verdict)
        return verdict

    def sample(
        self, prompts: Sequence[PromptDraw], samples: int, temperature: float, top_p: float, step: int
    ) -> list[Group]:
        """Return `samples` judged responses to each prompt, in the order of prompts, without dynamic sampling.

        Validation uses this method.  The weights after `step` must be published; they generate the responses.
        """
        work = _Collection(
            step,
            step,
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            deadline=self._deadline("validation", step),
            clock=WaitClock(),
        )
        return self._background.run(self._sample(prompts, work))

    async def _sample(self, prompts: Sequence[PromptDraw], work: "_Collection") -> list[Group]:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._group(draw, index, work)) for index, draw in enumerate(prompts)]
        return [task.result() for task in tasks]

    # --- engines ---------------------------------------------------------------------------------------------------

    def publish(self, path: str, version: int) -> list[tuple[str, str]]:
        """Load the weights file `path` into all engines and wake sleeping engines; return when all have the weights.

        The supervisor restarts an engine that fails to wake, and this method waits for it.

        Returns:
            (engine name, error message) of each engine that failed to wake.
        """
        deadline = self._change_deadline(f"publication of weights {version}")
        self._background.run(self._engines.publish(path, version, deadline))
        return sorted(self._engines.wake_failures.items())

    @property
    def unread_weights(self) -> dict[str, list[str]]:
        """Return the published tensors that each engine could not compare with what it holds, at its last load."""
        return self._engines.unread

    def sleep(self) -> int:
        """Make all engines release their device memory until the next publication; return the bytes released."""
        level = self.cfg.rollout.sleep
        assert level is not None
        return self._background.run(self._engines.sleep(level, self._change_deadline("the engines' sleep")))

    def _change_deadline(self, change: str) -> Deadline:
        """Return the deadline of a sleep or publication; its error names `change`.

        If `rollout.sleep` or `rollout.recycle_gb` is set, the deadline includes the time of an engine's restart.
        """
        deadlines = self.cfg.trainer.deadlines
        if self.cfg.rollout.sleep is None and self.cfg.rollout.recycle_gb is None:
            return Deadline(deadlines.publish_s, f"{change} (trainer.deadlines.publish_s)")
        seconds = deadlines.publish_s + deadlines.startup_s
        return Deadline(seconds, f"{change} (trainer.deadlines.publish_s + startup_s)")

    def _deadline(self, phase: str, step: int) -> Deadline:
        text = f"a new token or response in {phase} at step {step} (trainer.deadlines.rollout_s)"
        return Deadline(self.cfg.trainer.deadlines.rollout_s, text)

    # --- stopping, and in a checkpoint -----------------------------------------------------------------------------

    def abandon(self) -> None:
        """Abandon the rollouts for good; any thread may call this.  Every waiting caller gets RolloutAbandoned."""
        self._background.abandon()

    def close(self) -> None:
        """Cancel the running work and end the thread.  Every waiting caller gets StoppedCleanly."""
        self._background.close(self._disconnect())

    async def _disconnect(self) -> None:
        await self._engines.close()
        await self._rewards.close()

    def state_dict(self) -> CollectorState:
        """Return the exact state besides `groups` as JSON values.  Call it only while no collection runs."""
        return {
            "surplus": draws_of(self._surplus),
            "draws": self._draws,
            "keep_rates": self.keep_rates.state_dict(),
        }

    def groups(self) -> list[Group]:
        """Return the groups to which `state_dict` refers.  Later collections do not change them."""
        return list(self._surplus)

    def load_state_dict(self, state: CollectorState, groups: Mapping[int, Group]) -> None:
        """Return to a state.

        Args:
            groups: the groups of that state, by draw number.
        """
        self._surplus = [groups[draw] for draw in state["surplus"]]
        self._draws = int(state["draws"])
        self.keep_rates.load_state_dict(state["keep_rates"])


@dataclass
class _Collection:
    """Settings common to all groups of one collection or validation, and the sum of their generated tokens."""

    step: int
    version: int
    samples: int
    temperature: float
    top_p: float
    deadline: Deadline
    clock: "WaitClock"
    second: SecondVerdicts | None = None  # only collections for training have second verdicts
    generated_tokens: int = 0


@dataclass
class WaitClock:
    """Stopwatch of a collection.  Any thread may use it.

    `engine_s`, `reward_s`: seconds with at least one open request to an engine, or to the reward server.  `waited_s`:
    seconds in which the step waited for rewards while no engine request was open.
    """

    engine_s: float = 0.0
    reward_s: float = 0.0
    waited_s: float = 0.0
    _engine: int = 0
    _reward: int = 0
    _waited_for: bool = True
    _since: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _update(self, engine: int = 0, reward: int = 0, waited_for: bool | None = None) -> None:
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
        """Record that from now on the step waits for the collection (True), or trains meanwhile (False)."""
        self._update(waited_for=waited_for)

    @contextmanager
    def open(self, engine: int = 0, reward: int = 0) -> Iterator[None]:
        """Count `engine` more open engine requests, and `reward` more open reward requests, inside the context."""
        self._update(engine, reward)
        try:
            yield
        finally:
            self._update(-engine, -reward)


def _carries_signal(group: Group, tolerance: float) -> bool:
    rewards_GN, valid_GN = torch.tensor([group.scores], dtype=torch.float64), torch.tensor([group.valid])
    return bool(carries_signal(rewards_GN, valid_GN, tolerance)[0])


def _can_teach(group: Group) -> bool:
    """Return whether enough responses have a reward to compute advantages: 2, or 1 in a group of one response."""
    return sum(group.valid) >= min(2, len(group.valid))


async def _judged(group: "Group | asyncio.Task[Group]") -> Group:
    return group if isinstance(group, Group) else await group
