"""`prorl control`: what somebody asks of a run that works, through files, so that a login node can.

RUN/control/ID.json is one request, written under another name and renamed.  The run's first rank looks there at the end
of each step, and answers in the journal (event `control`); then it removes the file.  A request that a kill interrupted
is still there for the next start:

reset           exactly once: its id stands in the reset's reason, and so in the checkpoint.  One whose reset had begun
                comes after the same step again.
validate, checkpoint    served again
stop            dropped: the run has stopped

After a clean end all are dropped: those that came too late, and those placed meanwhile.
"""

import argparse
import fcntl
import getpass
import json
import logging
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DeadlineExceeded, ProrlError, RewardFailure
from nemo_prorl.lifecycle.journal_events import AnswerFields, AnswerStatus, RequestKind
from nemo_prorl.lifecycle.records import Journal, Tail, last_lines
from nemo_prorl.metrics import Metrics
from nemo_prorl.schema import Constraint

if TYPE_CHECKING:  # `prorl control` starts without torch
    from nemo_prorl.leader import LeaderOnly
    from nemo_prorl.lifecycle.checkpoints import Checkpoints
    from nemo_prorl.lifecycle.stopping import Stopping
    from nemo_prorl.lifecycle.validation import Validation

_log = logging.getLogger(__name__)

REQUESTS: dict[RequestKind, str] = {
    "reset": "a hard reset after the step under way",
    "validate": "judge the held-out prompts now; the scores go into the journal, not into metrics.jsonl",
    "checkpoint": "write a checkpoint now",
    "stop": "checkpoint and end after the step under way, as on SIGTERM; the same command continues",
}

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_IN_REASON = re.compile(rf"\bcontrol ({_ID.pattern})")
_MAX_BYTES = 1 << 16
_UNKNOWN_WAIT_S = 900.0  # no step was measured yet: engines start, a policy is built


@dataclass(frozen=True)
class Request:
    """What somebody asks of a run that works: control/ID.json in its directory."""

    id: Annotated[str, Constraint(pattern=f"^{_ID.pattern}$")]
    """the file's name without .json; never used twice"""
    what: RequestKind
    time: Annotated[float, Constraint(description="seconds since 1970, UTC, by the clock of `host`")]
    user: str
    host: str

    @classmethod
    def parse(cls, data: bytes, name: str) -> "Request":
        """Return the request in the file ID.json.  Raises ValueError saying what is wrong."""
        from pydantic import ConfigDict, TypeAdapter, ValidationError

        strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
        try:
            [request] = TypeAdapter(list[Request], config=strict).validate_json(b"[" + data + b"]")
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(": ".join([*map(str, fault["loc"][1:]), fault["msg"]])) from error
        if not _ID.fullmatch(request.id) or f"{request.id}.json" != name:
            raise ValueError("id: must be the file's name without .json")
        return request


# --- the run's side --------------------------------------------------------------------------------------------------


