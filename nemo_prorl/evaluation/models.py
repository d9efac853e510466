"""The model to evaluate: a Hugging Face folder, a checkpoint, a run directory, or a model on a server.

A checkpoint is first exported to a Hugging Face folder, as by `prorl export-hf`.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import read_object
from nemo_prorl.lifecycle.retention import complete, read_state
from nemo_prorl.lifecycle.stages import chosen_checkpoint

if TYPE_CHECKING:
    from nemo_prorl.evaluation.formats import ModelJson, ModelKind

_log = logging.getLogger(__name__)

_CONFIGS = ("config.json", "generation_config.json")
_OF_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")


@dataclass(frozen=True)
class Model:
    """A model to evaluate.  `about`: its entry in manifest.json; `folder`: in Hugging Face format, None on a server."""

    about: "ModelJson"
    folder: Path | None = None


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def on_server(url: str, name: str | None, opens_thought: bool = False) -> Model:
    """Return the model `name` of an OpenAI-compatible server.  Raises ConfigError if the name is missing."""
    if not name:
        raise ConfigError(f"{url}: --model NAME is missing: give the name that the server uses for the model")
    url = url.rstrip("/")
    identity = [url, name, *(["opens-thought"] if opens_thought else [])]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    about: ModelJson = {"name": name, "kind": "endpoint", "sha256": digest, "url": url}
    if opens_thought:
        about["opens_thought"] = True
    return Model(about)


def find(path: Path, which: str) -> tuple["ModelKind", Path]:
    """Return the kind of the model at `path` and its folder; for a run directory, the folder of its checkpoint.

    Args:
        path: Hugging Face folder, checkpoint or run directory.
        which: Checkpoint of a run directory, as in `chosen_checkpoint`.

    Raises:
        ConfigError: `path` is none of these, or the run directory does not have the checkpoint.
    """
    if complete(path / "checkpoints"):
        return "run", chosen_checkpoint(path, which)
    kind: ModelKind
    if (path / "state.json").is_file():
        kind = "checkpoint"
    elif (path / "config.json").is_file():
        kind = "hf"
    else:
        raise ConfigError(
            f"{path}: expected a model: a Hugging Face folder (config.json), a checkpoint (RUN/checkpoints/step-N), a"
            " run directory with a checkpoint, or a URL (http://...)"
        )
    if which != "newest":
        raise ConfigError(f"--checkpoint={which}: expected a run directory as MODEL; got {path}. Fix: leave it out")
    return kind, path


def draft(path: Path, out: Path, which: str) -> Model:
    """Return the model before an export, so that a folder `out` with another evaluation is refused first.

    Its entry is that of the evaluation in `out`, but without a sha256 if a checkpoint is surely another model.
    """
    kind, folder = find(path, which)
    unknown: ModelJson = {"name": path.resolve().name, "kind": kind, "sha256": ""}
    about: ModelJson = (read_object(out / "manifest.json") or {}).get("model", unknown)
    if kind == "hf":
        return Model(about, folder)
    import torch

    from nemo_prorl.policy.tools import engine_dtype, find_checkpoint

    state, (_, files) = read_state(folder), find_checkpoint(folder, "newest")
    is_other = about["kind"] == "endpoint" or about.get("step", state["step"]) != state["step"]
    if engine_dtype(folder) == torch.float32:  # then the export has the weights that state.json names
        is_other = is_other or about.get("weights_sha256") != state["weights_sha256"]
    return Model(unknown if is_other else about, files)


def open_model(path: Path, out: Path, which: str) -> Model:
    """Return the model with its Hugging Face folder.  A checkpoint is exported into `out`/model."""
    from nemo_prorl.policy.weights import HFFolder, sha256_of  # torch is slow to import

    kind, source = find(path, which)
    folder = source if kind == "hf" else exported(source, out / "model")
    weights = sha256_of(HFFolder(folder).tensors())
    about: ModelJson = {"name": path.resolve().name, "kind": kind, "sha256": _identity(folder, weights)}
    about |= {"folder": str(path.resolve()), "weights_sha256": weights}
    if kind != "hf":
        about["step"] = read_state(source)["step"]
    return Model(about, folder)


def remove_export(out: Path) -> None:
    """Remove the exported model from the evaluation's folder."""
    shutil.rmtree(out / "model", ignore_errors=True)


def exported(checkpoint: Path, into: Path) -> Path:
    """Export the checkpoint into a folder under `into`, or reuse a complete export of the same checkpoint."""
    state = (checkpoint / "state.json").read_bytes()
    folder = into / f"{checkpoint.name}-{hashlib.sha256(state).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    from nemo_prorl.policy.tools import export_hf  # torch is slow to import, and endpoints do not need it

    into.mkdir(parents=True, exist_ok=True)
    _log.info("%s: exporting it as a Hugging Face folder", checkpoint)
    export_hf(checkpoint.resolve(), folder)
    return folder


def _identity(folder: Path, weights: str) -> str:
    digest = hashlib.sha256(weights.encode())
    for file in sorted(folder.iterdir()):
        if file.is_file() and (file.name in _CONFIGS or file.name.startswith(_OF_TOKENIZER)):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def stop_tokens(folder: Path) -> set[int]:
    """Return the ids of the eos tokens in config.json and generation_config.json."""
    ids: set[int] = set()
    for name in _CONFIGS:
        eos = (read_object(folder / name) or {}).get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return ids


def longest_context(folder: Path) -> int | None:
    """Return the model's maximum context in tokens, or None if its config.json does not have it."""
    return (read_object(folder / "config.json") or {}).get("max_position_embeddings")
