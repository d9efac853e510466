"""An Adam that keeps its state as Transformer Engine's FusedAdam does, for Megatron's own distributed optimizer.

As in transformer_engine/pytorch/optimizers/fused_adam.py: moments are made at the first step, the step count is an int
in the parameter group that the first step makes, and the kernel takes nothing but an int.  The kernel is torch here,
so this proves what a checkpoint holds and how it loads, and nothing about the kernel's numbers.
"""

from typing import Any

import megatron.core.optimizer as optimizer
import megatron.core.optimizer.distrib_optimizer as distributed
import torch

AS_ON_GPUS = dict(vars(distributed.DistributedOptimizer))  # import this module before `cpu.enable` changes the class


class LazyAdam(torch.optim.Optimizer):
    """AdamW without state before its first step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                _kernel(p, p.grad, state["exp_avg"], state["exp_avg_sq"], group)


def _kernel(
    p: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, group: dict[str, Any]
) -> None:
    step, (beta1, beta2) = group["step"], group["betas"]
    if type(step) is not int:
        raise TypeError(f"multi_tensor_adam(): incompatible function arguments: step is {step!r}, an int is right")
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    p.sub_((exp_avg / (1 - beta1**step)).div_(denominator).add_(p, alpha=group["weight_decay"]), alpha=group["lr"])


def use_lazy_adam() -> None:
    """Make Megatron use this Adam as it uses Transformer Engine's: without this project's changes for CPUs."""
    for name, value in dict(vars(distributed.DistributedOptimizer)).items():
        if value is not AS_ON_GPUS[name]:
            setattr(distributed.DistributedOptimizer, name, AS_ON_GPUS[name])
    optimizer.Adam = distributed.Adam = LazyAdam
    distributed.HAVE_APEX_OR_TE = True
