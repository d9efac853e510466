"""Between Hugging Face folders and checkpoints of this project: `prorl import-hf`, `prorl export-hf`.

An imported checkpoint is a checkpoint folder (see `checkpoint.py`) with `hf/`, the model's config.json and tokenizer.
It loads at any tensor, pipeline and data parallel size.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from nemo_prorl import settings
from nemo_prorl.environment import with_caches
from nemo_prorl.errors import ConfigError
from nemo_prorl.policy.weights import HFFolder, dtype_of, model_keys_from_hf, write_hf_folder
from nemo_prorl.recipe.retention import OLD, TEMPORARY, TRASH, complete

_log = logging.getLogger(__name__)

NEVER_HELD = ".safetensors", ".bin", ".pt", ".gguf"


def import_hf(hf_dir: Path, out: Path) -> None:
    """Writes a Hugging Face model as a checkpoint; raises ConfigError for a folder that is none or holds no weights."""
    from nemo_prorl.policy.build import build_actor

    _refuse_existing(out)
    folder = HFFolder(hf_dir)
    actor = build_actor(_one_rank(folder.config), folder.path).actor
    from nemo_prorl.policy import checkpoint  # NeMo must be enabled on a CPU first

    checkpoint.save(actor, out, {"step": 0, "imported_from": str(folder.path.resolve())})
    (out / "hf").mkdir()
    for file in folder.path.iterdir():
        if file.is_file() and file.suffix not in NEVER_HELD and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / "hf" / file.name)
    _log.info("%s: imported %s", out, folder.path)


def export_hf(checkpoint_dir: Path, out: Path) -> None:
    """Writes a checkpoint's policy as a Hugging Face folder, in the dtype of the model that the run began with.

    `checkpoint_dir`: RUN/checkpoints/step-N, a run directory (its newest checkpoint), or an imported checkpoint.
    """
    from nemo_prorl.policy.build import build_actor

    _refuse_existing(out)
    folder, source = _find(checkpoint_dir)
    hf = HFFolder(source, need_weights=False)
    actor = build_actor(_one_rank(hf.config), hf.path, with_weights=False).actor
    from nemo_prorl.policy import checkpoint

    checkpoint.load(actor, folder, with_optimizer=False)
    write_hf_folder(out, actor.export_weights(), hf.path, dtype_of(hf.config))
    _log.info("%s: exported %s", out, folder)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists already; name a folder that does not")


def _find(path: Path) -> tuple[Path, Path]:
    """(checkpoint folder, folder with config.json and tokenizer) of what a user names."""
    of_run = complete(path / "checkpoints")
    folder = of_run[-1] if of_run else path
    if not (folder / "state.json").is_file() or folder.suffix in (TEMPORARY, OLD, TRASH):
        raise ConfigError(f"{path} is neither a checkpoint (RUN/checkpoints/step-N) nor a run directory with one")
    if (folder / "hf").is_dir():
        return folder, folder / "hf"
    run_dir = folder.resolve().parent.parent
    cfg = settings.read_config(run_dir / "config.yaml")
    given = cfg.pretrained_checkpoint.restore_from_path
    return folder, Path(given) if given else run_dir / "init"


def _one_rank(hf: dict[str, Any]) -> DictConfig:
    """The laptop's configuration with the model's shape: one rank, float32, no CUDA needed."""
    os.environ |= with_caches({"RANK": "0", **os.environ})
    keys = model_keys_from_hf(hf)
    overrides = [f"model.{key}={str(value).lower()}" for key, value in keys.items()]
    return settings.load(["cluster=laptop", "model.make_vocab_size_divisible_by=128", *overrides])
