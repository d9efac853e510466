"""Decisions of the scheduler without I/O, which `benchmarks/simulate.py` also runs: freshness, and shares of engines.

`algorithms.dynamic_sampling` decides which groups are kept, and when another is drawn.
"""

import heapq
from collections.abc import Sequence


def is_fresh(version: int, step: int, max_staleness: int) -> bool:
    """Return whether a group of weights `version` may be trained on in a step, whose own weights are `step` - 1."""
    return step - 1 - version <= max_staleness


PART = 4  # responses per request: a request costs rank 0 about a millisecond, and the engine one prefill


def spread(in_flight: Sequence[int], responses: int, most: int, part: int = PART) -> list[int]:
    """Return the number of the prompt's responses for each engine, so that engines have about equal loads.

    The least loaded engine repeatedly gets the next `part` responses; among equals, the first.  The responses to a
    prompt, which tend to be all long or all short, are thus distributed, and a group late in a step runs at the speed
    of nearly empty engines.

    Args:
        in_flight: open responses of each usable engine.
        responses: number of responses to the prompt.
        most: limit of open responses per engine.
        part: at least 1.

    Returns:
        responses for each engine; their sum is less than `responses`, possibly 0, if there is no room for more.
    """
    shares = [0] * len(in_flight)
    loads = [(load, index) for index, load in enumerate(in_flight) if load < most]
    heapq.heapify(loads)
    while responses and loads:
        load, index = heapq.heappop(loads)
        count = min(part, responses, most - load)
        shares[index] += count
        responses -= count
        if load + count < most:
            heapq.heappush(loads, (load + count, index))
    return shares
