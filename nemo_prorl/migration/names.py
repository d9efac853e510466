"""The names that other trainers give to this project's keys."""

import functools
import re
from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import yaml

TITLES = {"trl": "TRL", "verl": "verl", "nemo_rl": "NeMo-RL", "openrlhf": "OpenRLHF"}
RLOO = "rloo"  # key that says that a script of TRL has an RLOOConfig
_ENTRIES = {  # programs that the tables and rules are of; the first has no rule of its own
    "verl": ["verl.trainer.main_ppo", "recipe.dapo.main_dapo", r"\w+.one_step_off_policy.(async_)?main_ppo"]
    + [r"\w+.fully_async_policy.fully_async_main"],
    "openrlhf": ["openrlhf.cli.train_ppo_ray"],
}
_MORE = {  # common forms that no table has
    "gradient_clip": "trainer.gradient_clip_val",
    "gradient_clipping": "trainer.gradient_clip_val",
    "num_iterations": "trainer.grpo.updates_per_step",
    "num_train_epochs": "trainer.grpo.max_steps",
    "total_epochs": "trainer.grpo.max_steps",
    "gpu_memory_utilization": "rollout.kv_cache_mb",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_mb",
    "model_path": "pretrained_checkpoint.restore_from_path",
}


@functools.cache
def table(trainer: str) -> dict[str, Any]:
    """Return the table of a trainer: its file with every key on its own.

    In the file a key of `keys` has its default beside it, `derived` names keys by what they become, and `aliases` may
    be those of a whole section.  `meanings` has both `differs` and `decides`.
    """
    content = yaml.safe_load((files(__package__) / f"{trainer}.yaml").read_text(encoding="utf-8"))
    rows = {key: ours if isinstance(ours, list) else [ours] for key, ours in content["keys"].items()}
    derived = {key: ours for ours, several in content["derived"].items() for key in several}
    aliases = {key.rsplit(".", 1)[-1]: key for key in content.get("alone", ())}
    aliases |= {key.replace(".", "_"): key for key in content.get("flat", ())} | content.get("aliases", {})
    below = [(old, new, key) for old, new in aliases.items() for key in derived if key.startswith(f"{new}.")]
    return content | {
        "keys": {key: ours for key, (ours, *_) in rows.items()},
        "derived": derived,
        "defaults": content["defaults"] | {key: default for key, (_, *some) in rows.items() for default in some},
        "aliases": aliases | {f"{old}{key.removeprefix(new)}": key for old, new, key in below},
        "meanings": content["differs"] | content["decides"],
    }


def entry(trainer: str, started: Iterable[str]) -> tuple[str, str]:
    """Return the program that a script starts, as a module, and why the user must look at it; empty if not."""
    usual = _ENTRIES.get(trainer, [])
    names = {re.sub(r"\.py$", "", str(program)).replace("/", ".").lstrip(".") for program in started if usual}
    names = {name for name in names if trainer == "verl" or f"{trainer}." in name}
    exact = {name for name in names if re.fullmatch(rf"(\S*\.)?({'|'.join(usual)})", name)}
    note = f"what this program sets or does otherwise than {usual[0]} was not read" if names and len(exact) != 1 else ""
    return " or ".join(sorted(exact or names)), note


@functools.cache
def known(trainer: str, is_alone: bool = False) -> tuple[set[str], set[str]]:
    """Return the names of which a trainer's dotted keys consist, and those of its sections with keys of any name.

    Args:
        is_alone: of a key without a section: names that stand only below one are none of its names.
    """
    tables = table(trainer)
    keys = [key for part in ("keys", "derived", "defaults", "differs", "decides") for key in tables[part]]
    keys += [key for part in ("needs", "unused") for some in tables[part].values() for key in some]
    keys += [name for pair in tables["aliases"].items() for name in pair]
    parts = set(keys) if is_alone else {part for key in keys for part in key.split(".") if "*" not in part}
    return parts | set(tables["known"].split()), set(tables["free"].split())


@functools.cache
def names() -> dict[str, dict[str, str]]:
    """Return {trainer: {key of that trainer: key of this project}}, older names of its keys included."""
    by_trainer = {}
    for trainer in TITLES:
        keys = table(trainer)["keys"] | table(trainer)["derived"]
        by_trainer[trainer] = keys | {old: keys[new] for old, new in table(trainer)["aliases"].items() if new in keys}
    return by_trainer


def looks_like(trainer: str, named: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return another trainer and its keys among the named ones; None if `trainer` is as likely.

    Only keys that a single trainer has count.  If one of `trainer`'s is named, the result is None.
    """
    of_all = Counter(key for keys in names().values() for key in keys)
    own = {candidate: [key for key in named if key in keys and of_all[key] == 1] for candidate, keys in names().items()}
    likely = max(own, key=lambda candidate: len(own[candidate]))
    return (likely, own[likely]) if own[likely] and not own[trainer] else None


def meant(key: str) -> str | None:
    """Return this project's key for another trainer's key, such as `beta` or `trainer.lr`; None if there is none."""
    pairs = [pair for keys in (_MORE, *names().values()) for pair in keys.items()]
    asked = key, key.rsplit(".", 1)[-1]
    return next((ours for name in asked for other, ours in pairs if name in (other, other.rsplit(".", 1)[-1])), None)
