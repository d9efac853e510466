"""The parts of a run that validate, reset and record, in one process; `small_run` has all parts of a run.

Engines, rewards and checkpoints are not there.
"""

from pathlib import Path
from typing import Any

from nemo_prorl.config import Config, DeadlinesConfig, ResetsConfig
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle.checkpoints import Checkpoints
from nemo_prorl.lifecycle.resets import Resets
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.lifecycle.validation import Validation
from tests.lifecycle.small_run import SmallPolicy


def leader() -> Leader:
    """Return the leader of a single rank."""
    return Leader(DeadlinesConfig(), data_rank=0)


class NoCheckpoints(Checkpoints):
    """Stands in for checkpoints that are written at once and none of which is kept."""

    def __init__(self) -> None: ...
    def save(self, step: int, wait: bool = False) -> None: ...
    def wait(self) -> None: ...
    def has(self, step: int) -> bool:
        return False

    def load_policy(self, step: int) -> None:
        raise AssertionError(step)


class Parts:
    """Records, validation and resets of a run directory."""

    def __init__(self, folder: Path, config: ResetsConfig | None = None, gap_allowed: float = 0.0) -> None:
        folder.mkdir(exist_ok=True)
        policy = SmallPolicy(temperature=1.0)
        nothing: Any = None
        self.records = Records(Config(stage="none"), folder, writes=True)
        self.validation = Validation(Config(), nothing, nothing, self.records)
        self.resets = Resets(
            config=config or ResetsConfig(),
            gap_allowed=gap_allowed,
            policy=policy,
            rollouts=nothing,
            validation=self.validation,
            records=self.records,
            leader=leader(),
        )
