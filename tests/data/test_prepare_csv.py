"""CSV files of users: separators, rows of a wrong form, answers that no response can have."""

import json
import shlex
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.data.laptop.generators import warmup_target
from nemo_prorl.data.prepare.answers import (
    has_decimal_comma,
    has_fraction_before_letter,
    has_letter_for_unit,
    has_remark,
    is_worded,
)
from tests.data.preparing import made_anew, records
from tests.lines import read_lines

pytestmark = pytest.mark.starts


def prepare(folder: Path, text: str, *words: str) -> int:
    (folder / "mine.csv").write_text(text, encoding="utf-8")
    command = ["data", "prepare", "math", "--from", str(folder / "mine.csv"), "--out", str(made_anew(folder / "out"))]
    return cli.main([*command, "--check", "0", *words])


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_is_that_of_the_first_line(separator: str, tmp_path: Path) -> None:
    rows = [["Aufgabe", "answer"], ["2+2, or not?" if separator != "," else "2+2?", "4"]]
    text = "".join(separator.join(row) + "\n" for row in rows)
    assert prepare(tmp_path, "\ufeff" + text, "--field", "problem=Aufgabe") == 0
    assert [record["truth"] for record in records(tmp_path / "out")] == [{"answer": "4"}]


@pytest.mark.parametrize(("row", "values"), [("4+4?,8,9", 3), ("4+4?", 1)])
def test_a_row_with_too_many_or_too_few_values_is_named_by_its_line(
    row: str, values: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare(tmp_path, f'problem,answer\n"two\nlines?",4\n{row}\n') == 4
    assert f"mine.csv:4: the row has {values} values for 2 columns" in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [(), ("--task", "own", "--keep", "topic"), ("--target", "topic")])
