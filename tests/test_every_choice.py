"""Every value of `choices=` in the configuration is composed, and changes what the part that reads it does.

`EFFECTS` has a function for each key with choices: it runs the part that dispatches on the key and returns what came of
it.  The choices come from the schema: a new key fails until it has a function, and a new choice fails where nothing
reads it, because its effect is then that of another.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from nemo_prorl import settings
from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.algorithms.reset_rules import replay
from nemo_prorl.algorithms.schedule import learning_rate
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.config import ADVISING_RULES, RESET_RULES, ConfigKey, ResetsConfig, SchedKeys, all_keys
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.launcher.processes import MergedLog
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm, kl_after_reset
from nemo_prorl.lifecycle.trials import Trials
from nemo_prorl.metrics import Metrics
from nemo_prorl.policy.build import nemo_config
from nemo_prorl.rollout.engine.requests import PARTS
from nemo_prorl.rollout.engine.sleep import EngineSleep
from nemo_prorl.rollout.weight_store import WeightStore
from nemo_prorl.sizing.memory import memory_of, weight_bytes
from nemo_prorl.trainer import Trainer, advantages, update
from tests.lifecycle.parts import NoCheckpoints, Parts, leader
from tests.policy.choice_ranks import ALIKE, CHOICES, settings_of
from tests.rollout.test_collector import group_of

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

KEYS = {key.name: key for key in all_keys() if key.rule.choices}
IN_FP8 = ["cluster=h100_4x8_fp8", "pretrained_checkpoint.restore_from_path=null"]
NEEDS = {  # what is set beside a choice, so that it shows
    "trainer.grpo.kl_estimator": ["trainer.grpo.kl_coef=0.1"],
    "trainer.grpo.old_logp": ["trainer.grpo.correction.kind=none"],
    "model.fp8": IN_FP8,
    "model.fp8_recipe": IN_FP8,
}
# Choices that mean what another one does, by design.
SAME: dict[str, dict[Any, Any]] = {
    "trainer.precision": dict(ALIKE),
    "rollout.dtype": {None: "float32"},  # as trainer.precision, which is 32 in the laptop job
}


def values_of(key: ConfigKey) -> list[Any]:
    """The choices, with null where the key takes it; of a list: each alone, and none."""
    if key.kind == list[str]:
        return [[choice] for choice in key.rule.choices] + [[]]
    null = key.optional and key.name != "model.fp8_recipe"  # null without FP8 only, which has none
    return [*key.rule.choices, *([None] if null else [])]


def composed(key: str, value: Any) -> DictConfig:
    """The configuration with the choice, by the loader and its checks."""
    return settings.load([*NEEDS.get(key, []), *settings_of(key, value)])


# --- the parts that read the keys ------------------------------------------------------------------------------------


def _advantages(cfg: DictConfig, _: Path) -> Any:
    groups = JudgedGroups.of([group_of([0.0, 0.0, 1.0]), group_of([1.0, 0.5, 0.0])])
    return advantages(groups, cfg.trainer.grpo, Metrics(1, "none")).tolist()


def _loss(cfg: DictConfig, _: Path) -> Any:
    """The trainer's update: denominator, loss and gradient of two responses of unequal length."""
    batch = Batch.from_sequences([[1], [1]], [[2, 3, 4], [5]], [[-1.0, -2.0, -1.5], [-0.5]])
    ref_logp_BT = torch.where(batch.mask_BT, batch.engine_logp_BT - 0.7, 0.0)
    batch = batch.with_targets(
        old_logp_BT=batch.engine_logp_BT,
        ref_logp_BT=ref_logp_BT,
        advantage_B=torch.tensor([1.0, -0.5]),
        group_tokens_B=torch.tensor([4, 4]),
    )
    found = []

    def run(minibatch: Batch, loss: Callable[..., Any], denominator: float, with_entropy: bool) -> dict[str, float]:
        logp_BT = (minibatch.old_logp_BT + torch.linspace(0.1, 0.8, minibatch.old_logp_BT.shape[1])).requires_grad_()
        value, sums = loss(logp_BT, None, minibatch, denominator)
        value.backward()
        assert logp_BT.grad is not None
        found.append((denominator, value.item(), logp_BT.grad.tolist()))
        others = {"grad_norm": 1.0, "padding": 0.0, "positions": 1.0, "max_shapes": 1.0}
        return {**{name: float(one) for name, one in sums.items()}, **others}

    policy = SimpleNamespace(data_ranks=SimpleNamespace(sum=float), update=run)
    update(policy, batch, cfg.trainer.grpo, Metrics(1, "none"))
    return found


