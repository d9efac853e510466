"""Rollout engine: one vLLM engine behind a small HTTP server.  It takes and returns tokens; weights come from a file.

    python -m nemo_prorl.rollout.engine.server --model DIR --token-file FILE --weights-dir DIR --endpoint-file FILE

Runs in the rollout environment, by module or by path.  Every request needs `Authorization: Bearer TOKEN`.

POST /generate {"prompt": [ids], "seeds": [7, 8], "temperature": 1.2, "top_p": 1.0, "max_tokens": 64,
                "stop_token_ids": [2], "weight_version": 3}
    The reply is NDJSON: one line for each response as soon as it ends, {"index", "token_ids", "logprobs",
    "finish_reason", "weight_version"}, then {"done": n, "kv_cache_peak": 0.4, "preemptions": 0}.  token_ids includes
    the stop token.
    Log-probabilities are those of the sampled distribution: log_softmax(logits / temperature), over the tokens that
    top_p keeps.  `kv_cache_peak`: largest share of the KV cache in use since the last report, if vLLM's version fits.
    `preemptions`: how often a response lost its part of the full cache since then and was computed again.
    After each 10 s in which no response ended, a line {"tokens": n} gives the number of tokens that the engine has
    generated since its start, for all requests.  A reply without {"done"} was cut off; a last line {"error"} gives the
    reason.  `logprobs` false omits log-probabilities.  `weight_version` is optional: 409 if the engine has others.
    `forced`, a list of ids, is the response: the engine samples nothing and returns its log-probabilities.
POST /weights {"path": FILE, "version": 3, "wait_s": 60}
    Waits until no response is in flight, loads safetensors with Hugging Face names, compares what the engine then holds
    with the checksums in the file, and empties the prefix cache.  If a tensor differs, the server ends with status 70.
    `unread` in the reply: names of the file's tensors that could not be compared.
    400: the file does not fit or is in another folder; the engine keeps its weights.  409: busy for more than wait_s.
POST /sleep {"level": 2, "wait_s": 60}, POST /wake {"parts": ["weights"]}
    /sleep waits until no response is in flight and releases the device memory.  /wake takes back the memory of `parts`
    (default: of all parts; see `sleep.py`).  /generate returns 409 while a part is asleep, and after a sleep at level 2
    until weights are loaded.
POST /trace {"record": true}, later {"record": false}
    Records each response and each load of weights.  The second reply contains the records.
GET /health
    200 with weight version and number of responses in flight; 503 if the engine core is dead or does not answer.

Requests that arrive during an update wait for its end.  Exit status 70: the core died, or an update, a sleep or a wake
failed half-way; 2: wrong use.  When this process ends, `guard.py` ends all its child processes.
"""

import argparse
import asyncio
import contextlib
import copy
import gc
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3])
if not __package__:  # started by path: replace this folder, whose module names could shadow other packages
    sys.path[0] = ROOT

from nemo_prorl import stacks  # noqa: E402
from nemo_prorl.rollout.engine.endpoint import UNPUBLISHED, announce, served_file  # noqa: E402
from nemo_prorl.rollout.engine.guard import Guard  # noqa: E402
from nemo_prorl.rollout.engine.requests import (  # noqa: E402
    BadRequest,
    GenerateRequest,
    ModelLimits,
    SleepRequest,
    TraceRequest,
    WakeRequest,
    WeightsRequest,
    parse,
)
from nemo_prorl.rollout.engine.setup import is_cpu_build, limits_of, make_engine, set_environment  # noqa: E402
from nemo_prorl.rollout.engine.sleep import HELD_SUFFIX, EngineSleep, Refused, wait_while_held  # noqa: E402
from nemo_prorl.rollout.engine.vllm_internals import kv_cache_use  # noqa: E402
from nemo_prorl.rollout.engine.weight_load import Shapes, UnfitWeights, check_fits, check_held, shapes_of_model  # noqa: E402
from nemo_prorl.service import is_authorized, is_own, listening_socket, read_token  # noqa: E402
from nemo_prorl.tracing import RECORDER, answer  # noqa: E402

_log = logging.getLogger("nemo_prorl.rollout.engine.server")

ENGINE_LOST = 70  # exit status: the supervisor must start a new engine
HEARTBEAT_S = 10.0  # seconds between lines with the number of tokens, in a stream without finished responses
UPDATE_LIMIT_S = 300.0  # seconds; a longer update counts as a hung core
PREFIXES = 64  # prefixes of one forced response that vLLM computes at once


