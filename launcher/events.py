"""`on_event`: the hook command that is called with each alarm, reset, failure, stop and finish of a run.

The supervisor calls the hook, after new lines of the run's journal and after failures of processes, and writes these
failures to the journal.  So a hook can neither delay nor end the training, and a failure is also reported if the
trainer was killed.  The command is split into words as by a shell and started without a shell, in a new session.  Its
standard input is the event as one JSON object.

    python -m nemo_prorl.launcher.events COMMAND RUN WHAT     report a failure that only the batch script sees
"""

import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Unpack

from nemo_prorl.files import Tail, last_objects
from nemo_prorl.launcher.formats import HookEvent, HookFields, HookName
from nemo_prorl.lifecycle.run_records import Journal

_log = logging.getLogger(__name__)

_MAX_CALLS = 3  # hook processes at the same time
_MAX_WAITING = 16  # events; when more wait, the oldest is dropped
_KILL_AFTER_S = 60.0
_GRACE_S = 5.0  # seconds for unfinished calls when the run ends
_ENV_CHARS = 4000  # maximum length of an environment variable of the hook

# For each event of the journal: the event of the hook, and the field of the journal that describes it.
_HOOK_EVENTS: dict[str, tuple[HookName, str]] = {
    "alarm": ("alarm", "what"),
    "reset_commit": ("reset", "reason"),
    "stop": ("stop", "reason"),
}
# The error in a line of a process's log: a message of our own, or the last line of a Python traceback.
_ERROR = re.compile(r" ERROR [\w.]+: (.+)|^((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure|Exit|Interrupt)\b.*)")

# The first line of a record of any logger; NeMo's and Lightning's have forms of their own.
_RECORD = re.compile(r"\[NeMo |[A-Z]+: |\d{4}-\d\d-\d\d \S+ [A-Z]+ [\w.]+: ")


@dataclass
class _Call:
    process: "subprocess.Popen[bytes]"
    what: str
    end: float


