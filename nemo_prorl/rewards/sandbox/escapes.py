"""Attempts every escape, as a program in the sandbox; prints a JSON object: attempt -> what came of it.

"refused" is what the caller wants to read everywhere.  The places to reach come on standard input as JSON: `secret`, a
readable file; `folder`, one that all may write; `port` and `abstract`, listeners; `pid`, the caller's.  It undoes what
succeeds as far as it can.
"""

import ctypes
import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

PLACES = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
results: dict[str, str] = {}


def attempt(name: str) -> Callable[[Callable[[], Any]], None]:
    """Runs the function now; it succeeds unless it raises or returns False."""

    def run(function: Callable[[], Any]) -> None:
        try:
            outcome = function()
        except Exception:
            results[name] = "refused"
        else:
            results[name] = "refused" if outcome is False else "POSSIBLE"

    return run


def call(number: int, *arguments: int) -> None:
    """A call to the kernel; an error other than a refusal means that it looked at the arguments."""
    done = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)) >= 0
    if not done and ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), "refused")


@attempt("read a file of the host")
def _() -> Any:
    open(PLACES["secret"]).read()


@attempt("write a file of the host")
def _() -> Any:
    path = os.path.join(PLACES["folder"], "escaped")
    open(path, "w").close()


@attempt("remove a file of the host")
def _() -> Any:
    os.unlink(PLACES["secret"])


@attempt("change the mode of a file of the host")
def _() -> Any:
    os.chmod(PLACES["secret"], 0o600)


@attempt("truncate a file of the host")
def _() -> Any:
    os.truncate(PLACES["secret"], 0)


@attempt("link to a file of the host")
def _() -> Any:
    os.link(PLACES["secret"], "linked")
    open("linked").read()


@attempt("read through a link")
def _() -> Any:
    os.symlink(PLACES["secret"], "pointer")
    open("pointer").read()


@attempt("see other processes")
def _() -> Any:
    return any(name.isdigit() and int(name) != os.getpid() for name in os.listdir("/proc"))


@attempt("read the caller's memory")
def _() -> Any:
    open(f"/proc/{PLACES['pid']}/mem", "rb").read(1)


@attempt("copy another process's memory")
def _() -> Any:
    call(310, PLACES["pid"], 0, 0, 0, 0, 0)


@attempt("trace another process")
def _() -> Any:
    call(101, 16, os.getppid(), 0, 0)


@attempt("be traced")
def _() -> Any:
    call(101, 0, 0, 0, 0)


@attempt("signal the parent")
def _() -> Any:
    os.kill(os.getppid(), 0)


@attempt("signal the caller")
def _() -> Any:
    os.kill(PLACES["pid"], 0)


@attempt("signal the process group")
def _() -> Any:
    os.killpg(0, 0)


@attempt("signal by descriptor")
def _() -> Any:
    os.pidfd_open(os.getppid())


@attempt("send signals by a file's owner")
def _() -> Any:
    import fcntl

    read, _ = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, PLACES["pid"])


@attempt("fork")
def _() -> Any:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@attempt("execute a program")
def _() -> Any:
    if hasattr(os, "posix_spawn"):
        pid = os.posix_spawn(sys.executable or "/bin/true", ["true"], {})
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return False


@attempt("replace itself by a program")
def _() -> Any:
    path = ctypes.create_string_buffer(b"/nonexistent")
    call(59, ctypes.addressof(path), 0, 0)


for kind, family in (("tcp", socket.AF_INET), ("udp", socket.AF_INET)):

    @attempt(f"reach a {kind} port of the host")
    def _(kind: str = kind, family: int = family) -> Any:
        with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.5)
            sock.connect(("127.0.0.1", PLACES["port"]))
            sock.send(b"escaped")


@attempt("reach an abstract unix socket")
def _() -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + PLACES["abstract"])


@attempt("send to a unix socket from one of a pair")
def _() -> Any:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"escaped", "\0" + PLACES["abstract"])


@attempt("open a raw socket")
def _() -> Any:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)


@attempt("see the host's ports")
def _() -> Any:
    open("/proc/net/tcp").read()


@attempt("change the caller's limits")
def _() -> Any:
    import resource

    resource.prlimit(PLACES["pid"], resource.RLIMIT_CORE)


@attempt("raise its own limits")
def _() -> Any:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2 * hard, 2 * hard))


for name, number, arguments in (
    ("enter new namespaces", 272, (0x10000000,)),
    ("mount", 165, (0, 0, 0, 0, 0)),
    ("change the root", 161, (0,)),
    ("load a kernel program", 321, (0, 0, 0)),
    ("use io_uring", 425, (1, 0)),
    ("set the clock", 227, (0, 0)),
    ("use kernel keys", 250, (0, -3, 0)),
    ("make shared memory", 29, (0, 4096, 0o1600)),
    ("make a message queue", 68, (0, 0o1600)),
    ("watch page faults", 323, (0,)),
    ("count events", 298, (0, 0, -1, -1, 0)),
    ("make an executable in memory", 319, (0, 0)),
    ("become another user", 105, (0,)),
):

    @attempt(name)
    def _(number: int = number, arguments: tuple[int, ...] = arguments) -> Any:
        call(number, *arguments)


@attempt("take 3 GiB of memory")
def _() -> Any:
    import mmap

    mmap.mmap(-1, 3 << 30)


@attempt("open 2,000 files")
def _() -> Any:
    held: list[int] = []
    try:
        while len(held) < 2000:
            held.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for fd in held:
            os.close(fd)


@attempt("write a file of 80 MB")
def _() -> Any:
    try:
        with open("large", "wb") as file:
            for _ in range(80):
                file.write(bytes(1 << 20))
    finally:
        os.unlink("large")


@attempt("find the host's variables")
def _() -> Any:
    ours = ("PATH", "LANG", "HOME", "TMPDIR", "PWD", "PYTHONHASHSEED", "OMP_NUM_THREADS", "LC_CTYPE")
    return any(name not in ours for name in os.environ)


@attempt("read what is behind the descriptors it was left")
def _() -> Any:
    for fd in range(3, 256):
        try:
            if PLACES["text_reversed"][::-1].encode() in os.pread(fd, 1 << 16, 0):
                return True
        except OSError:
            pass
    return False


@attempt("ask for the size of a file of the host")
def _() -> Any:
    os.stat(PLACES["secret"])


json.dump(results, sys.stdout)
