"""The strongest sandbox level of this machine, proven by a program that attempts every escape."""

import contextlib
import ctypes
import json
import logging
import os
import select
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_sandbox.client import Sandbox
from prorl_sandbox.programs import NoSandbox, Program, SandboxFailure

_log = logging.getLogger(__name__)

LEVELS = ("full", "reduced")
_ESCAPES = Path(__file__).with_name("escapes.py")
_STAT = "ask for the size of a file of the host"
_FILL = """
for number in range(100):
    with open(f"part-{number}", "wb") as file:
        file.write(bytes(1 << 20))
    __import__("time").sleep(0.01)
print("POSSIBLE")
"""
_THREADS = """
import threading, time
threading.stack_size(1 << 16)
forever = threading.Event()  # keeps all threads alive until the last one starts
for _ in range(300):
    threading.Thread(target=forever.wait, daemon=True).start()
time.sleep(0.5)
print("POSSIBLE")
"""
_NEEDS = """
import _ctypes, _hashlib, bz2, ctypes, decimal, email, lzma, sqlite3, ssl, unittest, xml.etree.ElementTree, zlib
print("ready")
"""
# Escapes that a level does not stop, with their meaning.
_LACKS = {
    "full": {},
    "reduced": {_STAT: "a program can ask for names, sizes and times of the host's files (stat), not read them"},
}


@dataclass(frozen=True)
class Proof:
    """The result of trying a level.

    `layers`: protections that the sandbox process reported, such as `landlock` with its version.  `open`: escapes that
    succeeded although the level must stop them.  `lacks`: known gaps of the level, as sentences for users.  `failure`:
    reason why the level does not work on this machine, or why the escapes could not be tried.
    """

    level: str
    layers: dict[str, Any] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    failure: str = ""

    @property
    def holds(self) -> bool:
        return not self.failure and not self.open

    def line(self) -> str:
        """Return the result as one line of text for users."""
        if self.failure:
            return f"{self.level}: {self.failure}"
        if self.open:
            return f"{self.level}: a program can {', '.join(self.open)}"
        return f"{self.level}: every escape was refused" + "".join(f"; {text}" for text in self.lacks)


@dataclass(frozen=True)
class _Bait:
    """Bait: files and sockets that a program must not reach."""

    folder: Path
    secret: Path  # file in `folder`
    text: str  # content of `secret`
    listeners: tuple[socket.socket, ...]
    words: dict[str, Any]  # input of `escapes.py`, which names the bait
    memory: Any = None  # keeps the text alive at the address in `words`

    def touched(self) -> list[str]:
        """Return the effects of the attempts outside of the sandbox, as phrases like `change files of the host`."""
        effects = []
        if sorted(p.name for p in self.folder.iterdir()) != ["secret"] or self.secret.read_text() != self.text:
            effects.append("change files of the host")
        elif self.secret.stat().st_mode & 0o777 != 0o644:
            effects.append("change the mode of a file of the host")
        if select.select(self.listeners, [], [], 0)[0]:
            effects.append("reach a socket of the host")
        return effects


def _same_port() -> list[socket.socket]:
    """Return a listening TCP socket and a UDP socket with the same port number."""
    for _ in range(100):
        listener, datagrams = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            datagrams.bind(listener.getsockname())
        except OSError:
            listener.close()
            datagrams.close()
        else:
            return [listener, datagrams]
    raise OSError("no port of 127.0.0.1 is free for TCP and UDP")


