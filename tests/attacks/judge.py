"""Judge for run_attacks.py on top of `prorl rewards score`:  judge.py WORKERS PRORL..."""

import json
import subprocess
import sys
import threading
from typing import IO, Any


def request_of(case: dict[str, Any]) -> dict[str, Any]:
    """What `prorl rewards score` reads."""
    truth = {"tests": case["tests"]}
    if case["style"] == "function":
        truth["fn_name"] = case["fn_name"]
    response = f"```python\n{case['code']}\n```"
    return {"id": case["id"], "task": "code", "prompt": "", "truth": truth, "response": response, "finished": True}


def feed(into: IO[str]) -> None:
    """Until our standard input ends."""
    for line in sys.stdin:
        if line.strip():
            into.write(json.dumps(request_of(json.loads(line))) + "\n")
            into.flush()
    into.close()


def main(workers: str, *command: str) -> int:
    """Answers requests of the one kind by verdicts of the other."""
    score = [*command, "rewards", "score", "--in", "-", "--out", "-", "--workers", workers]
    with subprocess.Popen(score, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=feed, args=(process.stdin,), daemon=True).start()
        for line in process.stdout:
            verdict = json.loads(line)
            answer = {name: verdict[name] for name in ("id", "score", "failure")}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
