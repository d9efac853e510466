"""A worker process that judges the requests of one plugin, one at a time.

`pool.py` starts it as `python -m nemo_prorl.rewards.worker SOCKET_FD SERVER_PID MEMORY_MB UNSAFE PLUGIN SETTINGS`.
Plugins run on the main thread, because SIGALRM works only there.  The worker ends with its server: the kernel kills it
(PDEATHSIG) when the server dies, also in the middle of a request, and its loop ends when the server closes the socket.
"""

import importlib.metadata
import json
import os
import resource
import signal
import socket
import sys
import traceback

from prorl_sandbox.kernel import die_with_parent

from nemo_prorl import stacks
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.functions import function_plugin, is_function
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, RewardPlugin, RewardRequest, judge, one_line


def limit_memory(megabytes: int) -> None:
    """Limit private memory, so that an answer like 9^9^9 raises MemoryError, and switch off core files."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = megabytes * 2**20
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load(name: str, settings: dict[str, object], unsafe_no_sandbox: bool) -> RewardPlugin:
    """Return the plugin, ready to judge.  Raises whatever its import, settings, sandbox or `prepare` raise."""
    if is_function(name):
        plugin = make_plugin(function_plugin(name), settings)
    else:
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        plugin = make_plugin(discover(points).plugin(name), settings)
    if plugin.needs_sandbox:
        from nemo_prorl.rewards.sandbox import open_sandbox

        plugin.sandbox = open_sandbox(unsafe_no_sandbox, plugin.sandbox_packages)
    plugin.prepare()
    return plugin


def main(argv: list[str]) -> int:
    fd, server_pid, memory_mb, unsafe = map(int, argv[:4])
    name, settings = argv[4:]
    die_with_parent(server_pid)
    stacks.register()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    channel = socket.socket(fileno=fd).makefile("rw", encoding="ascii", newline="\n")

    def send(message: object) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        limit_memory(memory_mb)
        plugin = load(name, json.loads(settings), bool(unsafe))
    except Exception as error:
        traceback.print_exc()
        send({"failed": one_line(f"{type(error).__name__}: {error}")})
        return 1
    send({"ready": os.getpid()})
    for line in channel:
        send(judge(plugin, RewardRequest(**json.loads(line))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
