"""Words as in the Penn Treebank, a simple splitting into sentences, and detection of a text's language."""

import functools
import re
from collections.abc import Callable
from typing import Any

from prorl_reward_instructions import punkt

Rules = tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]

# Applied in this order to one sentence, which is then split at white space.
_TREEBANK: Rules = (
    # opening quotes
    (re.compile(r"([\u00ab\u201c\u2018\u201e]|`+)"), r" \1 "),
    (re.compile('^"'), "``"),
    (re.compile("(``)"), r" \1 "),
    (re.compile(r"([ (\[{<])(\"|'{2})"), r"\1 `` "),
    (re.compile(r"(?i)(?<!\w)(')(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)"), r"\1 "),
    # the final period with the closing characters after it, and other punctuation
    (re.compile(r"([^.])(\.)([\])}>\"'\u00bb\u201d\u2019 ]*+)\s*$"), r"\1 \2 \3 "),
    (re.compile(r"([:,])(\D)"), r" \1 \2"),
    (re.compile(r"([:,])$"), r" \1 "),
    (re.compile(r"\.{2,}"), r" \g<0> "),
    (re.compile(r"[;@#$%&\u2012-\u2015]"), r" \g<0> "),
    (re.compile("([^.])(\\.)([\\])}>\"']*)\\s*$"), r"\1 \2\3 "),
    (re.compile(r"[?!]"), r" \g<0> "),
    (re.compile("([^'])' "), r"\1 ' "),
    (re.compile(r"[*\[\](){}<>]"), r" \g<0> "),
    (re.compile("--"), " -- "),
    (re.compile(r"\A|\Z"), " "),
    # closing quotes, contractions and clitics
    (re.compile(r"([\u00bb\u201d\u2019])"), r" \1 "),
    (re.compile("''"), " '' "),
    (re.compile('"'), " '' "),
    (re.compile(r"\s+"), " "),
    (re.compile("([^' ])('[sS]|'[mM]|'[dD]|') "), r"\1 \2 "),
    (re.compile("([^' ])('ll|'LL|'re|'RE|'ve|'VE|n't|N'T) "), r"\1 \2 "),
    (re.compile(r"(?i)\b(can)(not)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(d)('ye)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(gim|lem)(me)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(gon)(na)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(got)(ta)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(more)('n)\b"), r" \1 \2 "),
    (re.compile(r"(?i)\b(wan)(na)(?=\s)"), r" \1 \2 "),
    (re.compile(r"(?i) ('t)(is|was)\b"), r" \1 \2 "),
)

_KEPT, _END = "\0", "\1"  # marks for a period inside a sentence, and for the end of a sentence
_LETTER = "([A-Za-z])"
_SUFFIX = "(Inc|Ltd|Jr|Sr|Co)"
_OPENER = r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|Wherever|(?:He|She|It|They|Their|Our|We|But|However|That|This)\s)"
_PLAIN: Rules = (
    (re.compile(r"(Mr|St|Mrs|Ms|Dr)\."), rf"\1{_KEPT}"),
    (re.compile(r"\.(com|net|org|io|gov|edu|me)"), rf"{_KEPT}\1"),
    (re.compile(r"([0-9])\.([0-9])"), rf"\1{_KEPT}\2"),
    (re.compile(r"\.{2,}"), lambda dots: _KEPT * len(dots.group()) + _END),
    (re.compile(r"Ph\.D\."), f"Ph{_KEPT}D{_KEPT}"),
    (re.compile(rf"\s{_LETTER}\. "), rf" \1{_KEPT} "),
    (re.compile(rf"([A-Z]\.[A-Z]\.(?:[A-Z]\.)?) {_OPENER}"), rf"\1{_END} \2"),
    (re.compile(rf"{_LETTER}\.{_LETTER}\.{_LETTER}\."), rf"\1{_KEPT}\2{_KEPT}\3{_KEPT}"),
    (re.compile(rf"{_LETTER}\.{_LETTER}\."), rf"\1{_KEPT}\2{_KEPT}"),
    (re.compile(rf" {_SUFFIX}\. {_OPENER}"), rf" \1{_END} \2"),
    (re.compile(rf" {_SUFFIX}\."), rf" \1{_KEPT}"),
    (re.compile(rf" {_LETTER}\."), rf" \1{_KEPT}"),
    (re.compile(r"\.”"), "”."),  # a quote closes before its sentence ends
    *((re.compile(rf'\{mark}"'), f'"{mark}') for mark in ".!?"),
    (re.compile(r"[.?!]"), rf"\g<0>{_END}"),
)


def _apply(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def treebank_words(text: str) -> list[str]:
    """Split a text into sentences by Punkt and return the sentences' tokens by the rules of the Penn Treebank."""
    sentences = punkt.sentences(text)
    words = {sentence: _apply(_TREEBANK, sentence).split() for sentence in set(sentences)}
    return [word for sentence in sentences for word in words[sentence]]


def plain_sentences(text: str) -> list[str]:
    """Split a text at `.`, `?` and `!`, but not after a few known abbreviations, as IFEval does for key sentences."""
    marked = _apply(_PLAIN, " " + text.replace("\n", " ") + "  ")
    sentences = [sentence.strip() for sentence in marked.replace(_KEPT, ".").split(_END)]
    return sentences if sentences[-1] else sentences[:-1]


def count_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in re.finditer(r"\w+", text))


@functools.cache
def _langdetect() -> Any:
    """Return the langdetect package with a fixed seed.  Without a seed, it may give one text different languages."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    return langdetect


def in_language(text: str, language: str) -> bool:
    """Return whether a text is in `language`; True for a text without a language (only digits), as in IFEval."""
    package = _langdetect()
    try:
        return bool(package.detect(text) == language)
    except package.LangDetectException:
        return True


def prepare() -> None:
    """Load the sentence model and the language profiles."""
    punkt.prepare()
    in_language("These words are English.", "en")