def _correction(cfg: DictConfig, _: Path) -> Any:
    old_BT = torch.tensor([[-1.0, -1.0, -1.0], [-0.2, -0.2, -0.2]])
    engine_BT = torch.tensor([[-3.0, -1.0, -0.1], [-2.0, -2.0, -2.0]])
    weight_BT, gap = rollout_correction(
        old_BT, engine_BT, torch.ones(2, 3, dtype=torch.bool), cfg.trainer.grpo.correction
    )
    return weight_BT.tolist(), float(gap["fraction_capped"]), float(gap["fraction_masked"])


def _steps_with_a_pass(cfg: DictConfig, _: Path) -> Any:
    trainer: Any = SimpleNamespace(cfg=cfg, resets=SimpleNamespace(fresh=False))
    return [Trainer.measures_logprobs(trainer, step) for step in range(1, 12)]


def _spike(step: int) -> dict[str, float]:
    """A validation that falls at step 110, one that does not rise, and a KL that jumps at step 100, and more at 120.

    From step 60 on, responses are longer and cut off, and the entropy is low.
    """
    line = {"kl": 0.01 if step < 100 else 0.09 if step < 120 else 9.0}
    longer = step >= 60
    line |= {"rollout/truncated": 0.5 * longer, "rollout/response_tokens": 90.0 * (1 + longer)}
    line |= {"entropy": 0.1 if longer else 1.0}
    return line | ({"validation/a": 0.5 if step < 110 else 0.2, "validation/b": 0.4} if step % 10 == 0 else {})


def _asking_rules(cfg: DictConfig, _: Path) -> Any:
    rules = OmegaConf.merge(cfg.trainer.resets.rules, {"plateau_steps": 100})
    lines = [{"step": step, **_spike(step)} for step in range(1, 141)]
    errors = {step: {"a": 0.01, "b": 0.01} for step in range(1, 141)}
    found = replay(lines, cast(Any, rules), errors, act=False)
    assert {*RESET_RULES, *ADVISING_RULES} <= {finding.rule for finding in found}
    return sorted({finding.rule for finding in found if finding.asks})


def _parts(cfg: DictConfig, folder: Path) -> Parts:
    return Parts(folder / "run", cast(ResetsConfig, cfg.trainer.resets))


def _mode(cfg: DictConfig, folder: Path) -> Any:
    """What a run does about a KL that jumps: (resets, stops, trials, alarms)."""
    parts, reasons, stops, tried, nothing = _parts(cfg, folder), [], [], [], cast(Any, None)
    few = OmegaConf.merge(cfg, {"trainer": {"resets": {"trial_steps": 1}}})
    trials = Trials(cast(Any, few), folder, parts.resets, nothing, parts.records, nothing, leader())
    for step in range(1, 121):
        metrics = Metrics(step, "none")
        metrics.put("kl", _spike(step)["kl"])
        reasons.append(parts.resets.reason(metrics))
        stops.append(parts.resets.stop)
        tried.append(trials.begin(step, reasons[-1]))
    alarms = [event for event in parts.records.events() if event["event"] == "alarm"]
    return any(reasons), any(stops), any(tried), len(alarms)


def _what_is_reset(cfg: DictConfig, folder: Path) -> Any:
    parts, done = _parts(cfg, folder), list[str]()
    policy = SimpleNamespace(
        set_reference=lambda: done.append("reference"),
        reset_optimizer=lambda: done.append("optimizer"),
        reference_sha256=lambda: "0" * 64,
    )
    parts.resets.policy = policy
    parts.resets.perform(5, "at_steps", NoCheckpoints())
    return done


def _engine(cfg: DictConfig, folder: Path) -> Any:
    """Words and variables that an engine is started with."""
    child = NodeSupervisor(cfg, folder, ["sums"], MergedLog(folder / "all.log"))._engine(0, folder / "weights", False)
    given = child.env.get("CUDA_VISIBLE_DEVICES")
    return (
        [word for word in child.command[2:] if not word.startswith("/")],
        given,
        "MALLOC_TRIM_THRESHOLD_" in child.env,
    )


