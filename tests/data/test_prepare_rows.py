"""What `prorl data prepare` makes of a row of each source, and which rows it leaves out."""

import contextlib
import json
from typing import Any

import pytest

from nemo_prorl.data.prepare import answers, instructions, programs, puzzles
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.oracle import Oracles
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.errors import DataError
from tests.data.preparing import TEST


def row(**values: Any) -> Row:
    return Row("f.jsonl", 7, values)


def draft(made: Draft | Drop) -> Draft:
    assert isinstance(made, Draft), made
    return made


@pytest.mark.parametrize(
    ("values", "truth", "gold"),
    [
        ({"answer": " 7 "}, {"answer": "7"}, "\\boxed{7}"),
        ({"answer": 142.0}, {"answer": "142"}, "\\boxed{142}"),
        ({"answer": 0.25}, {"answer": "0.25"}, "\\boxed{0.25}"),
        ({"answer": True}, {"answer": "True"}, "\\boxed{True}"),
        ({"answer": ["3"]}, {"answer": "3"}, "\\boxed{3}"),
        ({"answer": ["3", "three"]}, {"answer": ["3", "three"]}, "\\boxed{3}"),
        ({"answer": [4, 2], "answer_type": "list of integer"}, {"answer": "[4, 2]"}, "\\boxed{[4, 2]}"),
        ({"answer": "4", "unit": " m ", "error": None}, {"answer": "4", "unit": "m"}, "\\boxed{4}"),
        ({"answer": "$4.0$", "error": "1e-1"}, {"answer": "$4.0$", "tolerance": 0.025}, "\\boxed{$4.0$}"),
    ],
)
def test_final_answers(values: dict[str, Any], truth: dict[str, Any], gold: str) -> None:
    made = draft(answers.final_answer("math")(row(problem=" How many? ", **values)))
    assert (made.truth, made.gold) == (truth, gold)
    assert made.prompt_text == f"How many?\n\n{answers.BOXED}"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"answer": None}, "no answer"),
        ({"answer": "  "}, "no answer"),
        ({"answer": []}, "no answer"),
        ({"answer": "\\frac{1}{2"}, "broken answer"),
        ({"answer": "}{"}, "broken answer"),
        ({"answer": "1", "problem": " "}, "no problem"),
    ],
)
def test_answers_that_nobody_can_be_right_with_are_dropped(values: dict[str, Any], reason: str) -> None:
    made = answers.final_answer("math")(row(**{"problem": "?", **values}))
    assert isinstance(made, Drop)
    assert made.reason == reason


def test_braces_that_are_set_do_not_count_as_open() -> None:
    assert draft(answers.final_answer("math")(row(problem="?", answer="\\{1, 2\\}"))).gold == "\\boxed{\\{1, 2\\}}"


def test_choices_are_listed_under_letters() -> None:
    made = draft(answers.choice(row(question="Which?", options=["iron", "gold"], answer=1)))
    assert made.prompt_text == f"Which?\n\nA. iron\nB. gold\n\n{answers.CHOICE}"
    assert made.truth == {"answer": "B", "options": ["iron", "gold"]}
    of_gym = draft(answers.choice(row(question="Which?", options=[{"A": "iron"}, {"B": "gold"}], expected_answer="A")))
    assert of_gym.truth["options"] == ["iron", "gold"]
    for options in ({"A": "iron", "B": "gold"}, {"text": ["iron", "gold"], "label": ["A", "B"]}):
        assert draft(answers.choice(row(question="Which?", choices=options, answer="B"))).truth == made.truth
    wrong: list[Any] = ["iron|gold", {"B": "iron", "A": "gold"}, {"text": "iron", "label": "gold"}]
    for options in wrong:
        with pytest.raises(DataError, match="it must be a list of 2 to"):
            answers.choice(row(question="Which?", options=options, answer="B"))
    with pytest.raises(DataError, match=r'f.jsonl:7: field .answer. is "C"; it must be one letter of A to B'):
        answers.choice(row(question="Which?", options=["iron", "gold"], answer="C"))


def test_gpqa_shuffles_by_its_question_only() -> None:
    texts = {"Correct Answer": "right", **{f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}}
    places = set()
    for n in range(20):
        made = draft(answers.gpqa(row(Question=f"Question {n}?", **texts)))
        assert made == answers.gpqa(row(Question=f"Question {n}?", **texts))
        assert made.truth["options"]["ABCD".index(made.truth["answer"])] == "right"
        places.add(made.truth["answer"])
    assert places == set("ABCD")


