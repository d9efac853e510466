"""Types of launches.jsonl, of chain.json, of fork.json, and of the event that the `on_event` command reads.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from nemo_prorl.schema import Amount, Constraint, Count, Number, Time

Words = list[str]


class _LaunchRecord(TypedDict):
    job: str
    """Slurm's job id; the same after a requeue"""
    restart: Count
    """how often Slurm started the job before (SLURM_RESTART_COUNT)"""
    attempt: Number
    """number of the attempt of this job, from 1"""
    nodes: Annotated[Words, Constraint(minItems=1)]
    step: Annotated[int, Constraint(minimum=-1)]
    """step of the newest complete checkpoint; -1: there is none"""
    time: Time


class LaunchBegin(_LaunchRecord):
    """The beginning of an attempt of a Slurm job."""

    event: Literal["begin"]


class LaunchEndFields(TypedDict):
    """The cause of an attempt's end, and the next action of the job."""

    code: int
    """exit code of the run"""
    what: str
    """cause of the end, in one sentence"""
    host: str | None
    """node that caused the end; null: no single node did"""
    next: Annotated[str, Constraint(enum=["done", "again", "requeue", "give_up"])]
    """what the job does next: done, give_up: it ends; again: the run starts again; requeue: Slurm requeues the job"""
    process: str | None
    """process that failed, such as trainer-3"""
    status: int | None
    """exit status of that process; negative: the signal that killed it"""


class LaunchEnd(_LaunchRecord, LaunchEndFields):
    """The end of an attempt of a Slurm job."""

    event: Literal["end"]


class ChainEntry(TypedDict):
    """A stage of a chain, and the Slurm job that runs it."""

    stage: str
    """name of the stage, and of its run directory beside this file"""
    job: str | None
    """Slurm's id of the stage's last job; null: the stage was finished before"""
    command: Words | None
    """the sbatch command that submitted the job"""
    time: Annotated[float | None, Constraint(description="time of the submission, seconds since 1970, UTC")]
    max_steps: Number


class ChainRecord(TypedDict):
    """The record of `prorl launch`, in chain.json of the chain's folder: the stages and their Slurm jobs."""

    command: Words
    """the last prorl launch command"""
    time: Annotated[float, Constraint(description="time of that command, seconds since 1970, UTC")]
    stages: Annotated[list[ChainEntry], Constraint(minItems=1)]


class ForkArm(TypedDict):
    """An arm of a fork."""

    text: str
    """the arm, as in --arms"""
    folder: str
    """name of its run directory beside this file"""
    job: str | None
    """id of its Slurm job; null: none was submitted"""


class ForkRecord(TypedDict):
    """The record of `prorl fork`, in fork.json of the folder of its arms."""

    format: Literal[1]
    checkpoint: str
    """the checkpoint that all arms begin from"""
    steps: Number
    """steps of each arm"""
    early_noise: Amount | None
    """trainer.resets.trial_noise, by which --early decides; null: without --early"""
    arms: Annotated[list[ForkArm], Constraint(minItems=1)]
    """in order; the others are compared with the first"""


HookName = Literal["alarm", "reset", "failure", "stop", "finish"]


class HookFields(TypedDict, total=False):
    """Fields that only some events have."""

    journal: dict[str, Any]
    """the line of journal.jsonl that caused the event"""
    process: str
    """process that failed, such as trainer-3"""
    status: int | None
    """exit status of that process; negative: the signal that killed it"""
    kind: str
    """class of the error"""
    log: Words
    """last lines of the log of that process, or further lines of the error's message"""
    dropped: Number
    """number of events dropped before this one, because too many waited"""


class HookEvent(HookFields):
    """An event, as the `on_event` command reads it on standard input."""

    event: HookName
    step: Count
    what: str
    """description of the event, in one line"""
    time: Time
    run_dir: str
    host: str
