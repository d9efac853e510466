"""A process that records the side effects of a plugin's import, and the network use of its `prepare` and `score`.

`conformance.py` starts it as `python -B -m nemo_prorl.rewards.import_probe PARENT_PID NAME`, with a JSON object on
standard input (settings, truths and requests), and reads the findings as JSON from standard output.  The probe relies
on Python's audit events, so it does not notice C code that writes files or opens connections directly.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any

from prorl_sandbox.kernel import die_with_parent

from nemo_prorl.rewards.discovery import make_plugin
from nemo_prorl.rewards.interface import ENTRY_POINT_GROUP, RewardPlugin, RewardRequest, judge, one_line

HEAVY = (
    *("aiohttp", "datasets", "httpx", "jax", "langdetect", "latex2sympy2_extended", "lightning", "math_verify"),
    *("matplotlib", "megatron", "nemo", "nltk", "numpy", "openai", "pandas", "pyarrow", "reasoning_gym", "requests"),
    *("scipy", "sklearn", "spacy", "sympy", "tensorflow", "torch", "transformers", "vllm"),
)
IMPORT_CPU_S = 1.0  # maximum CPU seconds for the import of a plugin's module
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FILES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")


class Watch:
    """A recorder of audit events while `stage` is "import" or "judge".  Each distinct effect is recorded once."""

    def __init__(self) -> None:
        self.stage = ""
        self.found: dict[str, list[str]] = {"import": [], "judge": []}
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        effect = None
        if self.stage == "import":
            effect = _import_effect(event, args)
        elif self.stage == "judge":
            effect = _network_use(event, args)
        if effect and effect not in self.found[self.stage]:
            self.found[self.stage].append(effect)


def _import_effect(event: str, args: tuple[Any, ...]) -> str | None:
    if event == "open":
        path, _, flags = args
        written = isinstance(flags, int) and flags & _WRITING and path != os.devnull
        return f"opens {path!r} for writing" if written else None
    if event in _FILES or event.startswith("tempfile."):
        return f"changes files: {event}({', '.join(map(repr, args[:1]))})"
    if event == "socket.__new__":
        return "opens a socket"
    if event in _PROCESSES:
        return f"starts a process: {event}({', '.join(map(repr, args[:1]))})"
    if event.startswith("_thread.start"):
        return "starts a thread"
    return "changes the environment variables" if event in ("os.putenv", "os.unsetenv") else None


def _network_use(event: str, args: tuple[Any, ...]) -> str | None:
    if event not in _NETWORK:
        return None
    target = args[0] if event.startswith("socket.get") else args[-1]
    local = event.startswith("socket.") and isinstance(target, (str, bytes)) and not event.startswith("socket.get")
    return None if local else f"{event}({target!r})"  # a string as address is the path of a local socket


def _import(point: importlib.metadata.EntryPoint, watch: Watch) -> type[RewardPlugin]:
    """Import and return the plugin class; record the effects of the import in `watch`."""
    effects = watch.found["import"]
    before, threads, started = set(sys.modules), _threads(), time.process_time()
    directory = os.getcwd()
    watch.stage = "import"
    try:
        plugin: type[RewardPlugin] = point.load()
    finally:
        watch.stage = ""
    used = time.process_time() - started
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if printed := os.lseek(1, 0, os.SEEK_CUR) + os.lseek(2, 0, os.SEEK_CUR):
        effects.append(f"prints {printed} bytes")
    if _threads() > threads and "starts a thread" not in effects:
        effects.append("starts a thread")
    if os.getcwd() != directory:
        effects.append("changes the working directory")
    if heavy := sorted({name.split(".")[0] for name in set(sys.modules) - before} & set(HEAVY)):
        effects.append(f"imports {', '.join(heavy)}")
    if used > IMPORT_CPU_S:
        effects.append(f"takes {used:.1f} s of CPU time; at most {IMPORT_CPU_S:g} s are allowed")
    return plugin


def _threads() -> int:
    return max(threading.active_count(), len(os.listdir("/proc/self/task")))


def _validation(plugin: RewardPlugin, truth: dict[str, Any]) -> dict[str, str]:
    """Return type and text of the exception that `validate_truth` raises; empty strings if it raises none."""
    try:
        plugin.validate_truth(truth)
    except ValueError as error:
        return {"raised": "ValueError", "text": one_line(str(error))}
    except Exception as error:
        return {"raised": type(error).__name__, "text": one_line(str(error))}
    return {"raised": "", "text": ""}


def main(argv: list[str]) -> int:
    die_with_parent(int(argv[0]))
    task = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w")
    for number in (1, 2):
        os.dup2(os.memfd_create(f"stream-{number}"), number)
    watch = Watch()
    [point] = set(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=argv[1]))
    findings: dict[str, Any] = {"import": watch.found["import"], "network": watch.found["judge"], "truths": []}
    try:
        plugin = make_plugin(_import(point, watch), task["settings"])
        watch.stage = "judge"
        if task["prepare"]:
            plugin.prepare()
        findings["truths"] = [_validation(plugin, truth) for truth in task["truths"]]
        for request in task["requests"]:
            judge(plugin, RewardRequest.from_json(request))
    except Exception as error:
        findings["failed"] = one_line(f"{type(error).__name__}: {error}")
    watch.stage = ""
    results.write(json.dumps(findings))
    results.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