def test_two_columns_of_one_name_are_refused(
    words: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Columns without a name, which spreadsheets leave at the end of the lines, may be several."""
    assert prepare(tmp_path, "problem,answer,topic,topic\n4+4?,8,a,b\n", *words) == 4
    assert f"{tmp_path}/mine.csv:1: 2 columns have the name 'topic'.  Fix: give each column its own name" in caplog.text
    assert not (tmp_path / "out").exists()
    assert prepare(tmp_path, "problem,answer,topic,,\n4+4?,8,a,,\n", *words) == 0


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [("a.jsonl", '{"problem": "1?", "answer": "1", "answer": "2"}\n', "a.jsonl:1"),
     ("a.json", '[{"problem": "1?", "answer": "1", "answer": "2"}]', "a.json")],
)  # fmt: skip
def test_a_key_that_is_there_twice_is_refused(
    name: str, text: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    assert cli.main(["data", "prepare", "math", "--from", str(tmp_path / name), "--out", str(out)]) == 4
    assert f"{where}: not JSON: the key 'answer' is there 2 times" in caplog.text


def test_a_wrong_column_name_is_the_user_s(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prepare(tmp_path, "q,answer\n2+2?,4\n", "--field", "problem=Aufgabe") == 4
    assert "--field problem=Aufgabe: there is no column 'Aufgabe'; the row has: q, answer" in caplog.text


@pytest.mark.parametrize(
    ("source", "fields"),
    [("math", ["problem", "answer"]), ("choice", ["question", "options", "answer"]), ("code", ["problem", "tests"])],
)
def test_all_missing_columns_are_named(
    source: str, fields: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.csv").write_text("Frage;Antwort\n1+1?;2\n")
    assert cli.main(["data", "prepare", source, "--from", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]) == 4
    assert all(f"'{field}'" in caplog.text and f"--field {field}=COLUMN" in caplog.text for field in fields)
    assert "the row has: Frage, Antwort" in caplog.text


WORDS = "problem,answer\n2+2?,4\n3+3?,n/a\n1+1?,two apples\nWhere?,\\text{east}\n"


def test_answers_that_no_response_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, WORDS) == 0
    assert "1 of the answers are ordinary words, such as 'two apples'" in caplog.text
    assert "mine.csv:4" in caplog.text
    dropped = read_lines(tmp_path / "out" / "dropped.jsonl")
    assert [(row["line"], row["reason"]) for row in dropped] == [(3, "no answer")]
    [printed] = [line for line in capsys.readouterr().out.splitlines() if "data.train" in line]
    [override] = shlex.split(printed.split("records; ")[1])
    assert settings.load([override]).data.train[0].name == "math"


def test_records_of_an_own_task_are_not_checked_by_the_plugin_of_the_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare(tmp_path, "problem,answer\nWhere?,two steps east\n", "--task", "places", "--check", "all") == 0
    (record,) = records(tmp_path / "out")
    assert (record["id"], record["task"], record["truth"]) == ("places-0", "places", {"answer": "two steps east"})
    assert record["prompt"] == [{"role": "user", "content": "Where?"}]  # lacks "put the final answer in \\boxed{}"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["task"] == "places"
    assert "ordinary words" not in caplog.text


def test_a_column_of_right_responses_is_what_a_warm_up_teaches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = "problem,answer,said\nWhere?,east,I go east\nWhen?,now,\n"
    assert prepare(tmp_path, table, "--task", "places", "--target", "said") == 0
    found = records(tmp_path / "out")
    assert warmup_target(found[0]) == "I go east"
    assert "target" not in found[1]["meta"]  # the cell is empty
    assert prepare(tmp_path, table, "--task", "places", "--target", "sayd") != 0
    assert "--target sayd: there is no column 'sayd'; the row has: problem, answer, said" in caplog.text


def test_kept_columns_are_where_a_reward_function_finds_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = "problem,answer,topic,hard\nWhere?,4,maps,1\n"
    keep = ("--keep", "topic", "--keep", "hard")
    assert prepare(tmp_path, table, "--task", "places", *keep) == 0
    (record,) = records(tmp_path / "out")
    assert record["truth"] == {"answer": "4", "topic": "maps", "hard": "1"}
    assert prepare(tmp_path, table, *keep) == 0  # the plugin of math knows the fields of its truths
    (record,) = records(tmp_path / "out")
    assert record["truth"] == {"answer": "4"}
    assert (record["meta"]["topic"], record["meta"]["hard"]) == ("maps", "1")
    assert prepare(tmp_path, table, "--keep", "topik") == 4
    assert "--keep topik: there is no column 'topik'; the row has: problem, answer, topic, hard" in caplog.text
    assert prepare(tmp_path, table, "--task", "places", "--keep", "answer") == 2
    assert "--keep answer: the records have a field of this name" in caplog.text


def test_answers_in_words_are_left_out_if_so_asked(tmp_path: Path) -> None:
    assert prepare(tmp_path, WORDS, "--drop-worded") == 0
    assert [record["truth"]["answer"] for record in records(tmp_path / "out")] == ["4", "\\text{east}"]


@pytest.mark.parametrize(
    "answer",
    ["two apples", "four or so, it depends", "blue", "four", "Red", "TWO APPLES", "yes, it is closed", "zwei Äpfel"],
)
def test_an_answer_in_ordinary_words_is_found(answer: str) -> None:
    assert is_worded({"answer": answer})
    assert is_worded({"answer": [answer, "azure"]})
    assert not is_worded({"answer": [answer, "4"]})


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "4",
            "x = 2",
            r"\frac{1}{2}",
            "(a, b)",
            "3 m",
            "5 eggs",
            "June 20",
            r"\text{east}",
            "A",
            "A or C",
            "AB and CD",
        ),
        *("even", "Yes.", "True", "infinity", "meters", "pi", "theta", "sin x"),
        *("xy", "abc", "VW", "km", "αβ", "iii", "NaCl", "¾ cup"),
    ],
)
def test_an_answer_of_another_form_is_not_taken_for_words(answer: str) -> None:
    assert not is_worded({"answer": answer})


def test_a_letter_that_may_be_a_unit_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "problem,answer,u\n1+2?,3,m\nFar?,3 m,\nLong?,5 kg,\n"
    assert prepare(tmp_path, text) == 0
    assert "1 of the answers are a number and a letter, such as '3 m'" in caplog.text
    assert "mine.csv:3" in caplog.text
    assert "--field unit=COLUMN" in caplog.text


@pytest.mark.parametrize("answer", ["3 m", "3m", "$3.5 s$", "1,200 m^2", "-3\\,K", "10 m²", "27 m2", ["3 m", "3 s"]])
def test_a_number_with_the_letter_of_a_unit_is_found(answer: str | list[str]) -> None:
    assert has_letter_for_unit({"answer": answer})
    assert not has_letter_for_unit({"answer": answer, "unit": "m"})


@pytest.mark.parametrize("answer", ["3", "3x", "3 cm", "3 \\text{ m}", "m", "3 m/s", "5 n", ["3 m", "3"]])
def test_other_letters_are_not_taken_for_units(answer: str | list[str]) -> None:
    assert not has_letter_for_unit({"answer": answer})


def test_a_decimal_comma_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prepare(tmp_path, "problem;answer\nhalf of 7?;3,5\n7*500?;3,500\n") == 0
    assert "1 of the answers may have a decimal comma or points between thousands, such as '3,5'" in caplog.text
    assert "mine.csv:2" in caplog.text
    assert "write 3.5" in caplog.text


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        *[(answer, True) for answer in ("0,25", "$-3,5$", "3,5000", "18,00 €", "€18,50", "12,5 km", "37,5 %")],
        *[(answer, True) for answer in ("1.234,56 €", "(0; 1,5)", "1.250.000", "37,5\\%")],
        *[(answer, False) for answer in ("3,500", "1, 2", "$1,500", "1,250,000", "3,500 m", "(1,2)", "[0,1)", "1.500")],
        *[(answer, False) for answer in ("\\{1,2\\}", "1,2,3", "x=1,y=2", "\\$1,250.50", "(1,2);(3,4)", ";" * 20_000)],
    ],
)
def test_a_comma_between_thousands_or_before_a_space_is_no_decimal_comma(answer: str, found: bool) -> None:
    assert has_decimal_comma({"answer": answer}) == found


def test_five_answers_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = "".join(f"{n}+1?,ca. {n}\n" for n in range(7))
    assert prepare(tmp_path, f"problem,answer\n{rows}") == 0
    assert "7 of the answers carry a remark" in caplog.text
    assert all(f"mine.csv:{line})" in caplog.text for line in range(2, 7))
    assert "mine.csv:7)" not in caplog.text


@pytest.mark.parametrize(
    "answer",
    ["ca. 60", "~5", "56?", "12 (rounded)", "12 (twelve)", "2.5 (or 5/2)", "Answer: 5", "about $5", "The answer is 5"],
)
def test_a_remark_beside_an_answer_is_found(answer: str) -> None:
    assert has_remark({"answer": answer})


@pytest.mark.parametrize(
    "answer", ["5", "f(x)", "2(a+b)", "2(ab)", "5 (x y)", "2(pi)", "(C)", "5 (x+1)", "\\text{about}", "A", "12!"]
)
def test_a_formula_is_not_taken_for_a_remark(answer: str) -> None:
    assert not has_remark({"answer": answer})


def test_another_encoding_is_named_with_its_fix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.csv").write_bytes("problem,answer\nGröße?,5\n".encode("latin-1"))
    command = ["data", "prepare", "math", "--from", str(tmp_path / "mine.csv"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 4
    assert "mine.csv: not UTF-8" in caplog.text
    assert "Fix: save or convert the file as UTF-8" in caplog.text


@pytest.mark.parametrize(
    ("answer", "found"),
    [("y=-2/5x+1", True), ("5/9(F-32)", True), ("(1/2)x", False), ("1/2 x", False), ("3/4", False), ("1/x", False)],
)
def test_a_fraction_right_before_a_letter_is_found(answer: str, found: bool) -> None:
    assert has_fraction_before_letter({"answer": answer}) == found
