"""Trains 30 stored steps of killed runs again, and forks a run into two equal arms: is every digest the same?

    .venv/train/bin/python benchmarks/replayed_runs.py [--out runs/replayed_runs]

Each run of the laptop's job makes a hard reset after step 12, and all its processes are killed after step 20.  `prorl
replay-training` then trains steps 1 to 30 from the stored batches, while no engine and no reward server exists.  The
arms of the fork differ in a key without effect, and train 50 steps with engines of their own.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import psutil
from kill_resume import kill, last_step, wait
from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.ledger import read_ledger

STEPS, RESET, KILLED, ARM_STEPS = 30, 12, 20, 50
RUN = [
    *("data.tasks=null", f"trainer.grpo.max_steps={STEPS}", f"trainer.grpo.keep_batches={STEPS}"),
    *("trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8", "trainer.warmup.steps=110"),
    *("trainer.grpo.checkpoint_every=5", "trainer.grpo.validate_every=10", f"trainer.resets.at_steps=[{RESET}]"),
    *("rollout.max_num_seqs=64", "rollout.kv_cache_mb=128"),
    *[f"data.{part}.{k}.size={size}" for part, size in (("train", 300), ("validation", 16)) for k in range(5)],
]
CASES = [("float32", devices, "cluster=laptop") for devices in (1, 2)]
CASES += [("bf16", devices, "cluster=laptop_bf16") for devices in (1, 2)]
NO_EFFECT = "trainer.grpo.save_rollout_groups=7"  # how many groups are written to files


def prorl(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("prorl")), *words]


def trained(run: Path, *overrides: str) -> None:
    """Train a run to its end; kill all of its processes once, after step KILLED."""
    command = prorl("train", f"run_dir={run}", *RUN, *overrides)
    with (run.parent / f"{run.name}.log").open("ab") as log:
        if last_step(run) < KILLED:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            if not wait(process, lambda: last_step(run) >= KILLED):
                raise RuntimeError(f"{run} ended before step {KILLED}; see {log.name}")
            kill(process, "everything")
        subprocess.run(command, stdout=log, stderr=log, check=True)


def serving(process: subprocess.Popen[bytes]) -> int:
    """Return the number of engines and reward servers that a command has started."""
    words = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            words.append(" ".join(child.cmdline()))
        except psutil.NoSuchProcess:
            continue
    return sum("engine/server.py" in line or "rewards.server" in line or "vllm" in line.lower() for line in words)


def equal_steps(one: Path, other: Path, steps: int) -> int:
    """Return how many of the first steps have the same chain of digests in two runs."""
    first, second = read_ledger(one), read_ledger(other)
    return sum(first[step]["chain"] == second.get(step, {}).get("chain") for step in range(1, steps + 1))


def seconds(run: Path) -> tuple[float, float]:
    """Return the seconds of all steps of a run, with and without the generation of their responses."""
    lines = [line for line in read_objects(run / "metrics.jsonl") if line["step"] <= STEPS]
    whole = sum(line["time/step"] for line in lines)
    return whole, whole - sum(line.get("time/rollout", 0.0) + line.get("time/publish", 0.0) for line in lines)


def told(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print one line for each run and one for the fork."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/replayed_runs"), help="folder of the runs")
    out = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    told(describe())
    told(f"{STEPS} steps, hard reset after {RESET}, killed after {KILLED}; seconds of all steps, in the run and again")
    told("precision  ranks  equal digests  engines and reward servers  in the run  without generation  replayed")
    for precision, devices, cluster in CASES:
        run = out / f"{precision}-{devices}"
        trained(run, cluster, f"trainer.devices={devices}")
        began, log = time.monotonic(), run.parent / f"{run.name}.replay.log"
        with log.open("w") as opened:
            process = subprocess.Popen(
                prorl("replay-training", str(run), "--from", "1", "--to", str(STEPS)), stdout=opened, stderr=opened
            )
            most = 0
            while process.poll() is None and time.monotonic() - began < 3600:
                most = max(most, serving(process))
                time.sleep(0.5)
        replayed = run / "replays" / f"1-{STEPS}"
        whole, updates = seconds(run)
        cells = f"{precision:9s}  {devices:5d}  {equal_steps(run, replayed, STEPS):7d} of {STEPS}  {most:26d}"
        told(f"{cells}  {whole:10.1f}  {updates:18.1f}  {seconds(replayed)[1]:8.1f}")
    run = out / "float32-1"
    arms = ["none", NO_EFFECT]
    words = prorl("fork", str(run), "--checkpoint", "newest", "--arms", *arms, "--steps", str(ARM_STEPS))
    with (out / "fork.log").open("w") as opened:
        subprocess.run(words, stdout=opened, stderr=opened, check=True)
    folder = run / "forks" / str(STEPS)
    other = next(path for path in folder.iterdir() if path.is_dir() and path.name != "none")
    told(f"fork: equal digests in {equal_steps(folder / 'none', other, ARM_STEPS)} of {ARM_STEPS} steps of equal arms")


if __name__ == "__main__":
    main()
