"""When a request is judged again: one rule for the client of reward servers and for who has workers of their own."""

import asyncio
from collections.abc import Awaitable, Callable

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.interface import Verdict

RETRIES = 2  # of a verdict "infrastructure": a worker died, or a plugin raised
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 5.0


async def until_judged(
    attempt: Callable[[], Awaitable[Verdict | None]],
    deadline: Deadline,
    on_retry: Callable[[Verdict | None], None] = lambda _: None,
) -> Verdict | None:
    """Return the first verdict that is a judgement, or the last "infrastructure"; None once the deadline has passed.

    Args:
        attempt: asks for a verdict; None if no verdict came, which may be tried again until the deadline.
        on_retry: called with what an attempt gave before another attempt is made.
    """
    failures, backoff = 0, _FIRST_BACKOFF_S
    while not deadline.passed:
        verdict = await attempt()
        if verdict is not None:
            failures += verdict["failure"] == "infrastructure"
            if verdict["failure"] != "infrastructure" or failures > RETRIES:
                return verdict
        on_retry(verdict)
        await asyncio.sleep(min(backoff, deadline.remaining))
        backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
    return None
