"""A whole layer: its name is imported, Megatron's layers are made of parts."""

import torch


class TransformerLayer(torch.nn.Module):
    """Not there in the stand-in."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the stand-in for Transformer Engine has no TransformerLayer")
