"""Checks that the data of a run is there: each file of its sources, and a source for each task that it names.

Looks at the configuration and at which files exist; reads no record.  Imports the standard library and OmegaConf only,
so that `prorl plan`, `doctor`, `train`, `launch` and a Slurm job refuse a run in a second, before any GPU is allocated.
"""

import shlex
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError

# The folders of data=prorl, with the arguments of `prorl data prepare` that make each (docs/tutorial/data.md).
PAPER = {
    "deepscaler": "deepscaler --from hub",
    "eurus2-rl": "eurus2-rl --from hub --size 24000",
    "scp-116k": "scp-116k --from hub --size 25000 --judge-url URL --judge-model NAME",
    "reasoning-gym": "reasoning-gym",
    "instructions": "nemotron-if --from hub --size 10000",
    "aime24": "math --from aime24.jsonl --name aime24 --holdout all",
    "codeforces": "code --from codeforces.jsonl --name codeforces --holdout all",
    "gpqa": "gpqa --from hub --holdout all",
    "ifeval": "ifeval --from hub --holdout all",
    "graph_color": "reasoning-gym --from graph_color.yaml --name graph_color --size 0 --holdout 100",
}
_GENERATED = {"arithmetic": "math"}  # generator: task, where the names differ


def missing_files(cfg: DictConfig) -> list[tuple[str, str]]:
    """Return (key, path) of each source's file that is not there."""
    keys = [
        (f"data.{part}.{k}.path", one.path) for part in ("train", "validation") for k, one in enumerate(cfg.data[part])
    ]
    return [(key, path) for key, path in keys if path is not None and not Path(path).is_file()]


def preparing(path: str) -> str | None:
    """Return the command that writes a file of data=prorl; None for any other file."""
    folder = Path(path).parent
    if folder.name not in PAPER:
        return None
    return f"prorl data prepare {PAPER[folder.name]} --out {shlex.quote(str(folder))}"


def task_of(generator: str) -> str:
    return "puzzles" if generator.startswith("reasoning_gym:") else _GENERATED.get(generator, generator)


def missing_tasks(cfg: DictConfig) -> list[str]:
    """Return the tasks of data.tasks that no training source can hold.

    The tasks of a file are known only once its records are read, which `data.blend` does; so with a file among the
    sources nothing is found here.
    """
    if cfg.data.tasks is None or any(source.path is not None for source in cfg.data.train):
        return []
    held = {task_of(source.generator) for source in cfg.data.train}
    return [task for task in cfg.data.tasks if task not in held]


def faults(cfg: DictConfig) -> list[str]:
    """Return the faults of a run's data, each with the command or key that mends it."""
    found = []
    if missing := missing_files(cfg):
        lines = []
        for key, path in missing:
            lines.append(f"  {key}={path}: no such file; expected one prompt record (JSON object) a line")
            if (command := preparing(path)) is not None:
                lines.append(f"    Fix: {command}")
        files = "1 file is" if len(missing) == 1 else f"{len(missing)} files are"
        cure = (
            "Fix: prepare them (docs/tutorial/data.md), name their folder (data.folder=FOLDER), or choose other data"
            " (data=NAME)"
        )
        found.append("\n".join([f"data: {files} missing, relative to {Path.cwd()}", *lines, cure]))
    if lacking := missing_tasks(cfg):
        names = ", ".join(source.name for source in cfg.data.train)
        found.append(
            f"data.tasks={list(cfg.data.tasks)}: no source of data.train ({names}) holds {', '.join(lacking)}. Fix:"
            " data=prorl, data=domains (problems made on the spot), or the tasks to train on, as data.tasks=[math]"
        )
    return found


def check_data(cfg: DictConfig) -> None:
    """Raise ConfigError that names every missing file and task of a run's data."""
    if found := faults(cfg):
        raise ConfigError("\n".join(found))
