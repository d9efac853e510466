"""An event loop in a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from nemo_prorl.errors import ProrlError, RolloutAbandoned, StoppedCleanly

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_GIVEN_UP = "the rollout was given up, because it took too long after a stop"


class BackgroundLoop:
    """Runs coroutines on one event loop in a thread; their errors surface where they are waited for."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None  # of what was started last
        self._abandoned = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Start `work` and wait for its result; it has the deadlines."""
        return self.result(self.start(work))

    def start(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        """Begins `work`, one at a time, and returns at once.  Raises StoppedCleanly or RolloutAbandoned as `result`."""
        try:
            self.check()
        except ProrlError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._remembered(work), self._loop)

    def check(self) -> None:
        """Raise StoppedCleanly or RolloutAbandoned, if nothing may be started any more."""
        if self._loop.is_closed():
            raise StoppedCleanly("the rollouts are closed")
        if self._abandoned:
            raise RolloutAbandoned(_GIVEN_UP)

    def result(self, future: "concurrent.futures.Future[_T]") -> _T:
        """Waits for what was started.  An interrupt of the caller (a signal) cancels it.

        Raises what the work raises, without exception groups; StoppedCleanly if `close` cancelled it, RolloutAbandoned
        if `abandon` did.
        """
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._abandoned:
                raise RolloutAbandoned(_GIVEN_UP) from None
            raise StoppedCleanly("the rollouts were closed while they were waited for") from None
        except BaseException:
            future.cancel()
            raise

    async def _remembered(self, work: Coroutine[Any, Any, _T]) -> _T:
        self._task = asyncio.current_task()
        if self._abandoned:  # between the look at it and here
            work.close()
            raise asyncio.CancelledError
        return await _first_error_of(work)

    def abandon(self) -> None:
        """Cancel what runs, for good; may be called from any thread.

        From then on `result` and every new start raise RolloutAbandoned.
        `result` returns only when the cancelled work has ended: nothing goes on behind its caller's back.
        """
        self._abandoned = True
        _log.warning("giving up the rollout under way, if there is one")

        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(cancel)

    def close(self, last: Coroutine[Any, Any, None], seconds: float = 10.0) -> None:
        """Cancels all that runs, does `last`, and ends the thread.  A second call does nothing."""
        if self._loop.is_closed():
            last.close()
            return

        async def wind_up() -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            await last

        with contextlib.suppress(Exception):  # what is left over ends with the process
            asyncio.run_coroutine_threadsafe(wind_up(), self._loop).result(seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()


async def _first_error_of(work: Awaitable[_T]) -> _T:
    """The result; of an exception group only its first error, which is the one that ended the others."""
    try:
        return await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
