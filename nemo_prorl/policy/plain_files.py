"""Safe reading of a checkpoint's pickled files: only tensors and plain values are accepted, so that no code runs."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_prorl.errors import CheckpointError, DamagedCheckpoint
from nemo_prorl.files import first_line

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


def check_metadata(folder: Path) -> Any:
    """Return the content of `.metadata`, which torch unpickles.

    Raises CheckpointError: it has anything but torch's classes and plain values, or cannot be read.
    """
    file = folder / ".metadata"
    try:
        with file.open("rb") as stream:
            return _MetadataUnpickler(stream).load()
    except _ForeignClass as error:
        raise _refused(file, "torch's metadata", error) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise _unreadable(file, error) from error


def check_objects(folder: Path) -> None:
    """Check `.metadata` and each object in `*.distcp`, which Megatron unpickles if it is asked for.

    Only a checkpoint with FP8's delayed scales has objects: tensors of bytes.
    Raises CheckpointError: an object is anything but tensors and plain values, or a file cannot be read.
    """
    metadata = check_metadata(folder)
    for index, place in (metadata.storage_data or {}).items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            continue
        file = folder / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                torch.load(io.BytesIO(stream.read(place.length)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _refused(file, f"{index.fqn} to be tensors and plain values", error) from error
        except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
            raise _unreadable(file, error) from error


class _ForeignClass(pickle.UnpicklingError):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()) or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        raise _ForeignClass(f"the file refers to the class {module}.{name}, which a checkpoint may not contain")


def _refused(file: Path, expected: str, error: Exception) -> CheckpointError:
    reason = f"reading it could run code ({first_line(error)})"
    return CheckpointError(f"{file} was refused: expected {expected}, but {reason}. {_CURE}")


def _unreadable(file: Path, error: Exception) -> DamagedCheckpoint:
    reason = (str(error).splitlines() or [""])[0]
    return DamagedCheckpoint(file.parent, f"{file} cannot be read: it is missing, truncated or damaged ({reason})")
