"""`prorl data prepare` on published data sets: counts are the source's, and right answers of theirs score 1."""

from pathlib import Path

import pytest

from nemo_prorl.data.prepare.gold import Truths
from nemo_prorl.data.prepare.sources import ALL, source_of
from tests.conftest import ROOT
from tests.data.preparing import manifest, prepare, records
from tests.lines import write_lines

SHARED = ROOT.parent / "shared" / "data"

# Source, file, rows, and how many of them are left out for which reason: faults of the files themselves.
SETS: list[tuple[str, str, int, dict[str, int]]] = [
    ("deepscaler", "math/deepscaler_sub_1209", 1209, {"broken answer": 1, "duplicate": 2, "no answer": 1}),
    ("math", "math/aime24", 30, {}),
    ("math", "math/aime25", 30, {}),
    ("math", "math/aime_1983_2023", 975, {}),
    ("math", "math/amc23", 40, {}),
    ("math", "math/amc_2022_2023", 83, {}),
    ("math", "math/comp_math_24_25", 256, {}),
    ("math", "math/college_math", 2818, {"duplicate": 37}),
    ("math", "math/gaokao2023en", 385, {"no answer": 2}),
    ("math", "math/gsm8k_test", 1319, {}),
    ("math", "math/hmmt_feb_2025", 30, {}),
    ("math", "math/math500", 500, {}),
    ("math", "math/math_test_5000", 5000, {}),
    ("math", "math/math_train", 7474, {"duplicate": 1, "no answer": 4}),
    ("math", "math/minerva_math", 272, {}),
    ("math", "math/olympiadbench_oe_to_en", 675, {}),
    ("math", "nemo_gym_examples/math_with_judge_example", 5, {}),
    ("stem", "stem/theoremqa_text", 747, {}),
    ("stem", "stem/scibench", 580, {}),
    ("choice", "stem/mmlu_stem_1000", 1000, {"duplicate": 1}),
    ("choice", "stem/mmlu_pro_stem_1500", 1500, {}),
    ("ifeval", "ifeval/input_data", 541, {}),
    ("ifeval", "nemo_gym_examples/instruction_following_example", 5, {}),
    ("reasoning-gym", "reasoning_gym/samples", 420, {}),
    ("reasoning-gym", "nemo_gym_examples/reasoning_gym_example", 5, {}),
    ("code", "code/apps_coderl_samples", 5, {}),
    ("code", "code/codecontests_sandboxfusion_20", 20, {}),
    ("code", "code/codecontests_test_stdin", 159, {}),
    ("code", "code/codeforces_stdin", 408, {}),
    ("humaneval", "code/humaneval", 164, {}),
    ("humaneval", "code/humanevalplus_mini", 164, {}),
    ("mbpp", "code/mbpp", 974, {"duplicate": 1}),
    ("leetcode", "code/leetcode_400_functional", 400, {}),
]

# Files that no source is for, and why.
OTHERS = {
    "nemo_gym_examples/code_gen_example": "problem and answer format are one text",
    "nemo_gym_examples/mcqa_example": "problem and answer format are one text",
    "nemo_gym_examples/equivalence_rule_example": "no domain of the paper",
    "nemo_gym_examples/structeval_example": "no domain of the paper",
    "nemo_gym_examples/structured_outputs_example": "no domain of the paper",
}
# Those that take longest are counted in `test_all_right_answers_score_one` only.
LONG = ("code/humanevalplus_mini", "math/math_test_5000")
COUNTED = [one for one in SETS if one[1] not in LONG]


def test_every_file_is_prepared_by_some_source_or_it_is_said_why_not() -> None:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is absent: no published records to prepare here")
    files = {str(path.relative_to(SHARED).with_suffix("")) for path in SHARED.rglob("*.jsonl")}
    told = {name for _, name, _, _ in SETS} | set(OTHERS)
    assert sorted(name for name in files - told if not name.endswith("_rollouts")) == []  # those are responses


def published(name: str) -> Path:
    path = SHARED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent: no published records to prepare here")
    return path


@pytest.mark.parametrize(("source", "name", "rows", "left_out"), COUNTED, ids=[name for _, name, _, _ in COUNTED])
def test_counts_are_the_sources(tmp_path: Path, source: str, name: str, rows: int, left_out: dict[str, int]) -> None:
    file = published(name)
    assert prepare(source, "--from", file, "--out", tmp_path / "out", "--check", 0) == 0
    counts = manifest(tmp_path / "out")["counts"]
    assert (counts["read"], counts["dropped"]) == (rows, left_out)
    made = records(tmp_path / "out", "validation" if source_of(source).holdout == ALL else "train")  # checks each
    assert len(made) == counts["kept"] == rows - sum(left_out.values())
    truths = Truths(source_of(source).task)
    assert [one["id"] for one in made if truths.fault(one["truth"])] == []


def test_right_answers_of_the_files_score_one(tmp_path: Path) -> None:
    """A few of several sets at once; those of all rows are judged in the tests of the plugins, and in the slow one."""
    file = published("math/deepscaler_sub_1209")
    assert prepare("deepscaler", "--from", file, "--out", tmp_path / "out", "--check", 60) == 0
    assert manifest(tmp_path / "out")["checks"]["gold"] == {"checked": 60, "failed": 0, "without": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("source", "name", "rows", "left_out"), SETS, ids=[name for _, name, _, _ in SETS])
def test_all_right_answers_score_one(
    tmp_path: Path, source: str, name: str, rows: int, left_out: dict[str, int]
) -> None:
    check = "50" if source_of(source).task == "code" else "all"
    assert prepare(source, "--from", published(name), "--out", tmp_path / "out", "--check", check) == 0
    told = manifest(tmp_path / "out")
    assert told["checks"]["gold"]["failed"] == 0
    assert (told["counts"]["read"], told["counts"]["dropped"]) == (rows, left_out)


def test_the_training_set_of_math_holds_problems_of_its_test_set(tmp_path: Path) -> None:
    """Known of MATH; and a test set against itself is found as a whole."""
    train, test = published("math/math_train"), published("math/math500")
    assert prepare("math", "--from", train, "--out", tmp_path / "out", "--check", 0, "--against", test) == 0
    told = manifest(tmp_path / "out")
    found = told["counts"]["dropped"]["contaminated"]
    assert 20 < found < 700
    assert told["checks"]["contamination"]["against"][0]["dropped"] == found
    own = write_lines(tmp_path / "one.jsonl", [{"problem": "What is seven less two?", "answer": "5"}])
    assert prepare("math", "--from", test, "--out", tmp_path / "none", "--check", 0, "--against", own) == 0
    assert "contaminated" not in manifest(tmp_path / "none")["counts"]["dropped"]
