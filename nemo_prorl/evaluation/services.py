"""The reward server and engines of an evaluation: the processes of a run, without its trainer.

Training and evaluation share: the commands and environments of these processes (`NodeSupervisor.services`), their
start and restart (`processes.Child`), the check that they answer (`health.Health`), the client of the engines
(`engines.EnginePool`) with its settings and seeds (`endpoints.SamplingParams`, `response_seed`), the reward server and
its client (`rewards.client.RewardClient`), and the text of the prompts (`render.PromptRenderer`).  The validation
within a run (`lifecycle.validation`) samples with the run's own services, by `Collector.sample`.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from nemo_prorl.launcher.health import Health
from nemo_prorl.launcher.one_node import clear_endpoints
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.rewards.client import ClientOptions, RewardClient
from nemo_prorl.rewards.connections import allow_connections
from nemo_prorl.service import awaited_services

T = TypeVar("T")

_CHECK_EVERY_S = 0.2


class Services:
    """Context manager that runs the reward server and engines; `watching` restarts failed processes."""

    def __init__(
        self, cfg: DictConfig, out: Path, tasks: Sequence[str], engines: int, weights: Path | None = None
    ) -> None:
        """Prepare the processes without starting them.

        Args:
            cfg: Configuration of a run.
            out: Folder of the evaluation, which gets endpoints/ and logs/.
            tasks: Tasks that the reward server judges; empty: no reward server.
            engines: Number of engines; 0 for the reward server alone.
            weights: Folder that engines may load weights from; None: they keep those of their model folder.
        """
        for name in ("endpoints", "logs"):
            (out / name).mkdir(parents=True, exist_ok=True)
        (out / "endpoints").chmod(0o700)
        clear_endpoints(out)
        self.endpoints, self.token_file = out / "endpoints", out / "endpoints" / "token"
        self._cfg = cfg
        node = NodeSupervisor(cfg, out, tasks, MergedLog(out / "logs" / "all.log"))
        children = node.services(weights or self.endpoints, engines, alone=True)
        self.children: list[Child] = children if tasks else children[1:]  # the reward server comes first
        self._expected = (("rewards", 1 if tasks else 0), ("engine", engines))

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
        """Return a client with larger batches than a run's, because in an evaluation no step waits for one verdict."""
        return RewardClient(self.endpoints, self.token_file, ClientOptions(batch_size=256, batch_wait_s=0.05))

    async def watching(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, return its result, and restart services that fail meanwhile.

        Raises ProcessFailed if a service cannot be restarted.
        """
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
            await asyncio.sleep(_CHECK_EVERY_S)

    async def ready(self) -> None:
        """Wait until the reward server and all engines run.

        Raises DeadlineExceeded naming the kind of service that is missing.
        """
        seconds = self._cfg.trainer.deadlines.startup_s
        for kind, count in self._expected:
            deadline, are_ready = awaited_services(self.endpoints, kind, count, seconds)
            while not are_ready():
                deadline.check()
                await asyncio.sleep(0.05)
