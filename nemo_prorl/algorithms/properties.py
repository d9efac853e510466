"""Properties of losses, advantages and reset rules; a user's function is tried on them before a run starts.

Each check returns None, or a sentence that says what went wrong and with which numbers.  All of them together take less
than a second on one CPU.
"""

import inspect
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_prorl.algorithms.advantages import ADVANTAGES, group_advantages
from nemo_prorl.algorithms.losses import denominator_terms, grpo_loss
from nemo_prorl.algorithms.objectives import OBJECTIVES
from nemo_prorl.algorithms.reset_rules import RULES
from nemo_prorl.algorithms.rule_properties import RULE_CHECKS, RULE_REMARKS
from nemo_prorl.config import GRPOConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import file_of

SCALE = 1000.0  # an own loss may have gradients so many times smaller or larger than r A
MOST_ADVANTAGE = 100.0  # for rewards from 0 to 1 in groups of 5
LEAST_ADVANTAGE = 0.01  # of the largest in a group with the rewards 0 and 1

Check = Callable[[Any], str | None]


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
        return cls(
            logp_BT, old_BT, ref_logp_BT=ref_BT, advantage_B=advantage_B, mask_BT=mask_BT, group_tokens_B=groups_B
        )

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
            ref_logp_BT=part.ref_logp_BT,
            advantage_B=part.advantage_B,
            mask_BT=part.mask_BT,
            weight_BT=None,
            denominator=denominator,
            config=config,
            group_tokens_B=part.group_tokens_B,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert logp_BT.grad is not None
        losses.append(loss.item())
        gradients.append(logp_BT.grad)
    return math.fsum(losses), torch.cat(gradients)


def _differs(change: str, other: tuple[float, Tensor], whole: tuple[float, Tensor], tolerance: float) -> str | None:
    scale = max(1.0, abs(whole[0]), float(whole[1].abs().max()))
    gap = max(abs(other[0] - whole[0]), float((other[1].double() - whole[1].double()).abs().max())) / scale
    return None if gap <= tolerance else f"{change}: loss or gradient differ by {gap:.2g} of their size"


