"""Conversion of weights between Hugging Face (Qwen2, Qwen3, Llama) and Megatron, at any tensor and pipeline size.

One `Rule` per kind of parameter, found by the parameter's name, says from which Hugging Face tensors the parameter is
made, how these are joined, and along which dimension the result is cut over tensor ranks.  `Rule.to_local` and
`Rule.to_hf` are exact inverses.  For a new family of models: "Add a model family" in CONTRIBUTING.md.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nemo_prorl.data.hf_config import check_computed, head_size, read_config, rope_settings, rope_theta
from nemo_prorl.data.model_folder import missing_weights, weights_fault
from nemo_prorl.errors import ConfigError
from nemo_prorl.files import new_folder, write_json
from nemo_prorl.rollout.weight_store import write_tensors


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that the conversion of its weights needs."""

    heads: int
    groups: int  # key-value heads
    head_size: int
    vocab: int  # rows of the Hugging Face embedding
    padded_vocab: int  # rows of Megatron's embedding, all tensor ranks together
    tied: bool  # the output layer shares the weights of the embedding

    @classmethod
    def of(cls, hf: dict[str, Any], padded_vocab: int) -> "Shape":
        """Return the sizes in a Hugging Face config.json."""
        heads = hf["num_attention_heads"]
        return cls(
            heads=heads,
            groups=hf.get("num_key_value_heads") or heads,
            head_size=head_size(hf),
            vocab=hf["vocab_size"],
            padded_vocab=padded_vocab,
            tied=bool(hf.get("tie_word_embeddings", False)),
        )


def _join_whole(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    return parts[0]


def _split_whole(full: Tensor, shape: Shape) -> list[Tensor]:
    return [full]


def _join_vocab(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    return torch.nn.functional.pad(parts[0], (0, 0, 0, shape.padded_vocab - shape.vocab))


def _split_vocab(full: Tensor, shape: Shape) -> list[Tensor]:
    return [full[: shape.vocab]]


def _join_qkv(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Join q, k, v into rows ordered by key-value group: the group's queries, then its key, then its value."""
    rest = parts[0].shape[1:]
    grouped = [p.reshape(shape.groups, -1, shape.head_size, *rest) for p in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def _split_qkv(full: Tensor, shape: Shape) -> list[Tensor]:
    rest, queries = full.shape[1:], shape.heads // shape.groups
    parts = full.reshape(shape.groups, queries + 2, shape.head_size, *rest).split([queries, 1, 1], dim=1)
    return [p.reshape(-1, *rest) for p in parts]


def _join_gate_up(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """Stack gate and up to [2, ffn, hidden], so that each tensor rank gets its cut of both."""
    return torch.stack(list(parts))


def _split_gate_up(full: Tensor, shape: Shape) -> list[Tensor]:
    return [full[0], full[1]]


@dataclass(frozen=True)
class Rule:
    """The relation between one Megatron parameter and Hugging Face tensors.

    `to_local` flattens the first two dimensions of the fused matrix of gate and up (`join is _join_gate_up`).

    Attributes:
        hf: names of the Hugging Face tensors.
        cut: dimension of the joined tensor that is cut over tensor ranks; None: every rank has the whole tensor.
        join: makes the whole Megatron parameter from the Hugging Face tensors.
        split: the inverse of `join`.
    """

    hf: tuple[str, ...]
    cut: int | None = None
    join: Callable[[Sequence[Tensor], Shape], Tensor] = _join_whole
    split: Callable[[Tensor, Shape], list[Tensor]] = _split_whole

    def to_local(self, parts: Sequence[Tensor], shape: Shape, tp_rank: int, tp_size: int) -> Tensor:
        """Return the parameter of one tensor-parallel rank, from whole Hugging Face tensors."""
        full = self.join(parts, shape)
        if self.cut is not None:
            full = full.chunk(tp_size, dim=self.cut)[tp_rank]
        return full.flatten(0, 1) if self.join is _join_gate_up else full

    def to_hf(self, shards: Sequence[Tensor], shape: Shape) -> list[Tensor]:
        """Return whole Hugging Face tensors, views where possible, from the parameter of all tensor ranks."""
        if self.join is _join_gate_up:
            shards = [s.unflatten(0, (2, -1)) for s in shards]
        whole = shards[0] if self.cut is None or len(shards) == 1 else torch.cat(list(shards), dim=self.cut)
        return self.split(whole, shape)


_EMBEDDING = Rule(("model.embed_tokens.weight",), 0, _join_vocab, _split_vocab)
_QKV = tuple(f"self_attn.{x}_proj." for x in "qkv")
_WHOLE_MODEL = {
    "embedding.word_embeddings.weight": _EMBEDDING,
    "output_layer.weight": Rule(("lm_head.weight",), 0, _join_vocab, _split_vocab),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
}
_LAYER = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(tuple(x + "weight" for x in _QKV), 0, _join_qkv, _split_qkv),
    "self_attention.linear_qkv.bias": Rule(tuple(x + "bias" for x in _QKV), 0, _join_qkv, _split_qkv),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), 1),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), 1, _join_gate_up, _split_gate_up),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), 1),
}
# Transformer Engine fuses a norm with the linear layer that follows it.
_LAYER["self_attention.linear_qkv.layer_norm_weight"] = _LAYER["input_layernorm.weight"]
_LAYER["mlp.linear_fc1.layer_norm_weight"] = _LAYER["pre_mlp_layernorm.weight"]


