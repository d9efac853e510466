"""Data sets and models of the Hugging Face hub, for machines with network access."""

import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.files import first_line

_log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0  # seconds for one reply of the hub
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = "*.safetensors"
_OF_MODEL = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer


def by_hand(repo: str, patterns: Sequence[str], revision: str | None, folder: str) -> str:
    """Return the command that downloads the matching files of a data set into `folder`."""
    words = ["hf", "download", repo, "--repo-type", "dataset", *(["--revision", revision] if revision else [])]
    return shlex.join([*words, "--include", *patterns, "--local-dir", folder])


def download(repo: str, patterns: Sequence[str], revision: str | None, to: str, goes_on: str) -> tuple[Path, str]:
    """Download the matching files of a data set into the hub's cache, unless cached; return (folder, commit).

    Each error names the command that downloads them on another machine instead.

    Args:
        to: name of the folder for files that are downloaded by hand.
        goes_on: the command that continues with this folder.

    Raises:
        ConfigError: the data set is gated, or the hub does not have the data set or the revision.
        UnfitMachine: the hub cannot be reached, or the package huggingface_hub is not installed.
    """
    instead = (
        f"on a machine with network access run `{by_hand(repo, patterns, revision, to)}`, copy FOLDER here, and"
        f" continue with `{goes_on}`"
    )
    folder, commit = _fetched(
        "dataset", repo, patterns=patterns, revision=revision, option="--from hub", instead=instead
    )
    if absent := [name for name in patterns if "*" not in name and not (folder / name).is_file()]:
        raise UnfitMachine(f"--from hub: {repo} at {commit} lacks {', '.join(absent)} in {folder}. Fix: {instead}")
    return folder, commit


def model_folder(text: str, option: str, weights: bool) -> Path:
    """Return the folder of a model, given as a path or as a name on the hub.

    A path is returned without a check; `~` at its beginning is the home folder.  A model on the hub is downloaded into
    the hub's cache, unless cached.  A name without a revision means the cached files if there are any, otherwise the
    newest revision.

    Args:
        text: path of a folder, or NAMESPACE/NAME or NAMESPACE/NAME@REVISION on the hub.  If the parent folder of
            `text` exists, `text` is a path.
        option: the key or argument that has this value, for error messages.
        weights: the weights are needed; False: config.json and tokenizer are enough.

    Raises:
        ConfigError: the model is gated, or the hub does not have the model or the revision.
        UnfitMachine: the model is not cached, and the hub cannot be reached or huggingface_hub is not installed.
    """
    if text.startswith("~"):
        return Path(os.path.expanduser(text))
    if Path(text).parent.exists() or not (match := _NAME.fullmatch(text)):
        return Path(text)
    repo, revision = match["repo"], match["revision"]
    patterns = (*_OF_MODEL, *([_WEIGHTS] if weights else []))
    instead = (
        f"if {text} is a folder, correct its path; otherwise download {', '.join(patterns)} of"
        f" https://huggingface.co/{repo} on a machine with network access, and name the folder"
    )
    if (cached := _cached(repo, revision)) is not None and (not weights or _has_weights(cached)):
        return cached
    return _fetched("model", repo, patterns=patterns, revision=revision, option=f"{option}={text}", instead=instead)[0]


def _cached(repo: str, revision: str | None) -> Path | None:
    """Return the folder of a model in the hub's cache; None if it does not exist or lacks config.json."""
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # no client, or no such files: `_fetched` reports both
        return None
    return folder if (folder / "config.json").is_file() else None


def _has_weights(folder: Path) -> bool:
    """Return whether the folder has all safetensors files of its index; without an index, any such file suffices."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob(_WEIGHTS))
    return all((folder / name).is_file() for name in set(json.loads(index.read_text())["weight_map"].values()))


def will_be_completed(folder: Path) -> bool:
    """Return whether a model folder is one of the hub's cache, to which a start downloads what is missing."""
    return folder.parent.name == "snapshots" and not _has_weights(folder)


def _fetched(
    kind: str, repo: str, patterns: Sequence[str], revision: str | None, option: str, instead: str
) -> tuple[Path, str]:
    """Download the matching files of a `dataset` or `model` into the hub's cache; return (folder, commit)."""
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise UnfitMachine(f"{option} needs the package huggingface_hub ({error}): install it, or {instead}") from error
    constants.HF_HUB_DOWNLOAD_TIMEOUT = int(_TIMEOUT_S)
    named = "data set" if kind == "dataset" else kind
    info: Callable[..., Any] = getattr(HfApi(), f"{kind}_info")
    try:
        # A data set's commit needs no question to the hub: cached files are found without network access, too.
        known = kind == "dataset" and revision is not None and _COMMIT.fullmatch(revision) is not None
        commit = revision if known else info(repo, revision=revision, timeout=_TIMEOUT_S).sha
        _log.info("downloading %s %s at commit %s from the Hugging Face hub", named, repo, commit)
        folder = snapshot_download(
            repo, repo_type=kind, revision=commit, allow_patterns=list(patterns), etag_timeout=_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{option}: {repo} is gated: accept its terms on the hub and set HF_TOKEN, or {instead}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        wanted = f"{repo} at revision {revision}" if revision else repo
        raise ConfigError(f"{option}: the hub has no {named} {wanted}; {instead}") from error
    except Exception as error:  # errors of the network, the hub or the disk: in all cases the files are missing
        raise UnfitMachine(f"{option}: {repo} cannot be fetched. Fix: {instead}. Cause: {_reason(error)}") from error
    return Path(folder), Path(folder).name


def _reason(error: BaseException) -> str:
    """Return the cause of an error in a few words: for a lost connection its kind, otherwise the first line, cut."""
    if "Connect" in (kind := type(error).__name__):
        return f"no connection to the hub ({kind})"
    line = first_line(error)
    return line if len(line) <= 200 else f"{line[:200].rpartition(' ')[0] or line[:200]} ..."
