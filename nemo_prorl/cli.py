"""The `prorl` command.  Results go to standard output, messages to standard error.

Exit codes: 0 done; 2 wrong use or configuration; 3 this machine or cluster is not fit; 4 the data is bad; 75 stopped
cleanly, the same command continues; 1 anything else.  Each command imports its modules when it runs, so that `--help`
and the error for a wrong configuration appear within two seconds.
"""

import argparse
import gc
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nemo_prorl import __version__
from nemo_prorl.errors import ConfigError, ProrlError, UnfitMachine, did_you_mean, disk_full

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_prorl.launcher.events import Events

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        run: Callable[[argparse.Namespace], int | None] = arguments.run_command
        return run(arguments) or 0
    except ProrlError as error:
        _log.error("prorl: %s", error)
        return error.exit_code
    except BrokenPipeError:
        return 0  # the reader closed the pipe, such as `prorl status RUN | head`
    except ModuleNotFoundError as error:
        if (name := str(error.name)).startswith("nemo_prorl"):
            raise
        _log.error(
            "prorl: this command needs the Python package %s, which %s does not have. Fix: run `make setup` in a"
            " checkout of the project and use .venv/train/bin/prorl",
            name,
            sys.executable,
        )
        return UnfitMachine.exit_code
    except Exception as error:
        if (text := disk_full(error)) is None:
            raise
        _log.error("prorl: %s", text)
        return 1
    except KeyboardInterrupt:
        _log.error("prorl: interrupted")
        return 1
    finally:
        if argv is None:  # the process ends: a late Ctrl-C would replace its exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gc.freeze()  # at its end Python would look through all objects of torch, for a second or more


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(_join_sbatch_values(argv))
    if wrong := [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]:
        hydra = "; write config_dir=DIR" if any(word.startswith("--config-dir") for word in wrong) else ""
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{hydra or _as_key(wrong[0], arguments)}")
    if rest:  # overrides after an option
        arguments.overrides += rest
    return arguments


def _as_key(word: str, arguments: argparse.Namespace) -> str:
    """Return how to give an option that is a key, such as `--max-steps 3`; "" for a command without overrides."""
    from nemo_prorl.config import all_keys

    if not hasattr(arguments, "overrides"):
        return ""
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    same = [key.name for key in all_keys() if key.name == name or key.name.endswith(f".{name}")]
    return f"; keys are given as KEY=VALUE, such as {same[0] if same else 'trainer.grpo.max_steps'}=VALUE"


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the command that is meant by a misspelt one."""

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"argument \S+: invalid choice: '(\S+)' \(choose from (.*)\)$", message):
            hint = did_you_mean(match[1], re.findall(r"[\w-]+", match[2]))
            message += hint and f".{hint}"
        super().error(message)


def _join_sbatch_values(argv: list[str]) -> list[str]:
    """Join `--sbatch --time=60` to one word; otherwise argparse reads `--time` as an option of prorl."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--sbatch":
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="prorl",
        description="Prolonged reinforcement learning with verifiable rewards, on a laptop's CPU and on H100 nodes.",
        epilog="Hydra overrides: KEY=VALUE sets a key, GROUP=NAME chooses a group (cluster=laptop, stage=run1).",
    )
    parser.add_argument("--version", action="version", version=f"prorl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = _add(
        commands, "train", _train, "start a run, by default the laptop job; or continue the run that run_dir contains"
    )
    _add_overrides(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration and data files, print the configuration, start nothing",
    )

    warmup = _add(commands, "warmup", _warmup, "do only the supervised steps that precede reinforcement learning")
    _add_overrides(warmup)

    _add_plan(commands)

    status = _add(commands, "status", _status, "print the progress of a run, or of each stage of a chain")
    status.add_argument("run_dir", metavar="RUN", type=Path, help="run directory, or the folder that prorl launch made")
    status.add_argument("--json", action="store_true", help="print one JSON object instead of the table")

    import_hf = _add(
        commands, "import-hf", _import_hf, "convert a Hugging Face model folder to a checkpoint of this project"
    )
    import_hf.add_argument("hf_dir", metavar="HF_DIR", help="Hugging Face model folder, or a model's name on the hub")
    import_hf.add_argument("out", metavar="OUT", type=Path, help="new folder for the checkpoint")

    export_hf = _add(commands, "export-hf", _export_hf, "convert a checkpoint to a Hugging Face model folder")
    export_hf.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="checkpoint, or run directory")
    export_hf.add_argument("out", metavar="OUT", type=Path, help="new folder for the model")
    which = "checkpoint of a run directory: newest, best or a step number (default: newest)"
    export_hf.add_argument("--checkpoint", metavar="WHICH", dest="which", default="newest", help=which)

    text = "try a loss, an advantage or a reset rule, by name or of your own, on the properties that training relies on"
    check = _add(commands, "check-function", _check_function, text)
    kind = "what it is: the key trainer.grpo.loss, trainer.grpo.advantage or trainer.resets.rules.asks would name it"
    check.add_argument("kind", choices=("loss", "advantage", "reset-rule"), help=kind)
    check.add_argument("place", metavar="FUNCTION", help="a name, FILE.py:FUNCTION, or MODULE:FUNCTION")
    _add_overrides(check)

    _add_parts(commands)
    return parser


