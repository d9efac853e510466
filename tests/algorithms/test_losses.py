"""The loss against a scalar reference in plain Python, its gradient, its invariances and its degenerate cases."""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nemo_prorl.algorithms.losses import denominator_terms, grpo_loss, kl_estimate
from nemo_prorl.algorithms.objectives import clipped_surrogate, token_ratio
from nemo_prorl.config import GRPOConfig
from tests.algorithms.choices import choices

AGGREGATIONS, KL_ESTIMATORS = choices("aggregation"), choices("kl_estimator")
CONSTANT = 11.0


class Batch(NamedTuple):
    logp_BT: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    advantage_B: Tensor
    mask_BT: Tensor
    weight_BT: Tensor
    entropy_BT: Tensor
    group_tokens_B: Tensor

    def rows(self, index: Tensor | slice) -> "Batch":
        return Batch(*(value[index] for value in self))


def batch(seed: int, rows: int = 8, tokens: int = 6, dtype: torch.dtype = torch.float64) -> Batch:
    """Ratios well inside and far outside every clip bound; row 2 counts no token, row 3 a single one."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    old = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
    mask = torch.rand(rows, tokens, generator=generator) > 0.3
    mask[2] = False
    mask[3] = False
    mask[3, 1] = True
    advantage = torch.randn(rows, generator=generator, dtype=torch.float64)
    advantage[0] = 0.0
    return Batch(
        (old + noise(0.7)).to(dtype),
        old.to(dtype),
        (old + noise(0.5)).to(dtype),
        advantage.to(dtype),
        mask,
        noise(0.3).exp().to(dtype),
        noise(1.0).abs().to(dtype),
        mask.sum(dim=1).reshape(2, -1).sum(dim=1).repeat_interleave(rows // 2),  # two groups
    )


def reference_objective(b: Batch, i: int, t: int, config: GRPOConfig, held: Batch) -> float:
    """The objective of a token, with the standard library only; `held`: the values through which no gradient goes."""
    new, old, a = float(b.logp_BT[i, t]), float(b.old_logp_BT[i, t]), float(b.advantage_B[i])
    ratio, held_new = math.exp(new - old), float(held.logp_BT[i, t])
    if config.loss == "cispo":
        return min(math.exp(held_new - old), 1 + config.clip_high) * a * new
    if config.loss == "dppo":
        away = (held_new > old and a > 0) or (held_new < old and a < 0)
        return 0.0 if away and abs(math.exp(held_new) - math.exp(old)) > 0.2 else ratio * a
    if config.loss == "gspo":
        counted = [k for k in range(b.mask_BT.shape[1]) if b.mask_BT[i, k]]
        ratio = math.exp(sum(float(b.logp_BT[i, k] - b.old_logp_BT[i, k]) for k in counted) / len(counted))
    objective = min(ratio * a, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * a)
    return max(objective, config.dual_clip * a) if config.dual_clip is not None and a < 0 else objective


def reference_loss(b: Batch, config: GRPOConfig, denominator: float, held: Batch | None = None) -> float:
    """Paper eq. 1, 3, 4, 5 token by token, with the standard library only."""
    total = 0.0
    for i in range(len(b.mask_BT)):
        values = []
        for t in range(b.mask_BT.shape[1]):
            if not b.mask_BT[i, t]:
                continue
            new, ref = float(b.logp_BT[i, t]), float(b.ref_logp_BT[i, t])
            objective = reference_objective(b, i, t, config, b if held is None else held)
            kl = {
                "k1": new - ref,
                "k2": 0.5 * (new - ref) ** 2,
                "k3": math.exp(ref) / math.exp(new) - math.log(math.exp(ref) / math.exp(new)) - 1,
            }[config.kl_estimator]
            values.append(
                -float(b.weight_BT[i, t]) * objective
                + config.kl_coef * kl
                - config.entropy_coef * float(b.entropy_BT[i, t])
            )
        if values:
            parts = {"sequence": len(values), "prompt": int(b.group_tokens_B[i])}.get(config.aggregation, 1)
            total += sum(values) / parts
    return total / denominator


def loss_of(b: Batch, config: GRPOConfig, denominator: Tensor | float) -> Tensor:
    return grpo_loss(*b[:6], denominator, config, b.entropy_BT, b.group_tokens_B)[0]


def total_denominator(b: Batch, config: GRPOConfig) -> Tensor:
    return denominator_terms(b.mask_BT, config.aggregation, CONSTANT, b.group_tokens_B)


CONFIGS = [
    GRPOConfig(aggregation=aggregation, kl_estimator=kl, dual_clip=dual, kl_coef=0.5, entropy_coef=0.5)
    for aggregation, kl, dual in product(AGGREGATIONS, KL_ESTIMATORS, (None, 1.5))
] + [GRPOConfig(loss=loss, kl_coef=0.5, entropy_coef=0.5, aggregation="sequence") for loss in choices("loss")]


def _id(c: GRPOConfig) -> str:
    return f"{c.loss}-{c.aggregation}-{c.kl_estimator}-{c.dual_clip}"


@pytest.mark.parametrize("config", CONFIGS, ids=_id)
@pytest.mark.parametrize("seed", range(2))
def test_loss_and_gradient_match_the_formula(config: GRPOConfig, seed: int) -> None:
    b = batch(seed)
    denominator = float(total_denominator(b, config))
    logp, entropy = b.logp_BT.clone().requires_grad_(), b.entropy_BT.clone().requires_grad_()
    loss = loss_of(b._replace(logp_BT=logp, entropy_BT=entropy), config, denominator)
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(b, config, denominator), rel=1e-12)

    step = 1e-6
    for name, tensor in (("logp_BT", logp), ("entropy_BT", entropy)):
        assert tensor.grad is not None
        for i, t in product(range(8), range(6)):
            sides = []
            for sign in (1, -1):
                row = b.rows(slice(i, i + 1))  # the other rows do not depend on this token
                moved = getattr(row, name).clone()
                moved[0, t] += sign * step
                sides.append(reference_loss(row._replace(**{name: moved}), config, denominator, held=row))
            slope = (sides[0] - sides[1]) / (2 * step)
            assert tensor.grad[i, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-9), (name, i, t)


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
def test_autograd_check(kl: str) -> None:
    b = batch(5)
    config = GRPOConfig(kl_estimator=kl, kl_coef=0.1, dual_clip=2.0)
    logp = b.logp_BT.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(b._replace(logp_BT=x), config, 17.0), (logp,))


def test_surrogate_by_hand() -> None:
    ratio = torch.tensor([[0.5, 1.0, 1.3, 2.0]])
    up, down = torch.full((1, 4), 2.0), torch.full((1, 4), -2.0)
    config = GRPOConfig()
    assert clipped_surrogate(ratio, up, config)[0].tolist() == pytest.approx([1.0, 2.0, 2.6, 2.8])
    assert clipped_surrogate(ratio, down, config)[0].tolist() == pytest.approx([-1.6, -2.0, -2.6, -4.0])
    dual = replace(config, dual_clip=1.5)
    assert clipped_surrogate(ratio, down, dual)[0].tolist() == pytest.approx([-1.6, -2.0, -2.6, -3.0])
    assert torch.equal(clipped_surrogate(ratio, up, dual), clipped_surrogate(ratio, up, config))


def test_first_update_has_the_plain_policy_gradient() -> None:
    """At pi_theta = pi_old the ratio is 1 and the gradient of the loss is -A / number of tokens."""
    b = batch(1)
    logp = b.old_logp_BT.clone().requires_grad_()
    loss, _ = grpo_loss(
        logp,
        b.old_logp_BT,
        b.old_logp_BT,
        b.advantage_B,
        b.mask_BT,
        None,
        total_denominator(b, GRPOConfig()),
        GRPOConfig(kl_coef=0),
    )
    loss.backward()
    expected = torch.where(b.mask_BT, -b.advantage_B[:, None], 0.0) / b.mask_BT.sum()
    torch.testing.assert_close(logp.grad, expected)


@pytest.mark.parametrize("config", CONFIGS[::3], ids=_id)
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_ranks_order_and_padding_do_not_matter(config: GRPOConfig, seed: int) -> None:
    b = batch(seed, rows=12)
    generator = torch.Generator().manual_seed(seed)

    def gradient(parts: list[Batch]) -> tuple[float, Tensor]:
        """Each part's loss with the denominator summed over all parts; the gradient by original row."""
        denominator = sum((total_denominator(part, config) for part in parts), torch.zeros((), dtype=torch.float64))
        losses, gradients = [], []
        for part in parts:
            logp = part.logp_BT.clone().requires_grad_()
            loss = loss_of(part._replace(logp_BT=logp), config, denominator)
            loss.backward()
            assert logp.grad is not None
            losses.append(loss.item())
            gradients.append(logp.grad)
        return math.fsum(losses), torch.cat(gradients)

    loss, whole = gradient([b])
    split = [b.rows(slice(0, 1)), b.rows(slice(1, 3)), b.rows(slice(3, 8)), b.rows(slice(8, 12))]
    ranks = [b.rows(slice(0, 6)), b.rows(slice(6, 12))]
    for parts in (split, ranks):
        other_loss, other = gradient(parts)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(other, whole, rtol=1e-12, atol=1e-15)

    order = torch.randperm(12, generator=generator)
    other_loss, other = gradient([b.rows(order)])
    assert other_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(other, whole[order], rtol=1e-12, atol=1e-15)

    def pad(value: Tensor) -> Tensor:
        """Five more token positions, three on the left, and two more rows, all of them rubbish."""
        if value.ndim == 1:
            return torch.cat([value, value.new_full((2,), math.nan if value.is_floating_point() else 0)])
        rubbish = math.nan if value.is_floating_point() else False
        wide = torch.full((14, 11), rubbish, dtype=value.dtype)
        wide[:12, 3:9] = value
        return wide

    other_loss, other = gradient([Batch(*(pad(value) for value in b))])
    assert other_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(other[:12, 3:9], whole, rtol=1e-12, atol=1e-15)
    other[:12, 3:9] = 0.0
    assert torch.equal(other, torch.zeros_like(other))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_nothing_leaks_from_masked_tokens(aggregation: str, rubbish: float) -> None:
    config = GRPOConfig(aggregation=aggregation, kl_coef=0.1, entropy_coef=0.1)
    clean, spoilt = batch(3), batch(3)
    hidden = ~clean.mask_BT
    for name in ("logp_BT", "old_logp_BT", "ref_logp_BT", "weight_BT", "entropy_BT"):
        getattr(spoilt, name)[hidden] = rubbish
    results = []
    for b in (clean, spoilt):
        logp, entropy = b.logp_BT.requires_grad_(), b.entropy_BT.requires_grad_()
        loss, diagnostics = grpo_loss(*b[:6], 20.0, config, entropy, b.group_tokens_B)
        loss.backward()
        assert logp.grad is not None
        assert entropy.grad is not None
        results.append((loss, logp.grad, entropy.grad, *diagnostics.values()))
    for a, b_ in zip(*results, strict=True):
        assert torch.equal(a, b_)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [5.0, torch.ones(())])
