"""`prorl data prepare` on data made by hand: what rows become, what is left out and counted, what is written."""

import csv
import gzip
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from nemo_prorl import settings
from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.blend import Blend, load_sources
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.prepare import answers, output, puzzles, sources
from nemo_prorl.data.prepare.filters import Contamination
from nemo_prorl.data.prepare.gold import spread
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import json_lines
from tests.data.preparing import SUMS, dropped, made_anew, manifest, prepare, records, refused
from tests.lines import write_lines
from tests.test_formats import against

# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz", "csv", "parquet"])
def test_every_form_of_file_reads_the_same(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"sums.{form}"
    text = json_lines(SUMS)
    if form == "json":
        file.write_text(json.dumps(SUMS, indent=1))
    elif form == "jsonl.gz":
        file.write_bytes(gzip.compress(text.encode()))
    elif form == "csv":
        with file.open("w", newline="") as out:
            table = csv.DictWriter(out, list(SUMS[0]))
            table.writeheader()
            table.writerows(SUMS)
    elif form == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SUMS), file)
    else:
        file.write_text(text)
    assert prepare("deepscaler", "--from", file, "--out", tmp_path / "out", "--check", 0) == 0
    made = records(tmp_path / "out")
    assert [one["id"] for one in made] == [f"deepscaler-{n}" for n in range(8)]
    assert [one["meta"] for one in made] == [{"row": f"s{n}"} for n in range(8)]
    assert [one["truth"]["answer"] for one in made] == [str(2 * n) for n in range(8)]


def test_a_folder_is_read_as_one_source(tmp_path: Path) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    write_lines(tmp_path / "in" / "b" / "2.jsonl", SUMS[3:])
    write_lines(tmp_path / "in" / "1.jsonl", SUMS[:3])
    (tmp_path / "in" / "README.md").write_text("not data")
    assert prepare("math", "--from", tmp_path / "in", "--out", tmp_path / "out", "--check", 0) == 0
    told = manifest(tmp_path / "out")
    assert [(one["file"], one["rows"]) for one in told["inputs"]] == [("1.jsonl", 3), ("b/2.jsonl", 5)]
    assert len({one["id"] for one in records(tmp_path / "out")}) == 8


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"problem": "?", "answer": "1"}\n{"problem": "?"}\n',
            ":2: field 'answer' (or expected_answer, final_answer)",
        ),
        ('{"problem": 3, "answer": "1"}\n', ":1: field 'problem' is 3; it must be a string"),
        ('{"problem": "?", "answer": {"a": 1}}\n', ":1: field 'answer' is {\"a\": 1}; it must be a string or a number"),
        ('{"problem": "?", "answer": "1"}\n{"problem"\n', ":2: not JSON"),
        ("\n[1]\n", ":2: a row must be an object, not list"),
        ("", "no record is left"),
    ],
)
def test_a_bad_row_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, content: str, says: str
) -> None:
    file, out = tmp_path / "f.jsonl", tmp_path / "out"
    file.write_text(content)
    told = refused(capsys, caplog, 4, "math", "--from", file, "--out", out)
    assert f"{file}{says}" in told or says in told
    assert not out.exists()


