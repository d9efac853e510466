"""Where a run's first weights lie, as Hugging Face folders.

pretrained_checkpoint.restore_from_path     given by the user, or else made here:
RUN/init                                    random weights of `model`'s shape, a tokenizer made for the data
RUN/base                                    what reinforcement learning starts from, after the warm-up

A stage begins with the checkpoint of the one before: its RUN/init is that stage's, for config.json and tokenizer.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.config import Config
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.lifecycle.stages import Origin, take_over_model

if TYPE_CHECKING:
    from nemo_prorl.data.blend import LoadedSource

_log = logging.getLogger(__name__)


def initial_model(cfg: Config, run_dir: Path) -> Path:
    """The folder of the weights before any warm-up; it also holds config.json and tokenizer for the engines."""
    given = cfg.pretrained_checkpoint.restore_from_path
    return Path(given) if given else run_dir / "init"


def base_folder(cfg: Config, run_dir: Path) -> Path:
    """The folder of the weights that reinforcement learning starts from; made by the trainer if there is a warm-up."""
    return run_dir / "base" if warms_up(cfg) else initial_model(cfg, run_dir)


def warms_up(cfg: Config) -> bool:
    """Whether supervised steps come first: never in a stage that follows another."""
    return cfg.trainer.warmup.steps > 0 and cfg.chain.after is None and cfg.chain.start_from is None


def make_initial_model(cfg: Any, run_dir: Path, train: "Sequence[LoadedSource]", start: Origin | None = None) -> Path:
    """Make RUN/init if the run needs one and has none; complete only when it has its name.

    Args:
        train: training data, for whose words the tokenizer is made.
        start: where a stage begins.

    Raises ConfigError if `start` is a checkpoint without the model's tokenizer.
    """
    folder = initial_model(cfg, run_dir)
    if cfg.pretrained_checkpoint.restore_from_path or folder.exists():
        return folder
    if start is not None:
        take_over_model(_model_of(start), folder)
        return folder
    from nemo_prorl.data.laptop.model import build_base_model

    some = [record for _, records in train for record in records[:2000]]
    texts = [text for record in some for text in _texts(record, warms_up(cfg))]
    temporary = folder.with_name("init.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    build_base_model(temporary, cfg.model, cfg.seed, texts)
    os.replace(temporary, folder)
    return folder


def _model_of(start: Origin) -> Path:
    """The Hugging Face folder of the run that a stage begins from."""
    if (start.checkpoint / "hf").is_dir():
        return start.checkpoint / "hf"
    if start.run_dir is not None and (start.run_dir / "init").is_dir():
        return start.run_dir / "init"
    raise ConfigError(
        f"{start.checkpoint} stands in no run directory with init/, the model's config.json and tokenizer; name the"
        " model with pretrained_checkpoint.restore_from_path=FOLDER"
    )


def _texts(record: dict[str, Any], warm_up: bool) -> list[str]:
    """What the tokenizer is made for: the prompt, and the right response, which only a warm-up cannot do without."""
    from nemo_prorl.data.laptop.generators import warmup_target

    prompt = str(record["prompt"])
    try:
        return [prompt, warmup_target(record)]
    except DataError:
        if warm_up:
            raise
        return [prompt]
