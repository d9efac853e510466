"""The `prorl` command from outside: exit codes, what goes where, and what it says."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

import nemo_prorl.launcher.one_node
from nemo_prorl import cli, errors, settings
from nemo_prorl.files import json_lines
from nemo_prorl.launcher import one_node
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.report import status

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("in_an_empty_folder")]

Prorl = Callable[..., subprocess.CompletedProcess[str]]


def test_help_lists_the_commands(prorl: Prorl) -> None:
    told = prorl("--help")
    assert told.returncode == 0
    commands = (
        "train",
        "warmup",
        "plan",
        "status",
        "control",
        "import-hf",
        "export-hf",
        "rewards",
        "replay",
        "forecast",
        "reverify",
        "doctor",
    )
    for command in commands:
        assert f"    {command}" in told.stdout


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")]
)
def test_a_full_disk_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> str:
        raise error

    monkeypatch.setattr(status, "status", fail)
    assert cli.main(["status", "run"]) == 1
    assert "no space left on the disk" in caplog.text
    monkeypatch.setattr(status, "status", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["status", "run"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "trainer.grpo.nope=1"], "trainer.grpo.nope"),
        (["train", "--config", "gone.yaml"], "gone.yaml"),
        (["train", "--bogus"], "--bogus"),
        (["train", "--config-dir", "conf"], "write config_dir=DIR"),
        (["status", "run", "extra"], "extra"),
        (["bogus"], "invalid choice: 'bogus'"),
        (["trainn"], "Did you mean train?"),
        (["train", "--max-steps", "3"], "keys are given as KEY=VALUE, such as trainer.grpo.max_steps=VALUE"),
        ([], "COMMAND"),
        (["status", "nothing"], "nothing: neither a run"),
        (["warmup", "trainer.warmup.steps=0"], "trainer.warmup.steps=0"),
        (["plan", "cluster=h100"], "h100_4x8"),
        (["plan", "run_dir="], "run_dir=: expected a folder"),
        (["evaluate", "nowhere", "--out", "o", "--benchmarks", "aime24", "on_event=curl http://a"], "nowhere: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_exits_2_with_a_message_and_no_traceback(prorl: Prorl, arguments: list[str], said: str) -> None:
    told = prorl(*arguments)
    assert told.returncode == 2
    assert said in told.stderr
    assert "Traceback" not in told.stderr
    assert told.stdout == ""


def test_the_command_ends_without_a_look_through_all_objects() -> None:
    """With those of torch it takes a second or more, and a second Ctrl-C has killed the run already."""
    code = (
        "import atexit, gc, sys\n"
        "from nemo_prorl.cli import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "sys.argv = ['prorl', 'status', 'nowhere']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_dry_run_prints_the_resolved_configuration_and_starts_nothing(prorl: Prorl, tmp_path: Path) -> None:
    told = prorl("train", "seed=3", "--dry-run", "trainer.grpo.max_steps=6", "stage=run6", "data=domains")
    assert told.returncode == 0
    cfg = yaml.safe_load(told.stdout)
    assert (cfg["seed"], cfg["trainer"]["grpo"]["max_steps"], cfg["stage"]) == (3, 6, "run6")
    assert "${" not in told.stdout
    assert not list(tmp_path.iterdir())


def test_a_dry_run_refuses_a_run_directory_that_cannot_be_written(prorl: Prorl) -> None:
    told = prorl("train", "--dry-run", "run_dir=/proc/x")  # where root has the right to write, and cannot
    assert (told.returncode, told.stdout) == (2, "")
    assert "run_dir=/proc/x: expected a folder that exists or can be made; /proc cannot be written" in told.stderr


def test_the_dry_run_s_output_is_a_configuration_file(prorl: Prorl, tmp_path: Path) -> None:
    first = prorl("train", "seed=3", "--dry-run").stdout
    (tmp_path / "mine.yaml").write_text(first)
    assert prorl("train", "--dry-run", "--config", "mine.yaml").stdout == first


def test_train_hands_the_configuration_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher gets and how its exit code comes back; the real launcher runs in the tests of whole runs."""
    got: dict[str, object] = {}

    def run(cfg: DictConfig, text: str) -> int:
        got.update(steps=cfg.trainer.grpo.max_steps, read=yaml.safe_load(text)["trainer"]["grpo"]["max_steps"])
        return 75

    monkeypatch.setattr(nemo_prorl.launcher.one_node, "run", run)
    assert cli.main(["train", "trainer.grpo.max_steps=6"]) == 75
    assert got == {"steps": 6, "read": 6}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x is wrong"), 2),
        (errors.UnfitMachine("x is wrong"), 3),
        (errors.DataError("x is wrong"), 4),
        (errors.StoppedCleanly("x is wrong"), 75),
        (errors.EngineFailure("x is wrong"), 1),
        (KeyboardInterrupt(), 1),
        (None, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_code(
    error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(cfg: DictConfig, text: str) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(nemo_prorl.launcher.one_node, "run", run)
    assert cli.main(["train"]) == code
    assert ("x is wrong" in caplog.text) == isinstance(error, errors.ProrlError)


def test_plan_shows_the_run_as_it_is_resolved(prorl: Prorl) -> None:
    told = prorl(
        "plan", "trainer.grpo.samples_per_prompt=32", "trainer.devices=2", "model.pipeline_model_parallel_size=2"
    )
    assert told.returncode == 0
    assert "x 32 = 1536 responses, 4 updates of 384" in told.stdout
    assert "TP 1 x PP 2 x DP 1" in told.stdout


def test_status_reads_the_files_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step-000020", "step-000030.tmp"):  # the second is still being written
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "state.json").write_text("{}")
    (run / "config.yaml").write_text(settings.resolved_yaml(settings.load(["trainer.grpo.max_steps=40"])))
    lines = [{"step": 1, "kl": 0.0}, {"step": 23, "kl": 0.00123456789, "reward/math": 0.5}]
    (run / "metrics.jsonl").write_text(json_lines(lines) + '{"step": 24, "k')
    text = status.status(run)
    assert "23 of 40\n" in text
    assert "step-000020\n" in text
    assert "0.00123457" in text
    alarm = {"event": "alarm", "step": 22, "time": 1.0, "what": "no group carries a signal"}
    (run / "journal.jsonl").write_text(json.dumps(alarm) + "\n" + json.dumps({"event": "stop", "step": 23}) + "\n")
    assert re.search(r"^last alarm +step 22: no group carries a signal$", status.status(run), re.M)
    assert re.search(r"^last event +stop, step 23$", status.status(run), re.M)
    (run / "summary.json").write_text(json.dumps({"finished": True}))
    assert "23 of 40, finished" in status.status(run)


def test_status_tells_a_live_run_from_one_that_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with one_node.locked(run):
        (run / "config.yaml").write_text(settings.resolved_yaml(settings.load([])))
        journal = Journal(run)
        journal.append("start", 0, stage="none", version="0")
        assert re.search(r"^state +running$", status.status(run), re.M)
    state = json.loads(status.status(run, as_json=True))
    assert state["state"] == "killed"
    assert "(killed?); the same command begins again" in state["state_detail"]
    (run / "checkpoints" / "step-000020").mkdir(parents=True)
    (run / "checkpoints" / "step-000020" / "state.json").write_text("{}")
    assert "the same command continues from step-000020" in status.status(run)
    for event, fields, shown in (
        ("failure", {"reason": "RewardFailure: x"}, "not running: failed after step 22: RewardFailure: x"),
        ("stop", {"reason": "SIGTERM"}, "not running: stopped after step 22 (SIGTERM); the same command continues"),
        ("finish", {}, "not running: finished after step 22"),
    ):
        journal.append(event, 22, **fields)
        assert re.search(rf"^state +{re.escape(shown)}", status.status(run), re.M)
    journal.append("resume", 20, stage="none", version="0")
    end = {"event": "end", "job": "7", "attempt": 1, "restart": 0, "nodes": ["a"], "time": time.time(), "code": 1}
    end |= {"what": "all supervisors were killed", "host": "a", "next": "give_up"}
    (run / "launches.jsonl").write_text(json.dumps(end) + "\n")
    assert "failed after step 0: all supervisors were killed" in status.status(run)
    journal.append("stop", 22, reason="SIGUSR1")
    assert "stopped after step 22 (SIGUSR1)" in status.status(run)
    later = time.time() + 1  # another start, which ends before a trainer works
    lines = [{**end, "event": "begin", "time": later}, {**end, "time": later + 1}]
    (run / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "failed after step 0: all supervisors were killed" in status.status(run)
    events = [{"event": "failure", "step": 22, "time": later + 0.5, "reason": "RewardFailure: x"}]  # of this start
    (run / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "failed after step 22: RewardFailure: x" in status.status(run)


def test_status_of_a_run_on_another_machine_goes_by_signs_of_life(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(settings.load([])))
    Journal(tmp_path).append("stop", 3, reason="SIGTERM")  # by an earlier process
    lock = tmp_path / ".lock"
    lock.write_text("process 12 on elsewhere, Slurm job 7\n")
    os.utime(lock, (time.time() + 1, time.time() + 1))
    assert "running; last sign of life on elsewhere 0 s ago" in status.status(tmp_path)
    Journal(tmp_path).append("resume", 3, stage="none", version="0")
    old = time.time() - 4000
    os.utime(lock, (old, old))
    assert re.search(r"not running: .*killed\?\); last sign of life on elsewhere 400\d s ago", status.status(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "all.log").touch()  # a start that takes long, as another user sees it
    assert re.search(r"^state +running; last sign", status.status(tmp_path), re.M)
    os.utime(tmp_path / "logs" / "all.log", (old, old))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    assert re.search(r"^state +running; last sign", status.status(tmp_path), re.M)


@pytest.mark.parametrize("run_dir", ["/dev/null/x", str(Path(__file__))])
def test_a_run_directory_that_cannot_be_made_is_refused(run_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["train", f"run_dir={run_dir}"]) == 2
    assert f"{run_dir}: expected a folder that exists or can be made" in caplog.text


def test_the_engines_python_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout / ".venv" / "rollout" / "bin", elsewhere):
        folder.mkdir(parents=True)
    (checkout / ".venv" / "rollout" / "bin" / "python").touch()
    monkeypatch.setattr("sys.prefix", str(checkout / ".venv" / "train"))
    monkeypatch.chdir(elsewhere)
    assert settings.load([]).rollout.python == str(checkout / ".venv/rollout/bin/python")
    monkeypatch.chdir(checkout)
    assert settings.load([]).rollout.python == ".venv/rollout/bin/python"
    assert settings.load(["rollout.python=/opt/python"]).rollout.python == "/opt/python"
