"""What both norms share."""

import pickle
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module._common import normalized


class Norm(torch.nn.Module):
    """A norm with a weight, and a bias if its kind has one."""

    kind = ""
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def _make(
        self,
        size: Any,
        eps: float,
        sequence_parallel: bool | None,
        dtype: torch.dtype | None,
        zero_centered: bool,
        more: dict[str, Any],
    ) -> None:
        shape = (size,) if isinstance(size, int) else tuple(size)
        options = {"dtype": dtype or torch.get_default_dtype(), "device": more.get("device", "cuda")}
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered, sequence_parallel
        self.weight = torch.nn.Parameter((torch.zeros if zero_centered else torch.ones)(shape, **options))
        self.bias = torch.nn.Parameter(torch.zeros(shape, **options)) if self.kind == "LayerNorm" else None
        for parameter in (self.weight, self.bias):
            if parameter is not None and sequence_parallel is not None:
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def _normalized(self, x: Tensor) -> Tensor:
        return normalized(self.kind, x, self.weight, self.bias, self.eps, self.zero_centered_gamma)

    def get_extra_state(self) -> Tensor:
        return torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """A norm has nothing to keep."""
