"""Twenty sleeps and wakes of an engine beside a resident trainer, with weights loaded at each: seconds, and a leak.

An engine of a run sleeps and wakes at each step, for weeks.
"""

import json
from functools import partial

import psutil

from gpu import engine
from gpu.common import Emit, Settings

WAKES = 20


def run(emit: Emit, settings: Settings) -> None:
    with (
        engine.beside_a_trainer(emit, settings) as place,
        engine.server(place.python, place.folder, settings, *place.options) as url,
    ):
        before = engine.answers(url)
        for number in range(1, WAKES + 1):
            look = partial(engine.free, emit, place, "first sleep") if number == 1 else _nothing
            found = engine.nap(url, place, 2, number + 1, look)
            seconds = sum(found[key] for key in ("sleep_s", "wake_s", "load_s", "cache_s"))
            emit(f"wake {number}", **found, seconds=seconds, held_bytes=held(place))
        if engine.answers(url) != before:
            raise RuntimeError("the engine's greedy answer after all wakes differs from its answer before")


def held(place: engine.Place) -> int:
    """Return the bytes in use: on a GPU all of its memory, on a CPU the private memory of the engine's processes."""
    if (free := place.free_bytes()) is not None:
        return place.device_bytes - free
    server = psutil.Process(json.loads((place.folder / engine.ENDPOINT).read_text())["pid"])
    return sum(process.memory_full_info().uss for process in (server, *server.children(recursive=True)))


def _nothing(phase: str) -> None:
    pass
