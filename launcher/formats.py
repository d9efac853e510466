"""The files of a launch: launches.jsonl, chain.json, and the event that the hook of a run reads.

Standard library only, Python 3.9 at least (see `slurm_driver.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from nemo_prorl.schema import Constraint, Count, Number, Time

Words = list[str]


class _LaunchRecord(TypedDict):
    job: str
    """Slurm's job id; stays when the job is requeued"""
    restart: Count
    """how often Slurm started the job before (SLURM_RESTART_COUNT)"""
    attempt: Number
    """which start by this job, from 1"""
    nodes: Annotated[Words, Constraint(minItems=1)]
    step: Annotated[int, Constraint(minimum=-1)]
    """of the newest complete checkpoint; -1: there is none"""
    time: Time


class LaunchBegin(_LaunchRecord):
    """A start of a run by a Slurm job."""

    event: Literal["begin"]


class LaunchEndFields(TypedDict):
    """What ended an attempt, and what the job does now."""

    code: int
    """exit code of the run"""
    what: str
    host: str | None
    """the node that the end is put down to"""
    next: Annotated[str, Constraint(enum=["done", "again", "requeue", "give_up"])]
    process: str | None
    """the process that died"""
    status: int | None
    """its exit status; negative: the signal"""


class LaunchEnd(_LaunchRecord, LaunchEndFields):
    """The end of a run that a Slurm job started."""

    event: Literal["end"]


class ChainEntry(TypedDict):
    """A stage that was launched."""

    stage: str
    """its run directory lies beside this file under this name"""
    job: str | None
    """Slurm's id of its last job; null: finished without a job"""
    command: Words | None
    """the call of sbatch"""
    time: Annotated[float | None, Constraint(description="of the submission, seconds since 1970, UTC")]
    max_steps: Number


class ChainRecord(TypedDict):
    """What `prorl launch` submitted to Slurm, in the chain's folder."""

    command: Words
    """the last call of prorl launch"""
    time: Annotated[float, Constraint(description="of that call, seconds since 1970, UTC")]
    stages: Annotated[list[ChainEntry], Constraint(minItems=1)]


HookName = Literal["alarm", "reset", "failure", "stop", "finish"]


class HookFields(TypedDict, total=False):
    """What only some events have."""

    journal: dict[str, Any]
    """the line of journal.jsonl that the event is from"""
    process: str
    status: int | None
    """exit status; negative: the signal"""
    kind: str
    """class of the error"""
    log: Words
    dropped: Number
    """events before this one that were not passed on"""


class HookEvent(HookFields):
    """What the command in on_event reads on standard input."""

    event: HookName
    step: Count
    what: str
    time: Time
    run_dir: str
    host: str
