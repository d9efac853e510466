"""`prorl launch` and `prorl status` of a chain, with small scripts in the place of Slurm's commands."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.errors import UnfitMachine
from nemo_prorl.launcher import chain, submission
from nemo_prorl.launcher.chain_slurm import JobState, job_states
from nemo_prorl.launcher.submission import CLUSTER
from tests.conftest import ROOT
from tests.lines import write_lines
from tests.test_formats import against

pytestmark = pytest.mark.starts

Told = pytest.CaptureFixture[str]


class Slurm:
    """Commands that write down how they were called and answer what the test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, name: str, answer: str) -> None:
        """`answer`: lines of sh; `$n` is the number of the call, from 1."""
        lines = ["#!/bin/sh", f"cd {shlex.quote(str(self.folder))}", "PATH=/usr/bin:/bin"]
        lines[1:1] = ['here="$PWD"']
        lines += [f"n=$(( $(ls | grep -c '^{name}-') + 1 ))", f'printf "%s\\n" "$here" "$@" > {name}-$n', answer]
        path = self.folder / name
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The folder and the arguments of each call."""
        found = sorted(self.folder.glob(f"{name}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        return [path.read_text().splitlines() for path in found]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with a script, and an empty folder to work in."""
    root = tmp_path / "project"
    (root / "slurm").mkdir(parents=True)
    (root / "slurm" / "stage.sbatch").write_text('#!/bin/bash\n#SBATCH --time=4:00:00\nexec python x "$@"\n')
    monkeypatch.setattr(chain, "ROOT", root)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "slurm"))  # no Slurm but ours
    return root


@pytest.fixture
def slurm(tmp_path: Path, project: Path) -> Slurm:
    """A cluster that takes all jobs, from 17 on, and whose queue is empty."""
    cluster = Slurm(tmp_path / "slurm")
    cluster.add("sbatch", "echo $((16 + n))")
    cluster.add("scancel", "")
    cluster.add("squeue", "")
    return cluster


def finish(folder: Path, stage: str, *overrides: str) -> None:
    """What a finished run of a stage holds, as far as launch and status look."""
    run = folder / stage
    (run / "checkpoints" / "step-000020").mkdir(parents=True)
    (run / "checkpoints" / "step-000020" / "state.json").write_text("{}")
    (run / "init").mkdir()
    (run / "config.yaml").write_text(
        settings.resolved_yaml(settings.load([f"stage={stage}", "data=domains", f"run_dir={run}", *overrides]))
    )
    heldout = {"before": 0.109, "after": 0.2994}
    (run / "summary.json").write_text(json.dumps({"finished": True, "step": 20, "heldout": heldout}))
    (run / "metrics.jsonl").write_text('{"step": 19}\n{"step": 20}\n')


def record_of(folder: Path) -> Any:
    return json.loads((folder / "chain.json").read_text())


def jobs_of(folder: Path) -> dict[str, str | None]:
    return {entry["stage"]: entry["job"] for entry in record_of(folder)["stages"]}


@pytest.fixture(autouse=True)
def small_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default cluster's model is not here."""
    monkeypatch.setattr(chain, "CLUSTER", "slurm_dev")


def launch(*words: str, stages: str = "run1..run3") -> int:
    return cli.main(["launch", "--stages", stages, *words])


# --- launch ----------------------------------------------------------------------------------------------------------


def test_each_stage_is_a_job_that_waits_for_the_one_before(slurm: Slurm, project: Path, capsys: Told) -> None:
    work = Path.cwd()
    mounts = "--container-mounts=/data:/data,/models:/models"
    given = ["seed=2", "--sbatch", "--time=1:00:00 --comment='for ann'", "--container-image=nemo.sqsh", mounts]
    assert launch("run_dir=chains/big", "chain.after=null", *given) == 0
    common = ["--time=1:00:00", "--comment=for ann", "slurm/stage.sbatch"]

    def expected(stage: str, *waits: str) -> list[str]:
        container = ["--container-image=nemo.sqsh", mounts]
        own = [f"run_dir={work}/chains/big/{stage}", "chain.after=null", "seed=2"]
        return [str(project), "--parsable", f"--job-name=big-{stage}", *waits, *common, stage, *container, *own]

    assert slurm.calls("sbatch") == [
        expected("run1"),
        expected("run2", "--dependency=afterok:17", "--kill-on-invalid-dep=yes"),
        expected("run3", "--dependency=afterok:18", "--kill-on-invalid-dep=yes"),
    ]
    told = capsys.readouterr().out
    assert told.startswith("run1  job 17\nrun2  job 18, after 17\nrun3  job 19, after 18\n")
    assert f"prorl status {work}/chains/big" in told
    record = record_of(Path("chains/big"))
    assert against("chain", record) == []
    assert jobs_of(Path("chains/big")) == {"run1": "17", "run2": "18", "run3": "19"}
    assert record["stages"][1]["command"] == ["sbatch", *slurm.calls("sbatch")[1][1:]]
    assert [entry["max_steps"] for entry in record["stages"]] == [20, 15, 15]
    again = cli._parse(record["command"][1:])
    assert (again.stages, again.sbatch) == ("run1..run3", "--time=1:00:00 --comment='for ann'")
    assert again.overrides == ["run_dir=chains/big", "chain.after=null", "seed=2"]


