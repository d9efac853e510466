"""Checks of run directory, disk, /dev/shm and host memory, for a run or without a configuration."""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from omegaconf import DictConfig

from nemo_prorl.errors import disk_full
from nemo_prorl.files import flush_to_disk
from nemo_prorl.launcher.doctor.check import GB, Check, gb
from nemo_prorl.sizing.memory import Memory, memory_of

MTIME_SKEW_S = 2.0  # allowed difference of a file's modification time and this machine's clock, in seconds
SLOW_SYNC_S = 1.0  # an fsync of one small file and its folder that takes longer is a warning
_GIB = 2**30
# Types of filesystems that several machines can share.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "9p", "cifs", "smb", "afs", "glusterfs", "pvfs")
_IN_MEMORY = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class FolderFacts:
    """Measured facts about a folder.

    Each field `..._fault` is the error of an operation that was tried there; empty if the operation succeeded.
    """

    path: Path
    filesystem: str
    free: int  # bytes
    held: int  # bytes of the run's existing checkpoints
    replace_fault: str
    sync_fault: str
    sync_s: float  # seconds of an fsync of a small file and its folder
    lock_fault: str
    mtime_skew_s: float  # modification time of a new file minus this machine's clock, in seconds


def check_sizes() -> Iterator[Check]:
    """Check memory, /dev/shm and disk by general thresholds, because no configuration determines the needs."""
    memory, disk, shm = psutil.virtual_memory(), shutil.disk_usage(".").free, _shm_free()
    text = f"{memory.available / _GIB:.0f} GiB available of {memory.total / _GIB:.0f}"
    yield _enough("memory", text, memory.available, ample=6 * _GIB, note="the laptop job takes about 6 GiB")
    text = f"{shm / _GIB:.1f} GiB free in /dev/shm, which passes the weights to the engines"
    fix = "free space in it, or enlarge it (containers: --shm-size) to three times the size of the weights"
    yield _enough("shm", text, shm, ample=12 * _GIB, note="a 1.5B model takes 9 GiB of it", needed=_GIB // 4, fix=fix)
    note = "the environments take 7 GiB, and each checkpoint of a 1.5B model takes 25 GiB"
    yield _enough("disk", f"{disk / _GIB:.0f} GiB free in this folder", disk, ample=10 * _GIB, note=note)


def _enough(name: str, text: str, free: float, *, ample: float, note: str, needed: float = 0, fix: str = "") -> Check:
    """Return a check that fails with `fix` below `needed` bytes, and warns with `note` below `ample` bytes."""
    if free < needed:
        return Check(name, "fail", text, fix)
    return Check(name, "warn", text, note) if free < ample else Check(name, "pass", text)


def check_storage(cfg: DictConfig) -> Iterator[Check]:
    """Check run directory, /dev/shm and host memory against the needs of a run (`sizing.memory`)."""
    memory, run_dir = memory_of(cfg), Path(cfg.run_dir).absolute()
    try:
        facts = measure_folder(run_dir)
    except OSError as error:
        fix = "free disk space" if disk_full(error) else "choose a folder that this user can write to: run_dir=..."
        yield Check("run_dir", "fail", f"{run_dir}: cannot be written: {error.strerror or error}", fix)
    else:
        yield from assess_folder(facts, cfg.trainer.num_nodes)
        yield assess_room(facts, checkpoint_room(memory, cfg.trainer.grpo.checkpoint_budget_gb))
    yield assess_shm(_shm_free() + _stale_weights(run_dir), memory.published)
    yield assess_available_memory(available_memory(os.environ), host_parts(cfg, memory))


def _shm_free() -> int:
    return shutil.disk_usage("/dev/shm").free


def _stale_weights(run_dir: Path) -> int:
    """Return the bytes of weights in /dev/shm of an earlier start of the run, which the next start removes."""
    from nemo_prorl.rollout.weight_store import weights_folder

    folder = weights_folder(run_dir)
    return sum(map(bytes_under, folder.parent.glob(f"{folder.name}*")))  # this machine may be several nodes of a run


def measure_folder(run_dir: Path) -> FolderFacts:
    """Measure the run directory, or its nearest existing parent, with trial files that are removed afterwards.

    Raises:
        OSError: the folder cannot be written.
    """
    there = nearest(run_dir)
    with tempfile.TemporaryDirectory(prefix=".prorl-doctor-", dir=there, ignore_cleanup_errors=True) as made:
        trial, began = Path(made), time.monotonic()
        sync_fault = _fault(_sync, trial)
        sync_s = time.monotonic() - began
        stamp = trial / "stamp"
        before = time.time()
        stamp.write_text("now")
        skew = stamp.stat().st_mtime - (before + time.time()) / 2
        return FolderFacts(
            path=there,
            filesystem=filesystem_of(there),
            free=shutil.disk_usage(there).free,
            held=bytes_under(run_dir / "checkpoints"),
            replace_fault=_fault(_replace, trial),
            sync_fault=sync_fault,
            sync_s=sync_s,
            lock_fault=_fault(_lock, trial),
            mtime_skew_s=skew,
        )


def nearest(run_dir: Path) -> Path:
    """Return the run directory, or its nearest existing parent.  Raises NotADirectoryError if it is a file."""
    if run_dir.exists() and not run_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", str(run_dir))
    return next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())


