"""The client against real servers: nothing mixed up, nothing lost, never an exception for one response."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.client import ClientOptions, RewardClient, _Endpoints, _Waiting, take_verdict
from nemo_prorl.rewards.interface import Verdict, failed_verdict
from nemo_prorl.rewards.server import DEADLINE_HEADER
from nemo_prorl.service import Pause
from tests.rewards.conftest import StartServer, request_of
from tests.rewards.test_server import http

pytestmark = pytest.mark.starts

Steps = Callable[[RewardClient], Awaitable[None]]


def with_client(tmp_path: Path, steps: Steps, options: ClientOptions | None = None) -> None:
    async def main() -> None:
        async with RewardClient(tmp_path / "endpoints", tmp_path / "token", options) as client:
            await steps(client)

    asyncio.run(main())


def echoes(count: int, sleep_s: float = 0.0) -> list[dict[str, Any]]:
    """Requests whose right score is their own number; several share an id, as samples of one prompt do."""
    return [request_of("echo", str(at / count), f"prompt-{at // 4}", meta={"sleep_s": sleep_s}) for at in range(count)]


def test_each_request_gets_its_own_verdict(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    start_server("echo", "--workers", "2")

    async def steps(client: RewardClient) -> None:
        requests = echoes(1000)
        verdicts = await asyncio.gather(*(client.score(request, Deadline(60, "verdicts")) for request in requests))
        assert [verdict["score"] for verdict in verdicts] == [at / 1000 for at in range(1000)]
        assert [verdict["id"] for verdict in verdicts] == [request["id"] for request in requests]
        assert "key" not in verdicts[0]
        assert client.stats.posts <= 40
        assert client.stats.retries == 0

    with_client(tmp_path, steps)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_server_goes_unnoticed(
    plugins: Path, start_server: StartServer, tmp_path: Path, how: signal.Signals
) -> None:
    first = start_server("echo")

    async def steps(client: RewardClient) -> None:
        requests = echoes(60, sleep_s=0.02)
        judging = [asyncio.create_task(client.score(request, Deadline(60, "verdicts"))) for request in requests]
        await asyncio.sleep(0.4)
        assert not all(task.done() for task in judging)
        first.process.send_signal(how)
        await asyncio.to_thread(first.process.wait, 30)
        await asyncio.to_thread(start_server, "echo")
        more = [asyncio.create_task(client.score(request, Deadline(60, "verdicts"))) for request in requests]
        for tasks in (judging, more):
            verdicts = await asyncio.gather(*tasks)
            assert [verdict["score"] for verdict in verdicts] == [at / 60 for at in range(60)]

    with_client(tmp_path, steps)


def test_while_many_requests_come_few_posts_leave(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    start_server("echo")

    async def steps(client: RewardClient) -> None:
        began, verdicts = asyncio.get_running_loop().time(), []
        async with asyncio.TaskGroup() as running:
            for number in range(100):
                request = request_of("echo", "1", str(number))
                verdicts.append(running.create_task(client.score(request, Deadline(60, "a verdict"))))
                await asyncio.sleep(0.002)
        assert [task.result()["id"] for task in verdicts] == [str(number) for number in range(100)]
        elapsed = asyncio.get_running_loop().time() - began
        assert 1 <= client.stats.posts <= elapsed / client.options.batch_gap_s + 2

    with_client(tmp_path, steps)


def test_a_server_whose_many_posts_all_fail_is_closed_off_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("nemo_prorl.service.time", SimpleNamespace(monotonic=lambda: now))
    pause, logged = Pause(), []
    for k in range(2000):
        now = 10.0 + 0.001 * k
        logged += [pause.failures] if pause.failed() else []
    assert logged == [2**k for k in range(11)]
    assert pause.until == pytest.approx(17.0, abs=0.01)
    pause.failures, now = 0, 12.0
    assert pause.failed()  # a late failure does not shorten the pause
    assert (pause.until, pause.over) == (pytest.approx(17.0, abs=0.01), False)


def test_of_the_ready_reward_servers_the_idlest_is_chosen(tmp_path: Path) -> None:
    def announce(name: str, **more: Any) -> None:
        announced = {"kind": "rewards", "url": f"http://{name}", "pid": 7, "state": "ready", **more}
        (tmp_path / f"{name}.json").write_text(json.dumps(announced))

    endpoints = _Endpoints(tmp_path)
    announce("stopped", state="stopped")
    announce("engine", kind="engine")
    (tmp_path / "half.json").write_text('{"kind": ')
    (tmp_path / "list.json").write_text("[]")
    assert endpoints.choose(0.0) is None
    announce("a")
    announce("b")
    first = endpoints.choose(0.1)  # with no server known, the files are read each time
    assert first is not None
    assert [(one.name, one.url) for one in endpoints.known()] == [("a", "http://a"), ("b", "http://b")]
    first.open_requests = 2
    second = endpoints.choose(0.2)
    assert second is not None
    assert {first.name, second.name} == {"a", "b"}
    second.open_requests = 3
    assert endpoints.choose(0.3) is first
    first.pause.until = 0.5
    assert endpoints.choose(0.4) is second
    second.pause.until = 0.65
    assert endpoints.choose(0.46) is first  # the first to end its back-off
    announce("a", state="stopped")
    assert endpoints.choose(0.55) is first  # not yet read again
    assert endpoints.choose(0.61) is second
    assert endpoints.known() == [second]


def test_the_servers_that_owe_verdicts_are_named(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    start_server("echo")

    async def steps(client: RewardClient) -> None:
        assert client.waiting() == ""
        quick, slow = echoes(2, sleep_s=0.7), echoes(3, sleep_s=3.0)
        judging = [asyncio.create_task(client.score(request, Deadline(60, "verdicts"))) for request in (*quick, *slow)]
        await asyncio.gather(*judging[:2])
        await asyncio.sleep(1.2)
        assert re.fullmatch(
            r"\S+ has 3 open requests, no verdict for 1 s, the oldest open for [2-9] s \(task echo, prompt prompt-0\)",
            client.waiting(),
        )
        await asyncio.gather(*judging)
        assert client.waiting() == ""

    with_client(tmp_path, steps)


def test_without_a_server_the_last_error_is_named(tmp_path: Path) -> None:
    async def steps(client: RewardClient) -> None:
        judging = asyncio.create_task(client.score(request_of("echo", "1", "x"), Deadline(1.0, "a verdict")))
        await asyncio.sleep(0.3)
        assert (
            client.waiting()
            == f"1 requests wait for a reward server: no reward server is ready in {tmp_path}/endpoints"
        )
        await judging

    with_client(tmp_path, steps)


def test_slow_verdicts_hold_no_other_request_back(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    """Each response goes alone, as they end one after the other: the server has all before its first verdict."""
    server = start_server("echo", "--workers", "2")

    def queued() -> float:
        _, text = http(server, "/metrics")
        return float(re.search(r'prorl_reward_queued{plugin="echo"} (\S+)', text).group(1))  # type: ignore[union-attr]

    async def steps(client: RewardClient) -> None:
        requests = echoes(150, sleep_s=20.0)
        judging = [asyncio.create_task(client.score(request, Deadline(60, "verdicts"))) for request in requests]
        deadline = Deadline(15, "150 requests at the server")  # the first verdict takes 20
        while await asyncio.to_thread(queued) < 150 - 2:
            deadline.check()
            await asyncio.sleep(0.05)
        for task in judging:
            task.cancel()
        await asyncio.gather(*judging, return_exceptions=True)

    with_client(tmp_path, steps, ClientOptions(batch_size=1))


def test_load_is_spread_and_a_dead_server_is_avoided(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    first, second = start_server("echo", name="one"), start_server("echo", name="two")

    async def steps(client: RewardClient) -> None:
        requests = echoes(120, sleep_s=0.005)
        verdicts = await asyncio.gather(*(client.score(request, Deadline(60, "verdicts")) for request in requests))
        pids = {int(verdict["detail"].removeprefix("pid ")) for verdict in verdicts}
        assert pids & first.workers
        assert pids & second.workers
        first.kill()  # its endpoint file still says that it is ready
        verdicts = await asyncio.gather(*(client.score(request, Deadline(60, "verdicts")) for request in requests))
        assert [verdict["score"] for verdict in verdicts] == [at / 120 for at in range(120)]
        assert client.stats.connection_failures > 0
        async with asyncio.timeout(20):  # a POST ends shortly after its last verdict
            while [one.open_requests for one in client._endpoints.known()] != [0, 0]:
                await asyncio.sleep(0.01)

    with_client(tmp_path, steps, ClientOptions(batch_size=16))


def test_without_a_server_the_verdict_is_infrastructure_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")

    async def steps(client: RewardClient) -> None:
        verdict = await client.score(request_of("echo", "1", "x"), Deadline(0.5, "a verdict"))
        assert (verdict["id"], verdict["score"], verdict["failure"]) == ("x", None, "infrastructure")
        assert "waited 0.5 s for a verdict" in verdict["detail"]
        assert "no reward server is ready" in verdict["detail"]

    with_client(tmp_path, steps)


def test_a_wrong_token_and_a_raising_plugin_are_infrastructure(
    plugins: Path, start_server: StartServer, tmp_path: Path
) -> None:
    start_server("echo,odd")

    async def steps(client: RewardClient) -> None:
        verdict = await client.score(request_of("odd", "raise"), Deadline(60, "a verdict"))
        assert re.fullmatch(r"plugin 'odd' raised RuntimeError \(.*\.py:\d+\): out of order", verdict["detail"])
        assert (verdict["score"], verdict["failure"]) == (None, "infrastructure")
        assert client.stats.retries == 2  # long before the deadline: raising again and again stalls no run
        verdict = await client.score({"id": "y"}, Deadline(60, "a verdict"))  # what can never be right, as well
        assert (verdict["id"], verdict["score"], verdict["failure"]) == ("y", None, "infrastructure")
        assert "HTTP 400" in verdict["detail"]
        assert "request 0: field 'task' is missing" in verdict["detail"]
        (tmp_path / "token").write_text("wrong")
        verdict = await client.score(request_of("echo", "1"), Deadline(3, "a verdict"))
        assert verdict["failure"] == "infrastructure"
        assert "HTTP 401" in verdict["detail"]

    with_client(tmp_path, steps)


class StrictServer:
    """Answers as a reward server does, but takes no body over `longest` bytes and no request whose task is "bad"."""

    def __init__(self, tmp_path: Path, longest: int) -> None:
        self.tmp_path, self.longest = tmp_path, longest
        self.posted: list[int] = []  # requests of each POST that it read
        self.deadlines: list[float] = []  # seconds that each POST left it
        self.faults = 0  # POSTs that it will fail to answer

    async def _answer(self, http: web.Request) -> web.Response:
        self.deadlines.append(float(http.headers[DEADLINE_HEADER]))
        if self.faults:
            self.faults -= 1
            return web.json_response({"error": "out of order"}, status=500)
        try:
            requests = await http.json()
        except web.HTTPRequestEntityTooLarge:
            self.posted.append(-1)
            return web.json_response({"error": "the body is too long"}, status=413)
        self.posted.append(len(requests))
        if any(request["task"] == "bad" for request in requests):
            return web.json_response({"error": "a bad request"}, status=400)
        good: dict[str, Any] = {"score": 1.0, "correct": None, "parts": {}, "detail": "", "failure": None}
        return web.Response(
            text="".join(json.dumps({**good, "id": one["id"], "key": one["key"]}) + "\n" for one in requests)
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=self.longest)
        app.router.add_post("/v1/score", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        (self.tmp_path / "token").write_text("secret")
        (self.tmp_path / "endpoints").mkdir()
        announced = {"kind": "rewards", "url": f"http://127.0.0.1:{port}", "pid": 1, "state": "ready"}
        (self.tmp_path / "endpoints" / "rewards.json").write_text(json.dumps(announced))
        try:
            yield
        finally:
            await runner.cleanup()


class SilentServer(StrictServer):
    """Takes every POST, and answers none before `silent` is set."""

    def __init__(self, tmp_path: Path, longest: int) -> None:
        super().__init__(tmp_path, longest)
        self.silent = asyncio.Event()

    async def _answer(self, http: web.Request) -> web.Response:
        await self.silent.wait()
        return await super()._answer(http)


async def _all_scored(client: RewardClient, requests: list[dict[str, Any]]) -> list[Verdict]:
    """Return the verdicts; the first request has 10 s, the others 30 s."""
    deadlines = [Deadline(30 if at else 10, "verdicts") for at in range(len(requests))]
    return await asyncio.gather(*map(client.score, requests, deadlines))


def test_a_refused_request_costs_no_other_request_its_verdict(tmp_path: Path) -> None:
    async def steps(client: RewardClient) -> None:
        server = StrictServer(tmp_path, 2**20)
        requests = [request_of("bad" if at == 7 else "echo", "1", str(at)) for at in range(64)]
        async with server.running():
            verdicts = await _all_scored(client, requests)
        assert [verdict["id"] for verdict in verdicts if verdict["score"] != 1.0] == ["7"]
        assert (verdicts[7]["failure"], "HTTP 400" in verdicts[7]["detail"]) == ("infrastructure", True)
        assert server.posted == [64] + 64 * [1]  # the refusal of a single request is final
        assert client.stats.retries == client.stats.connection_failures == 0
        assert client.stats.posts == 65
        assert [(one.open_requests, one.posted) for one in client._endpoints.known()] == [(0, [])]

    with_client(tmp_path, steps)


def test_a_server_that_cannot_be_reached_is_counted_and_named(tmp_path: Path) -> None:
    async def steps(client: RewardClient) -> None:
        server = StrictServer(tmp_path, 2**20)
        async with server.running():
            pass  # its endpoint file stays
        verdict = await client.score(request_of("echo", "1", "x"), Deadline(0.15, "a verdict"))
        assert (verdict["id"], verdict["score"], verdict["failure"]) == ("x", None, "infrastructure")
        assert re.search(r"last: reward server http://127.0.0.1:\d+: Client\w+Error: ", verdict["detail"])
        assert (client.stats.posts, client.stats.connection_failures) == (1, 1)
        (server_again,) = client._endpoints.known()
        assert (server_again.pause.failures, server_again.open_requests, server_again.posted) == (1, 0, [])

    with_client(tmp_path, steps)


@pytest.mark.parametrize(
    ("options", "bundles"), [(ClientOptions(batch_bytes=500_000), [2] * 5), (ClientOptions(batch_size=4), [4, 4, 2])]
)
def test_bundles_are_cut_by_their_size_in_bytes_and_requests(
    options: ClientOptions, bundles: list[int], tmp_path: Path
) -> None:
    async def steps(client: RewardClient) -> None:
        server = StrictServer(tmp_path, 2**20)
        requests = [request_of("echo", "x" * 200_000, str(at)) for at in range(10)]
        async with server.running():
            verdicts = await _all_scored(client, requests)
        assert [verdict["score"] for verdict in verdicts] == [1.0] * 10
        assert sorted(server.posted, reverse=True) == bundles
        assert all(20 < seconds <= 30 for seconds in server.deadlines)  # what the most patient of each has left

    with_client(tmp_path, steps, options)


def test_a_server_that_answers_again_is_as_good_as_before(tmp_path: Path) -> None:
    async def steps(client: RewardClient) -> None:
        server = StrictServer(tmp_path, 2**20)
        server.faults = 2
        async with server.running():
            verdicts = await _all_scored(client, [request_of("echo", "1", str(at)) for at in range(3)])
            (known,) = client._endpoints.known()
        assert [verdict["score"] for verdict in verdicts] == [1.0] * 3
        assert client.stats.connection_failures == 2
        assert known.pause.until > 0.0
        assert (known.pause.failures, known.open_requests, known.posted) == (0, 0, [])

    with_client(tmp_path, steps)


def test_a_request_that_is_too_long_for_the_server_ends_alone(tmp_path: Path) -> None:
    async def steps(client: RewardClient) -> None:
        server = StrictServer(tmp_path, 2**20)
        lengths = {"short": 1, "long": 2**20, "another": 1}
        async with server.running():
            verdicts = await _all_scored(client, [request_of("echo", "x" * n, name) for name, n in lengths.items()])
        assert [verdict["score"] for verdict in verdicts] == [1.0, None, 1.0]
        assert "HTTP 413" in verdicts[1]["detail"]
        assert sorted(server.posted) == [-1, -1, 1, 1]
        assert client.stats.retries == client.stats.connection_failures == 0

    with_client(tmp_path, steps)


def test_a_request_whose_worker_dies_is_sent_again(plugins: Path, start_server: StartServer, tmp_path: Path) -> None:
    start_server("odd")

    async def steps(client: RewardClient) -> None:
        request = request_of("odd", "die_once", meta={"flag": str(tmp_path / "flag")})
        verdict = await client.score(request, Deadline(60, "a verdict"))
        assert (verdict["score"], verdict["failure"]) == (1.0, None)
        assert client.stats.retries == 1

    with_client(tmp_path, steps)


def test_a_request_on_which_the_plugin_hangs_is_tried_again_and_ends_without_a_score(
    plugins: Path, start_server: StartServer, tmp_path: Path
) -> None:
    start_server("odd", "--workers", "2")

    async def steps(client: RewardClient) -> None:
        asked = [request_of("odd", word, word) for word in ("select", "fine", "spin")]
        verdicts = await asyncio.gather(*(client.score(one, Deadline(120, "a verdict")) for one in asked))
        assert [verdict["failure"] for verdict in verdicts] == ["infrastructure", None, "timeout"]
        assert [verdict["score"] for verdict in verdicts] == [None, 1.0, 0.0]
        assert client.stats.retries == 2

    with_client(tmp_path, steps)


def test_a_wait_in_the_queue_of_a_server_that_judges_is_no_missed_deadline(
    plugins: Path, start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_server("echo,odd")

    async def steps(client: RewardClient) -> None:
        requests = echoes(12, sleep_s=0.5)  # one after the other, which takes longer than one deadline
        verdicts = await asyncio.gather(*(client.score(request, Deadline(3.0, "verdicts")) for request in requests))
        assert [verdict["score"] for verdict in verdicts] == [at / 12 for at in range(12)]
        assert client.stats.retries == 0

    with_client(tmp_path, steps)
    (slow,) = (record.message for record in caplog.records)
    assert re.fullmatch(
        r"a response of task echo has waited \d+ s for its verdict: rewards has [1-9] open requests, and judges"
        r" one every 0\.\d+ s\.  More rewards\.workers judge more responses at a time",
        slow,
    )


def test_a_plugin_that_hangs_is_named_at_once_and_in_the_missed_deadline(
    plugins: Path, start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_server("odd")

    async def steps(client: RewardClient) -> None:
        hanging = [request_of("odd", "select", f"r{at}") for at in range(8)]
        verdicts = await asyncio.gather(*(client.score(one, Deadline(6.0, "a verdict")) for one in hanging))
        assert {verdict["failure"] for verdict in verdicts} == {"infrastructure"}
        late = "the request's deadline of [56][.0-9]* s passed before plugin 'odd' had judged it: no verdict meanwhile"
        late += r" \(rewards.workers: \d, \d requests wait for them\)|waited 6 s for a verdict"
        last = [verdict["detail"] for verdict in verdicts if re.match(late, verdict["detail"])]
        assert len(last) >= 5
        assert all(re.search(r"; last( failure)?: .*no verdict after [\d.]+ s, of which", detail) for detail in last)

    with_client(tmp_path, steps)
    first = next(record for record in caplog.records if record.levelname == "WARNING")
    assert re.match(r"no verdict on prompt r0, .*: plugin 'odd': no verdict after [\d.]+ s, of which", first.message)


def test_a_server_that_never_answers_is_left_at_the_deadline(tmp_path: Path) -> None:
    server = SilentServer(tmp_path, 10**6)

    async def steps(client: RewardClient) -> None:
        async with server.running():
            verdict = await client.score(request_of("good", "1"), Deadline(0.5, "a verdict"))
            assert verdict["detail"].startswith("waited 0.5 s for a verdict; last: reward server rewards was sent the")
            while client.stats.connection_failures == 0:
                await asyncio.sleep(0.05)
            assert "TimeoutError: no verdict on 1 requests" in client._last_error
            server.silent.set()

    with_client(tmp_path, steps)


class FailingServer(SilentServer):
    """Judges nothing: it loses each request at once, but that named "silent", which it keeps."""

    async def _answer(self, http: web.Request) -> web.Response:
        (request,) = await http.json()
        if request["id"] == "silent":
            await self.silent.wait()
        verdict = failed_verdict(request["id"], "infrastructure", "the worker died")
        return web.Response(text=json.dumps({**verdict, "key": request["key"]}) + "\n")


def test_a_server_that_loses_every_request_extends_no_deadline(tmp_path: Path) -> None:
    server = FailingServer(tmp_path, 10**6)

    async def steps(client: RewardClient) -> None:
        async with server.running():
            silent = asyncio.create_task(client.score(request_of("echo", "1", "silent"), Deadline(1.0, "a verdict")))
            await asyncio.sleep(0.2)
            for at in range(20):  # longer than the deadline of the silent one, several verdicts within each
                await client.score(request_of("echo", "1", f"lost-{at}"), Deadline(10.0, "a verdict"))
                if silent.done():
                    break
            in_time = silent.done()
            server.silent.set()
            assert in_time
            assert silent.result()["detail"].startswith("waited 1 s for a verdict")

    with_client(tmp_path, steps)


def test_a_verdict_that_is_not_the_requests_own_is_refused() -> None:
    async def main() -> None:
        def fresh() -> dict[int, _Waiting]:
            future = asyncio.get_running_loop().create_future()
            return {5: _Waiting("mine", 5, b"", Deadline(1, "x"), future)}

        good = {"id": "mine", "score": 1.0, "correct": None, "parts": {}, "detail": "", "failure": None, "key": 5}
        awaited = fresh()
        future = awaited[5].future
        take_verdict(dict(good), awaited)
        assert future.result() == {key: value for key, value in good.items() if key != "key"}
        with pytest.raises(ValueError, match="key 5, but no open request"):
            take_verdict(dict(good), awaited)
        for wrong in ({"key": 6}, {"id": "another's"}, {"key": None}):
            awaited = fresh()
            future = awaited[5].future
            with pytest.raises(ValueError, match="but no open request|the request's id is 'mine'"):
                take_verdict({**good, **wrong}, awaited)
            assert not future.done()
        with pytest.raises(ValueError, match="field 'verdict.correct' is missing"):
            take_verdict({"key": 5, "id": "mine", "score": 1.0}, fresh())

    asyncio.run(main())
