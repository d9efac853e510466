"""What a prepared record must not be: a duplicate, longer than the model takes, or part of an evaluation set."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.data.prepare import answers, programs, puzzles
from nemo_prorl.data.prepare.rows import Row, data_files, read_rows
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
    """A record's text in an evaluation set: `where` (file and line), and the words that both have."""

    where: str
    words: str


class Contamination:
    """The word n-grams of evaluation sets.

    A text overlaps where it shares n words in a row with a problem of theirs, or is one as a whole (which is all that
    counts where a problem has fewer than n words).  n-grams that many problems of one file have are its wording, not
    a problem: they do not count (`template`: how many those are).
    """

    def __init__(self, ngram: int) -> None:
        self.ngram, self.template = ngram, 0
        self.files: list[tuple[Path, int]] = []
        self._grams: dict[str, str] = {}
        self._whole: dict[str, str] = {}

    def add(self, path: Path) -> None:
        """Raises DataError naming file and line where a row has no text, ConfigError where there is no such file."""
        for file in data_files(path, option="--against"):
            texts = [(row.where, _text_of(row)) for row in read_rows(file, {})]
            held: Counter[str] = Counter()
            for _, text in texts:
                held.update(set(self._of(words_of(text))))
            usual = max(3, int(_TEMPLATE_SHARE * len(texts)))
            self.template += sum(count > usual for count in held.values())
            for where, text in texts:
                self._whole.setdefault(_plain(text), where)
                for gram in self._of(words_of(text)):
                    if held[gram] <= usual:
                        self._grams.setdefault(gram, where)
            self.files.append((file, len(texts)))

    def find(self, text: str) -> Overlap | None:
        if (whole := _plain(text)) in self._whole:
            return Overlap(self._whole[whole], whole[:200])
        for gram in self._of(words_of(text)):
            if gram in self._grams:
                return Overlap(self._grams[gram], gram)
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


def token_lengths(records: Sequence[dict[str, Any]], tokenizer: Path) -> list[int]:
    """Tokens of each prompt as a run will have them: a message list through the chat template."""
    from nemo_prorl.data.render import PromptRenderer

    renderer = PromptRenderer(tokenizer, 2)
    return [renderer.length(record) for record in records]
