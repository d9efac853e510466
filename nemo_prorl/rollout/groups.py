"""Groups of judged responses, and the collector that fills a step's batch with them (paper sec. 3.3).

Prompts are drawn in order; each response goes to the reward server the moment it ends; groups are decided in the order
in which they were drawn.  So what is drawn and what is trained on depend on the verdicts in draw order and never on
timing, and short responses are not favoured.

Suffixes: G groups, N responses of a group.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nemo_prorl.algorithms.sampling import DynamicSampler, KeepRates, carries_signal
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DataError, RewardFailure, RolloutAbandoned
from nemo_prorl.rollout.background import BackgroundLoop, OpenClock
from nemo_prorl.rollout.blocks import Blocks, block_sizes
from nemo_prorl.rollout.collected import CollectedBatch, Group, TaskTally
from nemo_prorl.rollout.one_engine import Response, SamplingParams, response_seed
from nemo_prorl.rollout.rollout_settings import GRACE_S, RolloutSettings
from nemo_prorl.rollout.scheduling import is_fresh, sampler_of
from nemo_prorl.tracing import RECORDER

_log = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # that engines which stay awake are left alone while another draw is possible


class PromptVisit(Protocol):
    """One prompt as the data blend hands it out.  `visit` counts how often this prompt was drawn before."""

    @property
    def record(self) -> dict[str, Any]: ...
    @property
    def prompt_ids(self) -> list[int]: ...
    @property
    def visit(self) -> int: ...


class Prompts(Protocol):
    """An endless source of prompts, whose state its owner keeps."""

    def next(self) -> PromptVisit: ...


class Engines(Protocol):
    """What the collector needs of `client.EnginePool`."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        deadline: Deadline,
        on_response: Callable[[Response], None] | None = None,
        version: int | None = None,
    ) -> list[Response]: ...
    async def publish(self, path: str, version: int, deadline: Deadline) -> None: ...
    async def announce(self, path: str, version: int) -> None: ...
    async def sleep(self, level: int, deadline: Deadline) -> int: ...
    @property
    def wake_failures(self) -> dict[str, str]: ...
    async def health(self) -> dict[str, dict[str, Any]]: ...
    async def close(self) -> None: ...


class Rewards(Protocol):
    """What the collector needs of the reward client: a verdict with "score" (None: infrastructure) and "detail"."""

    async def score(self, request: dict[str, Any], deadline: Deadline) -> dict[str, Any]: ...
    async def close(self) -> None: ...


