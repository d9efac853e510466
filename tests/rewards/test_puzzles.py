"""The puzzles plugin: every data set's own answer scores 1 after a round trip through JSON."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prorl_reward_puzzles.plugin import EVALUATED, PARSED, PuzzlesReward, is_formula, last_answer, own_answer

from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest, judge
from nemo_prorl.rewards.judging import RewardService, pool_specs
from tests.rewards.puzzle_answers import right_answer

pytestmark = pytest.mark.starts

# Their entries hold no solution, neither as `answer` nor in the metadata: the library's choice.
WITHOUT_ANSWER = {"boxnet", "rush_hour"}


@pytest.fixture(scope="module")
def puzzles() -> PuzzlesReward:
    plugin = PuzzlesReward()
    plugin.prepare()
    return plugin


def entries(dataset: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Generated entries, as JSON gives them back."""
    import reasoning_gym

    options: dict[str, Any] = {}
    if dataset == "composite":
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(name, 1.0, {}) for name in ("chain_sum", "rearc")]
    made = reasoning_gym.create_dataset(dataset, size=count, seed=seed, **options)
    return [json.loads(json.dumps(made[index])) for index in range(count)]


def verdict(
    plugin: PuzzlesReward, dataset: str, entry: Any, response: str, prompt: Any = "Answer in <answer></answer>."
) -> dict[str, Any]:
    truth = {"dataset": dataset, "entry": entry}
    return dict(judge(plugin, RewardRequest("x", "puzzles", prompt, truth, response)))


def own_scores(plugin: PuzzlesReward, dataset: str, count: int, seed: int) -> list[Any]:
    scores = []
    for entry in entries(dataset, count, seed):
        source = entry["metadata"]["source_dataset"] if dataset == "composite" else dataset
        response = f"<think>hm</think>So: <answer>{right_answer(source, entry)}</answer>"
        found = verdict(plugin, dataset, entry, response)
        scores.append((found["score"], found["correct"], found["failure"]))
    return scores


def all_datasets() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def check_own_answers(plugin: PuzzlesReward, count: int, seed: int) -> None:
    names = all_datasets()
    assert len(names) == 106
    scores = {name: own_scores(plugin, name, count, seed) for name in names if name not in WITHOUT_ANSWER}
    wrong = {name: found for name, found in scores.items() if set(found) != {(1.0, True, None)}}
    assert wrong == {}


def test_the_own_answer_of_every_data_set_scores_one(puzzles: PuzzlesReward) -> None:
    check_own_answers(puzzles, count=1, seed=3)


@pytest.mark.slow
def test_many_own_answers_of_every_data_set_score_one(puzzles: PuzzlesReward) -> None:
    check_own_answers(puzzles, count=8, seed=20)


@pytest.mark.parametrize(
    "dataset",
    [
        "countdown",
        "rubiks_cube",
        pytest.param("rush_hour", marks=pytest.mark.slow),
        "simple_integration",
        pytest.param("intermediate_integration", marks=pytest.mark.slow),
        "polynomial_multiplication",
    ],
)
def test_forty_right_answers_of_the_authors_other_tasks_are_accepted(puzzles: PuzzlesReward, dataset: str) -> None:
    for entry in entries(dataset, 40, 7):
        answer = right_answer(dataset, entry)
        found = verdict(puzzles, dataset, entry, f"<think>hm</think>So: <answer>{answer}</answer>")
        assert (found["score"], found["correct"], found["failure"]) == (1.0, True, None), (entry["question"], answer)


def scorer_sources() -> dict[str, str]:
    """The source of each data set's scorer."""
    import inspect

    from reasoning_gym.factory import DATASETS

    return {name: inspect.getsource(DATASETS[name][0].score_answer) for name in DATASETS}


def test_every_scorer_that_runs_the_answer_as_python_is_guarded() -> None:
    sources = scorer_sources()
    assert {name for name, text in sources.items() if "eval(answer" in text} == set(EVALUATED)
    assert {name for name, text in sources.items() if "parse_expr(answer" in text} == set(PARSED)
    assert not {name for name, text in sources.items() if "exec(" in text or "__import__" in text}


@pytest.mark.parametrize("dataset", [*EVALUATED, *PARSED])
@pytest.mark.parametrize(
    "attack",
    [
        "[open({0!r}, 'w').close()]",
        "__import__('os').system('touch {0}')",
        "eval(''.join(map(chr, {1})))",
        "(1).__class__.__base__.__subclasses__()[0] or open({0!r}, 'w')",
        "exit()",
    ],
)
def test_an_answer_is_never_run_as_python(puzzles: PuzzlesReward, dataset: str, attack: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (entry,) = entries(dataset, 1, 3)
    answer = attack.replace("{0!r}", repr(str(trace))).replace("{0}", str(trace))
    answer = answer.replace("{1}", str([ord(letter) for letter in f"open({str(trace)!r}, 'w')"]))
    found = verdict(puzzles, dataset, entry, f"<answer>{answer}</answer>")
    assert found["score"] is not None
    assert found["score"] <= 0.05
    assert not trace.exists()


def test_an_integral_is_not_its_own_solution(puzzles: PuzzlesReward) -> None:
    for dataset in ("simple_integration", "intermediate_integration"):
        (entry,) = entries(dataset, 1, 3)
        itself = f"Integral({entry['metadata']['integrand']}, {entry['metadata']['variable']}) + C"
        assert verdict(puzzles, dataset, entry, f"<answer>{itself}</answer>")["score"] == 0.0


def test_lists_still_count_as_the_scorers_count_them(puzzles: PuzzlesReward) -> None:
    (entry,) = entries("spiral_matrix", 1, 3)
    as_list = str([int(number) for number in entry["answer"].split()])
    assert verdict(puzzles, "spiral_matrix", entry, f"<answer>{as_list}</answer>")["score"] == 0.1


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("(99 - 3)*4.5e1/x**2 + sqrt(2)*log(x) + C", True),
        ("-x1*sinh(2*x) % 3", True),
        ("eval(x)", False),
        ("x.real", False),
        ("1.real", False),
        ("x_1", False),
        ("[1]", False),
        ("'x'", False),
        ("9" * 100_000 + "_", False),  # in no time
    ],
)
def test_formulas(text: str, allowed: bool) -> None:
    assert is_formula(text) is allowed


