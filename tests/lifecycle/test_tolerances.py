"""Differences that are rounding, by precision."""

from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.errors import ResetFailure
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm, kl_after_reset
from tests.lifecycle.parts import Parts

pytestmark = pytest.mark.starts

H100 = ["cluster=h100_4x8", "data=laptop", "pretrained_checkpoint.restore_from_path=null"]


@pytest.mark.parametrize(
    ("overrides", "reset", "alarm"),
    [
        (["cluster=laptop"], 1e-5, 1e-3),
        (["cluster=laptop", "rollout.dtype=bfloat16"], 1e-5, 0.05),
        ([*H100, "model.fp8=null"], 1e-4, 0.05),
        ([*H100, "model.fp8=hybrid"], 1e-3, 0.1),
        ([*H100, "trainer.resets.kl_after_reset=0.5", "trainer.grpo.correction.alarm=0.25"], 0.5, 0.25),
        (["cluster=laptop", "trainer.resets.kl_after_reset=0"], 0.0, 1e-3),
    ],
)
def test_what_is_rounding_depends_on_the_precision(
    overrides: list[str], reset: float, alarm: float, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    overrides = [*overrides, f"run_dir={tmp_path / 'run'}"]
    cfg = settings.load(overrides)
    assert (kl_after_reset(cfg), engine_gap_alarm(cfg)) == (reset, alarm)
    assert cli.main(["plan", *overrides]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("differences")]
    assert f"policy to reference after a reset {reset:g} per token" in line
    assert f"differ by more than {alarm:g}" in line


def test_the_step_after_a_reset_is_held_to_it(tmp_path: Path) -> None:
    Parts(tmp_path, gap_allowed=1e-4).resets.check_reference(1, 9e-5)
    with pytest.raises(ResetFailure, match="differ by 0.0002 .*at most 0.0001 .trainer.resets.kl_after_reset"):
        Parts(tmp_path, gap_allowed=1e-4).resets.check_reference(1, 2e-4)
