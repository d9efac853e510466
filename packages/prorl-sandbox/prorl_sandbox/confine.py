"""Confinement of the sandbox process before it runs programs: namespaces, a private root, Landlock, no capabilities."""

import contextlib
import glob
import os
import sys
import sysconfig
from dataclasses import dataclass

from prorl_sandbox import kernel

_READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 2, 1 << 3, 1 << 14, 1 << 15
_WRITE_FILE, _REFER = 1 << 1, 1 << 13
# Rights in the program's folder: read, write, remove, create folders, files, fifos and links; no sockets or devices.
_OWN = _READ_FILE | _READ_DIR | _WRITE_FILE | (1 << 4) | (1 << 5) | (1 << 7) | (1 << 8) | (1 << 10) | (1 << 12)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PACKAGES = "/packages"
_STAGING = ("/mnt", "/media", "/srv", "/opt", "/run", "/tmp", "/var")
_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


@dataclass(frozen=True)
class View:
    """The files of the host that a program may read."""

    folders: tuple[str, ...]
    files: tuple[str, ...]
    hidden: tuple[str, ...]  # paths below `folders` that the program cannot see
    packages: tuple[str, ...] = ()  # folders of third-party packages; mounted below PACKAGES in a private root


def host_view(packages: tuple[str, ...] = ()) -> View:
    """Return the view of Python's standard library, the shared libraries that it loads, and third-party packages."""
    library = os.path.realpath(sysconfig.get_paths()["stdlib"])
    dynamic = os.path.realpath(sysconfig.get_config_var("DESTSHARED") or os.path.join(library, "lib-dynload"))
    prefix = os.path.realpath(sys.base_prefix)
    folders = [library, dynamic, "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"]
    files = ["/etc/ld.so.cache", *_DEVICES]
    if prefix != "/usr":
        files += glob.glob(os.path.join(prefix, "lib", "lib*.so*"))[:400]
    kept = [path for path in dict.fromkeys([*folders, "/usr/share/zoneinfo", "/usr/lib/locale"]) if os.path.isdir(path)]
    kept = [path for path in kept if not any(path.startswith(other + "/") for other in kept)]
    hidden = [os.path.join(library, name) for name in ("site-packages", "dist-packages", "test", "ensurepip")]
    existing = tuple(file for file in files if os.path.exists(file))
    return View(tuple(kept), existing, tuple(path for path in hidden if os.path.isdir(path)), packages)


def enter_namespaces() -> None:
    """Enter new namespaces.  If this user may not create them, enter a new user namespace, too, which permits it.

    Raises OSError if the kernel refuses.
    """
    try:
        kernel.unshare(_NAMESPACES)
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(_NAMESPACES | kernel.CLONE_NEWUSER)
        with contextlib.suppress(FileNotFoundError):
            _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(view: View, tmp_mb: int) -> None:
    """Replace the root folder by one that contains only the files of `view`, read-only, and an empty /tmp in memory."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    places = {path: path for path in (*view.folders, *view.files)}
    places |= {path: f"{PACKAGES}/{os.path.basename(path)}" for path in view.packages}
    base = next(p for p in _STAGING if os.path.isdir(p) and not any(s.startswith(p + "/") for s in places))
    kernel.mount("sandbox", base, "tmpfs", kernel.MS_NOSUID, "size=4m,nr_inodes=4096,mode=755")
    for path, place in places.items():
        target = base + place
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "w"):
                pass
        kernel.mount(os.path.realpath(path), target, None, kernel.MS_BIND | kernel.MS_REC)
        device = path in _DEVICES
        kernel.restrict_mount(target, kernel.READ_ONLY | kernel.NO_SUID | (0 if device else kernel.NO_DEV))
    for path in view.hidden:
        kernel.mount("sandbox", base + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,nr_inodes=2")
        kernel.restrict_mount(base + path, kernel.READ_ONLY)
    os.mkdir(base + "/tmp")
    options = f"size={tmp_mb}m,nr_inodes=4096,mode=1777"
    kernel.mount("sandbox", base + "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir(base)
    kernel.pivot_root_here()
    kernel.restrict_mount("/", kernel.READ_ONLY, recursive=False)


def drop_identity(view: View, own_folder: str, uid: int) -> bool:
    """Drop all capabilities; as root, also become a user that owns only `own_folder`.  Return whether the user changed.

    If only root can read Python's files, the effective user stays root.  Then only the real user id changes, because
    the kernel counts threads by the real user id.
    """
    changed = False
    if os.geteuid() == 0:
        reachable = all(_open_to_all(path) for path in (*view.folders, *view.packages) if os.path.exists(path))
        with contextlib.suppress(OSError):  # a container may forbid the change, or not map the user id
            if reachable:
                os.chown(own_folder, uid, uid)
            os.setgroups([])
            if reachable:
                os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid if reachable else -1, uid if reachable else -1)
            changed = True
    kernel.drop_capabilities()
    return changed


def _open_to_all(path: str) -> bool:
    """Return whether every user may enter the folder `path`."""
    while True:
        if not os.stat(path).st_mode & 0o001:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def restrict_files(view: View, own_folder: str) -> int:
    """Restrict this process with Landlock: read `view`, write in `own_folder`; no other files, no TCP.

    Returns:
        The version of Landlock's interface; 0 if the kernel lacks Landlock.
    """
    abi = kernel.landlock_abi()
    if not abi:
        return 0
    handled = (1 << 13) - 1
    handled |= _REFER if abi >= 2 else 0
    handled |= _TRUNCATE if abi >= 3 else 0
    handled |= _IOCTL_DEV if abi >= 5 else 0
    ruleset = kernel.landlock_ruleset(handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0, abi)
    for path in _readable(view):
        folder = os.path.isdir(path)
        kernel.landlock_allow(ruleset, path, _READ_FILE | (_READ_DIR if folder else 0))
    for path in _listed(view):
        kernel.landlock_allow(ruleset, path, _READ_DIR)
    for path in _DEVICES:
        if os.path.exists(path):
            kernel.landlock_allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
    kernel.landlock_allow(ruleset, own_folder, (_OWN | _TRUNCATE | _REFER) & handled)
    kernel.landlock_restrict(ruleset)
    os.close(ruleset)
    return abi


def _readable(view: View) -> list[str]:
    """Return the paths that Landlock makes readable.  A folder with hidden paths is replaced by its other entries."""
    paths = [path for path in (*view.files, *view.packages) if path not in _DEVICES]
    for folder in view.folders:
        if any(path.startswith(folder + "/") for path in view.hidden):
            paths += [os.path.join(folder, name) for name in os.listdir(folder)]
        else:
            paths.append(folder)
    return [path for path in paths if path not in view.hidden and os.path.exists(path)]


def _listed(view: View) -> list[str]:
    """Return the folders with hidden entries.  A program may list these folders, because imports require this."""
    return [folder for folder in view.folders if any(path.startswith(folder + "/") for path in view.hidden)]
