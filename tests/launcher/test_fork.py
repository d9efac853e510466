"""`prorl fork`: its arms, their comparison in pairs, and a real fork whose equal arms are equal to the bit."""

import contextlib
import json
import math
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_prorl import cli, settings
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import write_json
from nemo_prorl.launcher import fork, one_node
from nemo_prorl.launcher.chain_slurm import SCRIPT
from nemo_prorl.launcher.fork import arm_of, compared, table
from nemo_prorl.launcher.formats import ForkRecord
from nemo_prorl.launcher.run_results import finished_step
from nemo_prorl.launcher.slurm_queries import Job
from nemo_prorl.launcher.submission import ROOT, Submission, arguments
from nemo_prorl.lifecycle.ledger import read_ledger
from nemo_prorl.lifecycle.ledger_diff import parting
from tests.ending import end_with_session
from tests.launcher.test_chain import Slurm, project, slurm  # noqa: F401  fixtures among them
from tests.test_formats import against
from tests.whole_runs import metrics_of


def test_the_arms_that_have_names_and_those_of_overrides() -> None:
    parent = settings.load(["trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8"])
    assert arm_of("none", parent).overrides == ("chain.hard_reset=false",)
    assert arm_of("reset", parent).overrides == ("chain.hard_reset=true",)
    assert arm_of("broaden", parent).overrides[1:] == (
        "trainer.grpo.samples_per_prompt=16",
        "trainer.grpo.prompts_per_step=4",
    )
    both = "rewards.functions.units=a.py:f*0.9 + a.py:g*0.1"
    assert arm_of(f"'{both}' seed=3", parent).overrides[1:] == (both, "seed=3")
    own = arm_of("model.optim.lr=1e-4 trainer.grpo.clip_high=0.3", parent)
    assert own.overrides[1:] == ("model.optim.lr=1e-4", "trainer.grpo.clip_high=0.3")
    assert own.name == "model.optim.lr_1e-4_trainer.grpo.clip_high_0.3"
    with pytest.raises(ConfigError, match=r"--arms rest: expected none, reset, broaden, or overrides KEY=VALUE in"):
        arm_of("rest", parent)


def test_pairs_are_prompts_of_one_run_or_several_runs() -> None:
    base = {"a": 0.1, "b": 0.9, "c": 0.5}
    other = {"a": 0.2, "b": 1.0, "c": 0.8}
    mean, half = compared([base], [other])
    assert mean == pytest.approx(0.5 / 3)
    assert half == pytest.approx(1.959964 * statistics.stdev([0.1, 0.1, 0.3]) / math.sqrt(3))
    mean, half = compared([base, base], [other, base])
    assert mean == pytest.approx(0.25 / 3)
    assert half == pytest.approx(12.706 * statistics.stdev([0.5 / 3, 0.0]) / math.sqrt(2))


def test_pairs_of_prompts_have_a_smaller_error_than_two_unpaired_runs() -> None:
    """Prompts are easy or hard in both arms; only the rest of the noise stays in a difference."""
    chance = random.Random(1)
    ease = [chance.random() for _ in range(400)]
    arms = [{str(k): e + chance.gauss(0.0, 0.05) for k, e in enumerate(ease)} for _ in range(2)]
    _, half = compared(arms[:1], arms[1:])
    unpaired = 1.96 * math.sqrt(sum(statistics.variance(arm.values()) / len(arm) for arm in arms))
    assert half < unpaired / 3


def validated(folder: Path, scores: dict[int, dict[str, float]], tokens: float) -> None:
    (folder / "validations").mkdir(parents=True)
    for step, by_prompt in scores.items():
        write_json(folder / "validations" / f"step-{step:06d}.json", by_prompt)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/generated_tokens": tokens}) + "\n")


def fork_record(steps: int, noise: float | None = None, arms: tuple[str, ...] = ("none", "reset")) -> ForkRecord:
    """What `prorl fork` writes into fork.json."""
    own: Any = [{"text": arm, "folder": arm, "job": None} for arm in arms]
    return {"format": 1, "checkpoint": "run/checkpoints/step-4", "steps": steps, "early_noise": noise, "arms": own}


def test_the_table_is_of_the_second_half(tmp_path: Path) -> None:
    early, late = {"a": 0.0, "b": 0.0}, {"a": 0.25, "b": 0.75}
    validated(tmp_path / "none", {5: early, 10: late}, 2e6)
    validated(tmp_path / "reset", {5: early, 10: {"a": 0.5, "b": 1.0}}, 3e6)
    lines = table({tmp_path: fork_record(10)}).splitlines()
    assert lines[1].split() == ["none", "0.5000", "2", "M", "tokens"]
    assert lines[2].split()[:6] == ["reset", "0.7500", "+0.2500", "+0.2500", "to", "+0.2500"]
    assert lines[3].startswith("held-out: mean of the validations after step 5; the interval is over prompts")
    with pytest.raises(ConfigError, match=r"none: no validation after step 10. Fix: data.validation, or more steps"):
        table({tmp_path: fork_record(20)})
    validated(tmp_path / "other", {10: {"a": 0.5, "c": 1.0}}, 3e6)  # other prompts
    with pytest.raises(ConfigError, match=r"other: no validation after step 5. Fix: data.validation"):
        table({tmp_path: fork_record(10, arms=("none", "other"))})


