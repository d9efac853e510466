"""The duration of an evaluation, estimated before it starts from stored responses, or from guesses that it names."""

from collections.abc import Sequence
from pathlib import Path

from nemo_prorl.evaluation.sampling import BenchmarkWork
from nemo_prorl.files import read_object

# Assumptions, not measurements.  The engine of benchmarks/simulate.py, one H100 with 1.5B parameters, generates 10,900
# tokens/s for 256 sequences of 6,000 tokens on average.
MEAN_TOKENS, TOKENS_PER_S_OF_GPU = 8000, 10_000


def estimate(out: Path, parts: Sequence[BenchmarkWork], engines: int, on_gpu: bool) -> str | None:
    """Return a sentence on the time that the missing responses take; None if nothing tells the engines' speed.

    Args:
        out: folder of the evaluation; its results.json has the speed of the last command.
        parts: benchmarks with their stored responses, whose lengths stand for those of the missing ones.
        engines: number of engines, each on one GPU if `on_gpu`.
    """
    missing = tokens = guessed = 0
    for benchmark, store, records in parts:
        sampling = benchmark.sampling
        count = len(records) * sampling.samples - len(store.lines)
        known = [line["tokens"] for line in store.lines.values() if line["tokens"] is not None]
        most = min(sampling.max_response or sampling.context, sampling.context)
        mean = sum(known) / len(known) if known else min(MEAN_TOKENS, most)
        missing += max(0, count)
        guessed += 0 if known else max(0, count)
        tokens += max(0, count) * round(mean)
    rate = _measured_rate(out)
    if not missing or (rate is None and not on_gpu):
        return None
    speed = rate or engines * TOKENS_PER_S_OF_GPU
    hours = tokens / speed / 3600.0
    lengths = f"{tokens / missing:,.0f} tokens each"
    lengths += f" (a guess for {guessed:,} of them)" if guessed else " (as the stored ones)"
    source = "as before" if rate else f"a guess: {TOKENS_PER_S_OF_GPU:,} per GPU, for 1.5B parameters on an H100"
    total = f"about {hours:.1f} h" + (f" with {engines} GPUs, {engines * hours:.1f} GPU hours" if on_gpu else "")
    return f"{missing:,} responses of {lengths} at {speed:,.0f} tokens/s ({source}): {total}"


def _measured_rate(out: Path) -> float | None:
    time = (read_object(out / "results.json") or {}).get("time")
    rate: float | None = time.get("tokens_per_s") if isinstance(time, dict) else None
    return rate
