"""The faster linear layers and SwiGLU of a CPU are off under another torch or Megatron-Core, and training works."""

import os
import subprocess
import sys

import pytest

from tests.policy.started import TE_STAND_IN

PROGRAM = """
import sys
from nemo_prorl.policy.cpu import shims, versions
if sys.argv[1] == "other":
    versions.MADE_FOR = {**versions.MADE_FOR, "torch": "2.0.1"}
import megatron.core.tensor_parallel.layers as layers
import megatron.core.transformer.mlp as mlp
import torch

def replaceable():
    return layers.linear_with_grad_accumulation_and_async_allreduce, mlp.bias_swiglu_impl

original = replaceable()
shims.enable_megatron()
print([now is before for now, before in zip(replaceable(), original)])
linear, swiglu = replaceable()
x, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (3, 6))
hidden = linear(x, weight, None, False, False, False)
gate, up = (x @ weight.t()).chunk(2, -1)
out = swiglu(hidden[:, None], None)[:, 0]
torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
out.sum().backward()
assert weight.grad.isfinite().all()
"""


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("version", "unchanged"), [("own", "[False, False]"), pytest.param("other", "[True, True]", marks=pytest.mark.slow)]
)
def test_under_another_version_megatron_keeps_its_own_functions(version: str, unchanged: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TE_STAND_IN.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, version], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == unchanged
    warning = "were made for torch 2.0.1 and megatron-core 0.12.3 and are off"
    assert done.stderr.count(warning) == (version == "other")