def rule_of(name: str, layer_offset: int, tied: bool) -> Rule:
    """Return the rule that converts a parameter of this rank to tensors of Hugging Face's model, and back.

    Args:
        name: the parameter's name in Megatron's GPTModel, with layers counted from the rank's first layer.
        layer_offset: number of layers on earlier pipeline stages.
        tied: whether the output layer shares the weights of the embedding.

    Raises KeyError: no supported model has such a parameter.
    """
    if tied and name == "output_layer.weight":  # the last stage's copy of the embedding
        return _EMBEDDING
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _LAYER:
        raise KeyError(f"{name}: not a parameter of a Qwen2, Qwen3 or Llama model")
    rule = _LAYER[match[2]]
    prefix = f"model.layers.{int(match[1]) + layer_offset}."
    return Rule(tuple(prefix + h for h in rule.hf), rule.cut, rule.join, rule.split)


class HFFolder:
    """A Hugging Face model folder: config.json and safetensors files, read one tensor at a time."""

    def __init__(self, folder: str | Path, need_weights: bool = True) -> None:
        """Read config.json and the names of the tensors.

        Args:
            need_weights: False: a folder with config and tokenizer only is accepted.

        Raises ConfigError: the folder lacks config.json or weights, or its model is not supported.
        """
        self.path = Path(folder)
        self.config = read_config(self.path)
        check_computed(self.config, str(self.path / "config.json"))
        if need_weights and (fault := weights_fault(self.path)):
            raise ConfigError(fault)
        self._file_of: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as f:
                self._file_of.update(dict.fromkeys(f.keys(), file))
        if need_weights and not self._file_of:
            raise ConfigError(missing_weights(self.path) or f"{self.path}: its *.safetensors files have no tensor")

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor in the file's dtype, on the CPU.

        Raises KeyError, with the folder, for a missing tensor; ConfigError for one with values that are not finite.
        """
        if name not in self._file_of:
            raise KeyError(f"{self.path} has no tensor {name}")
        with safe_open(self._file_of[name], "pt") as f:
            tensor = f.get_tensor(name)
        if not tensor.isfinite().all():
            raise ConfigError(f"{self._file_of[name]}: {name} has NaN or infinite values. Fix: copy the file again")
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in sorted(self._file_of):
            yield name, self.tensor(name)


class Digests:
    """A sha256 over named tensors as float32, in name order; tensors may be added in any order."""

    def __init__(self) -> None:
        self._of: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        digest = hashlib.sha256(name.encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().data)
        self._of[name] = digest.digest()

    def sha256(self) -> str:
        return hashlib.sha256(b"".join(self._of[name] for name in sorted(self._of))).hexdigest()


def sha256_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digests = Digests()
    for name, tensor in tensors:
        digests.add(name, tensor)
    return digests.sha256()


def dtype_of(hf: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the weights according to config.json; float32 if it names no dtype."""
    return getattr(torch, str(hf.get("torch_dtype") or hf.get("dtype") or "float32"))


def write_hf_folder(folder: Path, tensors: Iterator[tuple[str, Tensor]], like: Path, dtype: torch.dtype | None) -> None:
    """Write a Hugging Face folder; it is complete once it has the name `folder`.

    Args:
        like: folder from which config and tokenizer are copied.
        dtype: all tensors are converted to it, and config.json names it; None: each keeps its dtype.

    A rotary base that is only in rope_parameters (transformers 5) is written as rope_theta, too.
    """
    config = read_config(like)
    with new_folder(folder) as temporary:
        copy_without_weights(like, temporary)
        changed: dict[str, Any] = {}
        if dtype not in (None, dtype_of(config)):
            changed["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
        if config.get("rope_theta") is None and (theta := rope_theta(config)) is not None:
            changed["rope_theta"] = theta  # transformers 4 ignores rope_parameters
            rope = rope_settings(config)
            changed |= {"rope_scaling": rope} if rope.get("rope_type", "default") != "default" else {}
        if changed:
            write_json(temporary / "config.json", config | changed)
        cast = ((name, tensor.detach().to("cpu", dtype or tensor.dtype)) for name, tensor in tensors)
        room = _HEADER_BYTES * (config["num_hidden_layers"] + 1)
        with (temporary / "model.safetensors").open("wb") as file:
            write_tensors(file, cast, room, lambda: {"format": "pt"})


_HEADER_BYTES = 4096  # reserved in the header per layer, three times the need of a layer's twelve tensors
_WEIGHTS = ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx"


def copy_without_weights(folder: Path, out: Path) -> None:
    """Copy configuration, tokenizer, chat template and other small files of a Hugging Face folder to another folder."""
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
