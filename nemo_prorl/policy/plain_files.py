"""Safe reading of a checkpoint's pickled files: only tensors and plain values are accepted, so that no code runs."""

import pickle
from pathlib import Path
from typing import Any

import torch

from nemo_prorl.errors import CheckpointError

_CURE = "Continue from a checkpoint that prorl wrote and nobody changed"
_METADATA = {  # module: the names that torch's metadata of a distributed checkpoint uses; dtypes are allowed, too
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
}


def load_plain(file: Path) -> Any:
    """Load a file written by torch.save.

    Raises CheckpointError: the file has anything but tensors and plain values, or cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, "tensors and plain values", error) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _unreadable(file, error) from error


def check_metadata(folder: Path) -> None:
    """Raise CheckpointError unless `.metadata`, which torch unpickles, has torch's classes and plain values only."""
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            _MetadataUnpickler(stream).load()
    except _ForeignClass as error:
        raise _refused(file, "torch's metadata", error) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise _unreadable(file, error) from error


class _ForeignClass(pickle.UnpicklingError):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise _ForeignClass(f"the file refers to the class {module}.{name}, which a checkpoint may not contain")


def _refused(file: Path, expected: str, error: Exception) -> CheckpointError:
    why = f"reading it could run code ({str(error).splitlines()[0]})"
    return CheckpointError(f"{file} was refused: expected {expected}, but {why}. {_CURE}")


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    why = (str(error).splitlines() or [""])[0]
    return CheckpointError(f"{file} cannot be read: it is missing, truncated or damaged ({why}). {_CURE}")
