"""What is wrong with data, rewards or the machine is said before any engine or rank starts."""

import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import __version__, cli
from nemo_prorl.cautions import cautions
from nemo_prorl.errors import (
    DAMAGED,
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    DataError,
    ProrlError,
    UnfitMachine,
)
from nemo_prorl.launcher.doctor import storage
from nemo_prorl.launcher.one_node import StillInUse, locked, run
from nemo_prorl.launcher.prepare import prepare, run_dir_fault, start_faults
from nemo_prorl.lifecycle.retention import FORMAT
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
from nemo_prorl.settings import load, resolved_yaml
from nemo_prorl.sizing.memory import memory_of

PARTS = ("train", "validation")
GOOD = {"id": "a-1", "task": "math", "prompt": "Compute 1 + 1.", "truth": {"answer": "2"}, "source": "s", "meta": {}}


def prepared(tmp_path: Path, lines: list[str] | None = None, *overrides: str) -> list[str]:
    """Runs the checks on a file of prompt records; the run directory is tmp_path/run."""
    chosen = [f"rollout.python={sys.executable}", f"run_dir={tmp_path / 'run'}", *overrides]
    if lines is not None:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(line + "\n" for line in lines))
        source = f"{{name: mine, path: {file}}}"
        chosen += [f"data.train=[{source}]", "data.validation=[]"]
    cfg = load(chosen)
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    return prepare(cfg, run_dir, resolved_yaml(cfg))