def test_all_masked_is_a_zero_with_a_zero_gradient(aggregation: str, denominator: float | Tensor) -> None:
    b = batch(4)
    nan = torch.full_like(b.logp_BT, math.nan).requires_grad_()
    config = GRPOConfig(aggregation=aggregation, entropy_coef=0.1)
    loss, diagnostics = grpo_loss(
        nan,
        nan.detach(),
        nan.detach(),
        b.advantage_B * math.nan,
        torch.zeros_like(b.mask_BT),
        None,
        denominator,
        config,
        nan,
        torch.zeros_like(b.group_tokens_B),
    )
    loss.backward()
    assert loss.item() == 0.0
    assert nan.grad is not None
    assert torch.equal(nan.grad, torch.zeros_like(nan))
    assert all(value.item() == 0.0 for value in diagnostics.values())
    assert denominator_terms(torch.zeros_like(b.mask_BT), aggregation, CONSTANT, torch.zeros(8)).item() == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_rows_at_all(aggregation: str) -> None:
    empty = batch(0).rows(slice(0, 0))
    logp = empty.logp_BT.clone().requires_grad_()
    loss = loss_of(empty._replace(logp_BT=logp), GRPOConfig(aggregation=aggregation), 3.0)
    loss.backward()
    assert loss.item() == 0.0


