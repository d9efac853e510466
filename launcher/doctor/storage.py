"""A run's directory, /dev/shm and host memory, against what `sizing.memory` says the run needs."""

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

from nemo_prorl.launcher.doctor.check import GB, Check, gb
from nemo_prorl.sizing.memory import Memory, memory_of

MTIME_SKEW_S = 2.0  # between a file's time and the clock that wrote it
SLOW_SYNC_S = 1.0  # of one small file and its folder
# Copies between machines, or files of one machine only: fine for one node.
_REMOTE = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "9p", "cifs", "smb", "afs", "glusterfs", "pvfs")
_IN_MEMORY = ("tmpfs", "ramfs", "overlay")


@dataclass(frozen=True)
class FolderFacts:
    """The facts about a folder; a `_fault` is empty if all is well."""

    path: Path
    filesystem: str
    free: int
    held: int  # bytes of the run's checkpoints that are there already
    replace_fault: str
    sync_fault: str
    sync_s: float
    lock_fault: str
    mtime_skew_s: float  # file's time minus this machine's


def check_storage(cfg: DictConfig) -> Iterator[Check]:
    """Check run directory, /dev/shm and host memory."""
    memory, run_dir = memory_of(cfg), Path(cfg.run_dir).absolute()
    try:
        facts = measure_folder(run_dir)
    except OSError as error:
        cure = "name a folder that this user can write: run_dir=..."
        yield Check("run_dir", "fail", f"{run_dir} cannot be written: {error.strerror or error}", cure)
    else:
        yield from folder_judged(facts, cfg.trainer.num_nodes)
        yield room_judged(facts, checkpoint_room(memory, cfg.trainer.grpo.checkpoint_budget_gb))
    yield shm_judged(shutil.disk_usage("/dev/shm").free, memory.published)
    yield host_judged(available_memory(os.environ), host_parts(cfg, memory))


def measure_folder(run_dir: Path) -> FolderFacts:
    """Tries the folder, or the nearest above it that is there; leaves nothing.  Raises OSError: not writable."""
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
            held=_bytes_under(run_dir / "checkpoints"),
            replace_fault=_fault(_replace, trial),
            sync_fault=sync_fault,
            sync_s=sync_s,
            lock_fault=_fault(_lock, trial),
            mtime_skew_s=skew,
        )


def nearest(run_dir: Path) -> Path:
    """Return the run directory, or the nearest folder above it that exists.  Raises OSError where it is a file."""
    if run_dir.exists() and not run_dir.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(run_dir))
    return next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())


def _bytes_under(folder: Path) -> int:
    """Return the bytes under a folder; files that a running job removes meanwhile do not count."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def _fault(trial: Callable[[Path], str], folder: Path) -> str:
    try:
        return trial(folder)
    except OSError as error:
        return error.strerror or str(error)


def _sync(folder: Path) -> str:
    """Write a file and its folder to the disk, as a checkpoint is committed."""
    with (folder / "synced").open("w") as file:
        file.write("x" * 4096)
        file.flush()
        os.fsync(file.fileno())
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return ""


def _replace(folder: Path) -> str:
    """Replace a file while it is read: a second open must see the new file, whole."""
    target, new = folder / "target", folder / "target.tmp"
    target.write_text("old")
    with target.open():
        new.write_text("new")
        os.replace(new, target)
        seen = target.read_text()
    return "" if seen == "new" else f"a replaced file reads {seen!r}, its old content"


def _lock(folder: Path) -> str:
    """Open a locked file twice: the second must not get the lock."""
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "two held the same lock"


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that a path lies on."""
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}  # of two the later shows
    real = Path(os.path.realpath(path))
    return kinds.get(max((point for point in kinds if real.is_relative_to(point)), key=len, default=""), "unknown")


