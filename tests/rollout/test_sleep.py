"""Engines that give their memory away and take it back: the protocol, the pool, and a real engine."""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded
from nemo_prorl.rollout.engine.requests import PARTS, BadRequest
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX, HOLD_FILE, EngineSleep, Refused, wait_while_held
from nemo_prorl.rollout.engines import EnginePool
from tests.rollout.engines import TOKEN, EngineProcess
from tests.rollout.test_client import SAMPLING, Fake, run, tokens
from tests.rollout.test_engine import GREEDY, ask_all, http, load, published, same


class Core:
    """What `EngineSleep` asks of vLLM."""

    def __init__(self, *faults: str) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.faults, self.free = list(faults), 100

    async def sleep(self, level: int) -> None:
        self._note("sleep", level)
        self.free += 40

    async def wake_up(self, parts: list[str]) -> bool:
        self._note("wake", tuple(parts))
        self.free -= 20 * len(parts)
        return True

    async def collective_rpc(self, name: str) -> list[int]:
        assert name == "prorl_free_bytes"
        return [self.free, self.free]

    def _note(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        if self.faults and self.faults[0] == what:
            raise RuntimeError(self.faults.pop(0))


def test_nothing_is_generated_between_sleep_and_the_last_part_of_the_wake() -> None:
    async def work() -> None:
        core = Core()
        sleep = EngineSleep(core, enabled=True, frees_memory=True)
        assert sleep.refusal is None
        said = await sleep.fall_asleep(1)
        assert (said["freed_bytes"], said["asleep"]) == (80, list(PARTS))
        assert "asleep (level 1: weights, kv_cache)" in str(sleep.refusal)
        await sleep.wake(("weights",))
        assert "asleep (level 1: kv_cache)" in str(sleep.refusal)
        await sleep.wake(("weights", "kv_cache"))  # what is awake is not woken again: vLLM would wake nothing at all
        assert sleep.refusal is None
        await sleep.wake(PARTS)
        assert core.calls == [("sleep", 1), ("wake", ("weights",)), ("wake", ("kv_cache",))]

    asyncio.run(work())


def test_after_level_2_weights_must_be_loaded_whatever_is_awake() -> None:
    async def work() -> None:
        sleep = EngineSleep(Core(), enabled=True, frees_memory=True)
        await sleep.fall_asleep(2)
        await sleep.wake(PARTS)
        assert "no weights after a sleep" in str(sleep.refusal)
        await sleep.fall_asleep(1)  # keeps what is not there
        await sleep.wake(PARTS)
        assert "no weights after a sleep" in str(sleep.refusal)
        sleep.weights_lost = False  # as a load does
        assert sleep.refusal is None

    asyncio.run(work())


def test_a_sleep_that_cannot_be_is_refused_and_one_that_breaks_leaves_nothing_served() -> None:
    async def work() -> None:
        with pytest.raises(BadRequest, match=r"started without --sleep\.  Fix: set rollout.sleep"):
            await EngineSleep(Core(), enabled=False, frees_memory=True).fall_asleep(1)
        sleep = EngineSleep(Core("sleep", "wake"), enabled=True, frees_memory=False)
        with pytest.raises(RuntimeError, match="sleep"):
            await sleep.fall_asleep(2)
        assert sleep.refusal is not None
        again = await sleep.fall_asleep(2)  # already so
        assert "seconds" not in again
        with pytest.raises(Refused, match="asleep at level 2"):
            await sleep.fall_asleep(1)
        with pytest.raises(RuntimeError, match="wake"):
            await sleep.wake(("weights",))
        assert "weights" in sleep.asleep

    asyncio.run(work())


def test_an_engine_waits_with_its_start_while_the_others_sleep(tmp_path: Path) -> None:
    hold, told = tmp_path / HOLD_FILE, tmp_path / f"engine-3{HELD_SUFFIX}"
    told.touch()  # of one that was killed while it waited
    wait_while_held(str(hold), str(told), 0.0)  # nobody sleeps
    assert not told.exists()
    hold.touch()
    with pytest.raises(TimeoutError, match=f"{HOLD_FILE} still exists after 0.05 s"):
        wait_while_held(str(hold), str(told), 0.05)
    assert not told.exists()
    seen: list[bool] = []

    def wake() -> None:
        while not told.exists():
            time.sleep(0.01)
        seen.append(True)
        hold.unlink()

    waker = threading.Thread(target=wake)
    waker.start()
    wait_while_held(str(hold), str(told), 30.0)
    waker.join()
    assert seen
    assert not told.exists()


def test_the_pool_wakes_weights_then_loads_then_wakes_the_cache(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, index).start() for index in range(2)]
        pool = EnginePool(folder, TOKEN, engines=2)
        await pool.publish("w-1", 1, Deadline(5, "publication"))
        assert await pool.sleep(2, Deadline(5, "sleep")) == 14
        assert await pool.sleep(2, Deadline(5, "sleep")) == 0  # as after replies that were lost
        assert (folder / HOLD_FILE).exists()
        await pool.publish("w-2", 2, Deadline(5, "publication"))
        assert not (folder / HOLD_FILE).exists()
        assert pool.wake_failures == {}
        awake = [("wake", ["weights"]), ("weights", 2), ("wake", ["kv_cache"])]
        for fake in fakes:
            assert fake.calls == [("weights", 1), ("sleep", 2), ("sleep", 2), *awake]
        assert tokens(await pool.generate([5], [1], SAMPLING, Deadline(5, "one"), version=2)) == [[1, 2]]
        await pool.publish("w-3", 3, Deadline(5, "publication"))
        assert fakes[0].calls[-1] == ("weights", 3)  # an awake engine is not woken
        await pool.sleep(2, Deadline(5, "sleep"))
        await pool.generate([5], [1], SAMPLING, Deadline(5, "one"), version=3)  # nobody published: woken all the same
        again = [("sleep", 2), ("wake", ["weights"]), ("weights", 3), ("wake", ["kv_cache"]), ("generate", [1])]
        assert again in [fake.calls[-5:] for fake in fakes]
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_an_engine_that_fails_to_wake_is_waited_for_until_another_stands_in_its_place(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        well, ill = await Fake(folder, 0).start(), await Fake(folder, 1).start()
        pool = EnginePool(folder, TOKEN, engines=2)
        await pool.publish("w-1", 1, Deadline(5, "publication"))
        await pool.sleep(1, Deadline(5, "sleep"))
        ill.wake_faults = 1

        async def restart() -> Fake:
            while ("wake", ["weights"]) not in ill.calls:
                await asyncio.sleep(0.01)
            (folder / "engine-1.json").unlink()  # as its supervisor does
            await ill.stop()
            return await Fake(folder, 1).start()

        restarting = asyncio.create_task(restart())
        await pool.publish("w-2", 2, Deadline(20, "publication"))
        fresh = await restarting
        assert list(pool.wake_failures) == ["engine-1"]
        assert "out of memory" in pool.wake_failures["engine-1"]
        assert fresh.calls == [("weights", 2)]  # it came up awake
        assert well.calls.count(("weights", 2)) == 1
        await pool.close()
        for fake in (well, fresh):
            await fake.stop()

    run(work, tmp_path)


@pytest.mark.starts
def test_a_sleep_ends_when_every_engine_sleeps_or_waits_with_its_start(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fake = await Fake(folder, 0).start()
        pool = EnginePool(folder, TOKEN, engines=2)
        with pytest.raises(DeadlineExceeded, match="1 of 2 engines are asleep"):
            await pool.sleep(1, Deadline(2, "sleep"))
        (folder / f"engine-1{HELD_SUFFIX}").touch()  # of an earlier sleep: it counts for nothing

        async def start_and_wait() -> None:
            while (folder / f"engine-1{HELD_SUFFIX}").exists():
                await asyncio.sleep(0.01)
            (folder / f"engine-1{HELD_SUFFIX}").touch()

        waiting = asyncio.create_task(start_and_wait())
        await pool.sleep(1, Deadline(5, "sleep"))
        await waiting
        with contextlib.suppress(DeadlineExceeded):  # that engine does not come up here
            await pool.publish("w-1", 1, Deadline(0.3, "publication"))
        assert pool.wake_failures == {"engine-1": "it ended while it slept"}
        await pool.close()
        await fake.stop()

    run(work, tmp_path)


@pytest.mark.vllm
def test_a_real_engine_sleeps_and_answers_as_before(engine: EngineProcess, models: dict[str, Path]) -> None:
    path = published(engine, models["tied0"], 5)
    load(engine, path, 5)
    before = ask_all(engine, GREEDY)
    one = {"prompt": [5, 6], "seeds": [1], "max_tokens": 2}
    for level in (1, 2):
        status, said = http(engine, "POST", "/sleep", {"level": level})
        assert (status, said["asleep"], said["freed_bytes"], said["frees_memory"]) == (200, list(PARTS), 0, False)
        assert "asleep" in http(engine, "POST", "/generate", one)[1]["error"]
        status, refused = http(engine, "POST", "/weights", {"path": str(path), "version": 6})
        assert (status, "wake it first" in refused["error"]) == (409, True)
        status, health = http(engine, "GET", "/health")
        assert (status, health["sleep"]["level"], health["updating"]) == (200, level, False)
        assert http(engine, "POST", "/wake", {"parts": ["weights"]})[1]["asleep"] == ["kv_cache"]
        assert http(engine, "POST", "/generate", one)[0] == 409
        if level == 2:
            load(engine, path, 6)
            assert http(engine, "POST", "/generate", one)[0] == 409  # no cache yet
        assert http(engine, "POST", "/wake", {"parts": ["kv_cache"]})[1]["asleep"] == []
        assert same(ask_all(engine, GREEDY), before)
    status, said = http(engine, "POST", "/sleep", {"level": 2})
    http(engine, "POST", "/wake", {})
    assert "no weights after a sleep" in http(engine, "POST", "/generate", one)[1]["error"]

    async def through_the_pool() -> None:
        pool = EnginePool(engine.endpoints, TOKEN)
        deadline = Deadline(60, "the engine")
        await pool.publish(path, 7, deadline)
        await pool.sleep(2, deadline)
        await pool.publish(path, 8, deadline)
        found = await pool.generate([5, 6], [1], GREEDY, deadline, version=8)
        assert found[0].weight_version == 8
        await pool.close()

    asyncio.run(through_the_pool())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_killed_in_its_sleep_starts_again_when_the_others_wake(
    vllm_python: str, models: dict[str, Path], tmp_path: Path
) -> None:
    hold = tmp_path / "endpoints" / HOLD_FILE
    mine = EngineProcess(vllm_python, models["tied0"], tmp_path, 0, "--sleep", f"--hold-file={hold}")
    mine.start().wait_ready()
    path = published(mine, models["tied0"], 1)

    async def work() -> None:
        pool, deadline = EnginePool(mine.endpoints, TOKEN), Deadline(400, "the engine")
        await pool.publish(path, 1, deadline)
        before = await pool.generate([5, 6], [1], GREEDY, deadline, version=1)
        await pool.sleep(2, deadline)
        os.killpg(mine.pid, 9)
        mine.wait_gone()
        mine.start()
        while not (mine.endpoints / f"engine-0{HELD_SUFFIX}").exists():
            deadline.check()
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        assert mine.core_pid == 0  # nothing that could hold memory
        await pool.publish(path, 2, deadline)
        after = await pool.generate([5, 6], [1], GREEDY, deadline, version=2)
        assert tokens(after) == tokens(before)
        assert pool.wake_failures == {"engine-0": "it ended while it slept"}
        await pool.close()

    try:
        asyncio.run(work())
    finally:
        mine.stop()
