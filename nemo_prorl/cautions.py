"""Warnings about a configuration that a run accepts, but that is probably a mistake: each names key, value and fix.

`checks` refuses what cannot work for any number of steps.  What has no effect within `max_steps` is only a warning,
because a continued run may raise it; so is a number far outside what is published, because somebody may try it.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.algorithms import schedule
from nemo_prorl.algorithms.reset_rules import LEAST_BASELINE, LEAST_DIFFERENCES
from nemo_prorl.config import ADVISING_RULES, RESET_RULES, ResetRulesConfig, SchedKeys, warms_up
from nemo_prorl.data import model_folder
from nemo_prorl.files import TEMPORARY, listed
from nemo_prorl.lifecycle.retention import newest_state, step_folder
from nemo_prorl.rewards.functions import changed_code, code_of
from nemo_prorl.sizing.memory import is_small

# key: (least, most, source).  The sources are for language models; ours are wide ranges around them.
_USUAL = {
    "model.optim.lr": (1e-7, 1e-4, "RL of language models: ProRL 2e-6, DAPO 1e-6, adapters up to 1e-4"),
    "model.optim.weight_decay": (0, 0.3, "AdamW for language models: ProRL 0.01, DAPO 0.1"),
    "model.optim.eps": (1e-16, 1e-4, "Adam: 1e-8, for language models also 1e-15"),
    "trainer.gradient_clip_val": (0, 10, "published RL of language models: 0.1 to 1"),
    "trainer.warmup.lr": (1e-7, 1e-2, "supervised training"),
    "trainer.resets.lr_factor": (0.01, 1, "a rate that stays or falls at each hard reset"),
    "trainer.resets.kl_after_reset": (1e-7, 0.1, "what rounding leaves right after a reset: 1e-5 to 1e-3"),
    "trainer.grpo.temperature": (0.3, 2, "published RL of language models: 0.6 to 1.5"),
    "trainer.grpo.validation_temperature": (0, 2, "published evaluations: 0 to 1"),
    "trainer.grpo.kl_coef": (0, 0.2, "published RL of language models: 0 to 0.04"),
    "trainer.grpo.entropy_coef": (0, 0.1, "published RL of language models: 0 to 0.01"),
    "trainer.grpo.adaptive_entropy.maximum": (0, 0.1, "published RL of language models: up to 0.005"),
    "trainer.grpo.dual_clip": (1, 20, "dual-clip PPO: 3; DAPO and verl: 3 to 10"),
    "trainer.grpo.correction.cap": (1, 10, "truncated importance sampling: 2"),
}
_SMALL_LR = (1e-6, 1e-2, "models of less than 20 million parameters")
_CLIPS = {  # by trainer.grpo.loss; the other losses have no usual range
    "clip": (0.05, 1, "the clipped loss: PPO 0.2; ProRL 0.2 and 0.4"),
    "gspo": (1e-5, 0.1, "the clipped loss of sequences: GSPO 3e-4 and 4e-4"),
}


_LEAST_STEPS = {"kl_spike": LEAST_DIFFERENCES + 1 + 3}  # by rule; since the start or the last reset


def cautions(cfg: DictConfig, old: DictConfig | None = None) -> Iterator[str]:
    """Yield a warning for each probable mistake in a checked configuration.

    Args:
        old: the saved configuration of the run in `run_dir`; None if there is no run.
    """
    if strange := _strangers(Path(cfg.run_dir)):
        yield (
            f"run_dir={cfg.run_dir}: expected a new folder, or one with a run; it has no config.yaml, but"
            f" {listed(strange, 4)}. `prorl train` writes the run's files beside them. Fix: run_dir=FOLDER"
        )
    state = newest_state(Path(cfg.run_dir))
    done = state.get("resets", {}).get("done", [])
    yield from _changed_functions(cfg, state)
    path = cfg.pretrained_checkpoint.restore_from_path
    if path and not state and warms_up(cfg):
        yield (
            f"trainer.warmup.steps={cfg.trainer.warmup.steps}: before reinforcement learning, supervised steps train"
            f" over the weights of pretrained_checkpoint.restore_from_path={path}. Fix: trainer.warmup.steps=0; if"
            " they are untrained, leave it"
        )
    if fault := eos_caution(cfg):
        yield fault
    yield from _resets(cfg)
    yield from _useless_resets(cfg, state.get("step", 0), [reset["step"] for reset in done])
    yield from _blind_roll_backs(cfg, state.get("step", 0), [reset["step"] for reset in done])
    yield from _long_rises(cfg, state.get("step", 0))
    yield from _cut_rises(cfg, state.get("step", 0), done)
    if old is not None and state:
        yield from _other_rate(cfg, old, state["step"], done)
    yield from _unusual(cfg)


def eos_caution(cfg: DictConfig) -> str | None:
    """Return that the given model may end its responses with another token than the tokenizer's eos."""
    if not (path := cfg.pretrained_checkpoint.restore_from_path):
        return None
    fault = model_folder.eos_caution(Path(path), _sends_messages(cfg.data))
    return fault and f"pretrained_checkpoint.restore_from_path={fault}"


