"""Properties that every loss and every advantage must have; `prorl check-function` tries a user's function on them.

Each check returns None, or a sentence that says what went wrong and with which numbers.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nemo_prorl.algorithms.advantages import group_advantages
from nemo_prorl.algorithms.losses import denominator_terms, grpo_loss
from nemo_prorl.config import GRPOConfig

Check = Callable[[GRPOConfig], str | None]


@dataclass(frozen=True)
class TrialResponses:
    """Responses with ratios inside and outside of every usual bound; row 2 counts no token, row 3 a single one."""

    logp_BT: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    advantage_B: Tensor
    mask_BT: Tensor
    group_tokens_B: Tensor

    @classmethod
    def make(
        cls, seed: int = 0, rows: int = 12, tokens: int = 6, dtype: torch.dtype = torch.float64
    ) -> "TrialResponses":
        generator = torch.Generator().manual_seed(seed)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

        old_BT = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
        mask_BT = torch.rand(rows, tokens, generator=generator) > 0.3
        mask_BT[2:4] = False
        mask_BT[3, 1] = True
        advantage_B = torch.randn(rows, generator=generator, dtype=torch.float64)
        groups_B = mask_BT.sum(dim=1).reshape(-1, 4).sum(dim=1).repeat_interleave(4)
        logp_BT, ref_BT = (old_BT + noise(scale) for scale in (0.7, 0.5))
        logp_BT, old_BT, ref_BT, advantage_B = (x.to(dtype) for x in (logp_BT, old_BT, ref_BT, advantage_B))
        return cls(logp_BT, old_BT, ref_BT, advantage_B, mask_BT, groups_B)

    def rows(self, index: Tensor | slice) -> "TrialResponses":
        return TrialResponses(*(getattr(self, f.name)[index] for f in fields(self)))

    def padded(self) -> "TrialResponses":
        """Return the case with four more rows and five more positions, three of them on the left, all of them nan."""
        rows, tokens = self.mask_BT.shape
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            rubbish = math.nan if value.is_floating_point() else 0
            shape = (rows + 4, tokens + 5) if value.ndim == 2 else (rows + 4,)
            values[f.name] = torch.full(shape, rubbish, dtype=value.dtype)
            if value.ndim == 2:
                values[f.name][:rows, 3 : 3 + tokens] = value
            else:
                values[f.name][:rows] = value
        return TrialResponses(**values)


def gradient(parts: list[TrialResponses], config: GRPOConfig) -> tuple[float, Tensor]:
    """Return the loss of an update and its gradient in logp, [B, T], for micro-batches with one global denominator."""
    terms = (denominator_terms(p.mask_BT, config.aggregation, 11.0, p.group_tokens_B) for p in parts)
    denominator = sum(terms, torch.zeros((), dtype=torch.float64))
    losses, gradients = [], []
    for part in parts:
        logp_BT = part.logp_BT.clone().requires_grad_()
        loss, _ = grpo_loss(
            logp_BT,
            part.old_logp_BT,
            part.ref_logp_BT,
            part.advantage_B,
            part.mask_BT,
            None,
            denominator,
            config,
            group_tokens_B=part.group_tokens_B,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert logp_BT.grad is not None
        losses.append(loss.item())
        gradients.append(logp_BT.grad)
    return math.fsum(losses), torch.cat(gradients)


def _differs(what: str, other: tuple[float, Tensor], whole: tuple[float, Tensor], tolerance: float) -> str | None:
    scale = max(1.0, abs(whole[0]), float(whole[1].abs().max()))
    gap = max(abs(other[0] - whole[0]), float((other[1].double() - whole[1].double()).abs().max())) / scale
    return None if gap <= tolerance else f"{what}: loss or gradient differ by {gap:.2g} of their size"


def micro_batches(config: GRPOConfig) -> str | None:
    """The sum over micro-batches and ranks is the loss of the whole update."""
    case = TrialResponses.make()
    parts = [case.rows(slice(a, b)) for a, b in ((0, 1), (1, 3), (3, 8), (8, 12))]
    return _differs("cut into four micro-batches", gradient(parts, config), gradient([case], config), 1e-12)


def order(config: GRPOConfig) -> str | None:
    """The order of the responses does not matter."""
    case, order_B = TrialResponses.make(), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    loss, gradient_BT = gradient([case.rows(order_B)], config)
    return _differs("in another order", (loss, gradient_BT[order_B.argsort()]), gradient([case], config), 1e-12)


def padding(config: GRPOConfig) -> str | None:
    """Positions where the mask is False reach neither the loss nor the gradient, nan included."""
    case = TrialResponses.make()
    loss, gradient_BT = gradient([case.padded()], config)
    rows, tokens = case.mask_BT.shape
    inner_BT = gradient_BT[:rows, 3 : 3 + tokens].clone()
    gradient_BT[:rows, 3 : 3 + tokens] = 0.0
    if not torch.equal(gradient_BT, torch.zeros_like(gradient_BT)):
        return "padding with nan: it has a gradient"
    return _differs("padded with nan", (loss, inner_BT), gradient([case], config), 1e-12)


def float64(config: GRPOConfig) -> str | None:
    """Loss and gradient in float32 are those in float64, up to rounding."""
    exact, rounded = (gradient([TrialResponses.make(dtype=dtype)], config) for dtype in (torch.float64, torch.float32))
    return _differs("in float32", rounded, exact, 1e-5)


def direction(config: GRPOConfig) -> str | None:
    """Before the first update (all ratios 1), a positive advantage raises each token's probability."""
    case = TrialResponses.make()
    case = replace(case, logp_BT=case.old_logp_BT.clone())
    _, gradient_BT = gradient([case], replace(config, kl_coef=0.0, entropy_coef=0.0))
    counted_BT = case.mask_BT & (case.advantage_B != 0.0)[:, None]
    wrong = int(((-gradient_BT * case.advantage_B[:, None])[counted_BT] <= 0).sum())
    return f"at ratio 1, {wrong} tokens move against their advantage or not at all" if wrong else None


