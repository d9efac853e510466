"""`on_event`: a command that is called with each alarm, reset, failure, stop and finish of a run.

The supervisor calls it, from what the run writes in its journal and from what it sees of the processes, so that a hook
can neither delay nor end the training, and hears of a trainer that was killed.  The command is split as a shell would,
run without one, in its own session; standard input is the event as one JSON object.

    python -m nemo_prorl.launcher.events COMMAND RUN WHAT     a failure that only the batch script sees
"""

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Unpack

from nemo_prorl.launcher.formats import HookEvent, HookFields, HookName
from nemo_prorl.lifecycle.records import Tail, last_lines

_log = logging.getLogger(__name__)

_AT_ONCE = 3  # processes of the hook
_WAITING = 16  # events; the oldest give way to the newest
_KILL_AFTER_S = 60.0
_GRACE_S = 5.0  # for what is still to be told when the run ends
_ENV_CHARS = 4000

# Events of the journal: what the hook hears of them, and the field that says what happened.
_TOLD: dict[str, tuple[HookName, str]] = {
    "alarm": ("alarm", "what"),
    "reset_commit": ("reset", "reason"),
    "stop": ("stop", "reason"),
}


@dataclass
class _Call:
    process: "subprocess.Popen[bytes]"
    what: str
    end: float


class Events:
    """Calls the hook of a run; without a command does nothing.  `update` must be called now and then.

    As a context manager around the run: an exception that leaves it is a failure, and what is still to be told gets a
    few seconds.  Nothing here raises for what the hook does.
    """

    def __init__(
        self, command: str | None, run_dir: Path, kill_after_s: float = _KILL_AFTER_S, grace_s: float = _GRACE_S
    ) -> None:
        self.command = shlex.split(command) if command else []
        self.dir, self.log_file = run_dir, run_dir / "logs" / "on_event.log"
        self._kill_after_s, self._grace_s = kill_after_s, grace_s
        self._journal = Tail(run_dir / "journal.jsonl")
        self._waiting: deque[HookEvent] = deque()
        self._running: list[_Call] = []
        self._dropped = 0
        self._complained = False

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            what, *more = (str(error) or type(error).__name__).splitlines()
            fields: HookFields = {"kind": type(error).__name__}
            if more:
                fields["log"] = more
            self.failure(what, **fields)
        self.close()

    def failure(self, what: str, **fields: Unpack[HookFields]) -> None:
        """Call the hook with the failure that ends the run."""
        self.update()  # first what it wrote down itself
        self.tell("failure", last_step(self.dir), what, **fields)

    def tell(self, event: HookName, step: int, what: str, **fields: Unpack[HookFields]) -> None:
        """Calls the hook in the background, now or when an earlier call has ended."""
        if not self.command:
            return
        about: HookEvent = {
            "event": event,
            "step": step,
            "what": what,
            "time": time.time(),
            "run_dir": str(self.dir),
            "host": socket.gethostname(),
            **fields,
        }
        if len(self._waiting) == _WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(about)
        self._proceed()

    def update(self) -> None:
        """Call the hook for new lines of the journal, and look after the calls under way."""
        if not self.command:
            return
        for line in self._journal.read():
            name, step = line.get("event"), line.get("step")
            if not isinstance(step, int):
                continue
            if name == "finish":
                self.tell("finish", step, f"finished after step {step}")
            elif name in _TOLD:
                event, field = _TOLD[name]
                self.tell(event, step, str(line.get(field, "")), journal=line)
        self._proceed()

    def close(self) -> None:
        """Give waiting calls a few seconds, then kill those that still run."""
        self.update()
        end = time.monotonic() + self._grace_s
        try:
            while (self._running or self._waiting) and time.monotonic() < end:
                time.sleep(0.02)
                self._proceed()
        finally:
            for call in self._running:
                self._kill(call, f"was killed at the run's end, {self._grace_s:g} s after it")
            if self._waiting:
                self._complain(f"{len(self._waiting)} events could not be told before the run's end")
            self._running, self._waiting = [], deque()

    def _proceed(self) -> None:
        """Note ended calls, kill slow ones, and start waiting ones."""
        for call in list(self._running):
            status = call.process.poll()
            if status is None and time.monotonic() >= call.end:
                self._kill(call, f"was killed after {self._kill_after_s:g} s")
            elif status is None:
                continue
            elif status != 0:
                self._complain(f"for {call.what} it ended with status {status}")
            self._running.remove(call)
        while self._waiting and len(self._running) < _AT_ONCE:
            self._start(self._waiting.popleft())

    def _start(self, about: HookEvent) -> None:
        if self._dropped:
            self._note(f"{self._dropped} events were dropped: too many at once")
            about["dropped"], self._dropped = self._dropped, 0
        what = f"{about['event']} of step {about['step']}"
        values = {"event": about["event"], "run_dir": self.dir, "step": about["step"], "what": about["what"]}
        env = {f"PRORL_{k.upper()}": str(v).replace("\0", "")[:_ENV_CHARS] for k, v in values.items()}
        self._note(f"{what}: {about['what']}")
        try:
            with tempfile.TemporaryFile() as given, self._open_log() as log:
                given.write(json.dumps(about).encode() + b"\n")
                given.seek(0)
                process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **env},
                    stdin=given,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_deaf_to_stop,  # noqa: PLW1509 - one system call, which takes no lock
                )
        except (OSError, ValueError) as error:
            self._complain(f"for {what} it could not be started: {error}")
            return
        self._running.append(_Call(process, what, time.monotonic() + self._kill_after_s))

    def _kill(self, call: _Call, why: str) -> None:
        try:
            os.killpg(call.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        call.process.wait()
        self._complain(f"for {call.what} it {why}")

    def _complain(self, text: str) -> None:
        """Write to the hook's log each time, to the run's once."""
        self._note(text)
        if not self._complained:
            _log.warning("on_event=%s: %s; %s has more, and tells of later ones", self.command[0], text, self.log_file)
        self._complained = True

    def _open_log(self) -> BinaryIO:
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            return self.log_file.open("ab", buffering=0)
        except OSError:
            return Path(os.devnull).open("ab", buffering=0)

    def _note(self, text: str) -> None:
        try:
            with self._open_log() as log:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
        except OSError:
            pass  # a full disk is told by others


def _deaf_to_stop() -> None:
    """Ignore Slurm's signal to stop, which it sends to every process of a task.  A shell lifts a signal's block."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def last_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl; 0 without one."""
    for line in reversed(last_lines(run_dir / "metrics.jsonl")):
        if isinstance(line.get("step"), int):
            return int(line["step"])
    return 0


if __name__ == "__main__":
    with Events(sys.argv[1], Path(sys.argv[2])) as _events:
        _events.failure(sys.argv[3])
