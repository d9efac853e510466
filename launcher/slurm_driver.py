"""Run a stage as a Slurm job: start the supervisors of all nodes, and decide what to do after each end of the run.

`slurm/stage.sbatch` runs this on the first node of the job.

    slurm_driver.py STAGE [--container-image IMG] [--container-mounts A:B] [--dry-run] [OVERRIDE ...]

The default cluster is h100_4x8; cluster=NAME selects another.

event                 reaction
exit 0, 2 or 4        the job ends with this code
exit 3                a node is unfit: the job is requeued without it if the partition has enough others of its kind
                      (`Job.spare`), otherwise it ends with 3
crash                 starts again in this allocation, at most `launch.attempts` times in a row without a new checkpoint
SIGUSR1, preemption   the run is stopped cleanly; the job is requeued once the run has ended, or when time runs out
lost node             Slurm ends and requeues the job (--requeue in slurm/stage.sbatch); if it ends only the step, srun
                      ends the supervisors of the other nodes, and the reaction is that to a bad node or a crash
bad node              a node that fails twice in a row or starts no program: the job is requeued without it if the
                      partition has enough others; otherwise the reaction is that to a crash
`prorl control stop`  the job ends with 75
scancel               the job is not requeued: after SIGTERM this process starts nothing and sends Slurm no requests
requeue by Slurm      if Slurm has started the job elsewhere, this process ends

The node to blame is the one that srun names (`Step.result`); otherwise one whose supervisor reported a failed process
(`Peers.agree`; a lost node reports nothing, and only the message names it); otherwise one that starts no program.  A
lost node that none of these finds is found in the next attempt: its supervisor does not begin (`Driver._missing`).

RUN/launches.jsonl records the beginning and the end of each attempt.  Standard library only, Python 3.9 at least: this
process runs on the host, outside the container that the run may use.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).absolute().parent.parent.parent  # of the link nemo_prorl/launcher
if not __package__:  # started by path: the modules of this folder must not shadow modules of the same name
    sys.path[0] = str(ROOT)

from nemo_prorl.errors import ConfigError, DataError, ProrlError, StoppedCleanly, UnfitMachine  # noqa: E402
from nemo_prorl.files import last_objects  # noqa: E402
from nemo_prorl.launcher.launches import PREEMPTED, Launches  # noqa: E402
from nemo_prorl.launcher.peers import StepOutcome, node_file  # noqa: E402
from nemo_prorl.launcher.slurm_queries import Job, say  # noqa: E402
from nemo_prorl.launcher.srun_step import Step  # noqa: E402
from nemo_prorl.launcher.submission import Submission, arguments  # noqa: E402

STOPPED, _UNFIT = StoppedCleanly.exit_code, UnfitMachine.exit_code
_WRONG = (ConfigError.exit_code, DataError.exit_code)  # exit codes of what no other node would fix
# Limit of attempts in a row without a new checkpoint, also counting those that preemption or Slurm ended, in multiples
# of launch.attempts.
_ALL_ATTEMPTS = 10
_SRUN_ENDS_S = 180.0  # seconds for processes to stop after node 0 reported the end (trainer.deadlines.stop_s)
_LOCK_WAIT_S = 300.0  # seconds for processes of an earlier attempt to release the run directory
_REACH_S, _REACH_IMAGE_S = 300.0, 1800.0  # seconds for all supervisors to begin; the same with an image to fetch
_LOOK_S = 60.0  # seconds between two checks that Slurm has not started the job elsewhere
_PATIENCE = 0.8  # share of the time between the signal and the job's end that the run has to stop
_REQUEUE_EVERY_S, _REQUEUED_S = 10.0, 300.0  # seconds between two requeue requests; for Slurm to end this process
_NEEDS_TRIES, _NEEDS_PAUSE_S = 3, 30.0  # attempts to start the project's Python; seconds between two of them


class Driver:
    """The batch script of one start of a Slurm job, from its beginning to its end or requeue."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.job = Job()
        self.submission = Submission(args, self.job)
        self.run_dir, self.needs = self.submission.run_dir, self.submission.needs
        self.launches = Launches(self.run_dir, self.job)
        self.stop_reason: str | None = None  # why the run has to stop; None: it does not
        self.terminated = False  # SIGTERM was received: Slurm ends the job
        self.removed = False  # whether the container has been removed
        self.reported = False  # node 0 reported how the newest attempt ended, and called on_event
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
        self.load_needs()
        self.submission.show()
        if self.submission.args.dry_run:
            self.submission.warn_of_paths()
            sys.stdout.write(shlex.join(self._command(1)) + "\n")
            return self.submission.check_records()
        self.submission.check_allocation()
        while True:
            if self.terminated or not self.is_ours():
                return STOPPED
            if self.stop_reason is not None:
                return self.requeue(STOPPED)
            own, every = self.launches.fruitless()
            if own >= self.needs["attempts"] or every >= _ALL_ATTEMPTS * self.needs["attempts"]:
                return self.end_without_checkpoint(every)
            attempt = self.launches.begin()
            action, code, end = self.decide(self.attempt(attempt))
            next_ = "requeue" if action == "leave_out" else action
            self.launches.end(
                attempt,
                code=end.code,
                what=end.what,
                next=next_,
                host=end.host or None,
                process=end.process or None,
                status=end.status,
            )
            cause = f" ({end.what})" if end.what else ""
            by_slurm = self.terminated and action == "give_up"
            then = "Slurm ends this start of the job, and may requeue it" if by_slurm else f"next: {next_}"
            say(f"attempt {attempt} ended with exit code {end.code}{cause}; {then}")
            if action in ("requeue", "leave_out"):
                return self.requeue(code, end.host if action == "leave_out" else "")
            if action != "again":
                return code
            self.wait(min(60.0, 5.0 * 2.0 ** self.launches.fruitless()[0]))

    def _command(self, attempt: int) -> list[str]:
        is_first = not self.job.restart and self.launches.begun_here <= 1  # `begun_here` already counts this attempt
        wait = 0.0 if is_first else _LOCK_WAIT_S
        return self.submission.node_command(attempt, wait, self.launches.file)

    def load_needs(self) -> None:
        """Read the job's requirements from the configuration.  Exit if the configuration is wrong."""
        for tries_left in reversed(range(_NEEDS_TRIES)):
            done = self.submission.run_allocation()
            if done.returncode in (0, *_WRONG, _UNFIT) or self.terminated or not tries_left:
                break
            say(
                f"{shlex.join(done.args)} ended with exit code {done.returncode}; trying again in {_NEEDS_PAUSE_S:g} s"
                f" (tries left: {tries_left})"
            )
            self.wait(_NEEDS_PAUSE_S)
        if done.returncode:
            self.submission.warn_of_paths()
            raise SystemExit(done.returncode if done.returncode in (*_WRONG, _UNFIT) else 1)
        self.needs.update(json.loads(done.stdout.splitlines()[-1]))

    def on_usr1(self, *_: Any) -> None:
        self.stop_reason = self.stop_reason or "SIGUSR1: the job's time limit is near"
        self.stop_run(self.stop_reason)

    def on_term(self, *_: Any) -> None:
        self.terminated = True
        self.stop_run("SIGTERM: Slurm is ending the job")

    def remove_container(self) -> None:
        """Remove the container of this start from its nodes, once.  pyxis does not remove it unless so configured."""
        made = self.submission.args.container_image and self.job.id and not self.submission.args.dry_run
        if made and not self.terminated and not self.removed:
            self.removed = True
            if not self.job.remove_container():
                name = f"pyxis_{self.job.container}"
                say(f"the container {name} may remain on a node. Fix: on that node, enroot remove --force {name}")

    def stop_run(self, reason: str) -> None:
        """Request a clean stop of the running attempt."""
        say(f"{reason}; stopping the run")
        if self.step is not None:
            self.step.stop()

    def attempt(self, number: int) -> StepOutcome:
        """Start the supervisors of all nodes once, wait until they have ended, and return how the run ended."""
        log, env = self.run_dir / "logs" / "all.log", self.submission.environment()
        leader = node_file(self.run_dir / "endpoints", 0, self.submission.attempt_id(number))
        self.step = step = Step(self._command(number), env, self.needs["num_nodes"], log, leader)
        if self.stop_reason is not None or self.terminated:  # a signal arrived before self.step was set
            step.stop()
        kill_reason = self._watch(step)
        self.step, self.reported = None, step.reported() is not None
        if not kill_reason:
            return step.result()
        missing = self._missing(step)
        return StepOutcome(1, kill_reason, missing[0] if len(missing) == 1 else "")

    def _missing(self, step: Step) -> list[str]:
        """Return the nodes whose supervisors have not begun."""
        return [host for host in self.job.nodes if host not in step.begun]

    def _watch(self, step: Step) -> str:
        """Wait until srun has ended.  Return why srun was killed before the run ended; empty if srun ended itself."""
        began = looked = time.monotonic()
        reach_s = _REACH_IMAGE_S if self.submission.args.container_image else _REACH_S
        kill_at: float | None = None
        stop_by: float | None = None
        kill_reason = ""
        while step.process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            step.forward_stop()
            if self.stop_reason is not None and stop_by is None:
                stop_by = now + _PATIENCE * max(0.0, (self.job.ends_at() or time.time() + 600.0) - time.time())
            if step.has_end():
                kill_at = kill_at or now + _SRUN_ENDS_S
            elif now - began > reach_s and (missing := self._missing(step)):
                hosts = f"{len(missing)} of {len(self.job.nodes)} nodes ({', '.join(missing)})"
                kill_reason, kill_at = f"the supervisors of {hosts} have not begun within {reach_s:g} s", now
            elif stop_by is not None and now > stop_by:
                kill_reason, kill_at = "the run did not stop before the job's time limit", now
            elif now - looked > _LOOK_S:
                looked = now
                if not self.is_ours():
                    kill_reason, kill_at = "Slurm has started the job on other nodes", now
            if kill_at is not None and now >= kill_at:
                step.kill()
                break
        return kill_reason

    # --- after an attempt ------------------------------------------------------------------------------------------

    def decide(self, end: StepOutcome) -> tuple[str, int, StepOutcome]:
        """Decide what the job does after an attempt.

        Returns:
            (action, exit code of the job, end of the attempt).  The action is "done", "again", "requeue", "leave_out"
            (requeue without the node `host` of the end) or "give_up".  The end says if Slurm preempted the run, and
            which node cannot start a program.
        """
        if end.code == 0:
            return "done", 0, end
        action, code, end = self._next(end)
        if self.terminated:  # SIGTERM arrived during the queries to Slurm: Slurm ends the job
            return "give_up", STOPPED if end.code == STOPPED else 1, end
        return action, code, end

    def _next(self, end: StepOutcome) -> tuple[str, int, StepOutcome]:
        code, state = end.code, self.job.state()
        if self.terminated or (state is not None and not (state.ours and state.running)):
            return "give_up", STOPPED if code == STOPPED else 1, end
        if self.stop_reason is not None:
            return "requeue", STOPPED, end
        if state is not None and state.preempted:
            return "requeue", STOPPED, replace(end, what=f"{PREEMPTED} {end.what}".strip())
        if code == STOPPED:
            return "requeue" if self.out_of_time() else "give_up", STOPPED, end
        if not self.reported:
            self.submission.report_failure(end.what)
        if code in _WRONG:
            return "give_up", code, end
        # Ask all nodes first: a lost node leaves errors on the others, and the end may name one of them.
        lost = self.unresponsive_node() if code == 1 and state is not None else ""
        end = replace(end, host=lost or end.host)
        if end.host and (lost or code == _UNFIT or self.failed_before(end.host)) and self.job.spare(end.host):
            return "leave_out", code, end
        return "give_up" if code == _UNFIT else "again", code, end

    def is_ours(self) -> bool:
        """Return whether this process still runs the job: False once Slurm has started the job again.

        The result is True if Slurm does not answer.
        """
        state = self.job.state()
        return state is None or state.ours

    def out_of_time(self) -> bool:
        """Return whether the run stopped because of trainer.deadlines.job_s, not on request of a user."""
        kinds = ("start", "resume", "stop", "failure", "finish")  # a dropped request may come after them
        ends = [event for event in last_objects(self.run_dir / "journal.jsonl") if event.get("event") in kinds]
        last = ends[-1] if ends else {}
        return last.get("event") == "stop" and "trainer.deadlines.job_s" in last.get("reason", "")

    def unresponsive_node(self) -> str:
        """Return the first node of the job that cannot start a program; an empty string if all nodes can."""
        return next((host for host in self.job.nodes if not self.terminated and not self.job.starts(host)), "")

    def failed_before(self, host: str) -> bool:
        """Return whether `host` also made the previous attempt fail (in the same start of the job)."""
        last = self.launches.last_end()
        return last is not None and last["restart"] == self.job.restart and last["host"] == host

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a signal requests the end of the job."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.terminated and self.stop_reason is None:
            time.sleep(0.2)

    def end_without_checkpoint(self, attempts: int) -> int:
        last = self.launches.last_end()
        cause = f"; cause of the last failure: {last['what']}" if last else ""
        at = f"after step {step}" if (step := self.launches.step()) >= 0 else "at all"
        say(
            f"{attempts} attempts in a row made no new checkpoint {at}"
            f" (launch.attempts={self.needs['attempts']}); the job ends{cause}. Logs: {self.run_dir / 'logs'}"
        )
        return 1

    def requeue(self, code: int, without: str = "") -> int:
        """Requeue the job; Slurm then ends this process.

        Args:
            code: exit code to return if Slurm does not end this process.
            without: node to exclude from all later starts; empty: none.
        """
        self.remove_container()
        give_up_at = (self.job.ends_at() or time.time() + _REQUEUED_S) - _REQUEUE_EVERY_S
        while not self.terminated and self.is_ours():
            if self.job.requeue(without):
                say(f"job {self.job.id} requeued{f' without node {without}' if without else ''}")
                ended_by = time.monotonic() + _REQUEUED_S
                while time.monotonic() < ended_by and not self.terminated:
                    time.sleep(0.2)
                break
            if time.time() > give_up_at:
                say(f"job {self.job.id} could not be requeued. Fix: submit it again with the same sbatch command")
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
