"""Kills a laptop run with SIGKILL again and again, resumes it each time, and compares it with an undisturbed run.

    .venv/train/bin/python benchmarks/kill_resume.py [--kills 20] [--seed 1] [--out runs/kill_resume] [KEY=VALUE ...]

The run is a stage that begins from an earlier stage with a hard reset, makes more resets, and rolls back once.  One of
two equal runs is killed at each point of a checkpoint's write and of the reset transaction
(nemo_prorl/lifecycle/killpoints.py), and at random moments: its trainer, its supervisor, or all of its processes at
once.  After each kill the same command continues the run.  Weights, reference, metrics (all but time/), resets and
rollouts must be equal to the bit.  KEY=VALUE overrides, such as cluster=laptop_bf16, apply to all runs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.killpoints import POINTS, VARIABLE

STEPS = 24
RUN = [
    "deterministic=true",
    "data.tasks=null",  # the laptop's data lacks tasks that stages name
    f"trainer.grpo.max_steps={STEPS}",
    "trainer.grpo.prompts_per_step=8",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.checkpoint_every=2",
    "trainer.grpo.validate_every=3",
    "trainer.resets.every=4",
    "trainer.resets.roll_back=true",
    "trainer.warmup.steps=40",
    "rollout.max_num_seqs=64",
    "rollout.kv_cache_mb=128",
    *[f"data.{part}.{k}.size={size}" for part, size in (("train", 300), ("validation", 16)) for k in range(5)],
]
TARGETS = ("trainer", "supervisor", "everything")
TIMEOUT_S = 600.0
SETTINGS: list[str] = []  # overrides from the command line


@dataclass
class Kill:
    """A kill: its intended place, the last logged step at that time, and the step from which the next start resumed."""

    where: str
    step: int
    resumed: int | None = None
    seconds: float = 0.0  # from the start of the run to the end of its processes


def command(run: Path, stage: str, *overrides: str) -> list[str]:
    prorl = str(Path(sys.executable).with_name("prorl"))
    return [prorl, "train", f"stage={stage}", f"run_dir={run}", *RUN, *overrides]


def last_step(run: Path) -> int:
    return max((m["step"] for m in read_objects(run / "metrics.jsonl")), default=0)


def start(run: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    log = (run.parent / f"{run.name}.log").open("ab")
    words = command(run, "run2", *SETTINGS)
    return subprocess.Popen(words, env={**os.environ, **environment}, stdout=log, stderr=log)


def wait(process: subprocess.Popen[bytes], until: Callable[[], bool] | None = None) -> bool:
    """Wait until `until` is true or the process ends; return whether `until` became true.

    Raises TimeoutError after TIMEOUT_S seconds.
    """
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        if until is not None and until():
            return True
        if time.monotonic() > end:
            process.kill()
            raise TimeoutError(f"a run of {STEPS} steps did not end within {TIMEOUT_S:.0f} s")
        time.sleep(0.02)
    return False


def kill(process: subprocess.Popen[bytes], target: str) -> None:
    """Send SIGKILL to `target`, one of TARGETS, and wait until all processes of the run have ended."""
    family = psutil.Process(process.pid).children(recursive=True)
    trainers = [p for p in family if "nemo_prorl.rank" in " ".join(p.cmdline())]
    victims = {"trainer": trainers, "supervisor": [], "everything": family}[target]
    if target != "trainer":
        process.kill()
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait(60)
    _, alive = psutil.wait_procs(family, timeout=60)
    if alive:
        raise RuntimeError(f"60 s after the kill of {target}, these processes are still alive: {alive}")


def one_kill(run: Path, where: str, rng: random.Random) -> Kill | None:
    """Start the run and kill it at `where`; return None if the run finished before the kill.

    Args:
        where: a kill point (one of POINTS), or "random " and one of TARGETS, to kill that target at a random moment.
    """
    began, before = time.monotonic(), last_step(run)
    if where in POINTS:
        process = start(run, {VARIABLE: where})
        wait(process)
    else:
        process = start(run, {})
        journal = len(read_objects(run / "journal.jsonl"))
        steps = rng.randint(0, 2)

        def there() -> bool:
            running = len(read_objects(run / "journal.jsonl")) > journal
            return running and (steps == 0 or last_step(run) >= min(STEPS, before + steps))

        if wait(process, there):
            time.sleep(rng.uniform(0.0, 1.5))
        if process.poll() is None:
            kill(process, where.split()[1])
    if process.returncode == 0:
        return None
    return Kill(where, last_step(run), seconds=time.monotonic() - began)


def compare(undisturbed: Path, disturbed: Path) -> list[tuple[str, bool]]:
    """Compare all that must be equal in the two runs; return pairs (description, whether it is equal)."""

    def metrics(run: Path) -> list[dict[str, Any]]:
        apart = ("time/", "system/", "second/")  # a second verdict that is 2 s late is not counted
        return [{k: v for k, v in m.items() if not k.startswith(apart)} for m in read_objects(run / "metrics.jsonl")]

    one, other = (json.loads((run / "summary.json").read_text()) for run in (undisturbed, disturbed))
    wanted, found = metrics(undisturbed), metrics(disturbed)
    rollouts = [sorted((run / "rollouts").glob("step-*.jsonl")) for run in (undisturbed, disturbed)]
    same_rollouts = [p.name for p in rollouts[0]] == [p.name for p in rollouts[1]] and all(
        a.read_bytes() == b.read_bytes() for a, b in zip(*rollouts, strict=True)
    )
    return [
        ("weights_sha256", one["weights_sha256"] == other["weights_sha256"]),
        ("reference_sha256", one["reference_sha256"] == other["reference_sha256"]),
        (f"metrics of {len(wanted)} steps, {len(wanted[0])} numbers each", wanted == found),
        (f"resets after steps {[r['step'] for r in one['resets']]}", one["resets"] == other["resets"]),
        ("held-out scores", one["heldout"] == other["heldout"]),
        (f"rollouts of {len(rollouts[0])} steps", same_rollouts),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_resume"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="overrides for every run")
    args = parser.parse_args()
    SETTINGS.extend(args.settings)
    rng = random.Random(args.seed)
    if args.out.exists():
        parser.error(f"--out {args.out}: expected a folder that does not exist; it exists")
    one, other = args.out / "undisturbed" / "run2", args.out / "disturbed" / "run2"
    for run in (one, other):
        run.parent.mkdir(parents=True)
    report = [describe(), f"{STEPS} steps, hard resets every 4 with roll-back, {args.kills} kills, seed {args.seed}"]
    report += [f"settings: {' '.join(SETTINGS)}"] if SETTINGS else []
    first = args.out / "undisturbed" / "run1"
    stage_1 = command(first, "run1", "trainer.resets.roll_back=false", "trainer.grpo.max_steps=4", *SETTINGS)
    subprocess.run(stage_1, check=True, stdout=sys.stderr)
    (other.parent / "run1").symlink_to(first.absolute())
    began = time.monotonic()
    if wait(start(one, {})) or not (one / "summary.json").is_file():
        raise RuntimeError(f"the undisturbed run failed; see the logs in {one.parent}")
    report.append(f"undisturbed: {time.monotonic() - began:.0f} s")

    points = [name for name in POINTS if name.startswith(("checkpoint:", "reset:")) and name != "checkpoint:exchange"]
    wheres = [*points, *(f"random {TARGETS[k % len(TARGETS)]}" for k in range(max(0, args.kills - len(points))))]
    rng.shuffle(wheres)
    wheres = wheres[: args.kills]
    kills: list[Kill] = []
    for where in wheres:
        done = one_kill(other, where, rng)
        resumed = [e["step"] for e in read_objects(other / "journal.jsonl") if e["event"] == "resume"]
        if kills:
            kills[-1].resumed = resumed[-1] if resumed else 0
        if done is None:
            sys.stderr.write(f"came to the end before {where}\n")
            break
        kills.append(done)
        sys.stderr.write(f"{done}\n")
    if not (other / "summary.json").is_file() or not json.loads((other / "summary.json").read_text())["finished"]:
        wait(start(other, {}))
        kills[-1].resumed = [e["step"] for e in read_objects(other / "journal.jsonl") if e["event"] == "resume"][-1]
    report += [f"{'killed at':24s} {'last step':>9s} {'went on from':>12s} {'seconds':>8s}"]
    report += [
        f"{k.where:24s} {k.step:9d} {k.resumed if k.resumed is not None else '-':>12} {k.seconds:8.0f}" for k in kills
    ]
    results = compare(one, other)
    report += [f"{'equal' if same else 'DIFFERENT'}: {what}" for what, same in results]
    sys.stdout.write("\n".join([*report, f"{len(kills)} kills"]) + "\n")
    return 0 if all(same for _, same in results) and len(kills) == args.kills else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