def test_one_token() -> None:
    b = batch(0, rows=4).rows(slice(3, 4))
    assert b.mask_BT.sum() == 1
    for aggregation in ("token", "sequence"):
        config = GRPOConfig(aggregation=aggregation, kl_coef=0.2)
        assert total_denominator(b, config).item() == 1.0
        assert loss_of(b, config, 1.0).item() == pytest.approx(reference_loss(b, config, 1.0), rel=1e-12)


def test_nan_at_a_counted_token_shows() -> None:
    b = batch(6)
    row, token = b.mask_BT.nonzero()[0].tolist()
    b.logp_BT[row, token] = math.nan
    loss, diagnostics = grpo_loss(*b[:6], 10.0, GRPOConfig())
    assert math.isnan(loss.item())
    assert diagnostics["nonfinite"].item() == 1.0


def test_huge_gaps_stay_finite() -> None:
    """exp of 200 is inf in float32; a clipped token's gradient must be 0 and not inf * 0."""
    logp = torch.tensor([[-1.0, -201.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-201.0, -1.0, -201.0]])
    ref = torch.tensor([[-201.0, -1.0, -1.0]])
    for sign in (1.0, -1.0):
        logp.grad = None
        loss, _ = grpo_loss(
            logp,
            old,
            ref,
            torch.tensor([sign]),
            torch.ones(1, 3, dtype=torch.bool),
            None,
            3.0,
            GRPOConfig(kl_coef=1e-4),
        )
        loss.backward()
        assert logp.grad is not None
        assert torch.isfinite(loss)
        assert torch.isfinite(logp.grad).all()
    assert token_ratio(logp, old)[0, 0].item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_k3_is_exact_for_small_gaps_and_clamped_for_big_ones() -> None:
    zero = torch.tensor([-3.3])
    assert kl_estimate(zero, zero.clone(), "k3").item() == 0.0
    for gap in (1e-3, 1e-2, 0.1, -1e-3, -5.0):
        p, q = torch.zeros(1, dtype=torch.float32), torch.tensor([gap], dtype=torch.float32)
        exact = math.expm1(float(q)) - float(q)
        assert kl_estimate(p, q, "k3").item() == pytest.approx(exact, rel=2e-4)
    logp = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    k3 = kl_estimate(logp, torch.tensor([20.5, 300.0, -300.0]), "k3")
    k3.sum().backward()
    assert logp.grad is not None
    top = math.exp(20.0) - 21.0
    assert k3.tolist() == pytest.approx([top, top, 299.0], rel=1e-6)
    assert logp.grad.tolist() == pytest.approx([0.0, 0.0, 1.0])