def _sends_messages(data: Any) -> bool:
    """Return whether prompts go through the chat template, as far as the first record of each .jsonl file shows."""
    if data.prompt != "as_written":
        return bool(data.prompt == "chat")
    for source in data.train:
        with suppress(OSError, ValueError, KeyError, TypeError), Path(source.path).open("rb") as file:
            if isinstance(json.loads(file.readline())["prompt"], list):
                return True
    return False  # a missing or wrong file is refused elsewhere


def _changed_functions(cfg: DictConfig, state: dict[str, Any]) -> Iterator[str]:
    """Find functions of the user that changed since the checkpoint of this state; an empty state finds none."""
    for file in changed_code(state.get("functions", {}), code_of(cfg)) if state else ():
        saved = step_folder(Path(cfg.run_dir) / "checkpoints", state["step"])
        yield (
            f"{file} was changed after {saved.name}: later steps of this run follow another rule. Fix: undo the change,"
            f" or another run with it: run_dir=NEW chain.start_from={saved}"
        )


# What a start that failed, `prorl probe` or `prorl control` may leave where no config.yaml was written.
_OF_A_RUN = ("launches.jsonl", "init", "base", "logs", "endpoints", "checkpoints", "control", "journal.jsonl", "probe")


def _strangers(run_dir: Path) -> list[str]:
    """Return the names in a folder that no start of a run makes; [] in a run directory."""
    try:
        names = sorted(path.name for path in run_dir.iterdir())
    except OSError:  # missing, or not a folder
        return []
    if "config.yaml" in names:
        return []
    return [name for name in names if name.removesuffix(TEMPORARY) not in _OF_A_RUN and not name.startswith(".")]


def _useless_resets(cfg: DictConfig, made: int, done: list[int]) -> Iterator[str]:
    """Find fixed resets that come too late, and a learning rate for resets that never happen.

    Args:
        made: steps that the run has made.
        done: steps after which it made resets.
    """
    resets, last = cfg.trainer.resets, cfg.trainer.grpo.max_steps
    key = f"trainer.resets.at_steps={sorted(resets.at_steps)}"
    if past := sorted(step for step in set(resets.at_steps) - set(done) if step <= made):
        yield (
            f"{key}: no reset after {', '.join(map(str, past))}, because the run has made {made} steps. Fix: later"
            f" steps, or a reset by hand: prorl control {cfg.run_dir} reset"
        )
    elif last in set(resets.at_steps) - set(done):
        yield (
            f"{key}: the reset after step {last} has no use in this run, because trainer.grpo.max_steps={last}. Fix:"
            " an earlier step, or more steps"
        )
    planned = resets.every is not None or resets.at_steps or resets.mode in ("auto", "trial") or done
    begins = schedule.begins_with_reset(cfg)
    fix = "only `prorl control RUN reset` would make one. Fix: trainer.resets.at_steps or every"
    warmup = f"trainer.resets.lr_warmup_steps={resets.lr_warmup_steps}: no effect, because"
    if resets.lr_warmup_steps and not schedule.resets_optimizer(resets, resets.roll_back):
        leaves = f"trainer.resets.parts={resets.parts} leaves the optimizer as it is"
        yield f"{warmup} {leaves}. Fix: trainer.resets.parts=both"
    elif resets.lr_warmup_steps and not (planned or begins):
        yield (f"{warmup} no reset of the optimizer is planned; {fix}, or model.optim.sched.warmup_steps for the start")
    factor = f"trainer.resets.lr_factor={resets.lr_factor:g}"
    if resets.lr_factor != 1 and not planned:
        yield f"{factor}: no effect, because no reset is planned; {fix}"
    if resets.lr_factor_steps and resets.lr_factor == 1:
        yield (
            f"trainer.resets.lr_factor_steps={resets.lr_factor_steps}: no effect, because trainer.resets.lr_factor=1"
            " leaves the rate as it is. Fix: trainer.resets.lr_factor=0.5"
        )
    if resets.roll_back and cfg.data.validation and not (planned or made or _begins(cfg)):
        yield f"trainer.resets.roll_back=true: no effect, because no reset is planned; {fix}"
    all_steps = [step for step in {*schedule.fixed_resets(resets, made, last), *done} if 0 < step < last]
    lr = cfg.model.optim.lr
    window = resets.lr_factor_steps or last
    count = max((sum(step - window < other <= step for other in all_steps) for step in all_steps), default=0)
    least, most, source = _usual(cfg)["model.optim.lr"]
    if least <= lr <= most and not least <= (falls := lr * resets.lr_factor**count) <= most:
        yield (
            f"{factor}: after {count} resets model.optim.lr={lr:g} is {falls:.3g}; expected {least:g} to {most:g}, a"
            f" range around {source}. Fix: a factor nearer to 1, or fewer resets"
        )
    if resets.every == 1 and last > 1:
        yield (
            "trainer.resets.every=1: a reset after each step leaves the KL to the reference at 0, or the optimizer's"
            " moments empty. Fix: a larger number, or null"
        )


