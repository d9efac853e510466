"""The paper's training in small, walked by the commands of docs/howto/paper.md (tests/paper/miniature.py)."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cluster.conftest import unless_there_is_no_slurm
from tests.conftest import ROOT
from tests.paper import miniature
from tests.paper.miniature import STAGES, STEPS, STEPS_BEFORE, Walk
from tests.whole_runs import events_of, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(7200)]

PAGE = ROOT / "docs" / "howto" / "paper.md"
NOT_WALKED = {  # why not
    ("prorl", "doctor", "--preflight"): "tests/test_docs_commands.py makes that step with the laptop's model",
    ("sbatch", "slurm/stage.sbatch", "cluster=slurm_dev"): "tests/cluster runs the laptop's model on four nodes",
}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    unless_there_is_no_slurm()
    return miniature.run(tmp_path_factory.mktemp("paper"))


SMALLER = {  # options that only make a command smaller
    "data": ("--from", "--scale"),
    "evaluate": ("--samples", "--context", "--max-response"),
    "doctor": ("--rows",),
}


def kinds(lines: str) -> set[tuple[str, ...]]:
    """Return the kind of each command: program, command, and the options that it has."""
    found = set()
    for line in lines.splitlines():
        words = [word for word in shlex.split(line, comments=True) if not word.startswith("--container")]
        if not words or words[0] not in ("prorl", "sbatch", "bash"):
            continue
        smaller = SMALLER.get(words[1], ())
        options = sorted(word for word in words if re.fullmatch(r"--[a-z-]+", word) and word not in smaller)
        stage = [word for word in words if word == "cluster=slurm_dev" and "data=prorl" not in words]
        head = words[:2] if words[0] == "prorl" else [words[0], "slurm/stage.sbatch"]
        found.add((*head, *options, *(stage if words[0] == "sbatch" else [])))
    return found


def of_page() -> set[tuple[str, ...]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return kinds("\n".join(blocks))


def test_every_command_of_the_page_is_walked(walk: Walk) -> None:
    text = (walk.folder / "commands.txt").read_text().replace(str(ROOT) + "/", "")
    assert sorted(of_page() - kinds(text)) == sorted(NOT_WALKED)


def test_all_stages_made_their_steps_and_run_4_began_where_run_3_was_left(walk: Walk) -> None:
    chain = walk.folder / "runs" / "paper"
    for stage in STAGES:
        steps = STEPS_BEFORE if stage in STAGES[:3] else STEPS
        made = [line["step"] for line in metrics_of(chain / stage)]
        assert made == list(range(1, len(made) + 1))
        assert len(made) < steps if stage == "run3" else len(made) == steps, stage
    assert any(event["event"] == "stop" for event in events_of(chain / "run3"))
    [start, *_] = [event for event in events_of(chain / "run4") if event["event"] == "start"]
    named = set(re.findall(r"run3/checkpoints/step-(\d+)", (walk.folder / "commands.txt").read_text()))
    [picked] = named
    assert start["start_from"].endswith(f"run3/checkpoints/step-{picked}")
    assert int(picked) < len(metrics_of(chain / "run3"))  # earlier than where run 3 was stopped


def test_some_groups_carried_a_signal(walk: Walk) -> None:
    updates = [line for stage in STAGES for line in metrics_of(walk.folder / "runs" / "paper" / stage)]
    assert any(line.get("policy/grad_norm", 0) > 0 for line in updates)


def test_the_table_has_every_benchmark_for_base_and_end(walk: Walk) -> None:
    for name in ("base", "end"):
        results = json.loads((walk.folder / "evaluation" / name / "results.json").read_text())
        assert results["complete"]
        assert len(results["benchmarks"]) == 18  # fifteen, and three that are not trained on
    compared = json.loads((walk.folder / "evaluation" / "paper" / "published.json").read_text())
    assert json.dumps(compared).count('"verdict"') >= 36


def test_the_report_tells_why_run_3_ended(walk: Walk) -> None:
    assert Path(walk.folder / "runs" / "paper" / "report.html").is_file()
