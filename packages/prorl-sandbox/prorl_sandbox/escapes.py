"""A program that attempts every escape from the sandbox, and prints a JSON object with the outcome of each attempt.

An outcome is "POSSIBLE"; "refused (WHY)" if the system refused a call, with the name of its errno; or "failed (WHY)" if
the attempt itself does not work, which proves nothing.

Standard input is a JSON object with the targets: `secret`, path of a readable file; `text_reversed`, the reversed text
of this file; `folder`, path of a folder that all users may write to; `port`, number of an open TCP and UDP port;
`abstract`, name of an open abstract Unix stream socket, and with `-datagrams` behind it of a datagram socket; `pid`,
process id of the caller; `address`, where the caller's memory has the same text; `only`, the attempts to make, by
default all.  A successful attempt is undone if possible.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

PLACES = json.loads(sys.stdin.read())
secret, caller = PLACES["secret"], PLACES["pid"]
TEXT = PLACES["text_reversed"][::-1].encode()
libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: int) -> int:
    """Make a system call and return its result; raise OSError if its errno is a refusal (EPERM, EACCES, ENOSYS).

    A call that fails with another errno, such as EINVAL for the dummy arguments, counts as allowed.
    """
    done: int = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    if done < 0 and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), "refused")
    return done


def caller_file() -> bool:
    """Return whether the caller's memory can be read through its file."""
    with open(f"/proc/{caller}/mem", "rb", buffering=0) as memory:
        memory.seek(PLACES["address"])
        return memory.read(len(TEXT)) == TEXT


def caller_memory() -> bool:
    """Return whether process_vm_readv copies the caller's memory."""
    own = ctypes.create_string_buffer(len(TEXT))
    vectors = [(ctypes.c_ulong * 2)(at, len(TEXT)) for at in (ctypes.addressof(own), PLACES["address"])]
    call(310, caller, ctypes.addressof(vectors[0]), 1, ctypes.addressof(vectors[1]), 1, 0)
    return own.raw == TEXT


def make_and_remove(make: int, arguments: tuple[int, ...], control: int) -> None:
    """Make an object of System V and remove it."""
    made = call(make, *arguments)
    if made < 0 or call(control, made, 0, 0) < 0:
        raise ValueError(os.strerror(ctypes.get_errno()))


def read_through(way: Callable[[str, str], None], name: str) -> None:
    way(secret, name)
    open(name).read()


def signal_by_owner() -> None:
    read, _ = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, caller)


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def execute() -> bool:
    pid = os.posix_spawn(sys.executable or "/bin/true", ["true"], {})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def replace_itself() -> None:
    path = ctypes.create_string_buffer(b"/nonexistent")
    call(59, ctypes.addressof(path), 0, 0)


def reach(family: int, kind: int, address: Any) -> None:
    with socket.socket(family, kind) as sock:
        sock.settimeout(0.5)
        sock.connect(address)
        sock.send(b"escaped")


def raise_limits() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY:  # nothing to raise: there is no limit
        return
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2 * hard, 2 * hard))
    except ValueError as error:  # Python's translation of EPERM
        raise PermissionError(errno.EPERM, str(error)) from error


def open_files() -> None:
    opened: list[int] = []
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        while len(opened) < 2000:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for fd in opened:
            os.close(fd)


def write_large() -> None:
    try:
        with open("large", "wb") as file:
            for _ in range(80):
                file.write(bytes(1 << 20))
    finally:
        os.unlink("large")


def find_variables() -> bool:
    ours = ("PATH", "LANG", "HOME", "TMPDIR", "PWD", "PYTHONHASHSEED", "OMP_NUM_THREADS", "LC_CTYPE")
    return any(name not in ours for name in os.environ)


def read_descriptors() -> bool:
    for fd in range(3, 256):
        try:
            if TEXT in os.pread(fd, 1 << 16, 0):
                return True
        except OSError:
            pass
    return False


