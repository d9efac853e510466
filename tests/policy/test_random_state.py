"""Random states in a checkpoint: the same numbers come after they are loaded, and a pickle is refused."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_prorl.errors import CheckpointError
from nemo_prorl.policy.random_state import load_plain, random_state, set_random_state

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(300)]


def drawn() -> list[Any]:
    """Return numbers of every generator, Gaussians too, which come in pairs of which one is kept."""
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(64)),
        *(np.random.rand(), np.random.randn(), int(np.random.randint(1 << 30))),
        *(torch.rand(3).tolist(), torch.randn(3).tolist()),
    ]


def test_what_is_drawn_after_a_load_is_equal_to_the_bit(tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    drawn()  # now a Gaussian is kept in Python's and in NumPy's generator
    tracked = {"data-parallel-rng": torch.get_rng_state()}
    get_cuda_rng_tracker().set_states(dict(tracked))
    file = tmp_path / "rng-0.pt"
    torch.save(random_state(), file)
    wanted = [drawn() for _ in range(400)]  # past the end of a block of the Mersenne Twister's words
    get_cuda_rng_tracker().set_states({})
    set_random_state(load_plain(file))
    assert [drawn() for _ in range(400)] == wanted
    states = get_cuda_rng_tracker().get_states()
    assert states.keys() == tracked.keys()
    assert torch.equal(states["data-parallel-rng"], tracked["data-parallel-rng"])


class RunsCode:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    for content in (RunsCode(tmp_path / "witness"), {"python": RunsCode(tmp_path / "witness")}, random.Random(1)):
        torch.save(content, tmp_path / "rng-0.pt")
        with pytest.raises(CheckpointError, match=r"rng-0\.pt was refused: expected tensors and plain values"):
            load_plain(tmp_path / "rng-0.pt")
    assert not (tmp_path / "witness").exists()


def test_what_a_resume_would_refuse_is_refused_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.policy import checkpoint_files

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    state = random_state()
    for common, written in (({"optimizer": {"lr": 1.0}}, True), ({"optimizer": RunsCode(tmp_path / "run")}, False)):
        snapshot = checkpoint_files._Snapshot({}, common, state, {"step": 1}, [("w", torch.zeros(2))], "0" * 64)
        folder = tmp_path / str(written)
        folder.mkdir()
        if written:
            snapshot.write_rest(folder)
            continue
        with pytest.raises(CheckpointError, match=r"common\.pt was refused"):
            snapshot.write_rest(folder)
        assert not (folder / "state.json").exists()
    assert not (tmp_path / "run").exists()
