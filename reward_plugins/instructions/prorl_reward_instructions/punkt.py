"""Splitting of text into sentences by Punkt (Kiss and Strunk 2006), with the English parameters that IFEval uses.

A candidate is a `.`, `?` or `!` before white space or closing punctuation.  A candidate ends a sentence unless its word
is an abbreviation, an initial or a number and the next word does not look like the start of a sentence.
"""

import functools
import importlib.resources
import itertools
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

# After a candidate: punctuation that cannot be within a word (group 1), or white space and the next word (group 2).
_CANDIDATE = re.compile(r"[.?!](?=([?!)\";}\]*:@'({\[])|\s+(\S+))")
_ENDS_WORD = r"[?!)\";}\]*:@'({\[]"
_RUN = r"(?:-{2,}|\.{2,}|(?:\.\s){2,}\.)"
_WORD = re.compile(
    rf"{_RUN}|(?![(\"`{{\[:;&#*@)}}\]\-,])\S+?(?=\s|$|{_ENDS_WORD}|{_RUN}|,(?=$|\s|{_ENDS_WORD}|{_RUN}))|\S"
)
_NUMBER = re.compile(r"-?[.,]?\d[\d,.\-]*$")
_INITIAL = re.compile(r"[^\W\d]\.$")
_CLOSING = re.compile(r"[\"')\]}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
_SPACED_ELLIPSIS = ". . ."  # an abbreviation to the model


@dataclass(frozen=True)
class _Model:
    """Punkt's parameters.  Words are in lower case; the last three sets are from Punkt's training text."""

    abbreviations: frozenset[str]  # without the final period
    collocations: frozenset[tuple[str, str]]  # two words that never have a sentence end between them
    starters: frozenset[str]  # frequent first words of sentences
    seen_lower: frozenset[str]  # words that occurred in lower case
    never_upper_inside: frozenset[str]  # of `seen_lower`, words never capitalised inside a sentence
    lower_at_start: frozenset[str]  # of these, words that also began a sentence in lower case


@dataclass
class _Token:
    text: str
    kind: str
    ends_sentence: bool = False
    short: bool = False  # an abbreviation or an ellipsis

    @property
    def initial(self) -> bool:
        return _INITIAL.match(self.text) is not None


@functools.cache
def _model() -> _Model:
    """Return the parameters in `punkt_english.txt`, which is part of this package."""
    blocks: dict[str, list[str]] = {}
    words: list[str] = []
    for line in importlib.resources.files(__package__).joinpath("punkt_english.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            words = blocks.setdefault(line.strip("[]"), [])
        elif not line.startswith("# "):
            words.extend(line.split())
    pairs = [pair.split("|") for pair in blocks["collocations"]]
    both = blocks["starts opens"]
    return _Model(
        abbreviations=frozenset(blocks["abbreviations"]),
        collocations=frozenset((first, second) for first, second in pairs),
        starters=frozenset(blocks["sentence starters"]),
        seen_lower=frozenset(blocks["starts"] + blocks["lower"] + both),
        never_upper_inside=frozenset(blocks["starts"] + both),
        lower_at_start=frozenset(both),
    )


def prepare() -> None:
    _model()


def _kind(word: str) -> str:
    """Return the word in lower case, or `##number##` for a number."""
    lower = word.lower()
    return "##number##" if _NUMBER.match(lower) else lower


def _without_period(kind: str) -> str:
    return kind[:-1] if len(kind) > 1 and kind.endswith(".") else kind


def _classified(word: str) -> _Token:
    """Return the token of a word.  The word alone decides whether it is an abbreviation or ends a sentence."""
    token = _Token(word, _kind(word))
    if word in (".", "?", "!"):
        token.ends_sentence = True
    elif word.endswith(".."):
        token.short = not word.strip(".")
    elif word.endswith("."):
        stem, known = word[:-1].lower(), _model().abbreviations
        token.short = stem in known or stem.split("-")[-1] in known or word == _SPACED_ELLIPSIS
        token.ends_sentence = not token.short
    return token


def _next_kind(following: _Token) -> str:
    return _without_period(following.kind) if following.ends_sentence else following.kind


def _starts_sentence(following: _Token) -> bool | None:
    """Return whether a word's upper or lower case shows that it starts a sentence; None if the case does not decide."""
    model, kind = _model(), _next_kind(following)
    if following.text[0].isupper() and kind in model.never_upper_inside:
        return True
    if following.text[0].islower() and kind not in model.lower_at_start:
        return False
    return None


def _ends_sentence(token: _Token, following: _Token) -> bool:
    """Return whether a sentence ends after `token`, given the token that follows."""
    if not token.text.endswith("."):
        return token.ends_sentence
    model, kind, next_kind = _model(), _without_period(token.kind), _next_kind(following)
    if (kind, next_kind) in model.collocations:
        return False
    upper, starts = following.text[0].isupper(), _starts_sentence(following)
    ends = token.ends_sentence
    if token.short and not token.initial:
        ends = ends or starts is True or (upper and next_kind in model.starters)
    if token.initial or kind == "##number##":
        if starts is False:
            return False
        if starts is None and token.initial and upper and next_kind not in model.seen_lower:
            return False  # "J. Bach"
    return ends


def _contains_end(context: str) -> bool:
    """Return whether a sentence ends anywhere inside `context`, that is after a word other than the last."""
    words = [word for line in context.split("\n") for word in _WORD.findall(line)]
    tokens = [_classified(word) for word in words]
    return any(_ends_sentence(*pair) for pair in itertools.pairwise(tokens))


def _contexts(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each possible end of a sentence, with its context: the word before it, and the punctuation or word after.

    If one word contains several possible ends, only the last is yielded.
    """
    before: re.Match[str] | None = None
    start = stop = 0
    for match in _CANDIDATE.finditer(text):
        gap = text[stop : match.start()]
        space = max(gap.rfind(blank) for blank in string.whitespace)
        # As in Punkt, white space only at the start of the gap does not end the word.
        word = stop + space + 1 if space > 0 else start
        if before is not None and stop <= word:
            yield before, text[start:stop] + before.group() + text[before.end() : before.end(before.lastindex or 0)]
        before, start, stop = match, word, match.start()
    if before is not None:
        yield before, text[start:stop] + before.group() + text[before.end() : before.end(before.lastindex or 0)]


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each sentence in `text`.  Closing punctuation may be at the start of the next sentence."""
    start = 0
    for match, context in _contexts(text):
        if _contains_end(context):
            yield start, match.end()
            start = match.start(2) if match.group(2) else match.end()
    yield start, len(text.rstrip())


def sentences(text: str) -> list[str]:
    """Return the sentences of `text` in order; [] for an empty text."""
    pieces = list(_pieces(text))
    texts: list[str] = []
    moved = 0
    for index, (start, end) in enumerate(pieces):
        start += moved
        moved = 0
        if index + 1 < len(pieces):
            next_start, next_end = pieces[index + 1]
            if closing := _CLOSING.match(text[next_start:next_end]):
                texts.append(text[start : next_start + len(closing.group().rstrip())])
                moved = closing.end()
                continue
        if text[start:end]:
            texts.append(text[start:end])
    return texts
