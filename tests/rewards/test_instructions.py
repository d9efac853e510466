"""The instructions plugin: each type followed and not, loose mode, sentences and words, truths, hostile texts, data."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prorl_reward_instructions import ifeval, punkt, training, words
from prorl_reward_instructions.plugin import KNOWN, InstructionsReward, checks_of, loose_variants

from nemo_prorl.rewards.interface import RewardRequest, Verdict, judge
from tests.lines import read_lines

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
GERMAN = "Das ist ein schöner Tag, und wir gehen heute zusammen auf den Markt."
PLAIN = "This is a fine day and we are going to the market together."

# Type, arguments, a response that follows, one that does not.  The second line of a pair is an edge of the rule.
IFEVAL_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sea", "shore"]}, "Seashore", "the sea"),
    ("keywords:existence", {"keywords": ["colou?r"]}, "A COLOR", "colouur"),
    ("keywords:existence", {"keywords": ["a)"]}, "A) first", "a first"),
    ("keywords:frequency", {"keyword": " sea ", "frequency": 2, "relation": "at least"}, "Sea, seal", "sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "sea", "sea season"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "season", "The SEA."),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, "Eve", "ev"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, "a", "#a"),
    ("language:response_language", {"language": "de"}, GERMAN, PLAIN),
    ("language:response_language", {"language": "de"}, "12 + 34", PLAIN),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two.", "Dr. One"),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, "I am. Ok.", "A? B! No."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "*** a *** b ***", "a *** *** b"),
    ("length_constraints:number_words", {"num_words": 4, "relation": "at least"}, "1,000 don't", "well-known it"),
    ("length_constraints:number_words", {"num_words": 2, "relation": "less than"}, "a_b", "a-b"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Sea"},
        'One.\n\n"sea\'s" end',
        "One.\n\nThe sea",
    ),
    (  # blank paragraphs are not counted, but the nth is looked up among all
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "sea"},
        "sea.\n\n\n\nshore",
        "\n\nsea\n\nshore",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "sea"},
        "a\n\nsea, shore",
        "a\n\nsea\n\nshore",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a\nb] [c]"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[] []", "[[a]]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np. s. y", "PS: y"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P. P. S y", "P.S. y"),
    ("detectable_content:postscript", {"postscript_marker": " Note:"}, "so\nNOTE: y", "so\nnote y"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b", "* a\n** b"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "*\na", "a\n*"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "*\n- a", "*\n* a"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "My answer is perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* *b*", "*a* * *"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**a**", "*a\nb*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Day", "num_sections": 2},
        "Day 1 a Day2",
        "day 1 Day 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:json_format", {}, "17", "[" * 100_000),
    ("detectable_format:title", {}, "<<Of joy>>\nx", "<<Of\njoy>>"),
    ("detectable_format:title", {}, "a <<b>> c", "<< >>\n<<>>"),
    ("detectable_format:title", {}, "<<<a>>>", "a"),
    ("combination:two_responses", {}, "a\n******\nb", "a ****** a"),
    ("combination:two_responses", {}, "******a******b", "a************b"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, " say IT. It.", "Sure: Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So "the END."', "The end. Bye"),
    ("startend:quotation", {}, ' "a" ', '"'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "I AM", "A-B Cd"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "A-B", "OK, OK"),
    ("change_case:english_capital", {}, PLAIN.upper(), PLAIN),
    ("change_case:english_capital", {}, PLAIN.upper() + " 12", GERMAN.upper()),
    ("change_case:english_lowercase", {}, PLAIN.lower(), PLAIN),
    ("change_case:english_lowercase", {}, PLAIN.lower() + " 12", GERMAN.lower()),
    ("punctuation:no_comma", {}, "a; b、c", "a,b"),
]
TRAINING_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "copy:repeat_phrase",
        {"phrase": "Time goes by", "small_n": 2},
        "Time flies by. Time ran by",
        "Time goes by. Time is by. Time ran by",
    ),
    ("copy:copy", {"prompt_to_repeat": "Do it"}, " do it\n", "do it now"),
    ("copy:copying_simple", {"prompt_to_repeat": "Do it"}, "DO IT", "do"),
    ("copy:copying_multiple", {"prompt_to_repeat": "Do it", "N": 2}, "do it\n******\nDo it", "do it"),
    ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 0, "n_end": 3}, "ABC", "abcd"),
    ("detectable_format:sentence_hyphens", {}, "It is.-We go.", "It is. -We go."),
    ("detectable_format:square_brackets", {}, "[a] [b.]", "[a] b"),
    ("detectable_format:bigram_wrapping", {}, "<<a b>> <<c d>> e", "<<a b>> c d"),
    ("keywords:no_adjacent_consecutive", {}, "a c B", "An bad"),
    ("keywords:word_once", {"keyword": "sea"}, "The SEA", "sea, seal"),
    ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 1, "relation": "less than"}, "b", "a"),
    ("keywords:exclude_word_harder", {"keyword": "sea"}, "sea.", "the sea is"),
    ("keywords:palindrome", {}, "my level", "my levels"),
    ("keywords:keyword_specific_position", {"keyword": "sea", "n": 2, "m": 2}, "It is. The sea.", "The sea. It is."),
    ("keywords:start_end", {}, "Sea is the sea", "Sea is the sea."),
    ("paragraphs:paragraphs", {}, "a *** b", "a\n\nb"),
    ("paragraphs:paragraphs2", {}, "a\n\nb", "a\n\n\n\nb"),
    ("first_word:first_word_sent", {"first_word": ["sea"]}, "Sea is. Sea was.", "Sea is. It was."),
    ("first_word:first_word_answer", {"first_word": "sea"}, "SEA is", "Sea: is"),
    ("last_word:last_word_sent", {"last_word": "sea"}, "A sea! The sea.", "A sea. Sea it."),
    ("last_word:last_word_answer", {"last_word": "sea"}, 'The "Sea."', "sea it"),
    ("punctuation:punctuation_dot", {}, "a!", "1.5"),
    ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
    ("count:lowercase_counting", {"N": 2}, "A Bc de fg", "a b c"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 3}, "Go on. *** Do it. *** Be so.", "Go on. *** Do it."),
    ("count:count_unique", {}, "The sea the", "the sea, the"),
    ("count:count_increment_word", {"keyword1": "a", "keyword2": "b"}, "b A B", "a b"),
    ("letters:letter_counting", {"N": 3, "relation": "at least"}, "a1bc", "é1bc"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "ab", "aA"),
]


@pytest.fixture(scope="module")
def plugin() -> InstructionsReward:
    made = InstructionsReward()
    made.prepare()
    return made


def verdict(plugin: InstructionsReward, response: str, *instructions: tuple[str, dict[str, Any] | None]) -> Verdict:
    truth = {"instruction_id_list": [name for name, _ in instructions], "kwargs": [given for _, given in instructions]}
    return judge(plugin, RewardRequest("x", "instructions", "?", truth, response))


@pytest.mark.parametrize(("name", "given", "follows", "misses"), IFEVAL_CASES + TRAINING_CASES)
def test_each_type_followed_and_not(
    plugin: InstructionsReward, name: str, given: dict[str, Any], follows: str, misses: str
) -> None:
    right, wrong = (verdict(plugin, response, (name, given)) for response in (follows, misses))
    assert (right["score"], right["correct"], right["failure"]) == (1.0, True, None), right["detail"]
    assert (wrong["score"], wrong["correct"], wrong["failure"]) == (0.0, False, None)
    assert wrong["detail"] == f"followed 0 of 1; not followed: {name}"


def test_every_type_has_a_case() -> None:
    assert {name for name, *_ in IFEVAL_CASES} == set(ifeval.INSTRUCTIONS)
    assert {name for name, *_ in TRAINING_CASES} == set(training.INSTRUCTIONS)
    assert (len(ifeval.INSTRUCTIONS), len(training.INSTRUCTIONS), len(KNOWN)) == (25, 29, 54)


def test_the_score_is_the_fraction_followed_strictly(plugin: InstructionsReward) -> None:
    three: tuple[tuple[str, dict[str, Any] | None], ...] = (
        ("punctuation:no_comma", None),
        ("detectable_format:json_format", {}),
        ("startend:end_checker", {"end_phrase": "bye"}),
    )
    found = verdict(plugin, "<think>a, b</think>\n\nSo bye\nHope that helps", *three)
    assert found["score"] == pytest.approx(1 / 3)
    assert found["correct"] is False
    assert found["parts"] == pytest.approx({"strict": 1 / 3, "loose": 2 / 3, "prompt_strict": 0.0, "prompt_loose": 0.0})
    assert found["detail"] == "followed 1 of 3; not followed: detectable_format:json_format, startend:end_checker"
    whole = verdict(plugin, "So bye", three[0], three[2])
    assert (whole["score"], whole["correct"], whole["parts"]["prompt_strict"]) == (1.0, True, 1.0)
    assert whole["detail"] == "followed 2 of 2"


@pytest.mark.parametrize("response", ["", " \n\t", "<think>No, no.</think>", "<think>a, b</think>\n \n"])
def test_a_blank_answer_follows_nothing(plugin: InstructionsReward, response: str) -> None:
    found = verdict(plugin, response, ("punctuation:no_comma", {}))
    assert (found["score"], found["parts"]["loose"], found["failure"]) == (0.0, 0.0, None)


def test_only_what_follows_the_thought_is_judged(plugin: InstructionsReward) -> None:
    comma: tuple[str, dict[str, Any]] = ("punctuation:no_comma", {})
    assert verdict(plugin, "<think>a, b</think>c", comma)["score"] == 1.0
    assert verdict(plugin, "<think>a</think>b, c", comma)["score"] == 0.0
    unclosed = verdict(plugin, "<think>a b", comma)
    assert (unclosed["score"], unclosed["correct"]) == (0.0, False)
    assert "never closed" in unclosed["detail"]
    first = (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"},
    )
    assert verdict(plugin, "<think>a</think>\n\nSo it is", first)["score"] == 1.0
    assert verdict(plugin, "\n\nSo it is", first)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "followed"),
    [
        ("Sure!\n\nso bye", True),
        ("so bye\nHope that helps", True),
        ("Sure!\nso bye\nThat helps", True),
        ("so *bye*", True),
        ("Sure!\n**so bye**\nThat helps", True),
        ("Sure!\nHere:\nso bye\nThat\nhelps", False),
    ],
)
def test_loose_mode_drops_first_and_last_line_and_asterisks(
    plugin: InstructionsReward, response: str, followed: bool
) -> None:
    found = verdict(plugin, response, ("startend:end_checker", {"end_phrase": "so bye"}))
    assert found["parts"]["loose"] == found["parts"]["prompt_loose"] == float(followed)
    assert found["score"] == float(response.endswith("so bye"))


def test_the_loose_variants_are_those_of_ifeval_without_the_blank() -> None:
    assert loose_variants("a*\n b\nc") == ["a*\n b\nc", "a\n b\nc", "b\nc", "a*\n b", "a\n b", "b"]
    assert loose_variants("***") == ["***"]
    assert loose_variants(" \n ") == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no end", 1),
        ("Dr. Who met Mr. X. He ran.", 2),
        ("It is 3.5 m. long? Yes!", 2),
        ("He lives in the U.S. The house is old.", 2),
        ("He lives in the U.S. Army barracks.", 1),
        ("J. Bach wrote it. it was good.", 2),
        ("Wait... what? Well... The end.", 3),
        ('He said "No." Then he left.', 2),
        ("(It rains.) We stay. ---", 3),
        ("1. Take it.\n2. Leave it.", 4),
        ("at 5 p.m. we ate, etc. and so on.", 2),
        ("“No.” Yes.", 1),
        ("He had 3. Who knew?", 1),
        ("Version 3. is out.", 1),
        ("Vitamin C. is good.", 1),
        ("At 5 p.m. Please come.", 2),
        ("At 5 p.m. Nobody left.", 1),
        ("ok.Really.no", 1),
        (". . . a. . . . b", 8),
    ],
)
def test_sentences_are_those_of_punkt(text: str, count: int) -> None:
    assert len(punkt.sentences(text)) == count, punkt.sentences(text)


def test_closing_punctuation_stays_with_its_sentence() -> None:
    assert punkt.sentences('He said "No." (Why?) So.') == ['He said "No."', "(Why?)", "So."]


def test_words_are_split_in_the_manner_of_the_treebank() -> None:
    assert words.treebank_words("They'll say \"I CAN'T\", cannot (A.B.) go... U.S.-made!") == (
        ["They", "'ll", "say", "``", "I", "CA", "N'T", "''", ",", "can", "not"]
        + ["(", "A.B", ".", ")", "go", "...", "U.S.-made", "!"]
    )
    assert words.count_words("don't 1,000 a_b é ⚠️ 中文") == 7


def test_plain_sentences_know_a_few_abbreviations() -> None:
    text = 'Dr. A. Lee (Ph.D.) saw example.com v1.5. She said "Go!" Well... ok'
    assert words.plain_sentences(text) == [
        "Dr. A. Lee (Ph.D.) saw example.com v1.5.",
        'She said "Go"!',
        "Well...",
        "ok",
    ]


def test_the_language_of_a_mixed_text_is_always_the_same() -> None:
    mixed = "no es la casa di mare e bon"  # without a seed Italian, now and then Spanish
    assert len({words.in_language(mixed, "it") for _ in range(40)}) == 1


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ({}, r"truth\.instruction_id_list is None"),
        ({"instruction_id_list": [], "kwargs": []}, r"truth\.instruction_id_list is \[\]"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, r"truth\.kwargs is None"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, r"truth\.kwargs has 2 entries.*have 1"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, r"truth\.kwargs\[0\] is 'x'"),
        (
            {"instruction_id_list": ["no_comma"], "kwargs": [{}]},
            r"list\[0\] is 'no_comma'.*keywords:existence.*no_comma",
        ),
        ({"instruction_id_list": [["x"]], "kwargs": [{}]}, r"truth\.instruction_id_list\[0\] is \['x'\]"),
    ],
)
def test_a_wrong_truth_names_its_field(plugin: InstructionsReward, truth: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plugin.validate_truth(truth)


@pytest.mark.parametrize(
    ("name", "argument", "bad"),
    [
        ("length_constraints:number_words", "num_words", -1),
        ("length_constraints:number_words", "num_words", "12"),
        ("length_constraints:number_words", "num_words", True),
        ("length_constraints:number_words", "num_words", 1.5),
        ("length_constraints:number_words", "relation", "at most"),
        ("length_constraints:nth_paragraph_first_word", "nth_paragraph", 0),
        ("keywords:existence", "keywords", []),
        ("keywords:existence", "keywords", "sea"),
        ("keywords:forbidden_words", "forbidden_words", ["sea", " "]),
        ("keywords:letter_frequency", "letter", "ab"),
        ("language:response_language", "language", "klingon"),
        ("combination:repeat_prompt", "prompt_to_repeat", ""),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_must_be(
    plugin: InstructionsReward, name: str, argument: str, bad: Any
) -> None:
    given = next(dict(case[1]) for case in IFEVAL_CASES if case[0] == name)
    truth = {"instruction_id_list": ["punctuation:no_comma", name], "kwargs": [{}, {**given, argument: bad}]}
    with pytest.raises(ValueError, match=rf"truth\.kwargs\[1\]\.{argument} is .*; it must be "):
        plugin.validate_truth(truth)


@pytest.mark.parametrize(
    ("name", "given"), sorted({case[0]: case[1] for case in IFEVAL_CASES + TRAINING_CASES}.items())
)
def test_a_missing_argument_is_named_and_a_strange_one_passed_over(name: str, given: dict[str, Any]) -> None:
    every = {key: None for instruction in KNOWN.values() for key in instruction.arguments}
    checks_of({"instruction_id_list": [name], "kwargs": [{**every, **given, "no_such_key": 3}]})
    for key in given:
        with pytest.raises(ValueError, match=rf"truth\.kwargs\[0\]\.{key} is missing"):
            checks_of({"instruction_id_list": [name], "kwargs": [{**given, key: None}]})


def test_a_whole_number_may_be_written_as_a_float(plugin: InstructionsReward) -> None:
    words_of = ("length_constraints:number_words", {"num_words": 2.0, "relation": "at least"})
    assert verdict(plugin, "a b", words_of)["score"] == 1.0


# Each made a pattern of some type quadratic, when it was written as IFEval writes it.
HOSTILE = ["[", "\n", "<", "*", "*\n", ". ", ".)", "a.", "p.", "* ", "-", " \n", "İ", "\ud800", "a, I'm U.S. A.\n"]


@pytest.mark.parametrize("unit", HOSTILE)
@pytest.mark.starts
def test_hostile_texts_are_judged_in_time(plugin: InstructionsReward, unit: str) -> None:
    text = (unit * 100_000)[:100_000]
    most = {"num_sentences": 10**6, "num_words": 10**6, "capital_frequency": 10**6, "num_sections": 10**6}
    cases = {case[0]: {**case[1], **{key: most[key] for key in most if key in case[1]}} for case in IFEVAL_CASES}
    for name, given in cases.items():
        start = time.process_time()
        found = verdict(plugin, "x" + text, (name, given))
        assert found["failure"] is None
        assert time.process_time() - start < plugin.time_budget_s / 2, name


def test_importing_the_plugin_loads_no_language_profiles() -> None:
    code = (
        "import sys, prorl_reward_instructions.plugin; sys.exit('langdetect' in sys.modules or 'nltk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return read_lines(path)


def test_every_ifeval_prompt_has_a_valid_truth(plugin: InstructionsReward) -> None:
    records = lines_of(DATA / "ifeval" / "input_data.jsonl")
    assert len(records) == 541
    for record in records:
        plugin.validate_truth({key: record[key] for key in ("instruction_id_list", "kwargs")})
    assert {name for record in records for name in record["instruction_id_list"]} == set(ifeval.INSTRUCTIONS)


def test_the_verdicts_of_nemo_gym_are_ours(plugin: InstructionsReward) -> None:
    records = lines_of(DATA / "nemo_gym_examples" / "instruction_following_example_rollouts.jsonl")
    for record in records:
        response = record["response"]["output"][-1]["content"][0]["text"]
        asked = list(zip(record["instruction_id_list"], record["kwargs"], strict=True))
        found = verdict(plugin, response, *asked)
        assert found["correct"] is record["follow_all_instructions"] is (record["reward"] == 1.0)
        each = [verdict(plugin, response, one)["correct"] for one in asked]
        assert each == record["follow_instruction_list"], found["detail"]
    assert {record["reward"] for record in records} == {0.0, 1.0}
    for record in lines_of(DATA / "nemo_gym_examples" / "instruction_following_example.jsonl"):
        plugin.validate_truth({key: record[key] for key in ("instruction_id_list", "kwargs")})
