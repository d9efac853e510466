"""What a step draws, and which engine generates what: decisions without I/O, which `benchmarks/simulate.py` runs too.

`algorithms.dynamic_sampling` decides which groups are kept, and when another is drawn.
"""

import heapq
from collections.abc import Sequence


def is_fresh(version: int, step: int, max_staleness: int) -> bool:
    """Whether a group that weights `version` made may be trained on in a step: its own weights are `step` - 1."""
    return step - 1 - version <= max_staleness


PART = 4  # responses that go to an engine together: a request costs rank 0 about a millisecond, and the engine a prompt


def spread(in_flight: Sequence[int], responses: int, most: int, part: int = PART) -> list[int]:
    """How many of the responses to one prompt each engine gets, so that engines are about evenly loaded.

    The least loaded engine gets the next `part` responses, again and again; among equals the first.  So the responses
    to a prompt, which tend to be all long or all short, are shared out, and a group late in a step runs at the speed of
    nearly empty engines.

    Args:
        in_flight: responses that each usable engine has.
        responses: of one prompt.
        most: responses that one engine may have.
        part: at least 1.

    Returns:
        responses for each engine; together fewer than asked for, perhaps 0, where there is no room for more.
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
