"""The engine server with real vLLM, through our client and over plain HTTP."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineFailure, EngineRefused
from nemo_prorl.rollout.endpoints import EngineClient, Response, SamplingParams, response_seed
from nemo_prorl.rollout.engine.endpoint import served_file
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.open_responses import OpenResponses
from nemo_prorl.rollout.weight_store import WeightStore
from tests.rollout.engines import (
    CONFIG,
    EOS,
    TOKEN,
    EngineProcess,
    group_members,
    shared_memory_of,
    write_model,
)

pytestmark = pytest.mark.vllm

PROMPTS = [[3 + (7 * i + 3 * j) % 500 for j in range(140)] for i in range(6)]  # more than one cache block of 32
SHORT = [[3 + (11 * i + 5 * j) % 500 for j in range(8)] for i in range(16)]
SMALL_KV_MB = 4  # a token takes 2 KiB: 4 layers, 2 heads of 32, keys and values
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, stop_token_ids=())


async def with_client(engine: EngineProcess, work: Any, token: str = TOKEN) -> Any:
    async with aiohttp.ClientSession(read_bufsize=1 << 22) as http:
        return await work(EngineClient(http, engine.url, token))


async def ask(
    client: EngineClient, prompt: Sequence[int], seeds: Sequence[int], sampling: SamplingParams, **listeners: Any
) -> list[Response]:
    found = [response async for response in client.generate(prompt, seeds, sampling, None, **listeners)]
    return sorted(found, key=lambda response: response.index)


def ask_all(engine: EngineProcess, sampling: SamplingParams, seeds: Sequence[int] = (1,)) -> list[Response]:
    """One prompt after the other."""

    async def work(client: EngineClient) -> list[Response]:
        return [response for prompt in PROMPTS for response in await ask(client, prompt, seeds, sampling)]

    found: list[Response] = asyncio.run(with_client(engine, work))
    return found


def load(engine: EngineProcess, path: Path, version: int) -> None:
    asyncio.run(with_client(engine, lambda c: c.load_weights(str(path), version, Deadline(60, "weights"))))


def published(engine: EngineProcess, model: Path, version: int, dtype: str | None = None) -> Path:
    """The model's weights, written as the trainer writes them for engines of a dtype, in the engine's folder."""
    return WeightStore(engine.weights_dir, dtype).write(load_file(model / "model.safetensors").items(), version)


def same(left: Sequence[Response], right: Sequence[Response]) -> bool:
    return [(r.token_ids, r.logprobs) for r in left] == [(r.token_ids, r.logprobs) for r in right]


async def health_of(url: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health", headers=headers) as reply:
        found: dict[str, Any] = await reply.json()
        return found


def http(engine: EngineProcess, method: str, path: str, body: Any = None, token: str | None = TOKEN) -> tuple[int, Any]:
    """Status and JSON of one plain request; a str body is sent as it is."""

    async def call() -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, str) else json.dumps(body)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, engine.url + path, data=data, headers=headers) as reply,
        ):
            text = await reply.text()
            return reply.status, json.loads(text) if reply.status != 200 or path != "/generate" else text

    return asyncio.run(call())


@pytest.fixture(scope="module")
def fresh(
    vllm_python: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """An engine started on the weights that the shared one is updated to, with a worker process of its own.

    Its cache holds 64 blocks of 32 tokens, too few for all that one test asks for together.
    """
    engine = EngineProcess(vllm_python, models["tied1"], tmp_path_factory.mktemp("fresh"), 0, f"--kv-mb={SMALL_KV_MB}")
    engine.variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    yield engine.start()
    engine.stop()


def assert_update_equals(
    engine: EngineProcess, fresh: EngineProcess, models: dict[str, Path], kind: str, dtype: str | None = None
) -> None:
    load(engine, published(engine, models[f"{kind}0"], 0, dtype), 0)
    sampled = SamplingParams(temperature=1.2, max_tokens=32, stop_token_ids=())
    old = ask_all(engine, GREEDY)
    load(engine, published(engine, models[f"{kind}1"], 1, dtype), 1)
    new, drawn = ask_all(engine, GREEDY), ask_all(engine, sampled, (5, 6))
    assert {r.weight_version for r in new} == {1}
    assert {r.weight_version for r in old} == {0}
    assert not any(same([a], [b]) for a, b in zip(old, new, strict=True))
    fresh.wait_ready()
    assert same(new, ask_all(fresh, GREEDY))
    assert same(drawn, ask_all(fresh, sampled, (5, 6)))


def test_without_log_probabilities_the_tokens_are_the_same(engine: EngineProcess) -> None:
    sampled = SamplingParams(temperature=1.2, max_tokens=32, stop_token_ids=())
    told, untold = ask_all(engine, sampled, (5, 6)), ask_all(engine, replace(sampled, logprobs=False), (5, 6))
    assert [response.token_ids for response in untold] == [response.token_ids for response in told]
    assert [response.logprobs for response in untold] == [[]] * len(told)


@pytest.mark.slow  # starts a second engine; every run's engine_gap shows the same for sampled tokens
def test_greedy_output_after_an_update_is_that_of_a_fresh_engine(
    engine: EngineProcess, fresh: EngineProcess, models: dict[str, Path]
) -> None:
    assert_update_equals(engine, fresh, models, "tied")


@pytest.mark.slow
def test_responses_that_lose_their_place_in_the_cache_are_counted_and_go_on_as_they_were(
    engine: EngineProcess, fresh: EngineProcess, models: dict[str, Path]
) -> None:
    """vLLM computes their tokens again, which may change last bits, and draws on from their own seeds."""
    load(engine, published(engine, models["tied1"], 3), 3)
    sampling = SamplingParams(temperature=1.2, max_tokens=110, stop_token_ids=())

    async def work(client: EngineClient) -> tuple[list[Response], float]:
        load = OpenResponses(1)
        load.begin()
        groups = await asyncio.gather(
            *(
                ask(client, prompt, range(100 * i, 100 * i + 12), sampling, on_kv_cache_use=load.kv_cache_used)
                for i, prompt in enumerate(SHORT)
            )
        )
        return [response for group in groups for response in group], load.end()["preemptions"]

    room, preempted_with_room = asyncio.run(with_client(engine, work))
    crowded, preempted = asyncio.run(with_client(fresh.wait_ready(), work))
    assert preempted > preempted_with_room == 0
    assert len({tuple(response.token_ids) for response in room}) == 12 * len(SHORT)
    for one, other in zip(room, crowded, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_same_with_an_untied_head_and_in_bfloat16(
    vllm_python: str, models: dict[str, Path], tmp_path: Path, dtype: str | None
) -> None:
    extra = [] if dtype is None else [f"--dtype={dtype}"]
    engine = EngineProcess(vllm_python, models["untied0"], tmp_path / "a", 0, *extra).start().wait_ready()
    fresh = EngineProcess(vllm_python, models["untied1"], tmp_path / "b", 0, *extra).start()
    try:
        assert_update_equals(engine, fresh, models, "untied", dtype)
    finally:
        engine.stop()
        fresh.stop()


def test_logprobs_are_those_of_the_sampling_distribution(engine: EngineProcess, models: dict[str, Path]) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    load(engine, published(engine, models["tied0"], 2), 2)
    temperature = 1.2
    responses = ask_all(engine, SamplingParams(temperature=temperature, max_tokens=64, stop_token_ids=()), (3, 4))
    model = Qwen2ForCausalLM(Qwen2Config(**{**CONFIG, "tie_word_embeddings": True})).float().eval()
    model.load_state_dict(load_file(models["tied0"] / "model.safetensors"), strict=False)
    gap: list[torch.Tensor] = []
    unscaled: list[torch.Tensor] = []
    for i, response in enumerate(responses):
        prompt, ids = PROMPTS[i // 2], torch.tensor(response.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        for scale, gaps in ((temperature, gap), (1.0, unscaled)):
            expected = torch.log_softmax(logits / scale, -1).gather(-1, ids[:, None])[:, 0]
            gaps.append((torch.tensor(response.logprobs) - expected).abs())
    assert len(torch.cat(gap)) == 64 * 12
    assert torch.cat(gap).mean() < 1e-5
    assert torch.cat(gap).max() < 1e-4
    assert torch.cat(unscaled).mean() > 1e-2


def test_forced_tokens_get_the_log_probabilities_that_they_have_when_sampled(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    sampled = SamplingParams(temperature=1.2, max_tokens=70, stop_token_ids=())  # more than a cache block of 32

    def forced(responses: Sequence[Response]) -> list[Response]:
        async def work(client: EngineClient) -> list[Response]:
            answers = [
                ask(client, PROMPTS[i // 2], [0], SamplingParams(1.2, forced=tuple(one.token_ids)))
                for i, one in enumerate(responses)
            ]
            return [answer for [answer] in await asyncio.gather(*answers)]

        return asyncio.run(with_client(engine, work))

    load(engine, published(engine, models["tied0"], 2), 2)
    drawn = ask_all(engine, sampled, (3, 4))
    again = forced(drawn)
    assert [one.token_ids for one in again] == [one.token_ids for one in drawn]
    pairs = list(zip(again, drawn, strict=True))
    assert max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True)) < 1e-5
    load(engine, published(engine, models["tied1"], 3), 3)
    other = forced(drawn)
    assert {one.weight_version for one in other} == {3}
    assert sum(abs(a - b) for a, b in zip(other[0].logprobs, drawn[0].logprobs, strict=True)) / 70 > 0.01


def test_a_response_does_not_depend_on_what_else_is_in_the_batch(engine: EngineProcess) -> None:
    sampling = SamplingParams(temperature=1.2, max_tokens=100, stop_token_ids=())

    async def work(client: EngineClient) -> None:
        alone = [await ask(client, prompt, [7, 8], sampling) for prompt in PROMPTS]
        done = asyncio.Event()

        async def neighbour(i: int) -> None:
            while not done.is_set():
                await ask(client, SHORT[i], range(8), SamplingParams(1.0, max_tokens=20 + i))

        crowd = [asyncio.ensure_future(neighbour(i)) for i in range(len(SHORT))]
        while (await health_of(client.url))["in_engine"] < 32:
            await asyncio.sleep(0.01)
        together = await asyncio.gather(*(ask(client, prompt, [8, 7], sampling) for prompt in PROMPTS))
        done.set()
        await asyncio.gather(*crowd)
        for one, other in zip(alone, together, strict=True):
            assert same(one, other[::-1])
            assert not same(one[:1], one[1:])

    asyncio.run(with_client(engine, work))


def test_more_prompt_tokens_at_once_than_a_batch_holds(engine: EngineProcess) -> None:
    """Prompts are not cut in two: with seeds that ends vLLM 0.32's core on a CPU."""
    sampling = SamplingParams(temperature=1.2, max_tokens=4, stop_token_ids=())
    prompts = [[3 + (7 * i + k) % 500 for k in range(300)] for i in range(48)]  # 14,400 tokens; a batch holds 4,096

    async def together(client: EngineClient) -> list[list[Response]]:
        return await asyncio.gather(*(ask(client, prompt, [i, 100 + i], sampling) for i, prompt in enumerate(prompts)))

    before = engine.core_pid
    found = asyncio.run(with_client(engine, together))
    assert [len(group) for group in found] == [2] * 48
    assert all(1 <= len(r.token_ids) <= 4 for group in found for r in group)  # some end by eos
    assert engine.core_pid == before


