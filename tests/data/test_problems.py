"""The small problems of code, stem and instructions: right targets by the real plugins, short, clear refusals."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_prorl.config import DataSource
from nemo_prorl.data.blend import load_sources
from nemo_prorl.data.laptop.generators import Record, generate, warmup_target
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.laptop.problems import code, instructions, stem
from nemo_prorl.data.records import validate_record
from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult
from nemo_prorl.rewards.sandbox import open_sandbox
from nemo_prorl.settings import load

pytestmark = pytest.mark.starts

DOMAINS = ("code", "stem", "instructions")


@pytest.fixture(scope="module")
def plugins() -> Iterator[dict[str, RewardPlugin]]:
    known = discover()
    made = {task: make_plugin(known.plugin_of_task(task), None) for task in ("math", "puzzles", *DOMAINS)}
    made["code"].sandbox = open_sandbox(packages=made["code"].sandbox_packages)
    for plugin in made.values():
        plugin.prepare()
    yield made
    made["code"].sandbox.close()


def source(generator: str, size: int = 300, seed: int = 0, **options: Any) -> DataSource:
    return DataSource(name=generator, generator=generator, size=size, seed=seed, options=options)


def judged(plugins: dict[str, RewardPlugin], record: Record, response: str) -> RewardResult:
    request = RewardRequest(record["id"], record["task"], record["prompt"], record["truth"], response)
    return plugins[record["task"]].score(request)


# How a prompt shows its kind.
MARKS = {
    "code": {"sum": r"prints \d+ plus", "repeat": r"prints \w+ \d+ times", "linear": "x times", "bound": "x but"},
    "stem": {"units": "Convert", "laws": "A (car|force|current|mass)", "elements": "symbol"},
    "instructions": {
        "keyword": "Name the",
        "words": "words",
        "end": "End with",
        "quotation": "quotation",
        "title": "title",
        "lowercase": "small letters",
        "forbidden": "Do not name",
    },
}


@pytest.mark.parametrize(("name", "size"), [("code", 100), ("stem", 1000), ("instructions", 1000)])
def test_a_target_has_the_full_reward_and_a_neighbours_has_not(
    plugins: dict[str, RewardPlugin], name: str, size: int
) -> None:
    records = generate(source(name, size, seed=5))
    assert len({record["prompt"] for record in records}) == size
    for record in records:
        validate_record(record, "here")
        assert (record["task"], record["source"]) == (name, name)
        result = judged(plugins, record, warmup_target(record))
        assert (result.score, result.correct) == (1.0, True), (record, result.detail)
    # Two problems may share an answer: the letter of a choice, or a text that two requests have in common.
    pairs = itertools.pairwise(records[:41])
    assert sum(judged(plugins, one, warmup_target(other)).score == 1.0 for one, other in pairs) < 12


@pytest.mark.parametrize("name", DOMAINS)
def test_seed_decides_and_held_out_problems_are_apart(name: str) -> None:
    first = generate(source(name, seed=3))
    assert first == generate(source(name, seed=3))
    assert [r["prompt"] for r in first] != [r["prompt"] for r in generate(source(name, seed=4))]
    held_out = {record["prompt"] for record in first[::3]}
    kept = generate(source(name, seed=3), held_out)
    assert len(kept) == 300
    assert not held_out & {record["prompt"] for record in kept}


def test_wrong_numbers_in_a_program_pass_some_tests(plugins: dict[str, RewardPlugin]) -> None:
    records = generate(source("code", 6, kinds=["linear"]))
    for record in records:
        program = warmup_target(record)
        without_factor = program.replace(program[program.index("*") + 2], "1", 1)
        assert judged(plugins, record, without_factor).score == 0.25
    for record in generate(source("code", 6, kinds=["bound"])):
        bare = "```python\ndef f(x): return x\n```"
        assert 0.3 <= judged(plugins, record, bare).score <= 0.7


def test_a_number_without_its_unit_passes_and_another_unit_does_not(plugins: dict[str, RewardPlugin]) -> None:
    for record in generate(source("stem", 50, kinds=["units", "laws"])):
        truth = record["truth"]
        assert judged(plugins, record, f"\\boxed{{{truth['answer']}}}").score == 1.0
        assert judged(plugins, record, f"\\boxed{{{truth['answer']} K}}").score == 0.0
        assert judged(plugins, record, f"\\boxed{{{truth['answer']}1 {truth['unit']}}}").score == 0.0


FACTORS = {("km", "m"): 1000, ("m", "cm"): 100, ("kg", "g"): 1000, ("cm", "mm"): 10, ("kV", "V"): 1000}


def test_truths_say_what_the_prompts_ask(plugins: dict[str, RewardPlugin]) -> None:
    for record in generate(source("stem", 200, kinds=["units"])):
        asked = re.match(r"Convert (\d+) (\w+) to (\w+)\.", record["prompt"])
        assert asked is not None
        assert asked[3] == record["truth"]["unit"]
        assert int(record["truth"]["answer"]) == int(asked[1]) * FACTORS[asked[2], asked[3]]
        assert judged(plugins, record, f"\\boxed{{{record['truth']['answer']} {asked[3]}}}").score == 1.0
        assert judged(plugins, record, f"\\boxed{{{asked[1]} {asked[2]}}}").score == 0.0  # the question is no answer
    for record in generate(source("stem", 200, kinds=["laws"])):
        one, other = map(int, re.findall(r"\b\d+\b", record["prompt"].replace("s^2", "s")))
        assert record["truth"]["answer"] == str(one * other)
    for record in generate(source("code", 200, kinds=["linear", "bound"])):
        numbers = [int(text) for text in re.findall(r"\d+", record["prompt"])]
        for test in record["truth"]["tests"]:
            x = test["args"][0]
            if "times" in record["prompt"]:
                assert test["expected"] == x * numbers[0] + numbers[1]
            else:
                assert test["expected"] == (max if "at least" in record["prompt"] else min)(x, numbers[0])


def test_half_of_two_instructions_is_half_the_reward(plugins: dict[str, RewardPlugin]) -> None:
    records = generate(source("instructions", 100, kinds=["quotation", "keyword"]))
    assert {judged(plugins, record, warmup_target(record).strip('"')).score for record in records} == {0.5}
    for record in generate(source("instructions", 30, per_record=1)):
        assert len(record["truth"]["kwargs"]) == 1
        assert judged(plugins, record, warmup_target(record)).score == 1.0


@pytest.mark.parametrize("name", DOMAINS)
def test_each_kind_is_made_and_may_be_chosen(name: str) -> None:
    alone = {"per_record": 1} if name == "instructions" else {}
    marks = MARKS[name]
    assert list(marks) == {"code": code, "stem": stem, "instructions": instructions}[name].KINDS
    together = generate(source(name, 200, **alone))
    for kind, mark in marks.items():
        assert all(re.search(mark, record["prompt"]) for record in generate(source(name, 8, kinds=[kind], **alone)))
        assert any(re.search(mark, record["prompt"]) for record in together)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (source("code", kind=["sum"]), "code: unknown option kind; expected one of kinds, max_value"),
        (source("code", kinds=["sums"]), r"kinds is \['sums'\]; expected a list of at least 1 .* sum, repeat"),
        (source("code", kinds=[]), r"kinds is \[\]"),
        (source("code", max_value=5), "max_value is 5; expected a whole number from 9 to 999"),
        (source("code", size=500, kinds=["repeat"], max_value=9), "only 64 different.*widen the options"),
        (source("stem", kinds="units"), "kinds is 'units'; expected a list"),
        (source("stem", kinds=["units", "units"]), "at least 1 different names of units, laws, elements"),
        (source("stem", max_factor=True), "max_factor is True"),
        (source("stem", max_value=2.5), "max_value is 2.5"),
        (source("instructions", kinds=["end"]), r"kinds is \['end'\]; expected a list of at least 2"),
        (source("instructions", per_record=3), "per_record is 3; expected a whole number from 1 to 2"),
        (source("instructions", max_words=11), "max_words is 11"),
    ],
)
def test_wrong_options_name_themselves_and_the_fix(bad: DataSource, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        generate(bad)
    assert f"data source '{bad.name}'" in str(caught.value)


def test_the_laptops_five_domains_fit_its_context(plugins: dict[str, RewardPlugin]) -> None:
    cfg = load(["data=domains"])
    train, validation = load_sources(cfg.data)
    tasks = {record["task"] for _, records in train for record in records}
    assert tasks == {record["task"] for _, records in validation for record in records} == set(plugins)
    assert [source.name for source, _ in train] == [source.name for source, _ in validation]
    assert all(len(records) <= 2000 for _, records in train)
    tokenizer = build_tokenizer(
        text for _, records in train for record in records for text in (record["prompt"], warmup_target(record))
    )
    for _, records in [*train, *validation]:
        prompts = tokenizer([record["prompt"] for record in records], add_special_tokens=False)["input_ids"]
        targets = tokenizer([warmup_target(record) for record in records], add_special_tokens=False)["input_ids"]
        assert max(map(len, prompts)) < 48
        assert max(map(len, targets)) < 16  # with the token that ends it, 16