def bytes_under(folder: Path) -> int:
    """Return the total bytes of the files under a folder; files that are removed during the call are left out."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                total += bytes_under(Path(entry)) if is_folder else entry.stat(follow_symlinks=False).st_size
    return total


def _fault(trial: Callable[[Path], str], folder: Path) -> str:
    try:
        return trial(folder)
    except OSError as error:
        if disk_full(error):  # it says nothing of the kind of filesystem
            raise
        return error.strerror or str(error)


def _sync(folder: Path) -> str:
    """Test fsync of a new file and of its folder, which checkpoints need.  Returns ""; raises OSError on failure."""
    (folder / "synced").write_text("x" * 4096)
    flush_to_disk(folder / "synced")
    flush_to_disk(folder)
    return ""


def _replace(folder: Path) -> str:
    """Replace an open file and read it again; return why the new content was not read, or "" on success."""
    target, new = folder / "target", folder / "target.tmp"
    target.write_text("old")
    with target.open():
        new.write_text("new")
        os.replace(new, target)
        seen = target.read_text()
    return "" if seen == "new" else f"after the replacement the file still reads {seen!r}"


def _lock(folder: Path) -> str:
    """Lock a file through two handles; return a text if both get the lock, or "" if the second is refused."""
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "two file handles got the same lock"


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that contains a path."""
    # Of two mounts at the same point, the later one hides the earlier one, as in this dict.
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    real = Path(os.path.realpath(path))
    return kinds.get(max((point for point in kinds if real.is_relative_to(point)), key=len, default=""), "unknown")


def assess_folder(facts: FolderFacts, nodes: int) -> Iterator[Check]:
    """Assess a run directory, which must support atomic renames, fsync and locks."""
    where = f"{facts.path} ({facts.filesystem})"
    locks = "mount it with locks (Lustre: -o flock; NFS: without nolock), or use another filesystem"
    faults = {
        "a replaced file keeps its old content": (facts.replace_fault, "use a POSIX filesystem for run_dir"),
        "fsync fails": (facts.sync_fault, "use another filesystem: on this one a crash can destroy a checkpoint"),
        "flock fails": (facts.lock_fault, locks),
    }
    wrong = [
        Check("run_dir", "fail", f"{where}: {defect}: {fault}", fix) for defect, (fault, fix) in faults.items() if fault
    ]

    def warn(text: str, fix: str) -> None:
        wrong.append(Check("run_dir", "warn", f"{where}: {text}", fix))

    if abs(facts.mtime_skew_s) > MTIME_SKEW_S:
        text = f"modification times differ by {facts.mtime_skew_s:+.1f} s from this machine's clock"
        warn(text, "synchronize the clocks of file server and machine with NTP or chrony")
    if not facts.sync_fault and facts.sync_s > SLOW_SYNC_S:
        text = f"an fsync of one small file took {facts.sync_s:.1f} s"
        warn(text, "use a faster filesystem: checkpoints and the journal wait for each fsync")
    if facts.filesystem in _IN_MEMORY:
        warn("files here are lost when the machine or the container ends", "choose a persistent disk: run_dir=...")
    elif nodes > 1 and not facts.filesystem.startswith(_REMOTE):
        text = f"this seems to be a local disk, but {nodes} nodes must share run_dir"
        warn(text, "put run_dir on a shared filesystem, and check it with --nodes")
    text = f"{where}: replacing a file, fsync ({facts.sync_s * 1e3:.0f} ms), flock and modification times work"
    yield from wrong or [Check("run_dir", "pass", text)]


