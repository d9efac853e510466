"""The files by which a rollout engine tells the other processes of its run where it listens and that it has served.

Runs in the rollout environment.
"""

import argparse
import os
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from nemo_prorl.files import write_json
from nemo_prorl.rollout.engine import SERVED_SUFFIX
from nemo_prorl.schema import Constraint, Count, Number

UNPUBLISHED: Literal[-1] = -1  # weight version of an engine that has the weights of its model folder


class EngineEndpoint(TypedDict):
    """The address of a rollout engine of a run."""

    kind: Literal["engine"]
    index: Count
    url: Annotated[str, Constraint(pattern="^http://")]
    pid: Number
    state: Literal["ready"]
    weights_dir: str
    """the only folder from which the engine loads weights, on its own node"""
    weight_version: Literal[-1]
    """-1: the engine has the weights of its model folder; GET /health returns the current version"""


def write_endpoint(args: argparse.Namespace, port: int) -> None:
    """Write the endpoint file of this engine atomically."""
    host = args.public_host or args.host
    endpoint: EngineEndpoint = {
        "kind": "engine",
        "index": args.index,
        "url": f"http://{host}:{port}",
        "pid": os.getpid(),
        "state": "ready",
        "weights_dir": args.weights_dir,
        "weight_version": UNPUBLISHED,
    }
    write_json(Path(args.endpoint_file), endpoint)


def served_file(endpoint_file: str) -> Path:
    """Return the file that an engine makes when it has generated its first response."""
    return Path(endpoint_file).with_suffix(SERVED_SUFFIX)
