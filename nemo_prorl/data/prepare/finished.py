"""Folders that are prepared already: by the same command, so that nothing has to be done, or by another one."""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from nemo_prorl.data.prepare import output
from nemo_prorl.data.prepare.inputs import PrepareOptions, has_inputs
from nemo_prorl.data.prepare.manifest import PreparedManifest
from nemo_prorl.data.prepare.rows import sha256_of
from nemo_prorl.data.prepare.sources import ALL, source_of
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_object

# Options that decide where files are and how fast it goes, but not which records are made.
_NEUTRAL = {"out", "origin", "against", "workers", "unsafe_no_sandbox", "judge_url", "judge_workers"}
_NEUTRAL |= {"judge_deadline_s", "estimate"}
_OF_A_JUDGE = {"agreement", "judge_model"}  # they decide for sources with two solutions only


class Parser(argparse.ArgumentParser):
    """A parser of stored commands, which raises ValueError for a command that is not understood."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def command_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """Return the command with these arguments: the source, and each option with another value than its default."""
    words = ["prorl", "data", "prepare", arguments.source]
    for action in parser._actions:
        if not action.option_strings or action.dest in ("help", "scale"):
            continue
        option, value = action.option_strings[0], getattr(arguments, action.dest)
        if value == action.default:
            continue
        if isinstance(value, list):
            words += [word for item in value for word in (option, str(item))]
        elif value is True:
            words.append(option)
        else:
            words += [option, "all" if value in (None, ALL) else str(value)]
    return words


def finished(parser: Parser, options: PrepareOptions, command: Sequence[str]) -> PreparedManifest | None:
    """Return the manifest of a folder that the same command has made from the same inputs; None if there is none."""
    try:
        manifest: PreparedManifest = json.loads((options.out / output.MANIFEST).read_text())
        if _decisive(parser, manifest["command"]) != _decisive(parser, command) or not has_inputs(options, manifest):
            return None
        compared = manifest["checks"].get("contamination", {"against": []})["against"]
        if [entry["sha256"] for entry in compared] != [sha256_of(file) for file in options.against]:
            return None
        whole = all(sha256_of(options.out / entry["file"]) == entry["sha256"] for entry in manifest["outputs"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return manifest if whole else None


def check_same_options(parser: Parser, options: PrepareOptions, command: Sequence[str]) -> None:
    """Raise ConfigError if the folder was prepared with other options, or from another file; the message names them.

    It also is raised for a folder of something else (`output.check_folder`).  An incomplete folder may be made again.
    """
    output.check_folder(options.out, options.source.name)
    path = options.out / output.MANIFEST
    if (manifest := read_object(path)) is None:
        return
    now = _decisive(parser, command) | _places(parser, command)
    try:
        was = _decisive(parser, manifest["command"]) | _places(parser, manifest["command"])
    except (ValueError, LookupError, TypeError, ConfigError) as error:
        differ = [f"its command is not understood ({error})"]
    else:
        differ = [f"{name} {_shown(was[name])}, now {_shown(now[name])}" for name in now if now[name] != was[name]]
    if differ:
        raise ConfigError(
            f"--out {options.out}: contains data that was made with other options: {'; '.join(differ)}. Nothing was"
            f" changed. Fix: another --out; or, to replace what is there, remove {path} first"
        )


def _decisive(parser: Parser, command: Sequence[str]) -> dict[str, Any]:
    """Return the options by name that decide which records a command makes."""
    arguments = parser.parse_args(list(command[3:]))
    skipped = _NEUTRAL if source_of(arguments.source).judged else _NEUTRAL | _OF_A_JUDGE
    return {_option(parser, name): value for name, value in vars(arguments).items() if name not in skipped}


def _places(parser: Parser, command: Sequence[str]) -> dict[str, Any]:
    arguments = parser.parse_args(list(command[3:]))
    return {"--from": arguments.origin, "--against": [str(file) for file in arguments.against] or None}


def _option(parser: Parser, name: str) -> str:
    return next((flag.option_strings[0] for flag in parser._actions if flag.dest == name and flag.option_strings), name)


def _shown(value: Any) -> str:
    if value in (None, [], ""):
        return "not given"
    return "all" if value == ALL else " ".join(map(str, value)) if isinstance(value, list) else str(value)
