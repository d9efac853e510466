"""vLLM's scheduler, with less to do for each token.

vLLM hands out each token of each response as it is sampled, with three arrays for its log-probability, which both
processes of an engine pack and unpack.  Nobody here looks at a response before its end.  And it works out for each
token anew which blocks of the cache its response needs, although a block has room for many.

Runs in the engine core's process.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus


def ask_once_a_block(manager: Any) -> None:
    """vLLM's cache manager then looks for blocks only where a response begins one or fills it.

    A token between the two changes nothing in a cache whose layers all look at all tokens, in blocks of one size; any
    other manager stays as it is.
    """
    kinds = {(type(kind), kind.block_size) for kind in manager.coordinator.single_type_managers}
    if len(kinds) != 1 or (only := kinds.pop())[0] is not FullAttentionManager:
        return
    block = only[1]
    ask, nothing_new = manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate_slots(
        request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **more: Any
    ) -> Any:
        computed = request.num_computed_tokens
        if (
            num_new_tokens == 1
            and 0 < computed % block < block - 1
            and computed >= request.num_prompt_tokens
            and num_lookahead_tokens == 0
            and request.status == RequestStatus.RUNNING
        ):
            return nothing_new
        return ask(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **more)

    manager.allocate_slots = allocate_slots


@dataclass(slots=True)
class _Held:
    """The tokens of a response that goes on, and at what it may end: vLLM looks at it then."""

    stops: frozenset[int]
    longest: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill: Any = None  # how its prompt was computed: the first output says it


class WholeResponses(Scheduler):  # type: ignore[misc]
    """Holds tokens back until their response ends.  Of log-probabilities it keeps the sampled token's alone."""

    ahead = False  # whether a step is scheduled while another runs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_once_a_block(self.kv_cache_manager)
        self._held: dict[str, _Held] = {}  # by request

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not self.ahead:
            scheduler_output = self._take_what_goes_on(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if self._hold(output)]
        return outputs

    def _take_what_goes_on(self, scheduler_output: Any, sampled: Any) -> Any:
        """Takes the tokens with which no response ends; the same output with the requests that are left for vLLM.

        Those are all that are not in the middle of their response, one token a step: vLLM makes an object of each
        token and asks two dozen questions about features, none of which this engine has.
        """
        logprob_N = None if sampled.logprobs is None else sampled.logprobs.logprobs[:, 0].tolist()
        left = {}
        for name, count in scheduler_output.num_scheduled_tokens.items():
            held, request = self._held.get(name), self.requests.get(name)
            if held is None or request is None or count != 1 or request.status != RequestStatus.RUNNING:
                left[name] = count
                continue
            row = sampled.req_id_to_index[name]
            tokens = sampled.sampled_token_ids[row]
            if len(tokens) != 1 or tokens[0] in held.stops or len(held.tokens) + 1 >= held.longest:
                left[name] = count
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(tokens[0])
            held.tokens.append(tokens[0])
            if logprob_N is not None and request.sampling_params.logprobs is not None:
                held.logprobs.append(logprob_N[row])
        scheduler_output = copy.copy(scheduler_output)
        scheduler_output.num_scheduled_tokens = left
        return scheduler_output

    def _hold(self, output: Any) -> bool:
        """Takes a response's new tokens; when it ends, gives all of them to its last output and says so."""
        held = self._held.get(output.request_id)
        if held is None:
            held = self._held[output.request_id] = self._begun(output.request_id)
        held.tokens += output.new_token_ids
        held.prefill = output.prefill_stats = output.prefill_stats or held.prefill
        if output.new_logprobs is not None:
            held.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token's stands first
        if output.finish_reason is None:
            return False
        del self._held[output.request_id]
        output.new_token_ids = held.tokens
        if held.logprobs:
            output.new_logprobs = LogprobsLists(
                np.array(held.tokens, dtype=np.int32)[:, None],
                np.array(held.logprobs, dtype=np.float32)[:, None],
                np.zeros(len(held.tokens), dtype=np.int32),  # ranks, which nobody asks for
            )
        return True

    def _begun(self, name: str) -> _Held:
        request = self.requests.get(name)
        if request is None:  # it ended with its first token
            return _Held(frozenset(), 0)
        params = request.sampling_params
        stops = {params.eos_token_id, *(params.stop_token_ids or ())}
        return _Held(frozenset(stops), min(request.max_tokens, self.max_model_len - request.num_prompt_tokens))

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Of requests that were given up; None: of all."""
        if request_ids is None:
            self._held.clear()
        else:
            request_ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            for request_id in request_ids:
                self._held.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)


class AsyncWholeResponses(WholeResponses, AsyncScheduler):  # type: ignore[misc]
    """The same where the next step is scheduled while this one runs, as vLLM does by itself on GPUs."""

    ahead = True


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """What `scheduler_cls` names: as vLLM would choose by itself."""
    kind = AsyncWholeResponses if vllm_config.scheduler_config.async_scheduling else WholeResponses
    return kind(vllm_config=vllm_config, **options)
