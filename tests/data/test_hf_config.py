"""The values of NeMo's `model` section that follow from a config.json, for the three kinds of model."""

from typing import Any

import pytest

from nemo_prorl.data.hf_config import model_keys
from nemo_prorl.errors import ConfigError
from tests.paper_model import CONFIG

ABSENT = ("rope_theta", "rms_norm_eps", "num_key_value_heads", "tie_word_embeddings")
BARE = {key: CONFIG[key] for key in CONFIG if key not in ABSENT}
SIZES = {
    "num_layers": 28,
    "hidden_size": 1536,
    "ffn_hidden_size": 8960,
    "num_attention_heads": 12,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        (
            BARE,
            {
                **{"num_query_groups": 12, "kv_channels": None, "layernorm_epsilon": 1e-6, "rotary_base": 10000},
                **{"scale_positional_embedding": False, "share_embeddings_and_output_weights": False},
                **{"qkv_bias": True, "qk_layernorm": False},
            },
        ),
        (
            {
                **{**CONFIG, "model_type": "llama", "head_dim": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
                **{"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            },
            {
                **{"num_query_groups": 2, "kv_channels": 64, "layernorm_epsilon": 1e-5, "rotary_base": 500000},
                **{"scale_positional_embedding": True, "scale_factor": 32.0, "old_context_len": 8192},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "share_embeddings_and_output_weights": True},
                **{"qkv_bias": False, "qk_layernorm": False},
            },
        ),
        (
            {**BARE, "model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {
                **{"num_query_groups": 12, "kv_channels": None, "layernorm_epsilon": 1e-6, "rotary_base": 1000000},
                **{"scale_positional_embedding": False, "share_embeddings_and_output_weights": False},
                **{"qkv_bias": False, "qk_layernorm": True},
            },
        ),
    ],
    ids=["qwen2", "llama", "qwen3"],
)
def test_the_keys_of_a_model(hf: dict[str, Any], expected: dict[str, Any]) -> None:
    assert model_keys(hf, "F") == {**SIZES, **expected}


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},  # Qwen2 ignores it
        {"hidden_act": "swish"},
        {"use_sliding_window": False, "mlp_bias": False, "rope_interleaved": False, "partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"] * 2},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)
def test_keys_that_change_nothing(change: dict[str, Any]) -> None:
    assert model_keys({**CONFIG, **change}, "F") == model_keys(CONFIG, "F")
    assert model_keys({**CONFIG, **change, "num_hidden_layers": 1}, "F")["num_layers"] == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": True}, "num_attention_heads=true: expected a whole number of at least 1"),
        ({"hidden_size": 0}, "hidden_size=0: expected a whole number of at least 1"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads=5: expected a divisor of num_attention_heads=12. Fix: another",
        ),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2: expected a divisor of num_attention_heads=12"),
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported; expected one of qwen2, qwen3, llama"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True is not supported for llama"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; expected 'silu' or 'swish'. Fix"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_scaling": []}, "rope_scaling=[] is not supported"),
        ({"rope_scaling": {"type": "linear", **LLAMA3}}, "rope_scaling={'type': 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling={'rope_type': 'llama3', 'factor': 8"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters={'full_attention'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters={'rope_type"),
    ],
    ids=str,
)
def test_a_model_that_the_actor_would_compute_otherwise(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_keys({**CONFIG, **change}, "F")
    assert str(caught.value).startswith(f"F: {says}")
    if "whole number" not in says:
        assert "Fix: another model, of Qwen2, Qwen2.5, Qwen3 or Llama (docs/tutorial/model.md has" in str(caught.value)
