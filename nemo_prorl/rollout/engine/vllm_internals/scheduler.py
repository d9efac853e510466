"""Scheduler for vLLM that returns whole responses instead of single tokens.

vLLM returns each token of each response as it is sampled, with three arrays for its log-probability, which both
processes of an engine pack and unpack.  This project uses only finished responses.  Holding the tokens back saves a
fifth of the engine's time with a small model on a CPU.

Runs in the engine core's process.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists


@dataclass(slots=True)
class _Held:
    """The tokens of an unfinished response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill: Any = None  # statistics of the prefill, which only the first output has


class WholeResponses(Scheduler):  # type: ignore[misc]
    """Holds tokens back until their response ends, and keeps only the log-probability of the sampled token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: defaultdict[str, _Held] = defaultdict(_Held)  # request id -> tokens

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if self._hold(output)]
        return outputs

    def _hold(self, output: Any) -> bool:
        """Store the new tokens of a response.  At its end put all its tokens into `output` and return True."""
        held = self._held[output.request_id]
        held.tokens += output.new_token_ids
        held.prefill = output.prefill_stats = output.prefill_stats or held.prefill
        if output.new_logprobs is not None:
            held.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token is in the first column
        if output.finish_reason is None:
            return False
        del self._held[output.request_id]
        output.new_token_ids = held.tokens
        if held.logprobs:
            output.new_logprobs = LogprobsLists(
                np.array(held.tokens, dtype=np.int32)[:, None],
                np.array(held.logprobs, dtype=np.float32)[:, None],
                np.zeros(len(held.tokens), dtype=np.int32),  # ranks of the tokens; nothing reads them
            )
        return True

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Finish requests early, and drop their stored tokens; None means all requests."""
        if request_ids is None:
            self._held.clear()
        else:
            request_ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            for request_id in request_ids:
                self._held.pop(request_id, None)
        return super().finish_requests(request_ids, *args, **kwargs)


class AsyncWholeResponses(WholeResponses, AsyncScheduler):  # type: ignore[misc]
    """WholeResponses for asynchronous scheduling, vLLM's default on GPUs: a step is scheduled during the last one."""


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """Return the scheduler; vLLM calls this function by its option `scheduler_cls`."""
    kind = AsyncWholeResponses if vllm_config.scheduler_config.async_scheduling else WholeResponses
    return kind(vllm_config=vllm_config, **options)
