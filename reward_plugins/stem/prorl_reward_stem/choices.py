"""Multiple choice: which options an answer names, by letter, by text or by value."""

import re
import string
from collections.abc import Callable, Sequence

from prorl_reward_math.forms import choice, unstyled
from prorl_reward_math.latex import canonical

MAX_OPTIONS = len(string.ascii_uppercase)
MAX_COMPARED_CHARS = 200  # longer answers are compared with the options as text only
MAX_LETTERED_CHARS = 2000  # plus twice the longest option; a longer answer never names an option

_LABELLED = re.compile(r"^\s*[(\[]?\s*([A-Za-z])\s*[)\].:]\s*(?=\S)")
_OTHER_LABELS = re.compile(
    r"(?:\b(?:or|and|not|nor|maybe)\s+|[,;/&]\s*)[(\[]?([A-Z])(?:[)\].:,;]|\s*$)|[(\[]([A-Z])[)\]]|(?:^|\s)([A-Z])[).:]\s"
)


def letters(count: int) -> str:
    return string.ascii_uppercase[:count]


def without_labels(options: Sequence[str]) -> list[str]:
    """Return the texts of the options.  If each begins with its own letter (`A. ...`, `(b) ...`), drop the letters."""
    labels = [_LABELLED.match(option) for option in options]
    own = all(label and label[1].upper() == letter for label, letter in zip(labels, letters(len(options)), strict=True))
    return [option[label.end() :] if own and label else option for option, label in zip(options, labels, strict=True)]


def right_letter(answer: str, options: Sequence[str]) -> str:
    """Return the letter of the right option.  Raises ValueError if `answer` is not one of the options' letters."""
    lettered = choice(answer)
    known = letters(len(options))
    if lettered is None or lettered[1] or lettered[0].upper() not in known:
        raise ValueError(f"truth.answer is {answer!r}; with options it must be one letter of {known[0]} to {known[-1]}")
    return lettered[0].upper()


def _form(text: str) -> str:
    """Return the form in which texts are compared: lower case, without typesetting, spaces and final punctuation."""
    return re.sub(r"\s+", "", unstyled(text)).rstrip(".,;:").casefold()


def _texts(text: str, options: Sequence[str]) -> list[int]:
    """Return the indexes of options that read like `text`.  Letter case counts only if it distinguishes options."""
    same = [index for index, option in enumerate(options) if _form(option) == _form(text)]
    if len({options[index].strip() for index in same}) > 1:
        bare = re.sub(r"\s+", "", unstyled(text)).rstrip(".,;:")
        return [index for index in same if re.sub(r"\s+", "", unstyled(options[index])).rstrip(".,;:") == bare]
    return same


def chosen(answer: str, options: Sequence[str], same: Callable[[str, str], bool]) -> set[int]:
    """Return the indexes of the options that an answer names: by letter, by text, or by a value equal under `same`.

    A single capital letter is always a label.  A single small letter is a label unless it is the text of an option.
    If several options have the same text, an answer with this text names all of them.
    """
    texts = without_labels(options)
    if len(answer) > MAX_LETTERED_CHARS + 2 * max(map(len, options)):
        return set()
    lettered = choice(answer)
    known = letters(len(options))
    bare = unstyled(answer)
    if re.fullmatch(r"[(]?[a-z][)]?", bare) and (exact := _exactly(bare, texts)):
        return set(exact)
    if lettered and lettered[0].upper() in known:
        index = known.index(lettered[0].upper())
        if not lettered[1]:
            return {index}
        if named := set(_texts(answer, options)) or set(_texts(answer, texts)):
            return named  # the text of the option is itself `(a) 5, (b) 6`
        return _labelled(index, lettered[1], texts, known)
    if read_alike := _texts(bare, texts):
        return set(read_alike)
    if len(answer) > MAX_COMPARED_CHARS:
        return set()
    return {index for index, text in enumerate(texts) if len(text) <= MAX_COMPARED_CHARS and same(text, answer)}


def _exactly(text: str, options: Sequence[str]) -> list[int]:
    return [index for index, option in enumerate(options) if unstyled(option).strip(" .") == text]


def _labelled(index: int, rest: str, texts: Sequence[str], known: str) -> set[int]:
    """Return the indexes of the options that an answer `C) rest` names: `index`, and options that `rest` names.

    `index` is the index of C.  `rest` may name an option by text, letter or value.
    """
    named = set(_texts(rest, texts))
    if named:
        return {index} if index in named else {index, *named}
    if _form(texts[index]) and _form(texts[index]) in _form(rest):
        rest = ""  # the text of the option with an addition
    others = {label for match in _OTHER_LABELS.finditer(rest) for label in match.groups() if label}
    others = {label for label in others if label in known and known.index(label) != index}
    by_value = {at for at, text in enumerate(texts) if rest and canonical(text) == canonical(rest)}
    return {index, *(known.index(label) for label in others), *by_value}
