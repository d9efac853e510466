"""`prorl control`: requests to a live run, passed through files so that any machine that shares the disk can send them.

RUN/control/ID.json is one request, written under a temporary name and renamed.  At the end of each step, rank 0 reads
the folder, serves the requests, answers in the journal (event `control`) and removes the files.  If the run is killed
first, the file is still there, and the next start treats the request by its kind:

reset           made exactly once: the reset's reason, which the checkpoint contains, names the request.  If the reset
                had begun, it is repeated after the same step.
others          served after the next step, even if the killed process had served but not yet answered it
stop            dropped: the run has stopped already

A run that ends cleanly drops the requests that are left.  The next start drops those placed while no run was active.
"""

import argparse
import fcntl
import getpass
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
from nemo_prorl.files import Tail, last_objects, modified, read_objects, write_json
from nemo_prorl.lifecycle.journal_events import AnswerStatus, RequestKind
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.lifecycle.stages import last_end
from nemo_prorl.metrics import Metrics
from nemo_prorl.schema import Constraint

if TYPE_CHECKING:  # `prorl control` starts without torch
    from nemo_prorl.leader import LeaderOnly
    from nemo_prorl.lifecycle.checkpoints import Checkpoints
    from nemo_prorl.lifecycle.ledger import Ledger
    from nemo_prorl.lifecycle.stopping import Stopping
    from nemo_prorl.lifecycle.validation import Validation

_log = logging.getLogger(__name__)

REQUESTS: dict[RequestKind, str] = {
    "reset": "a hard reset after the step under way",
    "validate": "a validation after the step under way; its scores go into the journal, not into metrics.jsonl",
    "checkpoint": "a checkpoint after the step under way",
    "keep-batches": "the batches that are stored now, of the newest steps, are kept for ever (RUN/batches/kept)",
    "stop": "a checkpoint and a stop after the step under way, as on SIGTERM; the same command continues the run",
}

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_IN_REASON = re.compile(rf"\bcontrol ({_ID.pattern})")
_MAX_BYTES = 1 << 16
_FIRST_STEP_WAIT_S = 900.0  # seconds to wait if no step is measured yet: engines still start, the policy is built


