"""A model is built and trained with each choice of the keys that NeMo and Megatron dispatch on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.policy.choice_ranks import ALIKE, CHOICES
from tests.policy.started import run_choice_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nemo, pytest.mark.timeout(900)]


Found = dict[tuple[str, Any], dict[str, Any]]  # what was built and how it trained, by key and choice


@pytest.fixture(scope="module")
def found(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = run_choice_ranks(root, tmp_path_factory.mktemp("choices"))
    return {one: json.loads((out / f"{number}.json").read_text()) for number, one in enumerate(CHOICES)}


def test_each_choice_trains_in_its_own_way(found: Found) -> None:
    """The weights after an update differ, but where two names mean the same."""
    for key in dict.fromkeys(key for key, _ in CHOICES):
        trained = {choice: found[key, choice]["sha256"] for choice in of(key)}
        same = {choice: ALIKE[choice] for choice in trained if key == "trainer.precision" and choice in ALIKE}
        assert all(trained[choice] == trained[other] for choice, other in same.items()), (key, trained)
        assert len(set(trained.values())) == len(trained) - len(same), (key, trained)


def of(key: str) -> list[Any]:
    return [choice for name, choice in CHOICES if name == key]


def test_precision_is_that_of_the_weights(found: Found) -> None:
    for choice in of("trainer.precision"):
        kind = "torch.bfloat16" if str(choice).startswith("bf16") else "torch.float32"
        assert found["trainer.precision", choice]["weights"] == [kind]


def test_the_parts_of_the_model_are_those_that_are_named(found: Found) -> None:
    parts = {
        ("model.normalization", "rmsnorm"): "RMSNorm",
        ("model.position_embedding_type", "rope"): "RotaryEmbedding",
        ("model.activation", "fast-swiglu"): "MLP",
        ("model.optim.name", "mcore_distributed_optim"): "McoreDistributedOptimizer",
    }
    assert {one for one in CHOICES if not one[0].startswith(("trainer.", "model.fp8"))} == set(parts)
    for one, part in parts.items():
        assert part in [*found[one]["modules"], found[one]["optimizer"]]


def test_fp8_rounds_by_its_recipe(found: Found) -> None:
    """Both formats round alike in the forward pass."""
    in_bf16 = found["trainer.precision", "bf16"]["logp"]
    hybrid, e4m3 = (found["model.fp8", choice]["logp"] for choice in ("hybrid", "e4m3"))
    current, delayed = (found["model.fp8_recipe", choice]["logp"] for choice in ("tensorwise", "delayed"))
    assert hybrid == e4m3 == current
    assert len({in_bf16, current, delayed}) == 3
