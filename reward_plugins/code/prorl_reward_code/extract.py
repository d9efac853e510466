"""Finds the program in a response: the last fenced block that is Python or says nothing of its language."""

import re

_FENCE = re.compile(r"^([ \t]{0,12})(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
_INLINE = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]+)?([^`\n]+)```")
_PYTHON = frozenset({"", "python", "python3", "py", "py3"})


def blocks(text: str) -> list[tuple[str, str]]:
    """Language (lower case) and content of each closed fenced block, in their order."""
    found: list[tuple[str, str]] = []
    lines = text.replace("\r\n", "\n").split("\n")
    opened: re.Match[str] | None = None
    start = 0
    for at, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened, start = fence, at + 1
        elif fence[2].startswith(opened[2]) and not fence[3]:
            found.append((opened[3].strip("{}.").lower(), _unindented(lines[start:at], opened[1])))
            opened = None
        elif fence[3] and fence[2] == opened[2]:  # the block before was never closed
            opened, start = fence, at + 1
    return found


def _unindented(lines: list[str], indent: str) -> str:
    if indent and all(line.startswith(indent) or not line.strip() for line in lines):
        lines = [line[len(indent) :] for line in lines]
    return "\n".join(lines) + "\n"


def program_of(text: str) -> str | None:
    """The program that a response answers with; None without a fenced block."""
    found = blocks(text)
    python = [code for language, code in found if language in _PYTHON]
    if python:
        return python[-1]
    if found:
        return found[-1][1]
    inline = _INLINE.findall(text)
    return str(inline[-1]) if inline else None
