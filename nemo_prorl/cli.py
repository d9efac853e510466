"""The `prorl` command.  Results go to standard output, messages to standard error.

Exit codes: 0 done; 2 wrong use or configuration; 3 this machine or cluster is not fit; 4 the data is bad; 75 stopped
cleanly, the same command continues; 1 anything else.  What a command needs is imported when it runs, so that `--help`
and a wrong configuration answer within two seconds.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nemo_prorl.errors import ConfigError, ProrlError, disk_full

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")  # torch says it at import
    run: Callable[[argparse.Namespace], int | None] = arguments.run_command
    try:
        return run(arguments) or 0
    except ProrlError as error:
        _log.error("prorl: %s", error)
        return error.exit_code
    except BrokenPipeError:
        return 0  # the reader of our output has seen enough
    except Exception as error:
        if (text := disk_full(error)) is None:
            raise
        _log.error("prorl: %s", text)
        return 1
    except KeyboardInterrupt:
        _log.error("prorl: interrupted")
        return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if wrong := [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:  # overrides that stand after an option
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prorl",
        description="Prolonged reinforcement learning with verifiable rewards, on a laptop's CPU and on H100 nodes.",
        epilog="Configuration is overridden in Hydra's way: KEY=VALUE, or a group: cluster=laptop, stage=run1.",
    )
    parser.add_argument("--version", action="version", version=f"prorl {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _add(commands, "train", _train, "run the laptop job, a stage or any run; continues what run_dir holds")
    _add_overrides(train)
    train.add_argument("--dry-run", action="store_true", help="print the resolved configuration and start nothing")

    warmup = _add(commands, "warmup", _warmup, "only the supervised steps before the reinforcement learning")
    _add_overrides(warmup)

    plan = _add(commands, "plan", _plan, "the run as a table")
    _add_overrides(plan)

    status = _add(commands, "status", _status, "where a run is")
    status.add_argument("run_dir", metavar="RUN", type=Path, help="its run directory")

    import_hf = _add(commands, "import-hf", _import_hf, "a Hugging Face model folder to a checkpoint of this project")
    import_hf.add_argument("hf_dir", metavar="HF_DIR", type=Path)
    import_hf.add_argument("out", metavar="OUT", type=Path)

    export_hf = _add(commands, "export-hf", _export_hf, "a checkpoint to a Hugging Face model folder")
    export_hf.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    export_hf.add_argument("out", metavar="OUT", type=Path)

    from nemo_prorl.rewards import cli as rewards_cli

    rewards_cli.add_parser(commands)
    commands.choices["rewards"].set_defaults(run_command=rewards_cli.run)

    from nemo_prorl.launcher import doctor
    from nemo_prorl.recipe import control, replay
    from nemo_prorl.rewards import reverify

    control.add_parser(commands)
    replay.add_parser(commands)
    reverify.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return version("nemo-prorl")
    except PackageNotFoundError:
        return "(not installed)"


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run_command=run)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE, as in conf/")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a run's config.yaml, instead of conf/")


def _train(arguments: argparse.Namespace) -> int | None:
    from nemo_prorl import settings

    cfg = settings.load_run(arguments.overrides, arguments.config)
    text = settings.resolved_yaml(cfg)
    if arguments.dry_run:
        sys.stdout.write(text)
        return 0
    from nemo_prorl import launcher

    result: int | None = launcher.run(cfg, text)
    return result


def _warmup(arguments: argparse.Namespace) -> int | None:
    from nemo_prorl import settings

    cfg = settings.load_run(arguments.overrides, arguments.config)
    if cfg.trainer.warmup.steps == 0:
        raise ConfigError("trainer.warmup.steps=0: a warm-up needs 1 step at least")
    from nemo_prorl import launcher

    result: int | None = launcher.warmup(cfg, settings.resolved_yaml(cfg))
    return result


def _plan(arguments: argparse.Namespace) -> None:
    from nemo_prorl import overview, settings

    sys.stdout.write(overview.plan(settings.load_run(arguments.overrides, arguments.config)))


def _status(arguments: argparse.Namespace) -> None:
    from nemo_prorl import overview

    sys.stdout.write(overview.status(arguments.run_dir))


def _import_hf(arguments: argparse.Namespace) -> None:
    from nemo_prorl.policy.tools import import_hf

    import_hf(arguments.hf_dir, arguments.out)


def _export_hf(arguments: argparse.Namespace) -> None:
    from nemo_prorl.policy.tools import export_hf

    export_hf(arguments.checkpoint, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
