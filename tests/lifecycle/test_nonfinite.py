"""Updates that are not finite: skipped and told, a few in a row end the run, and a killed run is equal."""

from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import NonFiniteUpdate
from tests.lifecycle.faults import infinite_in
from tests.lifecycle.small_run import SmallRun, config


def whole(folder: Path, monkeypatch: pytest.MonkeyPatch, updates: set[tuple[int, int]], **grpo: Any) -> SmallRun:
    run = SmallRun(config(folder, **{"max_steps": 9, "checkpoint_every": 1, **grpo}))
    run.process(monkeypatch, infinite_in(run, updates))
    return run


def skipped(run: SmallRun) -> list[str]:
    return [alarm.split(":")[1].strip() for alarm in run.alarms() if "an update was skipped" in alarm]


def test_an_update_that_is_not_finite_is_skipped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice two in a row, with a finite update between them: the count goes back to 0, and the run ends as usual."""
    run = whole(tmp_path, monkeypatch, {(3, 0), (3, 1), (7, 0), (7, 1)})
    assert skipped(run) == [f"an update was skipped ({number} in a row)" for number in (1, 2, 1, 2)]
    lines = run.lines()
    assert len(lines) == 9
    assert [line["step"] for line in lines if "policy/max_skipped" in line] == [3, 7]
    (told, *_) = [alarm for alarm in run.alarms() if "an update was skipped" in alarm]
    assert told.endswith("; its batch is batches/step-000003.safetensors")
    assert (run.folder / "batches" / "step-000003.safetensors").is_file()
    assert [line["policy/max_skipped"] for line in lines if "policy/max_skipped" in line] == [2, 2]
    assert [line["step"] for line in lines if "policy/loss" not in line] == [3, 7]


def test_a_skipped_update_changes_neither_weights_nor_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(tmp_path, monkeypatch, {(3, 0), (3, 1)})
    assert run.engines.published[2] == run.engines.published[3] != run.engines.published[4]


def test_a_number_in_a_row_ends_the_run_also_across_steps_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third in a row is the first update of step 8; the run continues from step 7, and ends in the same way."""
    poisoned = {(7, 0), (7, 1), (8, 0)}
    for _ in range(2):
        with pytest.raises(NonFiniteUpdate, match=r"3 in a row \(trainer.grpo.max_nonfinite_updates\)"):
            whole(tmp_path, monkeypatch, poisoned)
    run = whole(tmp_path, monkeypatch, poisoned, max_nonfinite_updates=4)
    assert len(run.lines()) == 9


def test_a_run_that_was_stopped_between_two_skipped_updates_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned = {(6, 1), (7, 0), (7, 1)}
    most: dict[str, Any] = {"max_nonfinite_updates": 4}
    undisturbed = whole(tmp_path / "undisturbed", monkeypatch, poisoned, **most)
    whole(tmp_path / "stopped", monkeypatch, poisoned, max_steps=6, **most)
    stopped = whole(tmp_path / "stopped", monkeypatch, poisoned, **most)
    assert skipped(stopped)[-1] == skipped(undisturbed)[-1] == "an update was skipped (3 in a row)"
    assert stopped.policy.weights_sha256() == undisturbed.policy.weights_sha256()
