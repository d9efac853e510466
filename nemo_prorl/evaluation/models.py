"""What is evaluated: a Hugging Face folder, a checkpoint, a run directory, or a model behind an address.

A checkpoint is exported on the way, as by `prorl export-hf`.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError
from nemo_prorl.lifecycle.retention import complete, step_of

if TYPE_CHECKING:
    from nemo_prorl.evaluation.formats import ModelJson, ModelKind

_log = logging.getLogger(__name__)

_CONFIGS = ("config.json", "generation_config.json")
_OF_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")


@dataclass(frozen=True)
class Model:
    """A model and what identifies it."""

    name: str
    kind: "ModelKind"
    sha256: str  # of weights, config.json and tokenizer; of an endpoint: of address and name
    source: str  # what the user named, as an absolute path or address
    folder: Path | None = None  # Hugging Face folder; None: an endpoint
    weights_sha256: str | None = None
    step: int | None = None
    opens_thought: bool = False  # an endpoint's chat template ends the prompt in `<think>`

    def to_json(self) -> "ModelJson":
        found: ModelJson = {"name": self.name, "kind": self.kind, "sha256": self.sha256}
        if self.kind == "endpoint":
            found["url"] = self.source
        else:
            found["folder"] = self.source
        if self.weights_sha256 is not None:
            found["weights_sha256"] = self.weights_sha256
        if self.step is not None:
            found["step"] = self.step
        if self.opens_thought:
            found["opens_thought"] = True
        return found


def is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def behind_address(url: str, name: str | None, opens_thought: bool = False) -> Model:
    """A model that an OpenAI-compatible server has; raises ConfigError without its name."""
    if not name:
        raise ConfigError(f"{url}: --model NAME is missing: the name under which the server has the model")
    url = url.rstrip("/")
    identity = [url, name, *(["opens-thought"] if opens_thought else [])]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Model(name, "endpoint", digest, url, opens_thought=opens_thought)


def find(path: Path, which: str) -> tuple["ModelKind", Path]:
    """(kind, folder): a Hugging Face folder, or a checkpoint, of a run directory the one that `which` says.

    `which`: newest, best (by validation) or a step.  Raises ConfigError.
    """
    if checkpoints := complete(path / "checkpoints"):
        return "run", _chosen(checkpoints, which)
    if (path / "state.json").is_file():
        return "checkpoint", path
    if (path / "config.json").is_file():
        return "hf", path
    raise ConfigError(
        f"{path}: no model: it must be a Hugging Face folder (config.json), a checkpoint (RUN/checkpoints/step-N), a"
        " run directory with one, or an address (http://...)"
    )


def _chosen(checkpoints: list[Path], which: str) -> Path:
    if which == "newest":
        return checkpoints[-1]
    by_step = {step_of(folder): folder for folder in checkpoints}
    listed = ", ".join(map(str, sorted(by_step)))
    if which == "best":
        validations = json.loads((checkpoints[-1] / "state.json").read_text())["validations"]
        scores = {int(step): value["all"]["mean"] for step, value in dict(validations).items()}
        judged = [(scores[step], step) for step in by_step if step in scores]
        if not judged:
            raise ConfigError(f"--checkpoint best: none of {listed} was validated; name a step, or newest")
        return by_step[max(judged)[1]]
    if not which.isdigit() or int(which) not in by_step:
        raise ConfigError(f"--checkpoint {which}: must be newest, best or one of {listed}")
    return by_step[int(which)]


def open_model(path: Path, out: Path, which: str) -> Model:
    """The model with its Hugging Face folder, exported into `out`/model where it is a checkpoint."""
    kind, folder = find(path, which)
    step = None
    if kind != "hf":
        step = json.loads((folder / "state.json").read_text())["step"]
        folder = _exported(folder, out / "model")
    weights = weights_sha256(folder)
    source = path.resolve()
    return Model(source.name, kind, _identity(folder, weights), str(source), folder, weights, step)


def forget_export(out: Path) -> None:
    """The export is made anew where it is needed again."""
    shutil.rmtree(out / "model", ignore_errors=True)


def _exported(checkpoint: Path, into: Path) -> Path:
    """`into`/NAME with the checkpoint's weights; what a killed process finished there is used again."""
    state = (checkpoint / "state.json").read_bytes()
    folder = into / f"{checkpoint.name}-{hashlib.sha256(state).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    from nemo_prorl.policy.tools import export_hf  # torch is slow to import, and an endpoint needs none

    into.mkdir(parents=True, exist_ok=True)
    _log.info("%s: exporting it as a Hugging Face folder", checkpoint)
    export_hf(checkpoint.resolve(), folder)
    return folder


def weights_sha256(folder: Path) -> str:
    """Over the tensors as float32 in name order, as a run's summary.json has it."""
    from safetensors import safe_open

    from nemo_prorl.policy.weights import Digests

    digests, files = Digests(), sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: holds no weights (*.safetensors)")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                digests.add(name, opened.get_tensor(name))
    return digests.sha256()


def _identity(folder: Path, weights: str) -> str:
    digest = hashlib.sha256(weights.encode())
    for file in sorted(folder.iterdir()):
        if file.is_file() and (file.name in _CONFIGS or file.name.startswith(_OF_TOKENIZER)):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def stop_tokens(folder: Path) -> set[int]:
    """The eos tokens that config.json and generation_config.json name."""
    found: set[int] = set()
    for name in _CONFIGS:
        if (folder / name).is_file():
            eos = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return found


def longest_context(folder: Path) -> int | None:
    """The positions that the model has; None where its config.json does not say."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("max_position_embeddings")
