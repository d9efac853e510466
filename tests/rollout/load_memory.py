"""What a running engine takes while it loads weights; test_load_memory.py runs this file in the rollout environment.

python tests/rollout/load_memory.py MODEL WEIGHTS      prints one JSON object: bytes
"""

import json
import sys
from typing import Any

from nemo_prorl.rollout.engine.setup import cpu_options, set_environment

set_environment(1, eager=True)  # before torch and vLLM are imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from vllm import LLM  # noqa: E402

from tests.policy.fake_gpu import LiveBytes  # noqa: E402


class New(LiveBytes):
    """Counts every tensor that an operation makes.  The file's tensors are made by none: a GPU node's host has them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta):
            if tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return out


def main(model: str, weights: str) -> None:
    engine = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 24,
        **{"worker_extension_cls": "nemo_prorl.rollout.engine.weight_load.WeightLoader", **cpu_options(True)},
    )
    with torch.no_grad(), New() as live:
        engine.collective_rpc("prorl_load_weights", args=(weights,))
    print(json.dumps({"peak": live.peak, "left": live.now}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