def test_a_column_of_another_name_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file, out = write_lines(tmp_path / "f.jsonl", [{"ask": "1 + 1?", "solution": "2"}]), tmp_path / "out"
    told = refused(capsys, caplog, 4, "math", "--from", file, "--out", out)
    assert "--field answer=COLUMN" in told
    assert "the row has: ask, solution" in told
    words = ("--field", "problem=ask", "--field", "answer=solution", "--check", 0)
    assert prepare("math", "--from", file, "--out", out, *words) == 0
    assert records(out)[0]["truth"] == {"answer": "2"}
    told = refused(capsys, caplog, 4, "math", "--from", file, "--out", tmp_path / "b", "--field", "problem=question")
    assert "there is no column 'question'" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope", "--from", "f.jsonl"], "unknown data source 'nope'; known: deepscaler, eurus2-rl"),
        (["math"], "--from is missing"),
        (["math", "--from", "absent"], "--from absent: no such file or folder"),
        (["math", "--from", "hub"], "--from hub: math is not on the hub"),
        (["math", "--from", "f.txt"], "not a supported data file; expected one of .jsonl"),
        (["math", "--from", "f.jsonl", "--size", "x"], "expected a whole number of at least 0; got 'x'"),
        (["math", "--from", "f.jsonl", "--holdout", "9"], "--holdout 9: only 8 records are left"),
        (["math", "--from", "f.jsonl", "--holdout", "8"], "--holdout 8: only 8 records are left, and some must remain"),
        (["scp-116k", "--from", "f.jsonl", "--agreement", "none", "--keep", "x"], "--keep x: scp-116k cannot keep"),
        (["reasoning-gym", "--keep", "x"], "--keep x: reasoning-gym cannot keep columns: it is generated"),
        (
            ["math", "--from", "f.jsonl", "--tokenizer", "t"],
            "--tokenizer and --max-prompt-tokens must be used together",
        ),
        (["math", "--from", "f.jsonl", "--field", "x"], "--field x: must be NAME=COLUMN"),
        (["math", "--from", "f.jsonl", "--ngram", "0"], "--ngram 0: must be at least 1"),
        (["math", "--from", "f.jsonl", "--overlap", "2"], "--overlap 2: must be from 0"),
        (["math", "--from", "f.jsonl", "--against", "absent"], "--against absent: no such file or folder"),
        (["scp-116k", "--from", "f.jsonl"], "set --judge-url and --judge-model, or --agreement"),
        (
            ["scp-116k", "--from", "f.jsonl", "--judge-url", "x", "--judge-model", "m"],
            "--judge-url x: must be the base",
        ),
        (["reasoning-gym", "--from", "bad.yaml"], "key 'tasks' must be a map"),
        (["reasoning-gym", "--size", "3", "--holdout", "all"], "--holdout all: expected a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_refused_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "f.jsonl", SUMS)
    (tmp_path / "f.txt").touch()
    (tmp_path / "bad.yaml").write_text("chain_sum:")
    assert says in refused(capsys, caplog, 2, *words, "--out", "out", "--check", 0)
    assert not (tmp_path / "out").exists()


# --- what is left out ------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_counted_and_listed(tmp_path: Path) -> None:
    bad = [{"problem": "Empty?", "answer": ""}, {**SUMS[2], "problem": "  What is 2  plus 2? "}]
    file = write_lines(tmp_path / "f.jsonl", [*SUMS, *bad])
    words = ("--check", 0, "--size", 5, "--holdout", 2)
    assert prepare("math", "--from", file, "--out", tmp_path / "out", *words) == 0
    told = manifest(tmp_path / "out")
    assert told["counts"] == {
        **{"read": 10, "kept": 5, "train": 3, "validation": 2},
        "dropped": {"beyond --size": 3, "duplicate": 1, "no answer": 1},
    }
    why = dropped(tmp_path / "out")
    assert (why[9], why[10]) == ("no answer", "duplicate")
    assert sorted(why.values()).count("beyond --size") == 3
    numbers = [int(one["id"].removeprefix("math-")) for one in records(tmp_path / "out")]
    assert numbers == sorted(numbers)  # in the source's order


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    file, made = write_lines(tmp_path / "f.jsonl", SUMS), []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        words = ("--check", 0, "--size", 5, "--holdout", 2, "--seed", seed)
        assert prepare("math", "--from", file, "--out", out, *words) == 0
        made.append([(out / name).read_bytes() for name in ("train.jsonl", "validation.jsonl", "dropped.jsonl")])
    assert made[0] == made[1]
    assert made[0][0] != made[2][0]


def test_a_folder_that_is_prepared_already_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The same options have nothing to do, other options are refused; changed data are prepared again."""
    file, out = write_lines(tmp_path / "f.jsonl", SUMS), tmp_path / "out"
    words = ("math", "--from", file, "--out", out, "--check", 0, "--holdout", 2)

    def there() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}

    assert prepare(*words) == 0
    before, first = there(), capsys.readouterr().out
    assert prepare(*words, "--workers", 2) == 0
    assert capsys.readouterr().out == f"{out}: prepared already by this command, from the same data\n{first}"
    assert there() == before
    told = refused(capsys, caplog, 2, *words[:-1], 3, "--task", "own", "--keep", "id")
    assert f"--out {out}: contains data that was made with other options: " in told
    for text in (
        "--holdout 2, now 3",
        "--task not given, now own",
        "--keep not given, now id",
        f"remove {out}/manifest",
    ):
        assert text in told
    other = write_lines(tmp_path / "g.jsonl", SUMS[:5])
    told = refused(capsys, caplog, 2, "math", "--from", other, *words[3:])
    assert f"--from {file}, now {other}. Nothing was changed. Fix: another --out" in told
    told = refused(capsys, caplog, 2, *words, "--against", other)
    assert f"--against not given, now {other}" in told
    assert there() == before
    write_lines(file, SUMS[:7])
    assert prepare(*words) == 0
    assert manifest(out)["counts"]["kept"] == 7
    (out / "manifest.json").unlink()
    assert prepare(*words[:-1], 3) == 0
    assert manifest(out)["counts"]["validation"] == 3


def test_a_truth_that_the_plugin_refuses_is_dropped(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"prompt": "Sing.", "instruction_id_list": ["music:in_tune"], "kwargs": [{}]},
    ]
    file = write_lines(tmp_path / "f.jsonl", rows)
    assert prepare("ifeval", "--from", file, "--out", tmp_path / "out") == 0
    assert dropped(tmp_path / "out") == {2: "refused by the plugin"}
    assert "music:in_tune" in (tmp_path / "out" / "dropped.jsonl").read_text()


def test_golds_are_judged_by_the_real_service(tmp_path: Path) -> None:
    """A row whose own answer no grader accepts goes; a check of some only finds those."""
    wrong = [{"problem": "Find x.", "answer": "5 <think>"}]  # a thought that is never closed
    file = write_lines(tmp_path / "f.jsonl", [*SUMS, *wrong])
    assert prepare("math", "--from", file, "--out", tmp_path / "out", "--check", "all") == 0
    told = manifest(tmp_path / "out")
    assert told["checks"]["gold"] == {"checked": 9, "failed": 1, "without": 0}
    assert dropped(tmp_path / "out") == {9: "gold answer not accepted"}
    assert [spread(10, 3), spread(3, 10), spread(5, 0), spread(2, None)] == [[0, 3, 6], [0, 1, 2], [], [0, 1]]


STORY = "Anna has seven red apples and gives three of them to her brother Ben on a rainy day in May"


def test_parts_of_evaluation_sets_are_found_by_their_words(tmp_path: Path) -> None:
    held = write_lines(
        tmp_path / "held.jsonl",
        [
            {"question": f"{STORY}. How many has she?"},
            {"prompt": [{"role": "user", "content": f"1+1?\n\n{answers.BOXED}"}]},
        ],
    )
    rows = [
        {"problem": f"Listen: {STORY.upper()}! How many are left?", "answer": "4"},
        {"problem": "Anna has seven red apples and gives three of them to a friend. How many?", "answer": "4"},
        {"problem": "1+1?", "answer": "2"},
        {"problem": "1-1?", "answer": "0"},
    ]
    file = write_lines(tmp_path / "f.jsonl", rows)
    out = tmp_path / "out"
    assert prepare("math", "--from", file, "--out", out, "--against", held, "--check", 0) == 0
    assert dropped(out) == {1: "contaminated", 3: "contaminated"}
    assert re.search(rf"{held}:1: [89]\d% in common: ", (out / "dropped.jsonl").read_text())
    told = manifest(out)["checks"]["contamination"]
    assert told["against"][0]["dropped"] == 2
    assert told["against"][0]["sha256"] == hashlib.sha256(held.read_bytes()).hexdigest()
    for words, found in ((("--ngram", 8), {1, 2, 3}), (("--ngram", 8, "--overlap", 1), {3})):
        out = tmp_path / "-".join(map(str, words))
        assert prepare("math", "--from", file, "--out", out, "--against", held, "--check", 0, *words) == 0
        assert set(dropped(out)) == found
    assert manifest(out)["checks"]["contamination"]["ngram_only"] == 2


def test_the_wording_of_a_whole_evaluation_set_is_no_contamination(tmp_path: Path) -> None:
    """What many of its problems say is its form; what one says is a problem."""
    form = "Please solve this task in one self contained piece of code and say nothing else at all"
    held = write_lines(tmp_path / "held.jsonl", [{"problem": f"{form}. Number {n} is the {n} th."} for n in range(6)])
    sets = Contamination(8, 0.0)
    sets.add(held)
    assert sets.find(f"{form}, and then add two numbers") is None
    assert sets.template > 0
    found = sets.find("so nothing else at all number 3 is the 3 th")
    assert found is not None
    assert found.where == f"{held}:4"


def test_long_prompts_are_dropped_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_tokenizer([one["problem"] for one in SUMS]).save_pretrained(folder)
    rows = [*SUMS, {"problem": "What is 1 plus " + "1 plus " * 60 + "1?", "answer": "62"}]
    file, out = write_lines(tmp_path / "f.jsonl", rows), tmp_path / "out"
    words = ("--tokenizer", folder, "--max-prompt-tokens", 100, "--check", 0)
    assert prepare("math", "--from", file, "--out", out, *words) == 0
    assert dropped(out) == {9: "too long"}
    told = manifest(out)["checks"]["length"]
    assert 10 < told["longest_kept"] <= 100
    assert told["tokenizer_sha256"] == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


# --- what is written -------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_was_done(tmp_path: Path) -> None:
    file, out = write_lines(tmp_path / "f.jsonl", SUMS), tmp_path / "out"
    assert prepare("math", "--from", file, "--out", out, "--licence", "CC0", "--holdout", "all", "--check", 0) == 0
    told = manifest(out)
    assert against("data-manifest", told) == []
    assert against("data-manifest", {**told, "counts": {}})
    assert (told["licence"], told["source"], told["task"]) == ("CC0", "math", "math")
    assert told["inputs"] == [{"file": "f.jsonl", "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "rows": 8}]
    [written] = told["outputs"]
    assert written == {
        "file": "validation.jsonl",
        "records": 8,
        "sha256": hashlib.sha256((out / "validation.jsonl").read_bytes()).hexdigest(),
    }
    assert not (out / "train.jsonl").exists()
    assert {source.licence for source in sources.SOURCES.values()} >= {
        "MIT (data card); problems belong to their contests"
    }


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file, out = write_lines(tmp_path / "f.jsonl", SUMS), tmp_path / "out"
    assert prepare("math", "--from", file, "--out", out, "--check", 0) == 0
    told = refused(capsys, caplog, 2, "stem", "--from", file, "--out", out, "--check", 0)
    assert "contains data of 'math'.  Fix: use another folder for 'stem'" in told
    (out / "thesis.tex").touch()
    assert "contains other files (thesis.tex)" in refused(capsys, caplog, 2, "math", "--from", file, "--out", out)
    assert "is a file" in refused(capsys, caplog, 2, "math", "--from", file, "--out", file)


@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.starts
def test_a_kill_while_writing_leaves_no_half_file(tmp_path: Path, at: int) -> None:
    """Killed before the n-th rename: every file under its final name is whole, and without a manifest."""
    file, out = write_lines(tmp_path / "f.jsonl", SUMS), tmp_path / "out"
    words = ["math", "--from", str(file), "--out", str(out), "--holdout", "3", "--check", "0"]
    assert prepare(*words) == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    made_anew(out)
    killer = f"""
import os, signal, sys
from nemo_prorl import cli
real, left = os.replace, [{at}]
def replace(*names):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*names)
os.replace = replace
cli.main(["data", "prepare", *sys.argv[1:]])
"""
    told = subprocess.run([sys.executable, "-c", killer, *words], capture_output=True, timeout=120, check=False)
    assert told.returncode == -9
    left = {path.name: path.read_bytes() for path in out.iterdir() if not path.name.endswith(".tmp")}
    assert output.MANIFEST not in left
    assert {name for name in left if name != "dropped.jsonl"} == set(["train.jsonl", "validation.jsonl"][: at - 1])
    assert all(left[name] == whole[name] for name in left)
    assert prepare(*words) == 0
    again = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name: data for name, data in again.items() if name != output.MANIFEST} == {
        name: data for name, data in whole.items() if name != output.MANIFEST
    }


def test_what_has_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is flushed before it gets its name, so a machine that loses power leaves no empty file."""
    done: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, os.replace

    def flush(fd: int) -> None:
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def name(temporary: Path, path: Path) -> None:
        done.append(("named", temporary))
        replace(temporary, path)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", name)
    written = output.write_records(tmp_path, {"train": []}, [], "jsonl")
    output.write_manifest(tmp_path, {"format": 1, "outputs": written})  # type: ignore[typeddict-item]
    files = [file for what, file in done if what == "named"]
    assert done == [(what, file) for file in files for what in ("flushed", "named")]
    assert [file.name.split(".")[0] for file in files] == ["train", "dropped", "manifest"]


