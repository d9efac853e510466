"""The caller's folders for programs, at levels without a private root."""

import contextlib
import os
import shutil
import tempfile

from prorl_sandbox.processes import started
from prorl_sandbox.zygote import empty_folder

_PREFIX = "prorl-box-"


def make() -> str:
    """Create a folder that belongs to this process, and return its path."""
    sweep()
    prefix = f"{_PREFIX}{os.getpid()}-{started(os.getpid())}-"
    return os.path.realpath(tempfile.mkdtemp(prefix=prefix))  # the path that a program in the folder sees as its own


def sweep() -> None:
    """Remove folders whose owners have ended."""
    for name in os.listdir(tempfile.gettempdir()):
        if not name.startswith(_PREFIX):
            continue
        pid, _, rest = name.removeprefix(_PREFIX).partition("-")
        if not pid.isdigit() or started(int(pid)) != rest.partition("-")[0]:
            remove(os.path.join(tempfile.gettempdir(), name))


def remove(folder: str) -> None:
    """Remove a folder and its contents; raise no error for what cannot be removed."""
    with contextlib.suppress(OSError):
        empty_folder(folder)
    shutil.rmtree(folder, ignore_errors=True)
