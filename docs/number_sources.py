"""Lists each number in README.md and docs/ with its source; exits with 1 if one has none.

    python docs/number_sources.py            prints page, line, number, source
    python docs/number_sources.py --write    writes the measured ones into docs/number_sources.tsv

The first command, which a test runs, also compares the file that the second one writes.

A number is looked up in this order:

1. pages and tables that a script writes: the script;
2. docs/number_sources.txt: lines `PAGE: WORDS -> SOURCE`;
3. whole numbers up to 12 without a unit, dates, versions, numbers of steps and the like: counts and names;
4. results to which the paragraph, the table or the section links, or that a comment names for the section below it
   (`<!-- numbers: benchmarks/results/NAME, ... -->`), and tables of the page that a script writes: there must be a line
   with this number, at the precision of the page.  Of several lines that with most words of the paragraph is taken;
5. what the text around it names: a configuration key with this default, a code file, a page elsewhere, the paper.

Code blocks are left out, because tests run them, unless such a comment stands right above one.
"""

import argparse
import ast
import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST, MEASURED = "docs/number_sources.txt", "docs/number_sources.tsv"
WHOLE = r"(?:\d{1,3}(?:[,_]\d{3})+(?!\d)|\d+)"
NUMBER = re.compile(rf"(?<![\w.§,\-@^#])(?<![A-Za-z]/)[+\-\u2212]?{WHOLE}(?:\.\d+)*(?:e[+-]?\d+)?(?![\w§]|\.\d)")
IN_FILE = re.compile(rf"(?<![\w.])[-+]?{WHOLE}(?:\.\d+)?(?:e[+-]?\d+)?")
HEADLINE = re.compile(r"(20\d\d-\d\d-\d\d) .*(commit \w+(?: with changes)?)")  # of benchmarks/machine.py
UNIT = re.compile(  # after a number, or after a range of which it is the beginning
    r"(?: (?:to|and|or) [\d.,]+)?(?: ?[%±\u00d7]|[ -](?:s|ms|seconds?|minutes?|hours?|h|days?|[GMK]i?B|bytes|times"
    r"|tokens?|points|nats?|M|standard|GFLOP/s|errors)\b)"
)
VERSION = re.compile(
    r"(?:Python|torch|TRL|CUDA|vLLM|Slurm|Megatron(?:-Core)?|Aligner|NeMo|Engine|math-verify|[Vv]ersions?|[Ss]ec(?:s?\.|tions?)"
    r"|[Ff]igures?) (?:[\d.]+(?:,| and| to| or) )*$"
)
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
NAMED = re.compile(  # words before a whole number that is a name
    r"(?:\b(?i:steps?|seeds?|codes?|exits?|stages?|runs?|ranks?|nodes?|rows?|levels?|status|ends|draft|http|port|aime|math)|UTF|RFC"
    rf"|{MONTHS})(?: with)? (?:\d+(?:,| and| to| or) )*$"
)
MONTH = re.compile(rf" (?:{MONTHS})\b")
SCRIPTS = {  # pages and tables that a script writes
    "docs/reference/configuration.md": "docs/configuration.py",
    "docs/reference/commands.md": "docs/commands.py",
    "docs/reference/schemas.md": "docs/schema_list.py",
    "docs/howto/migration_examples.md": "tests/migration/published.py",
}
TABLES = {
    ("docs/howto/prepare_data.md", "sources"): "docs/data_sources.py",
    ("docs/howto/forecast.md", "families"): "benchmarks/forecast_families.py --page",
    ("docs/explanation/ablations.md", "table"): "benchmarks/ablations.py --report",
    ("docs/explanation/reset_experiment.md", "table"): "benchmarks/resets.py --report",
}
WORDS = {  # first words of a source that is text
    *("paper", "author", "estimate", "arithmetic", "definition", "example", "requirement", "plan", "version", "limit")
}


@dataclass(frozen=True)
class Number:
    """A number on a page, with the texts around it that may tell its source."""

    page: str
    line: int
    text: str
    before: str
    after: str
    block: str  # paragraph, list item or table row, with its links
    sentence: str
    lead: str  # the paragraph before a table or list
    section: str  # from heading to heading
    named: tuple[str, ...]  # files that a comment names for this section
    made: str = ""  # the script that writes this text


