"""The engine core's scheduler: what it says of responses and asks its cache; real engines use it in test_engine.py.

vLLM schedules ahead on GPUs alone, so the class for that is looked at here, in the engine's environment.
"""

import subprocess

from tests.rollout.engines import ROOT

CHECK = """
import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from nemo_prorl.rollout.engine_scheduler import AsyncWholeResponses, WholeResponses

def step(scheduler, *outputs):
    base.update_from_output = lambda self: {0: EngineCoreOutputs(outputs=list(outputs))}
    return scheduler.update_from_output()[0].outputs

def sampled(name, token, logprob=None, ended=None):
    lists = None
    if logprob is not None:
        lists = LogprobsLists(np.array([[token, 9]]), np.array([[logprob, -0.5]], np.float32), np.array([3]))
    return EngineCoreOutput(name, [token], lists, finish_reason=ended)

for Kind, base in ((AsyncWholeResponses, AsyncScheduler), (WholeResponses, Scheduler)):
    assert issubclass(Kind, base)
    base.finish_requests = lambda self, ids, status: ids
    scheduler = Kind.__new__(Kind)
    scheduler._held = {}
    assert step(scheduler, sampled("a", 5, -1.5), sampled("b", 6)) == []
    assert step(scheduler, sampled("c", 1, -1.0), sampled("d", 1)) == []
    done = step(scheduler, sampled("a", 7, -2.5, FinishReason.STOP), sampled("b", 8))
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in done] == [("a", [5, 7], FinishReason.STOP)]
    assert done[0].new_logprobs.logprobs.tolist() == [[-1.5], [-2.5]]
    assert done[0].new_logprobs.logprob_token_ids.tolist() == [[5], [7]]
    assert sorted(scheduler._held) == ["b", "c", "d"]
    assert scheduler.finish_requests(iter(["c"]), None) == {"c"}
    assert sorted(scheduler._held) == ["b", "d"]
    (done,) = step(scheduler, sampled("b", 2, None, FinishReason.LENGTH))
    assert (done.new_token_ids, done.new_logprobs) == ([6, 8, 2], None)
    scheduler.finish_requests(None, None)
    assert scheduler._held == {}
"""


def test_tokens_are_held_until_their_response_ends(vllm_python: str) -> None:
    subprocess.run([vllm_python, "-c", CHECK], check=True, cwd="/", env={"PYTHONPATH": str(ROOT), "HOME": "/tmp"})


BLOCKS = """
from types import SimpleNamespace
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import RequestStatus
from nemo_prorl.rollout.engine_scheduler import ask_once_a_block

def asked(kind, request, tokens, sizes=(8,), **more):
    places = []
    def allocate_slots(request, num_new_tokens, num_new_computed_tokens=0, num_lookahead_tokens=0):
        places.append(request.num_computed_tokens)
        return "asked"
    layers = [kind.__new__(kind) for _ in sizes]
    for layer, size in zip(layers, sizes):
        layer.block_size = size
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=layers),
        allocate_slots=allocate_slots,
        empty_kv_cache_blocks="none",
    )
    ask_once_a_block(manager)
    for computed in tokens:
        request.num_computed_tokens = computed
        said = manager.allocate_slots(request, 1, **more)
        assert said == ("asked" if places[-1:] == [computed] else "none")
    return places

request = SimpleNamespace(status=RequestStatus.RUNNING, num_prompt_tokens=3)
decoding = range(3, 30)
assert asked(FullAttentionManager, request, decoding) == [7, 8, 15, 16, 23, 24]
assert asked(FullAttentionManager, request, range(3)) == [0, 1, 2]
assert asked(FullAttentionManager, request, decoding, num_lookahead_tokens=1) == [*decoding]
assert asked(SlidingWindowManager, request, decoding) == [*decoding]
assert asked(FullAttentionManager, request, decoding, sizes=(8, 16)) == [*decoding]
request.status = RequestStatus.PREEMPTED
assert asked(FullAttentionManager, request, decoding) == [*decoding]
"""


def test_cache_blocks_are_asked_for_where_one_begins_or_is_filled(vllm_python: str) -> None:
    """Real engines do so in test_engine.py, whose log-probabilities are those of the trainer's model."""
    subprocess.run([vllm_python, "-c", BLOCKS], check=True, cwd="/", env={"PYTHONPATH": str(ROOT), "HOME": "/tmp"})
