"""The real actor on one device: NeMo-Aligner's model, built by `nemo_prorl.policy.build` from `cluster=h100_4x8`.

The model is random, in the shape of DeepSeek-R1-Distill-Qwen-1.5B.  Without Transformer Engine the layers are
nemo_prorl's own; a row says so.
"""

import importlib.util
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.common import Settings, require
from gpu.publication import shapes

CONTEXT = {False: 8192, True: 64}  # tokens of prompt and response, by Settings.small
# Tokens of a micro-batch.  h100_4x8 has twice as many, which 80 GB hold only if 32 ranks share the optimizer.
MICRO_BATCH = CONTEXT
PROMPT = 16
FINAL_NORM = 8.0  # scales logits to the size of trained models
# A random model would end no response.  Here the first component of every embedding is EMBED, no layer writes to it,
# and only the output weight of eos reads it, with factor STOP.  So each token of a response is its last with about the
# same probability, 1 / MEAN_TOKENS at temperature 1.2.  STOP was computed from a sample of each model's states.
EMBED, STOP = 0.5, {False: 22.4, True: 0.080}
MEAN_TOKENS = {False: 1950, True: 20}
EOS = 2


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
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def write_model(folder: Path, settings: Settings, ends: bool = False) -> Path:
    """Write a Hugging Face folder with random bfloat16 weights (seed 1) and a tokenizer; return the folder.

    Args:
        ends: let the model end its responses, after MEAN_TOKENS tokens on average.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(settings)))
    generator = torch.Generator().manual_seed(1)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.full(shape, FINAL_NORM if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16)
        return (0.02 * torch.randn(shape, generator=generator)).bfloat16()

    tensors = {name: value(name, shape) for name, shape in shapes(settings.small)}
    if ends:
        _let_responses_end(tensors, STOP[settings.small])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, hf_config(settings)["vocab_size"])
    return folder


def _let_responses_end(tensors: dict[str, torch.Tensor], stop: float) -> None:
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    tensors["model.embed_tokens.weight"][:, 0] = EMBED
    head = tensors["lm_head.weight"]
    head[:, 0] = head[EOS] = 0.0
    head[EOS, 0] = stop


def _write_tokenizer(folder: Path, words: int) -> None:
    """Write a tokenizer that has a word `tN` for each token N."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(("<pad>", "<bos>", "<eos>", *(f"t{i}" for i in range(3, words))))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
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


def overrides(settings: Settings, folder: Path) -> list[str]:
    """Return the overrides that make `cluster=h100_4x8` a configuration of one rank, for the model in `folder`."""
    here = [
        "cluster=h100_4x8",
        f"pretrained_checkpoint.restore_from_path={folder}",
        "trainer.num_nodes=1",
        "trainer.devices=1",
        "rollout.engines=1",
        "model.fp8=null",
        f"trainer.grpo.context_tokens={CONTEXT[settings.small]}",
        f"model.micro_batch_tokens={MICRO_BATCH[settings.small]}",
        "data.max_prompt_tokens=null",
    ]
    if not has_transformer_engine():
        # The plan then counts attention scores.  nemo_prorl's own layers keep none, so no GPU is refused for them.
        here += ["model.transformer_engine=false", "rollout.device_memory_gb=150"]
    if importlib.util.find_spec("apex") is None:
        here += ["model.gradient_accumulation_fusion=false", "model.masked_softmax_fusion=false"]
        here += ["model.persist_layer_norm=false", "model.bias_dropout_add_fusion=false"]
    if not settings.cuda:
        here += ["model.use_cpu_initialization=true", "trainer.accelerator=cpu"]
    return here


def config(settings: Settings, folder: Path, *more: str) -> Any:
    """Return the checked configuration with `overrides`, and `more` of them."""
    from nemo_prorl.settings import load

    return load([*overrides(settings, folder), *more])


def build(settings: Settings, folder: Path, *more: str) -> tuple[Any, Any]:
    """Return the actor and its configuration.  Raises Skipped if NeMo-Aligner or Megatron-Core is not installed.

    Args:
        more: overrides; with `deterministic=true` this process computes as the ranks of such a run do.
    """
    require("megatron.core", "nemo", "nemo_aligner")
    from nemo_prorl.launcher.environment import rank_variables
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
    cfg = config(settings, folder, *more)
    os.environ |= rank_variables(cfg)
    if cfg.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.cuda)
    return build_actor(cfg, folder).actor, cfg


def in_a_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the result of `work` from a new process, at whose end the memory of the GPU is free.

    Raises RuntimeError if the process ends without a result.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as name:
        file = Path(name) / "found.pt"
        process = multiprocessing.get_context("spawn").Process(target=_keep, args=(file, work, arguments))
        process.start()
        process.join()
        if not file.is_file():
            raise RuntimeError(f"its process ended with status {process.exitcode}")
        return dict(torch.load(file, weights_only=False))


def _keep(file: Path, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    torch.save(work(*arguments), file)


def batch(settings: Settings, responses: int, width: int | None = None) -> Any:
    """Return a batch of random responses with advantages 1 and -1 and token weights of 1.

    Args:
        width: tokens of prompt and response; None: as many as the context has.
    """
    from nemo_prorl.batch import Batch

    words = hf_config(settings)["vocab_size"]
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return list(torch.randint(3, words, (count,), generator=generator).tolist())

    size = (width or CONTEXT[settings.small]) - PROMPT
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
