"""Checks that the actor computes the same model as the engine, for a Hugging Face config.json.

Uses the standard library only, so that an unsupported model is refused before a GPU is allocated.
"""

from typing import Any

from nemo_prorl.errors import ConfigError

ARCHITECTURES = ("qwen2", "llama")
# Keys that change the computation, with the values that the actor supports.  An absent key means the first value.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
}


def check_computed(hf: dict[str, Any], whose: str) -> None:
    """Raise ConfigError for the first key of a config.json whose value the actor does not support."""
    if (kind := hf.get("model_type")) is not None and kind not in ARCHITECTURES:
        raise ConfigError(f"{whose}: model_type={kind!r} is not supported; expected one of {', '.join(ARCHITECTURES)}")
    for key, values in COMPUTED.items():
        if (value := hf.get(key, values[0])) not in values:
            names = " or ".join(map(repr, values))
            raise ConfigError(f"{whose}: {key}={value!r} is not supported; expected {names}. Fix: another model")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key)
        if rope is not None and not _is_plain(rope):
            raise ConfigError(
                f"{whose}: {key}={rope} is not supported; expected null, or rope_type 'default': the actor computes the"
                " plain rotary embedding, so its log-probabilities would not be the engine's. Fix: another model"
            )


def _is_plain(rope: Any) -> bool:
    """Return whether these settings change nothing in the rotary embedding except its base."""
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return False
    return rope.get("rope_type", rope.get("type", "default")) == "default" and rope.get("partial_rotary_factor", 1) == 1


def rope_theta(hf: dict[str, Any]) -> float | None:
    """Return the base of the rotary embedding, None if absent; transformers 5 writes it into rope_parameters."""
    base = hf.get("rope_theta") or (hf.get("rope_parameters") or {}).get("rope_theta")
    return None if base is None else float(base)