# --- puzzles that are made -------------------------------------------------------------------------------------------


# NVlabs/ToolOrchestra, training/verl/nvidia/scripts/deepseek_evaluation.sh: --datasets of TASK_TYPE "reasoning".
AUTHORS_TASKS = """
ab advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation binary_matrix
bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio color_cube_rotation
complex_arithmetic count_bits countdown count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum
dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life gcd graph_color
group_anagrams gsm_symbolic intermediate_integration isomorphic_strings jugs knights_knaves knight_swap largest_island
lcm leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
needle_haystack n_queens number_filtering number_format number_sequence number_sorting palindrome
palindrome_partitioning polynomial_equations polynomial_multiplication pool_matrix power_function prime_factorization
products propositional_logic quantum_lock ransom_note rearc rectangle_count rotate_matrix rotten_oranges rubiks_cube
rush_hour self_reference sentence_reordering shortest_path simple_equations simple_geometry simple_integration sokoban
spell_backward spiral_matrix string_insertion string_manipulation string_splitting string_synthesis sudoku syllogism
time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""
RENAMED = {"palindrome": "palindrome_generation"}  # today's name of the task


def test_the_default_puzzles_are_the_authors_96_tasks_in_the_papers_numbers() -> None:
    from reasoning_gym.factory import DATASETS

    tasks = puzzles.read_tasks(puzzles.TASKS_FILE)
    assert set(tasks) == {RENAMED.get(name, name) for name in AUTHORS_TASKS.split()}
    assert len(tasks) == len(AUTHORS_TASKS.split()) == 96
    ours = puzzles.read_tasks(puzzles.tasks_file("ours") or Path())
    assert len(ours) == 96
    assert set(tasks) | set(ours) <= set(DATASETS)
    assert not (set(tasks) | set(ours)) & {"composite", "acre", "boxnet", "game_of_life_halting"}
    assert puzzles.tasks_file("mine.yaml") == Path("mine.yaml")
    assert puzzles.tasks_file("entries.jsonl") is None
    gym = sources.source_of("reasoning-gym")
    assert gym.size is not None
    assert sum(puzzles.shares(gym.size, 96)) == 37_000
    assert set(puzzles.shares(gym.size, 96)) == {385, 386}
    assert set(puzzles.shares(gym.holdout, 96)) == {100}


@pytest.mark.slow
def test_puzzles_are_fixed_by_the_seed_and_held_out_ones_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nothing else: some of these go through sets of strings, draw from the process's own random numbers, or look
    at the clock."""
    names = ("chain_sum", "gcd", "gsm_symbolic", "isomorphic_strings", "list_functions", "time_intervals")
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(
        "tasks:\n" + "".join(f"  {name}: {{max_value: 30}}\n" if name == "gcd" else f"  {name}:\n" for name in names)
    )
    made = []
    for workers in (1, 2):
        monkeypatch.setenv("PYTHONHASHSEED", str(workers))
        words = ("--from", tasks, "--size", 33, "--holdout", 12, "--check", 0, "--workers", workers)
        assert prepare("reasoning-gym", *words, "--out", tmp_path / f"out{workers}") == 0
        made.append([written["sha256"] for written in manifest(tmp_path / f"out{workers}")["outputs"]])
    assert made[0] == made[1]
    assert os.environ["PYTHONHASHSEED"] == "2"
    assert puzzles._of_task("chain_sum", {}, 3, 0, 0) == puzzles._of_task("chain_sum", {}, 3, 0, 0)
    assert puzzles._of_task("chain_sum", {}, 3, 0, 0) != puzzles._of_task("chain_sum", {}, 3, 0, 1)
    train, held = records(tmp_path / "out1"), records(tmp_path / "out1", "validation")
    assert Counter(one["truth"]["dataset"] for one in train) == dict(zip(names, [6, 6, 6, 5, 5, 5], strict=True))
    assert Counter(one["truth"]["dataset"] for one in held) == dict.fromkeys(names, 2)
    assert not {str(one["prompt"]) for one in train} & {str(one["prompt"]) for one in held}
    times = [one["truth"]["entry"]["metadata"] for one in train if one["truth"]["dataset"] == "time_intervals"]
    assert any(time["task_type"].startswith("time") for time in times)
    assert str(date.today()) not in json.dumps(times)
    assert manifest(tmp_path / "out1")["from"].startswith("reasoning_gym 0.")


