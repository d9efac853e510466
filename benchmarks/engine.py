"""A rollout engine (vLLM) that a benchmark starts as its own process; there is no run."""

import json
import os
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


class Engine:
    """An engine that serves the model folder `model`; its access token, endpoint file and log are in `folder`."""

    def __init__(self, model: Path, folder: Path, store: Path, wait_s: float, **options: object) -> None:
        """Start the engine and wait until it serves.

        Args:
            store: folder from which weights may be loaded.
            wait_s: seconds within which the engine must be ready.
            options: command-line options of nemo_prorl.rollout.engine.server, such as dtype="bfloat16", kv_mb=64 or
                eager=True.

        Raises:
            RuntimeError: the engine ended or was not ready in time; the message has the end of the log.
        """
        token, endpoint = folder / "token", folder / "endpoint.json"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16))
        endpoint.unlink(missing_ok=True)
        self._token = token.read_text()
        command = [str(ROOT / ".venv/rollout/bin/python"), "-m", "nemo_prorl.rollout.engine.server"]
        files = {"model": model, "token-file": token, "weights-dir": store, "endpoint-file": endpoint}
        for name, value in {**files, **options, "parent-pid": os.getpid()}.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._log = (folder / "engine.log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT)
        end = time.monotonic() + wait_s
        while not endpoint.exists() or "url" not in json.loads(endpoint.read_text()):
            if self._process.poll() is not None or time.monotonic() > end:
                self._log.seek(0)
                raise RuntimeError(f"the engine was not ready within {wait_s:.0f} s:\n{self._log.read()[-3000:]}")
            time.sleep(0.2)
        self._url = json.loads(endpoint.read_text())["url"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=1200)

    def load(self, path: Path, version: int) -> None:
        self._post("/weights", {"path": str(path), "version": version, "wait_s": 60}).read()

    def generate(self, prompt: list[int], seeds: list[int], **sampling: object) -> Iterator[dict[str, Any]]:
        """Yield each response to a prompt when it ends, as a dict with `token_ids`, `logprobs` and `index`."""
        with self._post("/generate", {"prompt": prompt, "seeds": seeds, **sampling}) as reply:
            for line in filter(None, map(bytes.strip, reply)):
                found = json.loads(line)
                if "error" in found:
                    raise RuntimeError(found["error"])
                if "token_ids" in found:
                    yield found

    def cpu_s(self) -> float:
        """Return the seconds of CPU time that the engine's processes have used, which other work hardly changes."""
        server = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
