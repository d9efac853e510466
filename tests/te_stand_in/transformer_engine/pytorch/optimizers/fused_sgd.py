"""SGD: its name is imported."""


class FusedSGD:
    """Not there in the stand-in."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the stand-in for Transformer Engine has no FusedSGD")
