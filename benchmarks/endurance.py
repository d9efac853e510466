"""Does anything creep over 10,000 steps?  A laptop run of short steps, with every process sampled.

    .venv/train/bin/python benchmarks/endurance.py --out FOLDER [--steps 10000]

The run validates, checkpoints and resets, and its engine is restarted once, at half of the steps, between two steps.
Slopes are medians over pairs of samples after the first 500 steps (Sen), with 95 % intervals from the slopes in five
blocks, which hold although a sample is like the one before (`nemo_prorl.usage.growth`).
At the end the run continues for 40 steps twice: undisturbed, and killed after 20 and resumed.  Both must give equal
weights.  A second call continues.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import last_objects, read_objects
from nemo_prorl.usage import RESTART_SUFFIX, growth

EXTRA = 40  # steps after the long run, made twice
SKIP = 500  # first steps that no slope uses
RECIPE = [
    "deterministic=true",
    "trainer.grpo.prompts_per_step=4",
    "trainer.grpo.samples_per_prompt=4",
    "trainer.grpo.updates_per_step=1",
    "trainer.grpo.max_response_tokens=12",
    "trainer.grpo.validate_every=250",
    "trainer.grpo.checkpoint_every=250",
    "trainer.grpo.keep_checkpoints=2",
    "trainer.grpo.save_rollout_groups=1",
    "trainer.grpo.max_steps_without_signal=0",
    "trainer.resets.every=1000",
    "trainer.resets.mode=advise",
]
PHASES = ("step", "rollout", "logprobs", "updates", "publish")


def start(run: Path, steps: int) -> "subprocess.Popen[bytes]":
    command = [str(Path(sys.executable).with_name("prorl")), "train", f"run_dir={run}", *RECIPE]
    return subprocess.Popen([*command, f"trainer.grpo.max_steps={steps}"], stdout=sys.stderr)


def last_step(run: Path) -> int:
    return max((int(line["step"]) for line in last_objects(run / "metrics.jsonl") if "step" in line), default=0)


def watch(run: Path, steps: int, samples: Path, restart_at: int | None) -> None:
    """Run to `steps`; append each new sample of the run's processes to `samples`, with the step at that time.

    Args:
        restart_at: step from which the engine is restarted between two steps, once; None: never.
    """
    process, seen = start(run, steps), 0.0
    with samples.open("a") as file:
        while process.poll() is None:
            time.sleep(5.0)
            try:
                sample = json.loads((run / "endpoints" / "usage-0.json").read_text())
            except (OSError, ValueError):
                continue
            step = last_step(run)
            if sample["time"] != seen and step:
                seen = sample["time"]
                file.write(json.dumps({"step": step, **sample}) + "\n")
                file.flush()
            if restart_at is not None and step >= restart_at:
                (run / "endpoints" / f"engine-0{RESTART_SUFFIX}").touch()
                restart_at = None
    if process.returncode:
        raise SystemExit(process.returncode)


def hashes_of(run: Path) -> tuple[str, str]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["weights_sha256"], summary["reference_sha256"]


def twice(run: Path, steps: int) -> list[tuple[str, str]]:
    """Continue a finished run by EXTRA steps, undisturbed and with a kill; return the hashes of both."""
    kept, found = run.with_name("kept"), []
    if not kept.is_dir():  # otherwise an interrupted call has made it, and `run` is not the run that it copied
        shutil.rmtree(temporary := run.with_name("kept.tmp"), ignore_errors=True)
        shutil.copytree(run, temporary)
        temporary.rename(kept)
    for kill in (False, True):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(kept, run)
        if kill:
            process = start(run, steps + EXTRA)
            while process.poll() is None and last_step(run) < steps + EXTRA // 2:
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(5.0)  # the processes below it end by themselves
        if code := start(run, steps + EXTRA).wait():
            raise SystemExit(code)
        found.append(hashes_of(run))
    shutil.rmtree(run)
    kept.rename(run)
    return found


def slope_line(name: str, points: Sequence[tuple[float, float]], unit: str) -> str:
    """Return a line with the first and last value, and the slope per step with its interval."""
    some = points[:: max(1, len(points) // 300)]
    slope, least, most = growth(some)
    return f"{name:34s}{points[0][1]:10.4g}{points[-1][1]:10.4g} {unit:4s}{slope:+12.3g}  ({least:+.3g} to {most:+.3g})"


def report(run: Path, samples: Path, equal: bool) -> Iterator[str]:
    found = read_objects(samples)
    late = [sample for sample in found if sample["step"] > SKIP]
    lines = read_objects(run / "metrics.jsonl")
    events = read_objects(run / "journal.jsonl")
    counts = {name: sum(event["event"] == name for event in events) for name in ("validation", "reset_commit")}
    yield describe()
    yield f"{len(lines)} steps, {counts['validation']} validations, {counts['reset_commit']} hard resets; alarms:"
    kinds = Counter(event["what"].split(":")[0] for event in events if event["event"] == "alarm")
    yield from (f"  {count} x {kind}" for kind, count in kinds.most_common())
    yield " ".join(RECIPE)
    yield f"\n{'':34s}{'first':>10s}{'last':>10s}     {'slope a step':>12s}  (95 % interval)"
    for title, names, part in parts_of(late):
        yield title
        for name in names:
            mine = [(s["step"], s["processes"][name]) for s in part if name in s["processes"]]
            for key, unit, size in FIELDS:
                yield slope_line(f"  {name} {key}", [(step, p[key] / size) for step, p in mine], unit)
    yield "node"
    for key, unit, size in (("shm_bytes", "MB", 1e6), ("run_dir_bytes", "MB", 1e6), ("free_bytes", "MB", 1e6)):
        yield slope_line(f"  {key}", [(s["step"], s[key] / size) for s in late], unit)
    yield "step time, by phase"
    for phase in PHASES:
        times = [(m["step"], 1e3 * m[f"time/{phase}"]) for m in lines if m["step"] > SKIP and f"time/{phase}" in m]
        yield slope_line(f"  {phase}", times, "ms")
    yield f"continued by {EXTRA} steps, undisturbed and killed: {'equal to the bit' if equal else 'DIFFERENT'}"


FIELDS = (
    ("proportional_bytes", "MB", 1e6),
    ("resident_bytes", "MB", 1e6),
    ("open_files", "", 1.0),
    ("threads", "", 1.0),
)


def parts_of(samples: list[dict[str, Any]]) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    """Return (title, processes, samples): the engine before and after its restart, and the others over all steps."""

    def pid(sample: dict[str, Any]) -> Any:
        return sample["processes"].get("engine-0", {}).get("pid")

    def steps(part: list[dict[str, Any]]) -> str:
        return f"steps {part[0]['step']} to {part[-1]['step']}"

    pids = [p for p in dict.fromkeys(map(pid, samples)) if p is not None]
    parts = [[s for s in samples if pid(s) == p] for p in pids]
    others = sorted({name for sample in samples for name in sample["processes"]} - {"engine-0"})
    return [
        *((f"engine process {k + 1}, {steps(part)}", ["engine-0"], part) for k, part in enumerate(parts)),
        (f"the other processes, {steps(samples)}", others, samples),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run, which a second call continues")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the long run; default: 10,000")
    args = parser.parse_args()
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    run, samples, equal = out / "run", out / "samples.jsonl", out / "equal.json"
    if not (out / "kept").is_dir() and (not run.is_dir() or last_step(run) < args.steps):
        before = last_step(run) if run.is_dir() else 0
        watch(run, args.steps, samples, args.steps // 2 if before < args.steps // 2 else None)
    if not equal.exists():
        first, second = twice(run, args.steps)
        equal.write_text(json.dumps(first == second))
    sys.stdout.write("\n".join(report(run, samples, json.loads(equal.read_text()))) + "\n")


if __name__ == "__main__":
    main()
