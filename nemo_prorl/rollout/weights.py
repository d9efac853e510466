"""Weight publication: versioned safetensors files in shared memory, complete only when renamed.

One folder for each run and user on a node, with a marker that says it is ours.  Nothing is ever deleted but files of
our own pattern in a folder that carries that marker.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nemo_prorl.errors import ConfigError, UnfitMachine

_log = logging.getLogger(__name__)

MARKER = ".prorl-weights"
_OURS = re.compile(r"weights-\d{8,}\.safetensors(\.\d+\.tmp)?")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_COPY_BYTES = 1 << 24
_STAGE_BYTES = 1 << 26


def weights_folder(run_dir: str | Path, node: int | None = None, base: str | Path = "/dev/shm") -> Path:
    """The folder of a run's published weights: another for every user and run directory.

    `node`: of a run on several; with it nodes that share a machine keep apart.
    """
    real = os.path.realpath(run_dir)
    digest = hashlib.blake2b(real.encode(), digest_size=8).hexdigest()
    return Path(base) / f"prorl-{os.getuid()}-{digest}{'' if node is None else f'-{node}'}"


class WeightStore:
    """The published weights of one run on one node.  At most two versions exist at a time."""

    def __init__(self, folder: str | Path, header_room: int = 1 << 18) -> None:
        """Creates the folder, mode 0700, with its marker.

        `header_room`: bytes first set aside for the file's header; grows by itself.
        Raises ConfigError for a folder of somebody else's: another owner, a link, or files but no marker.
        """
        self.folder = Path(folder)
        self._header_room = header_room
        self._last_bytes = 0
        self._claim()

    def _claim(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.lstat()
        if self.folder.is_symlink() or status.st_uid != os.getuid():
            raise ConfigError(f"{self.folder}: not a folder of this user; move it away")
        marker = self.folder / MARKER
        if not marker.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder}: holds files but no {MARKER}, so it is not ours; move it away")
        self.folder.chmod(0o700)
        marker.touch(mode=0o600)

    def path_of(self, version: int) -> Path:
        return self.folder / f"weights-{version:08d}.safetensors"

    def versions(self) -> list[int]:
        """Complete versions that are here, oldest first."""
        ours = (p for p in self.folder.iterdir() if _is_ours(p) and p.suffix == ".safetensors")
        return sorted(int(path.name.split("-")[1].split(".")[0]) for path in ours)

    def write(self, tensors: Iterable[tuple[str, Tensor]], version: int, total_bytes: int | None = None) -> Path:
        """Writes one version, one tensor in memory at a time, dtypes kept; returns the complete file's path.

        `tensors`: HF names with float tensors of any shape and device.  `total_bytes`: their size, where the caller
        knows it; otherwise that of the version before is assumed, and each tensor is checked as it comes.
        Raises UnfitMachine when shared memory has no room; then nothing of this version is left.
        """
        self._prune(keep=1, but=version)
        self._check_room(total_bytes or self._last_bytes, version)
        final = self.path_of(version)
        temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w+b") as file:
                self._stream(file, tensors, version)
            self._last_bytes = temporary.stat().st_size
            os.replace(temporary, final)
        except OSError as error:
            raise UnfitMachine(f"{self.folder}: weights version {version} cannot be written: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return final

    def _stream(self, file: BinaryIO, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Data first, behind room for the header; then the header, padded with blanks as the format allows."""
        header: dict[str, object] = {}
        offset = 0
        file.seek(8 + self._header_room)
        for name, tensor in tensors:
            if name in header or tensor.dtype not in _DTYPES:
                raise ValueError(f"{name}: given twice" if name in header else f"{name}: dtype {tensor.dtype}")
            flat = tensor.detach().contiguous().reshape(-1)
            size = flat.numel() * flat.element_size()
            self._check_room(size, version)
            for piece in _pieces(flat.view(torch.uint8)) if size else ():
                file.write(piece)
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._header_room:
            room = len(text) + (-len(text)) % 8
            _move_up(file, 8 + self._header_room, offset, room - self._header_room)
            self._header_room = room
        file.seek(0)
        file.write(self._header_room.to_bytes(8, "little") + text.ljust(self._header_room))

    def _check_room(self, needed: int, version: int) -> None:
        status = os.statvfs(self.folder)
        free = status.f_bavail * status.f_frsize
        if needed > free:
            raise UnfitMachine(
                f"{self.folder}: weights version {version} needs {needed / 1e6:,.1f} MB, has {free / 1e6:,.1f} MB; "
                "enlarge the shared memory (containers: --shm-size) or remove other files there"
            )

    def _prune(self, keep: int, but: int | None = None) -> None:
        """Deletes all complete versions but the newest `keep` ones."""
        versions = [v for v in self.versions() if v != but]
        for version in versions[: len(versions) - keep]:
            self.path_of(version).unlink(missing_ok=True)

    def remove_stale(self) -> list[Path]:
        """Deletes what an earlier process of this run left: weights and unfinished files of our own pattern only.

        Call it before any process of the run writes.  Returns what was deleted.
        """
        removed = []
        for path in sorted(self.folder.iterdir()):
            if _is_ours(path):
                path.unlink(missing_ok=True)
                removed.append(path)
        return removed

    def remove(self) -> None:
        """Deletes this run's weights at its end, and the folder if nothing of anybody else's is in it."""
        self.remove_stale()
        if [p.name for p in self.folder.iterdir()] == [MARKER]:
            (self.folder / MARKER).unlink()
            self.folder.rmdir()


def _pieces(flat: Tensor) -> Iterator[memoryview]:
    """The bytes of a uint8 tensor: at once from host memory, staged from a GPU's."""
    return _staged(flat) if flat.is_cuda else iter([flat.numpy().data])


def _staged(flat: Tensor, size: int = _STAGE_BYTES) -> Iterator[memoryview]:
    """The bytes of a uint8 tensor through two page-locked buffers: the GPU fills one while the other is written.

    A piece holds until the next one is asked for.
    """
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=flat.is_cuda) for _ in range(2)]
    copied: list[torch.cuda.Event | None] = [None, None]

    def begin(number: int) -> None:
        part = flat[number * size : (number + 1) * size]
        buffers[number % 2][: len(part)].copy_(part, non_blocking=True)
        if flat.is_cuda:
            event = copied[number % 2] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()

    begin(0)
    for number in range(-(-len(flat) // size)):
        if (number + 1) * size < len(flat):
            begin(number + 1)
        if (event := copied[number % 2]) is not None:
            event.synchronize()
        yield buffers[number % 2][: min(size, len(flat) - number * size)].numpy().data


def _is_ours(path: Path) -> bool:
    return _OURS.fullmatch(path.name) is not None and not path.is_symlink() and path.is_file()


def _move_up(file: BinaryIO, start: int, size: int, by: int) -> None:
    """Moves `size` bytes at `start` up by `by`, from the end backwards, in pieces."""
    position = size
    while position > 0:
        length = min(_COPY_BYTES, position)
        position -= length
        file.seek(start + position)
        piece = file.read(length)
        file.seek(start + by + position)
        file.write(piece)
