"""Health checks of a node's services: a process that runs but does not answer is killed and started again."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.launcher.processes import Child
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX
from nemo_prorl.service import ServiceEndpoint, ask

_log = logging.getLogger(__name__)

_PATHS = {"engine": "/health", "rewards": "/v1/health"}
_EVERY_S = 10.0  # longest time in seconds between two checks of a service


class Health:
    """Regular health checks with one thread per service; `update` acts on their results."""

    def __init__(self, services: Sequence[Child], token_file: Path, deadlines: DeadlinesConfig) -> None:
        self._services, self._token_file, self._deadlines = services, token_file, deadlines
        self._faults: dict[str, tuple[int, str]] = {}  # by service: id of the process to kill, and what it failed to do
        self._closed = threading.Event()
        for child in services:
            threading.Thread(target=self._watch, args=(child,), daemon=True, name=f"health {child.name}").start()

    def update(self) -> None:
        """Kill services that did not answer for too long.  Call this in the thread that restarts them."""
        for child in self._services:
            pid, fault = self._faults.pop(child.name, (None, ""))
            if child.process is not None and child.process.pid == pid:
                _log.warning("%s %s; killing and restarting it", child.name, fault)
                child.kill_group()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, child: Child) -> None:
        limit, startup_s = self._deadlines.health_s, self._deadlines.startup_s
        pid, since = None, time.monotonic()  # process that is checked; its start, or its last answer
        while not self._closed.wait(min(_EVERY_S, limit / 4)):
            process, now = child.process, time.monotonic()
            if process is None or process.poll() is not None or process.pid != pid:
                pid, since = None if process is None else process.pid, now
            elif (url := _url(child, process.pid)) is None:
                if _is_held(child):
                    since = now
                elif now - since > startup_s:
                    fault = (
                        f"was not ready within {startup_s:g} s (trainer.deadlines.startup_s; a busy machine needs more)"
                    )
                    self._faults[child.name] = process.pid, fault
            elif self._answers(url):
                since = time.monotonic()
            elif time.monotonic() - since > limit:
                fault = f"did not answer for {limit:g} s (trainer.deadlines.health_s)"
                self._faults[child.name] = process.pid, fault

    def _answers(self, url: str) -> bool:
        try:
            ask(url, self._token_file.read_text().strip(), max(1.0, self._deadlines.health_s / 2))
        except (OSError, ValueError):
            return False
        return True


def _is_held(child: Child) -> bool:
    """Return whether this is an engine whose start waits until the other engines sleep (`rollout.sleep`)."""
    return child.endpoint is not None and child.endpoint.with_suffix(HELD_SUFFIX).exists()


def _url(child: Child, pid: int) -> str | None:
    """Return the address for health checks of a service; None until the process `pid` is ready."""
    endpoint = None if child.endpoint is None else ServiceEndpoint.read(child.endpoint)
    if endpoint is None or endpoint.pid != pid or not endpoint.ready:
        return None
    return endpoint.url + _PATHS[endpoint.kind]
