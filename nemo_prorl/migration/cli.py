"""The command `prorl convert`: another trainer's configuration as overrides of this project."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.files import read
from nemo_prorl.migration.names import TITLES, looks_like
from nemo_prorl.migration.rules import Converted, convert


def add_parser(commands: Any) -> None:
    """Add `convert` to the main command line."""
    text = "print another trainer's configuration as overrides, and what has no counterpart"
    parser = commands.add_parser("convert", help=text, description=text)
    parser.add_argument("trainer", choices=list(TITLES), help="trainer that FILE configures")
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="configuration: YAML, JSON, shell script, or Python with GRPOConfig"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    given = read(args.file)
    if found := looks_like(args.trainer, given):
        other, keys = found
        raise ConfigError(
            f"{args.file}: expected settings of {TITLES[args.trainer]}; this looks like {TITLES[other]}"
            f" ({', '.join(keys[:3])}). Fix: prorl convert {other} {shlex.quote(str(args.file))}"
        )
    made = convert(args.trainer, given)
    if len(made.left) == len(given):
        raise ConfigError(f"{args.file}: expected settings of {TITLES[args.trainer]}; got only unknown settings")
    sys.stdout.write(text(made, TITLES[args.trainer]))
    return 0


def text(made: Converted, title: str) -> str:
    """Return a shell command with the overrides, then, as comments, the notes and the settings without a counterpart.

    Args:
        title: name of the other trainer for the user, such as `NeMo-RL`.
    """
    words = [shlex.quote(f"{key}={_value(value)}") for key, value in sorted(made.overrides.items())]
    lines = [" \\\n    ".join(["prorl train cluster=h100_4x8", *words])]
    lines += [f"# {note}" for note in made.notes]
    if made.left:
        lines.append(f"# {title}'s settings without a counterpart here:")
        lines += [f"#   {key}={_value(value)}" for key, value in sorted(made.left.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