def checkpoint_room(memory: Memory, budget_gb: float | None) -> int:
    """Return the maximum bytes of a run's checkpoints, including the one that is being written."""
    if budget_gb is None:
        return memory.checkpoints
    return min(memory.checkpoints, max(int(budget_gb * GB), memory.checkpoint) + memory.checkpoint)


def assess_room(facts: FolderFacts, needed: int) -> Check:
    free = facts.free + facts.held
    text = f"{gb(facts.free)} free; the run's checkpoints take {gb(needed)}"
    text += f", of which {gb(facts.held)} exist already" if facts.held else ""
    fix = "free space, or lower trainer.grpo.keep_checkpoints or trainer.grpo.checkpoint_budget_gb"
    note = "free space: little is left for rollouts, logs and other users, and a quota may leave even less"
    return _enough("disk", text, free, ample=1.2 * needed, note=note, needed=needed, fix=fix)


def assess_shm(free: int, published: int) -> Check:
    """Assess /dev/shm.  `published`: bytes of two versions of the weights, for the engines of this node."""
    text = f"{gb(free)} free in /dev/shm; two versions of the weights take {gb(published)}"
    fix = "free space in it, or enlarge it (containers: --shm-size, or --ipc=host)"
    note = "enlarge it by 0.5 GB: NCCL and data workers use it too"
    return _enough("shm", text, free, ample=published + 0.5e9, note=note, needed=published, fix=fix)


def host_parts(cfg: DictConfig, memory: Memory) -> dict[str, int]:
    """Return the bytes of host memory that a node's processes take, by purpose."""
    parts = {"reference": memory.reference_host, "copy of a checkpoint": memory.snapshot_host}
    if cfg.trainer.accelerator == "cpu":
        parts["training and engine"] = memory.needed * cfg.trainer.devices
    return parts


def assess_available_memory(available: tuple[int, str], parts: Mapping[str, int]) -> Check:
    """Assess host memory.

    Fails if less than the parts' sum is available; warns if less than 1.25 times the sum plus 4 GB is available,
    because libraries and reward workers also need memory.

    Args:
        available: bytes, and the name of what limits them.
        parts: bytes that the node's processes take, by purpose.
    """
    needed = sum(parts.values())
    by_purpose = ", ".join(f"{name} {gb(value)}" for name, value in parts.items())
    text = f"{gb(available[0])} available ({available[1]}); the run's data take {gb(needed)} ({by_purpose})"
    fix = "request more (Slurm: --mem=0), or lower trainer.devices; otherwise the kernel kills a process"
    note = "end other programs on this machine: libraries and reward workers need some GB more"
    return _enough("memory", text, available[0], ample=1.25 * needed + 4e9, note=note, needed=needed, fix=fix)


def available_memory(environment: Mapping[str, str], cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return (bytes, name of the limit): the smallest of the limits of machine, control groups and Slurm."""
    limits = [(psutil.virtual_memory().available, "this machine")]
    inside = next((s[3:].strip("/") for s in _read(Path("/proc/self/cgroup")).splitlines() if s.startswith("0::")), "")
    folder = cgroups / inside
    while folder == cgroups or cgroups in folder.parents:
        if (limit := _read(folder / "memory.max").strip()).isdigit():
            limits.append((max(0, int(limit) - _in_use(folder)), "the control group's limit"))
        folder = folder.parent
    per_node = environment.get("SLURM_MEM_PER_NODE", "")
    if per_node.isdigit() and int(per_node):
        limits.append((int(per_node) * 2**20, "Slurm's --mem"))
    return min(limits)


def _in_use(folder: Path) -> int:
    """Return the bytes that a control group uses, without file cache that the kernel can drop."""
    used = int(_read(folder / "memory.current").strip() or 0)
    cached = [
        line.split()[1] for line in _read(folder / "memory.stat").splitlines() if line.startswith("inactive_file")
    ]
    return max(0, used - int(cached[0] if cached else 0))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