@contextlib.contextmanager
def _baits() -> Iterator[_Bait]:
    folder = Path(tempfile.mkdtemp(prefix="prorl-bait-"))
    sockets = _same_port()
    abstract = [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
    try:
        folder.chmod(0o777)
        secret, text = folder / "secret", os.urandom(16).hex()
        secret.write_text(text)
        secret.chmod(0o644)
        port = sockets[0].getsockname()[1]
        name = f"prorl-bait-{os.urandom(8).hex()}"
        abstract[0].bind("\0" + name)
        abstract[0].listen()
        abstract[1].bind("\0" + name + "-datagrams")
        words = {
            "secret": str(secret),
            "text_reversed": text[::-1],
            "folder": str(folder),
            "port": port,
            "abstract": name,
        }
        memory = ctypes.create_string_buffer(text.encode())
        words |= {"pid": os.getpid(), "address": ctypes.addressof(memory)}
        yield _Bait(folder, secret, text, (*sockets, *abstract), words, memory)
    finally:
        for sock in (*sockets, *abstract):
            sock.close()
        shutil.rmtree(folder, ignore_errors=True)


def prove(sandbox: Sandbox) -> Proof:
    """Attempt every escape in a sandbox that is already started, and return which attempts succeeded."""
    with _baits() as bait:
        program = Program(_ESCAPES.read_text(), "stdin", (json.dumps(bait.words),), time_limit_s=20.0)
        run = sandbox.run(program, lambda *_: True)
        if run.outputs[0] is None or run.over_time:
            reason = "over time" if run.over_time else run.refused or run.details[0]
            return Proof(sandbox.level, failure=f"the program that attempts the escapes did not end: {reason}")
        try:
            results: dict[str, str] = json.loads(run.outputs[0])
        except ValueError:
            return Proof(sandbox.level, failure="the program that attempts the escapes printed no JSON")
        if failed := [f"{name}: {result}" for name, result in results.items() if result.startswith("failed")]:
            return Proof(
                sandbox.level, failure=f"attempts to escape that do not work prove nothing: {'; '.join(failed)}"
            )
        possible = [name for name, result in results.items() if result == "POSSIBLE"] + bait.touched()
    needs = sandbox.run(Program(_NEEDS, "stdin", ("",), time_limit_s=20.0), lambda *_: True)
    if needs.outputs[0] != b"ready\n":
        return Proof(sandbox.level, failure=f"Python's standard library cannot be read inside: {needs.details[0]}")
    for name, source in (("fill the disk", _FILL), ("start 300 threads", _THREADS)):
        if sandbox.run(Program(source, "stdin", ("",), time_limit_s=20.0), lambda *_: True).outputs[0] is not None:
            possible.append(name)
    known = _LACKS[sandbox.level]
    lacks = [text for name, text in known.items() if name in possible]
    if not sandbox.layers.get("landlock"):
        lacks.append("the kernel has no Landlock")
    return Proof(sandbox.level, sandbox.layers, tuple(n for n in possible if n not in known), tuple(lacks))


def _tried(level: str, packages: Sequence[str] = ()) -> tuple[Sandbox, Proof]:
    """Start and test the sandbox of one level.  Return the sandbox and the proof; a sandbox that failed is closed."""
    sandbox = Sandbox(level, packages=packages)
    try:
        sandbox.start()
        proof = prove(sandbox)
    except SandboxFailure as error:
        proof = Proof(level, failure=str(error))
    if not proof.holds:
        sandbox.close()
    return sandbox, proof


def open_sandbox(unsafe: bool = False, packages: Sequence[str] = ()) -> Sandbox:
    """Start and return the strongest sandbox that passes on this machine.  Raises NoSandbox if no level passes.

    Args:
        unsafe: If no level passes, start a plain child process with limits, which does not stop hostile code.
        packages: Installed third-party packages that programs may import.
    """
    proofs = []
    for level in LEVELS:
        sandbox, proof = _tried(level, packages)
        if proof.holds:
            _log.info("sandbox level %s", proof.line())
            return sandbox
        proofs.append(proof)
    if unsafe:
        _log.warning("NO SANDBOX (unsafe): code of the model runs as this user, with resource limits only")
        sandbox = Sandbox("none", packages=packages)
        sandbox.start()
        return sandbox
    raise NoSandbox(refusal(proofs))


def refusal(proofs: list[Proof]) -> str:
    """Return the error text for a machine on which no level passes, with a fix."""
    lines = "; ".join(proof.line() for proof in proofs)
    return (
        f"no sandbox works on this machine ({lines}).  Fix: allow user namespaces or run as root, with Landlock and"
        " seccomp (Linux 5.13)"
    )


def survey() -> list[Proof]:
    """Try the escapes on each level of isolation, and return the proof of each level, for `prorl doctor`."""
    proofs = []
    for level in LEVELS:
        sandbox, proof = _tried(level)
        sandbox.close()
        proofs.append(proof)
    return proofs
