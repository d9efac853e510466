"""A program that attempts every escape from the sandbox; prints a JSON object: attempt -> "refused" or "POSSIBLE".

Standard input is a JSON object with the targets: `secret`, path of a readable file; `text_reversed`, the reversed text
of this file; `folder`, path of a folder that all users may write to; `port`, number of an open TCP and UDP port;
`abstract`, name of an open abstract Unix socket; `pid`, process id of the caller.  A successful attempt is undone if
possible.
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
libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: int) -> None:
    """Make a system call; raise OSError if its errno is a refusal (EPERM, EACCES, ENOSYS).

    A call that fails with another errno, such as EINVAL for the dummy arguments, counts as allowed.
    """
    done = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)) >= 0
    if not done and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), "refused")


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
    resource.setrlimit(resource.RLIMIT_AS, (2 * hard, 2 * hard))


def open_files() -> None:
    opened: list[int] = []
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
            if PLACES["text_reversed"][::-1].encode() in os.pread(fd, 1 << 16, 0):
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
    "read the caller's memory": lambda: open(f"/proc/{caller}/mem", "rb").read(1),
    "copy another process's memory": lambda: call(310, caller, 0, 0, 0, 0, 0),
    "trace another process": lambda: call(101, 16, os.getppid(), 0, 0),
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
        b"escaped", ABSTRACT
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
    "make shared memory": lambda: call(29, 0, 4096, 0o1600),
    "make a message queue": lambda: call(68, 0, 0o1600),
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
        return "refused" if attempt() is False else "POSSIBLE"
    except Exception:
        return "refused"


json.dump({name: outcome_of(attempt) for name, attempt in ATTEMPTS.items()}, sys.stdout)
