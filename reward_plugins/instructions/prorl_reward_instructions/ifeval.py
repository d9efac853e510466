"""The 25 instruction types of IFEval (Zhou et al. 2023, arXiv 2311.07911), with the same verdicts as its checkers.

Quirks of the checkers that change a verdict are kept.  Checks that take quadratic time there take one pass here.
"""

import json
import re

from prorl_reward_instructions import arguments as args
from prorl_reward_instructions import punkt, words
from prorl_reward_instructions.arguments import Instruction, pattern, satisfies

_FIXED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": re.compile(r"p\.\s?p\.\s?s"), "P.S.": re.compile(r"p\.\s?s\.")}
_FENCES = ("```json", "```Json", "```JSON", "```")


def _existence(text: str, keywords: list[str]) -> bool:
    return all(pattern(keyword).search(text) for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return satisfies(occurrences(text, keyword), relation, frequency)


def occurrences(text: str, keyword: str) -> int:
    return sum(1 for _ in pattern(keyword).finditer(text))


def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(pattern(word, r"\b{}\b").search(text) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    count = text.lower().count(letter) if len(letter) == 1 else 0
    return satisfies(count, let_relation, let_frequency)


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return satisfies(len(punkt.sentences(text)), relation, num_sentences)


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return satisfies(words.count_words(text), relation, num_words)


def count_parts(parts: list[str]) -> int | None:
    """Return how many parts are not blank; None if a part between two others is blank."""
    if not all(part.strip() for part in parts[1:-1]):
        return None
    return sum(1 for part in parts if part.strip())


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    return count_parts(text.split("***")) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    filled = sum(1 for paragraph in paragraphs if paragraph.strip())
    # Blank paragraphs do not count for `num_paragraphs`, but do count for the position `nth_paragraph`.
    if filled != num_paragraphs or nth_paragraph > filled or not paragraphs[nth_paragraph - 1].strip():
        return False
    first = paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    letters = re.split(r"[.,?!'\"]", first, maxsplit=1)[0]
    return "".join(map(str.lower, letters)) == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    count = 0
    for line in text.split("\n"):
        opened = line.find("[")
        while opened >= 0 and (closed := line.find("]", opened)) >= 0:
            count += 1
            opened = line.find("[", closed)
    return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = _POSTSCRIPTS.get(postscript_marker) or pattern(postscript_marker.lower(), flags=0)
    return marker.search(text.lower()) is not None


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    count, starred = 0, False  # starred: the previous line is a single star, and this line is its text
    lines = [line.lstrip() for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if line.startswith("-"):
            count += 1
        if starred:
            starred = False
        elif line == "*":
            starred = number < len(lines)
            count += starred
        elif line.startswith("*") and line[1] != "*":
            count += 1
    return count == num_bullets


def _constrained_response(text: str) -> bool:
    return any(answer in text for answer in _FIXED_ANSWERS)


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    single = sum(1 for section in re.findall(r"\*([^\n*]*)\*", text) if section.strip())
    double = sum(1 for section in re.findall(r"\*\*([^\n*]*)\*\*", text) if section.strip())
    return single + double >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    start = pattern(section_spliter, r"\s?{}\s?\d+\s?", flags=0)  # case-sensitive, unlike keywords
    return len(start.split(text)) - 1 >= num_sections


def _json_format(text: str) -> bool:
    body = text.strip()
    for fence in _FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return count_parts(parts) == 2 and filled[0] != filled[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(1 for word in words.treebank_words(text) if word.isupper())
    return satisfies(count, capital_relation, capital_frequency)


def _english_capital(text: str) -> bool:
    return text.isupper() and words.in_language(text, "en")


def _english_lowercase(text: str) -> bool:
    return text.islower() and words.in_language(text, "en")


def _no_comma(text: str) -> bool:
    return "," not in text


def _quotation(text: str) -> bool:
    body = text.strip()
    return len(body) > 1 and body.startswith('"') and body.endswith('"')


LETTER_ARGUMENTS = {"letter": args.letter, "let_frequency": args.count, "let_relation": args.relation}
KEYWORD_ARGUMENTS = {"keyword": args.stripped, "frequency": args.count, "relation": args.relation}

INSTRUCTIONS = {
    "keywords:existence": Instruction(_existence, {"keywords": args.texts}),
    "keywords:frequency": Instruction(keyword_frequency, KEYWORD_ARGUMENTS),
    "keywords:forbidden_words": Instruction(_forbidden_words, {"forbidden_words": args.texts}),
    "keywords:letter_frequency": Instruction(letter_frequency, LETTER_ARGUMENTS),
    "language:response_language": Instruction(words.in_language, {"language": args.language}),
    "length_constraints:number_sentences": Instruction(
        _number_sentences, {"num_sentences": args.count, "relation": args.relation}
    ),
    "length_constraints:number_paragraphs": Instruction(number_paragraphs, {"num_paragraphs": args.count}),
    "length_constraints:number_words": Instruction(_number_words, {"num_words": args.count, "relation": args.relation}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _nth_paragraph_first_word,
        {"num_paragraphs": args.count, "nth_paragraph": args.position, "first_word": args.text},
    ),
    "detectable_content:number_placeholders": Instruction(_number_placeholders, {"num_placeholders": args.count}),
    "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": args.stripped}),
    "detectable_format:number_bullet_lists": Instruction(_number_bullet_lists, {"num_bullets": args.count}),
    "detectable_format:constrained_response": Instruction(_constrained_response),
    "detectable_format:number_highlighted_sections": Instruction(
        _number_highlighted_sections, {"num_highlights": args.count}
    ),
    "detectable_format:multiple_sections": Instruction(
        _multiple_sections, {"section_spliter": args.stripped, "num_sections": args.count}
    ),
    "detectable_format:json_format": Instruction(_json_format),
    "detectable_format:title": Instruction(_title),
    "combination:two_responses": Instruction(_two_responses),
    "combination:repeat_prompt": Instruction(_repeat_prompt, {"prompt_to_repeat": args.text}),
    "startend:end_checker": Instruction(_end_checker, {"end_phrase": args.stripped}),
    "startend:quotation": Instruction(_quotation),
    "change_case:capital_word_frequency": Instruction(
        _capital_word_frequency, {"capital_frequency": args.count, "capital_relation": args.relation}
    ),
    "change_case:english_capital": Instruction(_english_capital),
    "change_case:english_lowercase": Instruction(_english_lowercase),
    "punctuation:no_comma": Instruction(_no_comma),
}
