"""Sandboxes for the tests."""

from collections.abc import Iterator

import pytest
from prorl_sandbox import Sandbox, SandboxFailure
from prorl_sandbox.levels import LEVELS


@pytest.fixture(scope="module", params=LEVELS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A started sandbox of each level that this machine has."""
    sandbox = Sandbox(request.param)
    try:
        sandbox.start()
    except SandboxFailure as error:
        pytest.skip(f"this machine has no such level: {error}")
    yield sandbox
    sandbox.close()
