"""Time of a training step by phase, tokens per second, and the time that rewards add to the rollout.

.venv/train/bin/python benchmarks/step.py                 a fresh run of 12 steps of the laptop job
.venv/train/bin/python benchmarks/step.py --run RUN       an existing run
... KEY=VALUE                                             overrides of the fresh run
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects

PHASES = ("publish", "rollout", "logprobs", "advantages", "updates")


def fresh_run(folder: Path, steps: int, overrides: list[str]) -> Path:
    """Run the laptop job in `folder` for `steps` steps without validation; return `folder`."""
    command = [
        str(Path(sys.executable).with_name("prorl")),
        "train",
        f"run_dir={folder}",
        f"trainer.grpo.max_steps={steps}",
        "trainer.grpo.validate_every=1000",
        "trainer.grpo.checkpoint_every=1000",
        *overrides,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def report(metrics: list[dict[str, Any]], skip: int) -> list[str]:
    """Return a table of mean seconds by phase, without the first `skip` steps, in which caches are cold."""
    rows = metrics[skip:]

    def mean(key: str) -> float:
        return statistics.mean(m.get(key) or 0.0 for m in rows)

    step = mean("time/step") - mean("time/validate")
    known = {phase: mean(f"time/{phase}") for phase in PHASES}
    known["other (idle)"] = step - sum(known.values())
    lines = [f"{len(rows)} steps, {step:.2f} s a step (validation left out)", ""]
    lines.append(f"{'phase':22s} {'seconds':>9s} {'share':>7s}")
    lines += [f"{name:22s} {seconds:9.3f} {100 * seconds / step:6.1f} %" for name, seconds in known.items()]
    wait, opened = mean("time/rollout/reward_wait_s"), mean("time/rollout/reward_open_s")
    tokens = mean("rollout/generated_tokens")
    lines += [
        "",
        f"inside the rollout: engine busy {mean('time/rollout/engine_s'):.3f} s, a reward open {opened:.3f} s",
        f"rewards add beyond the rollout: {wait:.3f} s a step ({100 * wait / step:.1f} % of it);"
        f" hidden: {100 * (1 - wait / opened) if opened else 100:.1f} % of the time a reward was open",
        f"generated: {tokens:.0f} tokens a step, {tokens / known['rollout']:.0f} tokens/s in the rollout,"
        f" {tokens / step:.0f} tokens/s over the whole step",
        f"groups: {mean('rollout/groups'):.1f} trained on of {mean('rollout/drawn'):.1f} drawn"
        f" ({mean('rollout/carried'):.1f} carried over)",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run directory to report; default: make a run first")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=2, help="number of first steps to leave out; default: 2")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or fresh_run(Path(folder) / "run", args.steps, args.overrides)
        metrics = read_objects(run / "metrics.jsonl")
    sys.stdout.write("\n".join([describe(), *report(metrics, args.skip)]) + "\n")


if __name__ == "__main__":
    main()
