"""The values of NeMo's `model` section that follow from a Hugging Face config.json, for the families in ARCHITECTURES.

Uses the standard library only, so that an unsupported model is refused before a GPU is allocated.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_FIX = "Fix: another model, of Qwen2, Qwen2.5, Qwen3 or Llama (docs/tutorial/model.md has the keys)"
_FIX_FILE = "Fix: the model's own config.json"
_DTYPES = "float32", "bfloat16", "float16"
# Keys that change the computation, with the values that the actor supports.  An absent key means the first value.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
}
_SIZES = {  # NeMo's name of each size of a model, and its name in config.json
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
HEAD = "lm_head.weight"
_LLAMA3 = {  # NeMo's name of each number of Llama 3's rotary scaling, and its name in config.json
    "scale_factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}


def model_keys(hf: dict[str, Any], whose: str) -> dict[str, Any]:
    """Return the keys of NeMo's `model` section whose values follow from a Hugging Face config.json.

    Args:
        hf: content of the config.json.
        whose: name of the file in error messages.

    Raises:
        ConfigError: a size is missing, or the actor cannot compute the model.
    """
    check_computed(hf, whose)
    for key in ("rms_norm_eps", "rope_theta"):
        if (value := hf.get(key)) is not None and (type(value) not in (int, float) or value <= 0):
            raise ConfigError(f"{whose}: {key}={json.dumps(value)}: expected a number above 0. {_FIX_FILE}")
    if (theta := rope_theta(hf)) is not None and theta % 1:
        raise ConfigError(
            f"{whose}: rope_theta={theta:g}: expected a whole number, the only kind that NeMo takes. {_FIX}"
        )
    keys = {nemo: size_of(hf, name, whose) for nemo, name in _SIZES.items()}
    size_of(hf, "vocab_size", whose)
    heads, hidden, size = keys["num_attention_heads"], keys["hidden_size"], head_size(hf)
    rope, kind = rope_settings(hf), hf.get("model_type")
    scaled = _rope_type(rope) == "llama3"
    return {
        **keys,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": None if size * heads == hidden else size,
        "layernorm_epsilon": float(hf.get("rms_norm_eps", 1e-6)),
        "rotary_base": int(rope_theta(hf) or 10000),
        "scale_positional_embedding": scaled,
        **({nemo: rope[name] for nemo, name in _LLAMA3.items()} if scaled else {}),
        "share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings", False)),
        "qkv_bias": kind == "qwen2",
        "qk_layernorm": kind == "qwen3",
    }


def head_size(hf: dict[str, Any]) -> int:
    """Return the size of an attention head of a model with this config.json."""
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def check_computed(hf: dict[str, Any], whose: str) -> None:
    """Raise ConfigError for the first key of a config.json whose value the actor does not support."""
    if (kind := hf.get("model_type")) not in ARCHITECTURES:
        expected = f"expected one of {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"{whose}: model_type={kind!r} is not supported; {expected}. {_FIX}")
    _check_class(hf, whose)
    for key, values in COMPUTED.items():
        if (value := hf.get(key, values[0])) not in values:
            names = " or ".join(map(repr, values))
            raise ConfigError(f"{whose}: {key}={value!r} is not supported; expected {names}. {_FIX}")
    dtype = hf.get("torch_dtype") or hf.get("dtype")
    if dtype is not None and dtype not in _DTYPES:
        key = "torch_dtype" if hf.get("torch_dtype") else "dtype"
        raise ConfigError(f"{whose}: {key}={dtype!r}: expected one of {', '.join(_DTYPES)}. {_FIX_FILE}")
    if kind != "qwen2" and hf.get("attention_bias"):  # Qwen2 ignores this key
        raise ConfigError(
            f"{whose}: attention_bias=True is not supported for {kind}; expected False, because the actor's output"
            f" projection has no bias. {_FIX}"
        )
    heads, groups = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if type(heads) is type(groups) is int and (groups < 1 or heads % groups):
        rule = f"expected a divisor of num_attention_heads={heads}. {_FIX}"
        raise ConfigError(f"{whose}: num_key_value_heads={groups}: {rule}")
    if others := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise ConfigError(f"{whose}: layer_types has {others[0]!r}; expected only 'full_attention'. {_FIX}")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key)
        if rope is not None and not _is_computed(rope):
            raise ConfigError(
                f"{whose}: {key}={rope} is not supported; expected null, rope_type 'default', or 'llama3' with"
                f" {', '.join(_LLAMA3.values())}: Megatron-Core 0.12 has no other rotary embedding for these models, so"
                f" the actor's log-probabilities would not be the engine's. {_FIX}, or set this key"
                " to null if no context is longer than the model's context before rope scaling"
            )
    _check_rope_once(hf, whose)


def _check_class(hf: dict[str, Any], whose: str) -> None:
    wanted = [ARCHITECTURES[hf["model_type"]]]
    if (named := hf.get("architectures") or wanted) != wanted:
        cause = f"model_type={hf['model_type']} has {json.dumps(wanted)}; engines load what this key names. {_FIX_FILE}"
        raise ConfigError(f"{whose}: architectures={json.dumps(named)}: {cause}")


def _check_rope_once(hf: dict[str, Any], whose: str) -> None:
    """Raise ConfigError if a config.json gives two values of one setting of the rotary embedding."""
    first_values: dict[str, tuple[str, Any]] = {}  # setting -> key of the first value, value
    places = {"": {"rope_theta": hf.get("rope_theta")}}
    places |= {f"{key}.": hf.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for place, settings in places.items():
        for name, value in settings.items():
            setting = "rope_type" if name == "type" else name
            key, first = first_values.setdefault(setting, (place + name, value)) if value is not None else ("", value)
            if value != first:
                raise ConfigError(
                    f"{whose}: {key}={first} and {place}{name}={value}: expected one value, because trainer and engine"
                    f" may read different ones. Fix: the value with which the model was trained, in both places"
                )


def tensor_shapes(hf: dict[str, Any], whose: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model by its Hugging Face name.

    Raises ConfigError: as `model_keys`.
    """
    keys, vocab = model_keys(hf, whose), hf["vocab_size"]
    hidden, ffn, heads = keys["hidden_size"], keys["ffn_hidden_size"], keys["num_attention_heads"]
    size = head_size(hf)
    queries, values = heads * size, keys["num_query_groups"] * size
    layer: dict[str, tuple[int, ...]] = {
        **{f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")},
        **{f"self_attn.{x}_proj.weight": (queries if x == "q" else values, hidden) for x in "qkv"},
        "self_attn.o_proj.weight": (hidden, queries),
        **{f"mlp.{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if keys["qkv_bias"]:
        layer |= {f"self_attn.{x}_proj.bias": (queries if x == "q" else values,) for x in "qkv"}
    if keys["qk_layernorm"]:
        layer |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not keys["share_embeddings_and_output_weights"]:
        shapes[HEAD] = (vocab, hidden)
    names = ((n, name) for n in range(keys["num_layers"]) for name in layer)
    return {**shapes, **{f"model.layers.{n}.{name}": layer[name] for n, name in names}}


def keys_for(shapes: Mapping[str, tuple[int, ...]], hf: dict[str, Any]) -> str:
    """Return the keys of a config.json that weights of these shapes contradict, with both values; "" if none is known.

    Args:
        shapes: shape of each stored tensor by its Hugging Face name.
        hf: content of the config.json, with the sizes that `model_keys` needs.
    """
    attention = "model.layers.0.self_attn."
    try:
        vocab, hidden = shapes["model.embed_tokens.weight"]
        queries, values = (shapes[f"{attention}{x}_proj.weight"][0] for x in "qk")
        ffn = shapes["model.layers.0.mlp.gate_proj.weight"][0]
    except (KeyError, ValueError, IndexError):
        return ""
    norm, heads = shapes.get(f"{attention}q_norm.weight"), hf["num_attention_heads"]
    groups, size = hf.get("num_key_value_heads") or heads, head_size(hf | {"hidden_size": hidden})
    sizes: list[dict[str, Any]] = [
        {"model_type": "qwen3" if norm else "qwen2" if f"{attention}q_proj.bias" in shapes else "llama"},
        {"hidden_size": hidden},
        {"vocab_size": vocab},
        {"intermediate_size": ffn},
        {"num_hidden_layers": len({name.split(".")[2] for name in shapes if name.startswith("model.layers.")})},
        *([] if HEAD in shapes else [{"tie_word_embeddings": True}]),
    ]
    if norm or (hf.get("head_dim") and queries != heads * size and queries * groups == values * heads):
        size = norm[0] if norm else queries // heads
        sizes.append({"head_dim": size} if size != head_size(hf) else {})
    if hf.get("head_dim") or norm:
        sizes += [{"num_attention_heads": queries // size}, {"num_key_value_heads": values // size}]
    elif values != groups * size:  # one of both is wrong: without head_dim, no shape tells the number of heads
        sizes.append({"num_attention_heads": hidden * groups // values, "num_key_value_heads": values // size})
    return ", ".join(
        " or ".join(f"{key}: {json.dumps(value)} instead of {json.dumps(hf.get(key))}" for key, value in keys.items())
        for keys in sizes
        if any(hf.get(key) != value for key, value in keys.items())
    )


def takes_part(tensor: str, hf: dict[str, Any]) -> bool:
    """Return whether a stored tensor of this name takes part in a model's computation.

    Older versions of transformers stored rotary frequencies, and some the output layer of a model that shares the
    embedding's weights.
    """
    return not (tensor.endswith("rotary_emb.inv_freq") or (tensor == HEAD and hf.get("tie_word_embeddings")))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's config.json.  Raises ConfigError if it is missing or not JSON."""
    file = folder / "config.json"
    if not file.is_file():
        state = "it has no config.json" if folder.is_dir() else "it does not exist"
        raise ConfigError(f"{folder}: expected a Hugging Face model folder; {state}. Fix: the path of a complete one")
    if fault := json_fault(file):
        raise ConfigError(fault)
    config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file}: expected a JSON object; got {type(config).__name__}. Fix: copy the model's file again"
        )
    return config


def json_fault(file: Path) -> str | None:
    """Return that a file is not JSON, and the fix."""
    try:
        json.loads(file.read_text())
    except ValueError as error:
        place = f"{file}:{getattr(error, 'lineno', 1)}"
        return pointer_fault(file) or f"{place}: expected JSON: {error}. Fix: repair it, or copy the model's file again"
    return None


def pointer_fault(file: Path) -> str | None:
    """Return that git cloned a pointer to a file instead of the file, and the fix."""
    with file.open("rb") as opened:
        if opened.read(42) != b"version https://git-lfs.github.com/spec/v1":
            return None
    return f"{file}: it is a pointer of git-lfs to the file. Fix: git lfs pull, in {file.parent}"


def rope_settings(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotary embedding, from rope_scaling and (transformers 5) rope_parameters, or {}."""
    return (hf.get("rope_parameters") or {}) | (hf.get("rope_scaling") or {})


def rope_theta(hf: dict[str, Any]) -> float | None:
    """Return the base of the rotary embedding, None if absent; transformers 5 writes it into rope_parameters."""
    base = hf.get("rope_theta") or rope_settings(hf).get("rope_theta")
    return None if base is None else float(base)


def size_of(hf: dict[str, Any], name: str, whose: str) -> int:
    """Return a size in a config.json.  Raises ConfigError if it is not a whole number of at least 1."""
    value = hf.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        got = json.dumps(value)  # with the quotation marks of a text
        raise ConfigError(f"{whose}: {name}={got}: expected a whole number of at least 1. {_FIX_FILE}")
    return value


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _is_computed(rope: Any) -> bool:
    """Return whether the actor supports these settings of the rotary embedding."""
    plain = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    kind = _rope_type(rope) if plain and rope.get("partial_rotary_factor", 1) == 1 else None
    return kind == "default" or (kind == "llama3" and all(name in rope for name in _LLAMA3.values()))
