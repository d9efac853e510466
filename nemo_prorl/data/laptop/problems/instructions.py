"""Texts of a dozen words that follow instructions of IFEval's types, judged by the `instructions` plugin.

With two instructions in a record, a response that follows one of them has half of the reward.
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
    """A response as it grows: the nouns it names, how many words it needs, how it ends and how it is dressed."""

    nouns: list[str]
    banned: str = ""
    least: int = 0
    end: str = ""
    kinds: set[str] = field(default_factory=set)

    def free_nouns(self) -> list[str]:
        """Those that nothing has been said about yet."""
        return [noun for noun in NOUNS if noun not in (*self.nouns, self.banned, *self.end.split())]

    def written(self) -> str:
        """`The moon is near the house and the tree by the sea`: the nouns, and as many words as asked for."""
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
    """Options: `kinds` (some of `KINDS`), `per_record` (instructions of a record), `max_words` (asked for)."""
    options = options_of(source, {"kinds": KINDS, "per_record": 2, "max_words": 10})
    count = number_of(source, options, "per_record", 1, 2)
    kinds = kinds_of(source, options["kinds"], KINDS, least=count)
    max_words = number_of(source, options, "max_words", 3, 10)

    def draw(number: int) -> Record:
        rng = rng_of(source, number)
        chosen = rng.sample(kinds, count)
        text = _Text([rng.choice(NOUNS)], kinds=set(chosen))
        topic = text.nouns[0]
        asked, kwargs = zip(*(_instruction(kind, rng, text, max_words) for kind in chosen), strict=True)
        return {
            "task": "instructions",
            "prompt": f"Write about the {topic}.\n{' '.join(asked)}",
            "truth": {"instruction_id_list": [_IDS[kind] for kind in chosen], "kwargs": list(kwargs)},
            "meta": {"target": text.written()},
        }

    return draw


def _instruction(kind: str, rng: random.Random, text: _Text, max_words: int) -> tuple[str, dict[str, Any]]:
    """How it is asked for, with its arguments; `text` learns what it must hold."""
    if kind == "keyword":
        found = rng.sample(text.free_nouns(), rng.randint(1, 2))
        text.nouns += found
        return f"Name the {' and the '.join(found)}.", {"keywords": found}
    if kind == "words":
        text.least = rng.randint(3, max_words)
        return f"Use at least {text.least} words.", {"num_words": text.least, "relation": "at least"}
    if kind == "end":
        text.end = f"by the {rng.choice(text.free_nouns())}"
        return f'End with "{text.end}".', {"end_phrase": text.end}
    if kind == "forbidden":
        text.banned = rng.choice(text.free_nouns())
        return f"Do not name the {text.banned}.", {"forbidden_words": [text.banned]}
    asked = {
        "quotation": "Use quotation marks.",
        "title": "Use a title in << >>.",
        "lowercase": "Use small letters.",
    }
    return asked[kind], {}
