"""The retry rule for reward requests, shared by the client of reward servers and by callers with local workers."""

import asyncio
from collections.abc import Awaitable, Callable

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.service import Pause

RETRIES = 2  # after an "infrastructure" verdict: a worker died, or a plugin raised an exception


async def until_judged(
    attempt: Callable[[], Awaitable[Verdict | None]],
    deadline: Deadline,
    on_retry: Callable[[Verdict | None], None] = lambda _: None,
) -> Verdict | None:
    """Request verdicts until one is not "infrastructure", RETRIES are used up, or the deadline has passed.

    Args:
        attempt: Requests one verdict.  None means that no verdict arrived; this is repeated without limit until the
            deadline.
        on_retry: Called after each attempt that will be repeated, with the result of the attempt.

    Returns:
        The first verdict that is not "infrastructure", or the "infrastructure" verdict after the last retry; None if
        the deadline passed before.
    """
    failures, pause = 0, Pause()
    while not deadline.passed:
        verdict = await attempt()
        if verdict is not None:
            failures += verdict["failure"] == "infrastructure"
            if verdict["failure"] != "infrastructure" or failures > RETRIES:
                return verdict
        on_retry(verdict)
        pause.failed()
        await asyncio.sleep(min(pause.left_s, deadline.remaining))
    return None