def no_advantage(config: GRPOConfig) -> str | None:
    """Without an advantage nothing moves the policy."""
    case = TrialResponses.make()
    case = replace(case, advantage_B=torch.zeros_like(case.advantage_B))
    _, gradient_BT = gradient([case], replace(config, kl_coef=0.0, entropy_coef=0.0))
    return None if not gradient_BT.any() else "with advantage 0 there is a gradient"


def extremes(config: GRPOConfig) -> str | None:
    """Ratios of exp(200) and exp(-200) give a finite loss and a finite gradient in float32."""
    case = TrialResponses.make(dtype=torch.float32)
    far_BT = torch.where(torch.arange(6) % 2 == 0, 200.0, -200.0)
    case = replace(case, logp_BT=case.old_logp_BT + far_BT, mask_BT=torch.ones_like(case.mask_BT))
    loss, gradient_BT = gradient([case], replace(config, kl_coef=0.0))
    return None if math.isfinite(loss) and gradient_BT.isfinite().all() else "at ratios of exp(+-200): not finite"


LOSS_CHECKS: tuple[Check, ...] = (micro_batches, order, padding, float64, direction, no_advantage, extremes)


def _rewards() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    reward_GN = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    reward_GN[0] = 0.3
    valid_GN = torch.rand(7, 5, generator=generator) > 0.25
    valid_GN[1] = True
    valid_GN[2, 1:] = False
    return reward_GN, valid_GN


def finite(config: GRPOConfig) -> str | None:
    """Advantages are finite, and 0 for responses without a reward and in groups without a difference."""
    reward_GN, valid_GN = _rewards()
    advantage_GN = group_advantages(reward_GN.masked_fill(~valid_GN, math.nan), valid_GN, config.advantage)
    if not advantage_GN.isfinite().all():
        return "an advantage is not finite"
    return None if advantage_GN[1].any() else "a group of different rewards has no advantage"


def exchange(config: GRPOConfig) -> str | None:
    """The order of groups and of their responses does not matter."""
    reward_GN, valid_GN = _rewards()
    groups, samples = torch.arange(6, -1, -1), torch.tensor([3, 0, 4, 1, 2])
    advantage_GN = group_advantages(reward_GN, valid_GN, config.advantage)
    other_GN = group_advantages(reward_GN[groups][:, samples], valid_GN[groups][:, samples], config.advantage)
    gap = float((other_GN - advantage_GN[groups][:, samples]).abs().max())
    return None if gap < 1e-12 else f"in another order: advantages differ by {gap:.2g}"


def missing(config: GRPOConfig) -> str | None:
    """A response without a reward is as if it had never been."""
    reward_GN, valid_GN = _rewards()
    more_GN = torch.nn.functional.pad(reward_GN, (0, 2)), torch.nn.functional.pad(valid_GN, (0, 2))
    advantage_GN, other_GN = (group_advantages(*x, config.advantage) for x in ((reward_GN, valid_GN), more_GN))
    gap = float((other_GN[:, :5] - advantage_GN).abs().max())
    return None if gap < 1e-12 else f"with two more responses without a reward: advantages differ by {gap:.2g}"


def better(config: GRPOConfig) -> str | None:
    """In a group the best response has a higher advantage than the worst."""
    reward_GN, valid_GN = _rewards()
    advantage_GN = group_advantages(reward_GN, valid_GN, config.advantage)
    best, worst = int(reward_GN[1].argmax()), int(reward_GN[1].argmin())
    above = advantage_GN[1, best] > advantage_GN[1, worst]
    return None if above else "the best response of a group has no higher advantage than the worst"


ADVANTAGE_CHECKS: tuple[Check, ...] = (finite, exchange, missing, better)


def failures(kind: str, place: str, config: GRPOConfig) -> Iterator[str]:
    """Try a `loss` or an `advantage` on all properties; yield a sentence for each that does not hold.

    Args:
        place: a name, FILE.py:FUNCTION or MODULE:FUNCTION.
        config: the other settings of the loss.
    """
    checks = {"loss": LOSS_CHECKS, "advantage": ADVANTAGE_CHECKS}[kind]
    config = replace(config, loss=place) if kind == "loss" else replace(config, advantage=place)
    for check in checks:
        try:
            fault = check(config)
        except Exception as error:  # of the user's function
            fault = f"it raised {type(error).__name__}: {error}"
        if fault:
            yield f"{check.__name__}: {fault}"
