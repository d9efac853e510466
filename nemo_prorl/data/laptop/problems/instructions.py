"""Generates prompts for a short text that follows IFEval instructions, judged by the `instructions` plugin.

If a record has two instructions, a response that follows one of them has half of the reward.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.problems import NOUNS, Draw, Record, kinds_of, number_of, options_of, rng_of

_IDS = {
    "keyword": "keywords:existence",
    "words": "length_constraints:number_words",
    "end": "startend:end_checker",
    "quotation": "startend:quotation",
    "title": "detectable_format:title",
    "lowercase": "change_case:english_lowercase",
    "forbidden": "keywords:forbidden_words",
}
KINDS = list(_IDS)


@dataclass
class _Text:
    """A correct response under construction, as the instructions of the record require it."""

    nouns: list[str]  # nouns that the text must contain; the first is the topic
    banned: str = ""  # noun that the text must not contain
    least: int = 0  # minimum number of words
    end: str = ""  # phrase that the text must end with
    kinds: set[str] = field(default_factory=set)  # kinds of the record's instructions

    def free_nouns(self) -> list[str]:
        """Return the nouns that no instruction mentions yet."""
        return [noun for noun in NOUNS if noun not in (*self.nouns, self.banned, *self.end.split())]

    def written(self) -> str:
        """Return the text, such as `The moon is near the house and the tree by the sea`."""
        fillers = [noun for noun in ("house", "tree", "river") if noun != self.banned]
        first, *others = self.nouns
        place, *others = others or fillers[:1]
        words = ["The", first, "is", "near", "the", place]
        for noun in others:
            words += ["and", "the", noun]
        added = len(self.end.split()) + ("title" in self.kinds)
        for noun in fillers:
            if len(words) + added < self.least:
                words += ["and", "the", noun]
        text = " ".join([*words, *self.end.split()])
        if "title" in self.kinds:
            text = f"<< {first} >> {text}"
        if "lowercase" in self.kinds:
            text = text.lower()
        return f'"{text}"' if "quotation" in self.kinds else text


def instructions(source: DataSource) -> Draw:
    """Return the function that draws problems of instruction following.

    Options: `kinds` (some of `KINDS`), `per_record` (instructions per record), `max_words` (an instruction "at least N
    words" asks for no more than this number).
    """
    options = options_of(source, {"kinds": KINDS, "per_record": 2, "max_words": 10})
    count = number_of(source, options, "per_record", 1, 2)
    kinds = kinds_of(source, options["kinds"], KINDS, least=count)
    max_words = number_of(source, options, "max_words", 3, 10)

    def draw(number: int) -> Record:
        rng = rng_of(source, number)
        chosen = rng.sample(kinds, count)
        text = _Text([rng.choice(NOUNS)], kinds=set(chosen))
        topic = text.nouns[0]
        sentences, kwargs = zip(*(_instruction(kind, rng, text, max_words) for kind in chosen), strict=True)
        return {
            "task": "instructions",
            "prompt": f"Write about the {topic}.\n{' '.join(sentences)}",
            "truth": {"instruction_id_list": [_IDS[kind] for kind in chosen], "kwargs": list(kwargs)},
            "meta": {"target": text.written()},
        }

    return draw


def _instruction(kind: str, rng: random.Random, text: _Text, max_words: int) -> tuple[str, dict[str, Any]]:
    """Return the sentence and the IFEval arguments of an instruction; record the instruction in `text`."""
    if kind == "keyword":
        nouns = rng.sample(text.free_nouns(), rng.randint(1, 2))
        text.nouns += nouns
        return f"Name the {' and the '.join(nouns)}.", {"keywords": nouns}
    if kind == "words":
        text.least = rng.randint(3, max_words)
        return f"Use at least {text.least} words.", {"num_words": text.least, "relation": "at least"}
    if kind == "end":
        text.end = f"by the {rng.choice(text.free_nouns())}"
        return f'End with "{text.end}".', {"end_phrase": text.end}
    if kind == "forbidden":
        text.banned = rng.choice(text.free_nouns())
        return f"Do not name the {text.banned}.", {"forbidden_words": [text.banned]}
    sentences = {
        "quotation": "Use quotation marks.",
        "title": "Use a title in << >>.",
        "lowercase": "Use small letters.",
    }
    return sentences[kind], {}
