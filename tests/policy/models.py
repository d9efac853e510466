"""Small Hugging Face models for the policy's tests, written by hand, so that nothing of ours is trusted."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.paper_model import write_hollow

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 99,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "eos_token_id": 2,
}
QWEN3 = QWEN2 | {  # norms of queries and keys, no biases, heads wider than hidden_size / heads
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "head_dim": 32,
    "rope_theta": 1000000.0,
}
LLAMA_TIED = QWEN2 | {  # Llama 3's rotary scaling changes some frequencies, blends some and keeps some
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 256,
}
MODELS = {"qwen2": QWEN2, "qwen3": QWEN3, "llama_tied": LLAMA_TIED}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in the model's file."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for x, rows in (("q", queries), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{x}_proj.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{at}self_attn.{x}_proj.bias"] = (rows,)
            if config["model_type"] == "qwen3" and x != "v":
                shapes[f"{at}self_attn.{x}_norm.weight"] = (head,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{at}mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def write_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A model folder with random weights of seed 0 and a character tokenizer."""
    folder.mkdir(parents=True)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes_of(config).items():
        normal = torch.randn(*shape, generator=generator) * 0.1
        tensors[name] = 1 + normal if "norm" in name else normal
    save_file({k: v.to(dtype) for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    _write_rest(folder, config, dtype)
    return folder


def write_hollow_model(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder in bf16 of any size: its weights are a hole in the file, and read as zeros."""
    folder.mkdir(parents=True)
    _write_rest(folder, config, torch.bfloat16)
    write_hollow(folder)
    return folder


def _write_rest(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": name}))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # not for every worker that collects tests
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>"] + [chr(i) for i in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