def test_responses_come_the_moment_they_end_and_include_the_stop_token(engine: EngineProcess) -> None:
    async def work(client: EngineClient) -> list[Response]:
        sampling = SamplingParams(1.2, max_tokens=400)
        return [r async for r in client.generate(SHORT[0], range(48), sampling, None)]

    responses = asyncio.run(with_client(engine, work))
    lengths = [len(r.token_ids) for r in responses]
    ended = [r for r in responses if r.finished]
    assert ended
    assert all(r.token_ids[-1] == EOS and EOS not in r.token_ids[:-1] for r in ended)
    assert all(r.finished or len(r.token_ids) == 400 for r in responses)
    # All began within a step or two, so the shortest comes first; what a busy machine sends at once has no order.
    earlier = sum(length > following + 2 for length, following in itertools.pairwise(lengths))
    assert earlier <= len(lengths) // 8, lengths
    assert lengths[0] < lengths[-1]
    assert [r.index for r in responses] != sorted(r.index for r in responses)


def test_responses_and_weight_loads_are_recorded_when_asked(engine: EngineProcess, models: dict[str, Path]) -> None:
    assert http(engine, "POST", "/trace", {"record": 1})[0] == 400
    sampled = SamplingParams(temperature=1.2, max_tokens=8, stop_token_ids=())
    before = asyncio.run(with_client(engine, lambda c: ask(c, SHORT[0], (1, 2, 3), sampled)))
    assert http(engine, "POST", "/trace", {"record": True})[0] == 200
    recorded = asyncio.run(with_client(engine, lambda c: ask(c, SHORT[0], (1, 2, 3), sampled)))
    load(engine, published(engine, models["tied0"], 7), 7)
    status, part = http(engine, "POST", "/trace", {"record": False})
    assert status == 200
    assert [(s["name"], s["args"].get("tokens")) for s in part["spans"]] == [("response", 8)] * 3 + [
        ("load weights 7", None)
    ]
    assert all(s["begin"] <= s["end"] <= part["clock"] for s in part["spans"])
    assert same(recorded, before)  # the recorder changes nothing
    asyncio.run(with_client(engine, lambda c: ask(c, SHORT[0], (1,), sampled)))
    assert http(engine, "POST", "/trace", {"record": False})[1]["spans"] == []


