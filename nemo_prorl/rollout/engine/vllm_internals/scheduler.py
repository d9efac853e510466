"""vLLM's scheduler, with less to hand out for each token.

vLLM hands out each token of each response as it is sampled, with three arrays for its log-probability, which both
processes of an engine pack and unpack.  Nobody here looks at a response before its end.  Holding the tokens back saves
a fifth of an engine's time with a small model on a CPU.

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
    """The tokens of a response that goes on."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prefill: Any = None  # how its prompt was computed: the first output says it


class WholeResponses(Scheduler):  # type: ignore[misc]
    """Holds tokens back until their response ends.  Of log-probabilities it keeps the sampled token's alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: defaultdict[str, _Held] = defaultdict(_Held)  # by request

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            client.outputs = [output for output in client.outputs if self._hold(output)]
        return outputs

    def _hold(self, output: Any) -> bool:
        """Takes a response's new tokens; when it ends, gives all of them to its last output and says so."""
        held = self._held[output.request_id]
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


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """What `scheduler_cls` names: as vLLM would choose by itself."""
    kind = AsyncWholeResponses if vllm_config.scheduler_config.async_scheduling else WholeResponses
    return kind(vllm_config=vllm_config, **options)
