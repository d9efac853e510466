"""Measures how far the engine's log-probabilities are from the trainer's for the same weights and tokens.

The engine draws responses at the training temperature; the real actor computes the log-probabilities of their tokens.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import real
from gpu.common import Emit, Settings, require
from gpu.engine import SMALL_KV_MB, call, require_vllm, server

WAYS = {"bf16": [], "FP8 hybrid, tensorwise scales": ["model.fp8=hybrid", "model.fp8_recipe=tensorwise"]}
HEADS = {"float32 heads": True, "16-bit heads": False}  # on both sides: trainer.grpo.float32_head
PROMPTS, TOKENS = 16, {False: 512, True: 32}  # tokens of a response, by Settings.small
TEMPERATURE = 1.2
KV_MB = 8192


def run(emit: Emit, settings: Settings) -> None:
    require("megatron.core", "nemo", "nemo_aligner")
    python = settings.engine_python or sys.executable
    require_vllm(python)
    emit("layers", note=real.layers())
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        folder = Path(name)
        real.write_model(folder / "model", settings)
        (folder / "weights").mkdir()
        options = [f"--kv-mb={SMALL_KV_MB if settings.small else KV_MB}"]
        for head, wide in HEADS.items():
            with server(python, folder, settings, *options, *(["--float32-head"] if wide else [])) as url:
                drawn = [draw(url, k, settings) for k in range(PROMPTS)]
            for way, overrides in WAYS.items():
                if overrides and not real.has_transformer_engine():
                    emit(f"{way}, {head}", note="not measured: Transformer Engine is not installed here")
                    continue
                overrides = [*overrides, f"trainer.grpo.float32_head={str(wide).lower()}"]
                found = real.in_a_process(measure, settings, folder / "model", overrides, drawn)
                emit(f"{way}, {head}", **found)


def draw(url: str, number: int, settings: Settings) -> tuple[list[int], list[int], list[float]]:
    """Draw a response to prompt `number`; return prompt, response (token ids) and the engine's log-probabilities."""
    prompt = [3 + (11 * number + 7 * i) % 400 for i in range(real.PROMPT)]
    body = {"prompt": prompt, "temperature": TEMPERATURE, "max_tokens": TOKENS[settings.small], "seeds": [number]}
    (reply, *_), _ = call(url, "/generate", body | {"stop_token_ids": []})
    return prompt, reply["token_ids"], reply["logprobs"]


def measure(settings: Settings, folder: Path, overrides: list[str], drawn: list[Any]) -> dict[str, Any]:
    """Return how far the actor's log-probabilities of the drawn responses are from the engine's."""
    from nemo_prorl.batch import Batch

    actor, _ = real.build(settings, folder, *overrides)
    batch = Batch.from_sequences([d[0] for d in drawn], [d[1] for d in drawn], [d[2] for d in drawn])
    logp_BT, _ = actor.logprobs(batch)
    gap_N = (logp_BT - batch.engine_logp_BT)[batch.mask_BT]
    return {
        "tokens": gap_N.numel(),
        "mean_logp": float(logp_BT[batch.mask_BT].mean()),
        "mean_logp_gap": float(gap_N.abs().mean()),
        "largest_logp_gap": float(gap_N.abs().max()),
        "token_mult_prob_error": float(gap_N.abs().exp().mean()),
    }