def test_scp_takes_what_r1_boxed_and_short_solutions_too() -> None:
    pair = {
        "problem": "How fast?",
        "solution": "Energy is kept, so v = 3 m/s.\nAs was to be shown.",
        "domain": "physics",
    }
    thought = "<think>\\boxed{2}</think>By energy: \\boxed{3\\,\\text{m/s}}"
    made = draft(answers.scp(row(**pair, r1_response=thought)))
    assert made.truth == {"answer": "3\\,\\text{m/s}"}
    assert (made.reference, made.candidate) == (pair["solution"], "By energy: \\boxed{3\\,\\text{m/s}}")
    assert made.meta == {"domain": "physics"}
    short = draft(answers.scp(row(**{**pair, "solution": "3.0 m/s"}, r1_response=thought)))
    assert short.truth == {"answer": ["3.0 m/s", "3\\,\\text{m/s}"]}
    boxed = draft(answers.scp(row(**{**pair, "solution": "So it is\n\\boxed{\\{3\\}}."}, r1_response=thought)))
    assert boxed.truth["answer"][0] == "\\{3\\}"
    for values, reason in (
        ({**pair, "solution": ""}, "no solution"),
        ({**pair, "solution": None}, "no solution"),
        ({**pair, "problem": " "}, "no problem"),
    ):
        assert getattr(answers.scp(row(**values, r1_response=thought)), "reason", "") == reason
    assert getattr(answers.scp(row(**pair, r1_response="<think>3 m/s</think> ")), "reason", "") == "no answer"
    for unboxed in ("3 m/s", "\\boxed{n/a}", "\\boxed{}"):  # for the judge to read
        assert draft(answers.scp(row(**pair, r1_response=unboxed))).truth == {}


EURUS_END = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


def eurus(truth: Any, **more: Any) -> Draft | Drop:
    said = [{"role": "system", "content": "Act."}, {"role": "user", "content": f"Add two numbers.{EURUS_END}"}]
    values = {"ability": "code", "data_source": "taco", "prompt": said, "reward_model": {"ground_truth": truth}, **more}
    return programs.eurus(row(**values))


def test_eurus_keeps_the_problem_and_asks_in_one_form() -> None:
    made = draft(eurus(json.dumps(TEST)))
    assert made.prompt_text == f"Add two numbers.\n\n{programs.PROGRAM}"
    assert made.truth == {"tests": [{"input": "1 2\n", "output": "3\n"}]}
    assert made.meta == {"origin": "taco"}
    called = draft(eurus({"fn_name": "add", "inputs": [[1, 2], [[1], 2]], "outputs": [[3], [[3]]]}))
    assert called.truth["tests"] == [{"args": [1, 2], "expected": 3}, {"args": [[1], 2], "expected": [3]}]
    lists = draft(eurus({"fn_name": "add", "inputs": [[1], [2]], "outputs": [[3], [3, 4]]}))  # results that are lists
    assert [test["expected"] for test in lists.truth["tests"]] == [[3], [3, 4]]
    assert "define `add`" in called.prompt_text


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "broken tests"),
        ({"inputs": [1], "outputs": ["1"]}, "broken tests"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "broken tests"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "broken tests"),
    ],
)
def test_tests_that_cannot_be_run_are_dropped(truth: dict[str, Any], reason: str) -> None:
    assert getattr(eurus(truth), "reason", "") == reason


def test_eurus_mathematics_is_left_out_and_nonsense_is_named() -> None:
    assert getattr(eurus("5", ability="math"), "reason", "") == "no code"
    with pytest.raises(DataError, match=r"f.jsonl:7: field 'reward_model.ground_truth' is \"x\"; it must be JSON"):
        eurus("x")
    with pytest.raises(DataError, match=r"f.jsonl:7: field 'prompt' is \"x\"; it must be a list of messages"):
        eurus(TEST, prompt="x")


def test_functions_with_asserts() -> None:
    made = draft(
        programs.humaneval(
            row(
                task_id="H/0",
                prompt="def one():\n",
                entry_point="one",
                canonical_solution="    return 1\n",
                test="def check(f):\n    assert f() == 1\n",
            )
        )
    )
    assert made.truth["asserts"][0].endswith("\ncheck(one)")
    assert made.gold == "```python\ndef one():\n    return 1\n\n```"
    made = draft(
        programs.mbpp(row(text="Say one.", code="def one(): return 1", test_list=["assert one() == 1"], task_id=3))
    )
    assert made.truth == {"asserts": ["assert one() == 1"]}
    assert made.row_id == "3"
    assert "assert one() == 1" in made.prompt_text


