"""A worker process: one plugin, one thread, one request at a time, on the main thread (SIGALRM works there).

Started by `pool.py` as `python -m nemo_prorl.rewards.worker SOCKET_FD SERVER_PID MEMORY_MB UNSAFE PLUGIN SETTINGS`.
It dies with its server: PDEATHSIG kills it in the middle of a request too, and an end of file ends its loop.
"""

import ctypes
import importlib.metadata
import json
import os
import resource
import signal
import socket
import sys
import traceback

from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.frames import BlockingChannel
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, RewardPlugin, RewardRequest, judge, one_line

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies; leaves at once if it is already dead."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def limit_memory(megabytes: int) -> None:
    """Private memory at most `megabytes`, so that an answer like 9^9^9 raises MemoryError; no core files."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = megabytes * 2**20
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(name: str, settings: dict[str, object], unsafe_no_sandbox: bool) -> RewardPlugin:
    """The plugin, warmed up.  Raises what its import, its settings, its sandbox or its `prepare` raise."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    plugin = make_plugin(discover(points).plugin(name), settings)
    if plugin.needs_sandbox:
        from nemo_prorl.rewards.sandbox.levels import open_sandbox

        plugin.sandbox = open_sandbox(unsafe_no_sandbox, plugin.sandbox_packages)
    plugin.prepare()
    return plugin


def main(argv: list[str]) -> int:
    fd, server_pid, memory_mb, unsafe = map(int, argv[:4])
    name, settings = argv[4:]
    die_with_parent(server_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the server's to handle
    channel = BlockingChannel(socket.socket(fileno=fd))
    try:
        limit_memory(memory_mb)
        plugin = load(name, json.loads(settings), bool(unsafe))
    except Exception as error:
        traceback.print_exc()
        channel.send({"failed": one_line(f"{type(error).__name__}: {error}")})
        return 1
    channel.send({"ready": os.getpid()})
    while (message := channel.receive()) is not None:
        verdict = judge(plugin, RewardRequest.from_json(message["request"]))
        channel.send({"number": message["number"], "verdict": verdict})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