class Requests:
    """The requests to a run, on its first rank.  `alarm`: told of a file that is none.

    Make it before the journal says that this process starts: what happened to the one before is read there.
    """

    def __init__(self, run_dir: Path, journal: Journal, alarm: Callable[[int, str], None]) -> None:
        self.folder, self._journal, self._alarm = run_dir / "control", journal, alarm
        self.folder.mkdir(exist_ok=True)
        (self.folder / "host").write_text(socket.gethostname() + "\n")
        self._began = _modified(run_dir / ".lock")
        self._ended_cleanly = False
        self._answered: set[str] = set()
        self._begun_at: dict[str, int] = {}  # steps after which a reset had begun, by request
        for event in journal.events():
            if event["event"] in ("start", "resume", "stop", "finish"):
                self._ended_cleanly = event["event"] in ("stop", "finish")
            elif event["event"] == "control":
                self._answered.add(event["request"])
            elif event["event"] == "reset_intent":
                self._begun_at.update(dict.fromkeys(request_ids_in(event["reason"]), event["step"]))

    def settle(self, step: int, reset_reasons: Iterable[str]) -> None:
        """At a start: what an earlier process left.  `reset_reasons`: of the resets that the checkpoint holds."""
        made = {name for reason in reset_reasons for name in request_ids_in(reason)}
        for request in self._read(step):
            if request.what == "reset" and request.id in made:
                self.answer(request, step, "done", "the reset was made before the run was interrupted")
            elif _modified(self._file(request)) > self._began:
                continue  # asked for while this process started
            elif self._ended_cleanly:
                self.answer(request, step, "dropped", "the run had ended when this was asked for")
            elif request.what == "stop":
                self.answer(request, step, "dropped", "the run had ended before it came to this, and was started again")
            else:
                _log.info("still to be served: %s, asked for by %s@%s", request.what, request.user, request.host)

    def pending(self, step: int) -> list[Request]:
        """What to serve after this step, in order of time; what comes after a `stop` is left out."""
        due = [request for request in self._read(step) if step >= self._begun_at.get(request.id, step)]
        stops = [place for place, request in enumerate(due) if request.what == "stop"]
        return due[: stops[0] + 1] if stops else due

    def answer(self, request: Request, step: int, status: AnswerStatus, detail: str) -> None:
        """Write the answer into the journal; then remove the request."""
        answer: AnswerFields = {
            "request": request.id,
            "what": request.what,
            "status": status,
            "detail": detail,
            "user": request.user,
            "host": request.host,
        }
        self._journal.append("control", step, **answer)
        self._answered.add(request.id)
        _log.info("control %s (%s of %s@%s): %s", request.id, request.what, request.user, request.host, detail)
        self._remove(self._file(request))

    def close(self, step: int) -> None:
        """At a clean end: whoever still waits is told that nothing comes of it."""
        for request in self._read(step):
            self.answer(request, step, "dropped", f"the run ended after step {step} before it came to this")
        self._remove(self.folder / "host")

    def _file(self, request: Request) -> Path:
        return self.folder / f"{request.id}.json"

    def _read(self, step: int) -> list[Request]:
        """All requests without an answer, in order of time.  What is none is moved to control/bad."""
        found: list[Request] = []
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".json") and name[0] != ".")
        except OSError as error:  # a shared disk that is away for a moment
            _log.warning("%s cannot be read: %s", self.folder, error)
            return found
        for name in names:
            if name[:-5] in self._answered:
                self._remove(self.folder / name)
                continue
            try:
                found.append(Request.parse(_content(self.folder / name), name))
            except FileNotFoundError:
                continue  # taken back
            except (ValueError, OSError, RecursionError) as error:
                self._put_aside(step, name, error)
        return sorted(found, key=lambda request: (request.time, request.id))

    def _put_aside(self, step: int, name: str, error: Exception) -> None:
        bad = self.folder / "bad"
        self._answered.add(name[:-5])  # else, where it cannot be moved, each step would tell of it
        self._alarm(step, f"{self.folder / name} is no request and was moved to {bad}: {error}")
        try:
            bad.mkdir(exist_ok=True)
            os.replace(self.folder / name, bad / f"{int(time.time())}-{name}")
        except OSError as reason:
            _log.warning("%s cannot be moved: %s", self.folder / name, reason)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", path, error)


def request_ids_in(reason: str) -> list[str]:
    """Ids of the requests in the reason of a hard reset."""
    return _IN_REASON.findall(reason)


def reset_reason(asked: Sequence[Request], reason: str | None) -> str | None:
    """The reason of a hard reset after this step: one that is due anyway, and the requests for it.

    One reset serves all of them.
    """
    named = [f"control {request.id}" for request in asked if request.what == "reset"]
    return "; ".join([*([reason] if reason else []), *named]) or None


class Control:
    """Requests to a run, as all its ranks see them.  Its methods are collectives of all trainer ranks."""

    def __init__(
        self,
        requests: "LeaderOnly[Requests]",
        validation: "Validation",
        checkpoints: "Checkpoints",
        stopping: "Stopping",
    ) -> None:
        self._requests, self._validation = requests, validation
        self._checkpoints, self._stopping = checkpoints, stopping

    def settle(self, step: int, reset_reasons: Sequence[str]) -> None:
        """At a start: answer what an earlier process left.  `reset_reasons`: of the resets that were made."""
        self._requests.call(lambda requests: requests.settle(step, reset_reasons))

    def pending(self, step: int) -> list[Request]:
        """Return what somebody asked for after this step: the same on all ranks."""
        return self._requests.call(lambda requests: requests.pending(step))

    def serve(self, asked: Sequence[Request], step: int) -> None:
        """After a step, its hard reset and its checkpoint: do the rest of what was asked for, and answer all."""
        for request in asked:
            status, detail = self._served(request, step)
            self._requests.call(partial(Requests.answer, request=request, step=step, status=status, detail=detail))

    def _served(self, request: Request, step: int) -> tuple[AnswerStatus, str]:
        """Return status and detail of the answer."""
        if request.what == "validate":
            if not self._validation.has_prompts:
                return "refused", "the run has no held-out prompts (data.validation is empty)"
            try:
                scores = self._validation.judge(Metrics(step, ""))
            except RewardFailure as error:  # an extra validation ends no run
                return "refused", str(error)
            tasks = ", ".join(f"{name} {score['mean']:.4f}" for name, score in scores["tasks"].items())
            return "done", f"held-out mean reward after step {step}: {scores['all']['mean']:.4f} ({tasks})"
        if request.what == "checkpoint":
            self._checkpoints.save(step, wait=True)
            return "done", f"checkpoint of step {step}"
        if request.what == "stop":
            self._checkpoints.save(step, wait=True)
            self._stopping.request_stop(f"control {request.id}")
            return "done", f"stopped after step {step}; the same command continues"
        return "done", f"hard reset after step {step}"

    def close(self, step: int) -> None:
        """At a clean end: whoever still waits learns that nothing comes of it."""
        self._requests.run_on_leader(lambda requests: requests.close(step))


