"""The properties of losses, advantages and reset rules: of ours, and planted faults by the right one."""

import re
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.algorithms.advantages import ADVANTAGES
from nemo_prorl.algorithms.objectives import OBJECTIVES
from nemo_prorl.algorithms.properties import ADVANTAGE_CHECKS, ADVANTAGE_REMARKS, LOSS_CHECKS, LOSS_REMARKS, trial
from nemo_prorl.algorithms.reset_rules import RULES
from nemo_prorl.config import RESET_RULES, GRPOConfig, ResetRulesConfig, ShapingConfig
from nemo_prorl.schema import METRICS
from tests.algorithms.choices import choices

# kind, function, properties that do not hold
PLANTED = [
    ("loss", "-ratio * A", {"direction", "bounds"}),
    ("loss", "torch.where(mask_BT.cumsum(1) > 1, 1, -1) * ratio * A", {"direction"}),
    ("loss", "1e30 * torch.minimum(ratio * A, clipped * A)", {"size", "extremes"}),
    ("loss", "1e-9 * torch.minimum(ratio * A, clipped * A)", {"size"}),
    ("loss", "torch.maximum(ratio * A, clipped * A)", {"bounds"}),
    ("loss", "torch.where(A > 0, ratio.clamp(min=1 - c.clip_low), ratio.clamp(max=1 + c.clip_high)) * A", {"bounds"}),
    ("loss", "ratio * A + 9 * (new - old).abs() * A", {"bounds"}),
    ("loss", "ratio * A / mask_BT.shape[1]", {"padding"}),
    ("loss", "(new - old).mean(1, keepdim=True).exp() * A + 0 * new", {"padding"}),
    ("loss", "ratio * A / len(A)", {"micro_batches", "padding"}),
    ("loss", "ratio * A / mask_BT.sum()", {"micro_batches"}),
    ("loss", "ratio * (A - A.mean())", {"micro_batches", "padding", "direction"}),
    ("loss", "ratio.cumsum(0) * A", {"micro_batches", "order", "direction"}),
    ("loss", "torch.arange(1, len(A) + 1)[:, None] * ratio * A", {"micro_batches", "order"}),
    ("loss", "(new.half() - old.half()).exp().to(new) * A", {"loss_call"}),
    ("loss", "ratio.bfloat16() * A.bfloat16()", {"loss_call"}),
    ("loss", "(new + 1e5 - (old + 1e5)).clamp(max=20).exp() * A", {"float64"}),
    ("loss", "old.sub_(new).neg().clamp(max=20).exp() * A", {"loss_call"}),
    ("loss", "(new.detach() - old).exp() * A", {"loss_call"}),
    (
        "loss",
        "ratio * A / (mask_BT.sum(1, keepdim=True) - 1)",  # a response of one token
        {"micro_batches", "order", "padding", "float64", "size", "extremes"},
    ),
    ("loss", "(new - old).exp() * A", {"extremes"}),
    ("loss", "ratio * A + new", {"direction"}),
    ("loss", "ratio * A * (1 + 0.1 * torch.rand_like(new))", {"loss_call"}),
    ("loss", "ratio.sum(1, keepdim=True) * A[:, :1]", {"loss_call"}),
    ("loss", "ratio * A * c.clip_hihg", {"loss_call"}),
    ("loss", "None", {"loss_call"}),
    ("advantage", "-centred", {"better", "shaped"}),
    ("advantage", "0 * centred", {"finite", "better", "scale", "shaped"}),
    ("advantage", "1e30 * centred", {"exchange", "scale", "shaped"}),
    ("advantage", "centred / centred.square().sum(1, keepdim=True).clamp(min=1e-30)", {"scale"}),
    ("advantage", "1e-9 * centred", {"scale"}),
    ("advantage", "centred / 0", {"finite", "exchange", "missing", "scale", "shaped"}),
    ("advantage", "centred - centred[:, :1]", {"exchange"}),
    ("advantage", "centred * torch.arange(1, len(centred) + 1)[:, None]", {"exchange"}),
    ("advantage", "reward - reward.mean(1, keepdim=True)", {"missing"}),
    ("advantage", "centred.half()", {"advantage_call"}),
    ("advantage", "centred.mul_(2)", {"advantage_call"}),
    ("advantage", "torch.rand_like(centred)", {"advantage_call"}),
    ("advantage", "centred[:, :1]", {"advantage_call"}),
    ("advantage", "centred.tolist()", {"advantage_call"}),
    ("advantage", "centred / reward.sum(1, keepdim=True)", {"shaped"}),
    ("advantage", "torch.where(reward.sum(1, keepdim=True) > 0, centred / reward.sum(1, keepdim=True), 0)", {"shaped"}),
    ("advantage", "centred / reward.sum(1, keepdim=True).abs().clamp(min=1e-3)", {"shaped"}),
    ("advantage", "centred * reward.amax(1, keepdim=True)", {"shaped"}),
    (
        "advantage",
        "centred / (centred.square().sum(1) / (valid.sum(1) - 1)).mean().sqrt()",  # 0 / 0 for a single response
        {"finite", "exchange", "missing", "better"},
    ),
]

