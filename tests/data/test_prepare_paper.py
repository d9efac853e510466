"""`prorl data prepare paper`: every folder that the stages and the evaluation of the paper read, from stand-ins."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import settings
from nemo_prorl.data.prepared import PAPER, faults
from nemo_prorl.evaluation.catalogue import check_files, choose, load_records
from tests.conftest import ROOT
from tests.data import published
from tests.data.preparing import manifest, prepare, records, refused
from tests.lines import write_lines

pytestmark = pytest.mark.starts

# 37,000 puzzles become 4, so that 92 of the 96 tasks generate nothing.
QUICK = ("--scale", 0.0001, "--check", 0, "--agreement", "none")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins in `from` and all prepared folders in `prepared`."""
    folder = tmp_path_factory.mktemp("paper")
    published.make_all(folder / "from")
    assert prepare("paper", "--from", folder / "from", "--out", folder / "prepared", *QUICK) == 0
    return folder


def table(text: str) -> dict[str, list[str]]:
    """Return the words of each folder's row."""
    lines = text.splitlines()[1:]
    return {line.split()[0]: line.split() for line in lines[: lines.index("") if "" in lines else None]}


def copied(made: Path, to: Path) -> Path:
    shutil.copytree(made, to, dirs_exist_ok=True)
    return to / "prepared"


def test_every_file_of_the_stages_and_of_the_evaluation_is_written(made: Path) -> None:
    """The stand-ins are in the published forms, so the real files give the same folders."""
    cfg = settings.load(
        ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", f"data.folder={made / 'prepared'}"]
    )
    assert faults(cfg) == []
    chosen = choose("paper")
    check_files(chosen, made / "prepared")
    for benchmark in chosen:
        if benchmark.prompts is not None:
            assert load_records(benchmark, made / "prepared"), benchmark.name
    assert {path.name for path in (made / "prepared").iterdir()} == set(PAPER)
    used = {Path(one.path).parent.name for one in (*cfg.data.train, *cfg.data.validation)}
    assert set(PAPER) == used | {one.prompts for one in chosen if one.prompts}  # nothing is made for nobody
    assert {command.split()[0] for command in PAPER.values()} - {"reasoning-gym"} == set(published.MAKERS)


def test_training_prompts_are_compared_with_all_published_benchmarks(made: Path) -> None:
    benchmarks = {
        name for name in PAPER if not (made / "prepared" / name / "train.jsonl").exists() and name != "graph_color"
    }
    found: dict[str, dict[str, int]] = {}
    for name in ("deepscaler", "eurus2-rl", "scp-116k", "instructions"):
        compared = manifest(made / "prepared" / name)["checks"]["contamination"]["against"]
        assert {one["file"] for one in compared} == {f"{other}/validation.jsonl" for other in benchmarks}
        found[name] = {one["file"].split("/")[0]: one["dropped"] for one in compared if one["dropped"]}
    assert found["deepscaler"] == {"aime24": 1, "amc": 1}
    assert found["instructions"] == {"ifeval": 1}
    assert set(found["eurus2-rl"]) <= {"apps", "codecontests", "codeforces", "taco"}
    for name in (*benchmarks, "graph_color", "reasoning-gym"):
        assert "contamination" not in manifest(made / "prepared" / name)["checks"]


def test_a_folder_can_be_made_by_the_command_in_its_manifest(made: Path, tmp_path: Path) -> None:
    for name in ("codeforces", "deepscaler"):
        out = made / "prepared" / name
        command = manifest(out)["command"]
        assert command[:3] == ["prorl", "data", "prepare"]
        words = [str(tmp_path / name) if word == str(out) else word for word in command[3:]]
        assert prepare(*words) == 0
        for part in ("train", "validation"):
            if (out / f"{part}.jsonl").exists():
                assert records(tmp_path / name, part) == records(out, part)


