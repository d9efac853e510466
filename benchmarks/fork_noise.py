"""How sure a fork is: arms that differ in nothing that matters, with common and with other random numbers.

    prorl fork RUN --checkpoint STEP --arms none model.optim.lr=2.002e-4 seed=11 --steps 100      for several STEP
    .venv/train/bin/python benchmarks/fork_noise.py RUN/forks/* --steps 100

The rate of the laptop's model is 2e-4.  Arms whose rate differs by a thousandth draw the same prompts with the same
seeds: their differences are those of a paired comparison whose arms are equal.  Arms of other seeds are two unpaired
runs.  With the noise found, trials of a reset that changes nothing are simulated: how often does one win or lose?
"""

import argparse
import math
import random
import statistics
import sys
from itertools import combinations
from pathlib import Path

from machine import describe

from nemo_prorl.algorithms.paired import PairedDifference, difference, later_half
from nemo_prorl.lifecycle.summary import validations_of
from nemo_prorl.settings import read_config

TRIALS, LOOKS = 200, 5


def differences(arms: list[Path], steps: int) -> list[PairedDifference]:
    """Return the differences of all pairs of arms, over the later half of their validations."""
    scores = [later_half(list(validations_of(arm, 0, steps).values())) for arm in arms]
    return [difference(one, other) for one, other in combinations(scores, 2)]


def false_choices(se: float, training: float, noise: float, seed: int = 1) -> int:
    """Return how many of TRIALS trials of equal arms are decided.

    Args:
        se: standard error over the prompts of a look at the end.
        training: standard deviation between equal trainings beyond that.
        noise: `trainer.resets.trial_noise`, with which the trial reckons.
    """
    chance, wrong = random.Random(seed), 0
    for _ in range(TRIALS):
        stays = chance.gauss(0.0, training)
        looks = [chance.gauss(0.0, se * math.sqrt((LOOKS + 1) / 2)) for _ in range(LOOKS)]  # one validation each
        for count in range(1, LOOKS + 1):
            late = looks[:count][count // 2 :]
            own_se = se * math.sqrt((LOOKS + 1) / 2 / len(late))
            shown = PairedDifference(stays + statistics.fmean(late), math.hypot(own_se, noise))
            if shown.decided(LOOKS):
                wrong += 1
                break
    return wrong


def told(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    """Print the table and the simulated trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of the arms of a fork, RUN/forks/STEP")
    parser.add_argument("--steps", type=int, required=True, help="steps of each arm")
    args = parser.parse_args()
    told(describe())
    told(f"forks: {len(args.folders)}; arms of {args.steps} steps; scores: mean over the later half of the validations")
    groups: dict[str, list[PairedDifference]] = {"common": [], "other": []}
    for folder in args.folders:
        arms = sorted(path.parent for path in folder.glob("*/config.yaml") if path.parent.name != "reset")
        seeds = {arm: read_config(arm / "config.yaml").seed for arm in arms}
        own = seeds[folder / "none"]
        groups["common"] += differences([a for a in arms if seeds[a] == own], args.steps)
        groups["other"] += differences([a for a in arms if a.name == "none" or seeds[a] != own], args.steps)
    noise = float(read_config(args.folders[0] / "none" / "config.yaml").trainer.resets.get("trial_noise", 0.005))
    told("random numbers  pairs  SD of the difference  its SE over prompts  training alone")
    spreads = []
    for name, found in groups.items():
        spread = math.sqrt(statistics.fmean(one.mean**2 for one in found))  # the expected difference is 0
        se = statistics.fmean(one.se for one in found)
        training = math.sqrt(max(0.0, spread**2 - se**2))
        spreads.append(spread)
        told(f"{name:14s}  {len(found):5d}  {spread:20.4f}  {se:19.4f}  {training:14.4f}")
        if name == "common":
            for reckoned in (0.0, noise, 2 * noise):
                wrong = false_choices(se, training, reckoned)
                text = f"trial_noise {reckoned:g}: {wrong} of {TRIALS} simulated trials of equal arms are decided"
                told(f"    {text} ({100 * wrong / TRIALS:.1f} %)")
    told(f"a difference of unpaired runs spreads {spreads[1] / spreads[0]:.1f} times as far as a paired one")


if __name__ == "__main__":
    main()