@dataclass(frozen=True)
class Source:
    """Where a number comes from."""

    name: str
    line: str = ""  # of the file, for measured numbers
    recorded: str = ""  # date and commit of the measurement


@functools.cache
def value(text: str) -> float:
    """Return a number as a float; a version such as 3.3.1 is not a number."""
    return math.nan if text.count(".") > 1 else float(re.sub("[,_]", "", text).replace("\u2212", "-"))


@functools.cache
def half(text: str) -> float:
    """Return half a unit of a number's last place: how far its source may lie from it."""
    digits, _, power = text.partition("e")
    return 0.5 * 10 ** (int(power or 0) - len(digits.partition(".")[2])) * (1 + 1e-9)


def is_name(number: Number) -> bool:
    """Return whether a number is a name: a version, a date, a number of a step and the like."""
    if UNIT.match(number.after) or number.before.endswith("± ") or not re.fullmatch(r"-?[\d.]+", number.text):
        return False
    if number.text.count(".") > 1 or VERSION.search(number.before) or number.text in ("-1", "0"):
        return True
    if not number.text.isdigit():
        return False
    if re.match(r"-[a-z]", number.after) or re.fullmatch(r"19\d\d|20[012]\d", number.text):
        return True  # 16-bit; a year
    if number.block.startswith("|") and re.fullmatch(r" *\| *", number.before):
        return True  # the name of a row
    return bool(MONTH.match(number.after) or NAMED.search(number.before))


def is_count(number: Number) -> bool:
    """Return whether a number can be a count: small and whole, without a unit."""
    has_unit = UNIT.match(number.after) or number.before.endswith("± ")
    return number.text.isdigit() and int(number.text) <= 12 and not has_unit


# --- pages -----------------------------------------------------------------------------------------------------------


