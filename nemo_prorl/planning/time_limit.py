"""The time limit of a stage's Slurm job: the value of sbatch's --time, and the number of starts that the job needs.

slurm/stage.sbatch stops the run `STOP_S` before its limit, with a checkpoint, and requeues the job under the same
number.  So a limit below a stage's duration costs starts, not results.
"""

import math

MOST_S = 24 * 3600  # the limit in slurm/stage.sbatch
STOP_S = 600  # its --signal, seconds before the limit
ROUND_S = 1800
SHORTER_S = (12 * 3600, 4 * 3600)  # usual limits of partitions, as examples
MARGIN_ESTIMATED, MARGIN_MEASURED = 2.0, 1.25  # factor for hours that are estimated, or measured or given


def starts(seconds: float, startup_s: float, limit_s: float) -> int | None:
    """Return how many starts of a job with this limit a stage takes; None if a start is too short for its beginning.

    Args:
        seconds: duration of the stage's steps.
        startup_s: seconds until a run begins its first step (trainer.deadlines.startup_s).
    """
    useful = limit_s - startup_s - STOP_S
    return math.ceil(seconds / useful) if useful > 0 else None


def time_limit(seconds: float, startup_s: float) -> int:
    """Return the limit in seconds for a stage in one start, in half hours; at most that of the batch script."""
    return min(MOST_S, math.ceil((seconds + startup_s + STOP_S) / ROUND_S) * ROUND_S)


def slurm_format(seconds: float) -> str:
    """Return seconds as Slurm writes them: HH:MM:SS."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
