"""How the parts of the real actor are wired: what an update does in which order, and what a save and a load do."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.policy.measure_wiring import LOST, OTHER_LR
from tests.policy.ranks import CLOSER, DATA_PARALLEL, MOST_CUT, Layout

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]


def names(quick: list[Layout]) -> Any:
    """All of CLOSER; those that are not `quick` are slow."""
    slow = [pytest.param(x, id=x.name, marks=pytest.mark.slow) for x in CLOSER if x not in quick]
    return pytest.mark.parametrize("layout", [*(pytest.param(x, id=x.name) for x in quick), *slow])


layouts = names([DATA_PARALLEL, MOST_CUT])
two_ranks = names([DATA_PARALLEL])  # checkpoints of these layouts are compared in test_layouts.py
Found = dict[str, Any]


@pytest.fixture
def found(layout: Layout, measured: Callable[[str], Found]) -> Found:
    of_layout: Found = measured(layout.name)["wired"]
    return of_layout


@layouts
def test_sums_are_of_all_data_ranks(layout: Layout, found: Found) -> None:
    sums, two = found["sums"], layout.dp == 2
    wanted = {"a": 3.0, "max_b": 2.0, "min_c": 1.0} if two else {"a": 1.0, "max_b": 2.0, "min_c": 1.0}
    assert sums["reduce_sums"] == wanted
    assert sums["reduce"] == wanted | {"tokens": 3.0 * layout.dp}
    assert sums["gather"] == list(range(layout.dp))
    assert sums["sum"] == layout.dp * (1 + 2**-40)
    assert sums["most"] == layout.dp - 1


@layouts
def test_an_update_after_a_reset_moves_weights_by_the_learning_rate_of_the_step(layout: Layout, found: Found) -> None:
    """Adam's first step has that size wherever there is a gradient, and up to 2 % more by weight decay."""
    for update in found["updates"]:
        assert update["empty"]
        assert update["versions"] == 1
        assert list(update["moved"].values()) == pytest.approx([OTHER_LR] * len(update["moved"]), rel=0.03)


@layouts
def test_a_gradient_is_clipped_to_the_norm_over_all_ranks(layout: Layout, found: Found) -> None:
    assert [update["clip"] for update in found["updates"]] == [1.0, 0.25, 1e6, 0.0]
    assert all(update["norm"] > 0.3 for update in found["updates"])
    for update in found["updates"] if layout != MOST_CUT else ():  # whose ranks hold some parameters twice
        wanted = min(update["norm"], update["clip"] or update["norm"])
        assert update["first moment"] == pytest.approx(0.1 * wanted, rel=1e-3)


@layouts
def test_an_update_that_is_not_finite_on_one_data_rank_is_made_on_none(layout: Layout, found: Found) -> None:
    refused = dict(found["refused"])
    assert refused.pop("nothing") == [(None, False)] * layout.world
    assert refused.keys() == {"gradient", "loss", "log-probability"}
    for what, told in refused.items():
        assert told == [("NonFiniteUpdate", True)] * layout.world, what


@two_ranks
def test_an_update_after_refused_ones_has_the_effect_that_it_has_without_them(layout: Layout, found: Found) -> None:
    """Moments, steps, weights and what the update returns are the same to the bit."""
    assert found["after refused"] == [(["NonFiniteUpdate"] * 3, [True] * 3, True)] * layout.world


@layouts
def test_a_flipped_bit_of_any_rank_changes_the_digest_of_its_object_and_layer(layout: Layout, found: Found) -> None:
    """In 32 bits the optimizer's weights are those in use."""
    digests = found["digests"]
    assert digests["again"]
    assert digests["as before"]
    assert min(digests["layers"]) >= 3
    for name in ("gradient", "moments", "masters"):
        changed, layers = digests[name]
        assert set(changed) - ({"weights"} if name == "masters" else set()) == {name}
        assert layers == 1


@layouts
def test_an_update_has_the_temperature_that_is_given(layout: Layout, found: Found) -> None:
    losses = {given: update for given, _, update in found["temperatures"]}
    assert all(update == wanted for _, wanted, update in found["temperatures"])
    assert len(set(losses.values())) == 3  # weights move meanwhile


@two_ranks
def test_each_rank_goes_on_with_its_own_random_states(layout: Layout, found: Found) -> None:
    drawn = found["drawn"]
    assert all(wanted == again for wanted, again in drawn)
    assert len({str(wanted) for wanted, _ in drawn}) == layout.world


@two_ranks
def test_a_checkpoint_has_the_state_of_its_save(layout: Layout, found: Found) -> None:
    assert found["state"] == (5, {"a": 1})


@two_ranks
def test_the_first_rank_is_called_once_the_folder_has_its_name(layout: Layout, found: Found) -> None:
    assert found["called"] == [[(True, False, "checkpoint")], *[[]] * (layout.world - 1)]


@two_ranks
def test_a_drain_waits_as_long_as_it_may(layout: Layout, found: Found) -> None:
    still_writing, in_time, later = found["drained"]
    assert still_writing
    assert in_time
    assert not later


@two_ranks
def test_weights_that_are_loaded_are_another_version(layout: Layout, found: Found) -> None:
    """One update, two loads of weights for `load`, one for `load_policy`: engines compare it with what they have."""
    assert found["versions"] == [3, 4]


@two_ranks
def test_a_save_that_is_waited_for_copies_nothing_in_host_memory(layout: Layout, found: Found) -> None:
    assert found["copied in the foreground"] == [[0]] * layout.world


@two_ranks
def test_a_checkpoint_that_was_changed_is_refused_by_all_ranks(layout: Layout, found: Found) -> None:
    words = {
        "weights: load": "the weights policy was changed after the save: expected sha256 000",
        "weights: load_policy": "the weights policy was changed after the save: expected sha256 000",
        "reference: load": "the reference policy was changed after the save: expected sha256 000",
        "reference: load_policy": "",  # which takes the policy alone
        "random states: load": ".pt was refused: expected tensors and plain values",
        "random states: load_policy": "",
        "a parameter: load": "the checkpoint has no parameter decoder.layers.0.",
        "a parameter: load_policy": "the checkpoint has no parameter decoder.layers.0.",
    }
    assert LOST.endswith("layer_norm_weight")
    assert found["failed"].keys() == words.keys()
    for name, told in found["failed"].items():
        for text in told:
            assert words[name] in text, name
            assert bool(text) == bool(words[name]), name


@two_ranks
def test_a_new_reference_takes_the_memory_of_the_last_once_nobody_reads_that(layout: Layout, found: Found) -> None:
    assert found["held"] == {"after a failure": True, "beside a reader": False, "after all readers": True}


@two_ranks
def test_a_snapshot_is_taken_after_the_write_before(layout: Layout, found: Found) -> None:
    """Two at a time would take twice the host memory."""
    assert found["in turn"] == [False, False]
