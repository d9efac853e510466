"""Timeline of a step: spans of all processes of the run, in RUN/traces/step-N.json (`nemo_prorl.tracing`).

Rank 0 requests the spans of engines and reward servers; other ranks write theirs to a file.  A thread merges the parts
while the run continues.  The trace names each process that did not answer in time.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded
from nemo_prorl.files import write_json
from nemo_prorl.service import ServiceEndpoint, ask, read_token
from nemo_prorl.tracing import RECORDER, timeline

_log = logging.getLogger(__name__)

_BEGIN_S, _END_S = 2.0, 10.0  # seconds for a service to accept the request; seconds for all parts
_PATHS = {"engine": "/trace", "rewards": "/v1/trace"}


@dataclass(eq=False, repr=False)
class StepTraces:
    """The timelines of a run, one object per rank."""

    dir: Path  # the run directory
    steps: Sequence[int]  # steps to trace
    rank: int
    ranks: int
    services: dict[str, int]  # number of engines and reward servers when all are healthy

    def __post_init__(self) -> None:
        self._merging: threading.Thread | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the spans inside the context, if this step is to be traced."""
        if step not in self.steps:
            yield
            return
        folder = self.dir / "traces" / f"step-{step}.parts"
        missing: dict[str, str] = {}
        if self.rank == 0:
            self.close()  # the previous step may be traced, too, and its parts are still being collected
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed start
            _, missing = self._ask(True, _BEGIN_S)
        began = time.monotonic()
        RECORDER.start(f"trainer-{self.rank}")
        try:
            yield
        except BaseException:  # the run may end without it
            self._end(step, folder, (began, time.monotonic()), missing)
            self.close()
            raise
        self._end(step, folder, (began, time.monotonic()), missing)

    def close(self) -> None:
        """Wait at most 30 s for the last trace to be written."""
        if self._merging is not None:
            self._merging.join(3 * _END_S)

    def _end(self, step: int, folder: Path, window: tuple[float, float], missing: dict[str, str]) -> None:
        RECORDER.add(f"step {step}", "step", *window)
        part = RECORDER.stop()
        if self.rank > 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / f"trainer-{self.rank}.json", part, indent=None)
            return
        self.close()
        arguments = (step, folder, window, part, missing)
        self._merging = threading.Thread(target=self._merge, args=arguments, name="trace", daemon=True)
        self._merging.start()

    def _merge(
        self, step: int, folder: Path, window: tuple[float, float], own: dict[str, Any], missing: dict[str, str]
    ) -> None:
        """Write the trace of the parts that arrive before the deadline.

        Args:
            folder: folder in which the other ranks write their parts.
            window: begin and end of the step, in seconds on this rank's monotonic clock.
            own: part of rank 0.
            missing: {name of the service: error} of the services that did not begin to record.
        """
        try:
            deadline = Deadline(_END_S, f"the parts of the trace of step {step}")
            answered, unanswered = self._ask(False, deadline.remaining)
            parts, late = self._parts_of_ranks(folder, deadline)
            offsets = {part["boot"]: part["wall_offset"] for part in answered}
            for part in parts:  # offsets of the services on its node
                part["wall_offset"] = offsets.get(part["boot"], 0.0)
            path = self.dir / "traces" / f"step-{step}.json"
            path.parent.mkdir(exist_ok=True)
            merged = timeline(step, window, [own, *parts, *answered], {**missing, **unanswered, **late})
            write_json(path, merged, indent=None)
            shutil.rmtree(folder, ignore_errors=True)
            _log.info("step %d: its timeline is %s (open it at ui.perfetto.dev)", step, path)
        except Exception:  # a failed trace must not end a run
            _log.exception("step %d: its timeline could not be written", step)

    def _parts_of_ranks(self, folder: Path, deadline: Deadline) -> tuple[list[dict[str, Any]], dict[str, str]]:
        parts, late = [], {}
        for rank in range(1, self.ranks):
            file = folder / f"trainer-{rank}.json"
            try:
                deadline.wait_until(file.exists)
                parts.append(json.loads(file.read_text()))
            except (DeadlineExceeded, OSError, ValueError) as error:
                late[f"trainer-{rank}"] = str(error)
        return parts, late

    def _ask(self, record: bool, seconds: float) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Let all services begin (`record`) or end recording; wait at most `seconds` for each.

        Returns:
            The replies, and {name of the service: error} of the services that did not reply.
        """
        names = [f"{kind}-{k}" for kind, count in self.services.items() for k in range(count)]
        token = read_token(self.dir / "endpoints" / "token")
        answers, missing = [], {}
        with ThreadPoolExecutor(max_workers=32) as pool:
            replies = pool.map(partial(_ask_one, self.dir / "endpoints", token, record, seconds), names)
            for name, reply in zip(names, replies, strict=True):
                if isinstance(reply, str):
                    missing[name] = reply
                else:
                    answers.append(reply)
        return answers, missing


def _ask_one(endpoints: Path, token: str, record: bool, seconds: float, name: str) -> dict[str, Any] | str:
    """Let a service begin (`record`) or end recording; return its reply, or a text with the error.

    The reply gets `wall_offset`: seconds by which the service's clock is ahead of this machine's.
    """
    try:
        endpoint = ServiceEndpoint.read(endpoints / f"{name}.json")
        if endpoint is None:
            return f"{name}.json: no such endpoint file"
        began = time.time()
        answer: dict[str, Any] = json.loads(
            ask(endpoint.url + _PATHS[endpoint.kind], token, seconds, {"record": record})
        )
        ended = time.time()
        if "wall" in answer:
            answer["wall_offset"] = answer["wall"] - (began + ended) / 2
        return answer
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