def _content(path: Path) -> bytes:
    """Of a regular file; raises OSError or ValueError for anything else, and waits for nobody."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            raise ValueError("must be a file of less than 64 KiB")
        return file.read(_MAX_BYTES)


def _modified(path: Path) -> float:
    """By the file system's clock; for a file that is not there, now."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


# --- the command's side ----------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Adds `control` to the main command line."""
    text = "ask something of a run that works, also from another machine that sees its directory"
    listed = "; ".join(f"{name}: {what}" for name, what in REQUESTS.items())
    parser = commands.add_parser("control", help=text, description=f"{text}. {listed}.")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="its run directory")
    parser.add_argument("what", choices=tuple(REQUESTS), help="what to ask")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        help="for the answer, which comes after a step; 0: not at all; as long as a few steps take when not given",
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """0: done, or placed with --wait 0.

    Raises ConfigError where no run works, DeadlineExceeded without an answer, ProrlError where the answer is no.
    """
    run_dir: Path = args.run_dir
    if args.wait is not None and not args.wait >= 0:
        raise ConfigError(f"--wait {args.wait:g}: must be a number of seconds from 0 on")
    seen = _look_for_run(run_dir)
    usual, steps = _patience(run_dir)
    seconds = usual if args.wait is None else args.wait
    answers = Tail(run_dir / "journal.jsonl")
    request, file = _place(run_dir / "control", args.what)
    if seconds == 0:
        sys.stdout.write(f"{request.id}\n")
        _log.info("%s placed in %s; the answer comes into %s", args.what, file, run_dir / "journal.jsonl")
        return 0
    _log.info("%s asked for; waiting up to %.0f s: %s%s", args.what, seconds, steps, seen)
    answer = _wait(run_dir, request, file, answers, seconds, watch_lock=not seen)
    if answer["status"] != "done":
        raise ProrlError(f"{args.what} was {answer['status']}: {answer['detail']}")
    sys.stdout.write(f"{answer['detail']}\n")
    return 0


def _look_for_run(run_dir: Path) -> str:
    """Return an empty text where a run is seen to work, otherwise why that cannot be known.

    Raises ConfigError where no run works.
    """
    if is_locked(run_dir):
        return ""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no run: it has no config.yaml")
    here = socket.gethostname()
    try:
        there = (run_dir / "control" / "host").read_text().strip()
    except OSError:  # removed at a clean end
        there = here
    if there != here:  # whose lock many file systems do not show here
        return f". It was last seen on {there}: whether it still works there cannot be told from {here}"
    raise ConfigError(f"no run works on {run_dir} (as far as {here} can see); `prorl train` starts or continues one")


def is_locked(run_dir: Path) -> bool:
    """Return whether a process that this machine knows of works on a run directory."""
    try:
        with (run_dir / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, or a file system without locks
        return False
    return False


def _patience(run_dir: Path) -> tuple[float, str]:
    """Seconds in which an answer should come, and why: a few steps' time, checkpoint and validation besides."""
    lines = last_lines(run_dir / "metrics.jsonl")[-10:]
    seconds = [line["time/step"] for line in lines if isinstance(line.get("time/step"), int | float)]
    if not seconds:
        return _UNKNOWN_WAIT_S, "the run looks at the end of each step, and has made none yet"
    longest = max(seconds)
    return 60.0 + 4.0 * longest, f"the run looks at the end of each step, which takes up to {longest:.0f} s"


def _place(folder: Path, what: RequestKind) -> tuple[Request, Path]:
    """Writes a request; it is there as a whole or not at all."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = str(os.getuid())
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    request = Request(name, what, time.time(), user, socket.gethostname())
    file, temporary = folder / f"{name}.json", folder / f".{name}.tmp"
    try:
        folder.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(asdict(request)) + "\n")
        os.replace(temporary, file)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; ask as the user whose run it is") from error
    return request, file


def _wait(
    run_dir: Path, request: Request, file: Path, answers: Tail, seconds: float, watch_lock: bool
) -> dict[str, Any]:
    """The journal's answer.  Raises DeadlineExceeded, or ProrlError where the run ended without one."""
    stays = f"the request stays in {file}; delete it to take it back"
    deadline = Deadline(seconds, f"an answer to {request.what}")
    while True:
        gone = watch_lock and not is_locked(run_dir)  # looked at before the journal: the answer comes first
        for event in answers.read():
            if event.get("event") == "control" and event.get("request") == request.id:
                return event
        if gone:
            raise ProrlError(f"the run ended without an answer; {stays}")
        if deadline.passed:
            raise DeadlineExceeded(
                f"waited {seconds:g} s for an answer to {request.what} in {run_dir / 'journal.jsonl'}; {stays}. See"
                f" `prorl status {run_dir}` and {run_dir / 'logs' / 'all.log'} for what the run does"
            )
        time.sleep(min(0.2, deadline.remaining or 0.2))
