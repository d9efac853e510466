"""Bytes and seconds of the groups in a checkpoint: as JSON in the training thread, and as arrays in the background.

    .venv/train/bin/python benchmarks/checkpoint_groups.py                256 x 16 x 2,560 tokens, and the laptop
    .venv/train/bin/python benchmarks/checkpoint_groups.py --batches laptop

As JSON, training stands still for the whole time: a copy as JSON values (dataclasses.asdict, dumps, loads), then the
writer's dumps, which holds the GIL.  As arrays, training stands still for a copy of the list of groups; while a thread
encodes and writes, another thread measures its longest wait for the GIL.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import Group

BATCHES = {"laptop": (16, 8, 24), "paper": (256, 16, 2560)}  # groups, responses per group, tokens per response


def group_of(draw: int, samples: int, length: int) -> Group:
    rng = np.random.default_rng(draw)
    responses = [
        Response(k, rng.integers(0, 150_000, length).tolist(), (-rng.random(length, np.float32)).tolist(), "stop", 7)
        for k in range(samples)
    ]
    verdict: Any = {"id": f"p{draw}", "score": 1.0, "correct": True, "parts": {}, "detail": "", "failure": None}
    record = {"id": f"p{draw}", "task": "math", "prompt": "x" * 400, "truth": {"answer": "42"}}
    return Group(f"p{draw}", "math", record, list(range(128)), 0, responses, [verdict] * samples, 8, 7, draw)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    result = work()
    return time.monotonic() - began, result


def synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())


def longest_wait(thread: threading.Thread) -> float:
    """Start the thread; return the longest time in which this thread, which sleeps 1 ms at a time, could not run."""
    thread.start()
    longest, last = 0.0, time.monotonic()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last - 0.001), now
    return longest


def measure(groups: list[Group], folder: Path) -> list[str]:
    tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
    old, new = folder / "state.json", folder / "groups.safetensors"
    snapshot_s, values = seconds(lambda: json.loads(json.dumps([asdict(group) for group in groups])))
    json_s, _ = seconds(lambda: synced(old, json.dumps(values).encode()))
    values.clear()
    copy_s, snapshot = seconds(lambda: list(groups))
    write_s, wait_s = seconds(
        lambda: longest_wait(threading.Thread(target=lambda: synced(new, encode(snapshot)), name="checkpoint"))
    )
    read_s, again = seconds(lambda: decode(new.read_bytes()))
    assert again == groups
    rows = (("JSON", old, snapshot_s, json_s, None), ("arrays", new, copy_s, write_s, wait_s))
    lines = [f"{len(groups)} groups, {tokens:,} response tokens; read again as arrays, all equal, in {read_s:.2f} s"]
    for name, file, stands_s, writes_s, waits_s in rows:
        size = file.stat().st_size
        wait = "" if waits_s is None else f", longest wait of another thread {waits_s:.3f} s"
        lines.append(
            f"  {name:7s} {size / 1e6:9.3f} MB {size / max(tokens, 1):6.2f} bytes per token; training thread"
            f" {stands_s:8.4f} s; writer {writes_s:7.3f} s{wait}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES))
    args = parser.parse_args()
    sys.stdout.write(describe() + "\n\n")
    for name in args.batches:
        count, samples, length = BATCHES[name]
        with tempfile.TemporaryDirectory() as folder:  # under TMPDIR
            lines = measure([group_of(draw, samples, length) for draw in range(count)], Path(folder))
        sys.stdout.write("\n".join([f"{name}: {samples} responses of {length} tokens", *lines, ""]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