@pytest.mark.slow
def test_a_task_with_too_few_puzzles_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data source 'gcd': .* gave only .* widen the options"):
        puzzles.make({"gcd": {"min_value": 2, "max_value": 4, "max_numbers": 2}}, 100, 0, 0)
    with pytest.raises(ConfigError, match="unknown reasoning-gym dataset 'chain_sums'; close names: chain_sum"):
        puzzles.make({"chain_sums": {}}, 1, 0, 0)


@pytest.mark.slow
def test_ours_selects_the_other_list(tmp_path: Path) -> None:
    given = ("--size", 96, "--holdout", 0, "--check", 0, "--out", tmp_path / "ours")
    assert prepare("reasoning-gym", "--from", "ours", *given) == 0
    made = {one["truth"]["dataset"] for one in records(tmp_path / "ours")}
    assert "kakurasu" in made
    assert "countdown" not in made


# --- into a run ------------------------------------------------------------------------------------------------------


def test_a_prepared_folder_is_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The override that the command prints, through the real loader, to the records of a blend."""
    file, out = write_lines(tmp_path / "f.jsonl", SUMS), tmp_path / "out"
    assert prepare("math", "--from", file, "--out", out, "--holdout", 3, "--check", 0) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "data." in line]
    printed = [word for line in lines for word in shlex.split(line.split("; ")[1])]
    assert [text.split("=")[0] for text in printed] == ["data.train", "data.validation"]
    cfg = settings.load(printed)
    train, held = load_sources(cfg.data)
    assert ([len(found) for _, found in train], [len(found) for _, found in held]) == ([5], [3])
    assert train[0][1] == records(out)


def test_a_prepared_blend_gives_each_record_once_an_epoch_however_often_it_is_stopped(tmp_path: Path) -> None:
    for name, rows in (("a", SUMS), ("b", [{"problem": f"{n} less 1?", "answer": str(n - 1)} for n in range(13)])):
        words = ("--name", name, "--check", 0, "--format", "parquet" if name == "b" else "jsonl")
        file = write_lines(tmp_path / f"{name}.jsonl", rows)
        assert prepare("math", "--from", file, "--out", tmp_path / name, *words) == 0
    data = DataConfig(
        train=[
            DataSource(name="a", path=str(tmp_path / "a" / "train.jsonl"), weight=2.0),
            DataSource(name="b", path=str(tmp_path / "b" / "train.parquet")),
        ]
    )
    drawn: list[tuple[str, int]] = []
    rng, state = random.Random(3), None
    while len(drawn) < 200:
        blend = Blend(load_sources(data)[0], seed=5)  # as a process that starts again
        if state is not None:
            blend.load_state_dict(json.loads(state))
        for _ in range(rng.randint(0, 30)):
            record, visit = blend.next()
            drawn.append((record["id"], visit))
        state = json.dumps(blend.state_dict())
        for _ in range(rng.randint(0, 9)):
            blend.next()  # and was killed after its checkpoint
    whole = Blend(load_sources(data)[0], seed=5)
    assert drawn == [(record["id"], visit) for record, visit in (whole.next() for _ in range(len(drawn)))]
    for name, size in (("a", 8), ("b", 13)):
        mine = [(one, visit) for one, visit in drawn if one.startswith(name)]
        assert [visit for _, visit in mine] == [at // size for at in range(len(mine))]
        for start in range(0, len(mine) - size + 1, size):
            assert {one for one, _ in mine[start : start + size]} == {f"{name}-{n}" for n in range(size)}
        assert mine != sorted(mine)
