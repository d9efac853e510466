"""Measurement of the engines' load during a rollout, from the number of open responses over time.

A response is open from its request until it ends.  The tail is the last part of a rollout, in which few responses are
open: it begins when their number falls for good to TAIL_SHARE (5 %) of its maximum, or to 1; it ends with the last
response.
"""

import time

TAIL_SHARE = 0.05  # the tail begins when open responses stay at or below this share of their maximum


class OpenResponses:
    """Record of the number of open responses of all engines over time.

    `begin` starts a measurement.  `end` returns its values, which metrics.jsonl contains under `time/rollout/`.
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._open: dict[str, int] = {}  # open responses by engine
        self._lost: set[str] = set()  # engines that failed and did not answer since then
        self._total, self._requested = 0, 0
        self._seen: list[tuple[float, int, int, int]] = []  # time, open responses, busy engines, lost engines
        self._began: float | None = None
        self.kv_cache_peak: float | None = None  # None: no engine has reported it since `begin`
        self._preemptions = 0

    def changed(self, engine: str, by: int) -> None:
        """Record that the number of open responses of this engine changed by `by`."""
        self._open[engine] = self._open.get(engine, 0) + by
        self._total += by
        if self._began is not None:
            self._requested += max(0, by)
            self._note()

    def lost(self, engine: str) -> None:
        """Record that this engine failed."""
        if engine not in self._lost:
            self._lost.add(engine)
            self._note()

    def answered(self, engine: str) -> None:
        """Record that this engine answers, perhaps again after a failure."""
        if engine in self._lost:
            self._lost.discard(engine)
            self._note()

    def kv_cache_used(self, share: float, preemptions: int) -> None:
        """Record that an engine had up to this share (0 to 1) of its KV cache in use, and its preemptions."""
        if self._began is not None:
            self.kv_cache_peak = max(share, self.kv_cache_peak or 0.0)
            self._preemptions += preemptions

    def begin(self) -> None:
        self._requested, self._began, self._seen = self._total, time.monotonic(), []
        self.kv_cache_peak, self._preemptions = None, 0
        self._note()

    def _note(self) -> None:
        if self._began is not None:
            busy = sum(map(bool, self._open.values()))
            self._seen.append((time.monotonic(), self._total, busy, len(self._lost)))

    def end(self) -> dict[str, float]:
        """End the measurement and return its values.

        Returns:
            `responses`: number of requested responses.  `tail_s`: length of the tail in seconds.  `tail_responses`:
            open responses when the tail began.  `idle_s`: seconds without work, mean over the engines.  Before the
            tail, an engine without an open response is idle; in the tail, the share of idle engines is taken to be
            1 - open responses / maximum of open responses.  `lost_s`: seconds between the failure of an engine and its
            next answer, mean over the engines.  `preemptions`: responses that lost their part of a full KV cache and
            were computed again; absent if no engine reported them.
        """
        assert self._began is not None, "begin was not called"
        began, over, self._began = self._began, time.monotonic(), None
        most = max(total for _, total, *_ in self._seen)
        few = max(1, int(TAIL_SHARE * most))
        # Time of the last record with open responses: the record before the last response ended.
        last = max((at for at, total, *_ in self._seen if total), default=began)
        ended = next((at for at, total, *_ in self._seen if at >= last and not total), over)
        full = max((k for k, (_, total, *_) in enumerate(self._seen) if total > few), default=-1) + 1
        tail_at = self._seen[full][0] if most > few and full < len(self._seen) else ended
        idle = lost = 0.0
        ends = [*(at for at, *_ in self._seen[1:]), over]
        for (at, total, busy, absent), until in zip(self._seen, ends, strict=True):
            used = total / most if at >= tail_at and most else busy / max(1, self._engines)
            idle += (until - at) * (1.0 - min(1.0, used))
            lost += (until - at) * absent / max(1, self._engines)
        return {
            "responses": float(self._requested),
            "tail_s": max(0.0, ended - tail_at),
            "tail_responses": float(self._seen[full][1]) if ended > tail_at else 0.0,
            "idle_s": min(idle, over - began),
            "lost_s": min(lost, over - began),
            **({} if self.kv_cache_peak is None else {"preemptions": float(self._preemptions)}),
        }