SHAPED: dict[str, Any] = {"overlong_tokens": 64, "cosine": True}
UNUSUAL = [
    ("new * A", {"clip_range"}),
    ("ratio * A / mask_BT.sum(1, keepdim=True)", {"clip_range"}),  # nan where no token counts, which is ignored
    ("torch.minimum(ratio * A, clipped * A)", set()),
    ("clipped * A", {"clip_range"}),
    ("ratio * A - A.abs() * (ratio - 1) ** 2 / (2 * 0.4)", set()),
    ("ratio * A.clamp(min=0)", {"still", "clip_range"}),
    ("torch.minimum(ratio * A, clipped * A) - 0.1 * (new - old) ** 2", {"no_advantage"}),
]


def own(folder: Path, kind: str, text: str) -> str:
    """Write a loss or an advantage that returns `text`; return its place."""
    (folder / "own.py").write_text(
        "import torch\n\n\n"
        "def loss(new, old, A, mask_BT, c):\n"
        "    ratio = (new - old).clamp(max=20).exp()\n"
        "    clipped = ratio.clamp(1 - c.clip_low, 1 + c.clip_high)\n"
        f"    return {text if kind == 'loss' else None}\n\n\n"
        f"def advantage(centred, reward, valid):\n    return {text if kind == 'advantage' else None}\n"
    )
    return f"{folder}/own.py:{kind}"