def pages() -> list[str]:
    """Return the paths of all pages."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _shown(raw: str) -> tuple[list[str], list[str]]:
    """Return the lines of a page without code blocks; and again without links, comments, tags and inline code."""
    kept = r"(<!-- numbers: [^\n]*\n)?^(```|~~~).*?^\2"  # a code block below a comment is kept
    text = re.sub(kept, lambda match: match[0] if match[1] else _blank(match), raw, flags=re.M | re.S)
    plain = re.sub(r"<!--.*?-->", _blank, text, flags=re.S)
    plain = re.sub(r"`[^`\n]+`", lambda match: "§" * len(match[0]), plain)
    plain = re.sub(r"\]\([^)]*\)|https?://\S+|<[a-z][^<>]*>|\{[^{}]*\}", _blank, plain)
    return text.split("\n"), plain.split("\n")


def _made(page: str, raw: str) -> dict[int, str]:
    """Return the lines of tables that a script writes, and the script."""
    made: dict[int, str] = {}
    for (of, mark), script in TABLES.items():
        if of == page and (found := re.search(rf"<!-- {mark}.*?<!-- (?:/{mark}|end of {mark}) -->", raw, re.S)):
            first, last = (raw[:end].count("\n") for end in found.span())
            made.update(dict.fromkeys(range(first, last + 1), script))
    return made


@functools.cache
def numbers(page: str) -> tuple[Number, ...]:
    """Return the numbers of a page, in order."""
    return tuple(_numbers(page))


def _numbers(page: str) -> Iterator[Number]:
    raw = (ROOT / page).read_text()
    shown, plain = _shown(raw)
    made, lead = _made(page, raw), ""
    stack: list[tuple[int, tuple[str, ...]]] = [(0, ())]  # the level of each heading, and what a comment names
    starts = _starts(shown)
    for start, end in pairwise([*starts, len(shown)]):
        first, block = shown[start], "\n".join(shown[start:end])
        if heading := re.match(r"#+ ", first):
            stack = [one for one in stack if one[0] < len(heading[0])] + [(len(heading[0]), ())]
        if comment := re.match(r"<!-- numbers: (.*?) -->", first):
            stack[-1] = (stack[-1][0], tuple(comment[1].split(", ")))
        if block.strip() and not re.match(r"\||\s*(?:[-*]|\d+\.) ", first):
            lead = block
        named = tuple(name for _, names in stack for name in names)
        section, offset = _section(shown, start), 0
        for index in range(start, end):
            for match in NUMBER.finditer(plain[index]):
                before = plain[index - 1][-30:].rstrip() + " " if index > start else " "
                before += plain[index][: match.start()].lstrip()
                after, sentence = plain[index][match.end() :] or " ", _sentence(block, offset + match.start())
                script = SCRIPTS.get(page) or made.get(index, "")
                if not (before.isspace() and after.startswith(". ")):  # not the number of a list item
                    yield Number(
                        page, index + 1, match[0], before, after, block, sentence, lead, section, named, script
                    )
            offset += len(shown[index]) + 1


def _starts(lines: list[str]) -> list[int]:
    """Return the first line of each block: paragraphs, list items, table rows, headings and comments."""
    new, alone = re.compile(r"\s*(?:[-*]|\d+\.) |\||#|<!--"), ("#", "|", "<!--")
    return [i for i, line in enumerate(lines) if not i or new.match(line) or not lines[i - 1].strip() or
            lines[i - 1].startswith(alone)]  # fmt: skip


def _sentence(block: str, at: int) -> str:
    """Return the sentence around a position; a table row is one."""
    if block.startswith("|"):
        return block
    ends = [0, *(match.end() for match in re.finditer(r"[.:]\s+(?=[A-Z`\[*\"])", block)), len(block)]
    return next(block[start:end] for start, end in pairwise(ends) if start <= at <= end)


def _section(lines: list[str], at: int) -> str:
    start = next((i for i in range(at, -1, -1) if lines[i].startswith("#")), 0)
    end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("#")), len(lines))
    return "\n".join(lines[start:end])


# --- results ---------------------------------------------------------------------------------------------------------


@functools.cache
def lines_of(file: str) -> tuple[tuple[str, tuple[float, ...], str], ...]:
    """Return the lines of a file that have numbers, with these, and date and commit from the headline above each."""
    text = (ROOT / file).read_text()
    if file.endswith(".html"):  # a report: its outcomes, and the ends and the mean of each curve
        text = "\n".join(
            re.findall(r'"name":"\w+","before":[^{}]*|"[\w/]+":\{"m":\[[^]]*\],"stats":[^{}]*\{[^}]*\}', text)
        )
        text = re.sub(r'\{"m":\[[^]]*\],|"m(?:in|ax|ax_step)":[\d.e-]+,|"(?:count|lost)":\d+,?', "", text)
    found, recorded = [], ""
    for line in text.split("\n"):
        if headline := HEADLINE.match(line):
            recorded = f"{headline[1]}, {headline[2]}"
        elif numbers_in := tuple(value(one) for one in IN_FILE.findall(line)):
            found.append((" ".join(line.split()), numbers_in, recorded))
    return tuple(found)


@functools.cache
def table_of(page: str) -> tuple[tuple[str, tuple[float, ...], str], ...]:
    """Return the rows of the tables on a page that a script writes."""
    rows = dict.fromkeys(one.block for one in numbers(page) if one.made and page not in SCRIPTS)
    return tuple((" ".join(row.split()), tuple(value(one) for one in IN_FILE.findall(row)), "") for row in rows)


def fits(text: str, found: float, percent: bool = False) -> bool:
    """Return whether a number of a file rounds to `text`, apart from the sign; a percentage may be a share."""
    wanted, margin = abs(value(text)), half(text)
    return abs(abs(found) - wanted) <= margin or (percent and 0 < found <= 1 and abs(100 * found - wanted) <= margin)


def stands_in(text: str, file: str) -> bool:
    """Return whether a file has a number that rounds to `text`."""
    return any(fits(text, one) for _, found, _ in lines_of(file) for one in found)


def linked(text: str) -> list[str]:
    """Return the result files to which a text links."""
    return re.findall(r"\((?:\.\./)*(benchmarks/results/[\w.\-]+\.(?:txt|json))\)", text)


def from_results(number: Number) -> Source | None:
    """Return the line of a result that has this number and most words and numbers of the text around it."""
    near = [*linked(number.block), *(linked(number.lead) if number.block.startswith("|") else [])]
    ranks = dict.fromkeys([*linked(number.section), number.page], 0)
    ranks |= dict.fromkeys(number.named, 1) | dict.fromkeys(near, 2)
    words, others = set(re.findall(r"[a-z]{3,}", number.block.lower())), set(NUMBER.findall(number.block))
    best: tuple[tuple[int, int], Source] | None = None
    for file, rank in ranks.items():
        if not (ROOT / file).is_file():
            return Source(file)  # words
        for line, found, recorded in table_of(file) if file == number.page else lines_of(file):
            if any(fits(number.text, one, number.after.lstrip().startswith("%")) for one in found):
                shared = len(words & set(re.findall(r"[a-z]{3,}", line.lower())))
                shared += sum(any(fits(other, one) for one in found) for other in others)
                score = (rank, shared)
                if best is None or score > best[0]:
                    name = "the table of this page" if file == number.page else file
                    best = (score, Source(name, line if len(line) <= 160 else line[:160] + " ...", recorded))
    return best and best[1]


# --- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line of LIST.

    The source is a file with the numbers; or `= EXPRESSION; ... from FILE, ...`, with an expression for each number and
    operands that stand in the files; or words.
    """

    page: str
    words: str
    source: str

    @property
    def texts(self) -> list[str]:
        """Return the numbers of the words."""
        return NUMBER.findall(re.sub(r"`[^`\n]+`|\]\([^)]*\)", lambda match: "§" * len(match[0]), self.words))

    def fault(self) -> str | None:
        """Return why the entry is wrong, if it is."""
        first = self.source.split()[0]
        if self.words not in _joined(self.page):
            return "these words are not on the page"
        if first == "=":
            return self._miscalculated()
        if (ROOT / first).is_file():
            lacking = [text for text in self.texts if not stands_in(text, first)]
            return f"{', '.join(lacking)} not in the file" if lacking else None
        return None if first.rstrip("s':,") in WORDS else "no such file, and no kind of source"

    def _miscalculated(self) -> str | None:
        formulas, _, files = self.source[2:].rpartition(" from ")
        parts = formulas.split("; ")
        if len(parts) != len(self.texts):
            return f"{len(parts)} expressions for {len(self.texts)} numbers"
        for text, part in zip(self.texts, parts, strict=True):
            operands = [one for one in re.findall(r"\d[\d.]*(?:e-?\d+)?", part) if re.search(r"[1-9].*[1-9]", one)]
            if lacking := [one for one in operands if not any(stands_in(one, file) for file in files.split(", "))]:
                return f"{', '.join(lacking)} not in {files}"
            zeros = len(text) - len(text.rstrip("0")) if "." not in text else 0  # 2,200: to the hundred
            if abs(calculated(part) - abs(value(text))) > max(half(text), 0.5 * 10**zeros):
                return f"{part} = {calculated(part):.4g}, not {text}"
        return None


OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def calculated(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / ** and brackets."""

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError(expression)

    return of(ast.parse(expression, mode="eval").body)


@functools.cache
def _joined(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Return the entries of LIST."""
    lines = [line for line in (ROOT / LIST).read_text().splitlines() if line.strip() and not line.startswith("#")]
    parts = [(line.partition(": ")[0], *line.partition(": ")[2].split(" -> ")) for line in lines]
    return tuple(Entry(*part) for part in parts)


def listed(number: Number) -> Source | None:
    """Return the source that LIST has for a number."""
    block = " ".join(number.block.split())
    for entry in entries():
        if entry.page == number.page and entry.words in block and number.text in entry.texts:
            is_result = entry.source.startswith(("= ", "benchmarks/results/"))
            return Source(entry.source, entry.words if is_result else "")
    return None


# --- what the text around a number names -----------------------------------------------------------------------------


@functools.cache
def defaults() -> dict[str, str]:
    """Return the texts on each configuration key and command option, by its full name and by its last part."""
    found: dict[str, str] = {}
    for path in ("docs/reference/configuration.md", "docs/reference/commands.md"):
        for key, row in re.findall(r"^\| `([\w.\-]+)[^`]*`(.*)$", (ROOT / path).read_text(), re.M):
            found[key] = found.get(key, "") + row
    for path in sorted((ROOT / "nemo_prorl" / "conf").rglob("*.yaml")):
        for key, given in re.findall(r"^\s*(\w+): +([\d.e\-]+)\b", path.read_text(), re.M):
            found[key] = f"{found.get(key, '')} {given}"
    return found


def from_names(number: Number) -> Source | None:
    """Return the key, code file or page elsewhere that the text around a number names and that has it."""
    block, wanted = number.block if number.block.startswith("|") else number.block + number.lead, value(number.text)
    for code in re.findall(r"`([^`\n]+)`", block):
        if any(value(one) == wanted for one in NUMBER.findall(re.sub(r"[=\[]", " ", code))):
            return Source(f"`{code}`")
        for key in re.findall(r"-{0,2}[A-Za-z_][\w.\-]*", code):
            row = defaults().get(key) or defaults().get(key.rpartition(".")[2])
            if row and any(value(one) == wanted for one in IN_FILE.findall(row)):
                return Source(f"default of `{key}`")
    for file in re.findall(r"\((?:\.\./)*([\w/.\-]+\.(?:py|yaml|toml|sh|sbatch))\)", block):
        if (ROOT / file).is_file() and stands_in(number.text, file):
            return Source(file)
    if link := re.search(r"\((https?://[^)\s]+)\)", number.sentence):
        return Source(link[1])
    named = re.search(r"\b[Pp]aper|arXiv|\b[Ss]ections?\b|\bsec\.", number.sentence)
    return Source("the paper") if named else None


@functools.cache
def source(number: Number) -> Source | None:
    """Return where a number comes from."""
    if number.made:
        return Source(number.made)
    if found := listed(number):
        return found
    if is_name(number) or (is_count(number) and not number.block.startswith("|")):
        return Source("count or name")
    return from_results(number) or from_names(number) or (Source("count or name") if is_count(number) else None)


# --- output ----------------------------------------------------------------------------------------------------------


def faults() -> list[str]:
    """Return the numbers without a source, and the entries of the list that are wrong."""
    found = [f"{LIST}: {one.page}: {one.words}: {one.fault()}" for one in entries() if one.fault()]
    lacking = (number for page in pages() for number in numbers(page) if source(number) is None)
    for one in lacking:
        found.append(f"{one.page}:{one.line}: {one.text} has no source: {one.before[-30:]}{one.text}{one.after[:30]}")
    return found


def measured() -> str:
    """Return the lines of MEASURED: page, number, result file, and the line there or the words of the list."""
    lines = []
    for page in pages():
        for number in numbers(page):
            found = source(number)
            if found and found.line and found.name.startswith(("=", "the table", "benchmarks/results", "docs/tour")):
                lines.append("\t".join((page, number.text, found.name, found.recorded, found.line)))
    return "\n".join(["page\tnumber\tsource\trecorded\tline of the source", *lines]) + "\n"


def main() -> int:
    """Print the numbers, or write MEASURED; report what has no source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {MEASURED}")
    if parser.parse_args().write:
        (ROOT / MEASURED).write_text(measured())
    else:
        for page in pages():
            for number in numbers(page):
                found = source(number) or Source("NONE")
                sys.stdout.write(f"{page}:{number.line}\t{number.text}\t{found.name}\t{found.recorded}\t{found.line}\n")
    found_faults = faults()
    if measured() != (ROOT / MEASURED).read_text():
        found_faults.append(f"{MEASURED} is not up to date; `python docs/number_sources.py --write` writes it again")
    sys.stderr.write("".join(f"{fault}\n" for fault in found_faults))
    return 1 if found_faults else 0


if __name__ == "__main__":
    sys.exit(main())
