"""The gradients that the actor's `gradients` left in Megatron's buffers."""

from typing import Any

import torch


def whole_gradients(actor: Any) -> dict[str, torch.Tensor]:
    """Return whole gradients by Hugging Face name, float32, on every rank.  A collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    (optimizer,), found = actor._leaf_optimizers(), {}
    for name, p in actor.module.named_parameters():
        whole = torch.zeros(p.numel(), dtype=torch.float32, device=p.device)
        if p in optimizer.model_param_gbuf_map:
            place = optimizer._get_model_param_range_map(p)["param"]  # the part that this data rank has reduced
            whole[place.start : place.end] = p.main_grad.reshape(-1)[place.start : place.end]
        dist.all_reduce(whole, group=parallel_state.get_data_parallel_group())
        found[name] = whole.reshape(p.shape)
    return dict(actor.whole_weights.gather(found))
