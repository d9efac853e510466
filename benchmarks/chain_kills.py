"""Kills a chain of stages with SIGKILL right after each hard reset, and compares it with an undisturbed chain.

    .venv/train/bin/python benchmarks/chain_kills.py [--out runs/chain_kills] [KEY=VALUE ...]

The chain has the stages run1 to run3, shortened to 4, 3 and 3 steps; run2 and run3 begin with a hard reset.  The
trainer is killed at the point `reset:committed`, and the same command continues the chain.  Each stage's weights,
reference, metrics (all but time/), resets and rollouts must be equal to the bit.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kill_resume import compare
from machine import describe

from nemo_prorl.files import read_objects
from nemo_prorl.lifecycle.killpoints import VARIABLE

STAGES = ("run1", "run2", "run3")
SETTINGS = [
    "deterministic=true",
    "data=domains",
    "chain.step_scale=0.01",
    "trainer.grpo.prompts_per_step=16",
    "trainer.grpo.samples_per_prompt=8",
    "trainer.grpo.checkpoint_every=2",
    "trainer.grpo.validate_every=2",
    "trainer.warmup.steps=40",
    "rollout.max_num_seqs=128",
    "rollout.kv_cache_mb=128",
]
MOST_STARTS = 12


def launch(folder: Path, settings: list[str], kill_at: str | None) -> int:
    """Run `prorl launch`, wait for its end and return its exit code.

    Args:
        kill_at: kill point (nemo_prorl/lifecycle/killpoints.py) at which the trainer kills itself; None: no kill.
    """
    prorl = str(Path(sys.executable).with_name("prorl"))
    words = [prorl, "launch", "--stages", f"{STAGES[0]}..{STAGES[-1]}", "--here", f"run_dir={folder}"]
    environment = {**os.environ, **({VARIABLE: kill_at} if kill_at else {})}
    with folder.with_suffix(".log").open("ab") as log:
        words += [*SETTINGS, *settings]
        return subprocess.run(words, check=False, env=environment, stdout=log, stderr=log).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/chain_kills"))
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="overrides for every stage; default: none")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out}: expected a folder that does not exist; it exists")
    args.out.mkdir(parents=True)
    one, other = args.out / "undisturbed", args.out / "disturbed"
    report = [describe(), f"stages {', '.join(STAGES)}; settings: {' '.join(args.settings) or 'none'}"]
    began = time.monotonic()
    if launch(one, args.settings, None):
        raise RuntimeError(f"the undisturbed chain failed; see {one}.log")
    report.append(f"undisturbed: {time.monotonic() - began:.0f} s")
    starts = 1
    while launch(other, args.settings, "reset:committed"):
        starts += 1
        if starts > MOST_STARTS:
            raise RuntimeError(f"the chain with kills did not finish after {MOST_STARTS} starts; see {other}.log")
    failed = False
    resets = 0
    for stage in STAGES:
        events = read_objects(other / stage / "journal.jsonl")
        resumed = [e["step"] for e in events if e["event"] == "resume"]
        reset = [e["step"] for e in events if e["event"] == "reset_commit"]
        resets += len(reset)
        report.append(f"{stage}: hard resets after steps {reset}, killed right after; went on from steps {resumed}")
        for what, same in compare(one / stage, other / stage):
            report.append(f"    {'equal' if same else 'DIFFERENT'}: {what}")
            failed |= not same
        kl = [m["kl"] for m in read_objects(other / stage / "metrics.jsonl")]
        report.append(f"    kl of each step: {', '.join(f'{value:.1e}' for value in kl)}")
    sys.stdout.write("\n".join([*report, f"{starts - 1} kills, {resets} hard resets"]) + "\n")
    return 1 if failed or starts - 1 != resets else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