def record(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def test_a_good_file_makes_the_first_model_and_says_its_tasks(tmp_path: Path) -> None:
    records = [record(), record(id="a-2", prompt="Compute 2 + 2.", truth={"answer": "4"})]
    assert prepared(tmp_path, records) == ["math", "math_second"]  # with the task of its second verifier
    assert (tmp_path / "run" / "init" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_fewer_records_than_a_step_takes_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(tmp_path, [record(), record(id="a-2", prompt="2?")])
    assert "data.train has 2 records, so a step (trainer.grpo.prompts_per_step=48) takes each about 24.0" in caplog.text


def test_what_a_failed_start_made_is_made_anew(tmp_path: Path) -> None:
    """Its tokenizer knows the words of other data."""
    walruses = [record(id=f"a-{k}", prompt=f"Count {k} walrus.") for k in range(200)]
    with pytest.raises(DataError, match="leaves no room"):
        prepared(tmp_path, [*walruses, record(id="b", prompt="Compute 1 + 1. " * 30)])
    assert "walrus" in (tmp_path / "run" / "init" / "tokenizer.json").read_text()
    prepared(tmp_path, [line.replace("walrus", "penguin") for line in walruses])
    assert "walrus" not in (tmp_path / "run" / "init" / "tokenizer.json").read_text()


def test_a_start_removes_no_folder_that_no_start_made(tmp_path: Path) -> None:
    init = tmp_path / "run" / "init"
    init.mkdir(parents=True)
    (init / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="run/init is not the model of a run; a start would remove it. Fix: run_dir="):
        prepared(tmp_path, [record()])
    assert (init / "thesis.tex").is_file()
    shutil.rmtree(init)
    prepared(tmp_path, [record()])
    (tmp_path / "run" / "config.yaml").unlink()
    prepared(tmp_path, [record()], f"pretrained_checkpoint.restore_from_path={init}")  # the user's model, now
    assert (init / "model.safetensors").is_file()


def test_a_start_cleans_and_checks_the_checkpoints_of_the_start_before(tmp_path: Path) -> None:
    prepared(tmp_path, [record()])
    assert (tmp_path / "run" / "endpoints").stat().st_mode & 0o777 == 0o700  # the token is in it
    checkpoints = tmp_path / "run" / "checkpoints"
    for name, version in (("step-000001", __version__), ("step-000002.tmp", "")):
        (checkpoints / name).mkdir()
        (checkpoints / name / "state.json").write_text(json.dumps({"format": FORMAT, "version": version}))
    prepared(tmp_path, [record()], "chain.start_from=/gone")  # it goes on with its own checkpoint
    assert [folder.name for folder in checkpoints.iterdir()] == ["step-000001"]
    (tmp_path / "next").mkdir()
    prepared(tmp_path / "next", [record()], f"chain.start_from={checkpoints / 'step-000001'}", "seed=5")
    models = [folder / "run" / "init" / "model.safetensors" for folder in (tmp_path, tmp_path / "next")]
    assert models[0].read_bytes() == models[1].read_bytes()  # taken over, not made with the other seed
    (checkpoints / "step-000001" / "state.json").write_text(json.dumps({"format": FORMAT, "version": "0.0.1"}))
    with pytest.raises(CheckpointError, match="was written by version 0.0.1"):
        prepared(tmp_path, [record()])


def test_a_job_sets_a_damaged_checkpoint_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, [record()])
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step-000001", "step-000002"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "state.json").write_text(json.dumps({"format": FORMAT, "version": __version__}))
    (checkpoints / "step-000002" / "state.json").write_text("")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(DamagedCheckpoint):
        prepared(tmp_path, [record()])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    prepared(tmp_path, [record()])
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", f"step-000002{DAMAGED}"]


def test_a_full_disk_does_not_empty_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path, [record()])
    before = (tmp_path / "run" / "config.yaml").read_text()
    real = Path.write_text

    def full(self: Path, text: str, *args: Any, **more: Any) -> int:
        if "config.yaml" not in self.name:
            return real(self, text, *args, **more)
        real(self, "", *args, **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        prepared(tmp_path, [record()])
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_changes_of_a_continued_run_are_in_its_journal(tmp_path: Path) -> None:
    def events() -> list[tuple[str, int, str]]:
        return [(event["event"], event["step"], event["what"]) for event in Journal(tmp_path / "run").events()]

    prepared(tmp_path, [record()])
    prepared(tmp_path, [record()], "trainer.resets.every=30")  # nothing was trained yet
    assert events() == []
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "version": __version__}))
    more = ["trainer.resets.mode=auto", "trainer.grpo.max_steps=150", "exp_manager.create_wandb_logger=false"]
    prepared(tmp_path, [record()], *more)
    assert events() == [
        (
            "change",
            7,
            "trainer.grpo.max_steps=150 (was 120), trainer.resets.every=None (was 30), trainer.resets.mode=auto (was"
            " advise)",
        )
    ]
    prepared(tmp_path, [record()], *more)
    assert len(events()) == 1


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("trainer.grpo.loss", "def own(logp, old, A, mask, c): return -logp * A", "direction: at ratio 1, "),
        ("trainer.grpo.advantage", "def own(centred, reward, valid): return -centred", "better: the best response"),
        (
            "rewards.functions.units",
            "def own(prompt, response): ...",
            "expected a function of .prompt, response, truth",
        ),
    ],
)
def test_a_wrong_function_of_the_user_is_refused(key: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"{key}.*own.py:own: (?s:.*){told}"):
        prepared(tmp_path, [record()], f"{key}={tmp_path}/own.py:own")
    assert not (tmp_path / "run" / "init").exists()


def test_validation_is_judged_too_and_code_needs_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_works(unsafe_no_sandbox: bool) -> None:
        if not unsafe_no_sandbox:
            raise UnfitMachine("no sandbox works here")

    monkeypatch.setattr("nemo_prorl.rewards.judging.check_sandbox", none_works)
    paths = [tmp_path / "train.jsonl", tmp_path / "held.jsonl"]
    paths[0].write_text(record() + "\n")
    words = [f"data.{part}=[{{name: {part}, path: {path}}}]" for part, path in zip(PARTS, paths, strict=True)]
    paths[1].write_text(record(id="v", prompt="1?", task="chess") + "\n")
    with pytest.raises(ConfigError, match="no reward plugin judges task 'chess'"):
        prepared(tmp_path, None, *words)
    truth = {"asserts": ["assert f() == 1"]}
    paths[1].write_text(record(id="v", prompt="Compute 1.", task="code", truth=truth) + "\n")
    with pytest.raises(UnfitMachine, match="no sandbox works here"):
        prepared(tmp_path, None, *words)
    assert "code" in prepared(tmp_path, None, *words, "rewards.unsafe_no_sandbox=true")