@pytest.mark.slow
def test_an_answer_over_the_budget_ends_and_the_next_is_judged() -> None:
    asyncio.run(over_the_budget())


async def over_the_budget() -> None:
    registry = discover()
    service = RewardService(pool_specs(registry, ["puzzles"], 1, {"puzzles": {"time_budget_s": 1.0}}), registry)
    await service.start()
    try:
        for dataset, endless in (("countdown", "9**9**9**9"), ("rush_hour", "A+" + "9" * 12)):
            (entry,) = entries(dataset, 1, 3)
            truth = {"dataset": dataset, "entry": entry}
            request = RewardRequest("x", "puzzles", "<answer>", truth, f"<answer>{endless}</answer>")
            found = await service.judge(request)
            assert (found["score"], found["failure"]) == (0.0, "timeout"), dataset
            good = replace(request, response=f"<answer>{right_answer(dataset, entry)}</answer>")
            assert (await service.judge(good))["score"] == 1.0
    finally:
        await service.close()


def test_the_two_data_sets_without_an_answer_really_have_none() -> None:
    for name in sorted(WITHOUT_ANSWER):
        (entry,) = entries(name, 1, 3)
        assert own_answer(name, entry) is None


def test_wrong_partial_and_malformed_answers(puzzles: PuzzlesReward) -> None:
    (entry,) = entries("chain_sum", 1, 5)
    right = entry["answer"]
    assert verdict(puzzles, "chain_sum", entry, f"<answer>{right}</answer>")["score"] == 1.0
    wrong = verdict(puzzles, "chain_sum", entry, f"<answer>{int(right) + 1}</answer>")
    assert (wrong["score"], wrong["correct"], wrong["failure"]) == (0.0, False, None)
    partial = verdict(puzzles, "chain_sum", entry, f"<answer>{right} or so</answer>")
    assert 0.0 < partial["score"] < 1.0
    assert partial["correct"] is False
    for response in (right, "<answer>", "<think><answer>" + right + "</answer>", ""):
        assert verdict(puzzles, "chain_sum", entry, response)["score"] == 0.0
    (entry,) = entries("prime_factorization", 1, 5)  # its scorer raises where it reads no number
    raised = verdict(puzzles, "prime_factorization", entry, "<answer>two times three</answer>")
    assert (raised["score"], raised["correct"], raised["failure"]) == (0.0, False, "invalid")
    assert "ValueError" in raised["detail"]


@pytest.mark.parametrize("said", ["2 + 3 =", [{"role": "user", "content": "2 + 3 ="}]], ids=["text", "messages"])
def test_tags_are_needed_where_the_prompt_asks_for_them(puzzles: PuzzlesReward, said: Any) -> None:
    entry = {"question": "2 + 3 =", "answer": "5", "metadata": {}}
    for response, score in (("<think>hm</think>\n5\n", 1.0), ("<answer>5</answer>", 1.0), ("", 0.0)):
        assert verdict(puzzles, "chain_sum", entry, response, said)["score"] == score
    asks = [{"role": "system", "content": "Put it into <answer>."}]
    assert verdict(puzzles, "chain_sum", entry, "5", asks)["score"] == 0.0


def test_an_entry_that_cannot_be_scored_is_no_fault_of_the_answer(puzzles: PuzzlesReward) -> None:
    (entry,) = entries("tower_of_hanoi", 1, 5)
    del entry["metadata"]["num_disks"]
    found = verdict(puzzles, "tower_of_hanoi", entry, "<answer>Move disk 1 from Peg 1 to Peg 3</answer>")
    assert (found["score"], found["failure"]) == (None, "infrastructure")
    assert "the entry of 'tower_of_hanoi' cannot be scored: KeyError: 'num_disks'" in found["detail"]


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ({}, r"truth\.dataset"),
        ({"dataset": "chain_sum"}, r"truth\.entry"),
        ({"dataset": "chain_sum", "entry": {"question": "", "answer": ""}}, r"truth\.entry"),
        ({"dataset": "chain_sum", "entry": {"question": "", "answer": "", "metadata": []}}, r"truth\.entry\.metadata"),
    ],
)
def test_a_wrong_truth_names_its_field(puzzles: PuzzlesReward, truth: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        puzzles.validate_truth(truth)


def test_an_unknown_data_set_lists_the_known(puzzles: PuzzlesReward) -> None:
    entry = {"question": "", "answer": "1", "metadata": {}}
    found = verdict(puzzles, "chain_sums", entry, "<answer>1</answer>")
    assert found["failure"] == "infrastructure"
    assert "'chain_sums'; reasoning-gym knows ab, acre" in found["detail"]


def test_the_last_answer_counts() -> None:
    assert last_answer("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert last_answer("<answer>1</answer><answer>2") == "1"
    assert last_answer("<answer><answer>3</answer>") == "3"
    assert last_answer("</answer>3<answer>") is None
    assert last_answer("<answer>" * 50_000) is None
