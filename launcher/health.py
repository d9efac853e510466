"""Health checks of a node's services: a process that runs but does not answer is killed and started again."""

import logging
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.launcher.processes import Child
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX
from nemo_prorl.service import Endpoint

_log = logging.getLogger(__name__)

_PATHS = {"engine": "/health", "rewards": "/v1/health"}
_EVERY_S = 10.0  # longest time in seconds between two checks of a service
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a run's processes need no proxy


class Health:
    """Regular health checks with one thread per service; `update` acts on their results."""

    def __init__(self, services: Sequence[Child], token_file: Path, deadlines: DeadlinesConfig) -> None:
        self._token_file, self._deadlines = token_file, deadlines
        self._closed = threading.Event()
        self._services = [_Service(child) for child in services]
        for service in self._services:
            name = f"health {service.child.name}"
            threading.Thread(target=self._watch, args=(service,), daemon=True, name=name).start()

    def update(self) -> None:
        """Kill services that did not answer for too long.  Call this in the thread that restarts them."""
        for service in self._services:
            if service.verdict is not None:
                _log.warning("%s %s; killing and restarting it", service.child.name, service.verdict)
                service.child.kill_group()
                service.begin()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, service: "_Service") -> None:
        limit = self._deadlines.health_s
        while not self._closed.wait(min(_EVERY_S, limit / 4)):
            process = service.child.process
            if process is None or process.poll() is not None or process.pid != service.pid:
                service.begin()
                continue
            now = time.monotonic()
            if (url := service.url()) is None:
                if service.held:
                    service.since = now
                elif now - service.since > self._deadlines.startup_s:
                    limit_s = self._deadlines.startup_s
                    service.verdict = f"was not ready within {limit_s:g} s (trainer.deadlines.startup_s)"
            elif self._answers(url):
                service.since = time.monotonic()
            elif time.monotonic() - service.since > limit:
                service.verdict = f"did not answer for {limit:g} s (trainer.deadlines.health_s)"

    def _answers(self, url: str) -> bool:
        try:
            headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
            request = urllib.request.Request(url, headers=headers)
            with _DIRECT.open(request, timeout=max(1.0, self._deadlines.health_s / 2)) as reply:
                return bool(reply.status == 200)
        except (OSError, ValueError):
            return False


class _Service:
    """A service and the time of its last answer."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.begin()

    def begin(self) -> None:
        """Set the time of the last answer to now.

        Called when the service's process has just started, and repeatedly while no process runs.
        """
        process = self.child.process
        self.pid = None if process is None else process.pid
        self.since = time.monotonic()
        self.verdict: str | None = None

    @property
    def held(self) -> bool:
        """Return whether this is an engine whose start waits until the other engines sleep (`rollout.sleep`)."""
        return self.child.endpoint is not None and self.child.endpoint.with_suffix(HELD_SUFFIX).exists()

    def url(self) -> str | None:
        """Return the address for health checks; None until the current process is ready."""
        if self.child.endpoint is None:
            return None
        endpoint = Endpoint.read(self.child.endpoint)
        if endpoint is None or endpoint.pid != self.pid or not endpoint.ready:
            return None
        return endpoint.url + _PATHS[endpoint.kind]
