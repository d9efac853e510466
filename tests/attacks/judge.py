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


async def answer(service: RewardService, case: dict[str, Any]) -> None:
    """Judge one case, again if the machine failed, as in a run; the runner shows the detail beside a wrong score."""
    verdict = await service.judge(request_of(case))
    why = None if verdict["score"] == 1.0 else f"{verdict['failure'] or 'judged'}: {verdict['detail']}"
    sys.stdout.write(json.dumps({"id": verdict["id"], "score": verdict["score"], "failure": why}) + "\n")
    sys.stdout.flush()


async def main(workers: int, settings: dict[str, float]) -> None:
    """Answers until standard input ends."""
    registry = discover()
    service = RewardService(pool_specs(registry, ["code"], workers, {"code": settings}), registry)
    await service.start()
    try:
        async with asyncio.TaskGroup() as answers:
            while line := await asyncio.to_thread(sys.stdin.readline):
                answers.create_task(answer(service, json.loads(line)))
    finally:
        await service.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), {"time_limit_s": float(limit) for limit in sys.argv[2:]}))