def _blind_roll_backs(cfg: DictConfig, made: int, done: list[int]) -> Iterator[str]:
    """Find resets that can only go back to the weights of the reset before, because nothing was validated since.

    Args:
        made, done: as in `_useless_resets`.
    """
    resets, last, every = cfg.trainer.resets, cfg.trainer.grpo.max_steps, cfg.trainer.grpo.validate_every
    later = schedule.fixed_resets(resets, made, last) if resets.roll_back and cfg.data.validation else []
    ways = {end: end - start for start, end in pairwise([max(done, default=0), *later])}
    blind = [end for end, way in ways.items() if end // every == (end - way) // every and end < last]
    if blind:
        yield (
            f"trainer.resets.roll_back=true: no validation (trainer.grpo.validate_every={every}) between the reset"
            f" before, or the start, and the reset after {listed(blind, 4)}: each goes back to"
            " where these steps began, and undoes what they trained. Fix:"
            f" trainer.grpo.validate_every={min(ways.values())} or less"
        )
    # The other two rules wait for validations since the last reset.
    pause = resets.rules.cooldown_steps
    sudden = {
        r: max(pause, _LEAST_STEPS.get(r, 1)) for r in resets.rules.asks if r not in ("validation_drop", "plateau")
    }
    sudden = {rule: way for rule, way in sudden.items() if way < every and never_asks(cfg, rule) is None}
    if resets.roll_back and resets.mode == "auto" and cfg.data.validation and sudden:
        way = min(sudden.values())
        yield (
            f"trainer.resets.roll_back=true with {listed([*sudden], 4)} in trainer.resets.rules.asks: a reset may come"
            f" {way} steps after the one before, without a validation between them"
            f" (trainer.grpo.validate_every={every}); it goes back to where these steps began, and undoes what they"
            f" trained. Fix: trainer.grpo.validate_every={way} or less, or trainer.resets.rules.cooldown_steps={every}"
        )


def _rises(cfg: DictConfig) -> dict[bool, tuple[str, int]]:
    """Return the key and the steps of the rise of the learning rate at the start, and of that after a reset (True)."""
    sched, after_reset = cfg.model.optim.sched, cfg.trainer.resets.lr_warmup_steps
    key = f"model.optim.sched.{'warmup_steps' if sched.warmup_steps else 'warmup_ratio'}"
    start = (key, schedule.warmup_steps(sched, cfg.trainer.grpo.max_steps))
    return {False: start, True: ("trainer.resets.lr_warmup_steps", after_reset) if after_reset else start}


def _long_rises(cfg: DictConfig, made: int) -> Iterator[str]:
    """Find a rise of the learning rate that fills the run, or that a rule for resets may end.

    Args:
        made: steps that the run has made.
    """
    resets, steps, name = cfg.trainer.resets, cfg.trainer.grpo.max_steps, cfg.model.optim.sched.name
    key, rise = _rises(cfg)[False]
    if rise >= steps > 1 and not made and not (schedule.begins_with_reset(cfg) and resets.lr_warmup_steps):
        falls = "" if name == "constant" else f", and never falls (model.optim.sched.name={name})"
        yield (
            f"{key}={OmegaConf.select(cfg, key):g}: the learning rate rises until the last step"
            f" (trainer.grpo.max_steps={steps}){falls}. Fix: fewer steps of warm-up, or more steps"
        )
    key, rise = _rises(cfg)[True]
    if (
        resets.mode in ("auto", "trial")
        and schedule.resets_optimizer(resets, resets.roll_back)
        and rise > (pause := resets.rules.cooldown_steps)
    ):
        yield (
            f"{key}={OmegaConf.select(cfg, key):g}: after a reset a rule may ask for the next one before the learning"
            f" rate has its full value again, after trainer.resets.rules.cooldown_steps={pause} steps. Fix:"
            f" trainer.resets.rules.cooldown_steps={rise}"
        )


def _cut_rises(cfg: DictConfig, made: int, done: list[dict[str, Any]]) -> Iterator[str]:
    """Find rises of the learning rate that the next reset or the last step ends before the full rate.

    Args:
        made: steps that the run has made.
        done: hard resets that it has made.
    """
    resets, steps, rises = cfg.trainer.resets, cfg.trainer.grpo.max_steps, _rises(cfg)
    later = schedule.fixed_resets(resets, made, steps) if schedule.resets_optimizer(resets, resets.roll_back) else []
    first = [{"step": 0}] if schedule.begins_with_reset(cfg) else []
    of_optimizer = schedule.optimizer_reset_steps(resets, done or first)
    starts = [max(of_optimizer, default=0), *(step for step in later if step < steps)]
    shortest: dict[bool, tuple[int, int, int]] = {}  # distance, first and last step
    for start, end in zip(starts, [*starts[1:], steps], strict=True) if made < steps else ():
        of_reset = start > 0 or bool(of_optimizer)
        if rises[of_reset][1] > end - start:
            way = (end - start, start, end)
            shortest[of_reset] = min(way, shortest.get(of_reset, way))
    for of_reset, (distance, start, end) in sorted(shortest.items()):
        key, rise = rises[of_reset]
        value = OmegaConf.select(cfg, key)
        setting = f"{key}={value:g}" + (f" ({rise} steps)" if value != rise else "")
        whose = f"after the reset of step {start}" if start else "at the start"
        ends = "the next reset" if end < steps else f"the last step (trainer.grpo.max_steps={steps})"
        fix = f"trainer.resets.lr_warmup_steps={distance} or less" if of_reset else f"at most {distance} steps"
        fix = "" if made else f"{fix}, or "  # a continued run may not change these keys
        yield (
            f"{setting}: the learning rate that rises {whose} does not reach its full value, because {ends} comes"
            f" {distance} step{'' if distance == 1 else 's'} later. Fix: {fix}resets at other steps"
        )


def _other_rate(cfg: DictConfig, old: DictConfig, made: int, done: list[dict[str, Any]]) -> Iterator[str]:
    """Warn if other steps or another schedule change the learning rate of the next step of a continued run.

    Args:
        made: steps that the run has made.
        done: hard resets that it has made.
    """
    before, after, step = old.trainer.grpo.max_steps, cfg.trainer.grpo.max_steps, made + 1
    was, now = schedule.rate_of_run(old, step, done), schedule.rate_of_run(cfg, step, done)
    if step > after or math.isclose(was, now, rel_tol=0.01):
        return
    instead = f" instead of {was:.3g}"
    if step > before:
        instead = f", after {schedule.rate_of_run(old, made, done):.3g} in step {made}"
    keys = ("model.optim.lr", *(f"model.optim.sched.{item.name}" for item in fields(SchedKeys)))
    keys = (*keys, *(f"trainer.resets.{name}" for name in ("parts", "lr_factor", "lr_factor_steps", "lr_warmup_steps")))
    pairs = {key: (OmegaConf.select(cfg, key), OmegaConf.select(old, key)) for key in keys}
    if changed := [f"{key}={new} (the run has {own})" for key, (new, own) in pairs.items() if new != own]:
        yield (
            f"{', '.join(changed)}: step {step}'s learning rate becomes {now:.3g}{instead}. Fix: another run with this"
            f" rate: run_dir=NEW chain.start_from={step_folder(Path(cfg.run_dir) / 'checkpoints', made)}"
        )
    else:
        yield (
            f"trainer.grpo.max_steps={after}: step {step}'s learning rate becomes {now:.3g}{instead},"
            f" because the schedule of model.optim.sched now has {after} steps (the run had {before}). Fix: keep"
            f" {before}, and begin another run at its end: run_dir=NEW chain.start_from={cfg.run_dir}"
        )


def _usual(cfg: DictConfig) -> dict[str, tuple[float, float, str]]:
    """Return the ranges of `_USUAL` for the model and the loss of a run."""
    clip = _CLIPS.get(cfg.trainer.grpo.loss)
    clips = {f"trainer.grpo.{name}": clip for name in ("clip_low", "clip_high") if clip is not None}
    small = {"model.optim.lr": _SMALL_LR} if is_small(cfg) else {}
    return {**_USUAL, **small, **clips}


def _unusual(cfg: DictConfig) -> Iterator[str]:
    for key, (least, most, source) in _usual(cfg).items():
        value = OmegaConf.select(cfg, key)
        if value is not None and not least <= value <= most:
            yield f"{key}={value:g}: expected {least:g} to {most:g}, a range around {source}. It is used as it is"


def _begins(cfg: DictConfig) -> bool:
    """Return whether the run follows another one, of which `trainer.resets.roll_back` chooses the checkpoint."""
    return cfg.chain.after is not None or cfg.chain.start_from is not None


def _resets(cfg: DictConfig) -> Iterator[str]:
    """Find settings of hard resets that have no effect."""
    resets, steps, held_out = cfg.trainer.resets, cfg.trainer.grpo.max_steps, bool(cfg.data.validation)
    if resets.every is not None and resets.every >= steps:
        yield (
            f"trainer.resets.every={resets.every}: no regular reset before the last step, because"
            f" trainer.grpo.max_steps={steps}. Fix: less than {steps}, or null"
        )
    planned = resets.every is not None or resets.at_steps or resets.mode in ("auto", "trial")
    if planned and resets.parts == "reference" and cfg.trainer.grpo.kl_coef == 0:
        yield (
            "trainer.resets.parts=reference: no effect, because trainer.grpo.kl_coef=0 gives the reference no weight."
            " Fix: trainer.resets.parts=both, or a KL coefficient"
        )
    if resets.parts == "none" and resets.lr_factor == 1 and not resets.roll_back:
        yield (
            "trainer.resets.parts=none: resets have no effect. Fix: trainer.resets.lr_factor=0.5, which lowers the"
            " learning rate, or trainer.resets.roll_back=true"
        )
    if resets.roll_back and not held_out and not _begins(cfg):
        yield (
            "trainer.resets.roll_back=true: no effect, because data.validation is empty, so no weights are known to be"
            " the best. Fix: sources in data.validation, or false"
        )
    defaults = ResetRulesConfig()
    changed = [name for name, value in resets.rules.items() if value != getattr(defaults, name)]
    if resets.mode == "manual" and changed:
        keys = ", ".join(f"trainer.resets.rules.{name}={resets.rules[name]}" for name in changed)
        yield (
            f"{keys}: no effect, because trainer.resets.mode=manual asks no rule. Fix: trainer.resets.mode=advise for"
            " alarms, or auto for resets"
        )
    if resets.mode == "advise" and "asks" in changed and {*resets.rules.asks} <= {*RESET_RULES, *ADVISING_RULES}:
        yield (  # a rule of the user runs only if `asks` names it
            f"trainer.resets.rules.asks={resets.rules.asks}: no reset, because with trainer.resets.mode=advise rules"
            " only alarm. Fix: trainer.resets.mode=auto, or stop"
        )
    if resets.mode == "auto":
        never = {rule: reason for rule in resets.rules.asks if (reason := never_asks(cfg, rule)) is not None}
        for rule, reason in never.items():
            whole = "no rule can ask for a reset" if len(never) == len(set(resets.rules.asks)) else "it cannot ask"
            yield (
                f"trainer.resets.mode=auto with {rule} in trainer.resets.rules.asks: {whole}: {reason}. Fix: change"
                f" that, leave {rule} out of asks, or fix the steps with trainer.resets.at_steps or every"
            )


def never_asks(cfg: DictConfig, rule: str) -> str | None:
    """Return why a rule of `algorithms.reset_rules` can never ask for a reset in this run; None if it can."""
    grpo, rules = cfg.trainer.grpo, cfg.trainer.resets.rules
    limit = f"trainer.grpo.max_steps={grpo.max_steps}"
    scores = -(-grpo.max_steps // grpo.validate_every) if cfg.data.validation else 0
    wanted = {"validation_drop": rules.drop_confirm + LEAST_BASELINE, "plateau": LEAST_BASELINE}.get(rule, 0)
    steps = {"plateau": rules.plateau_steps, **_LEAST_STEPS}.get(rule, 0)
    if wanted and not cfg.data.validation:
        return "data.validation is empty"
    if rules.cooldown_steps > grpo.max_steps:
        return f"trainer.resets.rules.cooldown_steps={rules.cooldown_steps} is more than {limit}"
    if steps > grpo.max_steps:
        key = f"trainer.resets.rules.plateau_steps={steps}" if rule == "plateau" else f"its least of {steps} steps"
        return f"{key} is more than {limit}"
    if scores < wanted:
        return (
            f"{limit} has {scores} validations (trainer.grpo.validate_every={grpo.validate_every}), of {wanted} needed"
        )
    return None