class Rollouts:
    """Collects batches of judged groups.  Its requests run on a thread of its own; its methods wait for them.

    `judged_text`: token ids of a prompt and of a response to it -> the text that verifiers see.
    All methods raise what went wrong on that thread: DeadlineExceeded, EngineRefused, RewardFailure, DataError.
    """

    def __init__(
        self,
        engines: Engines,
        rewards: Rewards,
        prompts: Prompts,
        judged_text: Callable[[list[int], list[int]], str],
        settings: RolloutSettings,
    ) -> None:
        self.settings = settings
        self.keep_rates = KeepRates()
        self._engines, self._rewards, self._prompts, self._judged_text = engines, rewards, prompts, judged_text
        self._surplus: list[Group] = []
        self._draws = 0
        self._failures_in_a_row = 0
        self._clock = OpenClock()
        self._freed: int | None = None  # by engines that went to sleep before their collection was over
        self._background = BackgroundLoop("rollouts")

    def publish(self, path: str, version: int) -> list[tuple[str, str]]:
        """Loads a weights file into all engines, waking those that sleep; returns when each holds it.

        An engine that fails to wake is started again by its supervisor and waited for: returned are those, with what
        they said.
        """
        deadline = self._change_deadline(f"publication of weights {version}")
        self._background.run(self._engines.publish(str(path), version, deadline))
        return sorted(self._engines.wake_failures.items())

    def announce(self, path: str, version: int) -> None:
        """Names the weights that engines load before they generate again; the wait is part of the next collection."""
        self._background.run(self._engines.announce(str(path), version))

    def sleep(self) -> int:
        """Engines give their devices' memory away until the next publication; the bytes that this freed.

        Nothing where rollout.sleep is null.  They may sleep since before the collection was over."""
        if self.settings.sleep is None:
            return 0
        freed, self._freed = self._freed, None
        return self._background.run(self._sleep()) if freed is None else freed

    async def _sleep(self) -> int:
        level = self.settings.sleep
        assert level is not None
        return await self._engines.sleep(level, self._change_deadline("the engines' sleep"))

    def _change_deadline(self, what: str) -> Deadline:
        """Where engines sleep, one of them may have to be started again."""
        if self.settings.sleep is None:
            return Deadline(self.settings.publish_s, f"{what} (trainer.deadlines.publish_s)")
        seconds = self.settings.publish_s + self.settings.startup_s
        return Deadline(seconds, f"{what} (trainer.deadlines.publish_s + startup_s)")

    def health(self) -> dict[str, dict[str, Any]]:
        """What each engine says of itself, by name."""
        return self._background.run(self._engines.health())

    def collect(self, step: int, version: int, on_block: Callable[[list[Group]], None] | None = None) -> CollectedBatch:
        """Groups to train on in this step, made by these weights or by those of a recent step's surplus.

        Returns when all that was started has ended, so nothing is in flight between steps.
        `on_block` is called, on the collector's thread, with groups whose log-probabilities can be computed before it
        returns.  Where engines have their own devices: each that is trained on unless enough others were drawn before
        it, the moment it is judged.  Where trainer and engines share them: a block (`blocks`) that is trained on, once
        the engines have nothing to do but verdicts are open; with `sleep` the engines sleep by then.
        """
        self.begin(step, version, on_block)
        return self.end()

    def begin(
        self, step: int, version: int, on_block: Callable[[list[Group]], None] | None = None
    ) -> "Future[CollectedBatch]":
        """Starts what `collect` does.  Until `end` nothing else is asked of this object, but for `training`
        and `elsewhere`.

        Returns what tells that it is over; its result is `end`'s.
        """
        self._before = self._surplus, self._draws, self.keep_rates.state_dict()
        self._clock, self._freed = OpenClock(), None
        self._begun = self._background.start(self._collect(step, version, on_block))
        return self._begun

    def end(self) -> CollectedBatch:
        """Waits for what was begun."""
        try:
            return self._background.result(self._begun)
        except RolloutAbandoned:  # as if never begun
            self._surplus, self._draws = self._before[:2]
            self.keep_rates.load_state_dict(self._before[2])
            raise

    def training(self) -> AbstractContextManager[None]:
        """Inside, the trainer works: a reward that is open then is not waited for."""
        return self._clock.trainer()

    def elsewhere(self) -> AbstractContextManager[None]:
        """Inside, nobody waits for what is collected; its end may come after the collection's."""
        return self._clock.elsewhere()

    @property
    def abandoned(self) -> bool:
        """Whether somebody called `abandon`: nothing more is generated."""
        return self._background.abandoned

    def abandon(self) -> None:
        """From another thread: whoever waits for a collection or a sample gets RolloutAbandoned."""
        self._background.abandon()

    def drop_surplus(self) -> None:
        """Groups that were left for the next step are not trained on."""
        self._surplus = []

    def sample(
        self,
        prompts: Sequence[PromptVisit],
        n: int,
        temperature: float,
        top_p: float,
        seed: int,
        version: int,
        step: int = 0,
    ) -> list[Group]:
        """n judged responses to each prompt, in the order of prompts (validation): no dynamic sampling."""
        work = _Work(step, version, n, temperature, top_p, seed, self._deadline("validation", step))
        return self._background.run(self._sample(prompts, work))

    def close(self) -> None:
        """Cancels what runs (whoever waits gets StoppedCleanly) and ends the thread."""
        self._background.close(self._disconnect())

    async def _disconnect(self) -> None:
        await self._engines.close()
        await self._rewards.close()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, between steps: JSON, exact."""
        return {
            "surplus": [group.to_json() for group in self._surplus],
            "draws": self._draws,
            "keep_rates": self.keep_rates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._surplus = [Group.from_json(value) for value in state["surplus"]]
        self._draws = int(state["draws"])
        self.keep_rates.load_state_dict(state["keep_rates"])

    def _deadline(self, what: str, step: int) -> Deadline:
        return Deadline(self.settings.rollout_s, f"{what} at step {step} (trainer.deadlines.rollout_s)")

    async def _sample(self, prompts: Sequence[PromptVisit], work: "_Work") -> list[Group]:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._group(visit, index, work)) for index, visit in enumerate(prompts)]
        return [task.result() for task in tasks]

    async def _collect(self, step: int, version: int, on_block: Callable[[list[Group]], None] | None) -> CollectedBatch:
        settings, dynamic = self.settings, self.settings.dynamic_sampling
        work = _Work(
            step,
            version,
            settings.samples_per_prompt,
            settings.temperature,
            1.0,
            settings.run_seed,
            self._deadline("the rollout", step),
            self._clock,
            on_block,
            Blocks(settings.prompts_per_step, settings.block_draws),
        )
        fresh = [group for group in self._surplus if is_fresh(group.version, step, dynamic.max_staleness)]
        batch = CollectedBatch(step, version, settings.prompts_per_step, stale=len(self._surplus) - len(fresh))
        sampler = sampler_of(settings.prompts_per_step, self.keep_rates, dynamic)
        places: list[int] = []  # of the batch's groups, among all of this step
        began = time.monotonic()
        async with asyncio.TaskGroup() as running:
            undecided: deque[Group | asyncio.Task[Group]] = deque(fresh)
            for group in fresh:
                sampler.carry(group.task)
                self._is_judged(group, work.blocks.open(), work)
            if on_block is not None and not settings.own_devices:
                running.create_task(self._hand_out(sampler, work))
            while not sampler.done:
                while sampler.wants_more():
                    undecided.append(self._draw(sampler, running, work))
                self._decide(await _judged(undecided[0]), sampler, batch, places)
                undecided.popleft()
            self._surplus = [await _judged(group) for group in undecided]
            batch.wall_s = time.monotonic() - began
            work.end()
        batch.blocks = block_sizes(places, settings.block_draws)
        batch.carried, batch.drawn, batch.surplus = sampler.carried, sampler.started, len(self._surplus)
        batch.generated_tokens, batch.sleep_s = work.generated_tokens, work.sleep_s
        batch.engine_s, batch.reward_open_s = work.clock.engine_s, work.clock.reward_s
        batch.reward_wait_s, batch.logprobs_s = work.clock.reward_only_s, work.clock.trainer_s
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
        visit = self._prompts.next()
        sampler.dispatched(visit.record["task"])
        index = self._draws
        self._draws += 1
        work.generating += 1
        work.changed.set()
        return running.create_task(self._group(visit, index, work, work.blocks.open()))

    async def _hand_out(self, sampler: DynamicSampler, work: "_Work") -> None:
        """Gives the trainer what it can compute while verdicts are open, from when the engines have nothing to do.

        It begins once it is sure that nothing more is drawn: its work would slow the next draws, and engines that sleep
        could not answer them.  Engines that stay awake are disturbed all the same where verdicts take long.
        """
        assert work.on_block is not None
        loop, patience, settled = asyncio.get_running_loop(), math.inf, False
        while not work.over:
            await work.changed.wait()
            work.changed.clear()
            if work.over or work.generating:
                patience = math.inf
                continue
            if patience == math.inf:
                patience = loop.time() + _PATIENCE_S
                loop.call_at(patience + 0.01, work.changed.set)
            awake = self.settings.sleep is None
            settled = settled or sampler.settled(work.blocks.last(sampler.undecided))
            if not settled and not (awake and loop.time() >= patience):
                continue
            if not awake and self._freed is None:
                began = loop.time()
                with RECORDER.span("engines go to sleep", "publication"):
                    self._freed = await self._sleep()
                work.sleep_s = loop.time() - began
            for block in work.blocks.ready():
                work.on_block(block)

    def _is_judged(self, group: Group, place: int, work: "_Work") -> None:
        """Notes a judged group at its place of the step; on devices of its own the trainer may begin with it."""
        joins = not self.settings.dynamic_sampling.enabled or self._carries_signal(group)
        taught = group if joins and _can_teach(group) else None
        work.blocks.judged(place, joins, taught)
        if self.settings.own_devices and work.on_block is not None and taught is not None:
            work.on_block([taught])
        work.changed.set()

    def _decide(self, group: Group, sampler: DynamicSampler, batch: CollectedBatch, places: list[int]) -> None:
        """One decision, of the oldest undecided group."""
        tolerance, place = self.settings.dynamic_sampling.tolerance, sampler.decided
        kept = sampler.decide(self._carries_signal(group)) and _can_teach(group)
        batch.tasks.setdefault(group.task, TaskTally()).add(group, kept, tolerance)
        batch.outcomes.append((group.prompt_id, group.outcome(tolerance)))
        if kept:
            batch.groups.append(group)
            places.append(place)

    def _carries_signal(self, group: Group) -> bool:
        rewards_GN, valid_GN = torch.tensor([group.scores], dtype=torch.float64), torch.tensor([group.valid])
        return bool(carries_signal(rewards_GN, valid_GN, self.settings.dynamic_sampling.tolerance)[0])

    async def _group(self, visit: PromptVisit, draw_index: int, work: "_Work", place: int | None = None) -> Group:
        """Generates and judges one group; each response is judged from the moment it ends.

        `place`: among the groups of a collection; None outside of one."""
        record = visit.record
        seeds = [response_seed(work.seed, record["id"], visit.visit, sample) for sample in range(work.samples)]
        open_verdicts: dict[int, asyncio.Task[dict[str, Any]]] = {}
        async with asyncio.TaskGroup() as judging:

            def on_response(response: Response) -> None:
                work.generated_tokens += len(response.token_ids)
                open_verdicts[response.index] = judging.create_task(self._judge(visit, response, work.clock))

            with work.clock.engine():
                responses = await self._engines.generate(
                    visit.prompt_ids,
                    seeds,
                    self._sampling(visit, work),
                    work.deadline,
                    on_response=on_response,
                    version=work.version,
                )
            if place is not None:
                work.generating -= 1
                work.changed.set()
        verdicts = [open_verdicts[index].result() for index in range(len(responses))]
        values = (record["id"], record["task"], record, list(visit.prompt_ids), visit.visit, responses, verdicts)
        group = Group(*values, work.step, work.version, draw_index)
        if place is not None:
            self._is_judged(group, place, work)
        return group

    def _sampling(self, visit: PromptVisit, work: "_Work") -> SamplingParams:
        room = self.settings.context_tokens - len(visit.prompt_ids)
        if room < 1:
            raise DataError(
                f"prompt {visit.record['id']}: {len(visit.prompt_ids)} tokens leave no room for a response in "
                f"trainer.grpo.context_tokens={self.settings.context_tokens}"
            )
        most = self.settings.max_response_tokens
        return SamplingParams(
            temperature=work.temperature,
            top_p=work.top_p,
            max_tokens=room if most is None else min(room, most),
            stop_token_ids=self.settings.stop_token_ids,
        )

    async def _judge(self, visit: PromptVisit, response: Response, clock: OpenClock) -> dict[str, Any]:
        """The verdict on one response.  A missing score is counted, and after several in a row the run stops."""
        record, text = visit.record, self._judged_text(visit.prompt_ids, response.token_ids)
        request = {**record, "response": text, "finished": response.finished}
        what = f"the verdict on {record['id']}, task {record['task']} (trainer.deadlines.reward_s)"
        deadline = Deadline(self.settings.reward_s, what)
        with clock.reward():
            try:
                async with asyncio.timeout(deadline.remaining + GRACE_S):
                    verdict = await self._rewards.score(request, deadline)
            except TimeoutError as error:
                raise deadline.error() from error
        score = verdict["score"]
        if score is not None and not 0.0 <= float(score) <= 1.0:
            raise RewardFailure(f"task {record['task']}: score {score!r} of {record['id']} is outside 0..1: {verdict}")
        self._failures_in_a_row = self._failures_in_a_row + 1 if score is None else 0
        if self._failures_in_a_row >= self.settings.max_infrastructure_failures:
            raise RewardFailure(
                f"{self._failures_in_a_row} responses in a row could not be judged "
                f"(rewards.max_infrastructure_failures); the last: task {record['task']}, prompt {record['id']}: "
                f"{verdict.get('detail')}"
            )
        return verdict


@dataclass
class _Work:
    """What the groups of one collection, or of a validation, have in common, and what they add up to.

    `generating`: groups that the engines have not answered yet.  `changed`: since `_hand_out` looked.
    """

    step: int
    version: int
    samples: int
    temperature: float
    top_p: float
    seed: int
    deadline: Deadline
    clock: OpenClock = field(default_factory=OpenClock)
    on_block: Callable[[list[Group]], None] | None = None
    blocks: Blocks = field(default_factory=lambda: Blocks(1, 1))
    generated_tokens: int = 0
    generating: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    sleep_s: float = 0.0
    over: bool = False

    def end(self) -> None:
        """Nothing follows any more."""
        self.over = True
        self.changed.set()


def _can_teach(group: Group) -> bool:
    """Fewer than 2 valid responses have no advantage to learn from."""
    return sum(group.valid) >= min(2, len(group.valid))


async def _judged(group: "Group | asyncio.Task[Group]") -> Group:
    return group if isinstance(group, Group) else await group