@dataclass(frozen=True)
class Request:
    """A request to a live run: control/ID.json in its directory."""

    id: Annotated[str, Constraint(pattern=f"^{_ID.pattern}$")]
    """the file's name without .json; never used twice"""
    what: RequestKind
    time: Annotated[float, Constraint(description="seconds since 1970, UTC, by the clock of `host`")]
    user: str
    host: str

    @classmethod
    def parse(cls, data: bytes, name: str) -> "Request":
        """Return the request that `data`, the content of the file `name`, contains.

        Raises:
            ValueError: `data` is not a valid request; the text names the field and the fault.
        """
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
    """The requests in RUN/control; rank 0 alone has this object.

    Create it before this process writes its own `start` or `resume` event: it reads the journal's last event of that
    kind to learn whether the previous process ended cleanly.
    """

    def __init__(self, run_dir: Path, journal: Journal, alarm: Callable[[int, str], None]) -> None:
        """Open the folder of requests.

        Args:
            alarm: called with the step and a text if a file is not a valid request.
        """
        self.folder = run_dir / "control"
        self._journal = journal
        self._alarm = alarm
        self.folder.mkdir(exist_ok=True)
        (self.folder / "host").write_text(socket.gethostname() + "\n")
        self._began = modified(run_dir / ".lock", time.time())
        self._ended_cleanly = False
        self._answered: set[str] = set()
        self._begun_at: dict[str, int] = {}  # {request id: step after which its reset had begun}
        for event in journal.events():
            if event["event"] in ("start", "resume", "stop", "finish"):
                self._ended_cleanly = event["event"] in ("stop", "finish")
            elif event["event"] == "control":
                self._answered.add(event["request"])
            elif event["event"] == "reset_intent":
                self._begun_at.update(dict.fromkeys(request_ids_in(event["reason"]), event["step"]))

    def settle(self, step: int, reset_reasons: Iterable[str]) -> None:
        """At a start, answer the requests of an earlier process that this process will not serve.

        Resets that the loaded checkpoint contains are answered with `done`, stops with `dropped`.  If the earlier
        process ended cleanly, all other requests placed before this start are answered with `dropped`, too.

        Args:
            reset_reasons: reasons of the resets that the loaded checkpoint contains.
        """
        made = {name for reason in reset_reasons for name in request_ids_in(reason)}
        for request in self._read(step):
            if request.what == "reset" and request.id in made:
                self.answer(request, step, "done", "the reset was made before the run was interrupted")
            elif modified(self._file(request), time.time()) > self._began:
                continue  # placed while this process started: serve it
            elif self._ended_cleanly:
                self.answer(request, step, "dropped", "the run had already ended when this request was placed")
            elif request.what == "stop":
                self.answer(request, step, "dropped", "the run ended before it served this stop, and was started again")
            else:
                _log.info(
                    "this run will serve the request %s, which %s@%s sent before the run was interrupted",
                    request.what,
                    request.user,
                    request.host,
                )

    def pending(self, step: int) -> list[Request]:
        """Return the requests to serve after this step, oldest first.

        The first `stop`, if any, is the last request in the list.  If a killed process had begun a requested reset
        after a later step, the reset waits for that step.
        """
        due = [request for request in self._read(step) if step >= self._begun_at.get(request.id, step)]
        stops = [index for index, request in enumerate(due) if request.what == "stop"]
        return due[: stops[0] + 1] if stops else due

    def answer(self, request: Request, step: int, status: AnswerStatus, detail: str) -> None:
        """Write the answer into the journal, then remove the request's file."""
        kind, user, host = request.what, request.user, request.host
        self._journal.append(
            "control", step, request=request.id, what=kind, status=status, detail=detail, user=user, host=host
        )
        self._answered.add(request.id)
        _log.info("control request %s (%s, sent by %s@%s): %s", request.id, kind, user, host, detail)
        self._remove(self._file(request))

    def close(self, step: int) -> None:
        """At a clean end, answer the requests that are left with `dropped`, so that their senders stop waiting."""
        for request in self._read(step):
            self.answer(request, step, "dropped", f"the run ended after step {step} without serving this request")
        self._remove(self.folder / "host")

    def _file(self, request: Request) -> Path:
        return self.folder / f"{request.id}.json"

    def _read(self, step: int) -> list[Request]:
        """Return the requests without an answer, oldest first.  Move files that are not valid requests to control/bad.

        Remove the files of requests that were answered before.
        """
        requests: list[Request] = []
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".json") and name[0] != ".")
        except OSError as error:  # a shared disk may fail for a moment; the next step tries again
            _log.warning("%s cannot be read: %s", self.folder, error)
            return requests
        for name in names:
            if name[:-5] in self._answered:
                self._remove(self.folder / name)
                continue
            try:
                requests.append(Request.parse(_content(self.folder / name), name))
            except FileNotFoundError:
                continue  # the sender deleted it
            except (ValueError, OSError) as error:
                self._put_aside(step, name, error)
        return sorted(requests, key=lambda request: (request.time, request.id))

    def _put_aside(self, step: int, name: str, error: Exception) -> None:
        bad = self.folder / "bad"
        self._answered.add(name[:-5])  # if the file cannot be moved, the alarm is not repeated at each step
        self._alarm(step, f"{self.folder / name} is not a valid request and was moved to {bad}: {error}")
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
    """Return the ids of the requests that the reason of a hard reset names."""
    return _IN_REASON.findall(reason)


def reset_reason(requests: Sequence[Request], reason: str | None) -> str | None:
    """Return `reason` joined with the ids of the requests for a hard reset; None if no reset is due or requested.

    One reset serves all these requests.

    Args:
        reason: why a reset is due without a request; None if no reset is due.
    """
    named = [f"control {request.id}" for request in requests if request.what == "reset"]
    return "; ".join([*([reason] if reason else []), *named]) or None


