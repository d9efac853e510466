"""Measures whether an engine computes the prompt of a group only once: real vLLM, one token for each response.

.venv/train/bin/python benchmarks/prefix.py

Three requests are compared by the time until all their responses have a first token: 1 response; 16 responses to one
prompt; and 1 response to each of 16 prompts of the same length, sent at the same time.  If an engine computes a shared
prompt only once, the second time is little more than the first.  The model has two million parameters.  vLLM shares
only whole blocks of its cache: 32 tokens in our engines on a CPU (vLLM's default is 128), 16 tokens on a GPU.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from machine import describe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nemo_prorl.rollout.endpoints import EngineClient, SamplingParams  # noqa: E402
from tests.rollout.engines import TOKEN, EngineProcess, write_model  # noqa: E402

REPEATS, RESPONSES = 7, 16
ONE_TOKEN = SamplingParams(temperature=1.2, max_tokens=1, stop_token_ids=())


def fresh_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Return a prompt that no prefix cache contains."""
    return [rng.randrange(3, 500) for _ in range(tokens)]


async def seconds(client: EngineClient, prompts: list[list[int]], responses: int) -> float:
    """Request `responses` responses to each prompt at the same time; return the seconds until each has one token."""

    async def one(prompt: list[int]) -> None:
        async for _ in client.generate(prompt, range(responses), ONE_TOKEN, None):
            pass

    began = time.monotonic()
    await asyncio.gather(*map(one, prompts))
    return time.monotonic() - began


async def measure(url: str, tokens: int) -> tuple[float, float, float]:
    """Return median seconds to the first tokens: 1 response, RESPONSES responses to one prompt, RESPONSES prompts."""
    rng, times = random.Random(tokens), []
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, url, TOKEN)
        for _ in range(REPEATS + 1):
            times.append(
                (
                    await seconds(client, [fresh_prompt(rng, tokens)], 1),
                    await seconds(client, [fresh_prompt(rng, tokens)], RESPONSES),
                    await seconds(client, [fresh_prompt(rng, tokens) for _ in range(RESPONSES)], 1),
                )
            )
    one, group, apart = (
        statistics.median(column) for column in zip(*times[1:], strict=True)
    )  # the first round warms up
    return one, group, apart


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = [describe(), f"milliseconds to the first tokens, median of {REPEATS}", ""]
    lines.append(
        f"{'prompt':>10s} {'1 response':>12s} {'a group of 16':>14s} {'16 prompts':>12s}   shared of the 15 others"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", tied=True, seed=0)
        flags = ("--max-model-len=1024", "--max-batched-tokens=16384")
        engine = EngineProcess(str(ROOT / ".venv/rollout/bin/python"), model, Path(folder), 0, *flags).start()
        try:
            url = engine.wait_ready().url
            for tokens in (64, 140, 300, 600, 960):
                one, group, apart = asyncio.run(measure(url, tokens))
                shared = (apart - group) / (apart - one)
                lines.append(
                    f"{tokens:10d} {1000 * one:12.1f} {1000 * group:14.1f} {1000 * apart:12.1f}   {100 * shared:.0f} %"
                )
        finally:
            engine.stop()
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
