"""Writes docs/reference/commands.md from the argument parser, by `python docs/commands.py`."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
HEAD = """# Command reference

Every `prorl` command with its arguments, as `--help` prints them. [Commands and exit codes](overview.md) explains
the purpose of each command and the meaning of its exit code. An argument `OVERRIDE` is one of the
[configuration keys](configuration.md) with a value, such as `trainer.grpo.max_steps=200`.

`python docs/commands.py` writes this page from the argument parser.
"""


def page() -> str:
    """Return the page as Markdown."""
    os.environ["COLUMNS"] = "100"  # argparse wraps usage lines at the width of the terminal
    from nemo_prorl import cli

    return HEAD + "".join(_sections(cli._parser()))


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        listed = {choice.dest: choice.help for choice in action._choices_actions}  # the texts of the list of commands
        for name, command in action.choices.items():
            level = "##" if len(command.prog.split()) == 2 else "###"
            yield f"\n{level} {command.prog}\n\n{_sentence(command.description or listed[name])}\n"
            yield f"\n```text\n{command.format_usage().strip()}\n```\n"
            yield _arguments(command)
            yield from _sections(command)
            if command.epilog:
                yield f"\n{_sentence(command.epilog)}\n"


def _arguments(parser: argparse.ArgumentParser) -> str:
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)]
    if not shown:
        return ""
    rows = [f"| {_name(action)} | {_meaning(action)} |" for action in shown if action.help != argparse.SUPPRESS]
    return "\n| Argument | Meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def _name(action: argparse.Action) -> str:
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = "" if action.nargs == 0 else f" {metavar if isinstance(metavar, str) else ' '.join(metavar)}"
    names = ", ".join(f"`{option}{value}`" for option in action.option_strings) or f"`{value.strip()}`"
    return names.replace("|", "\\|")


def _meaning(action: argparse.Action) -> str:
    """Return the help text, and the choices that it does not name."""
    text = (action.help or "").replace("|", "\\|").replace("%%", "%").replace("<", "&lt;")
    missing = any(str(choice) not in text for choice in action.choices or ())
    choices = "one of " + ", ".join(f"`{choice}`" for choice in action.choices or ()) if missing else ""
    return "; ".join(filter(None, (text, choices)))


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").split()).replace("%%", "%").replace("<", "&lt;")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


if __name__ == "__main__":
    PAGE.write_text(page())