class EngineServer:
    """The engine and its open requests.  All methods run on the event loop."""

    def __init__(
        self,
        engine: Any,
        limits: ModelLimits,
        shapes: Shapes,
        weights_dir: str,
        health_s: float,
        sleep: EngineSleep,
        name: str,
        served_file: Path | None = None,
    ) -> None:
        self.engine, self.limits, self.shapes, self.sleeping, self.name = engine, limits, shapes, sleep, name
        self.weights_dir, self.health_s, self.served_file = weights_dir, health_s, served_file
        self.version: int = UNPUBLISHED
        self.in_flight, self.requests, self.tokens, self.updating_since = 0, 0, 0, 0.0
        # Largest share of the KV cache in use, and number of preemptions, since the last report.
        self.kv_peak: float | None = None
        self.preemptions = 0
        self.update = asyncio.Lock()
        # `idle`: no response is in flight.  `open`: no update is running and the engine is awake.
        self.idle, self.open = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self.open.set()

    async def generate(self, body: bytes) -> Any:
        from starlette.responses import StreamingResponse

        request = parse(GenerateRequest, body)
        self.limits.check(request)
        if refusal := self.sleeping.refusal:
            raise Refused(refusal)
        await self.open.wait()
        if request.weight_version not in (None, self.version):
            expected = request.weight_version
            raise Refused(f"the request expects weights {expected}; this engine has weights {self.version}")
        return StreamingResponse(self._stream(request), media_type="application/x-ndjson")

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[str]:
        """Yield the lines of a reply.

        Each response is one vLLM request, because a request with n > 1 returns all responses at the end.
        """
        await self.open.wait()
        tasks = self._start(request)
        self.in_flight += len(tasks)
        self.idle.clear()
        for task in tasks:
            task.add_done_callback(self._ended)
        left = set(tasks)
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                yield "".join(task.result() for task in done) or json.dumps({"tokens": self.tokens}) + "\n"
            use = {} if self.kv_peak is None else {"kv_cache_peak": self.kv_peak, "preemptions": self.preemptions}
            self.kv_peak, self.preemptions = None, 0
            yield json.dumps({"done": len(tasks), **use}) + "\n"
        except Exception as error:  # mostly EngineDeadError.  The reply has begun, so the error goes into the reply
            _log.error("a /generate request failed: %s: %s", type(error).__name__, error)
            yield json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n"
        finally:  # also after the client has disconnected; an await here would be cancelled
            for task in tasks:
                task.cancel()  # removes an unfinished response from the engine

    def _start(self, request: GenerateRequest) -> "list[asyncio.Task[str]]":
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        stop = request.stop_token_ids
        params = SamplingParams(
            n=1,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seeds[0],
            stop_token_ids=list(self.limits.stop_token_ids) if stop is None else stop,
            ignore_eos=True,  # stop tokens come from the request, not from config.json
            logprobs=0 if request.logprobs else None,
            flat_logprobs=request.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,  # a shallow copy instead of a deep one
        )
        prompt = tokens_input(request.prompt)  # same result as vLLM's renderer, which uses a thread for each prompt
        tasks = []
        for index, seed in enumerate(request.seeds):
            seeded = copy.copy(params)  # a copy, because the constructor checks all values again
            seeded.seed = seed
            work = self._line(index, prompt, seeded) if request.forced is None else self._forced(index, request, seeded)
            tasks.append(asyncio.ensure_future(work))
        return tasks

    async def _line(self, index: int, prompt: Any, params: Any) -> str:
        """Generate response number `index` of a request; return its line of the reply."""
        tokens, logprobs, output = await self._generated(prompt, params)
        return _line_of(index, tokens, logprobs, output.finish_reason, output)

    async def _forced(self, index: int, request: GenerateRequest, params: Any) -> str:
        """Return the line of a response whose tokens are given, with the log-probability of each after those before it.

        vLLM generates one token after each prefix of the response, and returns the given token's log-probability, too.
        The longest prefix comes first, so that the cache has the others.
        """
        from vllm.inputs import tokens_input

        forced, room = request.forced or [], asyncio.Semaphore(PREFIXES)

        async def score(length: int) -> tuple[float, Any]:
            single = copy.copy(params)
            single.max_tokens, single.logprobs, single.logprob_token_ids = 1, 1, [forced[length]]
            async with room:
                prefix = tokens_input([*request.prompt, *forced[:length]])
                _, [logprob], output = await self._generated(prefix, single, column=1)
            return logprob, output

        last = await score(len(forced) - 1)
        scored = [*await asyncio.gather(*map(score, range(len(forced) - 1))), last]
        return _line_of(index, forced, [logprob for logprob, _ in scored], "length", last[1])

    async def _generated(self, prompt: Any, params: Any, column: int = 0) -> tuple[list[int], list[float], Any]:
        """Generate a response; return its tokens, their log-probabilities, and vLLM's last output.

        `column`: 0 for the log-probabilities of the sampled tokens, 1 for those of `params.logprob_token_ids`.
        """
        self.requests += 1
        last, began = None, time.monotonic()
        tokens: list[int] = []
        logprobs: list[float] = []
        try:
            async for last in self.engine.generate(prompt, params, f"r{self.requests}"):
                output = last.outputs[0]
                tokens += output.token_ids
                self.tokens += len(output.token_ids)
                if (flat := output.logprobs) is not None:  # at each position the sampled token is first
                    logprobs += [flat.logprobs[start + column] for start in flat.start_indices]
        finally:
            _record(last, len(tokens), began)
        if last is None or output.finish_reason not in ("stop", "length"):
            raise RuntimeError("vLLM aborted a response")
        self._tell_served()
        if (use := kv_cache_use(last)) is not None:
            self.kv_peak, self.preemptions = max(use[0], self.kv_peak or 0.0), self.preemptions + use[1]
        return tokens, logprobs, output

    def _tell_served(self) -> None:
        """Make the file for the first response.  Before it exists, a repeated exception of the engine ends the run."""
        if self.served_file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self.served_file.touch()
            self.served_file = None

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()
        if not task.cancelled():
            task.exception()  # otherwise asyncio would report it as never retrieved

    async def weights(self, body: bytes) -> Any:
        request = parse(WeightsRequest, body)
        check_fits(request.path, self.weights_dir, self.shapes)
        async with self.update:
            if "weights" in self.sleeping.asleep:
                raise Refused(str(self.sleeping.refusal))
            await self._close(request.wait_s)
            return await self._change(f"load weights {request.version}", self._load(request))

    async def _load(self, request: WeightsRequest) -> dict[str, Any]:
        self.updating_since = began = time.monotonic()
        path = os.path.realpath(request.path)
        unread = check_held(path, await self.engine.collective_rpc("prorl_load_weights", args=(path,)))
        # Cached prefixes were computed by the old weights.  The reset returns false while blocks are in use.
        if not await self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied, because blocks are in use")
        await self.engine.update_weight_version(str(request.version))  # vLLM adds it to every response
        self.version, self.updating_since, self.sleeping.weights_lost = request.version, 0.0, False
        RECORDER.add(f"load weights {request.version}", "weights", began, time.monotonic())
        seconds = round(time.monotonic() - began, 4)
        return {"weight_version": request.version, "seconds": seconds, "unread": unread}

    async def sleep(self, body: bytes) -> Any:
        request = parse(SleepRequest, body)
        async with self.update:
            await self._close(request.wait_s)
            return await self._change("sleep", self.sleeping.fall_asleep(request.level))

    async def wake(self, body: bytes) -> Any:
        request = parse(WakeRequest, body)
        async with self.update:
            return await self._change("wake", self.sleeping.wake(request.parts))

    async def _close(self, wait_s: float) -> None:
        """Wait until no response is in flight, then block new ones.  Raises Refused after `wait_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.idle.wait(), wait_s)
        if self.in_flight:
            raise Refused(f"{self.in_flight} responses are still in flight after {wait_s:g} s; nothing was changed")
        self.open.clear()

    async def _change(self, action: str, work: Awaitable[dict[str, Any]]) -> Any:
        """Run `work`, a change of the whole engine; then admit responses again unless the engine is asleep.

        After a failed change the weights may be partly old and the free memory is unknown.  The process therefore
        exits with status 70.
        """
        from starlette.responses import JSONResponse

        try:
            result = await work
        except (BadRequest, Refused):  # the engine is unchanged
            self._open_if_awake()
            raise
        except Exception as error:
            _log.critical("the engine failed to %s: %s: %s", action, type(error).__name__, error)
            asyncio.get_running_loop().call_later(0.5, os._exit, ENGINE_LOST)
            return JSONResponse({"error": f"failed to {action}, engine lost: {error}"[:500]}, status_code=500)
        self._open_if_awake()
        return JSONResponse(result)

    def _open_if_awake(self) -> None:
        if self.sleeping.refusal is None:
            self.open.set()

    async def trace(self, body: bytes) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse(answer(parse(TraceRequest, body).model_dump(), self.name))

    async def health(self) -> Any:
        """Reply with the state of the engine, or with status 503 if its core does not answer in `health_s` seconds.

        During an update the core cannot answer; the status is then 503 if the update exceeds `UPDATE_LIMIT_S`.
        """
        from starlette.responses import JSONResponse

        updating = self.updating_since > 0.0
        if updating and time.monotonic() - self.updating_since > UPDATE_LIMIT_S:
            text = f"the load of weights takes longer than {UPDATE_LIMIT_S:g} s"
            return JSONResponse({"error": text}, status_code=503)
        if not updating:
            try:
                await asyncio.wait_for(self.engine.get_weight_version(), self.health_s)
            except Exception as error:
                text = f"the engine core does not answer within {self.health_s:g} s: {type(error).__name__}"
                return JSONResponse({"error": text}, status_code=503)
        return JSONResponse(
            {
                "weight_version": self.version,
                "in_flight": self.in_flight,
                "in_engine": self.engine.get_num_unfinished_requests(),
                "tokens": self.tokens,
                "updating": updating,
                "sleep": self.sleeping.state(),
                "pid": os.getpid(),
            }
        )


def _line_of(index: int, tokens: list[int], logprobs: list[float], reason: str, output: Any) -> str:
    """Return the line of a reply for a response; `output`: vLLM's last output for it."""
    line = {
        "index": index,
        "token_ids": tokens,
        "logprobs": logprobs,
        "finish_reason": reason,
        "weight_version": int(output.weight_versions[-1].version),
    }
    return json.dumps(line) + "\n"


