"""The folder of all caches of this project and of its libraries."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from nemo_prorl.errors import UnfitMachine

FOLDER = "PRORL_CACHE"  # the environment variable that names the folder of all caches


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of all caches, PRORL_CACHE or /tmp/prorl-UID; make it if it does not exist.

    Raises:
        UnfitMachine: the folder cannot be made or written, or another user could put compiled code into it.
    """
    path = environ.get(FOLDER)
    folder = Path(path).absolute() if path else Path(f"/tmp/prorl-{os.getuid()}")
    fix = f"Fix: set {FOLDER} to a folder of yours that can be written."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnfitMachine(f"{FOLDER}={folder}: expected a folder for caches; got {error.strerror}. {fix}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UnfitMachine(f"{FOLDER}={folder}: expected a folder for caches; it cannot be written. {fix}")
    status = folder.lstat()
    if not path and (status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022):
        raise UnfitMachine(
            f"{folder}: expected a folder that only user {os.getuid()} can write; other users can write it. {fix}"
        )
    return folder
