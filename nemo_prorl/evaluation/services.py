"""The reward server and the engines of an evaluation: a run's own, by its supervisor's code, without a trainer."""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from nemo_prorl.deadlines import Deadline
from nemo_prorl.launcher.health import Health
from nemo_prorl.launcher.job import clear_endpoints
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.launcher.supervisor import Node
from nemo_prorl.rewards.client import ClientOptions, RewardClient
from nemo_prorl.rewards.connections import allow_connections

T = TypeVar("T")

_LOOK_S = 0.2


class Services:
    """Starts them on entering, ends them on leaving; `watching` keeps them up meanwhile."""

    def __init__(self, cfg: DictConfig, out: Path, tasks: Sequence[str], engines: int) -> None:
        """`engines` 0: only the reward server.  `out`: endpoints/ and logs/ lie there."""
        for name in ("endpoints", "logs"):
            (out / name).mkdir(parents=True, exist_ok=True)
        (out / "endpoints").chmod(0o700)
        clear_endpoints(out)
        self.endpoints, self.token_file = out / "endpoints", out / "endpoints" / "token"
        self._cfg, self._out, self._engines = cfg, out, engines
        node = Node(cfg, out, tasks, MergedLog(out / "logs" / "all.log"))
        # No weights are ever published: the engines keep those of their model folder.
        self.children: list[Child] = node.services(self.endpoints, engines, alone=True)

    async def __aenter__(self) -> "Services":
        allow_connections()
        for child in self.children:
            child.start()
        self._health = Health(self.children, self.token_file, self._cfg.trainer.deadlines)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._health.close()
        stop_all(self.children, 5.0, quiet=True)

    def reward_client(self) -> RewardClient:
        """In bundles larger than a run's: nobody waits for a single verdict here."""
        return RewardClient(self.endpoints, self.token_file, ClientOptions(batch_size=256, batch_wait_s=0.05))

    async def watching(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work returns, with the services kept up.  Raises ProcessFailed if one of them cannot be."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._keep_up())
                result = await group.create_task(work)
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return result

    async def _keep_up(self) -> None:
        while True:
            for child in self.children:
                child.keep_up()
            self._health.update()
            await asyncio.sleep(_LOOK_S)

    async def ready(self) -> None:
        """Waits for all of them; raises DeadlineExceeded naming what is missing."""
        seconds = self._cfg.trainer.deadlines.startup_s
        for kind, count in (("rewards", 1), ("engine", self._engines)):
            what = f"{count} x {self.endpoints}/{kind}-*.json (trainer.deadlines.startup_s); see {self._out / 'logs'}"
            deadline = Deadline(seconds, what)
            while len(list(self.endpoints.glob(f"{kind}-*.json"))) < count:
                deadline.check()
                await asyncio.sleep(0.05)
