"""The seccomp filter for untrusted programs: a list of allowed system calls; all others are refused.

Refused: new processes, other programs, sockets except a connected pair, signals to other processes, limits and memory
of other processes.  Allowed: threads, files, memory, time and signals to the program itself.
"""

import errno
import struct
from collections.abc import Iterable

_PLAIN = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23,
    "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "recvfrom": 45,
    "shutdown": 48, "getsockname": 51, "getpeername": 52, "getsockopt": 55, "exit": 60, "wait4": 61,
    "uname": 63, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77, "getdents": 78,
    "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86,
    "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98,
    "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110,
    "getpgrp": 111, "getgroups": 115, "getresuid": 118, "getresgid": 120,
    "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137,
    "fstatfs": 138, "sched_get_priority_max": 146, "sched_get_priority_min": 147,
    "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "readahead": 187, "time": 201, "futex": 202,
    "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221,
    "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226,
    "exit_group": 231, "epoll_create": 213, "epoll_wait": 232,
    "epoll_ctl": 233, "waitid": 247, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "pselect6": 270,
    "ppoll": 271, "set_robust_list": 273, "sync_file_range": 277, "epoll_pwait": 281,
    "fallocate": 285, "timerfd_settime": 286, "timerfd_gettime": 287, "eventfd": 284, "signalfd4": 289,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "getcpu": 309,
    "renameat2": 316, "getrandom": 318, "membarrier": 324, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "statx": 332, "rseq": 334, "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441, "futex_waitv": 449,
}  # fmt: skip
# These can change a file through its name or a read-only descriptor: allowed only with a private root.
_OWN_ROOT = {"truncate": 76, "chmod": 90, "fchmod": 91, "utime": 132, "utimes": 235, "fchmodat": 268, "utimensat": 280}

_IOCTL, _SOCKETPAIR, _SENDTO, _CLONE, _KILL, _FCNTL, _PRCTL, _TGKILL, _PRLIMIT = 16, 53, 44, 56, 62, 72, 157, 234, 302
_AFFINITY = (203, 204)  # sched_setaffinity, sched_getaffinity
_OF_PROCESS = {
    "getpgid": (121, 0),
    "getsid": (124, 0),
    "getpriority": (140, 1),
}  # (call, index of the argument that names a process)
_CLOCKS = (222, 228, 229, 230, 283)  # take a clock: timer_create, clock_gettime, _getres, _nanosleep, timerfd_create
_UNKNOWN = (425, 426, 427, 435, 437, 452)  # io_uring, clone3, openat2, fchmodat2: libraries fall back to older calls
_EXTENDED_ATTRIBUTES = range(188, 200)  # reported as unsupported
_CLONE_THREAD = 0x00010000 | 0x00000100  # CLONE_THREAD, CLONE_VM
_CLONE_NEW = 0x7E020080
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
# fcntl commands that do not name a process
_FCNTLS = (*range(8), 9, 11, 12, 13, 14, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
_SETSOCKOPT, _SOCKET_OPTIONS = 54, (2, 9, 13, 20, 21)  # reuse, keep-alive, linger, time-outs; no buffer sizes
_PRCTLS = (3, 15, 16, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_ARCH_X86_64 = 0xC000003E
_PID = 0x50494400  # placeholder of the process id until the filter is installed

Instruction = tuple[int, int, int, int]


def _argument(index: int, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + (4 if high else 0))


def _answer(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _refused(number: int = errno.EPERM) -> Instruction:
    return _answer(_ERRNO | number)


def _one_of(index: int, values: Iterable[int], otherwise: int = errno.EPERM) -> list[Instruction]:
    """Return instructions that allow a call if the lower 32 bits of argument `index` are one of `values`.

    `otherwise`: errno with which the call is refused for other values.
    """
    wanted = list(values)
    tests = [(_EQUAL, len(wanted) - at, 0, value) for at, value in enumerate(wanted)]
    return [_argument(index), *tests, _refused(otherwise), _answer(_ALLOW)]


def _special() -> dict[int, list[Instruction]]:
    """Return instructions by call number, for calls that depend on arguments or are refused with a special error."""
    threads_only = [
        _argument(0),
        (_AND, 0, 0, _CLONE_THREAD | _CLONE_NEW),
        (_EQUAL, 0, 1, _CLONE_THREAD),
        _answer(_ALLOW),
        _refused(),
    ]
    unix_stream_pair = [
        _argument(0),
        (_EQUAL, 0, 4, 1),
        _argument(1),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 0, 1, 1),
        _answer(_ALLOW),
        _refused(),
    ]
    without_address = [
        _argument(4),
        (_EQUAL, 0, 3, 0),
        _argument(4, high=True),
        (_EQUAL, 0, 1, 0),
        _answer(_ALLOW),
        _refused(),
    ]
    own_clock = [  # clock ids of other processes are negative
        _argument(0),
        (_AT_LEAST, 0, 1, 0x80000000),
        _refused(errno.EINVAL),
        _answer(_ALLOW),
    ]
    return {
        _CLONE: threads_only,
        _SOCKETPAIR: unix_stream_pair,
        _SENDTO: without_address,
        _KILL: _one_of(0, [_PID]),
        _TGKILL: _one_of(0, [_PID]),
        _PRLIMIT: _one_of(0, [0, _PID]),
        **{number: _one_of(0, [0, _PID]) for number in _AFFINITY},
        **{number: _one_of(at, [0, _PID]) for number, at in _OF_PROCESS.values()},
        **dict.fromkeys(_CLOCKS, own_clock),
        _IOCTL: _one_of(1, _IOCTLS, errno.ENOTTY),
        _FCNTL: _one_of(1, _FCNTLS),
        _SETSOCKOPT: _one_of(2, _SOCKET_OPTIONS),
        _PRCTL: _one_of(0, _PRCTLS),
        **{number: [_refused(errno.ENOSYS)] for number in _UNKNOWN},
        **{number: [_refused(errno.ENOTSUP)] for number in _EXTENDED_ATTRIBUTES},
    }


def build_filter(own_root: bool) -> bytes:
    """Return the filter, with a placeholder for the process id (see `for_process`).

    `own_root`: whether the program sees the host's files only in read-only mounts (level "full").  Then the calls of
    `_OWN_ROOT`, such as chmod, are allowed, too.
    """
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCH_X86_64),
        _answer(_KILL_PROCESS),
        (_LOAD, 0, 0, 0),
    ]
    for number, block in _special().items():
        program += [(_EQUAL, 0, len(block), number), *block]
    plain = [*_PLAIN.values(), *(_OWN_ROOT.values() if own_root else ())]
    program += [(_EQUAL, len(plain) - at, 0, number) for at, number in enumerate(plain)]  # x32 calls match no number
    program += [_refused(), _answer(_ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def for_process(program: bytes, pid: int) -> bytes:
    """Return the filter with the placeholder replaced by `pid`, the process's id in its own namespace."""
    marked, own = struct.pack("<I", _PID), struct.pack("<I", pid)
    return program.replace(marked, own)
