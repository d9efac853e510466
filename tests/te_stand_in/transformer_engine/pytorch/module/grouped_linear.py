"""The layer of mixtures of experts: Megatron derives classes from it, this project has no such model."""

import torch


class GroupedLinear(torch.nn.Module):
    """Not there in the stand-in."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the stand-in for Transformer Engine has no GroupedLinear")
