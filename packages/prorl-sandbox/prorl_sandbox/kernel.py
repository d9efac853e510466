"""Linux system calls that Python does not offer, through ctypes.  Each raises OSError.  x86-64 only."""

import ctypes
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
READ_ONLY, NO_SUID, NO_DEV = 1, 2, 4  # attributes for mount_setattr
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

_PIVOT_ROOT, _SECCOMP, _MOUNT_SETATTR, _CLOSE_RANGE, _CAPSET = 155, 317, 442, 436, 126
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _syscall(call: str, number: int, *arguments: int | bytes | ctypes.Array | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), call)


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit immediately if the parent is already dead."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    options = None if data is None else data.encode()
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), options), f"mount {kind or 'bind'} on {target}")


def detach(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def restrict_mount(target: str, attributes: int, recursive: bool = True) -> None:
    """Set attributes of a mount and of the mounts below it (mount_setattr, Linux 5.12)."""
    packed = struct.pack("<QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _syscall(f"mount_setattr {target}", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, packed, len(packed))


def pivot_root_here() -> None:
    """Make the current folder the root, and detach the old root."""
    _syscall("pivot_root", _PIVOT_ROOT, b".", b".")
    detach(".")
    os.chdir("/")


def drop_capabilities() -> None:
    header, nothing = struct.pack("<II", 0x20080522, 0), bytes(24)
    _syscall("capset", _CAPSET, header, nothing)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    first = 0
    for fd in [*sorted(keep), 1 << 31]:
        if first < fd:
            _syscall("close_range", _CLOSE_RANGE, first, fd - 1, 0)
        first = fd + 1


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock interface; 0 without Landlock."""
    try:
        return _syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def landlock_ruleset(access_fs: int, access_net: int, scoped: int, abi: int) -> int:
    """Create a Landlock ruleset and return its descriptor."""
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    packed = struct.pack("<QQQ", access_fs, access_net, scoped)[:size]
    return _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, packed, size, 0)


def landlock_allow(ruleset: int, path: str, access: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        packed = struct.pack("<Qi", access, fd)
        _syscall(f"landlock_add_rule {path}", _LANDLOCK_ADD, ruleset, 1, packed, 0)
    finally:
        os.close(fd)


def landlock_restrict(ruleset: int) -> None:
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)


def install_filter(program: bytes) -> None:
    """Apply a seccomp filter, an array of struct sock_filter, to this thread and its children."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _syscall("seccomp", _SECCOMP, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_SPEC_ALLOW, header)


def set_default_thread_stack(size: int) -> None:
    """Set the default stack size of new threads in bytes.  glibc would otherwise use RLIMIT_STACK."""
    attributes = ctypes.create_string_buffer(64)
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size))
    _libc.pthread_setattr_default_np(attributes)
    _libc.pthread_attr_destroy(attributes)