class _LowPrecision(TorchFunctionMode):
    """Records in `found` which dtypes below float32 the functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            self.found.add(result.dtype)
        return result


def _fault_of_call(function: Callable[..., Any], inputs: tuple[Tensor, ...], *more: Any) -> str | None:
    """Call a user's function twice; return what is wrong with the calls, whatever it computes.

    Raises what the function raises.
    """
    copies, outputs = [x.detach().clone() for x in inputs], []
    with _LowPrecision() as low:
        for _ in range(2):
            outputs.append(function(*inputs, *more))
    output, again = outputs
    if not isinstance(output, Tensor):
        return f"expected a tensor of shape {tuple(inputs[0].shape)}; got {type(output).__name__}"
    if output.shape != inputs[0].shape:
        return f"expected a tensor of shape {tuple(inputs[0].shape)}; got {tuple(output.shape)}"
    if low.found:
        return f"it computes in {', '.join(sorted(map(str, low.found)))}; expected float32 or float64, as its arguments"
    if changed := sum(not torch.equal(x, was) for x, was in zip(inputs, copies, strict=True)):
        return f"it changes {changed} of its arguments in place"
    if not torch.equal(output.nan_to_num(), again.nan_to_num()):
        return "a second call with the same arguments returns something else"
    return None


def loss_call(config: GRPOConfig) -> str | None:
    """The function returns a tensor [B, T] with a gradient, always the same, and leaves its arguments as they are."""
    case = TrialResponses.make()
    # Not a leaf, like the log-probabilities of a model: autograd would refuse a change in place of a leaf.
    logp_BT = torch.where(case.mask_BT, case.logp_BT.requires_grad_(), 0.0)
    old_BT, advantage_BT = (torch.where(case.mask_BT, x, 0.0) for x in (case.old_logp_BT, case.advantage_B[:, None]))
    function = OBJECTIVES[config.loss]
    if fault := _fault_of_call(function, (logp_BT, old_BT, advantage_BT, case.mask_BT), config):
        return fault
    has_gradient = function(logp_BT, old_BT, advantage_BT, case.mask_BT, config).requires_grad
    return None if has_gradient else "nothing that it returns has a gradient in logp_BT"


def micro_batches(config: GRPOConfig) -> str | None:
    """The sum over micro-batches and ranks is the loss of the whole update; one of them counts no token."""
    case = TrialResponses.make()
    parts = [case.rows(slice(a, b)) for a, b in ((0, 2), (2, 3), (3, 8), (8, 12))]
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


def _at_ratio_1(config: GRPOConfig) -> tuple[TrialResponses, Tensor]:
    """Return responses before the first update, and the gradient of their loss without KL and entropy, [B, T]."""
    case = TrialResponses.make()
    case = replace(case, logp_BT=case.old_logp_BT.clone())
    return case, gradient([case], replace(config, kl_coef=0.0, entropy_coef=0.0))[1]


def direction(config: GRPOConfig) -> str | None:
    """Before the first update (all ratios 1), no token moves against its advantage."""
    case, gradient_BT = _at_ratio_1(config)
    wrong = int(((-gradient_BT * case.advantage_B[:, None])[case.mask_BT] < 0).sum())
    tokens = int(case.mask_BT.sum())
    return f"at ratio 1, {wrong} of {tokens} tokens move against their advantage" if wrong else None


def size(config: GRPOConfig) -> str | None:
    """At ratio 1 the gradient has about the size of that of r A, so that the learning rate keeps its meaning."""
    (_, gradient_BT), (_, usual_BT) = _at_ratio_1(config), _at_ratio_1(replace(config, loss="clip"))
    factor = float(gradient_BT.abs().sum() / usual_BT.abs().sum())
    if 1 / SCALE <= factor <= SCALE:
        return None
    return f"at ratio 1 the gradient is {factor:.2g} times that of r A; expected {1 / SCALE:g} to {SCALE:g} times"


def _pull(config: GRPOConfig) -> tuple[Tensor, Tensor]:
    """Return how strongly tokens outside the clip range are pulled along their advantage: (away, back), [2] each.

    The first of each pair has advantage 1, the second -1.  `away`: the ratio has moved as the advantage wants, and
    farther than the bound.  `back`: it has moved against the advantage.
    """
    high, low = 2 * (1 + config.clip_high), max(0.01, (1 - config.clip_low) / 2)
    ratio_B1 = torch.tensor([high, low, low, high], dtype=torch.float64)[:, None]
    old_BT = torch.where(ratio_B1 > 1, 0.5 / high, 0.9).log().expand(4, 3).clone()  # probabilities stay below 1
    advantage_B = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    mask_BT = torch.ones(4, 3, dtype=torch.bool)
    case = TrialResponses(
        old_BT + ratio_B1.log(),
        old_BT,
        ref_logp_BT=old_BT,
        advantage_B=advantage_B,
        mask_BT=mask_BT,
        group_tokens_B=torch.full((4,), 12),
    )
    _, gradient_BT = gradient([case], replace(config, kl_coef=0.0, entropy_coef=0.0, dual_clip=None))
    pull_B = -(gradient_BT * advantage_B[:, None]).sum(dim=1)
    return pull_B[:2], pull_B[2:]


def bounds(config: GRPOConfig) -> str | None:
    """A token that has moved against its advantage is neither pushed farther, nor left there while others go on."""
    away_2, back_2 = _pull(config)
    for sign, away, back in zip(("positive", "negative"), away_2.tolist(), back_2.tolist(), strict=True):
        if back < 0:
            return f"a token of {sign} advantage that has moved against it, out of the clip range, is pushed farther"
        if back == 0 < away:
            return (
                f"the clip is on the wrong side: a token of {sign} advantage is held where it has moved against the"
                " advantage, and goes on where it has moved with it"
            )
    return None


def extremes(config: GRPOConfig) -> str | None:
    """Responses without a token, and ratios of exp(200) and exp(-200), give a finite loss and gradient in float32."""
    case = TrialResponses.make(dtype=torch.float32)
    loss, gradient_BT = gradient([case], config)
    if not (math.isfinite(loss) and gradient_BT.isfinite().all()):
        return "with a response without a token that counts: not finite"
    far_BT = torch.where(torch.arange(6) % 2 == 0, 200.0, -200.0)
    case = replace(case, logp_BT=case.old_logp_BT + far_BT, mask_BT=torch.ones_like(case.mask_BT))
    loss, gradient_BT = gradient([case], replace(config, kl_coef=0.0))
    return None if math.isfinite(loss) and gradient_BT.isfinite().all() else "at ratios of exp(+-200): not finite"


LOSS_CHECKS: tuple[Check, ...] = (
    loss_call,
    micro_batches,
    order,
    padding,
    float64,
    direction,
    size,
    bounds,
    extremes,
)


def no_advantage(config: GRPOConfig) -> str | None:
    """Without an advantage nothing moves the policy."""
    case = TrialResponses.make()
    case = replace(case, advantage_B=torch.zeros_like(case.advantage_B))
    _, gradient_BT = gradient([case], replace(config, kl_coef=0.0, entropy_coef=0.0))
    return None if not gradient_BT.any() else "with advantage 0 there is a gradient"


def still(config: GRPOConfig) -> str | None:
    """At ratio 1 each token moves."""
    case, gradient_BT = _at_ratio_1(config)
    number, tokens = int((gradient_BT[case.mask_BT] == 0).sum()), int(case.mask_BT.sum())
    return f"at ratio 1, {number} of {tokens} tokens have no gradient" if number else None


def clip_range(config: GRPOConfig) -> str | None:
    """Outside the clip range a token is not pulled farther, and is pulled back: the clip of PPO."""
    away_2, back_2 = _pull(config)
    if (away_2 > 0).any():
        return "a token far outside the clip range is pulled farther: there is no clip"
    return None if (back_2 > 0).all() else "a token that left the clip range against its advantage is not pulled back"


LOSS_REMARKS: tuple[Check, ...] = (no_advantage, still, clip_range)  # true of some good losses


def _rewards() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    reward_GN = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    reward_GN[0] = 0.3
    reward_GN[1, 1], reward_GN[1, 3] = 0.0, 1.0
    valid_GN = torch.rand(7, 5, generator=generator) > 0.25
    valid_GN[1] = True
    valid_GN[2] = torch.arange(5) == 0  # a single response, so that n - 1 is 0
    valid_GN[3] = False
    return reward_GN, valid_GN


def advantage_call(config: GRPOConfig) -> str | None:
    """The function returns a tensor [G, N], always the same, and leaves its arguments as they are."""
    reward_GN, valid_GN = _rewards()
    reward_GN = reward_GN.masked_fill(~valid_GN, 0.0)
    mean_G1 = reward_GN.sum(dim=1, keepdim=True) / valid_GN.sum(dim=1, keepdim=True)
    centred_GN = (reward_GN - mean_G1).masked_fill(~valid_GN, 0.0)
    return _fault_of_call(ADVANTAGES[config.advantage], (centred_GN, reward_GN, valid_GN))


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


def scale(config: GRPOConfig) -> str | None:
    """Advantages of rewards from 0 to 1 are neither huge nor tiny, also where the rewards of a group hardly differ."""
    reward_GN = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5, 0.5 + 1e-6]], dtype=torch.float64)
    largest_G = group_advantages(reward_GN, torch.ones(2, 5, dtype=torch.bool), config.advantage).abs().amax(dim=1)
    if not (largest := float(largest_G.max())) <= MOST_ADVANTAGE:
        return f"rewards from 0 to 1 give an advantage of {largest:.2g}; expected at most {MOST_ADVANTAGE:g}"
    if (largest := float(largest_G[0])) >= LEAST_ADVANTAGE:
        return None
    return f"the rewards 0 and 1 in one group give at most {largest:.2g}; expected at least {LEAST_ADVANTAGE:g}"


def penalties(config: GRPOConfig) -> str | None:
    """Rewards that penalties made negative keep advantages of a usual size, and the best response above the worst."""
    rows = ([1.0, -1.0, 0.0], [0.1, 0.2, -0.3], [0.0, 0.0, -0.5], [-0.5, -1.0, -1.0], [-0.5, -0.5, -0.5])
    reward_GN = torch.tensor(rows, dtype=torch.float64)  # the second sums to 6e-17
    advantage_GN = group_advantages(reward_GN, torch.ones(5, 3, dtype=torch.bool), config.advantage)
    for row, reward_N, advantage_N in zip(rows, reward_GN[:4], advantage_GN[:4], strict=False):
        largest = float(advantage_N.abs().max())
        if not largest <= MOST_ADVANTAGE:
            return f"rewards with penalties, {row}, give an advantage of {largest:.2g}"
        if advantage_N[reward_N.argmax()] <= advantage_N[reward_N.argmin()]:
            return f"rewards with penalties, {row}: the best response has no higher advantage than the worst"
    return None


def shaped(config: GRPOConfig) -> str | None:
    """The same, if the run's penalties or its cosine reward can make rewards negative."""
    shaping = config.shaping
    return penalties(config) if config.unfinished_penalty or shaping.overlong_tokens or shaping.cosine else None


