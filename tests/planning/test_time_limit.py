"""--time of a stage's job: its format, the starts that a shorter limit costs, and the batch script's numbers."""

import re
from pathlib import Path

import pytest

from nemo_prorl.planning.time_limit import MOST_S, STOP_S, slurm_format, starts, time_limit

HOUR = 3600.0


def test_the_numbers_are_those_of_the_batch_script(root: Path) -> None:
    script = (root / "slurm" / "stage.sbatch").read_text()
    assert re.findall(r"^#SBATCH --time=(\S+)$", script, re.MULTILINE) == [slurm_format(MOST_S)]
    assert re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE) == [str(STOP_S)]


@pytest.mark.parametrize(
    ("hours", "limit", "count"),
    [
        (0.1, "01:00:00", 1),  # 6 minutes, and 30 to begin and to stop
        (0.5, "01:00:00", 1),
        (0.51, "01:30:00", 1),
        (23.5, "24:00:00", 1),
        (23.6, "24:00:00", 2),
        (48.0, "24:00:00", 3),
    ],
)
def test_a_stage_s_limit_is_at_most_the_script_s(hours: float, limit: str, count: int) -> None:
    found = time_limit(hours * HOUR, 1200.0)
    assert slurm_format(found) == limit
    assert starts(hours * HOUR, 1200.0, found) == count


def test_each_start_loses_its_beginning_and_its_end() -> None:
    assert starts(10.5 * HOUR, 1200.0, 4 * HOUR) == 3
    assert starts(10.6 * HOUR, 1200.0, 4 * HOUR) == 4
    assert starts(10.6 * HOUR, 3000.0, HOUR) is None  # no time is left for a step