def _record(last: Any, tokens: int, began: float) -> None:
    """Add a response to the trace, if a trace is recorded.

    `last`: vLLM's last output for the response; None if vLLM returned no output.  `tokens`: number of generated tokens.
    `began`: time of the request on the monotonic clock, in seconds.
    """
    reason = None if last is None else last.outputs[0].finish_reason
    fields: dict[str, Any] = {
        "tokens": tokens,
        "finish_reason": "aborted" if reason is None else str(reason),
        "prompt_cached": 0 if last is None else last.num_cached_tokens or 0,
    }
    RECORDER.add("response", "responses", began, time.monotonic(), **fields)


async def exit_with(engine: Any, guard: Guard) -> None:
    """Wait until the engine core or the guard dies; then exit with 70, so that the supervisor starts a new engine."""
    while not engine.errored and not guard.lost:
        await asyncio.sleep(0.2)
    _log.critical("the engine core died" if engine.errored else "the guard process died")
    await asyncio.sleep(0.5)  # seconds for open replies to send their {"error"}
    with contextlib.suppress(Exception):
        engine.shutdown()
    os._exit(ENGINE_LOST)


def make_app(lifespan: Any, token: str) -> Any:
    """Return the Starlette application; requests need `token`.  Its `lifespan` must set `app.state.server`."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def refused(status: int, error: object) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=status)

    async def call(request: Request) -> Any:
        server: EngineServer = app.state.server
        if not is_authorized(request.headers.get("authorization"), token):
            return refused(401, "expected the header Authorization: Bearer TOKEN with the run's token")
        try:
            if request.url.path == "/health":
                return await server.health()
            # Starlette admits only the routes below, so the path is the name of a method.
            return await getattr(server, request.url.path[1:])(await request.body())
        except (BadRequest, UnfitWeights) as error:
            return refused(400, error)
        except Refused as error:
            return refused(409, error)

    routes = [Route(path, call, methods=["POST"]) for path in ("/generate", "/weights", "/sleep", "/wake", "/trace")]
    app = Starlette(routes=[*routes, Route("/health", call)], lifespan=lifespan)
    return app


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="nemo_prorl.rollout.engine.server", description="One rollout engine (vLLM).")
    add = p.add_argument
    add("--model", required=True, help="Hugging Face model folder: config.json and *.safetensors")
    add("--token-file", required=True, help="file with the run's token, readable by its owner only")
    add("--weights-dir", required=True, help="the only folder from which POST /weights loads files")
    add("--endpoint-file", help="JSON file to write when ready, with url, pid and state; default: none")
    add("--index", type=int, default=0, help="number of this engine in the run, from 0; default: 0")
    add(
        "--parent-pid", type=int, help="id of a process to watch: the engine ends when that process ends; default: none"
    )
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--public-host", help="host name written to the endpoint file; default: --host")
    add("--port", type=int, default=0, help="TCP port; default: 0, any free port")
    add("--dtype", default="float32", help="dtype of the model: float32 (default), bfloat16, float16")
    add("--float32-head", action="store_true", help="compute logits in float32 with every --dtype")
    add("--tp", type=int, default=1, help="tensor parallel size, in GPUs; default: 1")
    add("--threads", type=int, default=1, help="OpenMP threads, on CPU builds of vLLM; default: 1")
    add("--max-model-len", type=int, default=512, help="maximum tokens of prompt plus response; default: 512")
    add("--max-num-seqs", type=int, default=256, help="maximum concurrent responses; default: 256")
    add("--max-batched-tokens", type=int, default=4096, help="maximum tokens per engine step; default: 4096")
    add("--kv-mb", type=int, help="size of the KV cache in MiB; default: vLLM's share of the device")
    add("--eager", action="store_true", help="run the model without compiling it")
    add("--sleep", action="store_true", help="allow the engine to sleep (POST /sleep)")
    add("--hold-file", help="file whose removal the engine awaits before it takes device memory; default: none")
    add("--hold-s", type=float, default=3600.0, help="seconds to wait for the removal of --hold-file; default: 3600")
    add("--health-s", type=float, default=30.0, help="seconds to wait for vLLM's core in GET /health; default: 30")
    return p.parse_args(argv)


def serve(args: argparse.Namespace, token: str, shapes: Shapes, guard: Guard) -> int:
    """Start the engine and serve until SIGTERM; return the exit status."""
    import uvicorn

    sock = listening_socket(args.host, args.port, backlog=4096)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        engine = make_engine(args)
        limits = limits_of(engine.model_config.hf_config, args.max_model_len)
        sleep = EngineSleep(engine, args.sleep, frees_memory=not is_cpu_build())
        name = f"engine-{args.index}"
        served = served_file(args.endpoint_file) if args.endpoint_file else None
        app.state.server = EngineServer(
            engine,
            limits,
            shapes=shapes,
            weights_dir=args.weights_dir,
            health_s=args.health_s,
            sleep=sleep,
            name=name,
            served_file=served,
        )
        await engine.update_weight_version(str(UNPUBLISHED))
        gc.collect()
        gc.freeze()  # the garbage collector skips the objects of vLLM and torch from now on
        watch = asyncio.ensure_future(exit_with(engine, guard))
        if args.endpoint_file:
            announce(args, sock.getsockname()[1])
        _log.info("engine %d serves %s on port %d", args.index, args.model, sock.getsockname()[1])
        yield
        watch.cancel()
        if args.endpoint_file and is_own(file := Path(args.endpoint_file)):
            file.unlink(missing_ok=True)
        engine.shutdown()

    config = uvicorn.Config(
        make_app(lifespan, token), log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="on"
    )
    server = uvicorn.Server(config)
    server.run(sockets=[sock])
    return 0 if server.started else ENGINE_LOST


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        token = read_token(args.token_file)
        shapes = shapes_of_model(args.model)
        guard = Guard(args.parent_pid)
    except (OSError, ValueError) as error:  # ConfigError is a ValueError
        _log.error("%s", error)
        return 2
    set_environment(args.threads, args.eager)
    if args.hold_file:
        try:
            waiting = os.path.splitext(args.endpoint_file or args.hold_file)[0] + HELD_SUFFIX
            wait_while_held(args.hold_file, waiting, args.hold_s)
        except TimeoutError as error:
            _log.error("%s", error)
            return ENGINE_LOST
    return serve(args, token, shapes, guard)


if __name__ in ("__main__", "__mp_main__"):  # the processes that vLLM spawns import this file as __mp_main__
    stacks.register()
if __name__ == "__main__":
    sys.exit(main())