ADVANTAGE_CHECKS: tuple[Check, ...] = (advantage_call, finite, exchange, missing, better, scale, shaped)
ADVANTAGE_REMARKS: tuple[Check, ...] = (penalties,)  # true of a good advantage for rewards of at least 0

_CHECKS: dict[str, tuple[tuple[Check, ...], tuple[Check, ...]]] = {
    "loss": (LOSS_CHECKS, LOSS_REMARKS),
    "advantage": (ADVANTAGE_CHECKS, ADVANTAGE_REMARKS),
    "reset-rule": (RULE_CHECKS, RULE_REMARKS),
}
_EXAMPLES: dict[str, Callable[..., Any]] = {
    "loss": OBJECTIVES["clip"],
    "advantage": ADVANTAGES["group_norm"],
    "reset-rule": RULES["kl_spike"],
}


@dataclass(frozen=True)
class Trial:
    """The result of trying a function on its properties."""

    faults: dict[str, str]  # a sentence by the name of each property that does not hold
    remarks: dict[str, str]  # the same for what is unusual, but may be wanted
    summary: str  # "... properties hold"

    def words(self) -> str:
        """Return faults, remarks and summary, one per line."""
        lines = [f"{name}: {sentence}" for name, sentence in self.faults.items()]
        lines += [f"remark: {name}: {sentence}" for name, sentence in self.remarks.items()]
        return "\n".join([*lines, self.summary])