class Events:
    """Calls the hook, the user's `on_event` command, for each event of a run.  Without a command it does nothing.

    Call `update` regularly.

    Use it as a context manager around the run: an exception that leaves the block becomes a failure event, and
    unfinished calls get `grace_s` seconds.  Errors of the hook are logged and never raised.
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
            message, *more = (str(error) or type(error).__name__).splitlines()
            fields: HookFields = {"kind": type(error).__name__}
            if more:
                fields["log"] = more
            self.failure(message, **fields)
        self.close()

    def failure(self, message: str, **fields: Unpack[HookFields]) -> None:
        """Write the failure that ends the run to the journal, and call the hook with it."""
        self.update()  # events of the journal come first
        self._record("failure", _reason(message, fields.get("log", ())))
        self.emit("failure", last_step(self.dir), message, **fields)

    def stopped(self, reason: str) -> None:
        """Write to the journal that a signal ended the run while its trainer started.  `update` calls the hook."""
        self._record("stop", reason)

    def _record(self, event: str, reason: str) -> None:
        if (self.dir / "config.yaml").is_file():  # otherwise no run has begun in this folder
            with suppress(OSError):  # the disk may be full, and the reason is also in the log
                Journal(self.dir).append(event, last_step(self.dir), reason=reason)

    def emit(self, event: HookName, step: int, description: str, **fields: Unpack[HookFields]) -> None:
        """Call the hook in the background, now or when an earlier call has ended.

        Args:
            step: last step of the run, 0 before the first.
            description: what happened, in one line.
        """
        if not self.command:
            return
        about: HookEvent = {
            "event": event,
            "step": step,
            "what": description,
            "time": time.time(),
            "run_dir": str(self.dir),
            "host": socket.gethostname(),
            **fields,
        }
        if len(self._waiting) == _MAX_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(about)
        self._proceed()

    def update(self) -> None:
        """Call the hook for new lines of the journal, and kill or report calls that are slow or have failed."""
        if not self.command:
            return
        for line in self._journal.read():
            name, step = line.get("event"), line.get("step")
            if not isinstance(step, int):
                continue
            if name == "finish":
                self.emit("finish", step, f"finished after step {step}")
            elif name in _HOOK_EVENTS:
                event, field = _HOOK_EVENTS[name]
                self.emit(event, step, str(line.get(field, "")), journal=line)
        self._proceed()

    def close(self) -> None:
        """Wait up to `grace_s` seconds for unfinished calls, then kill running ones and drop waiting ones."""
        self.update()
        end = time.monotonic() + self._grace_s
        try:
            while (self._running or self._waiting) and time.monotonic() < end:
                time.sleep(0.02)
                self._proceed()
        finally:
            for call in self._running:
                self._kill(call, f"was killed, because it was still running {self._grace_s:g} s after the run's end")
            if self._waiting:
                self._complain(f"{len(self._waiting)} events were dropped, because the run ended")
            self._running, self._waiting = [], deque()

    def _proceed(self) -> None:
        """Report ended calls that failed, kill slow calls, and start waiting ones."""
        for call in list(self._running):
            status = call.process.poll()
            if status is None and time.monotonic() >= call.end:
                self._kill(call, f"was killed after {self._kill_after_s:g} s")
            elif status is None:
                continue
            elif status != 0:
                self._complain(f"the command for {call.what} ended with status {status}")
            self._running.remove(call)
        while self._waiting and len(self._running) < _MAX_CALLS:
            self._start(self._waiting.popleft())

    def _start(self, about: HookEvent) -> None:
        if self._dropped:
            self._note(f"{self._dropped} events were dropped: more than {_MAX_WAITING} were waiting")
            about["dropped"], self._dropped = self._dropped, 0
        name = f"{about['event']} of step {about['step']}"
        values = {"event": about["event"], "run_dir": self.dir, "step": about["step"], "what": about["what"]}
        env = {f"PRORL_{k.upper()}": str(v).replace("\0", "")[:_ENV_CHARS] for k, v in values.items()}
        self._note(f"{name}: {about['what']}")
        try:
            with tempfile.TemporaryFile() as standard_input, self._open_log() as log:
                standard_input.write(json.dumps(about).encode() + b"\n")
                standard_input.seek(0)
                process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **env},
                    stdin=standard_input,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Slurm's signal to stop; to block it is not enough, because a shell unblocks it
                    preexec_fn=partial(signal.signal, signal.SIGUSR1, signal.SIG_IGN),  # noqa: PLW1509 - takes no lock
                )
        except (OSError, ValueError) as error:
            self._complain(f"the command for {name} could not be started: {error}")
            return
        self._running.append(_Call(process, name, time.monotonic() + self._kill_after_s))

    def _kill(self, call: _Call, reason: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(call.process.pid, signal.SIGKILL)
        call.process.wait()
        self._complain(f"the command for {call.what} {reason}")

    def _complain(self, text: str) -> None:
        """Write a problem of the hook to the hook's log, and the first problem also to the run's log."""
        self._note(text)
        if not self._complained:
            _log.warning("on_event=%s: %s; later problems are only in %s", self.command[0], text, self.log_file)
        self._complained = True

    def _open_log(self) -> BinaryIO:
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            return self.log_file.open("ab", buffering=0)
        except OSError:
            return Path(os.devnull).open("ab", buffering=0)

    def _note(self, text: str) -> None:
        with suppress(OSError), self._open_log() as log:  # a full disk is reported elsewhere
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())


def _reason(message: str, log: Sequence[str]) -> str:
    """Return a failure in one line.  The error that the failed process logged last, if any, comes before `message`."""
    for line in reversed(log):
        if error := _ERROR.search(line):
            return f"{error[1] or error[2]} ({message})"
    return message


def on_screen(message: str, log: Sequence[str], shown: bool) -> list[str]:
    """Return the lines that report a failed process on the screen, without those of libraries; the log has all.

    Args:
        log: last lines of the log of the process.
        shown: whether the first line of each of our own errors in `log` is on the screen already.
    """
    for at in reversed(range(len(log))):
        if not (error := _ERROR.search(log[at])):
            continue
        if not (shown and error[1] and " nemo_prorl" in error[0]):
            message = _reason(message, [log[at]])
        rest = list(takewhile(lambda line: not _RECORD.match(line), log[at + 1 :]))  # of an error of several lines
        return [*rest, message]
    # It died without an error: the last lines outside of any record, such as those of a crash in C++.
    rest = list(takewhile(lambda line: not _RECORD.match(line) and not line.startswith("    "), reversed(log)))
    return [*reversed(rest), message]


def last_step(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl; 0 if there is none."""
    for line in reversed(last_objects(run_dir / "metrics.jsonl")):
        if isinstance(line.get("step"), int):
            return int(line["step"])
    return 0


if __name__ == "__main__":
    with Events(sys.argv[1], Path(sys.argv[2])) as _events:
        _events.failure(sys.argv[3])
