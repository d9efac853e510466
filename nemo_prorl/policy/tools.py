"""Conversion between Hugging Face folders and checkpoints of this project: `prorl import-hf`, `prorl export-hf`.

An imported checkpoint is a checkpoint folder (see `checkpoint_files.py`) with weights only, and with the model's
config.json and tokenizer in `hf/`.  It can be loaded at any tensor, pipeline and data parallel size.  No model is
built, so both commands run on a machine without GPUs, NeMo and Megatron.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nemo_prorl import settings
from nemo_prorl.data.model_folder import model_fault
from nemo_prorl.errors import ConfigError, DamagedCheckpoint
from nemo_prorl.files import TEMPORARY, new_folder, write_json
from nemo_prorl.lifecycle.checkpoints import ImportedState
from nemo_prorl.lifecycle.retention import FORMAT, OLD, TRASH, complete, read_state
from nemo_prorl.lifecycle.stages import chosen_checkpoint
from nemo_prorl.policy.import_export import read_policy, write_policy
from nemo_prorl.policy.weights import Digests, HFFolder, copy_without_weights, dtype_of, write_hf_folder

_log = logging.getLogger(__name__)


def import_hf(hf_dir: Path, out: Path) -> None:
    """Write a Hugging Face model as a checkpoint to the new folder `out`.

    Raises ConfigError: `hf_dir` is not a model folder, lacks weights or tokenizer or holds an unsupported model, or
    `out` exists.
    """
    _refuse_existing(out)
    folder = HFFolder(hf_dir)
    if fault := model_fault(folder.path):
        raise ConfigError(fault)  # a run would refuse it
    with new_folder(out) as temporary:
        write_policy(temporary, folder, dtype_of(folder.config))
        copy_without_weights(folder.path, temporary / "hf")
        digests = Digests()
        for name, tensor in read_policy(temporary, folder.config):
            digests.add(name, tensor)
        sha256 = digests.sha256()
        state: ImportedState = {
            "format": FORMAT,
            "weights_sha256": sha256,
            "reference_sha256": sha256,
            "step": 0,
            "imported_from": str(folder.path.resolve()),
        }
        write_json(temporary / "state.json", state)
    _log.info("%s: wrote a checkpoint with the weights of %s", out, folder.path)


def export_hf(checkpoint_dir: Path, out: Path, which: str = "newest") -> None:
    """Write a checkpoint's policy as a new Hugging Face folder, in the dtype in which the run's engines generated.

    It is then the policy that was trained and validated.  An imported checkpoint has the dtype of its model.

    Args:
        checkpoint_dir: RUN/checkpoints/step-N, an imported checkpoint, or a run directory.
        which: checkpoint of a run directory, as in `chosen_checkpoint`.

    Raises:
        CheckpointError: the checkpoint is damaged, or the sha256 of its policy differs from state.json.
        ConfigError: `checkpoint_dir` is not a checkpoint, or `out` exists.
    """
    _refuse_existing(out)
    folder, source = find_checkpoint(checkpoint_dir, which)
    hf = HFFolder(source, need_weights=False)
    write_hf_folder(out, _policy(folder, hf), hf.path, engine_dtype(folder) or dtype_of(hf.config))
    _log.info("%s: wrote a Hugging Face folder with the policy of %s", out, folder)


def _policy(folder: Path, hf: HFFolder) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a checkpoint's policy; raise CheckpointError at the end if the sha256 is wrong."""
    state, digests = read_state(folder), Digests()
    for name, tensor in read_policy(folder, hf.config):
        digests.add(name, tensor)
        yield name, tensor
    if digests.sha256() != state["weights_sha256"]:
        raise DamagedCheckpoint(
            folder,
            f"{folder}/state.json: weights_sha256={state['weights_sha256']}: the weights in the checkpoint have sha256"
            f" {digests.sha256()}, so they were changed after the save",
        )


def engine_dtype(folder: Path) -> torch.dtype | None:
    """Return `rollout.dtype` of the run that wrote a checkpoint; None outside of a run."""
    config = folder.resolve().parent.parent / "config.yaml"
    if (folder / "hf").is_dir() or not config.is_file():
        return None
    return getattr(torch, str(settings.read_config(config).rollout.dtype), None)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out}: expected a folder that does not exist; it exists")


def find_checkpoint(path: Path, which: str) -> tuple[Path, Path]:
    """Return (checkpoint folder, folder with config.json and tokenizer) for a checkpoint or run directory."""
    is_run = bool(complete(path / "checkpoints"))
    folder = chosen_checkpoint(path, which) if is_run else path
    if not (folder / "state.json").is_file() or folder.suffix in (TEMPORARY, OLD, TRASH):
        raise ConfigError(
            f"{path}: expected a checkpoint (RUN/checkpoints/step-N) or a run directory with a checkpoint"
        )
    if which != "newest" and not is_run:
        raise ConfigError(f"--checkpoint={which}: expected a run directory; got {path}. Fix: leave it out")
    if (folder / "hf").is_dir():
        return folder, folder / "hf"
    run_dir = folder.resolve().parent.parent
    cfg = settings.read_config(run_dir / "config.yaml")
    model = cfg.pretrained_checkpoint.restore_from_path
    source = Path(model) if model else run_dir / "init"
    if (source / "config.json").is_file():
        return folder, source
    if (run_dir / "base" / "config.json").is_file():  # made by a warm-up
        return folder, run_dir / "base"
    raise ConfigError(
        f"{folder}: its config.json and tokenizer are those of {source.absolute()}, from which its run began, and which"
        f" is not a model folder any more. Fix: move the folder back, or a link: ln -s FOLDER {source.absolute()}"
        + ("" if source.is_absolute() else f"; or run the command where the run was started, which names it {model}")
    )