def test_a_file_tells_that_the_engine_has_generated_a_response(engine: EngineProcess) -> None:
    ask_all(engine, GREEDY)
    assert served_file(str(engine.endpoint_file)).exists()


def test_the_responses_of_a_group_share_its_prompt(engine: EngineProcess) -> None:
    prompt = [3 + (13 * j) % 500 for j in range(140)]  # that no cache holds: four blocks of 32 and a rest
    sampled = SamplingParams(temperature=1.2, max_tokens=8, stop_token_ids=())
    assert http(engine, "POST", "/trace", {"record": True})[0] == 200
    asyncio.run(with_client(engine, lambda c: ask(c, prompt, range(16), sampled)))
    status, part = http(engine, "POST", "/trace", {"record": False})
    assert status == 200
    assert sorted(s["args"]["prompt_cached"] for s in part["spans"]) == [0] + [128] * 15


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("POST", "/generate"), ("POST", "/weights")])
def test_every_request_needs_the_token(engine: EngineProcess, method: str, path: str) -> None:
    for token in (None, "", TOKEN[:-1], TOKEN + "x"):
        status, answer = http(engine, method, path, {"prompt": [5]}, token)
        assert status == 401, (token, answer)
    assert http(engine, "GET", "/health")[0] == 200


def test_weights_that_do_not_fit_are_refused_and_the_engine_keeps_its_own(
    engine: EngineProcess, models: dict[str, Path], tmp_path: Path
) -> None:
    good = published(engine, models["tied1"], 3)
    load(engine, good, 3)
    before, data = ask_all(engine, GREEDY), good.read_bytes()
    folder = engine.weights_dir
    outside = shutil.copy(models["tied0"] / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / "link.safetensors").unlink(missing_ok=True)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "cut.safetensors").write_bytes(data[:-100])
    (folder / "head.safetensors").write_bytes(data[:100])
    (folder / "noise.safetensors").write_bytes(os.urandom(1000))
    shutil.copy(models["untied0"] / "model.safetensors", folder / "other.safetensors")
    cases = {
        outside: "expected a file directly in this run",
        folder / ".." / "weights" / ".." / "token": "expected a file directly in this run",
        folder / "link.safetensors": "expected a file directly in this run",
        folder / "none.safetensors": "no such file",
        folder / "cut.safetensors": "expected a complete safetensors file",
        folder / "head.safetensors": "safetensors",
        folder / "noise.safetensors": "safetensors",
        folder / "other.safetensors": "lm_head.weight",
    }
    for path, reason in cases.items():
        status, answer = http(engine, "POST", "/weights", {"path": str(path), "version": 4})
        assert status == 400, (path, answer)
        assert reason in answer["error"], (path, answer)
    after = ask_all(engine, GREEDY)
    assert same(before, after)
    assert {r.weight_version for r in after} == {3}


