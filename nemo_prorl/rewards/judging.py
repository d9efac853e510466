"""The reward service: the plugins in use with their worker pools.  Used by the HTTP server and by commands."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from prorl_sandbox import folders

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import Registry, make_plugin
from nemo_prorl.rewards.interface import RewardRequest, Verdict, failed_verdict
from nemo_prorl.rewards.pool import MAX_QUEUE, PluginPool, PoolSpec
from nemo_prorl.rewards.retries import until_judged
from nemo_prorl.rewards.sandbox import open_sandbox

T = TypeVar("T")

_READ_AHEAD = 256  # requests per worker that `in_order` reads before their verdicts are known


def share_out(workers: int, plugins: list[str]) -> dict[str, int]:
    """Return the number of workers for each plugin: evenly divided, and at least one each."""
    if workers < 1:
        raise ConfigError(f"--workers {workers}: expected at least 1")
    each, more = divmod(workers, max(1, len(plugins)))
    return {name: max(1, each + (index < more)) for index, name in enumerate(plugins)}


def pool_specs(
    registry: Registry,
    tasks: Iterable[str],
    workers: int,
    settings: dict[str, dict[str, Any]] | None = None,
    max_queue: int = MAX_QUEUE,
    memory_mb: int = 4096,
    unsafe_no_sandbox: bool = False,
    on_demand: bool = False,
) -> list[PoolSpec]:
    """Return the configuration of one pool for each plugin that the tasks need.

    Args:
        tasks: Tasks to judge; empty: all known tasks.
        workers: Worker processes of all pools together.  A second verifier of these tasks gets one more.
        settings: Settings by plugin name.
        max_queue: Maximum waiting requests per plugin.
        on_demand: The pools will be started by `RewardService.ready`.  Then each pool gets `workers` workers, and the
            sandbox is not tested now.

    Raises:
        ConfigError: A task, plugin or setting is unknown (the message lists the known ones) or a value is wrong.
        UnfitMachine: A plugin needs the sandbox, and no sandbox works on this machine.
    """
    settings = settings or {}
    for name in settings:
        registry.plugin(name)
    wanted = list(tasks) or sorted(registry.tasks())
    classes = {plugin.name: plugin for plugin in map(registry.plugin_of_task, wanted)}
    if not classes:
        raise ConfigError("no reward plugin is installed.  Fix: pip install one, for example from reward_plugins/")
    specs = []
    seconds = {plugin.second for plugin in classes.values()}
    few = [name for name, plugin in classes.items() if seconds.intersection(plugin.tasks)]  # they judge samples only
    others = [name for name in classes if name not in few]
    shares = dict.fromkeys(classes, workers) if on_demand else share_out(workers, others) | dict.fromkeys(few, 1)
    for name, count in shares.items():
        budget = make_plugin(classes[name], settings.get(name)).time_budget_s
        own = dict(settings.get(name, {}))
        spec = PoolSpec(
            name,
            own,
            workers=count,
            budget_s=budget,
            max_queue=max_queue,
            memory_mb=memory_mb,
            unsafe_no_sandbox=unsafe_no_sandbox,
        )
        specs.append(replace(spec, sandboxed=classes[name].needs_sandbox))
    if not on_demand and any(plugin.needs_sandbox for plugin in classes.values()):
        check_sandbox(unsafe_no_sandbox)
    return specs


def check_sandbox(unsafe_no_sandbox: bool = False) -> None:
    """Test the sandbox on this machine.  Raises UnfitMachine if none works, unless `unsafe_no_sandbox`."""
    open_sandbox(unsafe_no_sandbox).close()


class RewardService:
    """The pools of several plugins.  Every request gets exactly one verdict, from the plugin of its task."""

    def __init__(self, specs: list[PoolSpec], registry: Registry) -> None:
        self.pools = {spec.plugin: PluginPool(spec) for spec in specs}
        self.tasks = {task: name for task, name in registry.tasks().items() if name in self.pools}
        self._registry = registry
        self._started: set[str] = set()

    async def start(self) -> None:
        """Start all pools.  Raises RewardFailure, naming the plugin, if a worker cannot start."""
        started = await asyncio.gather(*(pool.start() for pool in self.pools.values()), return_exceptions=True)
        if errors := [error for error in started if isinstance(error, BaseException)]:
            await self.close()
            raise errors[0]
        self._started.update(self.pools)

    async def ready(self, task: str) -> None:
        """Start the pool of a task unless it was started before; ignore unknown tasks.

        Raises:
            RewardFailure: A worker cannot start.
            UnfitMachine: The plugin needs the sandbox, and no sandbox works on this machine.
        """
        name = self.tasks.get(task)
        if name is None or name in self._started:
            return
        self._started.add(name)
        if self._registry.plugin(name).needs_sandbox:
            check_sandbox(self.pools[name].spec.unsafe_no_sandbox)
        await self.pools[name].start()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        folders.sweep()  # killed workers cannot remove their sandbox folders

    def room_for(self, requests: list[RewardRequest]) -> bool:
        """Return whether the queues have room for all of these requests."""
        counts = Counter(self.tasks[request.task] for request in requests if request.task in self.tasks)
        return all(self.pools[name].room >= count for name, count in counts.items())

    def submit(self, request: RewardRequest, timeout_s: float | None = None) -> "asyncio.Future[Verdict]":
        """Queue one request and return a future of its verdict; see `PluginPool.submit`.

        For an unknown task the verdict is "infrastructure" and lists the tasks in use.
        """
        name = self.tasks.get(request.task)
        if name is not None:
            return self.pools[name].submit(request, timeout_s)
        known = ", ".join(sorted(self.tasks))
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        detail = f"no reward plugin in use judges task {request.task!r}; in use: {known}"
        future.set_result(failed_verdict(request.id, "infrastructure", detail))
        return future

    async def judge(self, request: RewardRequest) -> Verdict:
        """Return the verdict on a request; "infrastructure" failures are retried.  Raises the errors of `submit`."""

        async def attempt() -> Verdict:
            return await self.submit(request)

        verdict = await until_judged(attempt, Deadline(math.inf, "a verdict"))
        assert verdict is not None
        return verdict

    async def in_order(
        self, items: Iterator[T], request_of: Callable[[T], RewardRequest], workers: int
    ) -> AsyncIterator[tuple[T, Verdict]]:
        """Judge items concurrently, and yield each item with its verdict in the order of the items.

        An exception of `items` is raised after the verdicts on all earlier items.

        Args:
            items: Read in a thread, so that the event loop is not blocked.
            request_of: Returns the request of an item.
            workers: Number of worker processes.  At most 256 items per worker, and 4,096 in all, are read ahead of
                their verdicts.
        """
        waiting: asyncio.Queue[tuple[T, asyncio.Task[Verdict]] | None] = asyncio.Queue(
            min(workers * _READ_AHEAD, MAX_QUEUE // 2)
        )

        async def read() -> None:
            try:
                while (item := await asyncio.to_thread(next, items, None)) is not None:
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
