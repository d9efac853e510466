"""Rotary positions and SwiGLU of CPUs against plain ones, in float64; whole models are in test_layouts.py."""

import pytest
import torch

from nemo_prorl.policy.cpu_kernels import rotary, swiglu


def test_rotary_is_the_plain_rotation_and_has_its_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(5, 3, 2, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    half = torch.randn(5, 1, 1, 4, generator=draw, dtype=torch.float64)
    angle = torch.cat((half, half), -1)
    rotated = torch.cat((-t[..., 4:], t[..., :4]), -1)
    torch.testing.assert_close(rotary(t, angle), t * angle.cos() + rotated * angle.sin())
    assert torch.autograd.gradcheck(lambda t: rotary(t, angle), (t,))
    with pytest.raises(NotImplementedError, match="apply_rope_fusion=false"):
        rotary(t, angle[..., :4])


def test_swiglu_is_the_plain_one_and_has_its_gradient() -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x, None), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(swiglu(x - 1.0, torch.ones(16, dtype=x.dtype)), swiglu(x, None))
    assert torch.autograd.gradcheck(lambda x: swiglu(x, None), (x,))
