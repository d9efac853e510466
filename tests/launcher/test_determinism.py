"""The environment of a deterministic run's processes on GPUs."""

from pathlib import Path

import pytest

from nemo_prorl import settings
from nemo_prorl.launcher.processes import Child, MergedLog
from nemo_prorl.launcher.supervisor import NodeSupervisor

H100 = ["cluster=h100_4x8", "data=laptop", "pretrained_checkpoint.restore_from_path=null", "trainer.num_nodes=1"]
WANTED = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS",
    "VLLM_BATCH_INVARIANT": "1",
}


def started(folder: Path, *overrides: str) -> tuple[Child, Child]:
    """A rank and an engine, as they would be started."""
    cfg = settings.load([*overrides, f"run_dir={folder}"])
    node = NodeSupervisor(cfg, folder, ["math"], MergedLog(folder / "all.log"))
    return node._ranks(None)[0], node.services(folder / "weights")[1]


def chosen(child: Child) -> dict[str, str]:
    return {name: child.env[name] for name in WANTED if name in child.env}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WANTED:
        monkeypatch.delenv(name, raising=False)


def test_ranks_and_engines_are_started_with_what_their_libraries_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, engine = started(tmp_path, *H100, "rollout.engines=8", "deterministic=true")
    assert chosen(engine) == {"VLLM_BATCH_INVARIANT": "1"}
    assert chosen(rank) == {name: value for name, value in WANTED.items() if name != "VLLM_BATCH_INVARIANT"}
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    rank, _ = started(tmp_path, *H100, "rollout.engines=8", "deterministic=true")
    assert (rank.env["NCCL_ALGO"], rank.env["NVTE_ALLOW_NONDETERMINISTIC_ALGO"]) == ("Ring", "0")


@pytest.mark.parametrize("overrides", [[*H100, "rollout.engines=8"], ["cluster=laptop", "deterministic=true"]])
def test_others_are_started_without(tmp_path: Path, overrides: list[str]) -> None:
    assert [chosen(child) for child in started(tmp_path, *overrides)] == [{}, {}]
