"""Data sets from the Hugging Face hub, for machines with a network."""

import logging
from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.errors import ConfigError, UnfitMachine

_log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0  # of one answer of the hub


def download(repo: str, patterns: Sequence[str], revision: str | None) -> tuple[Path, str]:
    """(folder, commit) with the files of a data set that match; what is in the hub's cache is not fetched again.

    Raises ConfigError for a data set or revision that is not there or not open, UnfitMachine where the hub cannot be
    reached or its client is missing; each says what to download by hand instead.
    """
    by_hand = (
        f"download {' and '.join(patterns)} of https://huggingface.co/datasets/{repo} where there is a network, "
        "and say --from FOLDER"
    )
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise UnfitMachine(
            f"--from hub needs the package huggingface_hub ({error}): install it, or {by_hand}"
        ) from error
    constants.HF_HUB_DOWNLOAD_TIMEOUT = int(_TIMEOUT_S)
    try:
        commit = HfApi().dataset_info(repo, revision=revision, timeout=_TIMEOUT_S).sha or ""
        _log.info("data set %s of the Hugging Face hub, commit %s", repo, commit)
        folder = snapshot_download(
            repo, repo_type="dataset", revision=commit, allow_patterns=list(patterns), etag_timeout=_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"--from hub: {repo} is gated: accept its terms on the hub and set HF_TOKEN, or {by_hand}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        asked = f"{repo} at revision {revision}" if revision else repo
        raise ConfigError(f"--from hub: the hub has no data set {asked}; {by_hand}") from error
    except Exception as error:  # requests', the hub's own, the disk's: all mean that there are no files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnfitMachine(f"--from hub: {repo} cannot be fetched ({reason[:200]}): {by_hand}") from error
    return Path(folder), commit
