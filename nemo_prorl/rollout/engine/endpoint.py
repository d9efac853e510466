"""The files by which a rollout engine tells the other processes of its run where it listens and that it has served.

Runs in the rollout environment.
"""

import argparse
import os
from pathlib import Path
from typing import Literal

from nemo_prorl.rollout.engine import SERVED_SUFFIX
from nemo_prorl.service import EngineEndpoint, write_endpoint

UNPUBLISHED: Literal[-1] = -1  # weight version of an engine that has the weights of its model folder


def announce(args: argparse.Namespace, port: int) -> None:
    """Write the endpoint file of this engine."""
    endpoint: EngineEndpoint = {
        "kind": "engine",
        "index": args.index,
        "url": f"http://{args.public_host or args.host}:{port}",
        "pid": os.getpid(),
        "state": "ready",
        "weights_dir": args.weights_dir,
        "weight_version": UNPUBLISHED,
    }
    write_endpoint(Path(args.endpoint_file), endpoint)


def served_file(endpoint_file: str) -> Path:
    """Return the file that an engine makes when it has generated its first response."""
    return Path(endpoint_file).with_suffix(SERVED_SUFFIX)
