"""The reward server at full load while its workers and sandboxes are killed at random.

    .venv/train/bin/python benchmarks/reward_soak.py [--minutes 10] [--kill-every 2]

Every request must be answered exactly once with the right verdict.  Memory and open descriptors must not grow, and no
process or temporary file may be left at the end.  The exit status is 1 if any of this fails.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from machine import describe
from reward_load import DOMAINS, Load, mixture, same

from nemo_prorl.deadlines import Deadline
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.interface import Verdict

IN_FLIGHT = 64
SAMPLE_S = 15.0


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def family(root: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of `root` that are not zombies."""
    return [process for process in root.children(recursive=True) if is_alive(process)]


def memory_mb(processes: list[psutil.Process]) -> float:
    """Return the memory of processes in MB, with shared pages counted once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


@dataclass
class Soak:
    """Counts and samples of the whole run."""

    answered: Counter[str] = field(default_factory=Counter)  # answered requests by task
    wrong: list[tuple[dict[str, Any], Verdict]] = field(default_factory=list)  # requests with a wrong verdict
    killed: Counter[str] = field(default_factory=Counter)  # killed processes by kind
    samples: list[tuple[float, int, float, int]] = field(
        default_factory=list
    )  # seconds, answers, MB, open descriptors of the server

    @property
    def total(self) -> int:
        return sum(self.answered.values())


def start(folder: Path, workers: int) -> "subprocess.Popen[bytes]":
    token, endpoint, scratch = folder / "token", folder / "rewards-0.json", folder / "tmp"
    scratch.mkdir()
    token.write_text("soak\n")
    token.chmod(0o600)
    command = [sys.executable, "-m", "nemo_prorl.rewards.server", "--workers", str(workers)]
    command += ["--tasks", ",".join(DOMAINS), "--token-file", str(token), "--endpoint-file", str(endpoint)]
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--parent-pid", str(os.getpid())], stderr=log, env={**os.environ, "TMPDIR": str(scratch)}
        )
    ready = Deadline(120, "the reward server")
    ready.wait_until(lambda: endpoint.exists() and '"ready"' in endpoint.read_text())
    return process


async def ask(client: RewardClient, loads: Iterator[Load], soak: Soak, end: float) -> None:
    while time.monotonic() < end:
        load = next(loads)
        verdict = await client.score(load.request, Deadline(120.0, "a verdict"))
        soak.answered[load.request["task"]] += 1
        if not same(load, verdict):
            soak.wrong.append((load.request, verdict))


async def kill(server: psutil.Process, every_s: float, soak: Soak, end: float) -> None:
    rng = random.Random(1)
    while time.monotonic() < end - 5.0:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * every_s)
        if victims := family(server):
            victim = rng.choice(victims)
            with contextlib.suppress(psutil.NoSuchProcess):
                direct = victim.ppid() == server.pid
                victim.kill()
                soak.killed["worker" if direct else "sandbox process"] += 1


async def sample(server: psutil.Process, soak: Soak, began: float, end: float, say: Callable[[str], object]) -> None:
    while time.monotonic() < end:
        fds = server.num_fds()
        row = (time.monotonic() - began, soak.total, memory_mb([server, *family(server)]), fds)
        soak.samples.append(row)
        say(f"{row[0]:6.0f} s {row[1]:9d} answers {row[2]:8.0f} MB {row[3]:5d} descriptors  {len(soak.wrong)} wrong")
        await asyncio.sleep(SAMPLE_S)


async def drive(
    folder: Path, server: psutil.Process, minutes: float, every_s: float, say: Callable[[str], object]
) -> Soak:
    soak, loads, began = Soak(), mixture(0), time.monotonic()
    end = began + 60 * minutes
    async with RewardClient(folder, folder / "token") as client:
        watching = [asyncio.create_task(kill(server, every_s, soak, end))]
        watching.append(asyncio.create_task(sample(server, soak, began, end, say)))
        await asyncio.gather(*(ask(client, loads, soak, end) for _ in range(IN_FLIGHT)))
        await asyncio.gather(*watching)
    return soak


def faults(soak: Soak, left: list[psutil.Process], folder: Path) -> list[str]:
    """Return a line of text for each requirement that the server did not meet.

    Args:
        left: processes that outlived the server.
        folder: folder of the server; files left in its folder `tmp` are a fault.
    """
    found = [f"{len(soak.wrong)} wrong verdicts, the first: {json.dumps(soak.wrong[0])[:600]}"] if soak.wrong else []
    early = [mb for s, _, mb, _ in soak.samples if s > 30][: max(1, len(soak.samples) // 4)]
    late = [mb for _, _, mb, _ in soak.samples][-max(1, len(soak.samples) // 4) :]
    if early and sum(late) / len(late) > 1.15 * sum(early) / len(early) + 20:
        found.append(f"memory grew from {sum(early) / len(early):.0f} to {sum(late) / len(late):.0f} MB")
    if soak.samples[-1][3] > soak.samples[1 if len(soak.samples) > 1 else 0][3] + 16:
        found.append(f"descriptors grew from {soak.samples[1][3]} to {soak.samples[-1][3]}")
    if left:
        found.append(f"{len(left)} processes outlived the server")
    if entries := os.listdir(folder / "tmp"):
        found.append(f"{len(entries)} entries left in TMPDIR: {entries[:3]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--kill-every", type=float, default=2.0, metavar="S", help="mean seconds between kills; default: 2"
    )
    parser.add_argument("--workers", type=int, default=5, help="total workers of all five domains; default: 5")
    args = parser.parse_args()
    say: Callable[[str], object] = partial(print, flush=True)
    say(f"{describe()}; {args.workers} workers, {IN_FLIGHT} requests in flight, a kill every {args.kill_every:g} s")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        server = start(folder, args.workers)
        root = psutil.Process(server.pid)
        soak = asyncio.run(drive(folder, root, args.minutes, args.kill_every, say))
        relatives = family(root)
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
        time.sleep(1.0)
        left = [process for process in relatives if is_alive(process)]
        found = faults(soak, left, folder)
        if status:
            found.append(f"the server ended with status {status}")
    say(f"answered: {soak.total} ({', '.join(f'{task} {n}' for task, n in sorted(soak.answered.items()))})")
    say(f"killed: {', '.join(f'{n} {kind}' for kind, n in sorted(soak.killed.items()))}")
    good = ["every request answered once and right; nothing grew, nothing is left"]
    say("\n".join(["FAILED", *found] if found else good))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
