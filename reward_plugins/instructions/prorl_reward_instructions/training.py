"""The 29 instruction types in the training data that IFEval lacks, judged as in NeMo Gym (from open-instruct)."""

import itertools

from prorl_reward_instructions import arguments as args
from prorl_reward_instructions import ifeval, words
from prorl_reward_instructions.arguments import Instruction, satisfies
from prorl_reward_instructions.ifeval import count_parts, occurrences


def _bare(word: str) -> str:
    """Return a word in lower case without punctuation."""
    return "".join(char for char in word if char.isalnum() or char == "_").lower()


def _same(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def _repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    expected = phrase.split()
    start, end = expected[0] + " ", " " + expected[-1]
    changes = []
    for line in text.split("\n"):
        begin = line.find(start)
        while begin >= 0 and (stop := line.find(end, begin + len(start))) >= 0:
            repeated = line[begin : stop + len(end)].split()
            if len(repeated) != len(expected):
                return False
            changes.append(sum(1 for word, other in zip(repeated, expected, strict=True) if word != other))
            begin = line.find(start, stop + len(end))
    return len(changes) == small_n > 0 and max(changes) <= 1 and changes[-1] == 1


def _copy_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return _same(text, prompt_to_repeat[n_start:n_end])


def _copying_multiple(text: str, prompt_to_repeat: str, N: int) -> bool:
    copies = text.split("******")
    return len(copies) == N and all(_same(copy, prompt_to_repeat) for copy in copies)


def _sentence_hyphens(text: str) -> bool:
    joined, expected = text.split("-"), words.plain_sentences(text.replace("-", " "))
    return all(sentence == sentence.strip() == other for sentence, other in zip(joined, expected, strict=False))


def _no_adjacent_consecutive(text: str) -> bool:
    initials = [word[0].lower() for word in text.split()]
    if len(initials) > 1 and any(len(initial) != 1 for initial in initials):
        return False
    return all(ord(second) - ord(first) != 1 for first, second in itertools.pairwise(initials))


def _square_brackets(text: str) -> bool:
    return all(word.startswith("[") and word.endswith("]") for word in text.split())


def _bigram_wrapping(text: str) -> bool:
    tokens = text.split()
    pairs = zip(tokens[::2], tokens[1::2], strict=False)
    return all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def _word_once(text: str, keyword: str) -> bool:
    return occurrences(text, keyword) == 1


def _exclude_word(text: str, keyword: str) -> bool:
    return f" {keyword} " not in text


def _count_increment_word(text: str, keyword1: str, keyword2: str) -> bool:
    return occurrences(text, keyword1) == 1 and occurrences(text, keyword2) == 2


def _keyword_position(text: str, keyword: str, n: int, m: int) -> bool:
    sentences = words.plain_sentences(text)
    return len(sentences) >= n and words.treebank_words(sentences[n - 1])[m - 1 : m] == [keyword]


def _palindrome(text: str) -> bool:
    return any(word == word[::-1] for word in text.split())


def _start_end(text: str) -> bool:
    tokens = words.treebank_words(text)
    return len(tokens) > 1 and tokens[0].lower() == tokens[-1].lower()


def _two_paragraphs(text: str) -> bool:
    return ifeval.number_paragraphs(text, 2)


def _two_blocks(text: str) -> bool:
    return count_parts(text.split("\n\n")) == 2


def _first_word_of_sentences(text: str, first_word: str) -> bool:
    firsts = [sentence.split()[:1] for sentence in words.plain_sentences(text)]
    return all(first and first[0].lower() == first_word.lower() for first in firsts)


def _first_word_of_answer(text: str, first_word: str) -> bool:
    return text.split()[0].lower() == first_word.lower()


def _last_word_of_sentences(text: str, last_word: str) -> bool:
    lasts = [sentence.split()[-1:] for sentence in words.plain_sentences(text)]
    return all(last and _bare(last[0]) == last_word.lower() for last in lasts)


def _last_word_of_answer(text: str, last_word: str) -> bool:
    return _bare(text.split()[-1]) == last_word.lower()


def _lowercase_counting(text: str, N: int) -> bool:
    return sum(1 for _ in args.pattern(r"\b[a-z]+\b", flags=0).finditer(text)) <= N


def _letter_counting(text: str, N: int, relation: str) -> bool:
    return satisfies(sum(1 for char in text if char.isascii() and char.isalpha()), relation, N)


def _counting_composition(text: str, n_sent: int, n_words: int) -> bool:
    paragraphs = [words.plain_sentences(paragraph) for paragraph in text.split("***")]
    if len(paragraphs) != 3 or any(len(sentences) != n_sent for sentences in paragraphs):
        return False
    return all(len(words.treebank_words(sentence)) == n_words for sentences in paragraphs for sentence in sentences)


def _count_unique(text: str) -> bool:
    tokens = words.treebank_words(text)
    return len(tokens) == len(set(tokens))


def _no_dot(text: str) -> bool:
    return "." not in text


def _no_exclamation(text: str) -> bool:
    return "!" not in text


_PROMPT = {"prompt_to_repeat": args.text}

INSTRUCTIONS = {
    "copy:repeat_phrase": Instruction(_repeat_phrase, {"phrase": args.stripped, "small_n": args.count}),
    "copy:copy": Instruction(_same, _PROMPT),
    "copy:copying_simple": Instruction(_same, _PROMPT),
    "copy:copying_multiple": Instruction(_copying_multiple, {**_PROMPT, "N": args.count}),
    "new:copy_span_idx": Instruction(_copy_span, {**_PROMPT, "n_start": args.count, "n_end": args.count}),
    "detectable_format:sentence_hyphens": Instruction(_sentence_hyphens),
    "detectable_format:square_brackets": Instruction(_square_brackets),
    "detectable_format:bigram_wrapping": Instruction(_bigram_wrapping),
    "keywords:no_adjacent_consecutive": Instruction(_no_adjacent_consecutive),
    "keywords:word_once": Instruction(_word_once, {"keyword": args.stripped}),
    "keywords:word_count_different_numbers": Instruction(ifeval.keyword_frequency, ifeval.KEYWORD_ARGUMENTS),
    "keywords:exclude_word_harder": Instruction(_exclude_word, {"keyword": args.stripped}),
    "keywords:palindrome": Instruction(_palindrome),
    "keywords:keyword_specific_position": Instruction(
        _keyword_position, {"keyword": args.word, "n": args.position, "m": args.position}
    ),
    "keywords:start_end": Instruction(_start_end),
    "paragraphs:paragraphs": Instruction(_two_paragraphs),
    "paragraphs:paragraphs2": Instruction(_two_blocks),
    "first_word:first_word_sent": Instruction(_first_word_of_sentences, {"first_word": args.word}),
    "first_word:first_word_answer": Instruction(_first_word_of_answer, {"first_word": args.word}),
    "last_word:last_word_sent": Instruction(_last_word_of_sentences, {"last_word": args.word}),
    "last_word:last_word_answer": Instruction(_last_word_of_answer, {"last_word": args.word}),
    "punctuation:punctuation_dot": Instruction(_no_dot),
    "punctuation:punctuation_exclamation": Instruction(_no_exclamation),
    "count:lowercase_counting": Instruction(_lowercase_counting, {"N": args.count}),
    "count:counting_composition": Instruction(_counting_composition, {"n_sent": args.count, "n_words": args.count}),
    "count:count_unique": Instruction(_count_unique),
    "count:count_increment_word": Instruction(
        _count_increment_word, {"keyword1": args.stripped, "keyword2": args.stripped}
    ),
    "letters:letter_counting": Instruction(_letter_counting, {"N": args.count, "relation": args.relation}),
    "letters:letter_counting2": Instruction(ifeval.letter_frequency, ifeval.LETTER_ARGUMENTS),
}
