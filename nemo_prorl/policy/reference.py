"""The reference policy of a rank: a copy of its parameters in host memory, its use in the model, and its sha256."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nemo_prorl import device
from nemo_prorl.policy.weights import sha256_of
from nemo_prorl.policy.whole_weights import WholeWeights


class Reference:
    """The parameters of the reference policy by name, cut as the model's.  The methods but `hold` are collectives."""

    def __init__(self, module: Any, whole_weights: WholeWeights) -> None:
        """Begin without a reference; `module`: Megatron's GPTModel, of which this rank has a part."""
        self._module, self._whole_weights = module, whole_weights
        self.tensors: dict[str, Tensor] = {}
        self._readers: list[threading.Event] = []  # one for each `hold`; set once its reader is done
        self._sha256: str | None = None  # computed when first needed

    def set(self) -> None:
        """Copy the model's parameters.  The memory of the last copy is used again, unless a reader still needs it."""
        self._readers = [done for done in self._readers if not done.is_set()]
        old = {} if self._readers else self.tensors
        parameters = self._module.named_parameters()
        self.tensors = {name: device.to_host(p, into=old.get(name)) for name, p in parameters}
        device.synchronize()
        self._sha256 = None

    def hold(self) -> Callable[[], None]:
        """Keep the present tensors unchanged until the returned function is called, by any thread."""
        done = threading.Event()
        self._readers.append(done)
        return done.set

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager in which the model computes with the reference's weights.  Do not write to them."""
        assert self.tensors, "the reference policy was never set"
        with device.exchanged(dict(self._module.named_parameters()), self.tensors):
            yield

    def sha256(self) -> str:
        """Return `sha256_of` the whole reference, from host memory: awake engines leave no room on a GPU."""
        if self._sha256 is None:
            self._sha256 = sha256_of(self._whole_weights.gather(self.tensors))
        return self._sha256
