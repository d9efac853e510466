"""`prorl doctor`: check that this machine can run the project, or a given run.  Prints one line per check, with a fix.

    machine.py            Python, packages, rollout environment, sandbox, reward plugins
    storage.py            run directory, disk, /dev/shm and host memory, compared with the needs from sizing.memory
    devices.py            GPUs, driver, torch, NVIDIA's container
    model.py              model folder: shape, tokenizer, eos, chat template
    network.py            ports, interfaces, the Slurm allocation
    nodes.py node_probe.py  clocks, run directory and versions of all nodes, through srun
    trial_step.py          one step at full context on this node, with all processes of a run

Each module measures facts, and assesses them in functions that depend only on the measured facts.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, DataError, ProrlError, UnfitMachine
from nemo_prorl.launcher.doctor.check import Check

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_prorl.launcher.doctor.trial_step import TryStep


RECORDS = "records"  # the check of the records; its failure alone is not one of the machine


def add_parser(commands: Any, try_step: "TryStep") -> None:
    """Add `doctor` to the main command line.  `try_step`: function that runs one step for --preflight."""
    text = "check that this machine can run the project; with overrides or --config: that it can run this configuration"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE; conf/ has the keys and their defaults"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="config.yaml of a run, used instead of conf/")
    parser.add_argument("--nodes", action="store_true", help="compare all nodes of the run, through srun")
    parser.add_argument("--srun", metavar="COMMAND", help="srun command for --nodes, with its options; default: srun")
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="run one step at full context and batch on this node; measures memory and time",
    )
    text = "with --preflight: try only N responses of each rank's update; default: all"
    parser.add_argument("--rows", type=int, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object per check")
    parser.add_argument(
        "--rollout-python",
        type=Path,
        metavar="PYTHON",
        help="Python of the rollout environment; default: rollout.python, or .venv/rollout/bin/python",
    )
    parser.set_defaults(run_command=partial(run, try_step=try_step))


def run(args: argparse.Namespace, try_step: "TryStep") -> int:
    """Print the checks; return 0 if none fails, 4 if only the records fail, otherwise 3.

    Raises ConfigError for an invalid configuration.
    """
    cfg = None
    if args.rows is not None and (args.rows < 1 or not args.preflight):
        raise ConfigError(f"--rows {args.rows}: expected 1 or more, together with --preflight")
    if args.srun is not None and not args.nodes:
        raise ConfigError(f"--srun {args.srun}: expected together with --nodes")
    if args.overrides or args.config or args.nodes or args.preflight:
        from nemo_prorl import settings

        cfg = settings.load_run(args.overrides, args.config, need_files=False)
    failed: set[str] = set()
    results = checks(cfg, args.rollout_python, (args.srun or "srun") if args.nodes else None)
    if cfg is not None and args.preflight:
        from nemo_prorl.launcher.doctor import trial_step

        if args.rollout_python is not None:
            cfg.rollout.python = str(args.rollout_python)
        results = chain(results, trial_step.check_step(cfg, try_step, args.rows))
    for check in results:
        if check.state == "fail":
            failed.add(check.name)
        sys.stdout.write((json.dumps(asdict(check)) if args.json else check.line()) + "\n")
        sys.stdout.flush()
    if failed == {RECORDS}:
        return DataError.exit_code
    return UnfitMachine.exit_code if failed else 0


def checks(cfg: "DictConfig | None" = None, python: Path | None = None, srun: str | None = None) -> Iterator[Check]:
    """Yield all checks in the order in which they are printed.

    Args:
        cfg: the run to check; None: check only this machine.
        python: Python of the rollout environment; None: rollout.python, or without `cfg` that of
            .venv/rollout.
        srun: command that starts the probes of all nodes; None: do not compare the nodes.
    """
    from nemo_prorl.launcher.doctor import devices, machine, model, network, nodes, storage
    from nemo_prorl.settings import rollout_python

    default = cfg.rollout.python if cfg is not None else rollout_python(".venv/rollout/bin/python")
    python = python or Path(default)
    on_gpu = cfg is not None and cfg.trainer.accelerator == "gpu"
    yield machine.python()
    yield machine.packages()
    yield machine.rollout(python, on_gpu)
    if cfg is None:
        yield from storage.check_sizes()
    else:
        yield from data(cfg)
        yield from storage.check_storage(cfg)
        yield from model.check_model(cfg)
        yield from devices.check_gpus(cfg, python)
        yield from network.check_network(cfg, os.environ)
    yield from machine.sandbox()
    yield from machine.plugins()
    if cfg is not None and srun is not None:
        yield from nodes.check_nodes(cfg, srun)


def data(cfg: "DictConfig") -> Iterator[Check]:
    """Check the data of a run, with the functions that also check the data when the run starts."""
    from nemo_prorl.data.prepared import faults, read_sources
    from nemo_prorl.launcher.run_data import check_files

    missing = [Check("data", "fail", fault) for fault in faults(cfg)]
    names = dict.fromkeys(source.name for source in read_sources(cfg))
    yield from missing or [Check("data", "pass", ", ".join(names))]
    try:
        checked = check_files(cfg, will_start=False)
    except ProrlError as error:
        yield Check(RECORDS, "fail", str(error))
    else:
        yield Check(RECORDS, "pass", f"lengths of prompts: {checked.words()}")
