"""Adam whose moments exist from the first step on, and whose step is a number in the parameter group."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW in float32; moments in other types, master weights as remainders and CUDA graphs are not there."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        dtypes = {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype}
        if capturable or use_decoupled_grad or store_param_remainders or dtypes != {torch.float32}:
            raise NotImplementedError("the stand-in for Transformer Engine has a plain float32 FusedAdam alone")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode, self.master_weights, self.set_grad_none = adam_w_mode, master_weights, set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none=True if set_to_none is None else set_to_none)

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        self._initialize_state(param, "exp_avg", zero_buffer=True)
        self._initialize_state(param, "exp_avg_sq", zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", zero_buffer=False)
            self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def _initialize_state(
        self, param: Tensor, state_name: str, zero_buffer: bool, store_param_remainders: bool = False
    ) -> None:
        make = torch.zeros_like if zero_buffer else torch.empty_like
        self.state[param][state_name] = make(param, dtype=torch.float32)

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        state: Tensor = self.state[param][state_name]
        assert state.dtype == torch.float32  # torch's step tensor, of a checkpoint written on CPUs, has no place here
        assert state_name in ("exp_avg", "exp_avg_sq", "master_param"), state_name
        return state

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        assert unscaled_state.dtype == torch.float32
        assert state_name in ("exp_avg", "exp_avg_sq", "master_param"), state_name
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False)
        self.state[param][state_name].copy_(unscaled_state)

    def _numbered(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for number, param in enumerate(self._numbered()):
            if number in found["state"]:
                found["state"][number] = {name: self.get_unscaled_state(param, name) for name in found["state"][number]}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, param in enumerate(self._numbered()):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    if value is not None:
                        self.set_scaled_state(param, name, value.float())

    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            # the kernel takes a C int: pybind11 refuses a float
            assert isinstance(group["step"], int), f"multi_tensor_adam: step is {group['step']!r}, incompatible type"
            for param in group["params"]:
                if len(self.state[param]) == 0:
                    self.initialize_state(param, False)
                if param.grad is not None:
                    self._update(group, param)
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any], param: Tensor) -> None:
        (beta1, beta2), state, grad = group["betas"], self.state[param], cast(Tensor, param.grad).float()
        weight = state["master_param"] if self.master_weights else param
        if not self.adam_w_mode:
            grad = grad + group["weight_decay"] * weight
        mean = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = group["bias_correction"]
        by = 1 - beta1 ** group["step"] if corrected else 1.0, 1 - beta2 ** group["step"] if corrected else 1.0
        change = (mean / by[0]) / ((square / by[1]).sqrt() + group["eps"])
        if self.adam_w_mode:
            change = change + group["weight_decay"] * weight
        weight.sub_(group["lr"] * change)
        if weight is not param:
            param.copy_(weight)
