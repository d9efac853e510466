"""Run a stage as a Slurm job: start the supervisors of all nodes, and decide what follows each end of the run.

`slurm/stage.sbatch` runs this on the first node of the job.

    slurm_driver.py STAGE [--container-image IMG] [--container-mounts A:B] [--dry-run] [OVERRIDE ...]

The cluster is h100_4x8 unless cluster=... says otherwise.

0, 2, 3, 4            the job ends with this code; after 3 it is requeued without the unfit node, if others are there
a crash               starts again in this allocation, at most `launch.attempts` times in a row without a new checkpoint
USR1, preemption      the run is asked to stop; the job is requeued when the run has ended, or when time runs out
a lost node           Slurm requeues the job by itself
a bad node            one that fails twice in a row, or starts no program: the job is requeued without it
`prorl control stop`  the job ends with 75
scancel               nothing is requeued: after a SIGTERM this process starts nothing and asks Slurm for nothing
requeued by Slurm     this start of the job is a ghost, and ends

RUN/launches.jsonl records the beginning and the end of each attempt.  Standard library only, Python 3.9 at least: this
runs outside the container that the run may be in.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).absolute().parent.parent.parent  # of the link nemo_prorl/launcher
if not __package__:  # started by path: this folder's module names must not shadow anybody's
    sys.path[0] = str(ROOT)

from nemo_prorl.errors import ProrlError  # noqa: E402
from nemo_prorl.launcher.launches import PREEMPTED, Launches  # noqa: E402
from nemo_prorl.launcher.peers import node_file  # noqa: E402
from nemo_prorl.launcher.slurm_queries import Job, say  # noqa: E402
from nemo_prorl.launcher.srun_step import Step  # noqa: E402
from nemo_prorl.launcher.submission import Submission, arguments  # noqa: E402

STOPPED = 75
_ALL_ATTEMPTS = 10  # times launch.attempts: attempts in a row without a new checkpoint, whatever ended them
_SRUN_ENDS_S = 180.0  # after node 0 said how the run ended, for processes to stop (trainer.deadlines.stop_s)
_LOCK_WAIT_S = 300.0  # for processes of an earlier attempt to leave the run directory
_REACH_S, _REACH_IMAGE_S = 300.0, 1800.0  # for all supervisors to begin; where an image is fetched first
_LOOK_S = 60.0  # between two checks that Slurm has not started the job elsewhere
_PATIENCE = 0.8  # share of the time between the signal and the job's end that the run has to stop
_REQUEUE_EVERY_S, _REQUEUED_S = 10.0, 300.0  # between two requests to requeue; for Slurm to end this process
_PLAN_TRIES, _PLAN_PAUSE_S = 3, 30.0  # attempts to start the project's Python


class Driver:
    """One job from its start to its end or requeue."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.job = Job()
        self.submission = Submission(args, self.job)
        self.run_dir, self.plan = self.submission.run_dir, self.submission.plan
        self.launches = Launches(self.run_dir, self.job)
        self.asked: str | None = None  # why the run is to stop
        self.ended = False  # Slurm ends the job: a SIGTERM came
        self.removed = False  # the container
        self.reported = False  # node 0 said how the newest attempt ended, and has called on_event
        self.step: Step | None = None

    def run(self) -> int:
        if not self.submission.args.dry_run:
            signal.signal(signal.SIGUSR1, self.on_usr1)
            signal.signal(signal.SIGTERM, self.on_term)
        try:
            return self._run()
        finally:
            self.remove_container()

    def _run(self) -> int:
        self.load_plan()
        self.submission.show()
        if self.submission.args.dry_run:
            self.submission.warn_of_paths()
            sys.stdout.write(shlex.join(self._command(1)) + "\n")
            return 0
        self.submission.check_allocation()
        while True:
            if self.ended or not self.is_ours():
                return STOPPED
            if self.asked is not None:
                return self.requeue(STOPPED)
            own, every = self.launches.fruitless()
            if own >= self.plan["attempts"] or every >= _ALL_ATTEMPTS * self.plan["attempts"]:
                return self.give_up(every)
            attempt = self.launches.begin()
            outcome = self.attempt(attempt)
            following, code = self.decide(outcome)
            fields = {key: outcome.get(key) or None for key in ("host", "process", "status")}
            next_ = "requeue" if following == "leave_out" else following
            self.launches.end(attempt, code=outcome["code"], what=outcome["what"], next=next_, **fields)
            say(f"attempt {attempt} ended with {outcome['code']} {outcome['what']}: {next_}")
            if following in ("requeue", "leave_out"):
                return self.requeue(code, outcome["host"] if following == "leave_out" else "")
            if following != "again":
                return code
            self.wait(min(60.0, 5.0 * 2.0 ** self.launches.fruitless()[0]))

    def _command(self, attempt: int) -> list[str]:
        wait = _LOCK_WAIT_S if self.job.restart or self.launches.begun_here > 1 else 0.0  # this attempt has begun
        return self.submission.node_command(attempt, wait, self.launches.file)

    def load_plan(self) -> None:
        """Read what the configuration needs of the job.  End this process if the configuration is wrong."""
        for more in reversed(range(_PLAN_TRIES)):
            done = self.submission.run_allocation()
            if done.returncode in (0, 2, 3, 4) or self.ended or not more:
                break
            say(f"{shlex.join(done.args)} ended with {done.returncode}; again in {_PLAN_PAUSE_S:g} s")
            self.wait(_PLAN_PAUSE_S)
        if done.returncode:
            self.submission.warn_of_paths()
            raise SystemExit(done.returncode if done.returncode in (2, 3, 4) else 1)
        self.plan.update(json.loads(done.stdout.splitlines()[-1]))

    def on_usr1(self, *_: Any) -> None:
        self.asked = self.asked or "SIGUSR1: the time limit is near"
        self.tell_stop(self.asked)

    def on_term(self, *_: Any) -> None:
        self.ended = True
        self.tell_stop("SIGTERM: Slurm ends the job")

    def remove_container(self) -> None:
        """Remove the container of this start from its nodes, once: by pyxis's default it would stay for ever."""
        made = self.submission.args.container_image and self.job.id and not self.submission.args.dry_run
        if made and not self.ended and not self.removed:
            self.removed = True
            if not self.job.remove_container():
                say(f"the container pyxis_{self.job.container} may be left on a node: enroot remove removes it there")

    def tell_stop(self, reason: str) -> None:
        """Ask the run to stop."""
        say(f"{reason}; the run is asked to stop")
        if self.step is not None:
            self.step.stop()

    def attempt(self, number: int) -> dict[str, Any]:
        """Start the nodes once, wait for their end, and return it."""
        log, env = self.run_dir / "logs" / "all.log", self.submission.environment()
        leader = node_file(self.run_dir / "endpoints", 0, self.submission.attempt_id(number))
        self.step = step = Step(self._command(number), env, self.plan["num_nodes"], log, leader)
        if self.asked is not None or self.ended:  # meanwhile
            step.stop()
        why = self._watch(step)
        self.step, self.reported = None, step.outcome() is not None
        if not why:
            return step.result()
        missing = self._missing(step)
        return {"code": 1, "what": why, "host": missing[0] if len(missing) == 1 else ""}

    def _missing(self, step: Step) -> list[str]:
        """Return the nodes whose supervisors have not begun."""
        return [host for host in self.job.nodes if host not in step.begun]

    def _watch(self, step: Step) -> str:
        """Wait until srun has ended.  Return why it was killed before the run had ended, or an empty string."""
        began = looked = time.monotonic()
        reach_s = _REACH_IMAGE_S if self.submission.args.container_image else _REACH_S
        over: float | None = None  # when srun is killed
        stop_by: float | None = None
        why = ""
        while step.process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            step.forward_stop()
            if self.asked is not None and stop_by is None:
                stop_by = now + _PATIENCE * max(0.0, (self.job.end() or time.time() + 600.0) - time.time())
            if step.has_outcome():
                over = over or now + _SRUN_ENDS_S
            elif now - began > reach_s and (missing := self._missing(step)):
                hosts = f"{len(missing)} of {len(self.job.nodes)} nodes ({', '.join(missing)})"
                why, over = f"the supervisors of {hosts} have not begun for {reach_s:g} s", now
            elif stop_by is not None and now > stop_by:
                why, over = "the run did not stop in time", now
            elif now - looked > _LOOK_S:
                looked = now
                if not self.is_ours():
                    why, over = "Slurm has given the job to other nodes", now
            if over is not None and now >= over:
                step.kill()
                break
        return why

    # --- what follows ----------------------------------------------------------------------------------------------

    def decide(self, outcome: dict[str, Any]) -> tuple[str, int]:
        """Return (done | again | requeue | leave_out | give_up, exit code of the job); may name the host to blame."""
        code = outcome["code"]
        if code == 0:
            return "done", 0
        following = self._following(outcome)
        if self.ended:  # a SIGTERM came meanwhile: Slurm ends the job
            return "give_up", STOPPED if code == STOPPED else 1
        return following

    def _following(self, outcome: dict[str, Any]) -> tuple[str, int]:
        code, state = outcome["code"], self.job.state()
        if self.ended or (state is not None and not (state.ours and state.running)):
            return "give_up", STOPPED if code == STOPPED else 1
        if self.asked is not None:
            return "requeue", STOPPED
        if state is not None and state.preempted:
            outcome["what"] = f"{PREEMPTED} {outcome['what']}".strip()
            return "requeue", STOPPED
        if code == STOPPED:
            return ("requeue", STOPPED) if self.out_of_time() else ("give_up", STOPPED)
        if not self.reported:
            self.submission.report_failure(outcome["what"])
        if code in (2, 4):
            return "give_up", code
        host = outcome["host"] = outcome.get("host") or (self.silent_node() if code == 1 else "")
        if host and (code == 3 or self.blamed(host)) and self.job.spare(host):
            return "leave_out", code
        return ("give_up", 3) if code == 3 else ("again", 1)

    def is_ours(self) -> bool:
        """Return whether this is the current start of the job; also True if Slurm does not answer."""
        state = self.job.state()
        return state is None or state.ours

    def out_of_time(self) -> bool:
        """Return whether the run stopped because of trainer.deadlines.job_s, not because a user asked."""
        try:
            last = json.loads((self.run_dir / "journal.jsonl").read_text().splitlines()[-1])
            return last["event"] == "stop" and "trainer.deadlines.job_s" in last["reason"]
        except (OSError, ValueError, KeyError, IndexError):
            return False

    def silent_node(self) -> str:
        """Return the first node of the job that starts no program, or an empty string."""
        return next((host for host in self.job.nodes if not self.ended and not self.job.starts(host)), "")

    def blamed(self, host: str) -> bool:
        """Return whether this node ended the previous attempt, too, or cannot start a program now."""
        last = self.launches.last_end()
        before = last is not None and last["restart"] == self.job.restart and last["host"] == host
        return before or not self.job.starts(host)

    def wait(self, seconds: float) -> None:
        """Wait, at most until the job is to stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended and self.asked is None:
            time.sleep(0.2)

    def give_up(self, attempts: int) -> int:
        last = self.launches.last_end()
        how = f"; the last one ended so: {last['what']}" if last else ""
        say(
            f"{attempts} attempts in a row made no new checkpoint after step {self.launches.step()} (launch.attempts):"
            f" the job ends{how}. Its logs are in {self.run_dir / 'logs'}"
        )
        return 1

    def requeue(self, code: int, without: str = "") -> int:
        """Give the job back to Slurm, which ends this process.  `without`: a node to leave out from now on."""
        self.remove_container()
        end = self.job.end() or time.time() + _REQUEUED_S
        while not self.ended and self.is_ours():
            if self.job.requeue(without):
                say(f"requeued{f' without {without}' if without else ''}")
                gone = time.monotonic() + _REQUEUED_S
                while time.monotonic() < gone and not self.ended:
                    time.sleep(0.2)
                break
            if time.time() + _REQUEUE_EVERY_S > end:
                say("the job could not be requeued; the same sbatch command goes on from here")
                break
            time.sleep(_REQUEUE_EVERY_S)
        return code


def main() -> NoReturn:
    try:
        code = Driver(arguments(sys.argv[1:])).run()
    except ProrlError as error:
        say(f"stage.sbatch: {error}")
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
