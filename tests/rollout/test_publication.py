"""Published weight files: bits kept, complete or absent, nothing foreign touched."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.rollout.engine.weight_load import read_header
from nemo_prorl.rollout.weight_store import MARKER, WeightStore, weights_folder

TENSORS = {
    "model.a": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
    "model.b": torch.randn(11, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "model.c": torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).t(),  # not contiguous
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
}


def test_a_written_file_holds_the_same_bits(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    for version in (1, 2):
        path = store.write(TENSORS.items(), version)
        loaded = load_file(path)
        assert loaded.keys() == TENSORS.keys() == read_header(str(path)).keys()
        for name, tensor in TENSORS.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)


def test_a_header_that_outgrows_its_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.rollout.weight_store._HEADER_BYTES", 64)
    store = WeightStore(tmp_path / "w")
    with pytest.raises(ValueError, match=r"header of 5 tensors has \d+ bytes; the maximum is 64"):
        store.write(TENSORS.items(), 1)
    assert store.versions() == []


def test_only_the_latest_two_versions_stay(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    for version in range(1, 6):
        store.write(TENSORS.items(), version)
        assert store.versions() == [v for v in (version - 1, version) if v > 0]
    store.write(TENSORS.items(), 5)  # the same again, as after a resume
    assert store.versions() == [4, 5]


def test_a_write_that_breaks_off_leaves_the_version_before(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    store.write(TENSORS.items(), 1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "model.a", TENSORS["model.a"]
        assert store.versions() == [1]  # what is being written is no version yet
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        store.write(broken(), 2)
    assert sorted(p.name for p in store.folder.iterdir()) == [MARKER, "weights-00000001.safetensors"]


def test_no_room_is_said_with_its_fix(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")

    def too_many() -> Iterator[tuple[str, Tensor]]:
        yield "model.a", TENSORS["model.a"]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UnfitMachine, match=r"version 1 cannot be written: .*No space left .*enlarge the shared memory"):
        store.write(too_many(), 1)
    assert [p.name for p in store.folder.iterdir()] == [MARKER]


def test_a_next_start_removes_our_stale_files_and_keeps_foreign_ones(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    path = WeightStore(folder).write(TENSORS.items(), 3)
    unfinished = folder / f"{path.name}.4711.tmp"
    unfinished.write_bytes(b"half")
    target = tmp_path / "precious"
    target.write_text("kept")
    foreign = [
        folder / name for name in ("weights.safetensors", "weights-3.txt", "psm_123", "x-weights-00000001.safetensors")
    ]
    for file in foreign:
        file.write_text("kept")
    (folder / "weights-00000009.safetensors").symlink_to(target)
    (folder / "weights-00000008.safetensors").mkdir()
    store = WeightStore(folder)
    assert sorted(store.remove_stale()) == sorted([path, unfinished])
    assert all(file.read_text() == "kept" for file in [*foreign, target])
    assert (folder / "weights-00000009.safetensors").is_symlink()
    assert (folder / "weights-00000008.safetensors").is_dir()
    store.remove()
    assert folder.exists()  # somebody else's files are in it


def test_the_folder_is_private_from_the_first_moment_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", lambda path, mode: None)
        WeightStore(tmp_path / "w")
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o700
    store = WeightStore(tmp_path / "w")
    store.folder.chmod(0o755)  # as an earlier run may have left it
    WeightStore(tmp_path / "w")
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.write(TENSORS.items(), 1)
    store.remove()
    assert not store.folder.exists()


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "weights-00000001.safetensors").write_text("kept")
    with pytest.raises(ConfigError, match="contains files but no"):
        WeightStore(tmp_path / "full")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="expected a folder of this user"):
        WeightStore(tmp_path / "link")
    assert (tmp_path / "full" / "weights-00000001.safetensors").read_text() == "kept"


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert weights_folder(tmp_path / "a") == weights_folder(tmp_path / "b") != weights_folder(tmp_path / "c")
    assert weights_folder(tmp_path).parent == Path("/dev/shm")
    assert re.fullmatch(rf"prorl-{os.getuid()}-[0-9a-f]{{16}}", weights_folder(tmp_path).name)


def test_a_tensor_of_no_known_dtype_or_given_twice_is_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "w")
    for tensors, fault in (
        ([("a", torch.zeros(2, dtype=torch.int8))], "expected a float dtype; got torch.int8"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "given twice"),
    ):
        with pytest.raises(ValueError, match=f"tensor a: {fault}"):
            store.write(tensors, 1)
    assert store.versions() == []
