"""Comparison of two configurations: a run with its continuation, a fork with its parent.  No torch."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import DataSource, all_keys
from nemo_prorl.errors import ConfigError
from nemo_prorl.lifecycle.retention import complete

RECORDED = ("trainer.", "model.", "rollout.")  # sections whose changes the journal of a continued run records
# Sections of a run that `prorl plan` compares with those of the run from which a fork begins.
FORKED = (*RECORDED, "seed", "deterministic", "pretrained_checkpoint.", "rewards.", "data.")
NOT_FORKED = ("trainer.warmup.", "rollout.python")  # a fork does not warm up, and each machine has its own Python


def leaves(tree: Any, prefix: str = "", into_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the full key and the value of each leaf of nested mappings.

    Args:
        into_lists: descend into lists of mappings too, with the index as part of the key; False: such a list is a leaf.
    """
    branches: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        branches = tree.items()
    elif into_lists and isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        branches = enumerate(tree)
    if prefix and not branches:
        yield prefix, tree
    for key, value in branches:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key), into_lists)


def check_same_run(old: DictConfig, new: DictConfig) -> None:
    """Raise ConfigError if `new` is not a continuation of the run whose configuration is `old`.

    A continued run may raise `max_steps` and change the keys that `config` marks with `may_change`, such as the
    parallel layout, deadlines, logging, and when later hard resets are made.
    """
    changed = {key: both for key, both in _differences(old, new).items() if not may_change(key)}
    if changed:
        differences = ", ".join(f"{key}={wanted} (the run has {was})" for key, (was, wanted) in changed.items())
        saved = complete(Path(old.run_dir) / "checkpoints")
        fork = f", or fork it: run_dir=NEW chain.start_from={saved[-1]}" if saved else ""
        was, wanted = changed.get("pretrained_checkpoint.restore_from_path", (None, None))
        moved = f"; if the folder was moved, a link: ln -s {Path(wanted).absolute()} {was}" if was and wanted else ""
        raise ConfigError(
            f"{old.run_dir} holds a run with another configuration: {differences}.\n"
            "Fix: keep the run's values of these keys to continue it, or start another run with run_dir=..."
            f"{fork}{moved}"
        )
    was, wanted = old.trainer.grpo.max_steps, new.trainer.grpo.max_steps
    if wanted < was:
        raise ConfigError(
            f"trainer.grpo.max_steps={wanted}: expected at least {was}, with which {old.run_dir} was started.\n"
            f"Fix: leave it out; `prorl control {old.run_dir} stop` ends a run earlier, and run_dir=NEW"
            " chain.start_from=CHECKPOINT begins another one with its weights"
        )


def changes(old: DictConfig, new: DictConfig, sections: tuple[str, ...] = RECORDED) -> str:
    """Return the keys that differ, with both values; "" if there are none.

    Such as `trainer.resets.mode=auto (was advise), trainer.resets.every=40 (was None)`.

    Args:
        sections: beginnings of the keys that count; default: training, layout and engines of a continued run.
    """
    skip = NOT_FORKED if sections is FORKED else ()
    differences = _differences(old, new).items()
    changed = {key: both for key, both in differences if key.startswith(sections) and not key.startswith(skip)}
    return ", ".join(f"{key}={wanted} (was {was})" for key, (was, wanted) in changed.items())


def _differences(old: DictConfig, new: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in `old`, value in `new`)} of the keys that differ."""
    before, after = (dict(leaves(OmegaConf.to_container(cfg, resolve=True))) for cfg in (old, new))
    both = {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())}
    return {
        key: pair
        for key, pair in both.items()
        if pair[0] != pair[1] and not (_same_path(key, *pair) or _default(key, *pair))
    }


def may_change(key: str) -> bool:
    """Return whether a continued run may change the key."""
    free = (known.name for known in all_keys() if known.rule.may_change)
    return any(key == name or key.startswith(f"{name}.") for name in free)


def _default(key: str, was: Any, wanted: Any) -> bool:
    """Return whether one value is missing, and the other is the default of a data source."""
    default = vars(DataSource()).get(key.rpartition(".")[2])
    is_source = key.startswith(("data.train.", "data.validation."))
    return is_source and (was, wanted) in ((None, default), (default, None))


def _same_path(key: str, was: Any, wanted: Any) -> bool:
    """Return whether both values name the same path; a Slurm job makes relative paths absolute."""
    is_path = key.startswith("data.") and key.endswith((".path", ".folder"))
    if not (is_path or key == "pretrained_checkpoint.restore_from_path") or not (was and wanted):
        return False
    return Path(was).absolute() == Path(wanted).absolute()
