"""Reading and writing a checkpoint's policy without building a model, for `prorl export-hf` and `prorl import-hf`.

Megatron's distributed format is torch's: tensors under Megatron's names, each stored in parts.  The parameters of the
same name in all layers are one tensor, and its first dimension is the layer.  Only one layer's parameter is in memory
at a time.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save as torch_distributed_save

from nemo_prorl.data.hf_config import model_keys
from nemo_prorl.errors import CheckpointError
from nemo_prorl.policy.plain_files import check_metadata
from nemo_prorl.policy.weights import HFFolder, Rule, Shape, rule_of

_MODEL, _LAYERS = "model.", "decoder.layers."
VOCAB_MULTIPLE = 128  # imported embeddings are padded to a multiple of 128 rows; a run changes this to its own multiple


@dataclass(frozen=True)
class Part:
    """A Megatron parameter and its place in a stored tensor."""

    key: str  # name of the stored tensor
    layer: int | None  # number of the parameter's layer, from 0; None: not part of a layer
    shape: tuple[int, ...]  # the parameter's, all tensor ranks together
    rule: Rule

    @property
    def offsets(self) -> torch.Size:
        return torch.Size([0] * len(self.shape) if self.layer is None else [self.layer, *[0] * len(self.shape)])

    @property
    def sizes(self) -> torch.Size:
        return torch.Size(self.shape if self.layer is None else (1, *self.shape))

    def whole(self, layers: int) -> torch.Size:
        """Return the size of the stored tensor of a model with this many layers."""
        return torch.Size(self.shape if self.layer is None else (layers, *self.shape))


def parts_of(hf: dict[str, Any], padded_vocab: int) -> list[Part]:
    """Return all parameters of a model with this config.json."""
    keys, shape = model_keys(hf, "config.json"), Shape.of(hf, padded_vocab)
    hidden, ffn = keys["hidden_size"], keys["ffn_hidden_size"]
    qkv = (shape.heads + 2 * shape.groups) * shape.head_size
    sizes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_proj.weight": (hidden, shape.heads * shape.head_size),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
    }
    if keys["qkv_bias"]:
        sizes["self_attention.linear_qkv.bias"] = (qkv,)
    if keys["qk_layernorm"]:
        sizes |= {f"self_attention.{x}_layernorm.weight": (shape.head_size,) for x in "qk"}
    alone = {"embedding.word_embeddings.weight": (padded_vocab, hidden), "decoder.final_layernorm.weight": (hidden,)}
    if not shape.tied:
        alone["output_layer.weight"] = (padded_vocab, hidden)
    parts = [Part(_MODEL + name, None, size, rule_of(name, 0, shape.tied)) for name, size in alone.items()]
    for layer in range(keys["num_layers"]):
        for name, size in sizes.items():
            rule = rule_of(f"{_LAYERS}{layer}.{name}", 0, shape.tied)
            parts.append(Part(f"{_MODEL}{_LAYERS}{name}", layer, size, rule))
    return parts


# --- reading -------------------------------------------------------------------------------------------------------


class _OneTensorPlanner(DefaultLoadPlanner):
    """A planner that reads into one given tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensor


def read_policy(folder: Path, hf: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of a checkpoint's policy, in the dtype of the stored weights.

    Raises CheckpointError: a tensor is missing, or its size differs from config.json.
    """
    check_metadata(folder)
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    tensors = metadata.state_dict_metadata
    embedding = tensors.get(f"{_MODEL}embedding.word_embeddings.weight")
    if not isinstance(embedding, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: expected a tensor {_MODEL}embedding.word_embeddings.weight; got nothing")
    parts = parts_of(hf, embedding.size[0])
    shape, layers = Shape.of(hf, embedding.size[0]), hf["num_hidden_layers"]
    for part in parts:
        stored = tensors.get(part.key)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != part.whole(layers):
            size = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else "nothing"
            raise CheckpointError(
                f"{folder}: {part.key}: expected shape {tuple(part.whole(layers))}, from config.json; got {size}"
            )
    for part in parts:
        stored = tensors[part.key]
        assert isinstance(stored, TensorStorageMetadata)
        tensor = torch.empty(part.sizes, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(part.offsets, part.sizes)
        items = create_read_items_for_chunk_list(part.key, stored, [chunk])
        reader.read_data(LoadPlan(items), _OneTensorPlanner(tensor)).wait()
        yield from zip(part.rule.hf, part.rule.to_hf([tensor.reshape(part.shape)], shape), strict=True)


# --- writing -------------------------------------------------------------------------------------------------------


class _FolderPlanner(DefaultSavePlanner):
    """A planner that writes the parts of a Hugging Face folder, and makes each part only when it is written."""

    def __init__(self, parts: list[Part], folder: HFFolder, dtype: torch.dtype, padded_vocab: int) -> None:
        super().__init__(flatten_state_dict=False)
        self.folder, self.dtype, self.shape = folder, dtype, Shape.of(folder.config, padded_vocab)
        self.layers = folder.config["num_hidden_layers"]
        self.parts = {(part.key, part.offsets): part for part in parts}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(part) for part in self.parts.values()])

    def _item(self, part: Part) -> WriteItem:
        chunk = ChunkStorageMetadata(part.offsets, part.sizes)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), part.whole(self.layers))
        return WriteItem(MetadataIndex(part.key, part.offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        part = self.parts[index.fqn, index.offset]
        tensors = [self.folder.tensor(name) for name in part.rule.hf]
        return part.rule.to_local(tensors, self.shape, 0, 1).to(self.dtype).reshape(part.sizes)


def write_policy(out: Path, folder: HFFolder, dtype: torch.dtype) -> None:
    """Write the weights of a Hugging Face folder in Megatron's distributed format to the folder `out`.

    Raises ConfigError: as `HFFolder.tensor`.
    """
    vocab = -(-folder.config["vocab_size"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    parts = parts_of(folder.config, vocab)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about the missing process group, which is intended
        writer = FileSystemWriter(out, single_file_per_rank=True, per_thread_copy_ahead=0)
        try:
            torch_distributed_save({}, storage_writer=writer, planner=_FolderPlanner(parts, folder, dtype, vocab))
        except CheckpointException as error:  # it holds the error of each rank, of which there is one
            raise error.failures[0][0] from None
    torch.save({}, out / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}
    (out / "metadata.json").write_text(json.dumps(backend | common))
