"""The paper's base model, DeepSeek-R1-Distill-Qwen-1.5B, as far as checks of a configuration read it."""

import json
import math
from pathlib import Path
from typing import Any

from nemo_prorl.data.hf_config import tensor_shapes
from nemo_prorl.errors import ConfigError

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
    """Writes config.json and a file of weights without content into a new or existing folder; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_hollow(folder)
    return folder


def write_hollow(folder: Path) -> None:
    """Writes weights of the folder's config.json in bf16: a hole in the file, which reads as zeros.

    A model that is not supported gets a file without tensors.
    """
    try:
        shapes = tensor_shapes(json.loads((folder / "config.json").read_text()), "config.json")
    except (ConfigError, KeyError, TypeError):
        shapes = {}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
