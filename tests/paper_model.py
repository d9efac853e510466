"""The paper's base model, DeepSeek-R1-Distill-Qwen-1.5B, as far as checks of a configuration read it."""

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


def write(folder: Path, **changes: Any) -> Path:
    """Writes config.json and an empty file of weights into a new or existing folder; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "model.safetensors").touch()
    return folder
