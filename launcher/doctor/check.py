"""The result of one doctor check, and functions that get a fact from another process."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9
_MARK = "PRORL "  # begins the line with a probe's answer, because libraries print other lines when they are imported


@dataclass(frozen=True)
class Check:
    """The result of a check: `state` is "pass", "warn" or "fail"; `fix` says how to fix a warning or a failure."""

    name: str
    state: str
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.state}  {self.name:<12} {self.text}" + (f"\n      {'':<12} {self.fix}" if self.fix else "")


class NoAnswer(Exception):
    """A program did not start, failed, took too long or printed no answer; the message says which."""


def output_of(command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> str:
    """Return the standard output of a program; `variables` are added to its environment.  Raises NoAnswer."""
    env = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{command[0]} did not finish within {seconds:g} s") from error
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        last_line = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NoAnswer(f"{command[0]} ended with status {done.returncode}: {last_line}")
    return done.stdout


def ask(
    python: str,
    code: str,
    arguments: Sequence[str] = (),
    seconds: float = 120.0,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run `code` in another Python, and return the value that `code` passes to `answer(...)`.  Raises NoAnswer.

    `variables` are added to the environment of that Python.
    """
    head = f"import json\ndef answer(value):\n    print({_MARK!r} + json.dumps(value), flush=True)\n"
    lines = output_of([python, "-c", head + code, *arguments], seconds, variables).splitlines()
    answers = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if not answers:
        raise NoAnswer(f"{python} ended without error, but printed no answer to the check")
    return json.loads(answers[-1])


def gb(number: float) -> str:
    """Return a number of bytes as text, in GB (10^9 bytes) or MB (10^6 bytes)."""
    if number < GB:
        return f"{number / 1e6:.0f} MB"
    return f"{number / GB:.1f} GB" if number < 10 * GB else f"{number / GB:.0f} GB"
