"""Makes stand-ins of the published data sets of the paper: the files' own names and columns, with invented problems.

Each function writes one source into FOLDER/SOURCE, as `prorl data prepare paper --from FOLDER` expects it, and returns
that folder.  The sources of programs are in published_code.py.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.data import published_code as code
from tests.data.published_stem import scp_116k

Rows = list[dict[str, Any]]

# Longer than 13 words and different in each, so that overlaps with the training sets can be told apart.
_STORY = (
    "A gardener in {town} plants {rows} rows of {trees} trees each along the river, and in the following spring {lost}"
    " of the trees have died. How many trees are left?"
)
_TOWNS = ("Aarhus", "Bergen", "Cádiz", "Delft", "Évora", "Faro", "Ghent", "Huelva", "Izmir", "Jena", "Kyōto", "Łódź")


def _story(number: int, town: str = "") -> tuple[str, int]:
    """Return a problem and its answer; each number gives another problem."""
    rows, trees, lost = 11 + number, 17 + 2 * number, 3 + number
    text = _STORY.format(town=town or _TOWNS[number % len(_TOWNS)], rows=rows, trees=trees, lost=lost)
    return text, rows * trees - lost


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _parquet(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def aime24(folder: Path) -> Path:
    """12 rows of HuggingFaceH4/aime_2024: answers with three digits; the first problem is in `deepscaler`, too."""
    rows = []
    for number in range(12):
        text, answer = _story(number)
        boxed = f"It is $\\boxed{{{answer:03d}}}$."
        rows.append(
            {
                "id": 60 + number,
                "problem": text,
                "solution": boxed,
                "answer": f"{answer:03d}",
                "url": "u",
                "year": "2024",
            }
        )
    _parquet(folder / "aime24" / "data" / "train-00000-of-00001.parquet", rows)
    return folder / "aime24"


def aime25(folder: Path) -> Path:
    """12 rows of math-ai/aime25: one without `answer`, whose solution boxes it, as math-ai/aime24 has it."""
    rows: Rows = []
    for number in range(12):
        text, answer = _story(20 + number)
        rows.append({"problem": text, "answer": str(answer), "id": str(number)})
    rows[3] = {"problem": rows[3]["problem"], "solution": f"\\boxed{{{rows[3]['answer']}}}", "id": "3"}
    _lines(folder / "aime25" / "test.jsonl", rows)
    return folder / "aime25"


def amc(folder: Path) -> Path:
    """12 rows of AI-MO/aimo-validation-amc: floating-point answers; ids that begin again in the second year."""
    rows = []
    for number in range(12):
        text, answer = _story(40 + number)
        year = 2022 + number // 6
        rows.append({"id": number % 6, "problem": text, "answer": float(answer), "url": f"wiki/{year}_AMC_12A"})
    rows[5] |= {"problem": "What is the least $x$ with $x^2 = 9$?", "answer": -3.0}
    _parquet(folder / "amc" / "data" / "train-00000-of-00001.parquet", rows)
    return folder / "amc"


def math500(folder: Path) -> Path:
    """12 rows of HuggingFaceH4/MATH-500: answers in LaTeX, in words, with a degree sign."""
    forms = (
        "\\left( 3, \\frac{\\pi}{2} \\right)",
        "\\frac{14}{3}",
        "\\text{Evelyn}",
        "90^\\circ",
        "p - q",
        "2\\sqrt{113}",
    )
    rows = []
    for number in range(12):
        text, answer = _story(60 + number)
        known = forms[number] if number < len(forms) else str(answer)
        rows.append(
            {
                **{"problem": text, "solution": f"So \\boxed{{{known}}}.", "answer": known, "subject": "Algebra"},
                **{"level": 1 + number % 5, "unique_id": f"test/algebra/{number}.json"},
            }
        )
    _lines(folder / "math500" / "test.jsonl", rows)
    return folder / "math500"


def minerva(folder: Path) -> Path:
    """12 rows of math-ai/minervamath: small and large numbers, a formula, an equation."""
    forms = ("1.6", "4.5e33", "2.88e16", "\\frac{1}{2} m v^{2}", "x(t)=\\sin(t)", "1e-11", "0.02")
    rows = []
    for number in range(12):
        text, answer = _story(80 + number)
        rows.append({"question": text, "answer": forms[number] if number < len(forms) else str(answer)})
    _lines(folder / "minerva" / "test.jsonl", rows)
    return folder / "minerva"


def olympiadbench(folder: Path) -> Path:
    """13 rows of Hothan/OlympiadBench: lists, several answers, a unit, an error, a context, an image, a null answer."""
    odd: Rows = [
        {"final_answer": ["$(1,8,19), (2,7,13), (4,5,7)$"], "is_multiple_answer": True, "answer_type": "Tuple"},
        {"final_answer": ["$69$,$84$"], "is_multiple_answer": True},
        {"final_answer": ["$90$"], "unit": "^{\\circ}"},
        {"final_answer": ["$4.0$"], "error": "1e-1"},
        {"final_answer": ["$\\frac{1}{2}$", "$0.5$"]},
        {"final_answer": ["$7$"], "context": "Let $x$ be the number of trees in the whole garden."},
        {"final_answer": None},
        {"final_answer": ["$3$"], "image_1": "a picture"},
    ]
    rows = []
    for number in range(13):
        text, answer = _story(100 + number)
        row = {
            **{
                "id": 1600 + number,
                "question": text,
                "solution": ["…"],
                "final_answer": [f"${answer}$"],
                "context": None,
            },
            **{"image_1": None, "modality": "Text-only", "difficulty": "Competition", "is_multiple_answer": False},
            **{"unit": None, "answer_type": "Numerical", "error": None, "question_type": "Open-ended"},
            **{"subfield": "Algebra", "subject": "Math", "language": "English"},
        }
        rows.append(row | (odd[number] if number < len(odd) else {}))
    name = "OE_TO_maths_en_COMP"
    _parquet(folder / "olympiadbench" / "OlympiadBench" / name / f"{name}.parquet", rows)
    return folder / "olympiadbench"


def gpqa(folder: Path) -> Path:
    """12 rows of Idavidrein/gpqa's diamond set, and its main set beside it: line breaks, quotes and commas in cells."""
    fields = ("Question", "Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)), "Explanation")
    for name, first, count in (("gpqa_diamond", 0, 12), ("gpqa_main", 0, 14)):
        path = folder / "gpqa" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([*fields, "High-level domain", "Record ID"])
            for number in range(first, first + count):
                text, answer = _story(120 + number)
                options = [f"{answer} trees\n", f"{answer + 1} trees, or fewer", f'"{answer + 2}"', "10^-4 eV"]
                table.writerow([f"{text}\n", *options, "Because.", "Physics", f"rec{number:03d}"])
    return folder / "gpqa"


def ifeval(folder: Path) -> Path:
    """12 rows of google/IFEval: arguments with null for those of other instructions."""
    rows = []
    for number in range(12):
        kwargs = [{"num_words": 40 + number, "relation": "at least", "num_sentences": None}, {}]
        names = ["length_constraints:number_words", "punctuation:no_comma"]
        text = f"{_instruction(number)} Write at least {40 + number} words, and no commas."
        rows.append({"key": 1000 + number, "prompt": text, "instruction_id_list": names, "kwargs": kwargs})
    _lines(folder / "ifeval" / "ifeval_input_data.jsonl", rows)
    return folder / "ifeval"


def _instruction(number: int) -> str:
    town = _TOWNS[number % len(_TOWNS)]
    return f"Describe house number {number} in {town} as a proud owner would describe it to a friend from abroad."


def deepscaler(folder: Path) -> Path:
    """14 rows of DeepScaleR: a problem of `aime24`, one of `amc` in other words, a duplicate, a null answer."""
    rows: Rows = []
    for number in range(14):
        text, answer = _story(140 + number)
        rows.append({"problem": text, "answer": str(answer), "solution": ""})
    rows[1] = {"problem": _story(0)[0], "answer": str(_story(0)[1]), "solution": ""}
    rows[2] = {"problem": f"Solve this: {_story(41)[0]} Explain.", "answer": str(_story(41)[1]), "solution": ""}
    rows[3] = rows[0] | {"problem": f" {rows[0]['problem']}\n"}
    rows[4] |= {"answer": None}
    path = folder / "deepscaler" / "deepscaler.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    return folder / "deepscaler"


def nemotron_if(folder: Path) -> Path:
    """12 rows of Llama-Nemotron's instructions: one of `ifeval`, and a conversation of several messages."""
    rows = []
    for number in range(12):
        kwargs = [{"num_words": 30 + number, "relation": "at least", "capital_frequency": None}]
        args = {"instruction_id_list": ["length_constraints:number_words"], "instruction_kwargs": kwargs}
        text = (
            f"Tell the tale of tree number {number} and of the {number + 2} birds that slept in it when it was young."
        )
        messages = [{"role": "user", "content": f"{text} Use at least {30 + number} words."}]
        rows.append(
            {
                **{"input": messages, "output": "", "args": args, "category": "instruction_following"},
                **{"license": "cc-by-4.0", "reasoning": "off", "used_in_training": "yes", "version": "v1"},
            }
        )
    rows[1]["input"] = [{"role": "user", "content": f"{_instruction(1)} Use at least 31 words."}]
    rows[2]["input"] = [*rows[2]["input"], {"role": "assistant", "content": "No."}, {"role": "user", "content": "Do."}]
    _lines(folder / "nemotron-if" / "RL" / "instruction_following" / "instruction_following.jsonl", rows)
    return folder / "nemotron-if"


# The sources of `prorl data prepare paper` that are not generated.
MAKERS: dict[str, Callable[[Path], Path]] = {
    "aime24": aime24,
    "aime25": aime25,
    "amc": amc,
    "math500": math500,
    "minerva": minerva,
    "olympiadbench": olympiadbench,
    "gpqa": gpqa,
    "ifeval": ifeval,
    "eurus2-rl-validation": code.eurus_validation,
    "humanevalplus": code.humanevalplus,
    "livecodebench": code.livecodebench,
    "deepscaler": deepscaler,
    "eurus2-rl": code.eurus_train,
    "scp-116k": scp_116k,
    "nemotron-if": nemotron_if,
}


def make_all(folder: Path) -> None:
    """Write all sources of the paper into `folder`."""
    for make in MAKERS.values():
        make(folder)