def test_finished_arms_are_compared_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(cfg: Any, text: str) -> int:
        resets = cfg.trainer.resets  # an arm has no other reset than its own
        assert (resets.mode, resets.every, list(resets.at_steps), cfg.chain.after) == ("manual", None, [], None)
        assert list(cfg.trainer.trace_steps) == []
        raise AssertionError("an arm was started")

    monkeypatch.setattr(one_node, "run", started)
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    monkeypatch.setattr(fork, "chosen_checkpoint", lambda run_dir, which: run_dir / "checkpoints" / "step-000004")
    parent = settings.load(
        [f"run_dir={tmp_path}", "trainer.resets.every=3", "trainer.resets.at_steps=[2]", "trainer.trace_steps=[20]"]
    )
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(parent))
    for arm, score in (("none", 0.25), ("reset", 0.5)):
        validated(tmp_path / "forks" / "4" / arm, {10: {"a": score}}, 2e6)
        write_json(tmp_path / "forks" / "4" / arm / "summary.json", {"finished": True, "step": 10})
    assert cli.main(["fork", str(tmp_path), "--steps", "10"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["reset", "0.5000", "+0.2500"]
    with pytest.raises(AssertionError, match="an arm was started"):
        cli.main(["fork", str(tmp_path), "--steps", "11"])
    written = json.loads((tmp_path / "forks" / "4" / "fork.json").read_text())  # before the first arm
    assert written == fork_record(11) | {"checkpoint": str(tmp_path / "checkpoints" / "step-000004")}
    assert against("fork", written) == []
    capsys.readouterr()
    assert cli.main(["fork", str(tmp_path), "--steps", "11", "--arms", "none", "no.key=1", "--dry-run"]) == 2
    assert capsys.readouterr().out == ""  # no command before the refusal
    assert cli.main(["fork", str(tmp_path), "--steps", "11", "--dry-run"]) == 0
    assert (tmp_path / "forks" / "4").is_dir()  # which keeps the checkpoint


def test_an_arm_that_is_decided_is_stopped_and_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second arm is better at once; the third never is, and runs to its end."""
    started: list[str] = []
    steps, better = 8, {"reset": 0.4, "none": 0.0, "model.optim.lr_1e-4": 0.0}

    def train(cfg: Any, text: str) -> int:
        run_dir = Path(cfg.run_dir)
        started.append(run_dir.name)
        validated(run_dir, {}, 1e6)
        for step in range(1, steps + 1):
            scores = {str(k): k % 7 / 14 + better[run_dir.name] + 0.01 * (k % 2) for k in range(40)}
            write_json(run_dir / "validations" / f"step-{step:06d}.json", scores)
            end = time.monotonic() + 2.0
            while run_dir.name == "reset" and time.monotonic() < end:
                if requests := list((run_dir / "control").glob("*.json")):
                    assert json.loads(requests[0].read_text())["what"] == "stop"
                    return 75
        write_json(run_dir / "summary.json", {"finished": True, "step": steps})
        return 0

    monkeypatch.setattr(one_node, "run", train)
    monkeypatch.setattr(fork, "_LOOK_S", 0.01)
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    monkeypatch.setattr(fork, "chosen_checkpoint", lambda run_dir, which: run_dir / "checkpoints" / "step-000004")
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(settings.load([f"run_dir={tmp_path}"])))
    words = ["fork", str(tmp_path), "--steps", str(steps), "--early", "--arms", "none", "reset", "model.optim.lr=1e-4"]
    for _ in range(2):
        assert cli.main(words) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[2][:3] == ["reset", lines[2][1], "+0.4000"]
        assert lines[3][2] == "+0.0000"
    assert started == ["none", "reset", "model.optim.lr_1e-4"]
    folder = tmp_path / "forks" / "4"
    record = fork.read_fork(folder)
    assert record is not None
    assert record["early_noise"] == 0.005
    assert fork.early_difference(folder, record, "reset") is not None
    record["early_noise"] = 0.3  # beside which 0.4 decides nothing
    assert fork.early_difference(folder, record, "reset") is None
    assert len(list((tmp_path / "forks" / "4" / "reset" / "validations").iterdir())) < steps


def test_each_arm_is_a_job_of_its_own_configuration_and_is_submitted_once(
    slurm: Slurm,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path.cwd() / "run"
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    monkeypatch.setattr(fork, "chosen_checkpoint", lambda run_dir, which: run_dir / "checkpoints" / "step-000004")
    data = "data.validation=[{name: a, path: a.jsonl}]"
    (run / "config.yaml").write_text(settings.resolved_yaml(settings.load([f"run_dir={run}", "seed=5", data])))
    (Path.cwd() / "a.jsonl").write_text(
        json.dumps({"id": "a", "task": "math", "prompt": "?", "truth": {"answer": "7"}}) + "\n"
    )
    folder = run / "forks" / "4"
    words = ["fork", "run", "--steps", "10", "--arms", "none", "model.optim.lr=1e-4", "--sbatch", "--time=60"]

    def command(arm: str) -> list[str]:
        return ["--parsable", f"--job-name=fork-4-{arm}", "--time=60", SCRIPT, "saved", f"run_dir={folder / arm}"]

    assert cli.main([*words, "--dry-run"]) == 0
    rehearsed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert rehearsed == [["sbatch", *command(arm)] for arm in ("none", "model.optim.lr_1e-4")]
    assert slurm.calls("sbatch") == []
    shutil.rmtree(folder)

    assert cli.main(words) == 0
    assert slurm.calls("sbatch") == [[str(ROOT), *command(arm)] for arm in ("none", "model.optim.lr_1e-4")]
    written = json.loads((folder / "fork.json").read_text())
    assert [arm["job"] for arm in written["arms"]] == ["17", "18"]
    assert against("fork", written) == []
    # What the job reads: the script's words, without a group, so the arm's own configuration counts.
    arm = Submission(arguments(command("model.optim.lr_1e-4")[4:]), Job())
    trained = settings.load_run(arm.overrides)
    assert (trained.seed, trained.model.optim.lr, trained.trainer.grpo.max_steps) == (5, 1e-4, 10)
    assert trained.chain.start_from == str(run / "checkpoints" / "step-000004")
    assert trained.data.validation[0].path == str(Path.cwd() / "a.jsonl")  # the job runs in the project's folder

    slurm.add("squeue", "echo 17 RUNNING None")
    validated(folder / "none", {10: {"a": 0.25}}, 2e6)
    capsys.readouterr()
    assert cli.main(words) == 0  # job 18 has ended, and its arm has not
    assert capsys.readouterr().out.splitlines()[:2] == ["none  job 17 is RUNNING", "model.optim.lr=1e-4  job 19"]
    for name, score in (("none", 0.25), ("model.optim.lr_1e-4", 0.5)):
        shutil.rmtree(folder / name)
        validated(folder / name, {10: {"a": score}}, 2e6)
        write_json(folder / name / "summary.json", {"finished": True, "step": 10})
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[1:3] == ["0.5000", "+0.2500"]
    assert len(slurm.calls("sbatch")) == 3
    assert cli.main([*words, "--early"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gone", "--steps", "3"], "gone is not a run directory"),
        (["gone", "--steps", "0"], "--steps=0: expected at least 1"),
        (["a", "b", "--steps", "3", "--out", "c"], "--out c: expected one RUN"),
        (
            ["a", "b", "--steps", "3", "--early"],
            "--early: expected one RUN, because the prompts of one run decide. Fix",
        ),
        (["a", "--steps", "3", "--arms", "none", "reset", "none"], "--arms none reset none: none is given twice. Fix"),
    ],
)
def test_wrong_use_is_refused(words: list[str], told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["fork", *words]) == 2
    assert told in caplog.text


@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_equal_arms_are_equal_to_the_bit(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third arm says what is so already, and is killed.  The reset arm begins with a KL of 0; the others do not.

    The checkpoint is not that of step 2, after whose reset another one changes nothing.
    """
    same = "trainer.grpo.clip_high=0.4"
    words = ["fork", str(undisturbed), "--checkpoint", "4", "--arms", "none", "reset", same, "--steps", "4"]
    for which in ("newest", "best"):
        assert cli.main(["fork", str(undisturbed), "--checkpoint", which, "--steps", "3", "--dry-run"]) == 0
        assert capsys.readouterr().out.count("prorl train --config") == 2
    arms = [tmp_path / fork.arm_of(arm, parent(undisturbed)).name for arm in words[5:8]]
    command = [sys.executable, "-m", "nemo_prorl.cli", *words, "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=end_with_session) as process:  # noqa: PLW1509  only prctl
        Deadline(900, "step 3 of the third arm").wait_until(lambda: len(metrics_of(arms[2])) >= 3, every=0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        for one in (process, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    psutil.wait_procs(family, timeout=60)
    assert finished_step(arms[2], 4) is None
    assert cli.main([*words, "--out", str(tmp_path)]) == 0
    none, reset, again = map(read_ledger, arms)
    assert len(again) == 4
    assert parting(none, again) is None
    found: Any = parting(none, reset)
    assert (found.step, found.phase) == (1, "trainer")
    assert "+0.0000" in capsys.readouterr().out.splitlines()[-2]


def parent(run: Path) -> Any:
    return settings.read_config(run / "config.yaml")
