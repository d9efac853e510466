"""Replacements in torch, Megatron-Core and NeMo that let NeMo-Aligner's stack run on a machine without CUDA.

NeMo 2.3 and Megatron-Core 0.12 assume CUDA, apex and Transformer Engine in a few dozen places.  `enable` changes only
these places, once, and only if CUDA is absent.  The rest of this project is the same with and without CUDA.
`model.transformer_engine` chooses the layers, as on a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from nemo_prorl import device

_enabled = False


def enable(transformer_engine: bool = False) -> None:
    """Let NeMo and Megatron run on the CPU.  Do nothing if CUDA is present.

    Args:
        transformer_engine: value of `model.transformer_engine`; if False, this project's rotary positions are used
            instead of Transformer Engine's.  A later call in the same process changes only the rotary positions.
    """
    global _enabled
    if device.has_gpu():
        return
    if not _enabled:
        _enabled = True
        _torch_without_cuda()
        _megatron_without_cuda()
        without_apex_and_te()
        _cuda_tensors_on_the_cpu()  # last, because code that NeMo compiles on import needs torch's own functions
    if not transformer_engine:
        _own_rotary_positions()


def without_apex_and_te() -> None:
    """Let NeMo and Megatron run without apex and Transformer Engine; on a GPU, only the benchmarks call this."""
    distributed_optimizer_with_torch_adamw()
    _nemo_without_apex_and_te()


def enable_megatron() -> None:
    """Let Megatron-Core run on the CPU of a machine where NeMo is not installed."""
    _torch_without_cuda()
    _megatron_without_cuda()
    _own_rotary_positions()
    _cuda_tensors_on_the_cpu()


_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "tensor",
    "zeros",
    "zeros_like",
]


def _cuda_means_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor function so that device "cuda", which Megatron's code names, means the CPU."""

    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return make_on_cpu


def _cuda_tensors_on_the_cpu() -> None:
    """Make the torch functions to which Megatron gives device "cuda" use the CPU.

    Each function is wrapped, because a TorchFunctionMode would intercept every torch call, 8,000 per update.
    """
    for name in _FACTORIES:
        setattr(torch, name, _cuda_means_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.to, type_of = _cuda_means_cpu(tensor.to), tensor.type
    tensor.cuda = lambda self, *_, **__: self

    def type_(self: torch.Tensor, *to: Any, **options: Any) -> Any:
        """Act as Tensor.type; a returned name contains "cuda", which Megatron's distributed optimizer expects."""
        return type_of(self, *to, **options) if to or options else type_of(self).replace("torch.", "torch.cuda.")

    tensor.type = type_


def _torch_without_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None


def _megatron_without_cuda() -> None:
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.mlp as mlp

    from nemo_prorl.policy.cpu import kernels as cpu_kernels
    from nemo_prorl.policy.cpu.versions import fits_installed_versions

    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    if fits_installed_versions():
        layers.linear_with_grad_accumulation_and_async_allreduce = cpu_kernels.linear(
            layers.linear_with_grad_accumulation_and_async_allreduce
        )
        mlp.bias_swiglu_impl = cpu_kernels.swiglu  # Megatron's is compiled, or slower than without fusion


def _own_rotary_positions() -> None:
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    from nemo_prorl.policy.cpu import kernels as cpu_kernels

    rope_utils.fused_apply_rotary_pos_emb = cpu_kernels.rotary  # otherwise None, and `apply_rope_fusion` is refused
    rope_utils.fused_apply_rotary_pos_emb_thd = cpu_kernels.rotary_of_packed


def distributed_optimizer_with_torch_adamw() -> None:
    """Repair how Megatron loads the saved state of torch's AdamW, which it uses without apex and Transformer Engine.

    Megatron fails without a step count for each parameter.
    """
    import megatron.core.optimizer.distrib_optimizer as module

    optimizer = module.DistributedOptimizer
    set_states = optimizer._set_main_param_and_optimizer_states
    module.quantize_param_shard = lambda *_, **__: None  # raises without Transformer Engine

    def set_states_with_step(self: Any, model_param: torch.nn.Parameter, tensors: dict) -> None:
        """Add the step count to the tensors; Megatron expects it per parameter, but saves it per parameter group."""
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        counted = {"step": state["step"].clone()} if "step" in state else {}
        set_states(self, model_param, {**counted, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_with_step


def _nemo_without_apex_and_te() -> None:
    import nemo.collections.nlp.models.language_modeling.megatron_gpt_model as gpt
    import nemo.collections.nlp.models.nlp_model as nlp_model
    import nemo.collections.nlp.modules.common.megatron.build_model as build
    import nemo.collections.nlp.modules.common.megatron.megatron_init as init
    import nemo.collections.nlp.modules.common.megatron.utils as utils
    import nemo.collections.nlp.parts.nlp_overrides as overrides
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
    from nemo.core.optim.mcore_optim import McoreDistributedOptimizer

    from nemo_prorl.policy.cpu.layers import layer_spec

    class Never:
        """Stands for classes that need apex; no object is an instance of it, so that `isinstance` is False."""

    overrides.HAVE_APEX = True  # otherwise the strategy drops Megatron's distributed optimizer
    overrides.McoreDistributedOptimizer, overrides.MegatronDistributedFusedAdam = McoreDistributedOptimizer, Never
    nlp_model.get_megatron_pretrained_bert_models = lambda: []
    nemo_specs = gpt.get_specs

    def specs(name: str, config: Any = None, use_te: bool = True, *more: Any, **options: Any) -> Any:
        return nemo_specs(name, config, use_te, *more, **options) if use_te else layer_spec(config)

    seed_torch = init._set_random_seed

    def seed_megatron_too(seed: int) -> None:
        """Seed Megatron's generator, too, which draws the weights; NeMo does not seed it if it counts no GPU.

        With `use_cpu_initialization`, torch's generator draws the weights instead.
        """
        seed_torch(seed)
        state = torch.get_rng_state()
        model_parallel_cuda_manual_seed(seed)
        torch.set_rng_state(state)

    gpt.get_specs, init._set_random_seed = specs, seed_megatron_too
    build.set_defaults_if_not_set_tensor_model_parallel_attributes = (
        set_defaults_if_not_set_tensor_model_parallel_attributes
    )
    utils.listify_model = lambda model: model if isinstance(model, list) else [model]
    utils.FusedLayerNorm = utils.FastLayerNorm = utils.MixedFusedRMSNorm = Never
