"""Records each response of an engine while a step is traced; otherwise the engine's own method runs, untouched."""

import time
from collections.abc import AsyncIterator
from typing import Any

from nemo_prorl.tracing import RECORDER, answer


class EngineTrace:
    """Stands before `engine.generate` from {"record": true} to {"record": false}."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name = engine, name

    def record(self, body: Any) -> dict[str, Any]:
        """Begins or ends the recording; ValueError for a body that says neither."""
        said = answer(body, self._name)
        if body["record"]:
            self._engine.generate = self._generate
        else:
            self._engine.__dict__.pop("generate", None)
        return said

    async def _generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        began, result = time.monotonic(), None
        stream = type(self._engine).generate(self._engine, *args, **kwargs)
        try:
            async for result in stream:
                yield result
        finally:
            output = result.outputs[0] if result is not None else None
            tokens = len(output.token_ids) if output is not None else 0
            reason = str(output.finish_reason) if output is not None else "aborted"
            shared = (result.num_cached_tokens or 0) if result is not None else 0  # of the prompt
            said: dict[str, Any] = {"tokens": tokens, "finish_reason": reason, "prompt_cached": shared}
            RECORDER.add("response", "responses", began, time.monotonic(), **said)
