"""Recipes: which FP8 formats are used, and where the scales come from.

Data classes are pydantic's, which ignore arguments that they do not have: Megatron gives some.
"""

from enum import Enum
from typing import Any, NamedTuple

from pydantic.dataclasses import dataclass


class _FormatHelper(NamedTuple):
    """The largest values of a format, forward and backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats; HYBRID is e4m3 forward and e5m2 backward."""

    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)


@dataclass(frozen=True)
class MMParams:
    """How a matrix product accumulates; without meaning here."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How a tensor is rounded."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


class Recipe:
    """The base of all recipes."""

    fp8_format: Format

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, DelayedScaling | Float8CurrentScaling)


@dataclass
class DelayedScaling(Recipe):
    """Scales from the largest values of earlier steps."""

    margin: int = 0
    interval: int = -1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales from the tensor itself; Megatron's name for it is tensorwise."""

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams(power_2_scale=False, amax_epsilon=0.0)
    fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.0)
    fp8_quant_bwd_grad = QParams(power_2_scale=False, amax_epsilon=0.0)
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling(Recipe):
    """Scales of blocks; refused here, as on a GPU before Blackwell."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
