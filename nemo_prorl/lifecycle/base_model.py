"""Folders of a run's first weights, in Hugging Face format.

    given folder    pretrained_checkpoint.restore_from_path, if set
    RUN/init        otherwise: random weights of `model`'s shape, and a tokenizer made for the data
    RUN/base        weights after the warm-up, from which reinforcement learning starts

A later stage begins with the checkpoint of the previous stage.  Without a given folder, the later stage
copies the previous stage's model folder to its own RUN/init, for config.json and tokenizer.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.config import Config, warms_up
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.files import new_folder
from nemo_prorl.lifecycle.stages import Origin, take_over_model

if TYPE_CHECKING:
    from nemo_prorl.data.blend import LoadedSource
    from nemo_prorl.data.laptop.generators import Record

_log = logging.getLogger(__name__)


def initial_model(cfg: Config, run_dir: Path) -> Path:
    """Return the folder of the weights before a warm-up; the folder also has the model's config.json and tokenizer."""
    path = cfg.pretrained_checkpoint.restore_from_path
    return Path(path) if path else run_dir / "init"


def base_folder(cfg: Config, run_dir: Path) -> Path:
    """Return the folder of the weights at the start of reinforcement learning.

    It is RUN/base, which the trainer makes after the supervised warm-up; without warm-up, the initial model.
    """
    return run_dir / "base" if warms_up(cfg) else initial_model(cfg, run_dir)


def warmup_records(cfg: Config, train: "Sequence[LoadedSource]") -> "list[Record]":
    """Return the records of the supervised steps, in order.

    Args:
        train: training data of all tasks, without the prompts that are too long.
    """
    from nemo_prorl.data.blend import Blend

    blend = Blend(train, cfg.seed + 1)
    return [blend.next()[0] for _ in range(cfg.trainer.warmup.steps * cfg.trainer.warmup.batch_size)]


def make_initial_model(cfg: Any, run_dir: Path, train: "Sequence[LoadedSource]", start: Origin | None = None) -> Path:
    """Return the folder of the initial model; first make RUN/init if no folder is given and RUN/init is missing.

    RUN/init gets its name only when it is complete.

    Args:
        train: training data; the tokenizer is made from its prompts and answers.
        start: checkpoint from which the stage begins; None if it begins with the initial model.

    Raises:
        ConfigError: neither the checkpoint `start` nor its run contains a model folder.
        DataError: the run has a warm-up, and a record does not give a correct response.
    """
    folder = initial_model(cfg, run_dir)
    if cfg.pretrained_checkpoint.restore_from_path or folder.exists():
        return folder
    if (source := model_to_copy(cfg, run_dir, start)) is not None:
        take_over_model(source, folder)
        return folder
    from nemo_prorl.data.laptop.model import build_base_model

    some = [record for _, records in train for record in records[:2000]]
    texts = [text for record in some for text in _texts(record, warms_up(cfg))]
    with new_folder(folder) as temporary:
        build_base_model(temporary, cfg.model, cfg.seed, texts)
    return folder


def model_to_copy(cfg: Any, run_dir: Path, start: Origin | None) -> Path | None:
    """Return the Hugging Face folder that RUN/init is copied from; None if RUN/init exists, or needs no other folder.

    Args:
        start: as in `make_initial_model`.

    Raises:
        ConfigError: neither the checkpoint `start` nor its run contains a model folder.
    """
    if start is None or cfg.pretrained_checkpoint.restore_from_path or initial_model(cfg, run_dir).exists():
        return None
    if (start.checkpoint / "hf").is_dir():
        return start.checkpoint / "hf"
    if start.run_dir is not None and (start.run_dir / "init").is_dir():
        return start.run_dir / "init"
    raise ConfigError(
        f"{start.checkpoint}: expected a model folder, hf/ in it or init/ in its run directory; got neither."
        " Fix: name the model with pretrained_checkpoint.restore_from_path=FOLDER"
    )


def _texts(record: dict[str, Any], warm_up: bool) -> list[str]:
    """Return the texts for the tokenizer: the prompt, and the correct response if there is one.

    With `warm_up`, a record without a correct response raises DataError.
    """
    from nemo_prorl.data.laptop.generators import warmup_target

    prompt = str(record["prompt"])
    try:
        return [prompt, warmup_target(record)]
    except DataError:
        if warm_up:
            raise
        return [prompt]
