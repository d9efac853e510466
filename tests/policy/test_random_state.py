"""Random states in a checkpoint: the same numbers come after they are loaded, and a pickle is refused."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_prorl.errors import CheckpointError, DamagedCheckpoint
from nemo_prorl.policy.plain_files import check_metadata, check_objects, load_plain
from nemo_prorl.policy.random_state import random_state, set_random_state
from nemo_prorl.policy.tools import export_hf, import_hf
from tests.policy.models import QWEN2, write_model

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(300)]
# NeMo is imported inside the tests: a worker that only collects them saves five seconds.


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


def test_a_truncated_file_of_a_checkpoint_is_named_with_the_fix(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, tmp_path / "whole.pt")
    whole, file = (tmp_path / "whole.pt").read_bytes(), tmp_path / "rng-0.pt"
    for content in (b"", whole[: len(whole) // 2], whole[:-1], b"no file of torch"):
        file.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"rng-0\.pt (cannot be read.* Fix: mv .*|was refused.* Continue from a checkpoint)"
        ):
            load_plain(file)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rng-0\.pt cannot be read"):
        load_plain(file)


def test_metadata_that_would_run_code_is_refused_before_torch_reads_it(tmp_path: Path) -> None:
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    write_model(tmp_path / "model", QWEN2, torch.float32)
    import_hf(tmp_path / "model", tmp_path / "imported")
    (file,) = tmp_path.glob("imported/**/.metadata")
    check_metadata(file.parent)
    good = file.read_bytes()
    file.write_bytes(pickle.dumps(RunsCode(tmp_path / "witness")))
    with pytest.raises(CheckpointError, match=r"\.metadata was refused: expected torch's metadata"):
        export_hf(tmp_path / "imported", tmp_path / "exported")
    for load in (CheckpointFiles.load, CheckpointFiles.load_policy):
        with pytest.raises(CheckpointError, match=r"\.metadata was refused"):
            load(object.__new__(CheckpointFiles), file.parent)
    for content in (b"", good[: len(good) // 2]):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
            check_metadata(file.parent)
    file.write_bytes(good)
    torch.save(RunsCode(tmp_path / "witness"), file.parent / "common.pt")
    for load in (CheckpointFiles.load, CheckpointFiles.load_policy):
        with pytest.raises(CheckpointError, match=r"common\.pt was refused"):
            load(object.__new__(CheckpointFiles), file.parent)
    assert not (tmp_path / "witness").exists()


def test_an_object_that_would_run_code_is_refused_before_megatron_reads_it(tmp_path: Path) -> None:
    """Megatron unpickles what `.metadata` calls an object, even where the model expects a tensor."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    write_model(tmp_path / "model", QWEN2, torch.float32)
    import_hf(tmp_path / "model", tmp_path / "imported")
    (file,) = tmp_path.glob("imported/**/.metadata")
    metadata, folder = check_metadata(file.parent), file.parent
    index, content = next(iter(metadata.storage_data)), io.BytesIO()
    metadata.state_dict_metadata[index.fqn] = BytesStorageMetadata()
    torch.save(torch.arange(9, dtype=torch.uint8), content)
    torch.save(RunsCode(tmp_path / "witness"), object_ := io.BytesIO())
    (folder / "objects.distcp").write_bytes(content.getvalue() + object_.getvalue())
    for offset, length in ((0, content.tell()), (content.tell(), object_.tell()), (5, 3)):
        metadata.storage_data[index] = _StorageInfo("objects.distcp", offset, length)
        file.write_bytes(pickle.dumps(metadata))
        if offset == 0:
            check_objects(folder)
            continue
        words = rf"objects\.distcp was refused: expected {index.fqn} to be tensors" if offset > 5 else "objects.distcp"
        for load in (CheckpointFiles.load, CheckpointFiles.load_policy):
            with pytest.raises(CheckpointError, match=words):
                load(object.__new__(CheckpointFiles), folder)
    assert not (tmp_path / "witness").exists()
    (folder / "objects.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"objects\.distcp cannot be read"):
        check_objects(folder)


def test_random_states_that_a_resume_would_refuse_are_refused_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.policy import checkpoint_files

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    bad: Any = RunsCode(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"rng-1\.pt was refused"):
        checkpoint_files._Snapshot({}, {}, bad, {}, {}, [], "").write_rest(tmp_path)
    assert not (tmp_path / "run").exists()


def test_what_a_resume_would_refuse_is_refused_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.policy import checkpoint_files

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    state = random_state()
    for common, written in (({"optimizer": {"lr": 1.0}}, True), ({"optimizer": RunsCode(tmp_path / "run")}, False)):
        snapshot = checkpoint_files._Snapshot({}, common, state, {"step": 1}, {}, [("w", torch.zeros(2))], "0" * 64)
        folder = tmp_path / str(written)
        folder.mkdir()
        if written:
            snapshot.write_rest(folder)
            continue
        with pytest.raises(CheckpointError, match=r"common\.pt was refused"):
            snapshot.write_rest(folder)
        assert not (folder / "state.json").exists()
    assert not (tmp_path / "run").exists()


def test_metadata_that_a_resume_would_refuse_is_refused_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_prorl.policy import checkpoint_files

    def save(*_: Any, **__: Any) -> None:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "run")))

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint_files, "torch_distributed_save", save)
    monkeypatch.setattr(checkpoint_files, "FileSystemWriter", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=r"\.metadata was refused"):
        checkpoint_files._Snapshot({}, {}, random_state(), {}, {}, [], "").write_tensors(tmp_path, None)
    assert not (tmp_path / "run").exists()


def test_the_state_of_the_ranks_own_gpu_is_saved_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[list[torch.Tensor], int]] = []
    monkeypatch.setattr("nemo_prorl.device.random_states", lambda: [torch.tensor([7], dtype=torch.uint8)])
    monkeypatch.setattr("nemo_prorl.device.set_random_states", lambda states, rank: taken.append((states, rank)))
    state = random_state()
    set_random_state(state, rank=5)
    assert taken == [(state["cuda"], 5)]
    assert state["cuda"][0].item() == 7
