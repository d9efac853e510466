"""Checks of prepared records with their reward plugin: valid truths, and gold answers that score 1."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from nemo_prorl.data.records import PromptRecord
from nemo_prorl.errors import RewardFailure

_log = logging.getLogger(__name__)

_IN_FLIGHT = 64  # requests in flight per worker
_LOG_EVERY_S = 30.0


class Truths:
    """Validator of truths by the plugin of a task.  Raises ConfigError for a task without a plugin."""

    def __init__(self, task: str) -> None:
        from nemo_prorl.rewards.discovery import discover, make_plugin

        self._plugin = make_plugin(discover().plugin_of_task(task))

    def fault(self, truth: dict[str, Any]) -> str | None:
        """Return why the plugin refuses a truth; None for a valid truth."""
        try:
            self._plugin.validate_truth(truth)
        except ValueError as error:
            return str(error)
        return None


def spread(count: int, wanted: int | None) -> list[int]:
    """Return `wanted` of `count` positions, evenly spread and deterministic; all if `wanted` is None."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted({index * count // wanted for index in range(wanted)})


def failures(
    records: Sequence[PromptRecord], golds: Sequence[str], workers: int, unsafe_no_sandbox: bool
) -> dict[int, str]:
    """Judge gold answers with the reward service; return position -> reason for each score below 1.

    Raises UnfitMachine if programs need a sandbox and no sandbox works, RewardFailure if the service cannot judge.
    """
    if not records:
        return {}
    return asyncio.run(_judge(records, golds, workers, unsafe_no_sandbox))


async def _judge(
    records: Sequence[PromptRecord], golds: Sequence[str], workers: int, unsafe_no_sandbox: bool
) -> dict[int, str]:
    from nemo_prorl.rewards.discovery import discover
    from nemo_prorl.rewards.interface import RewardRequest, Verdict
    from nemo_prorl.rewards.judging import RewardService, pool_specs

    registry, tasks = discover(), sorted({record["task"] for record in records})
    service = RewardService(pool_specs(registry, tasks, workers, unsafe_no_sandbox=unsafe_no_sandbox), registry)
    failed: dict[int, str] = {}
    waiting: deque[tuple[int, asyncio.Task[Verdict]]] = deque()
    logged_at = time.monotonic()

    async def settle() -> None:
        nonlocal logged_at
        at, future = waiting.popleft()
        verdict = await future
        if verdict["score"] is None:
            raise RewardFailure(f"the gold answer of {records[at]['id']} cannot be judged: {verdict['detail']}")
        if verdict["score"] < 1.0:
            failed[at] = f"score {verdict['score']:g}: {verdict['detail']}"
        if time.monotonic() - logged_at >= _LOG_EVERY_S:
            logged_at = time.monotonic()
            _log.info("judged %d of %d gold answers", at + 1, len(records))

    await service.start()
    try:
        for at, (record, gold) in enumerate(zip(records, golds, strict=True)):
            request = RewardRequest.from_json({**record, "response": gold, "finished": True})
            waiting.append((at, asyncio.create_task(service.judge(request))))
            if len(waiting) >= workers * _IN_FLIGHT:
                await settle()
        while waiting:
            await settle()
    finally:
        await service.close()
    return failed