@pytest.mark.slow
def test_finished_folders_are_kept_and_others_are_made_again(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changed input, a missing manifest, a damaged file, a changed benchmark, another option: each is made again."""
    out = copied(made, tmp_path)
    words: tuple[object, ...] = ("paper", "--from", tmp_path / "from", "--out", out, *QUICK)

    def states() -> dict[str, str]:
        capsys.readouterr()
        assert prepare(*words) == 0
        return {name: "made" if "made" in row else "as before" for name, row in table(capsys.readouterr().out).items()}

    def made_again() -> set[str]:
        found = states()
        assert set(found) == set(PAPER)
        return {name for name, state in found.items() if state == "made"}

    assert made_again() == set()
    compared = {"deepscaler", "eurus2-rl", "scp-116k", "instructions"}
    (out / "amc" / "manifest.json").unlink()  # as a kill leaves it
    assert made_again() == {"amc"}  # the same records, so nothing that was compared with them changes
    with (tmp_path / "from" / "aime25" / "test.jsonl").open("a") as file:
        file.write(json.dumps({"problem": "What is 1 plus 1?", "answer": "2", "id": "12"}) + "\n")
    assert made_again() == {"aime25", *compared}
    with (out / "minerva" / "validation.jsonl").open("a") as file:
        file.write("{}\n")
    assert made_again() == {"minerva"}
    words = (*words, "--workers", 2)
    assert made_again() == set()
    words = (*words, "--agreement", "grader")
    assert made_again() == {"scp-116k"}  # the only source with two solutions
    words = (*words, "--seed", 5)
    assert made_again() == set(PAPER)


def test_a_killed_preparation_goes_on_where_it_was(made: Path, tmp_path: Path) -> None:
    """Killed while it writes the third folder: two are kept, and the rest is made by the same command."""
    words = ["paper", "--from", str(made / "from"), "--out", str(tmp_path / "prepared"), *map(str, QUICK)]
    killer = """
import os, signal, sys
from nemo_prorl import cli
from nemo_prorl.data.prepare import output
real = output.write_manifest
def write(out, manifest):
    if out.name == "amc":
        os.kill(os.getpid(), signal.SIGKILL)
    real(out, manifest)
output.write_manifest = write
cli.main(["data", "prepare", *sys.argv[1:]])
"""
    told = subprocess.run([sys.executable, "-c", killer, *words], capture_output=True, timeout=120, check=False)
    assert told.returncode == -signal.SIGKILL
    assert {path.parent.name for path in (tmp_path / "prepared").glob("*/manifest.json")} == {"aime24", "aime25"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "prepared").glob("aime*/*")}
    assert prepare(*words) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path.name for path in (tmp_path / "prepared").iterdir()} == set(PAPER)


def test_what_cannot_be_had_is_left_out_and_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A missing folder, a broken file and a missing judge; the rest is made, and the worst fault is the exit code."""
    shutil.copytree(made / "from", tmp_path / "from")
    shutil.rmtree(tmp_path / "from" / "minerva")
    words = ("paper", "--from", tmp_path / "from", "--out", tmp_path / "prepared", *QUICK[:4])
    capsys.readouterr()
    assert prepare(*words) == 3
    text = capsys.readouterr().out
    assert "2 of 20 folders are missing:" in text
    assert {name for name, row in table(text).items() if "missing" in row} == {"minerva", "scp-116k"}
    assert "hf download math-ai/minervamath --repo-type dataset --revision ee46ddc" in text
    assert "scp-116k needs a judge" in text
    assert f"alone: prorl data prepare scp-116k --from {tmp_path / 'from' / 'scp-116k'} --size 3 " in text
    assert "deepscaler is not compared with minerva: not prepared" in caplog.text
    published.minerva(tmp_path / "from")
    (tmp_path / "from" / "aime24" / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    shutil.rmtree(tmp_path / "prepared" / "aime24")
    capsys.readouterr()
    assert prepare(*words) == 4
    states = table(capsys.readouterr().out)
    assert "missing" in states["aime24"]
    assert all("made" in states[name] for name in ("minerva", "deepscaler"))
    assert "as" in states["gpqa"]


def test_without_network_every_source_of_the_hub_is_named_and_puzzles_are_made(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "nemo_prorl.cli", "data", "prepare", "paper", "--out", str(tmp_path / "out")]
    words += list(map(str, QUICK))
    told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 3, told.stderr
    assert "18 of 20 folders are missing" in told.stdout
    assert told.stdout.count("`hf download ") == len(published.MAKERS)  # one file of PRIME's is four folders
    assert "Traceback" not in told.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"graph_color", "reasoning-gym"}


def test_one_folder_of_the_paper(made: Path, tmp_path: Path) -> None:
    """It is compared with the benchmarks that are there."""
    out = tmp_path / "prepared"
    shutil.copytree(made / "prepared" / "aime24", out / "aime24")
    assert prepare("paper", "--from", made / "from", "--out", out, "--only", "deepscaler", *QUICK) == 0
    assert {path.name for path in out.iterdir()} == {"aime24", "deepscaler"}
    compared = manifest(out / "deepscaler")["checks"]["contamination"]["against"]
    assert [(one["file"], one["dropped"]) for one in compared] == [("aime24/validation.jsonl", 1)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["paper", "--only", "aime23"], "--only aime23: no folder of the paper's data; known: aime24, aime25"),
        (["paper", "--size", "3"], "--size: belongs to one source, and `paper` makes 20"),
        (["paper", "--scale", "2"], "expected a number above 0, at most 1; got '2'"),
        (["aime24", "--from", "f.jsonl", "--scale", "0.5"], "--scale 0.5: is for `paper`.  Fix: --size N"),
        (["reasoning-gym", "--only", "chess"], "--only chess: reasoning_gym.yaml has no such task"),
        (["gpqa", "--from", "f.jsonl", "--only", "main"], "--only main: gpqa has no such part; known: none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_of_paper_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = [{"problem": "1+1?", "answer": "2"}]
    write_lines(tmp_path / "f.jsonl", rows)
    assert says in refused(capsys, caplog, 2, *words, "--out", "out")
    assert not (tmp_path / "out").exists()


def test_puzzles_held_out_stay_where_an_evaluation_set_has_the_same_ones(tmp_path: Path) -> None:
    """The validation puzzles of a generated source may be those of --against; only training puzzles are compared."""
    words = ("reasoning-gym", "--only", "gcd", "--check", 0, "--holdout", 3)
    assert prepare(*words, "--size", 0, "--out", tmp_path / "held") == 0
    held = tmp_path / "held" / "validation.jsonl"
    assert prepare(*words, "--size", 2, "--out", tmp_path / "both", "--against", held) == 0
    assert records(tmp_path / "both", "validation") == records(tmp_path / "held", "validation")
    assert {one["truth"]["dataset"] for one in records(tmp_path / "both")} == {"gcd"}
