"""Download of data sets from the Hugging Face hub, for machines with network access."""

import logging
from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.errors import ConfigError, UnfitMachine

_log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0  # seconds for one reply of the hub


def download(repo: str, patterns: Sequence[str], revision: str | None) -> tuple[Path, str]:
    """Download the matching files of a data set into the hub's cache, unless cached; return (folder, commit).

    Raises ConfigError for a missing or gated data set or revision, UnfitMachine if the hub or its client is missing.
    Each error names the files to download by hand instead.
    """
    by_hand = (
        f"download {' and '.join(patterns)} of https://huggingface.co/datasets/{repo} on a machine with "
        "network access, and use --from FOLDER"
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
        _log.info("downloading data set %s at commit %s from the Hugging Face hub", repo, commit)
        folder = snapshot_download(
            repo, repo_type="dataset", revision=commit, allow_patterns=list(patterns), etag_timeout=_TIMEOUT_S
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"--from hub: {repo} is gated: accept its terms on the hub and set HF_TOKEN, or {by_hand}"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        wanted = f"{repo} at revision {revision}" if revision else repo
        raise ConfigError(f"--from hub: the hub has no data set {wanted}; {by_hand}") from error
    except Exception as error:  # errors of the network, the hub or the disk: in all cases the files are missing
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnfitMachine(f"--from hub: {repo} cannot be fetched ({reason[:200]}): {by_hand}") from error
    return Path(folder), commit
