"""Rotary positions, SwiGLU and linear layers of CPUs against plain ones; whole models are in test_layouts.py."""

from typing import Any

import pytest
import torch

from nemo_prorl.policy.cpu.kernels import linear, rotary, swiglu


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


def refused(*_: Any, **__: Any) -> torch.Tensor:
    raise LookupError("Megatron's own")


@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_the_plain_product_and_has_its_gradients(biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=draw, requires_grad=True) for s in ((19, 3, 24), (40, 24), (40,)))
    inputs = (x, weight, bias) if biased else (x, weight)
    out = linear(refused)(x, weight, bias if biased else None, False, False, False, wgrad_deferral_limit=None)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    scale = torch.randn(out.shape, generator=draw).permute(1, 0, 2).contiguous().permute(1, 0, 2)  # not in one piece
    for got, want in zip(
        torch.autograd.grad(out, inputs, scale), torch.autograd.grad(wanted, inputs, scale.double()), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_linear_leaves_to_megatron_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    assert linear(refused)(x, weight, None, False, False, False).tolist() == [[8.0] * 4] * 2
    for flags in ((True, False, False), (False, True, False), (False, False, True)):
        with pytest.raises(LookupError):
            linear(refused)(x, weight, None, *flags)
    for other in (torch.float64, torch.bfloat16):
        with pytest.raises(LookupError):
            linear(refused)(x.to(other), weight.to(other), None, False, False, False)
    with pytest.raises(LookupError):
        linear(refused)(x, weight, None, False, False, False, grad_output_buffer=[])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert linear(refused) is refused
