"""Checkpoints of what a model keeps beside its parameters: the optimizer's state, and modules' own (FP8's scales).

`LazyAdam` stands for Transformer Engine's FusedAdam: it keeps its state as that does, inside Megatron's own distributed
optimizer on two data ranks.  An attention that counts its passes stands for FP8 with delayed scales.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]
KINDS = ["torch", "lazy"]


def written(ranks: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(ranks / f"adam-{name}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("moment", ["before any step", "after steps", "after a reset"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_any_moment_goes_on_to_the_bit(kind: str, moment: str, ranks: Path) -> None:
    found = written(ranks, f"of_one_adam-{kind}")[moment]
    assert isinstance(found, list), found
    onward, again = found
    assert onward == again


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_steps_are_counted_from_0(kind: str, ranks: Path) -> None:
    assert written(ranks, f"of_one_adam-{kind}")["counts"] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_other_adam_goes_on(kind: str, ranks: Path) -> None:
    """The same moments and step count, so the same update but for rounding."""
    found = written(ranks, f"across-{kind}")["as it was"]
    assert isinstance(found, list), found
    _, loaded, norm, steps, weights = found
    assert (loaded, steps) == ([2], [3])
    wanted_norm, _ = written(ranks, f"of_one_adam-{'torch' if kind == 'lazy' else 'lazy'}")["after steps"][0]
    assert norm == pytest.approx(wanted_norm, rel=1e-6)
    *_, other = written(ranks, f"across-{'torch' if kind == 'lazy' else 'lazy'}")["as it was"]
    for name, value in other.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_configured_settings_win_over_those_of_a_checkpoint(kind: str, ranks: Path) -> None:
    as_it_was, configured = (written(ranks, f"across-{kind}")[name] for name in ("as it was", "configured"))
    assert set(as_it_was[0]) == {(0.01, (0.9, 0.999), 1e-8)}
    assert set(configured[0]) == {(0.5, (0.5, 0.9), 1e-5)}


def test_a_state_beside_the_parameters_is_saved_and_loaded(ranks: Path) -> None:
    found = written(ranks, "of_extra_state-torch")
    assert found["loaded"] == found["saved"]
    assert found["later"] != found["saved"]
    onward, again = found["goes on"]
    assert onward == again


def test_a_checkpoint_without_such_a_state_loads_into_a_model_with_one_and_back(ranks: Path) -> None:
    found = written(ranks, "of_extra_state-torch")
    assert "Error" not in found["without"]
    assert found["into one without"] == found["goes on"][0]


def test_a_damaged_file_is_found_and_the_message_has_the_fix(ranks: Path) -> None:
    found = written(ranks, "of_extra_state-torch")
    for how, what in (("flipped", "the weights policy was changed after the save"), ("cut", "its tensors cannot be")):
        assert found[how].startswith("DamagedCheckpoint: "), found[how]
        assert what in found[how]
        assert f"Fix: mv {ranks}/{how} {ranks}/{how}.damaged; the same command" in found[how]


def test_the_model_itself_is_told_whether_it_trains(ranks: Path) -> None:
    """Dropout and recomputation ask the modules, which NeMo hides from `model.eval()`."""
    assert written(ranks, "of_extra_state-torch")["modes"] == [(False, False), (True, True)]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(ranks: Path) -> None:
    """A machine that loses power leaves a whole checkpoint, or none.  The files are those of rank 0."""
    done = written(ranks, "of_one_adam-torch")["disk"]
    named = done.index(("named", "flushed"))
    before = {name for what, name in done[:named] if what == "flushed"}
    assert before >= {"__0_0.distcp", "rng-0.pt", "common.pt", "metadata.json", "state.json", "flushed.tmp"}
    assert ("flushed", "torch") in done[named:]  # the folder that has the name
