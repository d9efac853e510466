"""The command `prorl convert`: another trainer's configuration as overrides of this project."""

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.converted import Converted
from nemo_prorl.migration.defaults import NO_DEFAULT
from nemo_prorl.migration.files import read
from nemo_prorl.migration.names import TITLES, looks_like
from nemo_prorl.migration.rules import convert

_SEVERAL = 3  # settings without a default are one line if there are more
_PLAIN = re.compile(r"[\w/\-+.%@?]+")  # what Hydra's overrides accept without quotation marks


def add_parser(commands: Any) -> None:
    """Add `convert` to the main command line."""
    text = "print another trainer's configuration as overrides, and what differs; exit code 2 if a value is missing"
    text += " or a key unknown"
    parser = commands.add_parser("convert", help=text, description=text)
    parser.add_argument("trainer", choices=list(TITLES), help="trainer that FILE configures")
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="configuration: YAML, JSON, shell script, or Python with GRPOConfig"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    settings = read(args.file)
    if likely := looks_like(args.trainer, settings):
        other, keys = likely
        raise ConfigError(
            f"{args.file}: expected settings of {TITLES[args.trainer]}; this looks like {TITLES[other]}"
            f" ({', '.join(keys[:3])}). Fix: prorl convert {other} {shlex.quote(str(args.file))}"
        )
    made = convert(args.trainer, settings)
    if len(made.left) + len(made.misspelt) == len(made.given):
        raise ConfigError(f"{args.file}: expected settings of {TITLES[args.trainer]}; got only unknown settings")
    sys.stdout.write(text(made, TITLES[args.trainer]))
    return 2 if made.unknown or made.misspelt else 0


def text(made: Converted, title: str) -> str:
    """Return a shell command with the overrides, then, as comments, what the user must know.

    Args:
        title: name of the other trainer for the user, such as `NeMo-RL`.
    """
    words = [shlex.quote(f"{key}={_value(value)}") for key, value in sorted(made.overrides.items())]
    lines = [" \\\n    ".join(["prorl train cluster=h100_4x8", *words])]
    lines += _section("set this yourself:", _asked(made.unknown))
    lines += _section(f"unknown to {title}:", [f"{key}: {meant}" for key, meant in made.misspelt.items()])
    lines += _section(f"not the same as in {title}:", made.differs)
    lines += [f"# {note}" for note in made.notes]
    if made.unused:
        reasons = ", ".join(f"{times} {reason}" for reason, times in Counter(made.unused.values()).most_common())
        lines.append(f"# no override needed for {len(made.unused)} settings: {reasons}")
    lines += _section(
        f"{title}'s settings without a counterpart here:", [f"{key}={made.left[key]}" for key in sorted(made.left)]
    )
    return "\n".join(lines) + "\n"


def _asked(unknown: Mapping[str, str]) -> list[str]:
    """Return what the user must set, in one line for all keys that a missing base may have."""
    absent = {key: reason.removesuffix(NO_DEFAULT) for key, reason in unknown.items() if reason.endswith(NO_DEFAULT)}
    absent = absent if len(absent) > _SEVERAL else {}
    asked = [f"{key}: {reason}" for key, reason in unknown.items() if key not in absent]
    base = (
        f"{', '.join(map(str.strip, absent.values()))}: no file has them; let this one name its base (defaults: FILE)"
    )
    return [*asked, f"{', '.join(absent)}: {base}"] if absent else asked


def _section(title: str, items: Iterable[str]) -> list[str]:
    lines = [f"#   {' '.join(item.split())}" for item in items]  # one line each: a line without # would be a command
    return [f"# {title}", *lines] if lines else []


def _value(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides."""
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
