"""Cores, number formats and settings that a run without GPUs gets by default."""

from pathlib import Path

import pytest

from nemo_prorl import settings
from nemo_prorl.errors import UnfitMachine
from nemo_prorl.planning.overview import run_rows
from nemo_prorl.sizing.cores import Cores, engine_threads
from tests import paper_model


def test_on_a_cpu_ranks_and_engines_have_cores_of_their_own() -> None:
    def cores(there: set[int], *overrides: str) -> Cores | None:
        return Cores.of(settings.load(["cluster=laptop_split", *overrides]), there)

    assert cores({0, 1}, "rollout.own_devices=false") is None
    assert cores({0, 1}) == Cores([[0]], [[1]])
    assert cores({2, 3, 5, 8, 9}) == Cores([[2, 3, 5, 8]], [[9]])
    two = ["trainer.devices=2", "rollout.engines=2", "rollout.threads=2"]
    assert cores(set(range(8)), *two) == Cores([[0, 1], [2, 3]], [[4, 5], [6, 7]])
    assert cores(set(range(5)), *two) == Cores([[0], [0]], [[1, 2], [3, 4]])
    with pytest.raises(UnfitMachine, match="2 engines take 2 cores each .* of 4 cores none is left"):
        cores(set(range(4)), *two)


@pytest.fixture
def large(tmp_path: Path) -> str:
    return f"pretrained_checkpoint.restore_from_path={paper_model.write(tmp_path / 'model')}"


def test_the_engine_of_a_large_model_has_all_cores_while_it_generates(large: str) -> None:
    def threads(cores: int, *overrides: str) -> int:
        return engine_threads(settings.load(list(overrides)), cores)

    assert threads(16) == 1  # the laptop's model
    assert threads(16, large) == 16
    assert threads(16, large, "rollout.engines=2", "rollout.tensor_parallel_size=2") == 4
    assert threads(16, large, "rollout.own_devices=true") == 8
    assert threads(1, large, "rollout.engines=2") == 1
    assert threads(16, large, "rollout.threads=3") == 3


def test_plan_shows_the_cores(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    rows = run_rows(settings.load([large]))
    assert rows["cores"] == "6 here: 6 for each trainer rank, 6 for each engine rank; they take turns"
    rows = run_rows(settings.load([large, "rollout.own_devices=true", "trainer.devices=3"]))
    assert rows["cores"] == "6 here: 1 for each trainer rank, 3 for each engine rank"
    assert "cores" not in run_rows(settings.load(["cluster=h100_4x8", large]))


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ([], "float32"),
        (["rollout.dtype=bfloat16"], "bfloat16"),
        (["cluster=laptop_bf16"], "bfloat16"),
        (["trainer.precision=bf16", "model.megatron_amp_O2=true"], "bfloat16"),
        (["cluster=laptop_bf16", "rollout.dtype=float32"], "float32"),
    ],
)
def test_an_engine_has_the_precision_of_the_trainer(overrides: list[str], dtype: str, large: str) -> None:
    """In bf16 beside float32 it would miss small updates: 0.024 nats of gap became 0.11 in six steps at 2e-5."""
    assert settings.load([large, *overrides]).rollout.dtype == dtype


def test_a_language_model_gets_the_settings_of_one(large: str) -> None:
    toy, real = settings.load([]), settings.load([large])
    assert (toy.trainer.warmup.steps, real.trainer.warmup.steps) == (110, 0)
    assert (toy.model.optim.lr, real.model.optim.lr) == (2e-4, 2e-6)
    assert (toy.trainer.grpo.context_tokens, real.trainer.grpo.context_tokens) == (64, 1024)
    assert settings.load([large, "model.optim.lr=1e-6"]).model.optim.lr == 1e-6
