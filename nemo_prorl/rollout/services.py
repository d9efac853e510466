"""Rank 0's connection to the services of a run: rollout engines and reward servers, found in RUN/endpoints."""

import ctypes
import logging
import os
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_prorl.config import Config
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.connections import allow_connections
from nemo_prorl.rollout.client import EnginePool
from nemo_prorl.rollout.groups import Rollouts
from nemo_prorl.rollout.one_engine import read_token
from nemo_prorl.rollout.prompts import PromptStream
from nemo_prorl.rollout.rollout_settings import RolloutSettings
from nemo_prorl.rollout.supply import Supply

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What rank 0 talks to."""

    rollouts: Rollouts
    supply: Supply  # of batches, from them

    @classmethod
    def connect(cls, cfg: Config, run_dir: Path, prompts: PromptStream, renderer: PromptRenderer) -> "Services":
        """Waits until every engine and a reward server are ready; raises DeadlineExceeded naming what is missing."""
        allow_connections()
        endpoints, token_file = run_dir / "endpoints", run_dir / "endpoints" / "token"
        seconds = cfg.trainer.deadlines.startup_s
        for pattern, count in (("rewards-*.json", cfg.trainer.num_nodes), ("engine-*.json", cfg.rollout.engines)):
            what = f"{count} x {endpoints / pattern} (trainer.deadlines.startup_s); see {run_dir / 'logs'}"
            Deadline(seconds, what).wait_until(partial(_are_there, endpoints, pattern, count))
        engines = EnginePool(endpoints, read_token(token_file), cfg.rollout.engines)
        settings = RolloutSettings.from_config(cfg, (renderer.eos_id,))
        rewards = RewardClient(endpoints, token_file)
        rollouts = Rollouts(engines, rewards, prompts, renderer.judged_text, settings)
        return cls(rollouts, Supply(rollouts, prompts, engines.load))


def _are_there(folder: Path, pattern: str, count: int) -> bool:
    return len(list(folder.glob(pattern))) >= count


def die_with_parent() -> None:
    """This process is killed when the supervisor that started it ends, however that happens (Linux)."""
    parent = int(os.environ.get("PRORL_SUPERVISOR_PID", os.getppid()))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
