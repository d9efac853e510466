"""What becomes of the benchmarks' rows in their published forms, with odd ones, up to the verdict of the plugin."""

from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.data.prepare import answers, contests
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row
from nemo_prorl.data.prepare.sources import SOURCES
from nemo_prorl.errors import DataError
from tests.data import published
from tests.data.preparing import dropped, manifest, prepare, records


def row(**values: Any) -> Row:
    return Row("f.jsonl", 7, values)


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({"answer": "073"}, "73"),
        ({"answer": "000"}, "0"),
        ({"answer": 204}, "204"),
        ({"answer": None, "solution": "So $x = 3$, and $\\boxed{025}$."}, "25"),
        ({"solution": "\\boxed{1} is not it, but \\boxed{\\frac{1}{2}} is."}, "\\frac{1}{2}"),
        ({"answer": "0.50"}, "0.50"),
    ],
)
def test_answers_of_the_aime(values: dict[str, Any], answer: str) -> None:
    made = contests.aime(row(problem="How many?", **values))
    assert isinstance(made, Draft)
    assert (made.truth, made.gold) == ({"answer": answer}, f"\\boxed{{{answer}}}")


@pytest.mark.parametrize("values", [{"answer": None}, {"answer": None, "solution": "It is 3."}, {"answer": " "}, {}])
def test_an_aime_problem_without_an_answer_is_dropped(values: dict[str, Any]) -> None:
    assert contests.aime(row(problem="How many?", **values)) == Drop("no answer", "the source gives none")


@pytest.mark.parametrize(
    ("values", "truth"),
    [
        ({"final_answer": ["$2$"]}, {"answer": "$2$"}),
        ({"final_answer": ["$2$"], "is_multiple_answer": False, "unit": None, "error": None}, {"answer": "$2$"}),
        ({"final_answer": ["$\\frac{1}{2}$", "$0.5$"]}, {"answer": ["$\\frac{1}{2}$", "$0.5$"]}),
        ({"final_answer": ["$69$,$84$"], "is_multiple_answer": True}, {"answer": "69,84"}),
        ({"final_answer": ["$1$", "$-1$"], "is_multiple_answer": True}, {"answer": "1, -1"}),
        ({"final_answer": ["$90$"], "unit": "^{\\circ}"}, {"answer": "$90$", "unit": "^{\\circ}"}),
        ({"final_answer": ["$4.0$"], "error": "1e-1"}, {"answer": "$4.0$", "tolerance": 0.025}),
        ({"final_answer": ["$2$"], "answer_type": "list"}, {"answer": "$2$"}),
    ],
)
def test_answers_of_olympiadbench(values: dict[str, Any], truth: dict[str, Any]) -> None:
    made = contests.olympiad(row(question="Find all.", **values))
    assert isinstance(made, Draft)
    assert (made.truth, made.question) == (truth, "Find all.")


def test_context_comes_before_the_question_and_an_image_drops_it() -> None:
    made = contests.olympiad(row(question="Find $x$.", context="Let $x = 2$. ", final_answer=["$2$"], image_1=None))
    assert isinstance(made, Draft)
    assert made.question == "Let $x = 2$.\n\nFind $x$."
    made = contests.olympiad(row(question="Find $x$.", final_answer=["$2$"], image_2={"bytes": ""}, image_1="png"))
    assert made == Drop("needs an image", "the model reads text only")
    assert contests.olympiad(row(question="?", final_answer=None)) == Drop("no answer", "the source gives none")
    with pytest.raises(DataError, match="f.jsonl:7: field 'final_answer' is 3; it must be a list of texts"):
        contests.olympiad(row(question="?", final_answer=3))
    with pytest.raises(DataError, match="field 'final_answer' is missing"):
        contests.olympiad(row(question="?"))


def test_gpqa_without_options() -> None:
    made = answers.gpqa_open(row(record_id="rec1", question=" Which? ", correct_answer="10^-4 eV\n", metadata={}))
    assert isinstance(made, Draft)
    assert (made.truth, made.task, made.row_id) == ({"answer": "10^-4 eV"}, "stem", "rec1")
    assert isinstance(answers.gpqa_open(row(question="Which?", correct_answer=None)), Drop)


# Records of each stand-in, and what is dropped from it, by line.
KEPT: dict[str, tuple[int, dict[int, str]]] = {
    "aime24": (12, {}),
    "aime25": (12, {}),
    "amc": (12, {}),
    "math500": (12, {}),
    "minerva": (12, {}),
    "olympiadbench": (11, {7: "no answer", 8: "needs an image"}),
    "gpqa": (12, {}),
    "ifeval": (12, {}),
    "deepscaler": (12, {4: "duplicate", 5: "no answer"}),
    "nemotron-if": (11, {3: "several messages"}),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.starts
def test_files_in_the_published_form_are_read_and_right_answers_accepted(tmp_path: Path, name: str) -> None:
    """A benchmark needs no option: all its records are for validation.  Other files of the folder are left alone."""
    folder, out, source = published.MAKERS[name](tmp_path), tmp_path / "out", SOURCES[name]
    (folder / "other.jsonl").write_text('{"unlike": "any"}\n')
    assert prepare(name, "--from", folder, "--out", out, "--check", "all") == 0
    made, (kept, why) = manifest(out), KEPT[name]
    assert (made["counts"]["kept"], dropped(out)) == (kept, why)
    assert made["checks"]["gold"]["failed"] == 0
    part = "validation" if source.holdout else "train"
    assert [one["file"] for one in made["outputs"]] == [f"{part}.jsonl"]
    assert {one["task"] for one in records(out, part)} == {source.task}
    if source.task in ("math", "stem"):
        assert made["checks"]["gold"]["checked"] == kept
    if name == "amc":
        assert [one["truth"]["answer"] for one in records(out, part)][5] == "-3"
    if name == "aime25":  # unicode of the source survives
        assert "Łódź" in (out / f"{part}.jsonl").read_text()
