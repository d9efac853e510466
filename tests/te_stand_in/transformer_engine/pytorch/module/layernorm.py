"""LayerNorm alone, as behind the last layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module._norm import Norm


class LayerNorm(Norm):
    """LayerNorm over the last dimension; an operation of its own, with an empty extra state."""

    kind = "LayerNorm"

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("give one of `normalized_shape` and `hidden_size`")
        size = hidden_size if normalized_shape is None else normalized_shape
        self._make(size, eps, sequence_parallel, params_dtype or kwargs.get("dtype"), zero_centered_gamma, kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self._normalized(x)