def test_jobs_are_checked_for_the_cluster_that_the_script_takes(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chain, "CLUSTER", CLUSTER)
    assert launch() == 2
    assert "pretrained_checkpoint.restore_from_path must be given" in caplog.text
    assert slurm.calls("sbatch") == []


def test_flags_may_follow_sbatch_with_and_without_an_equals_sign() -> None:
    for words in (["--sbatch", "--time=60"], ["--sbatch=--time=60"]):
        parsed = cli._parse(["launch", "--stages", "run1", *words, "seed=2"])
        assert (parsed.sbatch, parsed.overrides) == ("--time=60", ["seed=2"])


def test_only_the_first_stage_starts_from_what_is_named(slurm: Slurm, project: Path) -> None:
    finish(Path("other"), "run1")
    assert launch("chain.start_from=other/run1", stages="run2..run3") == 0
    first, second = slurm.calls("sbatch")
    assert first[-1] == f"chain.start_from={Path.cwd()}/other/run1"
    assert second[-1] == f"run_dir={Path.cwd()}/runs/prorl/run3"


@pytest.mark.parametrize("given", ["conf", "~/conf"])
def test_own_stages_are_those_of_the_jobs_and_a_home_is_meant_by_its_sign(
    slurm: Slurm, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    """Jobs run in the project's folder, where a relative `config_dir` starts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    own = (tmp_path / "home" if given[0] == "~" else project) / "conf" / "stage"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\ndefaults: [run1, _self_]\nstage: mine\n")
    finish(tmp_path / "home" / "old", "run1")
    words = [f"config_dir={given}", "run_dir=~/runs", "chain.start_from=~/old/run1"]
    assert launch(*words, stages="mine") == 0
    (job,) = slurm.calls("sbatch")
    home = tmp_path / "home"
    assert {f"run_dir={home}/runs/mine", f"chain.start_from={home}/old/run1", f"config_dir={given}"} <= set(job)


def test_a_dry_run_prints_every_command_and_the_script(project: Path, capsys: Told) -> None:
    """Without Slurm.  The commands are lines for a shell, in which each job's id gets to the next."""
    work = Path.cwd()
    assert launch("--dry-run", "--sbatch", "--comment='for ann'", "run_dir=chain", stages="run1..run2") == 0
    assert capsys.readouterr().out == (
        f"cd {project}\n"
        f"run1=$(sbatch --parsable --job-name=chain-run1 '--comment=for ann' slurm/stage.sbatch run1"
        f" run_dir={work}/chain/run1)\n"
        f"run2=$(sbatch --parsable --job-name=chain-run2 --dependency=afterok:$run1 --kill-on-invalid-dep=yes"
        f" '--comment=for ann' slurm/stage.sbatch run2 run_dir={work}/chain/run2)\n"
        "\n# slurm/stage.sbatch\n"
        '#!/bin/bash\n#SBATCH --time=4:00:00\nexec python x "$@"\n'
    )
    assert list(work.iterdir()) == []


def test_a_submission_that_fails_takes_back_those_before(
    slurm: Slurm, caplog: pytest.LogCaptureFixture, capsys: Told
) -> None:
    refusal = 'echo "sbatch: error: invalid partition specified: nope" >&2; exit 1'
    slurm.add("sbatch", f"if [ $n = 3 ]; then {refusal}; fi; echo $((16 + n))")
    assert launch("run_dir=chain") == 3
    assert slurm.calls("scancel")[0][1:] == ["17", "18"]
    assert (
        "stage run3 was not submitted: sbatch ended with exit code 1: sbatch: error: invalid partition" in caplog.text
    )
    assert "cancelled the jobs submitted before it: 17, 18" in caplog.text
    assert not Path("chain/chain.json").exists()

    held = {"stages": [{"stage": "run1", "job": "5", "max_steps": 20, "command": [], "time": 1.0}], "command": []}
    Path("chain/chain.json").write_text(json.dumps(held))
    slurm.add("sbatch", f"if [ $n = 5 ]; then {refusal}; fi; echo $((16 + n))")
    slurm.add("scancel", 'echo "scancel: error: no" >&2; exit 1')
    assert launch("run_dir=chain") == 3
    assert "could not be cancelled (scancel ended with exit code 1: scancel: error: no). Fix: scancel 20" in caplog.text
    assert record_of(Path("chain")) == held


@pytest.mark.parametrize(
    ("answer", "says"), [("exit 1", "no message"), ("echo Submitted batch job 17", "Submitted batch job 17")]
)
def test_what_is_no_job_id_is_a_failure(slurm: Slurm, answer: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    slurm.add("sbatch", answer)
    assert launch() == 3
    assert says in caplog.text
    assert "nothing was submitted" in caplog.text
    assert slurm.calls("scancel") == []


def test_an_id_may_name_its_cluster(slurm: Slurm) -> None:
    slurm.add("sbatch", 'echo "$((16 + n));east"')
    assert launch() == 0
    assert "--dependency=afterok:17" in slurm.calls("sbatch")[1]


def test_all_configurations_are_checked_before_anything_is_submitted(
    slurm: Slurm, caplog: pytest.LogCaptureFixture
) -> None:
    finish(Path("chain"), "run3", "seed=5")  # another run than what is asked for
    assert launch("run_dir=chain") == 2
    assert "seed" in caplog.text
    assert slurm.calls("sbatch") == []


def test_finished_stages_are_left_out(slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:
    finish(Path("chain"), "run1")
    caplog.set_level("INFO")
    assert launch("run_dir=chain") == 0
    assert "stage run1 is finished and skipped" in caplog.text
    first, second = slurm.calls("sbatch")
    assert first[2] == "--job-name=chain-run2"
    assert [word for word in first if "depend" in word] == []
    assert "--dependency=afterok:17" in second
    assert jobs_of(Path("chain")) == {"run1": None, "run2": "17", "run3": "18"}
    assert against("chain", record_of(Path("chain"))) == []


def test_a_finished_run_with_more_steps_is_not_finished(slurm: Slurm) -> None:
    finish(Path("chain"), "run1")
    assert launch("run_dir=chain", "trainer.grpo.max_steps=21", stages="run1") == 0
    assert len(slurm.calls("sbatch")) == 1


def test_a_chain_that_is_finished_is_told(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(chain, "print_results", lambda folder, names: told.append((folder, list(names))))
    finish(Path("chain"), "run1")
    assert launch("run_dir=chain", stages="run1") == 0
    assert told == [(Path.cwd() / "chain", ["run1"])]
    assert slurm.calls("sbatch") == []


def test_a_stage_at_work_is_not_submitted_again(slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:
    assert launch("run_dir=chain") == 0
    slurm.add("squeue", 'echo "19 PENDING Dependency"; echo "18 RUNNING None"; echo "17 FAILED NonZeroExitCode"')
    assert launch("run_dir=chain") == 2
    assert "run2 is already submitted: its job 18 is RUNNING" in caplog.text
    assert "scancel 18 19" in caplog.text
    assert len(slurm.calls("sbatch")) == 3
    assert slurm.calls("squeue")[-1][1:] == ["-h", "-t", "all", "-j", "17,18,19", "-o", "%i %T %r"]
    slurm.add("squeue", 'echo "17 FAILED NonZeroExitCode"; echo "18 CANCELLED DependencyNeverSatisfied"')
    assert launch("run_dir=chain") == 0
    assert jobs_of(Path("chain")) == {"run1": "20", "run2": "21", "run3": "22"}


def test_a_chain_can_be_lengthened(slurm: Slurm) -> None:
    """The record keeps the stages of earlier calls."""
    assert launch("run_dir=chain", stages="run1") == 0
    finish(Path("chain"), "run1")
    assert launch("run_dir=chain", stages="run2..run3") == 0
    assert jobs_of(Path("chain")) == {"run1": "17", "run2": "18", "run3": "19"}


def test_a_queue_that_does_not_answer_stops_a_second_launch(slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:
    assert launch("run_dir=chain") == 0
    slurm.add("squeue", 'echo "squeue: error: Unable to contact slurm controller" >&2; exit 1')
    assert launch("run_dir=chain") == 3
    assert "Unable to contact slurm controller" in caplog.text
    assert len(slurm.calls("sbatch")) == 3


def test_a_stage_without_a_beginning_is_said_before_the_queue(slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:
    assert launch("run_dir=chain", stages="run2..run3") == 2
    assert "stage=run2: follows run1, and there is no run in" in caplog.text
    assert launch("run_dir=chain", stages="run1,run3") == 2
    assert "stage=run3: follows run2, and there is no run in" in caplog.text
    assert slurm.calls("sbatch") == []


def test_without_slurm_or_script_it_says_what_to_do(
    project: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert launch() == 3
    assert "sbatch is not on the PATH" in caplog.text
    assert "--here" in caplog.text
    (project / "slurm" / "stage.sbatch").unlink()
    assert launch("--dry-run") == 3
    assert f"{project}/slurm/stage.sbatch: expected the script to submit" in caplog.text
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sbatch", "--dependency=afterok:3"], "prorl launch sets --dependency"),
        (["--sbatch", "--time=60 -D /tmp"], "prorl launch sets -D"),
        (["--sbatch", "partition=dev"], "expected flags of sbatch, which begin with a dash; got 'partition=dev'"),
        (["--sbatch", "--comment='for"], "No closing quotation"),
        (["--here", "--sbatch", "--time=60"], "--sbatch is for Slurm jobs"),
        (["--here", "--container-image", "x"], "--container-image is for Slurm jobs"),
        (["stage=run2"], "--stages names the stages"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_said(slurm: Slurm, words: Sequence[str], says: str, caplog: pytest.LogCaptureFixture) -> None:
    assert launch(*words) == 2
    assert says in caplog.text
    assert slurm.calls("sbatch") == []


def test_the_projects_folder_is_the_checkout() -> None:
    assert submission.ROOT == ROOT


def test_here_says_which_runs_it_would_start(capsys: Told, project: Path) -> None:
    start = "chain.start_from=/some/run"
    assert launch("--here", "--dry-run", "run_dir=chain", "data=domains", start, stages="run1..run2") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"prorl train stage=run1 run_dir=chain/run1 data=domains {start}",
        "prorl train stage=run2 run_dir=chain/run2 data=domains",
    ]


# --- what Slurm says -------------------------------------------------------------------------------------------------


def test_a_jobs_state_is_from_the_queue_the_accounting_or_gone(slurm: Slurm) -> None:
    held = 'echo "17 RUNNING None"; echo "18 PENDING (launch failed requeued held)"; echo "19 FAILED NonZeroExitCode"'
    slurm.add("squeue", held)
    slurm.add("sacct", 'echo "20|CANCELLED by 1000|None"; echo "20.batch|x|y|z"')
    assert job_states(["17", "18", "19", "20", "21"]) == {
        "17": JobState("RUNNING", ""),
        "18": JobState("PENDING", "(launch failed requeued held)"),
        "19": JobState("FAILED", "NonZeroExitCode"),
        "20": JobState("CANCELLED", ""),
        "21": JobState("gone", ""),
    }
    assert slurm.calls("sacct")[0][-3:] == ["20,21", "-o", "JobID,State,Reason"]


def test_a_forgotten_job_is_gone(slurm: Slurm) -> None:
    slurm.add("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    slurm.add("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert job_states(["17"]) == {"17": JobState("gone", "")}


def test_without_slurm_no_state_is_made_up(project: Path) -> None:
    with pytest.raises(UnfitMachine, match="squeue is not on the PATH"):
        job_states(["17"])


# --- status of a chain -----------------------------------------------------------------------------------------------


@pytest.fixture
def chain_folder(slurm: Slurm) -> Path:
    """run1 is finished, run2 at work for the second time, run3 waits."""
    folder = Path("chain")
    assert launch("run_dir=chain") == 0
    finish(folder, "run1")
    finish(folder, "run2", "trainer.grpo.max_steps=300")
    run = folder / "run2"
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text('{"step": 23}\n{"step": 24, "k')
    start = {"event": "begin", "job": "18", "restart": 0, "attempt": 1, "nodes": ["node0", "node1"], "step": -1}
    end = {**start, "event": "end", "code": 1, "what": "trainer-2 ended with status -9", "host": "node1"}
    end |= {"process": "trainer-2", "status": -9, "next": "again"}
    again = {**start, "attempt": 2, "step": 20}
    other = {**start, "job": "99", "step": 20}  # submitted by mistake, and refused
    refused = {**other, "event": "end", "code": 2, "what": f"run_dir={run} is in use by another process", "host": None}
    refused |= {"process": None, "status": None, "next": "give_up"}
    lines = [{**line, "time": 1763750000.0} for line in (start, end, again, other, refused)]
    assert [fault for line in lines for fault in against("launch", line)] == []
    write_lines(run / "launches.jsonl", lines)
    alarms = [{"event": "alarm", "step": k, "time": 1.0, "what": f"plateau: {'on and ' * 12}on"} for k in (5, 9)]
    stop = {"event": "stop", "step": 10, "time": 1.0, "reason": "signal 10"}
    write_lines(run / "journal.jsonl", (*alarms, stop))
    return folder


def rows_of(text: str) -> list[list[str]]:
    """The table's cells."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def test_a_chains_status_has_a_row_a_stage(slurm: Slurm, chain_folder: Path, capsys: Told) -> None:
    slurm.add("squeue", 'echo "17 COMPLETED None"; echo "18 RUNNING None"; echo "19 PENDING Dependency"')
    capsys.readouterr()
    assert cli.main(["status", "chain"]) == 0
    alarm = "step 9: plateau: on and on and on and on and on and on and on and on and on and on and on and on and on"
    two = ["run2", "18", "RUNNING", "-", "23 of 300", "-", "running"]
    assert rows_of(capsys.readouterr().out) == [
        ["stage", "job", "state", "reason", "step", "from", "ended", "attempts", "last end", "held-out", "last alarm"],
        ["run1", "17", "COMPLETED", "-", "20 of 20, finished", "-", "done", "0", "-", "0.109 -> 0.299", "-"],
        [*two, "2", "trainer-2 ended with status -9", "-", alarm[:57] + "..."],
        ["run3", "19", "PENDING", "Dependency", "0 of 15", "-", "-", "0", "-", "-", "-"],
    ]


def documented_fields() -> set[str]:
    """Words in inline code of the section on `prorl status` in docs/reference/slurm_files.md."""
    text = (ROOT / "docs" / "reference" / "slurm_files.md").read_text().split("\n## prorl status\n")[1]
    return set(re.findall(r"`(\w+)`", text))


def test_a_chains_status_as_json(slurm: Slurm, chain_folder: Path, capsys: Told) -> None:
    slurm.add("squeue", 'echo "18 RUNNING None"')
    capsys.readouterr()
    assert cli.main(["status", "chain", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    one, two, three = told["stages"]
    assert (one["finished"], one["heldout"]) == (True, {"before": 0.109, "after": 0.2994})
    assert (two["state"], two["step"], two["max_steps"], two["attempts"]) == ("RUNNING", 23, 300, 2)
    assert (two["launch"]["attempt"], two["end"]["host"], two["alarm"]["step"]) == (2, "node1", 9)
    assert (three["job"], three["state"], three["launch"]) == ("19", "gone", None)
    assert told.keys() | one.keys() <= documented_fields()


def test_a_chains_status_without_slurm_and_with_a_silent_one(
    slurm: Slurm, chain_folder: Path, capsys: Told, caplog: pytest.LogCaptureFixture
) -> None:
    (slurm.folder / "squeue").unlink()
    capsys.readouterr()
    assert cli.main(["status", "chain"]) == 0
    assert [row[2] for row in rows_of(capsys.readouterr().out)] == ["state", "-", "-", "-"]
    assert caplog.text == ""
    slurm.add("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert cli.main(["status", "chain"]) == 0
    assert [row[2] for row in rows_of(capsys.readouterr().out)] == ["state", "-", "-", "-"]
    assert "Unable to contact" in caplog.text


def test_a_runs_status_names_job_attempt_nodes_and_the_last_end(chain_folder: Path, capsys: Told) -> None:
    capsys.readouterr()
    assert cli.main(["status", "chain/run2"]) == 0
    rows = dict(row for row in rows_of(capsys.readouterr().out) if len(row) == 2)
    assert rows["job"] == "18"
    assert rows["attempt"] == "2 of this job, 2 in all"
    assert rows["nodes"] == "node0, node1"
    assert rows["last end"] == "trainer-2 ended with status -9, on node1; code 1, next: again"
    assert cli.main(["status", "chain/run2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["launch"]["job"], told["end"]["what"]) == ("18", "trainer-2 ended with status -9")
    assert (told["checkpoint"], told["journal"]["event"]) == ("step-000020", "stop")
    assert told.keys() <= documented_fields()