@pytest.mark.parametrize("seed", range(3))
def test_estimators_estimate_the_divergence(seed: int) -> None:
    """Their expectation under p, summed over all words: exactly KL(p || q) for k1 and k3, about it for k2."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.log_softmax(torch.randn(9, generator=generator, dtype=torch.float64), 0)
    q = torch.log_softmax(p + 0.1 * torch.randn(9, generator=generator, dtype=torch.float64), 0)
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator, tolerance in (("k1", 1e-12), ("k3", 1e-12), ("k2", 0.2 * kl)):
        mean = (p.exp() * kl_estimate(p, q, estimator)).sum().item()
        assert mean == pytest.approx(kl, abs=tolerance), estimator


def test_diagnostics_are_sums_that_add_up() -> None:
    b = batch(7, rows=10)
    config = GRPOConfig(kl_coef=0.1)
    whole = grpo_loss(*b[:6], 31.0, config, b.entropy_BT)[1]
    parts = [
        grpo_loss(*part[:6], 31.0, config, part.entropy_BT)[1] for part in (b.rows(slice(0, 4)), b.rows(slice(4, 10)))
    ]
    for name, value in whole.items():
        assert value.dtype == torch.float64
        assert (parts[0][name] + parts[1][name]).item() == pytest.approx(value.item(), rel=1e-12), name
    on = b.mask_BT
    assert whole["tokens"].item() == on.sum().item()
    assert whole["sequences"].item() == 9
    assert whole["entropy"].item() == pytest.approx(b.entropy_BT[on].sum().item())
    assert whole["weight"].item() == pytest.approx(b.weight_BT[on].sum().item())
    kl = sum(
        math.exp(r - n) - (r - n) - 1 for r, n in zip(b.ref_logp_BT[on].tolist(), b.logp_BT[on].tolist(), strict=True)
    )
    assert whole["kl"].item() == pytest.approx(kl)


def test_low_precision_is_computed_in_float32() -> None:
    b = batch(9, dtype=torch.bfloat16)
    config = GRPOConfig(kl_coef=0.1)
    loss = loss_of(b, config, 10.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(reference_loss(b, config, 10.0), rel=1e-5)


def test_a_name_that_no_formula_has_is_refused() -> None:
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="KL estimator 'k4': expected k1, k2 or k3"):
        kl_estimate(zero, zero, "k4")
    with pytest.raises(ValueError, match="aggregation 'mean': expected token, sequence, constant or prompt"):
        denominator_terms(zero.bool()[None], "mean")


def test_denominators_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    assert denominator_terms(mask, "token").item() == 3.0
    assert denominator_terms(mask, "sequence").item() == 2.0
    assert denominator_terms(mask, "constant", 100.0).item() == 200.0
    assert denominator_terms(mask, "prompt", group_tokens_B=torch.tensor([2, 1, 1])).item() == 2.0
    assert denominator_terms(mask, "prompt", group_tokens_B=torch.tensor([3, 3, 3])).item() == 1.0


def test_the_gradients_of_kl_estimates_as_losses() -> None:
    """Their expectation under p, summed over all words: 0, that of KL(p || q), and that of KL(q || p)."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    logq = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    logp = torch.log_softmax(logits, 0)
    forward, backward = (logp.exp() * (logp - logq)).sum(), (logq.exp() * (logq - logp)).sum()
    assert not torch.allclose(gradient(forward), gradient(backward), rtol=0.1)
    for estimator, right in (("k1", 0 * logits.detach()), ("k2", gradient(forward)), ("k3", gradient(backward))):
        found = gradient((logp.detach().exp() * kl_estimate(logp, logq, estimator)).sum())
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