def _add_parts(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands that bring their own parsers."""
    from nemo_prorl.data.prepare import cli as data_cli
    from nemo_prorl.evaluation import cli as evaluation_cli
    from nemo_prorl.evaluation import probe, watch
    from nemo_prorl.launcher import chain, doctor, fork, replayed
    from nemo_prorl.lifecycle import control
    from nemo_prorl.migration import cli as migration_cli
    from nemo_prorl.planning import bisect, replay
    from nemo_prorl.report import audit, forecast
    from nemo_prorl.report import cli as report_cli
    from nemo_prorl.rewards import cli as rewards_cli
    from nemo_prorl.rewards import reverify

    for module in (
        rewards_cli,
        data_cli,
        chain,
        control,
        replay,
        bisect,
        replayed,
        audit,
        fork,
        migration_cli,
        reverify,
    ):
        module.add_parser(commands)
    commands.choices["rewards"].set_defaults(run_command=rewards_cli.run)
    doctor.add_parser(commands, _try_step)
    for module in (evaluation_cli, probe, watch, report_cli, forecast):
        module.add_parser(commands)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print the run, its chain of stages and its memory as tables; needs no GPU"
    plan = _add(commands, "plan", _plan, text)
    plan.description = f"{text}.  Exit code 2: `prorl train` would refuse this run on any machine."
    _add_overrides(plan)
    plan.add_argument(
        "--mean-tokens",
        metavar="N",
        type=float,
        help="mean response length in tokens, to estimate totals; default: the value of the run in --measured",
    )
    plan.add_argument(
        "--tokens-per-s",
        metavar="X",
        type=float,
        help="tokens generated per second by all devices, averaged over whole steps; default: the value of the run in"
        " --measured",
    )
    plan.add_argument(
        "--measured", metavar="RUN", type=Path, help="run directory to take --mean-tokens and --tokens-per-s from"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def _try_step(cfg: "DictConfig", config_text: str, events: "Events") -> int:
    """Try one step for `prorl doctor --preflight`; passed to the doctor, which must not import `one_node`."""
    from nemo_prorl.launcher import one_node

    return one_node.preflight(cfg, config_text, events)


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
    parser.add_argument(
        "overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE; conf/ has the keys and their defaults"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="config.yaml of a run, used instead of conf/")


def _train(arguments: argparse.Namespace) -> int | None:
    from nemo_prorl import api, settings

    if arguments.dry_run:
        from nemo_prorl.launcher.prepare import start_faults, warn_of_origin
        from nemo_prorl.launcher.run_data import check_files

        cfg = settings.load_run(arguments.overrides, arguments.config)
        for error, _ in start_faults(cfg):
            raise error
        check_files(cfg).tell()
        warn_of_origin(cfg)
        sys.stdout.write(settings.resolved_yaml(cfg))
        return 0
    if not arguments.overrides and arguments.config is None:
        _log.info("no override was given: this is the laptop job, about ten minutes, in runs/laptop")
    return api.start(arguments.overrides, arguments.config)[1]


def _warmup(arguments: argparse.Namespace) -> int | None:
    from nemo_prorl import settings

    cfg = settings.load_run(arguments.overrides, arguments.config)
    if cfg.trainer.warmup.steps == 0:
        raise ConfigError("trainer.warmup.steps=0: expected at least 1 step for a warm-up")
    from nemo_prorl.launcher import one_node

    result: int | None = one_node.warmup(cfg, settings.resolved_yaml(cfg))
    return result


def _plan(arguments: argparse.Namespace) -> int:
    import json

    from nemo_prorl import settings
    from nemo_prorl.launcher.prepare import start_faults, warn_of_origin
    from nemo_prorl.launcher.run_data import check_files
    from nemo_prorl.planning import overview
    from nemo_prorl.planning.algorithm import algorithm
    from nemo_prorl.planning.plan import plan_chain, read_rates

    cfg = settings.load_run(arguments.overrides, arguments.config, need_files=False)
    checked = check_files(cfg, will_start=False)
    rates = read_rates(cfg, arguments.mean_tokens, arguments.tokens_per_s, arguments.measured)
    chain = plan_chain(cfg, arguments.overrides, rates, arguments.config)
    if arguments.json:
        rows = overview.run_rows(cfg, checked.words())
        run = {"run": rows, "algorithm": algorithm(cfg), **checked.as_json()}
        sys.stdout.write(json.dumps(run | chain.as_json(), indent=1) + "\n")
    else:
        sys.stdout.write(overview.plan(cfg, chain, checked.words()))
    sys.stdout.flush()
    warn_of_origin(cfg)
    code = 0
    for error, only_here in start_faults(cfg):
        if only_here:
            _log.warning("if it started on this machine, `prorl train` would refuse this run: %s", error)
        else:
            _log.error("prorl: `prorl train` would refuse this run: %s", error)
            code = code or error.exit_code
    return code


def _status(arguments: argparse.Namespace) -> None:
    from nemo_prorl.report import status

    sys.stdout.write(status.status(arguments.run_dir, arguments.json))


def _check_function(arguments: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from nemo_prorl import settings
    from nemo_prorl.algorithms import properties

    kind, place = arguments.kind, arguments.place
    named = f"trainer.resets.rules.asks=['{place}']" if kind == "reset-rule" else f"trainer.grpo.{kind}={place}"
    cfg: Any = OmegaConf.to_object(settings.load([*arguments.overrides, named], arguments.config))
    config = cfg.trainer.resets.rules if kind == "reset-rule" else cfg.trainer.grpo
    place = config.asks[0] if kind == "reset-rule" else getattr(config, kind)
    result = properties.trial(kind, place, config)
    sys.stdout.write(f"{result.words()}\n")
    return 1 if result.faults else 0


def _import_hf(arguments: argparse.Namespace) -> None:
    from nemo_prorl.data.hub import model_folder
    from nemo_prorl.policy.tools import import_hf

    import_hf(model_folder(arguments.hf_dir, "HF_DIR", weights=True), arguments.out)


def _export_hf(arguments: argparse.Namespace) -> None:
    from nemo_prorl.policy.tools import export_hf

    export_hf(arguments.checkpoint, arguments.out, arguments.which)


if __name__ == "__main__":
    sys.exit(main())