def trial(kind: str, place: str, config: Any) -> Trial:
    """Try a `loss`, an `advantage` or a `reset-rule` on all properties, on the CPU.

    If the call itself fails, nothing else is tried.

    Args:
        place: a name, FILE.py:FUNCTION or MODULE:FUNCTION.
        config: the other settings: a `GRPOConfig`, or the `ResetRulesConfig` of a rule.
    """
    checks, unusual = _CHECKS[kind]
    config = replace(config, asks=[place]) if kind == "reset-rule" else replace(config, **{kind: place})
    faults = _findings(checks[:1], config, kind, place)
    held = 0
    if not faults:
        faults = _findings(checks[1:], config, kind, place)
        held = len(checks) - len(faults)
    summary = f"{kind} {place}: {held} of {len(checks)} properties hold"
    return Trial(faults, {} if faults else _findings(unusual, config, kind, place), summary)


def _raised(error: Exception, kind: str, place: str) -> str:
    """Return a sentence about an error of the user's function, with its line, or the arguments if it was not entered.

    Our own errors name its place, which the reader knows.
    """
    cause = error.__cause__ or error
    frames = traceback.extract_tb(cause.__traceback__)
    lines = [f" (line {frame.lineno})" for frame in frames if Path(frame.filename) == file_of(place)]
    more = lines[-1] if lines else ""
    if not lines and isinstance(cause, TypeError) and "argument" in str(cause):
        more = f"; it is called with ({', '.join(inspect.signature(_EXAMPLES[kind]).parameters)})"
    message = str(error).rpartition(f"{place}: ")[2] if isinstance(error, ConfigError) else ""
    return f"{message or f'it raised {type(error).__name__}: {error}'}{more}"


def _findings(checks: tuple[Check, ...], config: Any, kind: str, place: str) -> dict[str, str]:
    findings = {}
    for check in checks:
        try:
            sentence = check(config)
        except Exception as error:
            sentence = _raised(error, kind, place)
        if sentence:
            findings[check.__name__] = sentence
    return findings