PLUS = {"prompt": "def root(n):\n", "entry_point": "root", "canonical_solution": "    return n**0.5, n\n", "atol": 0}


def test_calls_whose_results_the_sources_own_solution_gives() -> None:
    """As HumanEval+ has them: the results come out of the sandbox; a call that ends badly or says too much goes."""
    made = draft(programs.humaneval(row(**PLUS, base_input=[[4]], plus_input=[["x"], [9]])))
    calls = [{"args": [4]}, {"args": ["x"]}, {"args": [9]}]
    assert made.truth == {"fn_name": "root", "tests": calls, "time_limit_s": 60.0}
    oracles = Oracles(unsafe_no_sandbox=False)
    try:
        told = draft(oracles.with_expected(made))
        tests = [{"args": [4], "expected": [2.0, 4]}, {"args": [9], "expected": [3.0, 9]}]
        assert told.truth == {**made.truth, "tests": tests}
        assert oracles.counts == {"tests": 3, "left_out": 1}
        long = {**PLUS, "canonical_solution": "    return 'x' * 200_000 * n\n"}
        made = draft(programs.humaneval(row(**long, base_input=[[0]], plus_input=[[1]])))
        assert draft(oracles.with_expected(made)).truth["tests"] == [{"args": [0], "expected": ""}]
        broken = draft(programs.humaneval(row(**PLUS | {"canonical_solution": "("}, base_input=[], plus_input=[[1]])))
        assert isinstance(oracles.with_expected(broken), Drop)
    finally:
        oracles.close()


def test_a_zero_of_a_polynomial_may_be_any() -> None:
    values = {**PLUS, "entry_point": "find_zero", "atol": 0.01}
    made = draft(programs.humaneval(row(**values, base_input=[[[-4, 0, 1]]], plus_input=[])))
    [statement] = made.truth["asserts"]
    for result, right in ((2.0, True), (-2.0, True), (-2.001, True), (1.9, False)):
        with contextlib.nullcontext() if right else pytest.raises(AssertionError):
            exec(statement, {"find_zero": lambda xs, result=result: result})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, r"f.jsonl:7: field 'test' \(or plus_input\) is missing"),
        ({"plus_input": [[1]]}, "field 'base_input' is missing"),
        ({"base_input": [1], "plus_input": []}, r"field 'base_input' is \[1\]; it must be a list with a list of arg"),
    ],
)
def test_a_function_without_tests_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        programs.humaneval(row(**PLUS, **values))


def test_instructions_of_both_forms() -> None:
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    kwargs = [{"relation": None}, {"relation": "at least", "num_words": 3}]
    truth = {"instruction_id_list": names, "kwargs": [{}, {"relation": "at least", "num_words": 3}]}
    made = draft(instructions.ifeval(row(key=1, prompt="Write.", instruction_id_list=names, kwargs=kwargs)))
    assert (made.truth, made.prompt_text, made.gold) == (truth, "Write.", None)
    said = [{"role": "user", "content": "Write."}]
    args = {"instruction_id_list": names, "instruction_kwargs": kwargs}
    for given in (args, json.dumps(args)):
        assert draft(instructions.ifeval(row(input=said, args=given))).truth == truth


def test_instructions_of_a_talk_are_left_out() -> None:
    said = [{"role": "user", "content": "Write."}] * 2
    made = instructions.ifeval(row(input=said, args={"instruction_id_list": ["a:b"], "instruction_kwargs": [{}]}))
    assert getattr(made, "reason", "") == "several messages"
    with pytest.raises(DataError, match="field 'prompt' is 3; it must be a string, or a list of one message"):
        instructions.ifeval(row(prompt=3))


def test_puzzles_of_a_file() -> None:
    made = draft(puzzles.entry(row(question="2 + 3 =", answer="5", metadata={"source_dataset": "chain_sum"})))
    assert made.truth["dataset"] == "chain_sum"
    assert made.gold == "<answer>5</answer>"
    packed = draft(
        puzzles.entry(row(question="?", answer=None, dataset="graph_color", metadata='{"possible_answer": {"0": 1}}'))
    )
    assert packed.gold == '<answer>{"0": 1}</answer>'
    with pytest.raises(DataError, match="field 'dataset' is null; it must be the name"):
        puzzles.entry(row(question="?", answer="5", metadata={}))