PORT, ABSTRACT = ("127.0.0.1", PLACES["port"]), "\0" + PLACES["abstract"]
# An attempt succeeds unless it raises or returns False.
ATTEMPTS: dict[str, Callable[[], Any]] = {
    "read a file of the host": lambda: open(secret).read(),
    "write a file of the host": lambda: open(os.path.join(PLACES["folder"], "escaped"), "w").close(),
    "remove a file of the host": lambda: os.unlink(secret),
    "change the mode of a file of the host": lambda: os.chmod(secret, 0o600),
    "truncate a file of the host": lambda: os.truncate(secret, 0),
    "link to a file of the host": lambda: read_through(os.link, "linked"),
    "read through a link": lambda: read_through(os.symlink, "pointer"),
    "see other processes": lambda: any(name.isdigit() and int(name) != os.getpid() for name in os.listdir("/proc")),
    "read the caller's memory": caller_file,
    "copy another process's memory": caller_memory,
    "trace another process": lambda: call(101, 0x4206, os.getppid(), 0, 0),  # PTRACE_SEIZE, which does not stop it
    "be traced": lambda: call(101, 0, 0, 0, 0),
    "signal the parent": lambda: os.kill(os.getppid(), 0),
    "signal the caller": lambda: os.kill(caller, 0),
    "signal the process group": lambda: os.killpg(0, 0),
    "signal by descriptor": lambda: os.pidfd_open(os.getppid()),
    "send signals by a file's owner": signal_by_owner,
    "fork": fork,
    "execute a program": execute,
    "replace itself by a program": replace_itself,
    "reach a tcp port of the host": lambda: reach(socket.AF_INET, socket.SOCK_STREAM, PORT),
    "reach a udp port of the host": lambda: reach(socket.AF_INET, socket.SOCK_DGRAM, PORT),
    "reach an abstract unix socket": lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, ABSTRACT),
    "send to a unix socket from one of a pair": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(
        b"escaped", ABSTRACT + "-datagrams"
    ),
    "open a raw socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "see the host's ports": lambda: open("/proc/net/tcp").read(),
    "change the caller's limits": lambda: resource.prlimit(caller, resource.RLIMIT_CORE),
    "raise its own limits": raise_limits,
    "enter new namespaces": lambda: call(272, 0x10000000),
    "mount": lambda: call(165, 0, 0, 0, 0, 0),
    "change the root": lambda: call(161, 0),
    "load a kernel program": lambda: call(321, 0, 0, 0),
    "use io_uring": lambda: call(425, 1, 0),
    "set the clock": lambda: call(227, 0, 0),
    "use kernel keys": lambda: call(250, 0, -3, 0),
    "make shared memory": lambda: make_and_remove(29, (0, 4096, 0o1600), 31),
    "make a message queue": lambda: make_and_remove(68, (0, 0o1600), 71),
    "watch page faults": lambda: call(323, 0),
    "count events": lambda: call(298, 0, 0, -1, -1, 0),
    "make an executable in memory": lambda: call(319, 0, 0),
    "become another user": lambda: call(105, 0),
    "take 3 GiB of memory": lambda: mmap.mmap(-1, 3 << 30),
    "open 2,000 files": open_files,
    "write a file of 80 MB": write_large,
    "find the host's variables": find_variables,
    "read what is behind the descriptors it was left": read_descriptors,
    "ask for the size of a file of the host": lambda: os.stat(secret),
}


def outcome_of(attempt: Callable[[], Any]) -> str:
    try:
        return "refused (nothing was found)" if attempt() is False else "POSSIBLE"
    except OSError as error:
        return f"refused ({errno.errorcode.get(error.errno or 0, type(error).__name__)})"
    except Exception as error:
        return f"failed ({type(error).__name__}: {error})"


json.dump({name: outcome_of(ATTEMPTS[name]) for name in PLACES.get("only", ATTEMPTS)}, sys.stdout)
