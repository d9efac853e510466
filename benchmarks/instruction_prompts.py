"""Writes prompts with verifiable instructions, in IFEval's format: its 25 types, but none of its prompts.

    python benchmarks/instruction_prompts.py --out prompts.jsonl [--count 4000] [--seed 1] [--leave-out IFEVAL.jsonl]

Each prompt asks for a short text about a topic, and gives one to three instructions that can be followed together.
With --leave-out, no prompt is written that shares a run of 13 words with a prompt in IFEVAL.jsonl.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUBJECTS = (
    """
renting a first flat|a lost umbrella|learning to swim as an adult|the history of bread|a night train to Lisbon
keeping bees on a roof|why leaves turn red|a chess club for beginners|saving money on groceries|a robot that paints
the first day at a new job|moving to a small village|how tides work|a rainy wedding|training for a marathon
repairing old bicycles|a museum of maps|growing tomatoes on a balcony|a cat that guards a bookshop|how bridges stay up
a power cut in winter|writing letters by hand|the life of an octopus|a school orchestra|cheap holidays in autumn
why we dream|a lighthouse keeper|working from home with children|the smell of rain|a bakery that opens at midnight
recycling glass|a debate about zoos|learning Portuguese|a broken elevator|the invention of the zip
a birthday for a grandmother|camping with a baby|how vaccines work|a garden for birds|the best way to say sorry
a library on a bus|deserts at night|sleeping well before an exam|a strange neighbour|the price of coffee
a football team that never wins|volcanoes in Iceland|starting a podcast|a missing suitcase|how to choose a laptop
a walk through an old harbour|the first snow|being the youngest of five|solar panels on schools|a dragon who fears fire
cooking for twelve guests|the sound of a violin|urban foxes|a letter from the year 2100|quitting sugar
""".strip()
    .replace("\n", "|")
    .split("|")
)
FORMS = (
    "Write a short text about {}.",
    "Write a few lines on {}.",
    "Tell me something about {}.",
    "Write a brief blog entry: {}.",
    "Draft a short e-mail to a friend about {}.",
    "Write a little story. The subject: {}.",
    "Write a short poem on {}.",
    "Give me some advice or thoughts on {}.",
    "Compose an advertisement. It is about {}.",
    "Explain this briefly to a child: {}.",
    "What comes to your mind about {}?",
    "I need a paragraph for a newsletter about {}.",
)
WORDS = """
window river friend paper morning garden music stone letter market winter bridge kitchen street colour teacher forest
ticket dinner island engine silver journey village mirror basket candle copper saddle lantern pepper orchard harvest
"""
ENDINGS = (
    "That is all for today.", "Let me know what you think.", "And so it goes.", "Thank you for reading.", "The end.",
    "See you soon.", "What would you do?", "Hope this helps.",
)  # fmt: skip
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese"}
ANSWERS = "'My answer is yes.', 'My answer is no.', 'My answer is maybe.'"
_WHOLE = {"json", "constrained", "two", "repeat", "language"}  # these decide the form of the whole response
_CASES = {"capital", "lowercase", "capital_words"}
_APART = (  # a prompt has at most one type of each of these sets
    _WHOLE | {"bullets", "paragraphs", "nth", "sections"},
    _CASES | {"language", "constrained", "postscript"},
    {"title", "constrained", "json", "nth", "quotation"},
    {"end", "postscript", "json", "constrained", "quotation", "two"},
    {"words", "sentences", "constrained", "json"},
    {"keywords", "frequency", "language", "constrained"},
    {"letter", "forbidden", "language", "constrained"},
)
Told = tuple[str, str, dict[str, Any]]  # IFEval's id of an instruction, its sentence, its arguments


_PLAIN = {  # types without arguments: IFEval's id, and sentences for it
    "json": ("detectable_format:json_format", "All of your output must be valid JSON.|Reply in JSON only."),
    "title": ("detectable_format:title", "Add a title in double angular brackets, such as <<a title>>."
              "|The text needs a title, written as <<title>>."),
    "two": ("combination:two_responses", "Write two different versions, and separate them with ******."
            "|Give me two different responses with ****** between them."),
    "quotation": ("startend:quotation", "Put your whole response in double quotation marks."
                  "|Begin and end with a double quotation mark."),
    "capital": ("change_case:english_capital", "Write in English, in capital letters only."
                "|Use only capital letters, in English."),
    "lowercase": ("change_case:english_lowercase", "Write in English, in small letters only. No capital letters."
                  "|Everything must be in lowercase, in English."),
    "comma": ("punctuation:no_comma", "Do not use commas.|Commas are not allowed.|Write without any comma."),
    "constrained": ("detectable_format:constrained_response", f"Reply with exactly one of: {ANSWERS}"),
}  # fmt: skip
_NUMBERED = {  # types with one number: IFEval's id, the argument, smallest and largest number, and sentences
    "paragraphs": ("length_constraints:number_paragraphs", "num_paragraphs", 2, 4,
                   "Write exactly {} paragraphs and separate them with ***."
                   "|There must be {} paragraphs, with the markdown divider *** between them."),
    "placeholders": ("detectable_content:number_placeholders", "num_placeholders", 1, 4,
                     "Use at least {} placeholders in square brackets, such as [date]."
                     "|Include {} or more placeholders like [name]."),
    "bullets": ("detectable_format:number_bullet_lists", "num_bullets", 2, 5,
                "Give exactly {} bullet points in markdown, such as: * a point"
                "|Use {} bullets, no more and no less. Each starts with an asterisk: * like this"),
    "highlights": ("detectable_format:number_highlighted_sections", "num_highlights", 1, 4,
                   "Highlight at least {} parts in markdown, like *this part*."
                   "|Mark {} or more phrases with asterisks, such as *a phrase*."),
}  # fmt: skip
_LIMITED = {  # types with a limit: IFEval's id, its names of limit and relation, limits, and sentences
    "frequency": ("keywords:frequency", "frequency", "relation", range(1, 5),
                  "The word {word} must appear {n} times.|Mention the word {word} {n} times."),
    "letter": ("keywords:letter_frequency", "let_frequency", "let_relation", range(3, 26),
               "The letter {letter} must appear {n} times.|Let the letter {letter} occur {n} times."),
    "sentences": ("length_constraints:number_sentences", "num_sentences", "relation", range(2, 9),
                  "Write {n} sentences.|Your response must have {n} sentences."),
    "words": ("length_constraints:number_words", "num_words", "relation", range(20, 101, 10),
              "Use {n} words.|Write {n} words.|The length must be {n} words."),
    "capital_words": ("change_case:capital_word_frequency", "capital_frequency", "capital_relation", range(2, 7),
                      "Words in capital letters must appear {n} times.|Use {n} words in capital letters."),
}  # fmt: skip


def instruction(kind: str, rng: random.Random, request: str) -> Told:
    """Return an instruction of the type `kind`, one of KINDS: IFEval's id, the sentence, and the arguments by name.

    `request` is the prompt without instructions.
    """
    if kind in _PLAIN:
        name, sentences = _PLAIN[kind]
        return name, rng.choice(sentences.split("|")), {}
    if kind in _NUMBERED:
        name, argument, least, most, sentences = _NUMBERED[kind]
        number = rng.randint(least, most)
        return name, rng.choice(sentences.split("|")).format(number), {argument: number}
    if kind in _LIMITED:
        return _limited(kind, rng)
    return _own(kind, rng, request)


def _limited(kind: str, rng: random.Random) -> Told:
    name, argument, relation, limits, sentences = _LIMITED[kind]
    limit, word, letter = rng.choice(limits), rng.choice(WORDS.split()), rng.choice("abcdegilmnoprstuw")
    if rng.random() < 0.6:
        how, said = "at least", rng.choice([f"at least {limit}", f"{limit} or more"])
    else:
        limit += 1
        how, said = "less than", rng.choice([f"less than {limit}", f"fewer than {limit}"])
    values = {argument: limit, relation: how}
    values |= {"frequency": {"keyword": word}, "letter": {"letter": letter}}.get(kind, {})
    return name, rng.choice(sentences.split("|")).format(n=said, word=word, letter=letter), values


def _own(kind: str, rng: random.Random, request: str) -> Told:
    """Return an instruction as `instruction` does, for the types that none of the tables above contains."""
    number, pick, word = rng.randint, rng.choice, rng.choice(WORDS.split())
    if kind == "keywords":
        found = rng.sample(WORDS.split(), number(1, 3))
        told = pick(["Use these words: {}.", "Your text must contain: {}.", "Include the keywords {}."])
        return "keywords:existence", told.format(", ".join(found)), {"keywords": found}
    if kind == "forbidden":
        found = rng.sample(["best", "very", "and", "is", "great", "time", "people", "important", "beautiful"], 2)
        told = pick(["Do not use the words {}.", "Avoid these words: {}.", "The words {} are forbidden."])
        return "keywords:forbidden_words", told.format(" and ".join(found)), {"forbidden_words": found}
    if kind == "language":
        code, name = pick(list(LANGUAGES.items()))
        told = pick(["Answer in {} only.", "Your whole response must be in {}, no other language is allowed."])
        return "language:response_language", told.format(name), {"language": code}
    if kind == "nth":
        n = number(2, 3)
        at = number(1, n)
        told = f"Write {n} paragraphs, separated by an empty line. Paragraph {at} must begin with the word {word}."
        values = {"num_paragraphs": n, "nth_paragraph": at, "first_word": word}
        return "length_constraints:nth_paragraph_first_word", told, values
    if kind == "postscript":
        marker = pick(["P.S.", "P.P.S"])
        told = pick(["Close with a postscript that begins with {}", "Add a postscript at the end, starting with {}"])
        return "detectable_content:postscript", told.format(marker), {"postscript_marker": marker}
    if kind == "sections":
        n, name = number(2, 4), pick(["SECTION", "Section", "PART", "Chapter", "Day"])
        told = pick(["Divide the text into {n} sections, each beginning with {s} X, such as {s} 1.", "It must have {n}"
                     " parts. Begin each with {s} and its number: {s} 1, {s} 2."])  # fmt: skip
        values = {"section_spliter": name, "num_sections": n}
        return "detectable_format:multiple_sections", told.format(n=n, s=name), values
    if kind == "repeat":
        told = pick(["First repeat the request above word for word, then answer it. Say nothing before the request.",
                     "Before you answer, repeat the request above without any change."])  # fmt: skip
        return "combination:repeat_prompt", told, {"prompt_to_repeat": request}
    phrase = pick(ENDINGS)
    told = pick(['End with exactly this: "{}" Nothing may follow.', "The last words must be: {}"])
    return "startend:end_checker", told.format(phrase), {"end_phrase": phrase}


KINDS = (
    "keywords", "frequency", "forbidden", "letter", "language", "sentences", "paragraphs", "words", "nth",
    "placeholders", "postscript", "bullets", "constrained", "highlights", "sections", "json", "title", "two", "repeat",
    "end", "quotation", "capital_words", "capital", "lowercase", "comma",
)  # fmt: skip


def kinds(rng: random.Random) -> list[str]:
    """Draw the types of a prompt's instructions (items of KINDS), so that one response can follow all of them.

    A prompt has one type with probability 0.6, two with 0.3 and three with 0.1, about as in IFEval.
    """
    count = rng.choices([1, 2, 3], [0.6, 0.3, 0.1])[0]
    chosen: list[str] = []
    for kind in rng.sample(KINDS, len(KINDS)):
        if not any(kind in group and group & set(chosen) for group in _APART):
            chosen.append(kind)
        if len(chosen) == count:
            break
    return chosen


def rows(count: int, seed: int, taken: set[str]) -> Iterator[dict[str, Any]]:
    """Yield `count` different rows in IFEval's format.

    Args:
        taken: runs of 13 words that no prompt may contain; see `runs`.
    """
    rng, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        request = rng.choice(FORMS).format(rng.choice(SUBJECTS))
        chosen = kinds(rng)
        if chosen == ["constrained"]:
            request = f"Is this a good idea: {rng.choice(SUBJECTS)}?"
        told = [instruction(kind, rng, request) for kind in chosen]
        prompt = rng.choice([" ", "\n", "\n\n"]).join([request, *(sentence for _, sentence, _ in told)])
        if prompt in seen or runs(prompt) & taken:
            continue
        seen.add(prompt)
        yield {
            "key": len(seen),
            "prompt": prompt,
            "instruction_id_list": [name for name, _, _ in told],
            "kwargs": [values for _, _, values in told],
        }


def runs(text: str) -> set[str]:
    """Return all runs of 13 words of a text, in lower case."""
    words = text.lower().split()
    return {" ".join(words[k : k + 13]) for k in range(len(words) - 12)}


def write(out: Path, count: int, seed: int, leave_out: Path | None) -> None:
    """Write `count` rows as JSON Lines."""
    lines = leave_out.read_text().splitlines() if leave_out is not None else []
    taken = set().union(*(runs(json.loads(line)["prompt"]) for line in lines))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows(count, seed, taken)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=4000, help="number of prompts; default: 4000")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw; default: 1")
    parser.add_argument(
        "--leave-out", type=Path, help="IFEval's input_data.jsonl, whose prompts are left out; default: none"
    )
    args = parser.parse_args()
    write(args.out, args.count, args.seed, args.leave_out)
    sys.stdout.write(f"{args.count} prompts: {args.out}\n")


if __name__ == "__main__":
    main()
