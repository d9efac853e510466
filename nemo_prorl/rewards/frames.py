"""Messages between pool and worker over a socket: 4 bytes of length (big-endian), then JSON in UTF-8."""

import asyncio
import json
import socket
import struct
from typing import Any

_HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
    # ASCII escapes keep lone surrogates, which JSON allows in strings and UTF-8 does not.
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message.  Raises EOFError where the other side is gone (asyncio.IncompleteReadError is one)."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return json.loads(await reader.readexactly(length))


class BlockingChannel:
    """The worker's side of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._in = sock.makefile("rb")

    def receive(self) -> Any:
        """The next message, or None where the server is gone or says that it is over."""
        header = self._in.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack(header)
        body = self._in.read(length)
        return json.loads(body) if len(body) == length else None

    def send(self, message: Any) -> None:
        self._sock.sendall(pack(message))
