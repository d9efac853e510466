"""The filter of system calls: run here as the kernel would, with the numbers that the kernel's headers give."""

import errno
import fcntl
import re
import signal
import socket
import struct
import termios
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from prorl_sandbox import syscalls

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
X86_64, I386 = 0xC000003E, 0x40000003
OWN, OTHER = 0x01020304, 0x01020305  # process ids

pytestmark = pytest.mark.skipif(not HEADER.is_file(), reason="needs the kernel's headers")


@cache
def numbers() -> dict[str, int]:
    """Return the numbers of all system calls by name."""
    return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())}


@cache
def built(own_root: bool) -> bytes:
    return syscalls.for_process(syscalls.build_filter(own_root), OWN)


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    """Each test builds the filter, so that `make mutate` sees that it does."""
    built.cache_clear()


def refused(number: int = errno.EPERM) -> int:
    return 0x00050000 | number


def answer(number: int, *arguments: int, own_root: bool = True, machine: int = X86_64) -> int:
    """Run the filter on a call (struct seccomp_data), and return its answer."""
    words = [argument & (2**64 - 1) for argument in arguments]
    data = struct.pack("<IIQ6Q", number, machine, 0, *words, *[0] * (6 - len(words)))
    program = list(struct.iter_unpack("<HBBI", built(own_root)))
    at = value = 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        if code == 0x06:  # return
            return int(operand)
        if code == 0x20:  # load a word
            value = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x54:  # and
            value &= operand
        else:
            at += yes if {0x15: value == operand, 0x35: value >= operand}[code] else no


def of(name: str, *arguments: int) -> int:
    return answer(numbers()[name], *arguments)


def allowed(name: str, at: int, values: Iterable[int]) -> set[int]:
    """Return the values of argument `at` with which a call is allowed."""
    return {value for value in values if of(name, *[0] * at, value) == ALLOWED}


@pytest.mark.parametrize("own_root", [False, True])
def test_calls_are_allowed_by_the_numbers_of_their_names_and_no_others(own_root: bool) -> None:
    depends = {
        numbers().get(name) for name in ("clone", "socketpair", "sendto", "kill", "tgkill", "prlimit64", "prctl")
    }
    depends |= {numbers()[name] for name in ("ioctl", "fcntl", "setsockopt", "getpgid", "getsid", "getpriority")}
    depends |= {numbers()[f"sched_{way}affinity"] for way in ("set", "get")}
    depends |= {numbers()[f"clock_{name}"] for name in ("gettime", "getres", "nanosleep")}
    depends |= {numbers()[name] for name in ("timer_create", "timerfd_create")}
    names = {*syscalls._PLAIN, *(syscalls._OWN_ROOT if own_root else ())}
    unknown = {425, 426, 427, 435, 437, 452}  # the last, fchmodat2, is not in older headers
    attributes = {number for name, number in numbers().items() if name.endswith("xattr") and number < 200}
    assert len(attributes) == 12
    expected = {
        **dict.fromkeys(range(600), refused()),
        **dict.fromkeys((numbers()[name] for name in names), ALLOWED),
        **dict.fromkeys(unknown, refused(errno.ENOSYS)),
        **dict.fromkeys(attributes, refused(errno.ENOTSUP)),
    }
    found = {number: answer(number, own_root=own_root) for number in range(600)}
    assert {n: found[n] for n in expected if n not in depends} == {
        n: wanted for n, wanted in expected.items() if n not in depends
    }
    for number in (*range(600), 2**32 - 1):
        assert answer(0x40000000 | number, own_root=own_root) == refused()  # x32
        assert answer(number, own_root=own_root, machine=I386) == KILLED


def test_only_calls_on_the_process_itself_are_allowed() -> None:
    for name, at, zero in (
        ("kill", 0, False),  # 0: the process group
        ("tgkill", 0, False),
        ("prlimit64", 0, True),
        ("sched_setaffinity", 0, True),
        ("sched_getaffinity", 0, True),
        ("getpgid", 0, True),
        ("getsid", 0, True),
        ("getpriority", 1, True),
    ):
        assert allowed(name, at, (0, 1, OWN, OTHER, -1, -OWN)) == {OWN, *((0,) if zero else ())}, name
        assert of(name, *[0] * at, OTHER) == refused(), name
    for name in ("timer_create", "clock_gettime", "clock_getres", "clock_nanosleep", "timerfd_create"):
        assert allowed(name, 0, range(12)) == set(range(12)), name
        assert {of(name, (~pid << 3) | 2) for pid in (OWN, OTHER)} == {refused(errno.EINVAL)}, name


