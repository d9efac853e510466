"""An event loop on a background thread, for the requests of a collector."""

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
_GIVEN_UP = "the rollout was abandoned, because it took too long after a stop request"


class BackgroundLoop:
    """Runs coroutines on one event loop on a background thread.

    Errors are raised where the caller waits for the result.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None  # task of the latest work
        self._abandoned = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Start `work` and return its result once it has ended.  `work` itself must have deadlines."""
        return self.result(self.start(work))

    def start(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        """Start `work` and return immediately.  Call this only when no earlier work runs.

        Raises the errors of `check`.
        """
        try:
            self.check()
        except ProrlError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._as_current_task(work), self._loop)

    def check(self) -> None:
        """Raise StoppedCleanly after `close`, RolloutAbandoned after `abandon`: no more work may be started."""
        if self._loop.is_closed():
            raise StoppedCleanly("the rollouts are closed")
        if self._abandoned:
            raise RolloutAbandoned(_GIVEN_UP)

    def result(self, future: "concurrent.futures.Future[_T]") -> _T:
        """Wait for the work that `start` began and return its result.  A signal in the waiting thread cancels the work.

        Raises the first error of the work, never an exception group; StoppedCleanly if `close` cancelled the work;
        RolloutAbandoned if `abandon` cancelled it.
        """
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._abandoned:
                raise RolloutAbandoned(_GIVEN_UP) from None
            raise StoppedCleanly("the rollouts were closed before the result was ready") from None
        except BaseException:
            future.cancel()
            raise

    async def _as_current_task(self, work: Coroutine[Any, Any, _T]) -> _T:
        self._task = asyncio.current_task()
        if self._abandoned:  # `abandon` was called before this task began
            work.close()
            raise asyncio.CancelledError
        return await _first_error_of(work)

    def abandon(self) -> None:
        """Cancel the running work and start no other; do nothing after `close`.  Any thread may call this.

        Afterwards `result` and every new start raise RolloutAbandoned.  `result` returns only when the cancelled work
        has ended, so that no request stays in flight.
        """
        self._abandoned = True
        if self._loop.is_closed():
            return
        _log.warning("abandoning the rollout in progress, if there is one")

        def cancel() -> None:
            if self._task is not None:
                self._task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    def close(self, last: Coroutine[Any, Any, None], seconds: float = 10.0) -> None:
        """Cancel the running work, run `last`, and end the thread, in at most 2 * `seconds`; do nothing if closed."""
        if self._loop.is_closed():
            last.close()
            return

        async def cancel_and_finish() -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task])
            await last

        with contextlib.suppress(Exception):  # unfinished work ends with the process
            asyncio.run_coroutine_threadsafe(cancel_and_finish(), self._loop).result(seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._loop.close()


async def _first_error_of(work: Awaitable[_T]) -> _T:
    """Return the result of `work`.  If it raises an exception group, raise the first error in the group instead."""
    try:
        return await work
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
