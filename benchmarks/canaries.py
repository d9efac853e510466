"""The share of reward time that canaries cost, by domain: one canary for each 100 responses.

    .venv/train/bin/python benchmarks/canaries.py [--responses 400]

One real worker per plugin judges responses and canaries one at a time, in five rounds.  The time of a request, from its
submission to the verdict, is that of its fastest round, so that other work on the machine disturbs little.  Math has
half plain numbers and half formulas.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time

from machine import describe
from reward_load import DOMAINS, MAKERS, plain_numbers

from nemo_prorl.rewards.canaries import RESPONSES_PER_CANARY, is_error, requests_of
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest
from nemo_prorl.rewards.judging import RewardService, pool_specs


async def mean_seconds(service: RewardService, requests: list[RewardRequest]) -> float:
    """Judge the requests one at a time in five rounds; return the mean over requests of the seconds of the fastest."""
    rounds = []
    for _ in range(5):
        times = [time.perf_counter()]
        for request in requests:
            await service.submit(request)
            times.append(time.perf_counter())
        rounds.append([end - begin for begin, end in itertools.pairwise(times)])
    return statistics.mean(map(min, zip(*rounds, strict=True)))


async def measure(count: int) -> None:
    registry, rng = discover(), random.Random(0)
    service = RewardService(pool_specs(registry, DOMAINS, len(DOMAINS)), registry)
    await service.start()
    sys.stdout.write(f"{describe()}\n{'':<14}{'response ms':>12}{'canary ms':>12}{'errors':>8}{'cost':>9}\n")
    sums = [0.0, 0.0]
    for task in DOMAINS:
        makers = [plain_numbers, MAKERS[task]] if task == "math" else [MAKERS[task]]
        live = [makers[n % len(makers)](n, rng).request for n in range(count)]
        plugin = registry.plugin_of_task(task)
        sent = requests_of(plugin.tasks, plugin.canaries())
        errors = [is_error(one.right, await service.submit(RewardRequest.from_json(one.request))) for one in sent]
        response = await mean_seconds(service, [RewardRequest.from_json(one) for one in live])
        canary = await mean_seconds(service, [RewardRequest.from_json(one.request) for one in sent])
        sums = [sums[0] + response, sums[1] + canary]
        cost = canary / response / RESPONSES_PER_CANARY
        sys.stdout.write(
            f"{task:<14}{1e3 * response:>12.2f}{1e3 * canary:>12.2f}{sum(map(bool, errors)):>8}{cost:>9.2%}\n"
        )
    sys.stdout.write(f"{'all':<14}{'':>32}{sums[1] / sums[0] / RESPONSES_PER_CANARY:>9.2%}\n")
    await service.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=400, help="responses per domain; default: 400")
    asyncio.run(measure(parser.parse_args().responses))
