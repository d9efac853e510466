"""What a prepared record must not be: a duplicate, longer than the model takes, or part of an evaluation set."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from nemo_prorl.data.prepare import answers, programs, puzzles
from nemo_prorl.data.prepare.rows import Row, data_files, read_rows
from nemo_prorl.data.records import PromptRecord
from nemo_prorl.errors import DataError

_WORDS = re.compile(r"\w+")
_FORMS = (answers.BOXED, answers.CHOICE, programs.PROGRAM, programs.FUNCTION, puzzles.TAGGED)
_TEXTS = ("problem", "question", "prompt", "text", "input", "Question")
_TEMPLATE_SHARE = 0.01  # an n-gram in more records of an evaluation file than this, and than 3, is its own wording


def words_of(text: str) -> list[str]:
    """What is compared: words, numbers and names of LaTeX commands in lower case."""
    return _WORDS.findall(text.casefold())


def _plain(text: str) -> str:
    """A whole text as it is compared: signs count, since short problems differ in little else."""
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class Overlap:
    """A record's text in an evaluation set: `where` (file and line), words that both have, and the share in common."""

    where: str
    words: str
    share: float


class Contamination:
    """The word n-grams of evaluation sets.

    A text overlaps where it is a problem of theirs as a whole, or where it shares n words in a row with one and so much
    of the shorter of the two, in order, as `share` says: the first finds candidates, the second tells them from turns
    of phrase ("where m and n are relatively prime positive integers").  n-grams that many problems of one file have are
    its wording, and find nothing (`template`: how many those are).
    """

    def __init__(self, ngram: int, share: float) -> None:
        self.ngram, self.share, self.template = ngram, share, 0
        self.files: list[tuple[Path, int]] = []
        self.doubts = 0  # texts with n words in common, and too little else
        self._grams: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        self._words: dict[str, list[str]] = {}

    def add(self, path: Path) -> None:
        """Raises DataError naming file and line where a row has no text, ConfigError where there is no such file."""
        for file in data_files(path, option="--against"):
            texts = [(row.where, _text_of(row)) for row in read_rows(file, {})]
            held: Counter[str] = Counter()
            for where, text in texts:
                self._words[where] = words_of(text)
                held.update(set(self._of(self._words[where])))
            usual = max(3, int(_TEMPLATE_SHARE * len(texts)))
            self.template += sum(count > usual for count in held.values())
            for where, text in texts:
                self._whole.setdefault(_plain(text), where)
                for gram in self._of(self._words[where]):
                    if held[gram] <= usual:
                        self._grams.setdefault(gram, where)
            self.files.append((file, len(texts)))

    def find(self, text: str) -> Overlap | None:
        if (whole := _plain(text)) in self._whole:
            return Overlap(self._whole[whole], whole[:200], 1.0)
        words = words_of(text)
        candidates = {self._grams[gram]: gram for gram in self._of(words) if gram in self._grams}
        for where, gram in candidates.items():
            common = SequenceMatcher(None, words, self._words[where], autojunk=False).get_matching_blocks()
            share = sum(block.size for block in common) / min(len(words), len(self._words[where]))
            if share >= self.share:
                return Overlap(where, gram, share)
        self.doubts += bool(candidates)
        return None

    def _of(self, words: Sequence[str]) -> Iterator[str]:
        for start in range(len(words) - self.ngram + 1):
            yield " ".join(words[start : start + self.ngram])


def _text_of(row: Row) -> str:
    """The problem of an evaluation set's row, or of a prompt record, without the form of an answer that we add."""
    value: Any = row.needed(*_TEXTS)
    if isinstance(value, list):
        value = "\n".join(str(part.get("content", "")) for part in value if isinstance(part, Mapping))
    if not isinstance(value, str):
        raise DataError(f"{row.where}: no text to compare with; it must be in one of {', '.join(_TEXTS)}")
    for form in _FORMS:
        value = value.removesuffix(form).rstrip()
    return value


def token_lengths(records: Sequence[PromptRecord], tokenizer: Path) -> list[int]:
    """Tokens of each prompt as a run will have them: a message list through the chat template."""
    from nemo_prorl.data.render import PromptRenderer

    renderer = PromptRenderer(tokenizer, 2)
    return [renderer.length(record) for record in records]
