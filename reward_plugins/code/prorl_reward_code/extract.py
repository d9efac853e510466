"""Extraction of the program from a response: the last closed fenced block that can be a program.

A fence that is indented deeper than the fence that opened the block is part of the code, for example of a docstring.
Code is parsed in the sandbox only, never here.  All patterns take linear time.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

_FENCE = re.compile(r"([^`~]*)(`{3,}|~{3,})([^`]*)$")
_AFTER_PROSE = re.compile(r"([^`]*)(`{3,})([^`]*)$")
_PREFIX = re.compile(r"[ \t>]*(?:[-*+]|\d{1,3}[.)])?[ \t]*")
_LANGUAGE = re.compile(r"[{. \t]*([a-z][\w+#.-]*)?")
_PYTHON = re.compile(r"(?:(?:i?python|py|pypy)[\d.]*)?")
_OTHERS = frozenset(
    {"bash", "c", "c++", "console", "cpp", "csharp", "go", "java", "javascript", "json"}
    | {"output", "plaintext", "rust", "shell", "sh", "text", "txt"}
)
_LOOSE = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]*)?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_INLINE = re.compile(r"```(?:[ \t]*(?:python3?|py)[ \t]+)?([^`\n]+)```")
# A block without any of these words does nothing: it is a sample of input or output.
_DOES = re.compile(r"^(?![ \t]*(?:>>>|\$)).*\b(?:print|write|writelines|exec|eval|import|def|class)\b", re.MULTILINE)
_SLACK = 3  # columns that a closing fence may be indented deeper than its opening fence, as in Markdown
_ANY = 1 << 30


@dataclass(frozen=True)
class Block:
    """A closed fenced block: its language in lower case, and its content."""

    language: str
    code: str

    @property
    def is_python(self) -> bool:
        return _PYTHON.fullmatch(self.language) is not None


@dataclass(frozen=True)
class _Opened:
    column: int
    fence: str
    language: str
    quoted: bool
    start: int


def program_of(text: str, names: Collection[str] = ()) -> str | None:
    """Return the program in a response; None without a fenced block.

    Args:
        names: Functions and classes that the tests call.  The last block that defines one of them is the answer;
            blocks after it are usage examples.
    """
    text = text.replace("\r\n", "\n")
    fenced = blocks(text, _SLACK) or blocks(text, _ANY)
    candidates = [block.code for block in fenced if block.is_python] or [block.code for block in fenced[-1:]]
    if not candidates:
        loose = _LOOSE.findall(text) or _INLINE.findall(text)
        return _dedented(str(loose[-1]).split("\n")) if loose else None
    marks = _definitions(names) if names else ()
    for mark in (*marks, _DOES):
        for code in reversed(candidates):
            if mark.search(code):
                return code
    return candidates[-1]


def _definitions(names: Collection[str]) -> tuple[re.Pattern[str], ...]:
    """Return two patterns: a definition of one of `names` (or LeetCode's class Solution), and an assignment to one."""
    name = f"(?:{'|'.join(map(re.escape, sorted(names)))})"
    function, kind = rf"(?:async[ \t]+)?def[ \t]+{name}\b", rf"class[ \t]+(?:Solution|{name})\b"
    return re.compile(rf"^(?:{function}|{kind})", re.MULTILINE), re.compile(rf"^{name}[ \t]*=(?!=)", re.MULTILINE)


def blocks(text: str, slack: int) -> list[Block]:
    """Return the closed fenced blocks of a response in order.

    Args:
        slack: number of columns that a closing fence may be indented deeper than its opening fence.
    """
    closed: list[Block] = []
    lines = text.split("\n")
    opened: _Opened | None = None
    for at, line in enumerate(lines):
        if "```" not in line and "~~~" not in line:
            continue
        if opened is None:
            opened = _opening(line, at + 1)
            continue
        fence = _FENCE.match(line)
        if fence is None or fence[1].strip(" \t>") or len(fence[1]) > opened.column + slack:
            continue
        if not fence[2].startswith(opened.fence):
            continue
        language = _language(fence[3])
        if language and (_PYTHON.fullmatch(language) or language in _OTHERS):
            opened = _opening(line, at + 1)  # the previous block was never closed
            continue
        inner = lines[opened.start : at]
        if opened.quoted:
            inner = [line.lstrip(" \t").removeprefix(">").removeprefix(" ") for line in inner]
        closed.append(Block(opened.language, _dedented(inner)))
        opened = None
    return closed


def _opening(line: str, start: int) -> _Opened | None:
    """Return the block that a line opens; None if the line does not open a block.

    A fence that follows other text in its line opens a block only if at most one word, the language, follows the fence.
    `start`: index of the line after the fence.
    """
    fence = _FENCE.match(line)
    if fence is None or not _PREFIX.fullmatch(fence[1]):
        fence = _AFTER_PROSE.match(line)
        if fence is None or len(fence[3].split()) > 1:
            return None
        return _Opened(0, fence[2], _language(fence[3]), False, start)
    return _Opened(len(fence[1]), fence[2], _language(fence[3]), ">" in fence[1], start)


def _language(info: str) -> str:
    match = _LANGUAGE.match(info.lower())
    return (match[1] or "") if match else ""


def _dedented(lines: list[str]) -> str:
    """Return the lines as text, without the indentation of the first line if all lines have it."""
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip(" \t"))]
    if indent and all(line.startswith(indent) or not line.strip() for line in lines):
        lines = [line[len(indent) :] for line in lines]
    return "\n".join(lines) + "\n"
