"""Checks that each data file of a run exists, and that each task named in `data.tasks` has a training source.

The check takes less than a second: it reads the configuration but no record, and imports only the standard library and
OmegaConf.  `prorl plan` warns of a fault; `doctor`, `train`, `launch` and a Slurm job refuse the run before they
allocate a GPU.
"""

import ast
import functools
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError

# The folders of data=prorl and of the benchmarks of the set `paper`, each with the arguments of `prorl data prepare`.
# `prorl data prepare paper` makes them in this order: training prompts are compared with the benchmarks.
JUDGE = " --judge-url URL --judge-model NAME"
PAPER = {
    "aime24": "aime24 --from hub",
    "aime25": "aime25 --from hub",
    "amc": "amc --from hub",
    "math500": "math500 --from hub",
    "minerva": "minerva --from hub",
    "olympiadbench": "olympiadbench --from hub",
    "gpqa": "gpqa --from hub",
    "ifeval": "ifeval --from hub",
    "apps": "eurus2-rl-validation --only apps --from hub",
    "codecontests": "eurus2-rl-validation --only codecontests --from hub",
    "codeforces": "eurus2-rl-validation --only codeforces --from hub",
    "taco": "eurus2-rl-validation --only taco --from hub",
    "humanevalplus": "humanevalplus --from hub",
    "livecodebench": "livecodebench --from hub",
    "graph_color": "reasoning-gym --only graph_color --size 0 --holdout 100",
    "reasoning-gym": "reasoning-gym",
    "deepscaler": "deepscaler --from hub",
    "eurus2-rl": "eurus2-rl --from hub --size 24000",
    "scp-116k": f"scp-116k --from hub --size 25000{JUDGE}",
    "instructions": "nemotron-if --from hub --size 10000",
}
GENERATORS = ("arithmetic", "code", "instructions", "stem")  # reasoning_gym:DATASET is a generator, too
_GENERATED = {"arithmetic": "math"}  # generator: task, if the names differ


def missing_files(cfg: DictConfig) -> list[tuple[str, str]]:
    """Return (key, path) of each source file that does not exist."""
    keys = [
        (f"data.{part}.{k}.path", one.path) for part in ("train", "validation") for k, one in enumerate(cfg.data[part])
    ]
    return [(key, path) for key, path in keys if path is not None and not Path(path).is_file()]


def is_elsewhere(cfg: DictConfig) -> bool:
    """Return whether data files are missing, and this machine does not have the folder of any data file."""
    paths = [source.path for part in ("train", "validation") for source in cfg.data[part] if source.path is not None]
    return bool(missing_files(cfg)) and not any(Path(path).parent.is_dir() for path in paths)


_DATASET = re.compile(r'(?:DATASET_NAME = |register_dataset\()"(\w+)"')


@functools.cache
def _reasoning_gym() -> dict[str, str]:
    """Return {dataset of reasoning-gym: its file}, because its import takes seconds; {} if it is not installed."""
    spec = find_spec("reasoning_gym")
    roots = (spec and spec.submodule_search_locations) or ()
    texts = [file.read_text() for root in roots for file in Path(root).rglob("*.py")]
    return {name: text for text in texts for name in _DATASET.findall(text)}


def reasoning_gym_names() -> list[str]:
    """Return the names of reasoning-gym's datasets; an empty list if the package is not installed."""
    return sorted(_reasoning_gym())


def reasoning_gym_options(dataset: str) -> set[str]:
    """Return the names of a dataset's options, perhaps with those of another one in its file; empty: not known."""
    classes = (node for node in ast.parse(_reasoning_gym().get(dataset, "")).body if isinstance(node, ast.ClassDef))
    configs = [node for node in classes if node.name.endswith("Config")]
    fields = (item.target for node in configs for item in node.body if isinstance(item, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)} - {"seed", "size"}


def preparing(path: str) -> str | None:
    """Return the command that prepares a file of data=prorl; None for any other file."""
    folder = Path(path).parent
    if folder.name not in PAPER:
        return None
    return f"prorl data prepare {PAPER[folder.name]} --out {shlex.quote(str(folder))}"


def task_of(generator: str) -> str:
    return "puzzles" if generator.startswith("reasoning_gym:") else _GENERATED.get(generator, generator)


def generated_tasks(cfg: DictConfig) -> set[str]:
    """Return the tasks of the generated training sources that data.tasks does not leave out."""
    tasks = {task_of(source.generator) for source in cfg.data.train if source.path is None}
    return tasks if cfg.data.tasks is None else tasks & set(cfg.data.tasks)


def read_sources(cfg: DictConfig) -> list[DictConfig]:
    """Return the sources that a run reads: all files, and the generated sources that data.tasks does not leave out."""
    tasks = cfg.data.tasks  # validation keeps all its records
    train = [s for s in cfg.data.train if tasks is None or s.path is not None or task_of(s.generator) in tasks]
    return [*train, *cfg.data.validation]


def missing_tasks(cfg: DictConfig) -> list[str]:
    """Return the tasks of data.tasks that no training source generates; empty if a source is a file.

    The tasks of a file are known only after its records are read, by `data.blend`.
    """
    if cfg.data.tasks is None or any(source.path is not None for source in cfg.data.train):
        return []
    generated = {task_of(source.generator) for source in cfg.data.train}
    return [task for task in cfg.data.tasks if task not in generated]


def faults(cfg: DictConfig) -> list[str]:
    """Return one message per fault of a run's data, with the command or key that fixes it."""
    messages = []
    if missing := missing_files(cfg):
        lines, shipped = [], False
        for key, path in missing:
            part = "train" if ".train." in key else "validation"
            if (inside := Path(path, f"{part}.jsonl")).is_file():
                lines.append(f"  {key}={path}: it is a folder. Fix: {key}={inside}")
                continue
            state = "it is a folder" if Path(path).is_dir() else "no such file"
            lines.append(f"  {key}={path}: {state}; expected one prompt record (JSON object) per line")
            command = preparing(path)
            shipped = shipped or command is not None
            lines.append(
                f"    Fix: {command or f'{key}=FILE; docs/tutorial/data.md makes FILE from your own problems'}"
            )
        files = "1 file is" if len(missing) == 1 else f"{len(missing)} files are"
        if shipped:
            lines.append(
                f"Fix: prepare them, all at once with `prorl data prepare paper --out {cfg.data.folder}`"
                " (docs/howto/prepare_data.md); name their folder (data.folder=FOLDER); or choose other data"
                " (data=NAME)"
            )
        messages.append("\n".join([f"data: {files} missing, relative to {Path.cwd()}", *lines]))
    if lacking := missing_tasks(cfg):
        names = ", ".join(source.name for source in cfg.data.train)
        messages.append(
            f"data.tasks={list(cfg.data.tasks)}: no source of data.train ({names}) has records of {', '.join(lacking)}."
            " Fix: data=prorl, data=domains (generated problems), or the tasks to train on, as data.tasks=[math]"
        )
    return messages


def check_data(cfg: DictConfig) -> None:
    """Raise ConfigError naming every missing file and task of a run's data."""
    if messages := faults(cfg):
        raise ConfigError("\n".join(messages))
