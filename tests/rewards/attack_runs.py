"""Runs of the attack programs against the real sandbox."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OWN = ROOT / "tests" / "attacks"
GIVEN = OWN / "given"
CONDITIONS = {"root": (), "user": ("as",), "closed": ("as", "--no-user-namespaces")}
_AT_ONCE = 4  # most of the time is spent asleep
_LIMIT_S = "3"  # for a given program: what never ends takes this; the longest honest one takes a second
# Of the given programs, as a user: what depends on the level of the sandbox, and what has broken one of them before.
_AS_USER = [
    "fs-*",
    "net-*",
    "proc-*",
    "h-read-*",
    "h-tempfile",
    "h-threads",
    "steal-*",
    "exhaust-disk",
    "exhaust-thread*",
]


def attack(cases: Path, judge: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """What the runner of the programs says of a judge."""
    runner = [sys.executable, str(GIVEN / "run_attacks.py"), "--cases", str(cases), "--in-flight", str(_AT_ONCE)]
    runner += ["--slack", "60"]  # of a busy machine's waiting, which the judge does not count, and of a second try
    return subprocess.run(
        [*runner, "--judge", " ".join(judge), *options],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def judge(condition: str, *limit_s: str) -> list[str]:
    """The command of our judge, with root's rights or without them; `limit_s`: another time limit than the plugin's."""
    rights = CONDITIONS[condition]
    becomes = [sys.executable, str(ROOT / "packages/prorl-sandbox/tests/as_user.py"), *rights[1:]] if rights else []
    return [*becomes, sys.executable, str(OWN / "judge.py"), str(_AT_ONCE), *limit_s]


def run_attacks(out: Path) -> Path:
    """The given programs, all as root and a part as a user: the folder of what the runner said, CONDITION.json."""
    for condition, options in (("root", ()), ("user", ("--only", *_AS_USER))):
        done = attack(GIVEN, judge(condition, _LIMIT_S), "--limit", _LIMIT_S, *options)
        (out / f"{condition}.json").write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    return out
