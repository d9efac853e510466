"""Judge for run_attacks.py on top of the reward service:  judge.py WORKERS [LIMIT_S]

`prorl rewards score` would do, too; here verdicts leave as they come, and all workers are those of the plugin `code`.
"""

import asyncio
import json
import sys
from typing import Any

from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.interface import RewardRequest
from nemo_prorl.rewards.judging import RewardService, pool_specs


def request_of(case: dict[str, Any]) -> RewardRequest:
    """What the plugin judges."""
    truth = {"tests": case["tests"]}
    if case["style"] == "function":
        truth["fn_name"] = case["fn_name"]
    return RewardRequest(case["id"], "code", "", truth, f"```python\n{case['code']}\n```", True)


def answer(future: "asyncio.Future[dict[str, Any]]") -> None:
    verdict = future.result()
    sys.stdout.write(json.dumps({name: verdict[name] for name in ("id", "score", "failure")}) + "\n")
    sys.stdout.flush()


async def main(workers: int, settings: dict[str, float]) -> None:
    """Answers until standard input ends."""
    registry = discover()
    service = RewardService(pool_specs(registry, ["code"], workers, {"code": settings}), registry)
    await service.start()
    open_requests = []
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            future = service.submit(request_of(json.loads(line)))
            future.add_done_callback(answer)
            open_requests.append(future)
        await asyncio.gather(*open_requests)
    finally:
        await service.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), {"time_limit_s": float(limit) for limit in sys.argv[2:]}))
