"""Repeat an experiment with several seeds, and print the gain with its standard error over the seeds.

    python examples/seeds.py [OVERRIDE...]

Runs that exist are continued; finished ones are only read.
"""

import statistics
import sys

SEEDS = (1, 2, 3)


def main(overrides: list[str]) -> None:
    import nemo_prorl

    gains = []
    for seed in SEEDS:
        one = {"run_dir": f"runs/seeds/{seed}", "seed": seed, "trainer.grpo.max_steps": 40}
        run = nemo_prorl.train([one, *overrides])
        gains.append(run.summary["heldout"]["after"] - run.summary["heldout"]["before"])
        print(f"seed {seed}: {gains[-1]:+.3f}")
    error = statistics.stdev(gains) / len(gains) ** 0.5
    print(f"gain on held-out problems: {statistics.mean(gains):+.3f} +- {error:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
