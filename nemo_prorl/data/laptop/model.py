"""Makes the base model of the laptop job: a random Qwen2 of about a million parameters, with a small tokenizer.

The model is a Hugging Face folder, the form that every other part reads.  The same arguments give the same bytes.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

_log = logging.getLogger(__name__)

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL = (PAD, BOS, EOS)  # ids 0, 1, 2
MARKUP = ("<answer>", "</answer>", "\\boxed{", "<think>", "</think>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_MAX_WORDS = 240
_MAX_PHRASES = 64
_MIN_PHRASE_SHARE = 0.01  # share of the texts that must contain a phrase for it to become one token
_MIN_SHARE = 0.02  # share of the texts that must contain a word for it to become one token; _ENOUGH texts suffice
_ENOUGH = 250
_INIT_STD = 0.06  # three times the usual: at a width of 128, the warm-up then needs a third of the steps


def build_base_model(folder: Path | str, model_cfg: Mapping[str, Any], seed: int, texts: Iterable[str]) -> None:
    """Write a model folder: config.json, model.safetensors and the tokenizer's files.

    Raises ConfigError for a shape that Qwen2 cannot have.

    Args:
        model_cfg: the model's shape, under NeMo's names: `num_layers`, `hidden_size`, `ffn_hidden_size`,
            `num_attention_heads`, `num_query_groups`, `max_position_embeddings`, `layernorm_epsilon`, `rotary_base`
            and `share_embeddings_and_output_weights`.
        texts: prompts and answers, whose frequent words become tokens.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(texts)
    config = qwen2_config(model_cfg, len(tokenizer))
    weights = random_weights(config, seed)
    # The weights are written last: their presence shows that the folder is complete.
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    size = sum(tensor.numel() for tensor in weights.values())
    _log.info("wrote a random model with %d parameters and a vocabulary of %d tokens", size, len(tokenizer))


def qwen2_config(model_cfg: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the config.json of a Qwen2 of this shape.  Raises ConfigError naming the bad key."""
    missing = sorted({"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"} - set(model_cfg))
    if missing:
        raise ConfigError(
            f"model.{missing[0]} is missing; a model with random weights needs it. Fix: set it, or name a model with"
            " pretrained_checkpoint.restore_from_path=FOLDER"
        )
    hidden, heads = model_cfg["hidden_size"], model_cfg["num_attention_heads"]
    groups = model_cfg.get("num_query_groups") or heads
    if hidden % heads or (hidden // heads) % 2:
        raise ConfigError(
            f"model.hidden_size={hidden} and model.num_attention_heads={heads}: the size of a head, "
            f"{hidden}/{heads}, must be an even whole number"
        )
    if heads % groups:
        raise ConfigError(f"model.num_query_groups={groups} does not divide model.num_attention_heads={heads}")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": SPECIAL.index(BOS),
        "eos_token_id": SPECIAL.index(EOS),
        "pad_token_id": SPECIAL.index(PAD),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": _INIT_STD,
        "intermediate_size": model_cfg["ffn_hidden_size"],
        "max_position_embeddings": model_cfg["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_hidden_layers": model_cfg["num_layers"],
        "num_key_value_heads": groups,
        "rms_norm_eps": model_cfg["layernorm_epsilon"],
        "rope_theta": float(model_cfg["rotary_base"]),
        "tie_word_embeddings": model_cfg["share_embeddings_and_output_weights"],
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def random_weights(config: Mapping[str, Any], seed: int) -> "dict[str, torch.Tensor]":
    """Return Qwen2's tensors by Hugging Face name, float32: N(0, _INIT_STD) matrices, zero biases, norms of one.

    All tensors are drawn in name order from one generator, so the values depend only on the seed and the shapes.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(_shapes(config).items()):
        if name.endswith(".bias"):
            weights[name] = torch.zeros(shape)
        elif name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.empty(shape).normal_(0.0, _INIT_STD, generator=draw)
    return weights


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen2's tensors by Hugging Face name."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, width in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (width, hidden)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (width,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def build_tokenizer(texts: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Return a byte-level tokenizer whose tokens are the frequent words of the texts and, for the rest, single bytes.

    A frequent word is one token.  A rare word is one token per letter; a model that must spell the word backward needs
    the letters.  A digit is always one token.  A phrase that the prompts of a task share is also one token: a prompt is
    then a dozen tokens instead of forty, and a step three times as fast.  The encoding is byte-pair encoding without
    merges and with `ignore_merges`, so that decoding restores any text exactly.
    """
    texts = list(texts)
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    words = _frequent_words(texts, split)
    plain = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *MARKUP, *plain])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    added = [*MARKUP, *_frequent_phrases(texts, split, set(words))]  # the longest match wins
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    unused = -len(vocab_of(backend)) % 64  # splits evenly over tensor-parallel ranks without padded rows in Megatron
    backend.add_tokens([AddedToken(f"<|unused_{k}|>", special=False, normalized=False) for k in range(unused)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # Qwen2's; `generate` refuses token_type_ids
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vocab_of(backend: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens, including added tokens."""
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return vocab


def _frequent_phrases(texts: Iterable[str], split: Any, words: set[str]) -> list[str]:
    """Return runs of frequent words and markup that are in at least 1 % of the texts, the most frequent first."""
    markup = re.compile("(" + "|".join(re.escape(token) for token in MARKUP) + ")")
    counts: Counter[str] = Counter()
    number = 0
    for text in texts:
        number += 1
        runs, run = set(), []
        for part in markup.split(text):
            pieces = [(part, True)] if part in MARKUP else _pieces(part, split, words)
            for piece, frequent in [*pieces]:
                if frequent:
                    run.append(piece)
                else:
                    runs.add(tuple(run))
                    run = []
        runs.add(tuple(run))
        counts.update("".join(r) for r in runs if len(r) > 1)
    often = [run for run, count in counts.items() if count >= max(2, _MIN_PHRASE_SHARE * number)]
    return sorted(often, key=lambda run: (-counts[run], run))[:_MAX_PHRASES]


def _pieces(part: str, split: Any, words: set[str]) -> list[tuple[str, bool]]:
    """Split a text into pre-tokens; return (pre-token, whether it can be part of a phrase) for each.

    Frequent words, and single characters other than letters and digits, can be part of a phrase.
    """
    pieces = []
    for token, (start, end) in split.pre_tokenize_str(part):
        piece = part[start:end]
        pieces.append((piece, token in words or (len(token) == 1 and not piece.isalnum())))
    return pieces


def _frequent_words(texts: Iterable[str], split: Any) -> list[str]:
    """Return the byte-level words in at least 2 % of the texts or in 250 texts, sorted by frequency, then spelling."""
    markup = re.compile("|".join(re.escape(token) for token in MARKUP))
    counts: Counter[str] = Counter()
    number = 0
    for text in texts:
        number += 1
        words = {word for part in markup.split(text) for word, _ in split.pre_tokenize_str(part)}
        counts.update(word for word in words if len(word) > 1)
    if number == 0:
        raise DataError("data.train: expected at least one record to build the tokenizer of the random model; got none")
    often = [word for word, count in counts.items() if count >= max(2, min(_MIN_SHARE * number, _ENOUGH))]
    return sorted(often, key=lambda word: (-counts[word], word))[:_MAX_WORDS]
