"""Conversion between a model's parameters, cut over tensor and pipeline ranks, and whole Hugging Face tensors."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from nemo_prorl import device
from nemo_prorl.policy.weights import HFFolder, Shape, rule_of
from nemo_prorl.sizing.memory import PIECE


class WholeWeights:
    """A converter that cuts whole tensors into this rank's part of a model, and joins the ranks' parts."""

    def __init__(self, module: Any, shape: Shape) -> None:
        """Store Megatron's GPTModel (`module`), of which this rank has a part, and the whole model's sizes."""
        self._module, self._shape = module, shape
        self._tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self._pp_size = parallel_state.get_pipeline_model_parallel_world_size()

    def load(self, folder: HFFolder) -> None:
        """Load this rank's part of a Hugging Face model.  Raise ValueError if a shape differs from the parameter's."""
        offset = get_transformer_layer_offset(self._module.config)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        for name, param in self._module.named_parameters():
            rule = rule_of(name, offset, self._shape.tied)
            local = rule.to_local([folder.tensor(h) for h in rule.hf], self._shape, tp_rank, self._tp_size)
            if local.shape != param.shape:
                raise ValueError(
                    f"{folder.path}: {name}: expected shape {tuple(param.shape)}; got {tuple(local.shape)}"
                )
            param.data.copy_(local)

    def gather(self, local: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) on every rank.  A collective.

        What other ranks send comes in pieces and is put together in host memory, because awake engines leave no room
        for whole tensors on a GPU.  Tensors that are whole on this rank are not moved.

        Args:
            local: this rank's tensors by parameter name, cut as the parameters are; on the device or in host memory.
        """
        own_stage = parallel_state.get_pipeline_model_parallel_rank()
        for stage, name, offset in self._parameters_of_all_stages():
            rule = rule_of(name, offset, self._shape.tied)
            whole = [torch.empty(0)] * len(rule.hf)
            if stage == own_stage:
                cut = rule.cut is not None and self._tp_size > 1
                whole = rule.to_hf(self._of_tensor_ranks(local[name]) if cut else [local[name]], self._shape)
            for hf_name, tensor in zip(rule.hf, whole, strict=True):
                yield hf_name, self._from_stage(stage, tensor) if self._pp_size > 1 else tensor

    def _of_tensor_ranks(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all tensor ranks, each shaped like `own`, in host memory."""
        group, flat = parallel_state.get_tensor_model_parallel_group(), own.detach().contiguous().flatten()
        tensors = [device.host_memory(flat.shape, flat.dtype) for _ in range(self._tp_size)]
        for start in range(0, len(flat), PIECE):
            piece = flat[start : start + PIECE].to(self._device)
            pieces = [torch.empty_like(piece) for _ in range(self._tp_size)]
            dist.all_gather(pieces, piece, group=group)
            for whole, part in zip(tensors, pieces, strict=True):
                whole[start : start + PIECE].copy_(part)
            del piece, pieces, part  # before the next pieces are made
        return [whole.view(own.shape) for whole in tensors]

    @property
    def _device(self) -> torch.device:
        model_device: torch.device = next(self._module.parameters()).device
        return model_device

    def _parameters_of_all_stages(self) -> list[tuple[int, str, int]]:
        """Return (stage, name, number of the stage's first layer) of all parameters.

        A tied output layer is left out, because it is the embedding.
        """
        stage, offset = (
            parallel_state.get_pipeline_model_parallel_rank(),
            get_transformer_layer_offset(self._module.config),
        )
        names = [name for name, _ in self._module.named_parameters()]
        own = [(stage, name, offset) for name in names if not (self._shape.tied and name == "output_layer.weight")]
        every: list[Any] = [own] * self._pp_size
        if self._pp_size > 1:
            dist.all_gather_object(every, own, group=parallel_state.get_pipeline_model_parallel_group())
        return [entry for entries in every for entry in entries]

    def _from_stage(self, stage: int, tensor: Tensor) -> Tensor:
        """Send a tensor from pipeline stage `stage` to all stages, and return it."""
        group = parallel_state.get_pipeline_model_parallel_group()
        source = dist.get_process_group_ranks(group)[stage]
        box: list[Any] = [(tuple(tensor.shape), tensor.dtype)]
        dist.broadcast_object_list(box, source, group=group)
        shape, dtype = box[0]
        sends = parallel_state.get_pipeline_model_parallel_rank() == stage
        flat = tensor.contiguous().flatten() if sends else device.host_memory([math.prod(shape)], dtype)
        for start in range(0, len(flat), PIECE):
            part = flat[start : start + PIECE]
            piece = part.to(self._device) if sends else torch.empty_like(part, device=self._device)
            dist.broadcast(piece, source, group=group)
            if not sends:
                part.copy_(piece)
        return flat.view(shape)
