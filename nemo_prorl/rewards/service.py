"""The plugins in use with their worker pools: what the HTTP server and `prorl rewards score` share."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import Registry, make_plugin
from nemo_prorl.rewards.interface import RewardRequest, Verdict, failed_verdict
from nemo_prorl.rewards.pool import MAX_QUEUE, PluginPool, PoolSpec
from nemo_prorl.rewards.retries import until_judged

T = TypeVar("T")

_READ_AHEAD = 256  # requests for each worker


def share_out(workers: int, plugins: list[str]) -> dict[str, int]:
    """Workers for each plugin: as even as can be, and at least one each, so that none can starve another."""
    if workers < 1:
        raise ConfigError(f"rewards.workers={workers}: must be at least 1")
    each, more = divmod(workers, max(1, len(plugins)))
    return {name: max(1, each + (index < more)) for index, name in enumerate(plugins)}


def plan_pools(
    registry: Registry,
    tasks: Iterable[str],
    workers: int,
    settings: dict[str, dict[str, Any]] | None = None,
    max_queue: int = MAX_QUEUE,
    memory_mb: int = 4096,
    unsafe_no_sandbox: bool = False,
    on_demand: bool = False,
) -> list[PoolSpec]:
    """One pool for each plugin that `tasks` need (all tasks where none is named).

    `on_demand`: the pools will be started when they are needed, so each gets all the workers, and nothing is tried now.
    Raises ConfigError (unknown task, plugin or setting, the known ones listed) and UnfitMachine (no sandbox).
    """
    settings = settings or {}
    for name in settings:
        registry.plugin(name)
    wanted = list(tasks) or sorted(registry.tasks())
    classes = {plugin.name: plugin for plugin in map(registry.plugin_of_task, wanted)}
    if not classes:
        raise ConfigError("no reward plugin is installed; install one, for example from reward_plugins/")
    specs = []
    shares = dict.fromkeys(classes, workers) if on_demand else share_out(workers, list(classes))
    for name, count in shares.items():
        budget = make_plugin(classes[name], settings.get(name)).time_budget_s
        own = dict(settings.get(name, {}))
        specs.append(PoolSpec(name, own, count, budget, max_queue, memory_mb, unsafe_no_sandbox=unsafe_no_sandbox))
    if not on_demand and any(plugin.needs_sandbox for plugin in classes.values()):
        check_sandbox(unsafe_no_sandbox)
    return specs


def check_sandbox(unsafe_no_sandbox: bool = False) -> None:
    """Tries the sandbox on this machine.  Raises UnfitMachine where none holds and that is not allowed."""
    from nemo_prorl.rewards.sandbox.levels import open_sandbox

    open_sandbox(unsafe_no_sandbox).close()


class RewardService:
    """Judges requests; every one is answered with exactly one verdict."""

    def __init__(self, specs: list[PoolSpec], registry: Registry) -> None:
        self.pools = {spec.plugin: PluginPool(spec) for spec in specs}
        self.tasks = {task: name for task, name in registry.tasks().items() if name in self.pools}
        self._registry = registry
        self._started: set[str] = set()

    async def start(self) -> None:
        """Raises RewardFailure, naming the plugin, where a worker cannot start."""
        started = await asyncio.gather(*(pool.start() for pool in self.pools.values()), return_exceptions=True)
        if errors := [error for error in started if isinstance(error, BaseException)]:
            await self.close()
            raise errors[0]
        self._started.update(self.pools)

    async def ready(self, task: str) -> None:
        """Starts the pool of a task if none did before.  Raises RewardFailure and UnfitMachine; unknown tasks pass."""
        name = self.tasks.get(task)
        if name is None or name in self._started:
            return
        self._started.add(name)
        if self._registry.plugin(name).needs_sandbox:
            check_sandbox(self.pools[name].spec.unsafe_no_sandbox)
        await self.pools[name].start()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        from nemo_prorl.rewards.sandbox import folders

        folders.sweep()  # workers are killed where they stand, and may leave one

    def room_for(self, requests: list[RewardRequest]) -> bool:
        """Whether the queues can take all of them."""
        counts = Counter(self.tasks[request.task] for request in requests if request.task in self.tasks)
        return all(self.pools[name].room >= count for name, count in counts.items())

    def submit(self, request: RewardRequest, timeout_s: float | None = None) -> "asyncio.Future[Verdict]":
        """A future of the verdict; for an unknown task it lists the known.  Raises what `PluginPool.submit` raises."""
        name = self.tasks.get(request.task)
        if name is not None:
            return self.pools[name].submit(request, timeout_s)
        known = ", ".join(sorted(self.tasks))
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        detail = f"no reward plugin in use judges task {request.task!r}; in use: {known}"
        future.set_result(failed_verdict(request.id, "infrastructure", detail))
        return future

    async def judge(self, request: RewardRequest) -> Verdict:
        """Return the verdict on a request, judged again where a worker died.  Raises what `submit` raises."""

        async def attempt() -> Verdict:
            return await self.submit(request)

        verdict = await until_judged(attempt, Deadline(math.inf, "a verdict"))
        assert verdict is not None
        return verdict

    async def in_order(
        self, items: AsyncIterator[T], request_of: Callable[[T], RewardRequest], workers: int
    ) -> AsyncIterator[tuple[T, Verdict]]:
        """Yield each item with its verdict once that and all before it are known.

        Raises what reading the items raises, after the verdicts on those before.
        """
        waiting: asyncio.Queue[tuple[T, asyncio.Task[Verdict]] | None] = asyncio.Queue(
            min(workers * _READ_AHEAD, MAX_QUEUE // 2)
        )

        async def read() -> None:
            try:
                async for item in items:
                    request = request_of(item)
                    await self.ready(request.task)
                    await waiting.put((item, asyncio.create_task(self.judge(request))))
            finally:
                await waiting.put(None)

        reader = asyncio.create_task(read())
        try:
            while (pair := await waiting.get()) is not None:
                yield pair[0], await pair[1]
            await reader
        finally:
            reader.cancel()