def test_bad_requests_are_refused_and_the_engine_lives_on(engine: EngineProcess) -> None:
    pid = engine.core_pid
    bad: list[Any] = [[1], "{bad", None]
    bad += [{"prompt": prompt, "seeds": [1]} for prompt in ([5, 512], [-1], [], [5] * 600)]
    for body in bad:
        status, answer = http(engine, "POST", "/generate", body)
        assert status == 400, body
        assert answer["error"]
    assert http(engine, "POST", "/generate", {"prompt": [5], "seeds": [1], "weight_version": 99})[0] == 409
    assert http(engine, "POST", "/generate", {"prompt": [5] * 510, "seeds": [1], "max_tokens": 2})[0] == 200
    assert engine.core_pid == pid

    async def refused(client: EngineClient) -> None:
        await ask(client, [512], [1], GREEDY)

    with pytest.raises(EngineRefused, match=r"512 is not a token id in 0\.\.511"):
        asyncio.run(with_client(engine, refused))


def test_the_use_of_the_kv_cache_grows_with_the_open_responses_and_falls_again(engine: EngineProcess) -> None:
    sampling = SamplingParams(1.0, max_tokens=120, stop_token_ids=())
    blocks = (256 << 20) // (32 * 2048)  # a block has 32 tokens of 2 KiB

    async def peak(client: EngineClient, responses: int) -> float:
        load = OpenResponses(1)
        load.begin()
        await ask(client, SHORT[0], range(responses), sampling, on_kv_cache_use=load.kv_cache_used)
        assert load.end()["preemptions"] == 0
        assert load.kv_cache_peak is not None
        return load.kv_cache_peak

    async def work(client: EngineClient) -> list[float]:
        await peak(client, 1)  # takes what earlier tests left
        return [await peak(client, responses) for responses in (1, 40, 1)]

    one, many, again = asyncio.run(with_client(engine, work))
    assert one == again == pytest.approx(4 / blocks, abs=2e-4)  # 127 tokens
    assert many == pytest.approx(40 * 4 / blocks, abs=2e-3)


