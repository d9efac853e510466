"""Whether the services of a node answer.  One that lives and says nothing, a hung core, is killed and started again."""

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.launcher.processes import Child
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX

_log = logging.getLogger(__name__)

_PATHS = {"engine": "/health", "rewards": "/v1/health"}
_EVERY_S = 10.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between a run's own processes


class Health:
    """Asks every service now and then, each in a thread of its own; `update` acts on what they said."""

    def __init__(self, services: Sequence[Child], token_file: Path, deadlines: DeadlinesConfig) -> None:
        self._token_file, self._deadlines = token_file, deadlines
        self._closed = threading.Event()
        self._asked = [_Asked(child) for child in services]
        for asked in self._asked:
            threading.Thread(target=self._watch, args=(asked,), daemon=True, name=f"health {asked.child.name}").start()

    def update(self) -> None:
        """Kills what was silent too long.  In the supervisor's own thread, which starts it again."""
        for asked in self._asked:
            if asked.verdict is not None:
                _log.warning("%s %s; it is killed and started again", asked.child.name, asked.verdict)
                asked.child.kill_group()
                asked.begin()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, asked: "_Asked") -> None:
        limit = self._deadlines.health_s
        while not self._closed.wait(min(_EVERY_S, limit / 4)):
            process = asked.child.process
            if process is None or process.poll() is not None or process.pid != asked.pid:
                asked.begin()
                continue
            now = time.monotonic()
            if (url := asked.url()) is None:
                if asked.held:
                    asked.since = now
                elif now - asked.since > self._deadlines.startup_s:
                    asked.verdict = f"was not ready {self._deadlines.startup_s:g} s (trainer.deadlines.startup_s) on"
            elif self._answers(url):
                asked.since = time.monotonic()
            elif time.monotonic() - asked.since > limit:
                asked.verdict = f"does not answer for {limit:g} s (trainer.deadlines.health_s)"

    def _answers(self, url: str) -> bool:
        try:
            headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
            request = urllib.request.Request(url, headers=headers)
            with _DIRECT.open(request, timeout=max(1.0, self._deadlines.health_s / 2)) as reply:
                return bool(reply.status == 200)
        except (OSError, ValueError):
            return False


class _Asked:
    """One service, and since when it has been silent."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.begin()

    def begin(self) -> None:
        """A process has just started, or none runs."""
        process = self.child.process
        self.pid = None if process is None else process.pid
        self.since = time.monotonic()
        self.verdict: str | None = None

    @property
    def held(self) -> bool:
        """Whether it is an engine that waits with its start until the others wake (`rollout.sleep`)."""
        return self.child.endpoint is not None and self.child.endpoint.with_suffix(HELD_SUFFIX).exists()

    def url(self) -> str | None:
        """Where this very process said that it is ready."""
        if self.child.endpoint is None:
            return None
        try:
            told = json.loads(self.child.endpoint.read_text())
            if told["pid"] != self.pid or told["state"] != "ready":
                return None
            return str(told["url"]) + _PATHS[told["kind"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None
