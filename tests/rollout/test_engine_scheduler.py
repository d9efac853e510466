"""What is changed in an engine's core, in the engine's environment; real engines run with it in test_engine.py.

vLLM schedules ahead on GPUs alone unless it is asked to, so the class for that is looked at here; likewise what its GPU
worker does with the options for memory.  Each test is a program that runs in the engine's environment: all but the slow
one in one process, which imports vLLM once and makes a child for each.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from nemo_prorl.rollout.endpoints import SamplingParams
from tests.rollout.engines import ROOT, EngineProcess
from tests.rollout.test_engine import GREEDY, PROMPTS, ask_all, load, published

pytestmark = pytest.mark.vllm

MAIN = """
import os, sys, traceback
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
for program in sys.argv[1:]:
    if not (child := os.fork()):
        code = 0
        try:
            exec(program, {"__name__": "program"})
        except BaseException:
            code = 1
            print(traceback.format_exc(), flush=True)
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print("ended with", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def said(vllm_python: str) -> dict[str, str]:
    """What each program printed, and its exit status."""
    programs = {"CHECK": CHECK, "MIDDLE": MIDDLE, "CPU": CPU, "MEMORY": MEMORY}
    command = [vllm_python, "-c", MAIN, *programs.values()]
    environment = {"PYTHONPATH": str(ROOT), "HOME": "/tmp", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    result = subprocess.run(command, check=True, cwd="/", env=environment, stdout=subprocess.PIPE, text=True)
    texts = result.stdout.split("ended with ")
    assert len(texts) == len(programs) + 1, result.stdout
    ends = [text.split("\n", 1) for text in texts[1:]]
    printed = [texts[0], *(rest for _, rest in ends)]
    return {
        name: f"{text}ended with {status}" for name, text, (status, _) in zip(programs, printed, ends, strict=False)
    }


CHECK = """
import time
from types import SimpleNamespace
import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from nemo_prorl.rollout.engine.vllm_internals import kv_cache_use
from nemo_prorl.rollout.engine.vllm_internals.scheduler import AsyncWholeResponses, WholeResponses

def step(scheduler, *outputs):
    base.update_from_output = lambda self, *_: {0: EngineCoreOutputs(outputs=list(outputs))}
    nothing = SimpleNamespace(num_scheduled_tokens={}, logprobs=None)
    return scheduler.update_from_output(nothing, nothing)[0].outputs

def sampled(name, token, logprob=None, ended=None):
    lists = None
    if logprob is not None:
        lists = LogprobsLists(np.array([[token, 9]]), np.array([[logprob, -0.5]], np.float32), np.array([3]))
    return EngineCoreOutput(name, [token], lists, finish_reason=ended)

for Kind, base in ((AsyncWholeResponses, AsyncScheduler), (WholeResponses, Scheduler)):
    assert issubclass(Kind, base)
    base.finish_requests = lambda self, ids, status: ids
    base._preempt_request = lambda self, request, at, drop_stale_output=False: freed.append(request)
    scheduler = Kind.__new__(Kind)
    scheduler._held, scheduler.requests, scheduler._released = {}, {}, time.monotonic()
    scheduler._kv_peak, scheduler._preemptions, scheduler.kv_cache_manager = 0.0, 0, SimpleNamespace(usage=0.5)
    scheduler._pause_state = PauseState.UNPAUSED
    freed = []
    for request, by_a_reset in (("x", False), ("y", True), ("x", False)):
        scheduler._preempt_request(request, 1.0, drop_stale_output=by_a_reset)
    assert freed == ["x", "y", "x"]
    assert step(scheduler, sampled("a", 5, -1.5), sampled("b", 6)) == []
    scheduler.kv_cache_manager.usage = 0.25
    assert step(scheduler, sampled("c", 1, -1.0), sampled("d", 1)) == []
    done = step(scheduler, sampled("a", 7, -2.5, FinishReason.STOP), sampled("b", 8))
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in done] == [("a", [5, 7], FinishReason.STOP)]
    assert kv_cache_use(done[0]) == (0.5, 2)  # since a response ended
    assert done[0].new_logprobs.logprobs.tolist() == [[-1.5], [-2.5]]
    assert done[0].new_logprobs.logprob_token_ids.tolist() == [[5], [7]]
    assert sorted(scheduler._held) == ["b", "c", "d"]
    assert scheduler.finish_requests(iter(["c"]), None) == {"c"}
    assert sorted(scheduler._held) == ["b", "d"]
    (done,) = step(scheduler, sampled("b", 2, None, FinishReason.LENGTH))
    assert (done.new_token_ids, done.new_logprobs) == ([6, 8, 2], None)
    assert kv_cache_use(done) == (0.25, 0)
    assert step(scheduler, sampled("e", 5, -1.5)) == []
    scheduler._released -= 60  # seconds: tokens of unfinished responses are due
    (some,) = step(scheduler, sampled("e", 6, -2.5))
    assert (some.new_token_ids, some.finish_reason, len(some.new_logprobs.logprobs)) == ([5, 6], None, 2)
    assert kv_cache_use(some) is None
    assert step(scheduler, sampled("e", 7, -3.5)) == []
    (rest,) = step(scheduler, sampled("e", 1, -0.5, FinishReason.STOP))
    assert (rest.new_token_ids, rest.new_logprobs.logprobs.tolist()) == ([7, 1], [[-3.5], [-0.5]])
    (only,) = step(scheduler, sampled("h", 7, -2.5, FinishReason.LENGTH))
    assert only.new_logprobs.logprobs.tolist() == [[-2.5, -0.5]]  # also those of tokens that were not sampled
    scheduler.finish_requests(None, None)
    assert scheduler._held == {}

    # a pause that keeps the responses: one more step returns all that is stored, also of responses that wait
    base.has_requests = lambda self: False
    assert step(scheduler, sampled("f", 5, -1.5), sampled("g", 6)) == []
    assert not scheduler.has_requests()
    scheduler.requests = {name: SimpleNamespace(client_index=0, sampling_params=SimpleNamespace(
        eos_token_id=None, stop_token_ids=[]), max_tokens=9, num_prompt_tokens=1) for name in "fg"}
    scheduler._pause_state, scheduler.max_model_len = PauseState.PAUSED_ALL, 9
    assert scheduler.has_requests()
    both = step(scheduler, sampled("f", 7, -2.5))
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in both] == [("f", [5, 7], None), ("g", [6], None)]
    assert both[0].new_logprobs.logprobs.tolist() == [[-1.5], [-2.5]]
    assert not scheduler.has_requests()
    scheduler._pause_state = PauseState.UNPAUSED
    (rest,) = step(scheduler, sampled("g", 1, None, FinishReason.STOP))
    assert rest.new_token_ids == [1]
"""


@pytest.mark.slow
def test_tokens_are_held_until_their_response_ends(said: dict[str, str]) -> None:
    assert said["CHECK"] == "ended with 0", said["CHECK"]


MIDDLE = """
import time
from types import SimpleNamespace
import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus
from nemo_prorl.rollout.engine.vllm_internals.scheduler import AsyncWholeResponses, WholeResponses

STOP = 2
class Request:
    def __init__(self, name, most, logprobs=0):
        self.name, self.max_tokens, self.num_prompt_tokens, self.num_in_flight_tokens = name, most, 3, 0
        self.sampling_params = SimpleNamespace(eos_token_id=None, stop_token_ids=[STOP], logprobs=logprobs)
        self.status, self.tokens = RequestStatus.RUNNING, []
        self.append_output_token_ids = self.tokens.append

seen = []
def update_from_output(self, scheduled, sampled):
    'Like vLLM: each given request has an output, and may end.'
    outputs = []
    for name in scheduled.num_scheduled_tokens:
        seen.append(name)
        request, row = self.requests[name], sampled.req_id_to_index[name]
        (token,) = sampled.sampled_token_ids[row]
        request.append_output_token_ids(token)
        reason = None
        if token == STOP:
            reason = FinishReason.STOP
        elif len(request.tokens) >= min(request.max_tokens, self.max_model_len - request.num_prompt_tokens):
            reason = FinishReason.LENGTH
        lists = sampled.logprobs if request.sampling_params.logprobs is not None else None
        new = lists and lists.slice_request(row, 1)
        outputs.append(EngineCoreOutput(name, [token], new, finish_reason=reason))
        if reason is not None:
            del self.requests[name]
    return {0: EngineCoreOutputs(outputs=outputs)}
Scheduler.update_from_output = update_from_output

def steps(kind, columns, **counts):
    'Run requests through steps in which they sample these tokens; return their outputs.'
    scheduler = kind.__new__(kind)
    scheduler._held, scheduler.max_model_len, scheduler._released = {}, 9, time.monotonic()
    scheduler._kv_peak, scheduler._preemptions, scheduler.kv_cache_manager = 0.0, 0, SimpleNamespace(usage=0.5)
    scheduler._pause_state = PauseState.UNPAUSED
    scheduler.requests = {name: Request(name, 4, None if name == "quiet" else 0) for name in columns}
    scheduler.requests["long"].max_tokens = 100  # the context ends it
    done, requests = {}, dict(scheduler.requests)
    for k in range(8):
        names = [name for name in columns if name in scheduler.requests]
        tokens = [[columns[name][k]] for name in names]
        values = np.array([[-0.5 * columns[name][k], -9.0] for name in names], np.float32).reshape(-1, 2)
        scheduled = SimpleNamespace(num_scheduled_tokens={name: counts.get(name, 1) for name in names})
        before = dict(scheduled.num_scheduled_tokens)
        sampled = SimpleNamespace(
            sampled_token_ids=tokens,
            req_id_to_index={name: row for row, name in enumerate(names)},
            logprobs=LogprobsLists(values.astype(int), values, np.zeros(len(names))),
        )
        for name in names:
            requests[name].num_in_flight_tokens += 1
        for output in scheduler.update_from_output(scheduled, sampled)[0].outputs:
            lists = output.new_logprobs
            done[output.request_id] = (
                output.new_token_ids, lists and lists.logprobs[:, 0].tolist(), output.finish_reason
            )
        assert scheduled.num_scheduled_tokens == before
    assert scheduler._held == {}
    assert all(done[name][0] == request.tokens for name, request in requests.items())
    return done, requests

columns = {
    "stops": [5, 6, STOP, 0, 0, 0, 0, 0],
    "once": [STOP, 0, 0, 0, 0, 0, 0, 0],
    "full": [7, 8, 9, 5, 0, 0, 0, 0],
    "long": [7, 8, 9, 5, 6, 7, 0, 0],
    "quiet": [4, 4, 4, 4, 0, 0, 0, 0],
}
done, requests = steps(WholeResponses, columns)
assert done["stops"] == ([5, 6, STOP], [-2.5, -3.0, -1.0], FinishReason.STOP)
assert done["once"] == ([STOP], [-1.0], FinishReason.STOP)
assert done["full"] == ([7, 8, 9, 5], [-3.5, -4.0, -4.5, -2.5], FinishReason.LENGTH)
assert done["long"] == ([7, 8, 9, 5, 6, 7], [-3.5, -4.0, -4.5, -2.5, -3.0, -3.5], FinishReason.LENGTH)
assert done["quiet"] == ([4, 4, 4, 4], None, FinishReason.LENGTH)
# vLLM itself gets only the first and the last token of each response
assert sorted(seen) == sorted(["once"] + 2 * ["stops", "full", "long", "quiet"])
assert [requests[name].num_in_flight_tokens for name in ("stops", "full", "long")] == [2, 2, 2]
seen.clear()
assert steps(WholeResponses, columns, stops=2, full=2)[0] == done  # vLLM processes several tokens a step
assert seen.count("stops") == 3 and seen.count("full") == 4 and seen.count("long") == 2
seen.clear()
AsyncWholeResponses.update_from_output = lambda self, *given: WholeResponses.update_from_output(self, *given)
assert steps(AsyncWholeResponses, columns)[0] == done
assert len(seen) == sum(len(tokens) for tokens, *_ in done.values())
"""


def test_tokens_in_the_middle_of_a_response_are_stored_without_vllm(said: dict[str, str]) -> None:
    """Uses a stand-in for vLLM's own update; test_engine.py tests responses of real engines."""
    assert said["MIDDLE"] == "ended with 0", said["MIDDLE"]


CPU = """
import torch
from vllm import ir
from nemo_prorl.rollout.engine.vllm_internals import cpu as _  # it registers the norms
from nemo_prorl.rollout.engine.setup import cpu_options

# norms: chosen by the engine's options, as vLLM's own, and left to vLLM where memory is not in one piece
for name, providers in cpu_options(eager=True)["ir_op_priority"].items():
    getattr(ir.ops, name).set_default([*providers, "native"])
assert "ir_op_priority" not in cpu_options(eager=False)
draw = torch.Generator().manual_seed(0)
for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
    x, residual = (torch.randn(7, 128, generator=draw).to(dtype) for _ in range(2))
    weight = torch.randn(128, generator=draw).to(dtype)
    wanted = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-6)
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-6), wanted, rtol=error, atol=error)
    wanted = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    got = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider == "prorl_cpu"
    assert ir.ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-6).provider == "prorl_cpu"
    odd = x[:, :100].contiguous()  # numbers that the compiled function refuses
    others = [(x[:, ::2], weight[::2], 1e-6), (odd, weight[:100], 1e-6), (x, None, 1e-6), (x, weight, 1e-6, 64)]
    for other in (*others, (x, weight.double(), 1e-6)):
        assert ir.ops.rms_norm.dispatch(*other).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, residual.double(), weight, 1e-6).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, residual[:, ::2], weight, 1e-6).provider == "native"

# a float32 head on a 16-bit model: a row's logits do not depend on how many rows there are
from vllm.model_executor.layers.logits_processor import LogitsProcessor, UnquantizedEmbeddingMethod
from types import SimpleNamespace
torch.set_num_threads(1)
hidden, weight = (torch.randn(rows, 128, generator=draw).bfloat16() for rows in (64, 384))
head = SimpleNamespace(weight=weight, quant_method=UnquantizedEmbeddingMethod.__new__(UnquantizedEmbeddingMethod))
logits = [LogitsProcessor._apply_head(SimpleNamespace(head_dtype=torch.float32), head, hidden[:rows], None)
          for rows in range(1, 65)]
assert all(one.dtype == torch.float32 and torch.equal(one, logits[-1][:len(one)]) for one in logits)
"""


def test_norms_and_heads_of_a_cpu_are_those_of_vllm(said: dict[str, str]) -> None:
    assert said["CPU"] == "ended with 0", said["CPU"]


MEMORY = """
from types import SimpleNamespace
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory
from nemo_prorl.rollout.engine.setup import gpu_options

KV = 56_486 << 20  # what the plan gives the cache of an engine of cluster=h100_4x8
options = gpu_options(SimpleNamespace(sleep=True, kv_mb=KV >> 20))
share = options["gpu_memory_utilization"]
# An H100 with 84.0e9 bytes, where the trainer holds 11.3e9 and both processes' reserve 7.6e9.
free = SimpleNamespace(total_memory=int(84.0e9), free_memory=int(84.0e9 - 11.3e9 - 7.6e9), device_="cuda:0")
assert request_memory(free, SimpleNamespace(gpu_memory_utilization=share)) < 1e9
try:
    request_memory(free, SimpleNamespace(gpu_memory_utilization=0.805))  # the engine's bytes of 80e9
except ValueError as error:
    assert "is less than desired GPU memory utilization" in str(error)
else:
    raise AssertionError("vLLM starts whatever is free: the small share is needed no more")

worker = SimpleNamespace(
    cache_config=SimpleNamespace(kv_cache_memory_bytes=KV, gpu_memory_utilization=share),
    model_runner=SimpleNamespace(profile_run=lambda **_: None),
    model_config=SimpleNamespace(multimodal_config=None),
    vllm_config=None, init_snapshot=free, randomize_dummy_inputs=False, parallel_config=None,
)
assert Worker.determine_available_memory(worker) == KV, "the share is not looked at where the cache has a size"
alone = gpu_options(SimpleNamespace(sleep=False, kv_mb=None))
assert alone == {"enable_sleep_mode": False}, "without a size vLLM's own share decides"
"""


def test_an_engine_starts_beside_a_trainer_and_gets_the_kv_cache_that_it_was_given(said: dict[str, str]) -> None:
    """vLLM's own functions of a GPU's worker, with the sizes of a GPU; no GPU is used."""
    assert said["MEMORY"] == "ended with 0", said["MEMORY"]


HELD = """
import contextlib
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.worker import cpu_model_runner
from nemo_prorl.rollout.engine.vllm_internals import cpu, scheduler

class Nothing:
    'A stream or event of CUDA, which vLLM uses to copy sampled tokens beside the next step.'
    def __init__(self, *args, **options): pass
    def wait_stream(self, stream): pass
    def record(self, *stream): pass
    def synchronize(self): pass

@contextlib.contextmanager
def nothing():
    kept = torch.Event, torch.cuda.Stream
    torch.Event = torch.cuda.Stream = Nothing
    yield
    torch.Event, torch.cuda.Stream = kept

cpu_model_runner._torch_cuda_wrapper = nothing
torch.cuda.Event, torch.cuda.current_stream, torch.cuda.stream = Nothing, Nothing, contextlib.nullcontext
scheduler.RELEASE_S = 1e9  # tokens are returned with a finished response, or before a pause, only

class Worker(cpu.CpuWorker):
    'vLLM imports this module before it makes the model runner.'

    def pause_after(self, tokens):
        made[0].pause_after = tokens

    def count_sampled(self):
        return made[0].sampled

class Pausing(scheduler.AsyncWholeResponses):
    'Pauses by itself once this many tokens of the open responses were sampled, however slow the other processes are.'
    pause_after = float("inf")

    @property
    def sampled(self):
        return sum(request.num_output_tokens for request in self.requests.values())

    def schedule(self, *args, **options):
        if self.sampled >= self.pause_after:
            self.pause_after = float("inf")
            self.set_pause_state(PauseState.PAUSED_ALL)
        return super().schedule(*args, **options)

scheduler.AsyncWholeResponses, made = Pausing, []
def make_scheduler(*args, **options):
    made.append(scheduler.make_scheduler(*args, **options))
    assert type(made[0]) is Pausing, type(made[0])
    return made[0]
"""
AHEAD = """
import asyncio, json, sys
from nemo_prorl.rollout.engine import server as module, setup, vllm_internals
from nemo_prorl.rollout.engine.requests import GenerateRequest
from nemo_prorl.rollout.engine.sleep import EngineSleep

async def paused(server, engine, request):
    'Pause once tokens were sampled; change the version when all came; return the lines and the number of these tokens.'
    await engine.update_weight_version("1")
    await engine.collective_rpc("pause_after", args=(100,))
    before, tasks = server.tokens, server._start(GenerateRequest(**request))
    while not await engine.is_paused():
        await asyncio.sleep(0.01)
    await engine.pause_generation(mode="keep", clear_cache=False)  # waits for the steps that run
    [at_pause] = await engine.collective_rpc("count_sampled")
    while server.tokens - before < at_pause:  # otherwise a token was held back, and this waits until the test's limit
        await asyncio.sleep(0.01)
    await engine.update_weight_version("2")
    await engine.resume_generation()
    return await asyncio.gather(*tasks), at_pause

async def main():
    args = module.arguments(sys.argv[2:])
    module.set_environment(args.threads, args.eager)
    from vllm.platforms.cpu import CpuPlatform

    options, check = vllm_internals.cpu_options, CpuPlatform.check_and_update_config
    vllm_internals.scheduler_options = lambda: {"scheduler_cls": "held.make_scheduler"}
    vllm_internals.cpu_options = lambda eager: {**options(eager), "worker_extension_cls": "held.Worker"}
    def ahead(cls, config):
        check(config)
        config.scheduler_config.async_scheduling = True  # vLLM has just set False, for every CPU
    CpuPlatform.check_and_update_config = classmethod(ahead)
    engine = setup.make_engine(args)
    assert engine.vllm_config.scheduler_config.async_scheduling is True
    limits = setup.limits_of(engine.model_config.hf_config, args.max_model_len)
    sleep = EngineSleep(engine, True, False)
    server = module.EngineServer(engine, limits, {}, args.weights_dir, 3.0, sleep, "engine-0")
    spans, generate = {}, engine.generate

    async def recording(prompt, params, name):
        async for last in generate(prompt, params, name):
            yield last
        spans[name] = [(span.version, span.start) for span in last.outputs[0].weight_versions]
    engine.generate = recording

    said = {}
    for name, requests in json.loads(sys.argv[1]).items():
        await engine.update_weight_version("0")
        tasks = [task for request in requests for task in server._start(GenerateRequest(**request))]
        said[name] = await asyncio.gather(*tasks)
    (long,) = json.loads(sys.argv[1])["long"]

    gone = server._start(GenerateRequest(**long))  # a client that goes away
    await asyncio.sleep(0.1)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    while engine.get_num_unfinished_requests():
        await asyncio.sleep(0.01)

    spans.clear()
    said["paused"], said["at_pause"] = await paused(server, engine, long)
    said["spans"] = list(spans.values())
    assert await engine.reset_prefix_cache()
    await server.sleeping.fall_asleep(2)
    await server.sleeping.wake(("weights", "kv_cache"))
    print("SAID", json.dumps(said), flush=True)
    engine.shutdown()

asyncio.run(main())
"""


@pytest.mark.slow  # starts an engine of its own
@pytest.mark.timeout(900)
def test_an_engine_that_schedules_ahead_answers_as_one_that_does_not(
    engine: EngineProcess, vllm_python: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """The scheduler of GPUs, with the model on a CPU; vLLM marks each token with the weight version of its return."""
    (tmp_path / "held.py").write_text(HELD)
    drawn = SamplingParams(temperature=1.2, max_tokens=100)
    seeds = list(range(20, 28))
    requests = {
        "greedy": [
            {"prompt": p, "seeds": [1], "temperature": 0.0, "max_tokens": 32, "stop_token_ids": []} for p in PROMPTS
        ],
        "drawn": [{"prompt": p, "seeds": [5, 6], "temperature": 1.2, "max_tokens": 100} for p in PROMPTS],
        "long": [{"prompt": PROMPTS[0], "seeds": seeds, "temperature": 1.2, "max_tokens": 200, "stop_token_ids": []}],
    }
    options = ["--eager", "--kv-mb=256", "--max-model-len=512", "--token-file=none"]
    command = [vllm_python, "-c", AHEAD, json.dumps(requests), *options]
    command += [f"--model={models['tied0']}", f"--weights-dir={tmp_path}"]
    paths = f"{ROOT}{os.pathsep}{tmp_path}"
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.split("SAID ")[1])

    def answers(name: str) -> list[tuple[list[int], list[float]]]:
        return [(line["token_ids"], line["logprobs"]) for line in map(json.loads, said[name])]

    load(engine, published(engine, models["tied0"], 0), 0)
    for name, found in (("greedy", ask_all(engine, GREEDY)), ("drawn", ask_all(engine, drawn, (5, 6)))):
        assert answers(name) == [(list(one.token_ids), list(one.logprobs)) for one in found]
    assert answers("paused") == answers("long")
    starts = [dict(span) for span in said["spans"]]  # {version: first token}; some responses began after the pause
    assert [list(start)[-1] for start in starts] == ["2"] * len(seeds)
    assert 0 < sum(start["2"] for start in starts) == said["at_pause"]
