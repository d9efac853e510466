"""The result of a check, and ways to ask another process for a fact.  Judgements are functions of measured facts."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GB = 1e9
_MARK = "PRORL "  # begins the line of a probe's answer: what libraries print at import stands around it


@dataclass(frozen=True)
class Check:
    """The result of a check: `state` is "pass", "warn" or "fail"; `cure` says what to do about the last two."""

    name: str
    state: str
    text: str
    cure: str = ""

    def line(self) -> str:
        return f"{self.state}  {self.name:<12} {self.text}" + (f"\n      {'':<12} {self.cure}" if self.cure else "")


class NoAnswer(Exception):
    """A program did not start, failed, ran out of time or answered something else; the text says which."""


def output_of(command: Sequence[str], seconds: float) -> str:
    """Return the standard output of a program.  Raises NoAnswer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{command[0]} gave no answer within {seconds:g} s") from error
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NoAnswer(f"{command[0]} ended with status {done.returncode}: {said}")
    return done.stdout


def ask(python: str, code: str, arguments: Sequence[str] = (), seconds: float = 120.0) -> Any:
    """Return what `code` passes to `answer(...)` in another Python, whose imports take seconds.  Raises NoAnswer."""
    head = f"import json\ndef answer(value):\n    print({_MARK!r} + json.dumps(value), flush=True)\n"
    lines = output_of([python, "-c", head + code, *arguments], seconds).splitlines()
    told = [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]
    if not told:
        raise NoAnswer(f"{python} answered nothing")
    return json.loads(told[-1])


def gb(number: float) -> str:
    """Return bytes in words: GB of 10^9 of them, or MB of 10^6."""
    if number < GB:
        return f"{number / 1e6:.0f} MB"
    return f"{number / GB:.1f} GB" if number < 10 * GB else f"{number / GB:.0f} GB"
