"""Scheduler for vLLM that returns the tokens of a response every few seconds instead of one by one.

vLLM returns each token of each response as soon as it is sampled.  With each token, it sends three arrays for the
log-probability from one process of the engine to the other.  This project uses only finished responses.  With a small
model on a CPU, holding the tokens back saves a fifth of the engine's time.  vLLM's bookkeeping for the tokens in the
middle of a response takes another tenth; `_store_middle_tokens` replaces this bookkeeping.  The tokens of unfinished
responses are returned every `RELEASE_S` seconds, so that the server can count the tokens, and before a pause.
Finished responses carry the peak use of the KV cache and the number of preemptions, which vLLM itself reports only if
its statistics are on.

Runs in the engine core's process.
"""

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from nemo_prorl.rollout.engine.vllm_internals import KV_CACHE_USE

RELEASE_S = 5.0  # seconds between two returns of the tokens of unfinished responses


@dataclass(slots=True)
class _Held:
    """The tokens of an unfinished response that were not returned yet.

    `stops`: tokens that end the response.  `left`: maximum number of further tokens.
    """

    stops: frozenset[int]
    left: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill: Any = None  # vLLM's statistics of the prefill, which vLLM sends only with the first token


class WholeResponses(Scheduler):  # type: ignore[misc]
    """Holds tokens back for some seconds, and keeps only the log-probability of the sampled token."""

    schedules_ahead = False  # whether the next step is scheduled before this step's tokens are known

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}  # by request id
        self._released = time.monotonic()
        self._kv_peak = 0.0  # largest share of the KV cache in use since a response ended
        self._preemptions = 0  # since a response ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        # Read first, because vLLM's method frees the blocks of the responses that end in this step.
        self._kv_peak = max(self._kv_peak, self.kv_cache_manager.usage)
        paused = self.pause_state == PauseState.PAUSED_ALL
        release = paused or time.monotonic() - self._released > RELEASE_S
        if release:
            self._released = time.monotonic()
        elif not self.schedules_ahead:
            scheduler_output = self._store_middle_tokens(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if paused:
            self._add_stored(outputs)
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if self._hold(output, release)]
            ended = [output for output in client.outputs if output.finish_reason is not None]
            for output in ended:  # vLLM passes this field on unchanged; only its KV connectors use it
                output.kv_transfer_params = {KV_CACHE_USE: (self._kv_peak, self._preemptions)}
                self._preemptions = 0
            self._kv_peak = 0.0 if ended else self._kv_peak
        return outputs

    def _preempt_request(self, *args: Any, drop_stale_output: bool = False) -> None:
        """Count a request that lost its blocks to others in a full KV cache: vLLM computes its tokens again."""
        self._preemptions += not drop_stale_output  # True: in a reset of the prefix cache, which frees all blocks
        super()._preempt_request(*args, drop_stale_output=drop_stale_output)

    def has_requests(self) -> bool:
        """Return whether a step is due; in a pause that keeps the responses, until their stored tokens are returned.

        Weights may change in such a pause, and vLLM marks tokens with the weight version at the time of their return.
        """
        stored = self.pause_state == PauseState.PAUSED_ALL and any(held.tokens for held in self._held.values())
        return stored or super().has_requests()

    def _add_stored(self, outputs: dict[int, Any]) -> None:
        """Add an output for each response that has stored tokens and is not in this step's `outputs`."""
        present = {output.request_id for client in outputs.values() for output in client.outputs}
        for request_id, held in self._held.items():
            if held.tokens and request_id not in present:
                client = outputs.setdefault(self.requests[request_id].client_index, EngineCoreOutputs())
                client.outputs.append(EngineCoreOutput(request_id, []))

    def _store_middle_tokens(self, scheduler_output: Any, sampled: Any) -> Any:
        """Store the new tokens of this step that neither begin nor end a response.

        Args:
            scheduler_output: vLLM's record of the requests that were computed in this step.
            sampled: vLLM's record of the tokens that were sampled in this step.

        Returns:
            `scheduler_output` without the requests whose tokens were stored.  vLLM itself must process the other
            requests: prefills, first tokens, last tokens, and requests that are not running.
        """
        logprob_N = None if sampled.logprobs is None else sampled.logprobs.logprobs[:, 0].tolist()
        left = {}
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            held, request = self._held.get(request_id), self.requests.get(request_id)
            if held is None or request is None or count != 1 or request.status != RequestStatus.RUNNING:
                left[request_id] = count
                continue
            row = sampled.req_id_to_index[request_id]
            tokens = sampled.sampled_token_ids[row]
            if len(tokens) != 1 or tokens[0] in held.stops or held.left <= 1:
                left[request_id] = count
                continue
            request.num_in_flight_tokens -= 1
            request.append_output_token_ids(tokens[0])
            held.tokens.append(tokens[0])
            held.left -= 1
            if logprob_N is not None and request.sampling_params.logprobs is not None:
                held.logprobs.append(logprob_N[row])
        remaining = copy.copy(scheduler_output)
        remaining.num_scheduled_tokens = left
        return remaining

    def _hold(self, output: Any, release: bool) -> bool:
        """Store the new tokens of a response; return whether vLLM must return `output` now.

        If the response has ended, or if `release` is True, put all stored tokens into `output` and return True.
        """
        held = self._held.get(output.request_id)
        if held is None and output.finish_reason is not None:
            return True  # it ended with its first token; all log-probabilities of this token stay
        if held is None:
            held = self._held[output.request_id] = self._new(output.request_id)
        held.tokens += output.new_token_ids
        held.left -= len(output.new_token_ids)
        held.prefill = output.prefill_stats = output.prefill_stats or held.prefill
        if output.new_logprobs is not None:
            held.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token is in the first column
        if output.finish_reason is None and not release:
            return False
        del self._held[output.request_id]
        if output.finish_reason is None:
            self._held[output.request_id] = _Held(held.stops, held.left)
        output.new_token_ids = held.tokens
        if held.logprobs:
            output.new_logprobs = LogprobsLists(
                np.array(held.tokens, dtype=np.int32)[:, None],
                np.array(held.logprobs, dtype=np.float32)[:, None],
                np.zeros(len(held.tokens), dtype=np.int32),  # ranks of the tokens; nothing reads them
            )
        return True

    def _new(self, request_id: str) -> _Held:
        request = self.requests.get(request_id)
        if request is None:  # it has ended
            return _Held(frozenset(), 0)
        params = request.sampling_params
        stops = frozenset({params.eos_token_id, *(params.stop_token_ids or ())})
        return _Held(stops, min(request.max_tokens, self.max_model_len - request.num_prompt_tokens))

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Finish these requests (None: all requests) early, and drop their stored tokens.

        vLLM returns an aborted response without new tokens, and its front end drops what comes later for it.  The
        server makes an error of an aborted response, so nothing needs its tokens.
        """
        if request_ids is None:
            self._held.clear()
        else:
            request_ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            for request_id in request_ids:
                self._held.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)


class AsyncWholeResponses(WholeResponses, AsyncScheduler):  # type: ignore[misc]
    """WholeResponses for asynchronous scheduling, vLLM's default on GPUs: a step is scheduled while another runs."""

    schedules_ahead = True


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """Return the scheduler.  vLLM calls this function, because its option `scheduler_cls` names it."""
    kind = AsyncWholeResponses if vllm_config.scheduler_config.async_scheduling else WholeResponses
    return kind(vllm_config=vllm_config, **options)