def test_a_client_that_hangs_up_takes_its_work_out_of_the_engine(engine: EngineProcess) -> None:
    async def work(client: EngineClient) -> None:
        sampling = SamplingParams(1.0, max_tokens=480, stop_token_ids=())
        tasks = [asyncio.ensure_future(ask(client, prompt, range(4), sampling)) for prompt in SHORT]
        while (await health_of(client.url))["in_engine"] < 32:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = Deadline(20, "an empty engine")
        while (health := await health_of(client.url))["in_engine"] or health["in_flight"]:
            deadline.check()
            await asyncio.sleep(0.01)

    asyncio.run(with_client(engine, work))


def test_a_hung_core_shows_in_health(engine: EngineProcess) -> None:
    os.kill(engine.core_pid, signal.SIGSTOP)
    try:
        status, answer = http(engine, "GET", "/health")
    finally:
        os.kill(engine.core_pid, signal.SIGCONT)
    assert status == 503
    assert "does not answer within 3 s" in answer["error"]
    assert http(engine, "GET", "/health")[0] == 200


def supervise(engine: EngineProcess, until: threading.Event) -> threading.Thread:
    """Restarts the engine whenever it is gone, as the node supervisor does."""

    def watch() -> None:
        while not until.is_set():
            if not engine.running:
                engine.start()
            time.sleep(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_core_is_an_error_within_seconds_and_the_restarted_engine_serves(
    engine: EngineProcess, models: dict[str, Path]
) -> None:
    path = published(engine, models["tied1"], 7)
    sampling = SamplingParams(1.0, max_tokens=480, stop_token_ids=())
    first, core = engine.pid, engine.core_pid
    seeds = [response_seed(1, "p", 0, i) for i in range(4)]
    told: list[float] = []

    async def work() -> None:
        pool = EnginePool(engine.endpoints, TOKEN)
        await pool.publish(path, 7, Deadline(60, "weights"))
        expected = await pool.generate(SHORT[0], seeds, sampling, Deadline(60, "before"), version=7)

        async def plain(client: EngineClient) -> None:
            try:
                await ask(client, SHORT[0], range(64), sampling)
            except EngineFailure:
                told.append(time.monotonic())

        direct = asyncio.ensure_future(with_client(engine, plain))
        request = asyncio.ensure_future(
            pool.generate(SHORT[0], seeds, sampling, Deadline(120, "a response"), version=7)
        )
        while (await health_of(engine.url))["in_engine"] < 64:
            await asyncio.sleep(0.01)
        os.kill(core, signal.SIGKILL)
        killed = time.monotonic()
        await direct
        assert told
        assert told[0] - killed < 5
        got = await request
        await pool.close()
        assert same(got, expected)  # with version 7, although the engine came up with its folder's weights
        assert {r.weight_version for r in got} == {7}

    stop = threading.Event()
    supervisor = supervise(engine, stop)
    try:
        asyncio.run(work())
    finally:
        stop.set()
        supervisor.join()
    assert engine.pid != first
    assert group_members(first) == []


@pytest.mark.slow
def test_no_process_or_shared_memory_is_left_when_a_server_with_a_worker_process_is_killed(
    fresh: EngineProcess,
) -> None:
    fresh.wait_ready()
    assert len(group_members(fresh.pid)) >= 5  # server, guard, core, worker, multiprocessing's tracker
    shared = shared_memory_of(fresh.pid)
    assert shared
    os.kill(fresh.pid, signal.SIGKILL)
    fresh.wait_gone(10)
    assert [name for name in shared if Path(name).exists()] == []


def test_a_token_that_others_can_read_is_refused_at_once(engine: EngineProcess, tmp_path: Path) -> None:
    other = EngineProcess(engine.python, engine.model, tmp_path)
    other.token_file.chmod(0o644)
    other.start()
    assert other.process is not None
    assert other.process.wait(30) == 2
    assert "chmod 600" in other.log.read_text()
    other.wait_gone(5)


def test_a_model_folder_without_weights_is_refused_at_once(engine: EngineProcess, tmp_path: Path) -> None:
    empty = write_model(tmp_path / "model", True, 0)
    (empty / "model.safetensors").unlink()
    other = EngineProcess(engine.python, empty, tmp_path / "run").start()
    assert other.process is not None
    assert other.process.wait(30) == 2
    assert "contains no *.safetensors" in other.log.read_text()


def test_the_endpoint_file_says_where_the_engine_is(engine: EngineProcess) -> None:
    assert engine.endpoint["pid"] == engine.pid
    assert (engine.endpoint["kind"], engine.endpoint["index"], engine.endpoint["state"]) == ("engine", 0, "ready")
    assert engine.url.startswith("http://127.0.0.1:")
    assert engine.endpoint["weight_version"] == -1
