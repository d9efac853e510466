"""Share of reward time that is hidden behind other work, for reward latencies of 0.1, 1 and 5 s.

.venv/train/bin/python benchmarks/reward_latency.py                     about 10 minutes on two quiet cores
.venv/train/bin/python benchmarks/reward_latency.py --cases 1:32:4 --steps 1
... cluster=laptop_split                                                KEY=VALUE: overrides for all runs

Each run is the laptop job with real vLLM, reward server and updates.  Its reward plugin sleeps for the latency and then
judges by a hash of the response, so that half of all responses are right.  With random weights responses end at random
positions, so they end one after the other.  A case is latency:prompts:sequences: seconds, prompts per step (8 responses
each), and sequences that an engine generates at a time (`rollout.max_num_seqs`; with a small number, generation takes
long).

"hidden" is 1 - (seconds in which a step waited for rewards only) / (seconds with a reward pending), as in summary.json.
The last verdict comes one latency after the last response, so generation cannot hide all of the reward time; the column
"generation alone" has the share that it can hide.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe

from nemo_prorl.files import read_objects

CASES = ["0.1:8:4", "1:32:4", "5:96:4", "1:96:64", "5:48:4"]
SAMPLES, WORKERS = 8, 64
GOAL = 0.95
PLUGIN = '''
import time
import zlib
from dataclasses import dataclass

from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, RewardResult


class Delayed(RewardPlugin):
    """Sleeps, then judges by a hash of the response."""

    name = "delayed"
    tasks = ("delayed",)

    @dataclass(frozen=True)
    class Config:
        seconds: float = 1.0
        time_budget_s: float = 30.0

    def score(self, request: RewardRequest) -> RewardResult:
        time.sleep(self.config.seconds)
        right = zlib.crc32(request.response.encode()) % 2 == 0
        return RewardResult(score=float(right), correct=right)
'''


def install(folder: Path) -> Path:
    """Write a package with the plugin into `folder`, which must be on PYTHONPATH; return a file of prompt records."""
    information = folder / "prorl_delayed-1.dist-info"
    information.mkdir(parents=True)
    (folder / "prorl_delayed.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: prorl-delayed\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[nemo_prorl.rewards]\ndelayed = prorl_delayed:Delayed\n")
    records = folder / "prompts.jsonl"
    with records.open("w") as file:
        for k in range(4000):
            record = {"id": f"d-{k}", "task": "delayed", "prompt": f"Say something about {k}.", "truth": {}}
            file.write(json.dumps(record) + "\n")
    return records


def run(
    folder: Path, records: Path, latency: float, prompts: int, sequences: int, steps: int, *overrides: str
) -> list[dict[str, Any]]:
    """Run the job in the new run directory `folder` and return the metrics of each step."""
    command = [
        str(Path(sys.executable).with_name("prorl")),
        "train",
        f"run_dir={folder}",
        f"data.train=[{{name: delayed, path: {records}}}]",
        "data.validation=[]",
        f"rewards.plugins.delayed.seconds={latency}",
        f"rewards.workers={WORKERS}",
        f"rollout.max_num_seqs={sequences}",
        f"trainer.grpo.max_steps={steps}",
        f"trainer.grpo.prompts_per_step={prompts}",
        f"trainer.grpo.samples_per_prompt={SAMPLES}",
        "trainer.grpo.context_tokens=512",
        "trainer.grpo.max_response_tokens=448",
        "trainer.grpo.checkpoint_every=1000",
        "trainer.warmup.steps=0",
        "trainer.deadlines.rollout_s=3600",
        *overrides,
    ]
    path = os.pathsep.join(filter(None, (str(records.parent), os.environ.get("PYTHONPATH", ""))))
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": path})
    return read_objects(folder / "metrics.jsonl")


def line_of(latency: float, metrics: dict[str, Any]) -> str:
    """Return the line of the table for one step."""
    generating, opened, waited = (metrics[f"time/rollout/{k}_s"] for k in ("engine", "reward_open", "reward_wait"))
    hidden = 1 - waited / opened
    alone = 1 - latency / (generating + latency)
    verdict = "yes" if hidden >= GOAL else "NO"
    responses = metrics["rollout/drawn"] * SAMPLES
    return (
        f"{latency:9.1f} {metrics['step']:5.0f} {responses:10.0f} {generating:12.1f} {opened:14.1f} {waited:10.2f}"
        f" {100 * alone:16.1f} % {100 * hidden:8.1f} %   {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = (
        "cases SECONDS:PROMPTS:SEQUENCES: latency, prompts per step, concurrent sequences of an engine;"
        " default: %(default)s"
    )
    parser.add_argument("--cases", nargs="+", default=CASES, help=cases)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    write = sys.stdout.write
    write(f"{describe()}\nseconds {' '.join(args.overrides)}\n\n")
    write(f"{'latency':>9s} {'step':>5s} {'responses':>10s} {'generating':>12s}")
    write(f" {'a reward open':>14s} {'waited':>10s} {'generation alone':>18s} {'hidden':>10s}")
    write(f"   {100 * GOAL:.0f} % hidden\n")
    for case in args.cases:
        latency, prompts, sequences = (
            number(text) for number, text in zip((float, int, int), case.split(":"), strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            records = install(Path(folder) / "plugin")
            for metrics in run(Path(folder) / "run", records, latency, prompts, sequences, args.steps, *args.overrides):
                write(line_of(latency, metrics) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