@pytest.mark.parametrize(("kind", "text", "caught"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_planted_fault_is_caught(kind: str, text: str, caught: set[str], tmp_path: Path) -> None:
    config = GRPOConfig(unfinished_penalty=0.5)  # with a penalty, an advantage must take rewards below 0
    assert set(trial(kind, own(tmp_path, kind, text), config).faults) == caught


def test_an_advantage_for_rewards_from_0_passes_with_a_remark(tmp_path: Path) -> None:
    """Each setting that can make a reward negative makes it a fault."""
    place = own(tmp_path, "advantage", "centred / reward.sum(1, keepdim=True)")
    found = trial("advantage", place, GRPOConfig())
    assert (found.faults, set(found.remarks)) == ({}, {"penalties"})
    assert "rewards with penalties, [1.0, -1.0, 0.0], give an advantage of nan" in found.words()
    negative = [GRPOConfig(shaping=ShapingConfig(**{key: value})) for key, value in SHAPED.items()]
    for config in (GRPOConfig(unfinished_penalty=0.5), *negative):
        assert set(trial("advantage", place, config).faults) == {"shaped"}


@pytest.mark.parametrize(("text", "remarks"), UNUSUAL, ids=lambda value: value if isinstance(value, str) else "")
def test_an_unusual_loss_passes_with_a_remark(text: str, remarks: set[str], tmp_path: Path) -> None:
    found = trial("loss", own(tmp_path, "loss", text), GRPOConfig())
    assert (found.faults, set(found.remarks)) == ({}, remarks)


def test_each_property_finds_something() -> None:
    found = {name for *_, names in [*PLANTED, *UNUSUAL] for name in names} | {"penalties"}
    assert found == {check.__name__ for check in (*LOSS_CHECKS, *LOSS_REMARKS, *ADVANTAGE_CHECKS, *ADVANTAGE_REMARKS)}


@pytest.mark.parametrize("loss", OBJECTIVES.names)
@pytest.mark.parametrize("aggregation", choices("aggregation"))
def test_each_loss_has_the_properties_that_training_relies_on(loss: str, aggregation: str) -> None:
    assert choices("loss") == OBJECTIVES.names
    for dual_clip in (None, 1.5):
        found = trial("loss", loss, GRPOConfig(aggregation=aggregation, dual_clip=dual_clip))
        assert found.faults == {}
        assert set(found.remarks) == ({"clip_range"} if loss == "cispo" else set())


@pytest.mark.parametrize("advantage", ADVANTAGES.names)
def test_each_advantage_has_the_properties_that_training_relies_on(advantage: str) -> None:
    assert choices("advantage") == ADVANTAGES.names
    found = trial("advantage", advantage, GRPOConfig())
    assert found.faults == {}
    assert set(found.remarks) == ({"penalties"} if advantage == "maxrl" else set())


@pytest.mark.parametrize("rule", RULES.names)
def test_each_reset_rule_has_the_properties_that_training_relies_on(rule: str) -> None:
    assert RULES.names[:3] == RESET_RULES
    assert trial("reset-rule", rule, ResetRulesConfig()).faults == {}


RULE_FAULTS: list[tuple[str, set[str], set[str]]] = [
    ("return None", {"rule_call"}, set()),
    ("yield 'kl'", {"rule_call"}, set()),
    ("yield history.finding('kl', float('inf'), 0, 'words')", {"rule_call"}, set()),
    ("yield history.finding('kl', *history.series['kl'][-1], 'words')", {"rule_call"}, set()),
    ("yield history.finding('kl', seen.append(9) or len(seen), 0, 'words')", {"repeatable"}, set()),
    ("seen.append(9); yield from [history.finding('kl', 1, 0, 'words')] * (len(seen) == 250)", {"repeatable"}, set()),
    ("history.series.clear(); yield from ()", {"read_only"}, set()),
    ("history.series['kl']; yield from ()", {"rule_call"}, set()),  # there is none before the first step
    ("if history.step == 7: 1 / 0\n    yield from ()", {"rule_call"}, set()),
    ("yield history.finding('kl', 1, 0, 'words')", set(), {"steady"}),
    ("yield from ()", set(), {"silent"}),
    (
        "for s, kl in history.series.get('kl', [])[-1:]:\n"
        "        if kl > 3 * rules.kl_min * 10 or kl < 0.005: yield history.finding('kl', kl, 0.03, 'words')",
        set(),
        set(),
    ),
]


@pytest.mark.parametrize(("text", "faults", "remarks"), RULE_FAULTS, ids=[text for text, *_ in RULE_FAULTS])
def test_a_planted_fault_of_a_rule_is_caught(text: str, faults: set[str], remarks: set[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"seen = []\ndef rule(history, rules):\n    {text}\n")
    found = trial("reset-rule", f"{tmp_path}/own.py:rule", ResetRulesConfig())
    assert (set(found.faults), set(found.remarks)) == (faults, remarks)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (
            "loss",
            "def own(logp, old, advantage, mask): return logp",
            "loss_call: it raised TypeError: own.. takes 4 positional arguments but 5 were given; it is called with"
            " .logp_BT, old_logp_BT, advantage_BT, mask_BT, config.$",
        ),
        ("advantage", "def own(reward): return reward", "it is called with .centred_GN, reward_GN, valid_GN.$"),
        ("reset-rule", "def own(history): yield", "rule_call: after step 0 it raised TypeError: .*history, rules.$"),
        ("advantage", "def own(a, b, c): return a + 'x'", r"it raised TypeError: .*str.* .line 1.$"),
    ],
)
def test_wrong_arguments_are_told_with_the_right_ones(kind: str, text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    config = ResetRulesConfig() if kind == "reset-rule" else GRPOConfig()
    assert re.search(told, trial(kind, f"{tmp_path}/own.py:own", config).words().splitlines()[0])


@pytest.mark.parametrize("read", ["history.series.get({!r}, [])", "history.series[{!r}]", "{!r} in history.series"])
def test_a_metric_that_no_run_writes_is_named(read: str, tmp_path: Path) -> None:
    told = {
        "policy/gradnorm": "did you mean policy/grad_norm, policy/max_grad_norm",
        "policy/entropy": "did you mean entropy",
        "rollout/length": "did you mean rollout/stale",
        "reward": "did you mean reward/TASK",
        "quite unknown": "docs/reference/metrics.md has all",
    }
    for number, (key, meant) in enumerate(told.items()):
        own = tmp_path / f"own{number}.py"  # another file, because Python may keep the compiled one for a second
        own.write_text(f"def rule(history, rules):\n    {read.format(key)}\n    yield from ()\n")
        [(name, sentence)] = trial("reset-rule", f"{own}:rule", ResetRulesConfig()).faults.items()
        assert name == "rule_call"
        assert sentence.startswith(f"it asks for the metric {key}, which no run writes; {meant}")


def test_a_rule_may_ask_for_each_metric_that_a_run_writes(tmp_path: Path) -> None:
    """Also for those of tasks and sources that it names itself."""
    names = [f"{prefix}/{name}".lstrip("/") for prefix, every in METRICS.items() for name in every.split()]
    keys = [name.replace("TASK", "mine") for name in names]
    text = f"    for key in {keys}: history.series.get(key)\n    yield from ()\n"
    (tmp_path / "own.py").write_text(f"def rule(history, rules):\n{text}")
    assert trial("reset-rule", f"{tmp_path}/own.py:rule", ResetRulesConfig()).faults == {}


def test_an_error_is_told_with_its_line_and_for_a_missing_metric_with_the_fix(tmp_path: Path) -> None:
    found = trial("loss", own(tmp_path, "loss", "ratio * A * c.clip_hihg"), GRPOConfig())
    assert "it raised AttributeError: 'GRPOConfig' object has no attribute 'clip_hihg'" in found.words()
    assert "(line 7)" in found.words()
    (tmp_path / "rules.py").write_text("def rule(history, rules):\n    yield history.series['kl']\n")
    words = trial("reset-rule", f"{tmp_path}/rules.py:rule", ResetRulesConfig()).words()
    assert (
        "after step 0 it raised KeyError: 'kl'. Fix: .get, because a metric may not be measured yet (line 2)" in words
    )
