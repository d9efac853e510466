"""Writes docs/reference/commands.md from the argument parser, by `python docs/commands.py`."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
HEAD = """# Commands

`make train` and `make test` install `prorl` as `.venv/train/bin/prorl`. Each command explains itself with `--help`.
`python docs/commands.py` writes this page from the argument parser.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | any other failure |
| 2 | wrong use or configuration |
| 3 | this machine is not fit |
| 4 | the data is bad |
| 75 | stopped cleanly; the same command continues |
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
        for command in action.choices.values():
            level = "##" if len(command.prog.split()) == 2 else "###"
            yield f"\n{level} {command.prog}\n\n{_sentence(command.description)}\n"
            yield f"\n```text\n{command.format_usage().strip()}\n```\n"
            yield _arguments(command)
            yield from _sections(command)
            if command.epilog:
                yield f"\n{_sentence(command.epilog)}\n"


def _arguments(parser: argparse.ArgumentParser) -> str:
    shown = [a for a in parser._actions if not isinstance(a, argparse._HelpAction | argparse._SubParsersAction)]
    if not shown:
        return ""
    rows = [f"| {_name(action)} | {_cell(action.help or '')} |" for action in shown if action.help != argparse.SUPPRESS]
    return "\n| Argument | Meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def _name(action: argparse.Action) -> str:
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = "" if action.nargs == 0 else f" {metavar if isinstance(metavar, str) else ' '.join(metavar)}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings) or f"`{value.strip()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%").replace("<", "&lt;")


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").split()).replace("%%", "%").replace("<", "&lt;")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


if __name__ == "__main__":
    PAGE.write_text(page())