def folder_judged(facts: FolderFacts, nodes: int) -> Iterator[Check]:
    """Judge a run directory: checkpoints and endpoints are renamed into place, one run holds its lock."""
    where = f"{facts.path} ({facts.filesystem})"
    faults = {
        "a file is not replaced at once": (facts.replace_fault, "use a POSIX filesystem for run_dir"),
        "fsync fails": (facts.sync_fault, "a checkpoint would not outlive a crash: use another filesystem"),
        "flock fails": (facts.lock_fault, "mount it with locks (Lustre: -o flock; NFS: no nolock), or use another"),
    }
    wrong = [
        Check("run_dir", "fail", f"{where}: {what}: {fault}", cure) for what, (fault, cure) in faults.items() if fault
    ]

    def warn(text: str, cure: str) -> None:
        wrong.append(Check("run_dir", "warn", f"{where}: {text}", cure))

    if abs(facts.mtime_skew_s) > MTIME_SKEW_S:
        text = f"files' times are {facts.mtime_skew_s:+.1f} s from this machine's clock"
        warn(text, "let NTP or chrony set the clocks of file server and machine")
    if not facts.sync_fault and facts.sync_s > SLOW_SYNC_S:
        text = f"one small file took {facts.sync_s:.1f} s to reach the disk"
        warn(text, "checkpoints and the journal wait for it: use a faster one, or ask why")
    if facts.filesystem in _IN_MEMORY:
        warn("is gone when the machine or the container is", "name a disk that stays: run_dir=...")
    elif nodes > 1 and not facts.filesystem.startswith(_REMOTE):
        text = f"a disk of this machine, as it seems; {nodes} nodes share run_dir"
        warn(text, "put it on a shared filesystem, and look with --nodes")
    found = f"{where}: replace, fsync ({facts.sync_s * 1e3:.0f} ms), flock, times"
    yield from wrong or [Check("run_dir", "pass", found)]


def checkpoint_room(memory: Memory, budget_gb: float | None) -> int:
    """Return the bytes that a run's checkpoints take at most, with one that is being written."""
    if budget_gb is None:
        return memory.checkpoints
    return min(memory.checkpoints, max(int(budget_gb * GB), memory.checkpoint) + memory.checkpoint)


def room_judged(facts: FolderFacts, needed: int) -> Check:
    free = facts.free + facts.held
    text = f"{gb(facts.free)} free for checkpoints, which take {gb(needed)}"
    text += f" ({gb(facts.held)} of it are there)" if facts.held else ""
    if free < needed:
        cure = "free some room, or lower trainer.grpo.keep_checkpoints or trainer.grpo.checkpoint_budget_gb"
        return Check("disk", "fail", text, cure)
    if free < 1.2 * needed:
        return Check("disk", "warn", text, "little is left for rollouts, logs and other users; a quota may lower it")
    return Check("disk", "pass", text)


def shm_judged(free: int, published: int) -> Check:
    """`published`: two versions of the weights, for the engines of this node."""
    text = f"{gb(free)} free in /dev/shm; two versions of the weights take {gb(published)}"
    if free < published:
        return Check("shm", "fail", text, "free it, or give the container more (--shm-size, or --ipc=host)")
    if free < published + 0.5e9:
        return Check("shm", "warn", text, "NCCL and data workers use it too: give it half a GB more")
    return Check("shm", "pass", text)


def host_parts(cfg: DictConfig, memory: Memory) -> dict[str, int]:
    """Return the bytes of host memory that a node's processes take, by purpose."""
    parts = {"reference": memory.reference_host, "copy of a checkpoint": memory.snapshot_host}
    if cfg.trainer.accelerator == "cpu":
        parts["training and engine"] = memory.needed * cfg.trainer.devices
    return parts


def host_judged(available: tuple[int, str], parts: Mapping[str, int]) -> Check:
    """`available`: bytes, and what sets the limit.  Libraries and reward workers come on top: a quarter is left."""
    needed = sum(parts.values())
    said = ", ".join(f"{name} {gb(value)}" for name, value in parts.items())
    text = f"{gb(available[0])} available ({available[1]}); the run takes {gb(needed)} beside its programs ({said})"
    if available[0] < needed:
        cure = "ask for more (Slurm: --mem=0), or lower trainer.devices; else the kernel kills a process"
        return Check("memory", "fail", text, cure)
    if available[0] < 1.25 * needed + 4e9:
        return Check("memory", "warn", text, "programs and reward workers take some GB too: end others on this machine")
    return Check("memory", "pass", text)


def available_memory(environment: Mapping[str, str], cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return (bytes, what limits them): the machine's, the control groups' or Slurm's."""
    found = [(psutil.virtual_memory().available, "this machine")]
    inside = next((s[3:].strip("/") for s in _read(Path("/proc/self/cgroup")).splitlines() if s.startswith("0::")), "")
    folder = cgroups / inside
    while folder == cgroups or cgroups in folder.parents:
        if (limit := _read(folder / "memory.max").strip()).isdigit():
            found.append((max(0, int(limit) - _in_use(folder)), "the control group's limit"))
        folder = folder.parent
    per_node = environment.get("SLURM_MEM_PER_NODE", "")
    if per_node.isdigit() and int(per_node):
        found.append((int(per_node) * 2**20, "Slurm's --mem"))
    return min(found)


def _in_use(folder: Path) -> int:
    """Return the bytes in use by a control group that the kernel cannot simply drop."""
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
