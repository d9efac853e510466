"""The pool's retries, back-pressure and deadlines, against small HTTP servers that misbehave on purpose.

The same client talks to a real engine in test_engine.py.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import DeadlineExceeded, EngineRefused
from nemo_prorl.rollout.endpoints import EngineClient, Response, SamplingParams
from nemo_prorl.rollout.engines import EnginePool, _Slot
from nemo_prorl.service import Pause

SAMPLING = SamplingParams(max_tokens=4)
Fault = Callable[["Fake", dict[str, Any], web.StreamResponse], Awaitable[bool]]


class Fake:
    """An engine's HTTP face.  `faults` are used up one by one, one a request; then it behaves."""

    def __init__(self, folder: Path, index: int = 0, faults: tuple[Fault | int, ...] = ()) -> None:
        self.folder, self.index, self.faults = folder, index, list(faults)
        self.version = -1
        self.calls: list[tuple[str, Any]] = []
        self.asked: list[int | None] = []  # versions that requests named
        self.waits: list[float] = []  # seconds that loads were given
        self.in_flight = self.peak = self.weight_faults = self.wake_faults = 0
        self.hold: asyncio.Event | None = None
        self.asleep = False
        self.kv_cache_peak: float | None = None
        self.unread: list[str] = []

    async def start(self) -> "Fake":
        app = web.Application()
        app.add_routes([web.post("/generate", self.generate), web.post("/weights", self.weights)])
        app.add_routes([web.post("/sleep", self.sleep), web.post("/wake", self.wake)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        endpoint = {"kind": "engine", "index": self.index, "url": self.url, "pid": id(self), "state": "ready"}
        (self.folder / f"engine-{self.index}.json").write_text(json.dumps(endpoint))
        return self

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("weights", body["version"]))
        self.waits.append(body["wait_s"])
        if self.weight_faults:
            self.weight_faults -= 1
            return web.json_response({"error": "on purpose"}, status=500)
        self.version = body["version"]
        return web.json_response({"weight_version": self.version, "unread": self.unread})

    async def sleep(self, request: web.Request) -> web.Response:
        self.calls.append(("sleep", (await request.json())["level"]))
        was, self.asleep = self.asleep, True
        return web.json_response({} if was else {"freed_bytes": 7})

    async def wake(self, request: web.Request) -> web.Response:
        self.calls.append(("wake", (await request.json())["parts"]))
        if self.wake_faults:
            self.wake_faults -= 1
            return web.json_response({"error": "failed to wake, engine lost: out of memory"}, status=500)
        self.asleep = False
        return web.json_response({"asleep": []})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(("generate", body["seeds"]))
        self.asked.append(body["weight_version"])
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": "on purpose"}, status=fault)
        self.in_flight += len(body["seeds"])
        self.peak = max(self.peak, self.in_flight)
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            if self.hold is not None:
                await self.hold.wait()
            if fault is None or await fault(self, body, reply):
                for index, seed in reversed(list(enumerate(body["seeds"]))):
                    await self.say(reply, index, seed)
                told = {} if self.kv_cache_peak is None else {"kv_cache_peak": self.kv_cache_peak, "preemptions": 2}
                await reply.write(json.dumps({"done": len(body["seeds"]), **told}).encode() + b"\n")
        finally:
            self.in_flight -= len(body["seeds"])
        return reply

    async def say(self, reply: web.StreamResponse, index: int, seed: int, **change: Any) -> None:
        value = {"index": index, "token_ids": [seed, 2], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
        await reply.write(json.dumps({**value, "weight_version": self.version, **change}).encode() + b"\n")


async def cut_after_two(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    for index in (3, 1):
        await fake.say(reply, index, body["seeds"][index])
    return False


async def hang_after_three(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    for index in (3, 1, 0):
        await fake.say(reply, index, body["seeds"][index])
    await asyncio.sleep(0.6)
    return False


def slow(*tokens: int) -> Fault:
    """An engine that reports these numbers of tokens, one each 0.3 s, and then answers."""

    async def fault(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
        for count in tokens:
            await asyncio.sleep(0.3)
            await reply.write(json.dumps({"tokens": count}).encode() + b"\n")
        return True

    return fault


async def an_error_line(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await reply.write(b'{"error": "EngineDeadError: core"}\n')
    return False


async def nonsense(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await reply.write(b'{"index": 0, "text": "hello"}\n')
    return False


async def too_few_logprobs(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await fake.say(reply, 0, body["seeds"][0], logprobs=[-0.5])
    return False


async def one_seed_too_many(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await fake.say(reply, len(body["seeds"]), 9)
    return False


async def one_and_then_the_others(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await fake.say(reply, 0, body["seeds"][0])
    fake.hold = asyncio.Event()
    await fake.hold.wait()
    return True


async def other_version(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    fake.version -= 1
    return True


async def not_a_number(fake: Fake, body: dict[str, Any], reply: web.StreamResponse) -> bool:
    await fake.say(reply, 0, 1, logprobs=[-0.5, float("nan")])
    return False


def run(work: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work(folder)

    asyncio.run(bounded())


def tokens(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


@pytest.mark.parametrize(
    "fault",
    [cut_after_two, an_error_line, nonsense, too_few_logprobs, one_seed_too_many, 500, 503, 404, 405, 409],
)
def test_only_the_missing_responses_are_asked_for_again(tmp_path: Path, fault: Fault | int) -> None:
    async def work(folder: Path) -> None:
        fake = await Fake(folder, 0, (fault,)).start()
        pool, seen = EnginePool(folder, "t"), list[Response]()
        got = await pool.generate([5], [10, 11, 12, 13], SAMPLING, Deadline(30, "a group"), seen.append)
        await pool.close()
        await fake.stop()
        assert tokens(got) == [[10, 2], [11, 2], [12, 2], [13, 2]]
        assert [r.index for r in got] == [0, 1, 2, 3]
        assert sorted(r.index for r in seen) == [0, 1, 2, 3]  # each told once
        again = [10, 12] if fault is cut_after_two else [10, 11, 12, 13]
        assert fake.calls == [("generate", [10, 11, 12, 13]), ("generate", again)]

    run(work, tmp_path)


def test_a_request_that_is_wrong_is_not_sent_twice(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        for fault in (400, 401, not_a_number):
            fake = await Fake(folder, 0, (fault,)).start()
            pool = EnginePool(folder, "t")
            with pytest.raises(EngineRefused):
                await pool.generate([5], [1], SAMPLING, Deadline(30, "a group"))
            await pool.close()
            await fake.stop()
            assert len(fake.calls) == 1

    run(work, tmp_path)


def test_a_response_of_other_weights_is_thrown_away(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fake = await Fake(folder, 0, (other_version,)).start()
        pool = EnginePool(folder, "t")
        await pool.publish("file", 7, Deadline(30, "weights"))
        got = await pool.generate([5], [1, 2], SAMPLING, Deadline(30, "a group"), version=7)
        with pytest.raises(ValueError, match="weights version 6 was requested, but version 7 is published"):
            await pool.generate([5], [1], SAMPLING, Deadline(30, "a group"), version=6)
        await pool.announce("file", 8)
        group = Deadline(30, "a group")
        await asyncio.gather(*(pool.generate([5], [seed], SAMPLING, group, version=8) for seed in (3, 4)))
        await pool.close()
        await fake.stop()
        assert [r.weight_version for r in got] == [7, 7]
        calls = ["weights", "generate", "weights", "generate"]
        assert [call for call, _ in fake.calls] == [*calls, "weights", "generate", "generate"]  # loaded once for both
        assert fake.asked == [7, 7, 8, 8]
        assert all(20 < wait <= 30 for wait in fake.waits)

    run(work, tmp_path)


def test_announced_weights_are_loaded_before_the_next_response_and_by_whoever_is_asked(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, k).start() for k in range(2)]
        pool = EnginePool(folder, "t", engines=2)
        await pool.publish("file", 3, Deadline(30, "weights"))
        await pool.announce("other", 4)
        assert all(fake.calls == [("weights", 3)] for fake in fakes)
        with pytest.raises(ValueError, match="weights version 3 was requested, but version 4 is published"):
            await pool.generate([5], [1], SAMPLING, Deadline(30, "a group"), version=3)
        got = await pool.generate([5], [1, 2], SAMPLING, Deadline(30, "a group"), version=4)
        assert [r.weight_version for r in got] == [4, 4]
        await pool.announce("other", 4)  # of a run that went back: loaded again
        await pool.generate([5], [1], SAMPLING, Deadline(30, "a group"), version=4)
        await pool.close()
        for fake in fakes:
            await fake.stop()
        calls = sorted((fake.calls for fake in fakes), key=len)
        assert calls[0] == [("weights", 3)]  # the other had room for both
        assert [name for name, _ in calls[1]] == ["weights", "weights", "generate", "weights", "generate"]

    run(work, tmp_path)


def test_the_pool_keeps_what_each_engine_could_not_compare_at_its_last_load(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, k).start() for k in range(2)]
        fakes[1].unread = ["model.norm.weight"]
        pool = EnginePool(folder, "t", engines=2)
        await pool.publish("file", 3, Deadline(30, "weights"))
        assert pool.unread == {"engine-0": [], "engine-1": ["model.norm.weight"]}
        fakes[1].unread = []
        await pool.publish("file", 4, Deadline(30, "weights"))
        await pool.publish("file", 4, Deadline(30, "weights"))  # of a run that went back: loaded again
        assert pool.unread == {"engine-0": [], "engine-1": []}
        assert fakes[0].calls == [("weights", 3), ("weights", 4), ("weights", 4)]
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_the_fullest_cache_and_the_preemptions_of_all_engines_are_those_of_the_measurement(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, index).start() for index in range(3)]
        pool = EnginePool(folder, "t", engines=3)

        async def measured(*peaks: float | None) -> tuple[float | None, float | None]:
            for fake, peak in zip(fakes, peaks, strict=True):
                fake.kv_cache_peak = peak
            pool.open_responses.begin()
            await pool.generate([5], range(6), SAMPLING, Deadline(30, "a group"))
            preemptions = pool.open_responses.end().get("preemptions")
            return pool.open_responses.kv_cache_peak, preemptions

        assert await measured(0.25, 0.75, None) == (0.75, 4)  # two for each engine that reports
        assert await measured(0.25, 0.0, None) == (0.25, 4)
        fakes[0].kv_cache_peak = 1.0
        await pool.generate([5], range(6), SAMPLING, Deadline(30, "a validation"))  # between two measurements
        assert pool.open_responses.kv_cache_peak == 0.25
        assert await measured(None, None, None) == (None, None)
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_a_restarted_engine_gets_the_current_weights_first(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        first = await Fake(folder).start()
        pool = EnginePool(folder, "t")
        await pool.publish("file", 3, Deadline(30, "weights"))
        pool.open_responses.begin()
        await first.stop()
        request = asyncio.ensure_future(pool.generate([5], [1], SAMPLING, Deadline(30, "a group"), version=3))
        await asyncio.sleep(0.3)  # connection refused, at least once
        second = await Fake(folder).start()
        assert tokens(await request) == [[1, 2]]
        assert pool.open_responses.end()["lost_s"] > 0.0
        pool.open_responses.lost("engine-0")
        await pool.publish("file", 4, Deadline(30, "weights"))
        pool.open_responses.begin()
        assert pool.open_responses.end()["lost_s"] == 0.0  # it loaded
        await pool.close()
        await second.stop()
        assert second.calls == [("weights", 3), ("generate", [1]), ("weights", 4)]

    run(work, tmp_path)


def test_an_engine_that_failed_is_back_with_its_first_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its load of weights is one; once it has given all responses, its failures are forgotten."""

    async def work(folder: Path) -> None:
        fake = await Fake(folder, 0, (500, one_and_then_the_others)).start()
        pool, seen = EnginePool(folder, "t"), list[Response]()
        request = asyncio.ensure_future(pool.generate([5], [1, 2], SAMPLING, Deadline(30, "a group"), seen.append))
        while not seen:
            await asyncio.sleep(0.01)
        assert (pool.open_responses._lost, pool._slots["engine-0"].pause.failures) == (set(), 1)
        assert fake.hold is not None
        fake.hold.set()
        assert tokens(await request) == [[1, 2], [2, 2]]
        assert pool._slots["engine-0"].pause == Pause()
        fake.weight_faults = 1
        await pool.publish("file", 3, Deadline(30, "weights"))
        assert pool._slots["engine-0"].pause == Pause()
        failures = [r.message for r in caplog.records if r.name == "nemo_prorl.rollout.engines"]
        assert [message.split(": ")[0] for message in failures] == ["engine-0 failed (1 in a row)"] * 2

        await pool.announce("other", 4)
        pool.open_responses.lost("engine-0")
        fake.hold = asyncio.Event()
        request = asyncio.ensure_future(pool.generate([5], [1], SAMPLING, Deadline(30, "a group"), version=4))
        while not fake.in_flight:
            await asyncio.sleep(0.01)
        assert pool.open_responses._lost == set()
        fake.hold.set()
        await request
        await pool.close()
        await fake.stop()

    run(work, tmp_path)


@pytest.mark.starts
def test_deadlines_name_the_engine_and_what_is_missing(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        pool = EnginePool(folder, "t", engines=2)
        with pytest.raises(
            DeadlineExceeded, match=r"waited 0.3 s for a group: .*0 of 2 engines known from .*engine-\*"
        ):
            await pool.generate([5], [1], SAMPLING, Deadline(0.3, "a group"))
        fake = await Fake(folder, 0, (503,) * 1000).start()
        with pytest.raises(
            DeadlineExceeded, match=r"1 of 1 responses are missing.* engine-0 at http.*HTTP 503.*on purpose"
        ):
            await pool.generate([5], [1], SAMPLING, Deadline(1.0, "a group"))
        assert len(fake.calls) < 20  # it backs off
        with pytest.raises(
            DeadlineExceeded,
            match=r"not all engines have weights version 4: not loaded by engine-0 at.*1 of 2 engines known",
        ):
            await pool.publish("file", 4, Deadline(0.5, "weights"))
        other = Fake(folder, 1)
        other.weight_faults = 1  # and tried again
        publishing = asyncio.ensure_future(pool.publish("file", 5, Deadline(30, "weights")))
        await asyncio.sleep(0.3)
        assert not publishing.done()  # the second engine is waited for
        await other.start()
        await publishing
        assert other.version == fake.version == 5
        await pool.close()
        await fake.stop()
        await other.stop()

    run(work, tmp_path)


def test_a_deadline_counts_from_the_last_token(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fake = await Fake(folder, 0, (slow(*range(1, 8)), slow(*[8] * 7))).start()
        pool = EnginePool(folder, "t", max_in_flight=1)
        waiting = asyncio.create_task(pool.generate([5], [1], SAMPLING, Deadline(1.5, "a slow response")))
        behind = asyncio.create_task(pool.generate([5], [2], SAMPLING, Deadline(1.5, "a response behind it")))
        assert [response.token_ids for response in await waiting] == [[1, 2]]
        with pytest.raises(DeadlineExceeded, match=r"waited 1.5 s for a response behind it"):
            await behind
        assert pool.generated_tokens == 8
        assert [seeds for _, seeds in fake.calls] == [[1], [2]]  # neither request was sent again
        await pool.close()
        await fake.stop()

    run(work, tmp_path)


def test_half_an_endpoint_file_is_no_engine(tmp_path: Path) -> None:
    """Nor is one of an engine that starts, or of a reward server."""

    async def work(folder: Path) -> None:
        (folder / "engine-5.json").write_text('{"url": "http://')
        starting = {"kind": "engine", "url": "http://127.0.0.1:1", "pid": 1, "state": "starting"}
        (folder / "engine-6.json").write_text(json.dumps(starting))
        (folder / "rewards-0.json").write_text(json.dumps(starting | {"kind": "rewards", "state": "ready"}))
        fake = await Fake(folder).start()
        pool = EnginePool(folder, "t")
        assert len(await pool.generate([5], [1], SAMPLING, Deadline(30, "a group"))) == 1
        assert list(pool._slots) == ["engine-0"]
        await pool.close()
        await fake.stop()

    run(work, tmp_path)


def test_the_responses_to_a_prompt_are_shared_out_and_what_one_engine_fails_another_gives(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, 0).start(), await Fake(folder, 1, (an_error_line,)).start()]
        pool = EnginePool(folder, "t", engines=2)
        got = await pool.generate([5], range(10, 18), SAMPLING, Deadline(30, "a group"))
        assert tokens(got) == [[seed, 2] for seed in range(10, 18)]
        assert fakes[1].calls == [("generate", [14, 15, 16, 17])]
        assert fakes[0].calls == [("generate", [10, 11, 12, 13]), ("generate", [14, 15, 16, 17])]  # the other must wait
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_room_is_given_back_whatever_ends_a_request(tmp_path: Path) -> None:
    async def work(folder: Path) -> None:
        fakes = [await Fake(folder, 0).start(), await Fake(folder, 1, (400,)).start()]
        fakes[0].hold = asyncio.Event()
        pool = EnginePool(folder, "t", engines=2, max_in_flight=4)
        with pytest.raises(EngineRefused):  # said by one engine while the other works
            await pool.generate([5], range(12), SAMPLING, Deadline(30, "a group"))
        with pytest.raises(DeadlineExceeded, match=r"\d of 8 responses are missing from engine-0 at"):
            fakes[1].faults = [hang_after_three]
            await pool.generate([5], range(8), SAMPLING, Deadline(0.5, "a group"))
        fakes[0].hold.set()
        assert len(await pool.generate([5], range(8), SAMPLING, Deadline(30, "a group"))) == 8
        assert [slot.in_flight for slot in pool._slots.values()] == [0, 0]
        await pool.close()
        for fake in fakes:
            await fake.stop()

    run(work, tmp_path)


def test_the_pool_names_the_slowest_engine_first(tmp_path: Path) -> None:
    pool, now = EnginePool(tmp_path, "t" * 16, 3), time.monotonic()
    client = EngineClient(None, "http://nowhere", "t")
    for name, in_flight, ago in (("engine-0", 4, 5.0), ("engine-1", 2, 300.0), ("engine-2", 0, 900.0)):
        pool._slots[name] = _Slot(name, 1, client, in_flight=in_flight, progress_at=now - ago)
    pool._slots["engine-3"] = _Slot("engine-3", 1, client, in_flight=1)
    assert pool.waiting() == (
        "engine-3 has 1 open responses, no token yet, engine-1 has 2 open responses, no token for 300 s,"
        " engine-0 has 4 open responses, no token for 5 s"
    )
