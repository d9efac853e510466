"""Answers/s and latency of the reward server by domain, with 1 and 2 workers; code is also judged in two plain ways.

    .venv/train/bin/python benchmarks/rewards.py [--seconds 8]

Requests go through the real server and client over HTTP: 64 in flight per worker to measure the rate, then 2 per worker
to measure the latency.  The plain ways judge code by the same ten tests: (a) a fresh `python3` for each test, (b)
`bwrap` and one fresh `python3` for each answer.  In both, `python3` runs with -I -S, with which it starts fastest.
Server and client share the cores, so that the client lowers the server's rates.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from machine import describe
from reward_load import CODE_TRUTH, PROGRAM, Load, code_of, formulas, instructions, plain_numbers, puzzles, same, stem

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.client import ClientOptions, RewardClient

ROWS: dict[str, tuple[str, Callable[[int, random.Random], Load]]] = {
    "math, plain numbers": ("math", plain_numbers),
    "math, formulas": ("math", formulas),
    "stem": ("stem", stem),
    "puzzles": ("puzzles", puzzles),
    "instructions": ("instructions", instructions),
    "code, all 10 tests pass": ("code", lambda n, _: code_of(n, "passes")),
    "code, all 10 wrong": ("code", lambda n, _: code_of(n, "wrong")),
    "code, all 10 raise": ("code", lambda n, _: code_of(n, "raises")),
}


@contextlib.contextmanager
def server(folder: Path, task: str, workers: int) -> Iterator[None]:
    """Run a reward server, which writes its endpoint file into `folder`."""
    token, endpoint = folder / "token", folder / "rewards-0.json"
    token.write_text("benchmark\n")
    token.chmod(0o600)
    command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--tasks", task, "--workers", str(workers)]
    command += ["--token-file", str(token), "--endpoint-file", str(endpoint), "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while '"ready"' not in (endpoint.read_text() if endpoint.exists() else ""):
            if process.poll() is not None:
                raise RuntimeError(f"the reward server ended with {process.returncode}")
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        endpoint.unlink(missing_ok=True)


async def _drive(folder: Path, loads: Iterator[Load], in_flight: int, seconds: float) -> tuple[int, int, list[float]]:
    """Keep `in_flight` requests open for `seconds`; return counts of answers and wrong answers, and latencies in s."""
    done = wrong = 0
    latencies: list[float] = []
    async with RewardClient(folder, folder / "token", ClientOptions(batch_wait_s=0.001)) as client:
        end = time.monotonic() + seconds

        async def one_after_another() -> None:
            nonlocal done, wrong
            while (began := time.monotonic()) < end:
                load = next(loads)
                verdict = await client.score(load.request, Deadline(60.0, "a verdict"))
                latencies.append(time.monotonic() - began)
                done, wrong = done + 1, wrong + (not same(load, verdict))

        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    return done, wrong, latencies


def _loads(make: Callable[[int, random.Random], Load]) -> Iterator[Load]:
    rng, number = random.Random(0), 0
    while True:
        yield make(number, rng)
        number += 1


def _row(name: str, rate: float, latencies: list[float], wrong: int = 0) -> str:
    cuts = statistics.quantiles(latencies, n=100) if len(latencies) > 1 else latencies * 99
    note = f"  {wrong} WRONG" if wrong else ""
    return f"{name:38s} {rate:9.1f} {1e3 * cuts[49]:9.1f} {1e3 * cuts[98]:9.1f}{note}"


def measure_server(
    name: str, task: str, make: Callable[[int, random.Random], Load], workers: int, seconds: float
) -> str:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with server(folder, task, workers):
            asyncio.run(_drive(folder, _loads(make), 2 * workers, 1.0))  # the first requests warm caches
            began = time.monotonic()
            done, wrong, _ = asyncio.run(_drive(folder, _loads(make), 64 * workers, seconds))
            rate = done / (time.monotonic() - began)
            _, more, latencies = asyncio.run(_drive(folder, _loads(make), 2 * workers, seconds / 2))
    return _row(f"{name}, {workers} worker{'s' * (workers > 1)}", rate, latencies, wrong + more)


def _fresh_python_a_test(python: str, folder: Path) -> bool:
    command = [python, "-I", "-S", str(folder / "main.py")]
    for test in CODE_TRUTH["tests"]:
        done = subprocess.run(command, input=test["input"], capture_output=True, text=True, check=False)
        if done.stdout.split() != test["output"].split():
            return False
    return True


_DRIVER = """
import contextlib, io, json, runpy, sys
outputs = []
for test in json.load(open(sys.argv[1])):
    sys.stdin, out = io.StringIO(test), io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(sys.argv[2], run_name="__main__")
    outputs.append(out.getvalue())
print(json.dumps(outputs))
"""


def _bwrap_a_submission(python: str, folder: Path) -> bool:
    confined = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--ro-bind"]
    command = [*confined, str(folder), str(folder), python, "-I", "-S", str(folder / "driver.py")]
    command += [str(folder / "inputs.json"), str(folder / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outputs = json.loads(done.stdout)
    return all(o.split() == t["output"].split() for o, t in zip(outputs, CODE_TRUTH["tests"], strict=True))


def measure_plain(name: str, judge: Callable[[str, Path], bool], workers: int, seconds: float) -> str:
    python = getattr(sys, "_base_executable", sys.executable)
    with tempfile.TemporaryDirectory() as text, ThreadPoolExecutor(workers) as pool:
        folder = Path(text)
        (folder / "main.py").write_text(PROGRAM.format(top=3))
        (folder / "driver.py").write_text(_DRIVER)
        (folder / "inputs.json").write_text(json.dumps([test["input"] for test in CODE_TRUTH["tests"]]))
        end, latencies = time.monotonic() + seconds, list[float]()

        def one_after_another() -> int:
            done = 0
            while (began := time.monotonic()) < end:
                assert judge(python, folder)
                latencies.append(time.monotonic() - began)
                done += 1
            return done

        began = time.monotonic()
        done = sum(pool.map(lambda _: one_after_another(), range(workers)))
        return _row(f"{name}, {workers} worker{'s' * (workers > 1)}", done / (time.monotonic() - began), latencies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per measurement; default: 8")
    parser.add_argument("--only", default="", help="measure the rows whose names begin with this text; default: all")
    args = parser.parse_args()
    say: Callable[[str], object] = partial(print, flush=True)
    say(describe())
    say(f"{'':38s} {'answers/s':>9s} {'p50 ms':>9s} {'p99 ms':>9s}   (p50, p99: 2 requests in flight a worker)")
    for name, (task, make) in ROWS.items():
        if name.startswith(args.only):
            for workers in (1, 2):
                say(measure_server(name, task, make, workers, args.seconds))
    for name, judge in (
        ("code, (a) python3 a test", _fresh_python_a_test),
        ("code, (b) bwrap a submission", _bwrap_a_submission),
    ):
        if not name.startswith(args.only):
            continue
        if "bwrap" in name and shutil.which("bwrap") is None:
            say(f"{name}: bwrap is not installed")
            continue
        for workers in (1, 2):
            say(measure_plain(name, judge, workers, args.seconds))


if __name__ == "__main__":
    main()
