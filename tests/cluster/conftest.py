"""The emulated Slurm cluster that these tests run on."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.emulated import NoSlurm, Slurm, cluster, provide


def _cannot(error: NoSlurm) -> None:
    """Skips, but fails where a machine tests for us all, so that these tests are never left out unseen."""
    if any(os.environ.get(name, "").lower() not in ("", "0", "false") for name in ("CI", "PRORL_CI")):
        pytest.fail(f"no Slurm cluster: {error}", pytrace=False)
    pytest.skip(f"no Slurm cluster: {error} (docs/tutorial/cluster.md, 'Trying it on one machine')")


def unless_there_is_no_slurm() -> None:
    """Skips, or in CI fails, where no cluster can be had."""
    try:
        provide()
    except NoSlurm as error:
        _cannot(error)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Slurm]:
    """Five nodes, so that a job of four can lose one."""
    try:
        context = cluster(nodes=5)
        slurm = context.__enter__()
    except NoSlurm as error:
        _cannot(error)
    try:
        yield slurm
    finally:
        context.__exit__(None, None, None)


@pytest.fixture
def slurm(slurm_cluster: Slurm) -> Iterator[Slurm]:
    """The cluster with all nodes up and no jobs; afterwards jobs are ended and nodes brought back."""
    yield slurm_cluster
    slurm_cluster.clean_up()
