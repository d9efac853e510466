"""Weight publication: versioned safetensors files in shared memory.  A file gets its final name once complete.

`rollout.rollouts` writes them, and the engines of the node load them (`rollout.engine.weight_load`).

There is one folder per run and user on a node, with a marker file.  Only files named like published weights, in a
folder with that marker, are ever deleted.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nemo_prorl.errors import ConfigError, UnfitMachine
from nemo_prorl.files import new_file
from nemo_prorl.rollout.checksums import Checksum, published, to_metadata

_log = logging.getLogger(__name__)

MARKER = ".prorl-weights"
_OURS = re.compile(r"weights-\d{8,}\.safetensors(\.\d+\.tmp)?")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_HEADER_BYTES = 1 << 22  # bytes reserved for the header: enough for 8,000 tensors


def weights_folder(run_dir: str | Path, node: int | None = None) -> Path:
    """Return the folder of a run's published weights, which differs for every user and run directory.

    Args:
        node: number of the node, None for a run on one node.  The number is part of the folder's name, because several
            nodes of a run may be on one machine, for example in a test.
    """
    real = os.path.realpath(run_dir)
    digest = hashlib.blake2b(real.encode(), digest_size=8).hexdigest()
    return Path("/dev/shm") / f"prorl-{os.getuid()}-{digest}{'' if node is None else f'-{node}'}"


class WeightStore:
    """The published weights of one run on one node.  At most two versions exist at a time."""

    def __init__(self, folder: str | Path, dtype: str | None = None) -> None:
        """Create the folder, mode 0700, with its marker.

        Args:
            dtype: dtype of the engines, such as "bfloat16", in which checksums are computed; None: as published.

        Raises ConfigError if the folder belongs to another user, is a link, or contains files but no marker.
        """
        self.folder = Path(folder)
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._claim()

    def _claim(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        status = self.folder.lstat()
        if self.folder.is_symlink() or status.st_uid != os.getuid():
            raise ConfigError(f"{self.folder}: expected a folder of this user that is not a link.  Fix: move it away")
        marker = self.folder / MARKER
        if not marker.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder}: contains files but no {MARKER}, so no run made it.  Fix: move it away")
        self.folder.chmod(0o700)
        marker.touch()

    def path_of(self, version: int) -> Path:
        return self.folder / f"weights-{version:08d}.safetensors"

    def versions(self) -> list[int]:
        """Return the version numbers of the complete files in the folder, oldest first."""
        ours = (p for p in self.folder.iterdir() if _is_ours(p) and p.suffix == ".safetensors")
        return sorted(int(path.name.split("-")[1].split(".")[0]) for path in ours)

    def write(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write one version without changing dtypes; return the path of the complete file.

        One tensor at a time is copied to host memory.  Before the write, the files of other versions are deleted,
        except the newest of these files, which engines may still load.

        `tensors`: Hugging Face names with float tensors of any shape on any device.
        Raises UnfitMachine if shared memory is full; the unfinished file is removed.
        """
        for old in [other for other in self.versions() if other != version][:-1]:
            self.path_of(old).unlink(missing_ok=True)
        final = self.path_of(version)
        try:
            with new_file(final) as temporary, temporary.open("wb") as file:
                self._stream(file, tensors, version)
        except OSError as error:
            raise UnfitMachine(
                f"{self.folder}: weights version {version} cannot be written: {error}.  "
                "Fix: enlarge the shared memory (containers: --shm-size) or remove other files from it"
            ) from error
        return final

    def _stream(self, file: BinaryIO, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write a safetensors file with the checksums of its tensors."""
        checksums: dict[str, Checksum] = {}

        def summed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                yield name, tensor
                checksums[name] = published(name, tensor.detach(), version, self._dtype or tensor.dtype)

        write_tensors(file, summed(), _HEADER_BYTES, lambda: to_metadata(version, checksums))

    def remove_stale(self) -> list[Path]:
        """Delete weights and unfinished files that an earlier process of this run left; return the deleted paths.

        Call it before any process of the run writes weights.
        """
        removed = []
        for path in sorted(self.folder.iterdir()):
            if _is_ours(path):
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed

    def remove(self) -> None:
        """Delete all weights at the end of the run, and the folder if it contains no other files."""
        self.remove_stale()
        if [p.name for p in self.folder.iterdir()] == [MARKER]:
            (self.folder / MARKER).unlink()
            self.folder.rmdir()


def write_tensors(
    file: BinaryIO, tensors: Iterable[tuple[str, Tensor]], room: int, metadata: Callable[[], Mapping[str, str]]
) -> None:
    """Write a safetensors file with one tensor in host memory at a time.

    Args:
        tensors: names with float tensors of any shape on any device.
        room: bytes reserved for the header before the tensors; unused bytes become blanks.
        metadata: called after the last tensor.

    Raises ValueError: the header is longer than `room`, a name is given twice, or a dtype is not a float.
    """
    header: dict[str, object] = {}
    offset = 0
    file.seek(8 + room)
    for name, tensor in tensors:
        if name in header or tensor.dtype not in _DTYPES:
            fault = "given twice" if name in header else f"expected a float dtype; got {tensor.dtype}"
            raise ValueError(f"tensor {name}: {fault}")
        file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        offsets = [offset, offset := offset + tensor.numel() * tensor.element_size()]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps({"__metadata__": metadata(), **header}).encode()
    if len(text) > room:
        raise ValueError(f"the header of {len(header)} tensors has {len(text)} bytes; the maximum is {room}")
    file.seek(0)
    file.write(room.to_bytes(8, "little") + text.ljust(room))


def _is_ours(path: Path) -> bool:
    return _OURS.fullmatch(path.name) is not None and not path.is_symlink() and path.is_file()