@dataclass(eq=False, repr=False)
class Control:
    """Serves the requests that users send to the run with `prorl control`, on all ranks alike.

    The methods are collectives of all trainer ranks.
    """

    requests: "LeaderOnly[Requests]"
    validation: "Validation"
    checkpoints: "Checkpoints"
    stopping: "Stopping"
    ledger: "Ledger"

    def settle(self, step: int, reset_reasons: Sequence[str]) -> None:
        """At a start, answer the requests of an earlier process (`Requests.settle`)."""
        self.requests.call(lambda requests: requests.settle(step, reset_reasons))

    def pending(self, step: int) -> list[Request]:
        """Return the requests to serve after this step, the same on all ranks."""
        return self.requests.call(lambda requests: requests.pending(step))

    def serve(self, requests: Sequence[Request], step: int) -> None:
        """Serve and answer the requests, after the step, its hard reset and its checkpoint.

        A requested hard reset has already been made, so its request only gets an answer.
        """
        for request in requests:
            status, detail = self._serve_one(request, step)
            self.requests.call(partial(Requests.answer, request=request, step=step, status=status, detail=detail))

    def _serve_one(self, request: Request, step: int) -> tuple[AnswerStatus, str]:
        """Serve a request; return the status and the detail of its answer."""
        if request.what == "validate":
            if not self.validation.has_prompts:
                return "refused", "the run has no held-out prompts (data.validation is empty)"
            try:
                scores = self.validation.judge(Metrics(step, ""))
            except RewardFailure as error:  # a requested validation must not end the run
                return "refused", str(error)
            tasks = ", ".join(f"{name} {score['mean']:.4f}" for name, score in scores["tasks"].items())
            return "done", f"held-out mean reward after step {step}: {scores['all']['mean']:.4f} ({tasks})"
        if request.what == "checkpoint":
            self.checkpoints.save(step, wait=True)
            return "done", f"checkpoint of step {step}"
        if request.what == "keep-batches":
            steps = self.requests.call(lambda _: self.ledger.keep_batches())
            return "done", f"kept the batches of {len(steps)} steps: {', '.join(map(str, steps)) or 'none'}"
        if request.what == "stop":
            self.checkpoints.save(step, wait=True)
            self.stopping.request_stop(f"control {request.id}")
            return "done", f"stopped after step {step}; the same command continues"
        return "done", f"hard reset after step {step}"

    def close(self, step: int) -> None:
        """At a clean end, answer the requests that are left with `dropped`."""
        self.requests.run_on_leader(lambda requests: requests.close(step))


