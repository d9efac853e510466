"""What another trainer takes for the settings that a file leaves out."""

from collections.abc import Mapping
from typing import Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.migration.files import BASE, TABLE_BASE
from nemo_prorl.migration.names import RLOO, table
from nemo_prorl.migration.shell import UNREAD, Absent

NO_DEFAULT = "is in no file, and NeMo-RL has no default"
_MEGATRON = "policy.megatron_cfg"
_CODE = "grpo.", "loss_fn."  # sections for which NeMo-RL's code has the defaults of the table


def defaults(trainer: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return {key: value} for what a file and its bases leave out; what NeMo-RL needs and has nowhere is `Absent`.

    NeMo-RL takes the table's file only where `defaults` of the file, or its script, name it.  Raises ConfigError if
    another file that these name is missing.
    """
    whole: dict[str, Any] = table(trainer)["defaults"]
    if trainer != "nemo_rl":
        return {**whole, **(table(trainer)["rloo"] if _is_rloo(named) else {})}
    bases = [str(base) for base in named.get(BASE, [])]
    missing = [base for base in bases if not base.endswith(TABLE_BASE)]
    unread = {key.removeprefix(UNREAD): str(reason) for key, reason in named.items() if key.startswith(UNREAD)}
    missing += [key for key, reason in unread.items() if reason.startswith("this file is missing")]
    if missing:
        raise ConfigError(
            f"{BASE}={missing[0]}: this file is missing, and any number may be in it. Fix: put it where the name"
            " says, or write its name into the script, and convert again"
        )
    if bases:
        return whole
    own = table(trainer)["code"]
    is_on = named.get(f"{_MEGATRON}.enabled", any(key.startswith(f"{_MEGATRON}.optimizer.") for key in named))
    off = ("policy.optimizer", "policy.scheduler") if is_on else (_MEGATRON,)  # keys of the other back end
    absent = {
        key: Absent(NO_DEFAULT)
        for key, value in whole.items()
        if key not in own and not key.startswith(off) and not any(f"{name}.".startswith(f"{key}.") for name in named)
        if value is not None and not key.startswith(_CODE)
    }
    return {**whole, **own, **absent, f"{_MEGATRON}.enabled": is_on}


def source(trainer: str, named: Mapping[str, Any]) -> str:
    """Return where the defaults are from."""
    whole = str(table(trainer)["source"]).replace("grpo_config", "rloo_config" if _is_rloo(named) else "grpo_config")
    return whole if trainer != "nemo_rl" or BASE in named else f"{whole.partition(', ')[0]}, its code"


def _is_rloo(named: Mapping[str, Any]) -> bool:
    return not named.keys().isdisjoint({RLOO, "normalize_advantages", "reward_clip_range"})