def _accelerator(cfg: DictConfig, folder: Path) -> Any:
    memory = memory_of(cfg)
    return _engine(cfg, folder)[1:], memory.reserve


def _dtype(cfg: DictConfig, folder: Path) -> Any:
    """The word for the engine, the file of weights with its sums, and the gap that is allowed."""
    words = _engine(cfg, folder)[0]
    store = WeightStore(folder / "weights", cfg.rollout.dtype)
    store.write([("a", torch.linspace(0.1, 1.0, 16))], 1)
    sums = [path.read_bytes() for path in sorted((folder / "weights").rglob("*")) if path.is_file()]
    return words[words.index("--dtype") + 1], sums, engine_gap_alarm(cfg)


class _Device:
    """Stands in for vLLM: it notes what it is told."""

    def __init__(self) -> None:
        self.told = list[Any]()

    async def sleep(self, level: int) -> None:
        self.told.append(level)

    async def wake_up(self, parts: list[str]) -> None:
        self.told.append(parts)


def _sleep(cfg: DictConfig, folder: Path) -> Any:
    """Whether the engine is started to sleep, and what it refuses after it woke."""
    words, level = _engine(cfg, folder)[0], cfg.rollout.sleep
    sleeping, engine = "--sleep" in words, _Device()
    if level is None:
        return sleeping
    state = EngineSleep(engine, sleeping, frees_memory=False)
    asyncio.run(state.fall_asleep(level))
    asyncio.run(state.wake(PARTS))
    return sleeping, engine.told, state.refusal


def _prompt(cfg: DictConfig, folder: Path) -> Any:
    build_tokenizer(["User: a question and its answer, Hi.\nAssistant: <think></think> 1 + 1?"]).save_pretrained(folder)
    renderer = PromptRenderer(folder, 4096, cfg.data)
    prompts: list[Any] = ["Hi.", [{"role": "user", "content": "Hi."}]]
    return [renderer.decode(renderer.prompt_ids({"id": "a", "prompt": prompt})) for prompt in prompts]


def _precision(cfg: DictConfig, _: Path) -> Any:
    """As far as it goes without NeMo: bytes of a weight, tolerances, the engines' type."""
    return weight_bytes(cfg), kl_after_reset(cfg), cfg.rollout.dtype


def _rates(cfg: DictConfig, _: Path) -> Any:
    sched = SchedKeys(**cfg.model.optim.sched)
    return [learning_rate(1.0, sched, cast(ResetsConfig, cfg.trainer.resets), step, 5, [], []) for step in range(1, 6)]


def _given_to_nemo(cfg: DictConfig, _: Path) -> Any:
    """What NeMo is told.  tests/policy/test_choices.py builds and trains a model with each of these choices."""
    return nemo_config(cfg, Path("model"), {"vocab_size": 128}, None)


EFFECTS: dict[str, Callable[[DictConfig, Path], Any]] = {
    "trainer.accelerator": _accelerator,
    "trainer.precision": _precision,
    "trainer.grpo.advantage": _advantages,
    "trainer.grpo.aggregation": _loss,
    "trainer.grpo.loss": _loss,
    "trainer.grpo.kl_estimator": _loss,
    "trainer.grpo.correction.kind": _correction,
    "trainer.grpo.old_logp": _steps_with_a_pass,
    "trainer.resets.mode": _mode,
    "trainer.resets.parts": _what_is_reset,
    "trainer.resets.rules.asks": _asking_rules,
    "rollout.dtype": _dtype,
    "rollout.sleep": _sleep,
    "data.prompt": _prompt,
    "model.optim.sched.name": _rates,
    **{key: _given_to_nemo for key, _ in CHOICES if key.startswith("model.")},
}


def test_every_key_with_choices_is_tried() -> None:
    assert sorted(EFFECTS) == sorted(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_every_choice_has_an_effect_of_its_own(name: str, tmp_path: Path) -> None:
    found: dict[Any, str] = {}
    for number, value in enumerate(values_of(KEYS[name])):
        (folder := tmp_path / str(number)).mkdir()
        effect = repr(EFFECTS[name](composed(name, value), folder))
        shown = value if value is None or isinstance(value, int) else str(value)
        alike = [other for other, its in found.items() if its == effect]
        assert alike == [] or SAME.get(name, {}).get(shown) in alike, (
            f"{name}: {shown} does what {alike} does: {effect}"
        )
        found[shown] = effect
