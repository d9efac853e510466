"""The models of the rehearsal of memory, and what the plan says of each phase.  Without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_prorl.settings import load
from nemo_prorl.sizing.memory import memory_of

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "eos_token_id": 2,
}


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn}
    return {**QWEN, **shape, "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab, **more}


SMALL = _shape(28, 1536, 8960, 12, 2, 151_936)  # DeepSeek-R1-Distill-Qwen-1.5B
QWEN_7B = _shape(28, 3584, 18944, 28, 4, 152_064)
LLAMA_8B = _shape(32, 4096, 14336, 32, 8, 128_256, architectures=["LlamaForCausalLM"], model_type="llama")


@dataclass(frozen=True)
class Case:
    """A model at a parallel layout of 32 ranks."""

    model: dict[str, Any]
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return ["cluster=h100_4x8", "rollout.device_memory_gb=150", *self.overrides]


TWO = ("model.tensor_model_parallel_size=2",)
CASES = {
    "1.5B-8k": Case(SMALL),
    "1.5B-16k": Case(SMALL, ("stage=run8",)),
    "1.5B-unfused": Case(SMALL, ("model.gradient_accumulation_fusion=false", "model.bias_activation_fusion=true")),
    "7B-tp2": Case(QWEN_7B, (*TWO, "model.sequence_parallel=true")),
    "8B-tp2": Case(LLAMA_8B, TWO),
}


def rehearse(names: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """Run cases, in processes of their own; return what each wrote."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "tests" / "te_stand_in")))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("rehearse_memory.py")), str(out), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
    return {name: json.loads((out / name / "found.json").read_text()) for name in names}


def planned(name: str, out: Path) -> dict[str, int]:
    """Return the plan's bytes of the trainer in each phase."""
    m = memory_of(load([*CASES[name].words, f"pretrained_checkpoint.restore_from_path={out / name / 'model'}"]))
    passing = m.trainer_resident + m.fp8_weights
    awake = m.trainer_resident + m.gathered
    return {
        # Until Megatron's buffers are filled, the weights are there twice; the optimizer comes later.
        "building": max(2 * m.weights + m.gradients, m.trainer_resident),
        "log-probabilities": passing + m.logprobs_work,
        "reference's": passing + m.reference_swap + m.logprobs_work,
        "update": passing + m.update_work,
        **dict.fromkeys(("publishing", "saving", "hashing", "resetting", "loading"), awake),
    }