def test_threads_are_allowed_and_neither_processes_nor_namespaces() -> None:
    thread = 0x003D0F00  # the flags of pthread_create
    assert of("clone", thread) == ALLOWED
    for flags in (signal.SIGCHLD, 0x01200000 | signal.SIGCHLD, 0x4100 | signal.SIGCHLD, 0x00010000):  # fork, vfork
        assert of("clone", flags) == refused()
    for name in ("TIME", "NS", "CGROUP", "UTS", "IPC", "USER", "PID", "NET"):
        flag = {"TIME": 0x80, "NS": 0x20000, "CGROUP": 0x02000000, "UTS": 0x04000000}.get(name)
        flag = flag or {"IPC": 0x08000000, "USER": 0x10000000, "PID": 0x20000000, "NET": 0x40000000}[name]
        assert of("clone", thread | flag) == refused(), name


def test_sockets_are_connected_pairs_only() -> None:
    stream, unix = socket.SOCK_STREAM, socket.AF_UNIX
    for kind in (stream, stream | socket.SOCK_CLOEXEC, stream | socket.SOCK_NONBLOCK):
        assert of("socketpair", unix, kind) == ALLOWED
    for family, kind in (
        (unix, socket.SOCK_DGRAM),
        (unix, socket.SOCK_SEQPACKET),
        (socket.AF_INET, stream),
        (0, stream),
    ):
        assert of("socketpair", family, kind) == refused()
    assert of("sendto", 3, 4, 5, 6, 0, 7) == ALLOWED
    for address in (1, 1 << 32, 0x7FFF00000000):
        assert of("sendto", 3, 4, 5, 6, address, 7) == refused()
    options = {socket.SO_REUSEADDR, socket.SO_KEEPALIVE, socket.SO_LINGER, 20, 21}  # SO_RCVTIMEO, SO_SNDTIMEO
    assert allowed("setsockopt", 2, range(100)) == options


def test_controls_of_descriptors_and_the_process_are_the_harmless_ones() -> None:
    controls = {
        termios.TCGETS,
        termios.TIOCGWINSZ,
        termios.FIONREAD,
        termios.FIONBIO,
        termios.FIOCLEX,
        termios.FIONCLEX,
    }
    assert allowed("ioctl", 1, range(0x5400, 0x5500)) == controls
    assert of("ioctl", 0, termios.TIOCSTI) == refused(errno.ENOTTY)
    commands = {fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_GETLK, fcntl.F_SETLK}
    commands |= {fcntl.F_SETLKW, fcntl.F_GETOWN, fcntl.F_GETSIG, fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK}
    commands |= {fcntl.F_OFD_SETLKW, fcntl.F_DUPFD_CLOEXEC, fcntl.F_SETPIPE_SZ, fcntl.F_GETPIPE_SZ}
    commands |= {fcntl.F_ADD_SEALS, fcntl.F_GET_SEALS, 12, 13, 14}  # the locks of 32-bit programs
    assert not commands & {fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETLEASE, fcntl.F_NOTIFY}
    assert allowed("fcntl", 1, range(1100)) == commands
    dumpable, set_name, get_name, set_vma = 3, 15, 16, 0x53564D41
    assert allowed("prctl", 0, (*range(100), set_vma - 1, set_vma, set_vma + 1)) == {
        dumpable,
        set_name,
        get_name,
        set_vma,
    }


def test_a_part_of_the_filter_answers_for_its_call_alone() -> None:
    """Its jumps stay inside, and its last instruction is an answer: no other part may read this call's arguments."""
    for number, part in syscalls._special().items():
        assert part[-1][0] == 0x06, number
        for at, (code, yes, no, _) in enumerate(part):
            assert code not in (0x15, 0x35) or at + 1 + max(yes, no) < len(part), number


def test_the_filter_names_its_process_wherever_it_must() -> None:
    unbound = syscalls.build_filter(own_root=True)
    assert len(built(True)) == len(unbound)
    assert built(True).count(OWN.to_bytes(4, "little")) == 8  # where `test_only_calls_on_the_process_itself` asks
    assert syscalls.for_process(unbound, 7) != syscalls.for_process(unbound, 8)