def _content(path: Path) -> bytes:
    """Return the content of a regular file.  Never follow a link, and never block on a pipe.

    Raises:
        OSError: the file cannot be opened, or is a link.
        ValueError: it is not a regular file, or larger than 64 KiB.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            raise ValueError("expected a regular file of at most 64 KiB")
        return file.read(_MAX_BYTES)


# --- the command's side ----------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add `control` to the main command line."""
    text = "send a request to a live run, also from another machine that sees its directory"
    listed = "; ".join(f"{name}: {effect}" for name, effect in REQUESTS.items())
    parser = commands.add_parser("control", help=text, description=f"{text}. {listed}.")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory of the live run")
    parser.add_argument("what", choices=tuple(REQUESTS), help="request to send")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        help="maximum seconds to wait for the answer, which is written at the end of a step; 0: do not wait; default:"
        " 60 s plus four times the longest recent step",
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Place the request and wait for its answer; return 0 once it is served, or placed with --wait 0.

    Raises:
        ConfigError: no run is active in the directory, or the request cannot be written.
        DeadlineExceeded: no answer within the wait.
        ProrlError: the request was refused or dropped, or the run ended without an answer.
    """
    run_dir: Path = args.run_dir
    if args.wait is not None and not args.wait >= 0:
        raise ConfigError(f"--wait {args.wait:g}: expected a number of seconds, 0 or more")
    doubt = _check_is_active(run_dir)
    default_wait, explanation = _default_wait(run_dir)
    seconds = default_wait if args.wait is None else args.wait
    answers = Tail(run_dir / "journal.jsonl")
    request, file = place(run_dir / "control", args.what)
    if seconds == 0:
        sys.stdout.write(f"{request.id}\n")
        _log.info("placed %s in %s; the answer will be in %s", args.what, file, run_dir / "journal.jsonl")
        return 0
    _log.info("requested %s; waiting up to %.0f s: %s%s", args.what, seconds, explanation, doubt)
    answer = _wait(run_dir, request, file, answers, seconds, watch_lock=not doubt)
    if answer["status"] != "done":
        raise ProrlError(f"{args.what} was {answer['status']}: {answer['detail']}")
    sys.stdout.write(f"{answer['detail']}\n")
    return 0


def _check_is_active(run_dir: Path) -> str:
    """Check that a run is active in the directory.

    Returns:
        An empty text if this machine sees the run's lock; otherwise a warning for the user that
        this machine cannot see whether the run is still active.

    Raises:
        ConfigError: the directory does not contain a run, or its run is not active.
    """
    if is_locked(run_dir):
        return ""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
    here = socket.gethostname()
    try:
        run_host = (run_dir / "control" / "host").read_text().strip()
    except OSError:  # removed at a clean end, and not there yet while the trainer starts
        started_on, began = last_start(run_dir)
        end = last_end(read_objects(run_dir / "journal.jsonl"))
        run_host = started_on if started_on and (end is None or end["time"] < began) else here
    if run_host != here:  # many file systems do not show locks of other machines
        return f". The run was last seen on {run_host}; {here} cannot see whether the run is still active there"
    raise ConfigError(
        f"no run is active in {run_dir} (as far as {here} can see). Fix: the command that started the run continues it"
    )


def last_start(run_dir: Path) -> tuple[str, float]:
    """Return the host on which the newest process of the run started, and when; the host is empty if unknown."""
    file = run_dir / ".lock"
    try:
        match = re.match(r"process \d+ on ([^\s,]+)", file.read_text())
    except (OSError, ValueError):
        match = None
    return match[1] if match else "", modified(file)


def is_locked(run_dir: Path) -> bool:
    """Return whether this machine sees a process that has locked a run directory."""
    try:
        with (run_dir / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, or a file system without locks
        return False
    return False


def _default_wait(run_dir: Path) -> tuple[float, str]:
    """Return how many seconds to wait for an answer, and a text that explains the number.

    The wait covers a few steps, with checkpoint and validation.
    """
    lines = last_objects(run_dir / "metrics.jsonl")[-10:]
    seconds = [line["time/step"] for line in lines if isinstance(line.get("time/step"), int | float)]
    if not seconds:
        return _FIRST_STEP_WAIT_S, "the run reads requests at the end of each step, and has not finished a step yet"
    longest = max(seconds)
    return (
        60.0 + 4.0 * longest,
        f"the run reads requests at the end of each step; recent steps took up to {longest:.0f} s",
    )


def place(folder: Path, kind: RequestKind) -> tuple[Request, Path]:
    """Write a request in one atomic step; return it with its file."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = str(os.getuid())
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    request = Request(name, kind, time.time(), user, socket.gethostname())
    file = folder / f"{name}.json"
    try:
        folder.mkdir(exist_ok=True)
        write_json(file, asdict(request))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}. Fix: run this as the user who owns the run") from error
    return request, file


def _wait(
    run_dir: Path, request: Request, file: Path, answers: Tail, seconds: float, watch_lock: bool
) -> dict[str, Any]:
    """Wait for the answer to `request` in the journal; return the journal event with the answer.

    Args:
        file: the request's file, which error messages name.
        watch_lock: stop the wait when the run's lock is free, which shows that the run has ended.

    Raises:
        DeadlineExceeded: no answer within `seconds`.
        ProrlError: the run ended without an answer.
    """
    stays = f"the request stays in {file}; delete it to take it back"
    deadline = Deadline(seconds, f"an answer to {request.what}")
    while True:
        # The lock is read before the journal: a run writes its answer first and then frees the lock.
        has_ended = watch_lock and not is_locked(run_dir)
        for event in answers.read():
            if event.get("event") == "control" and event.get("request") == request.id:
                return event
        if has_ended:
            raise ProrlError(f"the run in {run_dir} ended without an answer to {request.what}; {stays}")
        if deadline.passed:
            raise DeadlineExceeded(
                f"waited {seconds:g} s for an answer to {request.what} in {run_dir / 'journal.jsonl'}; {stays}."
                f" `prorl status {run_dir}` and {run_dir / 'logs' / 'all.log'} show the state of the run"
            )
        time.sleep(min(0.2, deadline.remaining))
