"""Second verifiers: plugins that judge a sample of a run's responses again, by other means than the task's own plugin.

A plugin names the task of its second verifier in `RewardPlugin.second`.  About one response in 100 is judged again, at
most MOST_PER_STEP in a step, through the same client and servers, once its own verdict has arrived.  No training reads
a second verdict, and a step waits at most WAIT_S for the last of them.  A verdict that is missing, or for which the
second verifier took too long, counts as nothing; so does a response whose truth the second verifier cannot judge by.

Which responses are in the sample follows from the seed and from the number of the response in the run, so a resumed run
has the same sample.  The counts of a step are its metrics `second/*`.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.discovery import Registry, make_plugin
from nemo_prorl.rewards.interface import Verdict, is_right

RESPONSES_PER_SECOND = 100  # responses of which one is judged again
MOST_PER_STEP = 40
KEPT_PER_STEP = 4  # disagreements of a step that are stored with their texts
WAIT_S = 2.0  # seconds that a step waits for second verdicts after all its other work


class SecondVerifiers:
    """The second verifiers of a run's tasks, and the choice of the responses that they judge."""

    def __init__(
        self, registry: Registry, tasks: Iterable[str], settings: Mapping[str, dict[str, Any]], seed: int
    ) -> None:
        """Find the second verifiers.

        Args:
            tasks: Tasks that the run trains on.
            settings: Settings by plugin name.

        Raises:
            ConfigError: The second verifier of a task is not installed.
        """
        self._seed = seed
        self._of_task = {}
        for task in sorted(set(tasks)):
            if second := registry.second_of(task):
                plugin = registry.plugin_of_task(second)
                self._of_task[task] = second, make_plugin(plugin, settings.get(plugin.name))

    @classmethod
    def none(cls) -> "SecondVerifiers":
        return cls(Registry({}, {}), (), {}, 0)

    def chooses(self, number: int) -> bool:
        """Return whether the response of this number (from 0) is in the sample: one of each hundred, by a hash."""
        block, place = divmod(number, RESPONSES_PER_SECOND)
        digest = hashlib.sha256(f"{self._seed} {block}".encode()).digest()
        return int.from_bytes(digest) % RESPONSES_PER_SECOND == place

    def task_for(self, request: Mapping[str, Any]) -> str:
        """Return the second verifier's task for a request; empty if there is none, or its `truth` does not suit it."""
        second, plugin = self._of_task.get(request["task"], ("", None))
        if plugin is not None:
            try:
                plugin.validate_truth(request["truth"])
            except ValueError:
                return ""
        return second


class SecondVerdicts:
    """The second verdicts of one step.

    Use it as an async context manager around the step's other requests: its end waits for open verdicts, at most
    WAIT_S, and not at all after an error.
    """

    def __init__(
        self,
        verifiers: SecondVerifiers,
        score: Callable[[dict[str, Any], Deadline], Awaitable[Verdict]],
        seconds: float,
        first: int,
    ) -> None:
        """Begin a step.

        Args:
            score: Returns the verdict on a request.
            seconds: Deadline of a second verdict.
            first: Number of the step's first response.
        """
        self._verifiers, self._score, self._seconds = verifiers, score, seconds
        self._end = first + RESPONSES_PER_SECOND * MOST_PER_STEP  # number after the last response that may be chosen
        self._open: dict[int, asyncio.Task[dict[str, Any] | None]] = {}  # keys: numbers of responses
        self.counts: dict[str, int] = {}  # judged/TASK and disagreed/TASK; TASK is the task that the run trains on
        self.disagreements: list[dict[str, Any]] = []  # the first KEPT_PER_STEP, each a request with both verdicts

    def offer(self, number: int, request: dict[str, Any], verdict: Verdict) -> None:
        """Request a second verdict on a judged response if the response is in the sample; return immediately."""
        if number >= self._end or verdict["score"] is None or not self._verifiers.chooses(number):
            return
        if second := self._verifiers.task_for(request):
            self._open[number] = asyncio.create_task(self._ask(request, verdict, second))

    async def _ask(self, request: dict[str, Any], verdict: Verdict, second: str) -> dict[str, Any] | None:
        """Return the request with both verdicts; None if the second verdict is missing."""
        deadline = Deadline(self._seconds, f"the second verdict on {request['id']}")
        second_verdict = await self._score({**request, "task": second}, deadline)
        if second_verdict["failure"] in ("timeout", "infrastructure"):
            return None
        return {**request, "verdict": verdict, "second_task": second, "second_verdict": second_verdict}

    async def __aenter__(self) -> "SecondVerdicts":
        return self

    async def __aexit__(self, error: object, *more: object) -> None:
        try:
            if self._open and error is None:
                await asyncio.wait(self._open.values(), timeout=WAIT_S)
        finally:
            for task in self._open.values():
                task.cancel()
            ended = await asyncio.gather(*self._open.values(), return_exceptions=True)
        for _, result in sorted(zip(self._open, ended, strict=True), key=lambda pair: pair[0]):
            if isinstance(result, dict):
                self._count(result)

    def _count(self, judged: dict[str, Any]) -> None:
        differs = is_right(judged["verdict"]) != is_right(judged["second_verdict"])
        for name, count in (("judged", 1), ("disagreed", int(differs))):
            key = f"{name}/{judged['task']}"
            self.counts[key] = self.counts.get(key, 0) + count
        if differs and len(self.disagreements) < KEPT_PER_STEP:
            self.disagreements.append(judged)
