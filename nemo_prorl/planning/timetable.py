"""What `prorl plan` says of a run's hard resets and of its learning rate: at which step, and to what."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl.algorithms import schedule
from nemo_prorl.cautions import never_asks
from nemo_prorl.lifecycle.retention import newest_state

_MOST = 6  # steps that the row of resets lists
_SHOWN = 3  # stretches between resets whose rates are listed
_PARTS = {"both": "reference and optimizer", "none": "neither reference nor optimizer"}
_MODES = {
    "manual": "no rules",
    "advise": "rules only alarm",
    "auto": "rules may make more",
    "stop": "rules may stop the run",
    "trial": "each of these, and each that rules ask for, is kept only if it wins its trial",
}


def rows(cfg: DictConfig) -> dict[str, str]:
    """Return the row of hard resets, and one of the learning rate unless each step to come has `model.optim.lr`."""
    state, resets, steps = newest_state(Path(cfg.run_dir)), cfg.trainer.resets, cfg.trainer.grpo.max_steps
    made, done = state.get("step", 0), state.get("resets", {}).get("done", [])
    own = [reset["step"] for reset in done if reset["step"]]  # step 0 is the start of the stage
    planned = schedule.fixed_resets(resets, made, steps)
    begins = schedule.begins_with_reset(cfg) and not state
    useful = [step for step in planned if step < steps]
    rates = _rates(cfg, made, [{"step": 0}] if begins else done, useful)
    start = "one at the start of the stage; " if begins else ""
    asks = [rule for rule in resets.rules.asks if never_asks(cfg, rule) is None]
    lines = {"hard resets": start + _resets(resets, own, planned, steps, asks)}
    if rates and set(rates.values()) != {cfg.model.optim.lr}:
        texts = [f"step {step} {rate:.3g}" for step, rate in rates.items()]
        lines["learning rate"] = ", ".join([*texts[:-1], *(["..."] if len(useful) >= _SHOWN else []), texts[-1]])
    return lines


def _resets(resets: Any, done: Sequence[int], planned: Sequence[int], steps: int, can_ask: Sequence[str]) -> str:
    """Return as text which resets were made and will be made in this run, and what they change."""
    useful = [step for step in planned if step < steps]
    regular = f"every {resets.every} steps, ".replace("every 1 steps", "every step") if resets.every else ""
    at = "a fixed step" if len(useful) == 1 else "fixed steps"
    texts = [f"{len(useful)} at {at}: {regular}after {_listed(useful)}" if useful else "none at a fixed step"]
    if steps in planned:
        texts.append(f"one after the last step, {steps}, without effect in this run")
    if done:
        texts.append(f"{len(done)} made so far, after {_listed(done)}")
    asks = f" ({', '.join(can_ask) or 'none can'})" if resets.mode in ("auto", "stop", "trial") else ""
    texts.append(f"mode {resets.mode}, {_MODES[resets.mode]}{asks}")
    texts.append(f"of {_PARTS.get(resets.parts, resets.parts)}")
    if resets.roll_back:
        also = "" if schedule.resets_optimizer(resets, False) else ", then of the optimizer, too"
        texts.append(f"back to the best weights{also}")
    if resets.lr_factor != 1:
        steps_of_it = f" for {resets.lr_factor_steps} steps" if resets.lr_factor_steps else ""
        texts.append(f"learning rate x {resets.lr_factor:g}{steps_of_it} each")
    return "; ".join(texts)


def _listed(steps: Sequence[int]) -> str:
    if len(steps) <= _MOST:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[: _MOST - 1]))}, ... {steps[-1]}"


def _rates(cfg: DictConfig, made: int, done: Sequence[Mapping[str, Any]], planned: Sequence[int]) -> dict[int, float]:
    """Return {step: learning rate} of the next step, the last one, and those where a rise or a factor ends."""
    resets, steps = cfg.trainer.resets, cfg.trainer.grpo.max_steps
    first = schedule.warmup_steps(cfg.model.optim.sched, steps)
    back = {"rolled_back_to": 0} if resets.roll_back else {}
    all_done = [*done, *({"step": step, **back} for step in planned)]
    starts = [max((reset["step"] for reset in done), default=0), *planned]
    turns = {made + 1, steps}
    for start, end in list(zip(starts, [*planned, steps], strict=True))[:_SHOWN]:
        of_optimizer = start in schedule.optimizer_reset_steps(resets, all_done)
        rise = resets.lr_warmup_steps or first if of_optimizer else 0 if start else first
        lowers = start and resets.lr_factor_steps and resets.lr_factor != 1
        returns = {start + resets.lr_factor_steps + 1} if lowers else set()
        turns |= {start + 1, min(start + rise, end), end, *returns}
    return {step: schedule.rate_of_run(cfg, step, all_done) for step in sorted(turns) if made < step <= steps}
