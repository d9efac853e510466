"""Filters for prepared records: overlap with evaluation sets, and prompt length in tokens."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from nemo_prorl.config import PUZZLE_FORM
from nemo_prorl.data.prepare import answers, programs
from nemo_prorl.data.prepare.rows import Row, data_files, read_rows
from nemo_prorl.data.records import PromptRecord
from nemo_prorl.errors import DataError

_WORDS = re.compile(r"\w+")
_FORMS = (answers.BOXED, answers.CHOICE, programs.PROGRAM, programs.FUNCTION)
_TEXTS = ("problem", "question", "prompt", "text", "input", "Question")
_TEMPLATE_SHARE = 0.01  # an n-gram in more than 3 records and this share of an evaluation file is template text


def words_of(text: str) -> list[str]:
    """Return the words that are compared: words, numbers and names of LaTeX commands in lower case."""
    return _WORDS.findall(text.casefold())


def _plain(text: str) -> str:
    """Return a text in lower case with single spaces.  Punctuation and operators stay, to tell short problems apart."""
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class Overlap:
    """An overlap with an evaluation set: `where` (file and line), common words, and their share of the shorter text."""

    where: str
    words: str
    share: float


class Contamination:
    """The word n-grams of evaluation sets, to find texts that overlap with their problems.

    A text overlaps with a problem if both are equal.  It also overlaps if both have n consecutive
    words in common, and the words in common, in order, are at least `share` of the shorter text.
    The n-grams find candidates; `share` excludes common phrases ("where m and n are relatively
    prime positive integers").  An n-gram in many problems of a file is template text, so it
    is ignored; `template` is the number of such n-grams.
    """

    def __init__(self, ngram: int, share: float) -> None:
        self.ngram, self.share, self.template = ngram, share, 0
        self.files: list[tuple[Path, int]] = []
        self.doubts = 0  # texts with n consecutive words in common, but less than `share`
        self._grams: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._words: dict[str, list[str]] = {}

    def add(self, path: Path) -> None:
        """Add the file, or the files of a folder.  Raises DataError for a row without text."""
        for file in data_files(path, option="--against"):
            texts = [(row.where, _text_of(row)) for row in read_rows(file, {})]
            counts: Counter[str] = Counter()
            for where, text in texts:
                self._words[where] = words_of(text)
                counts.update(set(self._ngrams(self._words[where])))
            usual = max(3, int(_TEMPLATE_SHARE * len(texts)))
            self.template += sum(count > usual for count in counts.values())
            for where, text in texts:
                self._whole.setdefault(_plain(text), where)
                for gram in self._ngrams(self._words[where]):
                    if counts[gram] <= usual:
                        self._grams.setdefault(gram, where)
            self.files.append((file, len(texts)))

    def find(self, text: str) -> Overlap | None:
        if (whole := _plain(text)) in self._whole:
            return Overlap(self._whole[whole], whole[:200], 1.0)
        words = words_of(text)
        candidates = {self._grams[gram]: gram for gram in self._ngrams(words) if gram in self._grams}
        for where, gram in candidates.items():
            common = SequenceMatcher(None, words, self._words[where], autojunk=False).get_matching_blocks()
            share = sum(block.size for block in common) / min(len(words), len(self._words[where]))
            if share >= self.share:
                return Overlap(where, gram, share)
        self.doubts += bool(candidates)
        return None

    def _ngrams(self, words: Sequence[str]) -> Iterator[str]:
        for start in range(len(words) - self.ngram + 1):
            yield " ".join(words[start : start + self.ngram])


def _text_of(row: Row) -> str:
    """Return the problem of an evaluation row or prompt record, without the answer instructions of this package."""
    value: Any = row.needed(*_TEXTS)
    if isinstance(value, list):
        value = "\n".join(str(part.get("content", "")) for part in value if isinstance(part, Mapping))
    if not isinstance(value, str):
        raise DataError(f"{row.where}: no text to compare with; expected a string in one of {', '.join(_TEXTS)}")
    for form in _FORMS:
        value = value.removesuffix(form).rstrip()
    return value.removeprefix(PUZZLE_FORM).lstrip()


def token_lengths(records: Sequence[PromptRecord], tokenizer: Path) -> list[int]:
    """Return the number of tokens of each prompt as in a run; messages go through the chat template."""
    from nemo_prorl.data.render import PromptRenderer

    renderer = PromptRenderer(tokenizer, 2)
    return [renderer.length(record) for record in records]