def test_too_small_a_context_names_source_and_key(tmp_path: Path) -> None:
    """The tokenizer of the laptop job is made for data.train, so the shipped validation prompts are longer with it."""
    Path(tmp_path / "mine.jsonl").write_text(record(prompt="zzz qqq") + "\n")
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, None, f"data.train=[{{name: mine, path: {tmp_path / 'mine.jsonl'}}}]")
    text = str(caught.value)
    assert "data.validation, source 'chain_sum': 96 of 96 prompts; the longest, record 'heldout-chain_sum-" in text
    assert "source 'mine'" not in text
    assert "The tokenizer was made for data.train" in text
    assert "Fix: trainer.grpo.context_tokens above 1" in text
    assert "or data.validation=[]" in text


def test_too_little_room_is_a_warning_of_the_doctor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_prorl.launcher.doctor.storage._shm_free", lambda: 1000)
    prepared(tmp_path, [record(id=f"a-{k}") for k in range(48)])
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len([text for text in warnings if text.startswith("shm: ") and ". Fix: " in text]) == 1


def test_the_weights_of_a_killed_start_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start removes them after the check."""
    cfg = load([f"run_dir={tmp_path / 'run'}"])
    needed = memory_of(cfg).published
    monkeypatch.setattr(storage, "_shm_free", lambda: 600_000_000)

    def state() -> str:
        return next(check.state for check in storage.check_storage(cfg) if check.name == "shm")

    assert (needed < 100_000_000, state()) == (True, "pass")
    monkeypatch.setattr(storage, "_shm_free", lambda: needed - 1)
    assert state() == "fail"
    store = WeightStore(weights_folder(tmp_path / "run"))
    try:
        store.path_of(1).write_bytes(bytes(1000))
        assert state() == "warn"  # no longer a failure; 0.5 GB for other programs are missing
    finally:
        store.remove()


def test_the_start_says_how_much_disk_the_checkpoints_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = load([f"run_dir={tmp_path / 'run'}", "rollout.python=/nowhere/python"])
    expected = memory_of(cfg).checkpoints / 1e9
    with caplog.at_level("INFO"), pytest.raises(UnfitMachine):
        run(cfg, "")
    assert f"{tmp_path / 'run'}; its checkpoints take up to {expected:.1f} GB" in caplog.text


@pytest.mark.parametrize(
    ("lines", "error", "told"),
    [
        ([record(), "{broken"], DataError, ["prompts.jsonl", "2"]),
        ([record(), json.dumps({k: v for k, v in GOOD.items() if k != "truth"})], DataError, ["2", "truth"]),
        ([], DataError, ["prompts.jsonl"]),
        ([record(prompt="1 " * 200)], DataError, ["a-1", "64", "trainer.grpo.context_tokens"]),
        (
            [record(), "", record(id="c", task="chess")],
            ProrlError,
            ["prompts.jsonl:3: source 'mine', record 'c': no reward plugin judges task 'chess'", "math", "puzzles"],
        ),
        (
            [
                record(),
                record(id="i-1", task="instructions", truth={"instruction_id_list": ["no:such"], "kwargs": [{}]}),
            ],
            DataError,
            ["prompts.jsonl:2: source 'mine', record 'i-1': ", "no:such"],
        ),
    ],
    ids=["malformed line", "missing field", "empty file", "long prompt", "unknown task", "unknown instruction"],
)
def test_bad_data_is_named(tmp_path: Path, lines: list[str], error: type[ProrlError], told: list[str]) -> None:
    with pytest.raises(error) as caught:
        prepared(tmp_path, lines)
    for text in told:
        assert text in str(caught.value)
    assert caught.value.exit_code in (2, 4)
    assert not (tmp_path / "run" / "endpoints").exists()  # nothing was started


def test_the_folder_of_a_model_is_no_run_directory(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    cfg = load([f"run_dir={tmp_path}"])
    assert "config.json, model.safetensors. `prorl train` writes" in next(cautions(cfg))
    assert any(f"run_dir={tmp_path}: it is the folder of a model. Fix" in str(error) for error, _ in start_faults(cfg))
    (tmp_path / "config.yaml").touch()
    assert run_dir_fault(tmp_path) is None


WRONG = {
    "field": ([record(prompt=3)], [], 4, "field 'prompt' is 3"),
    "truth": (
        [record(id="i", task="instructions", truth={"instruction_id_list": ["a:b"], "kwargs": [{}]})],
        [],
        4,
        "a:b",
    ),
    "task": ([record(task="chess")], [], 2, "no reward plugin judges task 'chess'"),
    "tasks": ([record()], ["data.tasks=[code]"], 2, "but not of code"),
    "file": ([record()], ["rewards.functions.units=gone.py:score"], 2, "there is no file"),
    "syntax": ([record()], ["rewards.functions.units=broken.py:score"], 2, "(broken.py, line 1)"),
    "name": ([record()], ["rewards.functions.units=good.py:scare"], 2, "the file has no function scare"),
}


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]], ids="-".join)
@pytest.mark.parametrize("what", WRONG)
def test_what_starts_nothing_finds_the_same_faults(
    command: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines, overrides, code, told = WRONG[what]
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("def score(:\n")
    Path("good.py").write_text("def score(prompt, response, truth):\n    return 1.0\n")
    Path("mine.jsonl").write_text("".join(line + "\n" for line in lines))
    words = ["data.train=[{name: mine, path: mine.jsonl}]", "data.validation=[]", *overrides]
    assert cli.main([*command, *words]) == code
    assert told in caplog.text
    said = caplog.records[-1].getMessage().removeprefix("prorl: ")
    with pytest.raises(ProrlError) as caught:
        prepared(tmp_path, None, *words)
    assert (str(caught.value), caught.value.exit_code) == (said, code)


def test_a_plan_checks_the_files_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text(record() + "\n")
    sources = "[{name: a, path: mine.jsonl}, {name: b, path: gone.jsonl}]"
    words = ["plan", f"data.train={sources}", "data.validation=[]", "data.tasks=[code]"]
    assert cli.main(words) == 2  # of no other reason: the missing file may have the task
    assert "data.train.1.path=gone.jsonl: no such file" in caplog.text
    assert caplog.text.count("would refuse this run") == 1
    Path("mine.jsonl").write_text("{broken\n")
    assert cli.main(words) == 4


@pytest.mark.parametrize("name", ["code.budget", "mth.time_budget_s"])
def test_settings_of_plugins_that_the_run_does_not_use_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        prepared(tmp_path, [record()], f"rewards.plugins.{name}=1")


def test_a_missing_rollout_environment_is_an_unfit_machine(tmp_path: Path) -> None:
    with pytest.raises(UnfitMachine, match=r"rollout\.python.*make setup"):
        prepared(tmp_path, [record()], "rollout.python=/nowhere/python")


def test_more_nodes_than_this_command_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=2"):
        prepared(tmp_path, None, "trainer.num_nodes=2")


@pytest.mark.parametrize(
    ("job", "stop"),
    [
        (None, f", stop it (kill {os.getpid()} on {socket.gethostname()}; it saves its step)"),
        ("77", ", stop it (prorl control RUN stop; it saves its step)"),
    ],
    ids=["by hand", "in a job"],
)
def test_one_process_at_a_time_works_on_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None, stop: str
) -> None:
    """The message says how to end the other, and how to go on beside it."""
    cfg = load([f"run_dir={tmp_path}"])
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    else:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    with locked(tmp_path), pytest.raises(ConfigError) as caught:
        run(cfg, "")
    assert str(caught.value).startswith(f"run_dir={tmp_path} is in use by another process: process {os.getpid()} on ")
    assert f". Fix: wait for its end{stop.replace('RUN', str(tmp_path))}" in str(caught.value)
    assert str(caught.value).endswith(", or set run_dir to another folder")
    with locked(tmp_path), pytest.raises(StillInUse, match=r"still after 0.1 s. Fix: wait"), locked(tmp_path, 0.1):
        pass


def test_a_lock_without_a_name_is_told_without_a_command(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"by another process. Fix: wait for its end, or set run_dir"):
            run(load([f"run_dir={tmp_path}"]), "")
