"""The real actor on one device: NeMo-Aligner's model, built by `nemo_prorl.policy.build` from `cluster=h100_4x8`.

The model is random, in the shape of DeepSeek-R1-Distill-Qwen-1.5B.  Without Transformer Engine the layers are
nemo_prorl's own; a row says so.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.common import Settings, require
from gpu.publication import shapes

CONTEXT = {False: 8192, True: 64}  # tokens of prompt and response, by Settings.small
PROMPT = 16
FINAL_NORM = 8.0  # scales logits to the size of trained models


def hf_config(settings: Settings) -> dict[str, Any]:
    """Return config.json of the model."""
    sizes = dict(shapes(settings.small))
    words, hidden = sizes["model.embed_tokens.weight"]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": sizes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": sum(name.endswith("mlp.gate_proj.weight") for name in sizes),
        "num_attention_heads": 2 if settings.small else 12,
        "num_key_value_heads": 1 if settings.small else 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def write_model(folder: Path, settings: Settings) -> Path:
    """Write a Hugging Face folder with random bfloat16 weights (seed 1) and a tokenizer; return the folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(settings)))
    generator = torch.Generator().manual_seed(1)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.full(shape, FINAL_NORM if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, generator=generator)).bfloat16()

    tensors = {name: value(name, shape) for name, shape in shapes(settings.small)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of four words, which NeMo requires; no text is encoded or decoded here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(("<pad>", "<bos>", "<eos>", "a"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def layers() -> str:
    """Return a description of the layers that the actor uses here."""
    if not has_transformer_engine():
        return "nemo_prorl's own layers, since Transformer Engine is not installed"
    import transformer_engine

    doc = (transformer_engine.__doc__ or "").strip().splitlines()
    stand_in = doc and "stand-in" in doc[0].lower()
    return "a stand-in for Transformer Engine: no number of it means anything" if stand_in else "Transformer Engine"


def config(settings: Settings, folder: Path, *overrides: str) -> Any:
    """Return the configuration of `cluster=h100_4x8` on one rank, for the model in `folder`."""
    from nemo_prorl.settings import load

    here = [
        "cluster=h100_4x8",
        f"pretrained_checkpoint.restore_from_path={folder}",
        "trainer.num_nodes=1",
        "trainer.devices=1",
        "rollout.engines=1",
        "model.fp8=null",
        f"trainer.grpo.context_tokens={CONTEXT[settings.small]}",
        "data.max_prompt_tokens=null",
    ]
    if not has_transformer_engine():
        here += ["model.transformer_engine=false"]
    if importlib.util.find_spec("apex") is None:
        here += ["model.gradient_accumulation_fusion=false", "model.masked_softmax_fusion=false"]
        here += ["model.persist_layer_norm=false", "model.bias_dropout_add_fusion=false"]
    if not settings.cuda:
        here += ["model.use_cpu_initialization=true", "trainer.accelerator=cpu"]
    return load([*here, *overrides])


def build(settings: Settings, folder: Path, *overrides: str) -> tuple[Any, Any]:
    """Return the actor and its configuration.  Raises Skipped if NeMo-Aligner or Megatron-Core is not installed."""
    require("megatron.core", "nemo", "nemo_aligner")
    from nemo_prorl.launcher.processes import free_port
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.policy.cpu import shims as cpu

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "TORCHELASTIC_RUN_ID": "gpu-evidence",
    }
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "25.01")  # NeMo reads it; only NVIDIA's image sets it
    if settings.cuda and not has_transformer_engine():
        cpu.without_apex_and_te()
    cfg = config(settings, folder, *overrides)
    return build_actor(cfg, folder).actor, cfg


def batch(settings: Settings, responses: int) -> Any:
    """Return a batch of random responses that fill the context, with advantages 1 and -1 and token weights of 1."""
    from nemo_prorl.batch import Batch

    words = hf_config(settings)["vocab_size"]
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return list(torch.randint(3, words, (count,), generator=generator).tolist())

    size = CONTEXT[settings.small] - PROMPT
    made = Batch.from_sequences(
        [tokens(PROMPT) for _ in range(responses)],
        [tokens(size) for _ in range(responses)],
        [[-1.0] * size for _ in range(responses)],
    )
    advantage_B = torch.tensor([1.0 if i % 2 else -1.0 for i in range(responses)])
    return made.with_targets(advantage_B=advantage_B, weight_BT=made.mask_BT.float())


def with_logprobs(batch: Any, old_BT: torch.Tensor, ref_BT: torch.Tensor) -> Any:
    return batch.with_targets(old_logp_BT=old_BT, ref_logp_BT=ref_BT)


def updater(actor: Any, cfg: Any) -> Callable[[Any], dict[str, float]]:
    """Return a function that makes one optimizer step on a batch with the paper's loss.

    It returns, like `Actor.update`, the loss and sums of diagnostics by name, and `grad_norm`.
    """
    from nemo_prorl.algorithms.losses import denominator_terms
    from nemo_prorl.config import GRPOConfig
    from nemo_prorl.trainer import policy_loss

    grpo = cfg.trainer.grpo
    loss = partial(
        policy_loss, config=GRPOConfig(clip_low=grpo.clip_low, clip_high=grpo.clip_high, kl_coef=grpo.kl_coef)
    )

    def update(batch: Any) -> dict[str, float]:
        sums: dict[str, float] = actor.update(batch, loss, float(denominator_terms(batch.mask_BT, "token")))
        return sums

    return update
