"""The sandbox of the package `prorl_sandbox`, with this project's error and advice."""

from collections.abc import Sequence

import prorl_sandbox
from prorl_sandbox import NoSandbox, Sandbox

from nemo_prorl.errors import UnfitMachine


def open_sandbox(unsafe: bool = False, packages: Sequence[str] = ()) -> Sandbox:
    """Start and return the strongest sandbox that works on this machine; see `prorl_sandbox.open_sandbox`.

    Raises UnfitMachine if none works, unless `unsafe`.
    """
    try:
        return prorl_sandbox.open_sandbox(unsafe, packages)
    except NoSandbox as error:
        unconfined = "rewards.unsafe_no_sandbox=true: code of the model then has all rights of this user"
        raise UnfitMachine(f"{error}; or {unconfined}") from error
