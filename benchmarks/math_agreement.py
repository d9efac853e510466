"""Measures how often the math reward agrees with published verdicts: gold answers, math-verify's tests, real responses.

    .venv/train/bin/python benchmarks/math_agreement.py --pairs MATH_VERIFY/tests --data DATA
        [--responses TORA/src/outputs] [--before OTHER_CHECKOUT] [--show]

DATA: folder of JSON Lines with `answer`, such as ../shared/data/math: each answer, boxed unchanged, must score 1.
MATH_VERIFY: a checkout of github.com/huggingface/Math-Verify: each pair of its tests whose answer can be boxed.
TORA: a checkout of github.com/microsoft/ToRA: responses to GSM8K with the answers that its authors extracted.
`--before` also judges the cases with the math plugin of another checkout, and prints both side by side.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_MATH = re.compile(r"\$\$?(.+?)\$\$?|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_BESIDE = re.compile(r"(?:\s|,|;|and|or|Answer|is|[.])*")  # text allowed beside the formulas of a short answer
_PLAIN_CHARS = 30  # longer texts without mathematics are not answers that a box could hold


GOLD = "gold answers"


@dataclass(frozen=True)
class Case:
    """A truth, a response, and the published verdict."""

    group: str  # source of the case, such as GOLD; a line of the output
    truth: str
    response: str
    right: bool  # the published verdict


def _boxed(text: str) -> str | None:
    """Return an answer as a response: unchanged if it has a box, otherwise its formulas, or its whole text, in a box.

    None if there is other text beside the formulas, or if a text without formulas is too long.
    """
    if "\\boxed" in text or "\\fbox" in text:
        return text.replace("\\\\boxed", "\\boxed")
    found = [next(filter(None, groups)) for groups in _MATH.findall(text)]
    if found and not _BESIDE.fullmatch(_MATH.sub("", text)):
        return None
    if not found and len(text) > _PLAIN_CHARS:
        return None
    return f"\\boxed{{{', '.join(one.strip() for one in found) or text.strip()}}}"


def _truth(text: str) -> str | None:
    """Return a reference answer as the plugin expects it: like `_boxed`, but a text without a box gets none."""
    response = _boxed(text)
    if response is None or "\\boxed" in text:  # the plugin uses a boxed truth unchanged
        return response
    return response.removeprefix("\\boxed{").removesuffix("}")


def pairs(tests: Path) -> Iterator[Case]:
    """Yield the parametrized cases of math-verify's tests that use the default precision and strictness."""
    for file in sorted(tests.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "parametrize":
                continue
            try:
                names = [name.strip() for name in ast.literal_eval(node.args[0]).split(",")]
                rows = ast.literal_eval(node.args[1])
            except ValueError:
                continue  # rows that are not literals
            for row in rows:
                case: dict[str, Any] = dict(zip(names, row, strict=False))
                wanted = case.get("expected", case.get("result"))
                if "gold" not in case or case.get("precision", 6) != 6 or not case.get("strict", True):
                    continue
                truth, response = _truth(case["gold"]), _boxed(case["pred"])
                if truth and response and len(truth) < 200:
                    yield Case("math-verify's tests", truth, response, bool(wanted))


def gold(folder: Path) -> Iterator[Case]:
    """Yield each published answer as the truth and, in a box, as the response."""
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            answers = json.loads(line)["answer"]
            for answer in answers if isinstance(answers, list) else [answers]:
                if (text := str(answer).strip()) and text.count("{") == text.count("}"):
                    yield Case(GOLD, text, f"\\boxed{{{text}}}", True)


def responses(folder: Path) -> Iterator[Case]:
    """Yield models' recorded responses as cases.

    A case is labelled right if the number that ToRA's authors extracted from the response equals the true answer.
    """
    for file in sorted(folder.rglob("gsm8k/*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if "\\boxed" in row["code"][0]:
                yield Case("real responses", row["gt"], row["code"][0].split("```output")[-1], _equal(row))


def _equal(row: dict[str, Any]) -> bool:
    try:
        return abs(float(row["pred"][0].replace(",", "")) - float(row["gt"].replace(",", ""))) < 1e-6
    except (ValueError, AttributeError):
        return False


def judge(cases: list[Case]) -> tuple[list[bool], float]:
    """Return whether the math plugin accepts each response, and the CPU seconds for all of them."""
    from prorl_reward_math.plugin import MathReward

    from nemo_prorl.rewards.interface import RewardRequest

    plugin = MathReward()
    plugin.prepare()
    began = time.process_time()
    verdicts = [
        plugin.score(RewardRequest("x", "math", "?", {"answer": case.truth}, case.response)).score == 1.0
        for case in cases
    ]
    return verdicts, time.process_time() - began


def math_verify_alone(cases: list[Case]) -> tuple[list[bool], float]:
    """Return whether math-verify alone accepts each response, and the CPU seconds for all of them.

    Gold answers are skipped, because they take minutes.
    """
    from math_verify import parse, verify

    began, verdicts = time.process_time(), []
    for case in cases:
        if case.group == GOLD:
            continue
        found = parse(f"\\boxed{{{case.truth}}}"), parse(case.response)
        verdicts.append(bool(verify(*found)))
    return verdicts, time.process_time() - began


def _of_other(checkout: Path, cases: list[Case]) -> tuple[list[bool], float]:
    """Judge the cases by another checkout's plugin, in a process; return the verdicts and the CPU seconds."""
    paths = [str(checkout), *(str(path.parent) for path in sorted(checkout.glob("reward_plugins/*/pyproject.toml")))]
    code = (
        "import json,sys; sys.path.insert(0, sys.argv[1]); import math_agreement as m;"
        "print(json.dumps(m.judge([m.Case(*row) for row in json.load(sys.stdin)])))"
    )
    rows = json.dumps([(case.group, case.truth, case.response, case.right) for case in cases])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    done = subprocess.run(command, input=rows, capture_output=True, text=True, env=environment, check=True)
    verdicts, seconds = json.loads(done.stdout.splitlines()[-1])
    return verdicts, seconds


def lines_of_code(checkout: Path) -> int:
    return sum(
        len(file.read_text().splitlines()) for file in checkout.glob("reward_plugins/math/prorl_reward_math/*.py")
    )


def main() -> None:
    say = partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "pairs", "responses", "before"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument(
        "--show", action="store_true", help="print each case in which the plugin's verdict differs from the label"
    )
    parser.add_argument("--no-alone", action="store_true", help="skip the column of math-verify alone, which is slow")
    args = parser.parse_args()
    cases: list[Case] = []
    for read, folder in ((pairs, args.pairs), (responses, args.responses), (gold, args.data)):  # gold answers come last
        cases += read(folder) if folder else []
    columns = {"plugin": judge(cases)}
    if args.before:
        columns = {"plugin before": _of_other(args.before, cases), **columns}
    if not args.no_alone:
        columns["math-verify alone"] = math_verify_alone(cases)
    from importlib.metadata import version

    say(f"math-verify {version('math-verify')}; share of published verdicts that each agrees with")
    say(f"{'':24s}{'cases':>8s}" + "".join(f"{name:>20s}" for name in columns))
    for group in dict.fromkeys(case.group for case in cases):
        at = [index for index, case in enumerate(cases) if case.group == group]
        agreed = [sum(found[i] == cases[i].right for i in at if i < len(found)) for found, _ in columns.values()]
        shares = [f"{one / len(at):20.4f}" if one else f"{'-':>20s}" for one in agreed]
        say(f"{group:24s}{len(at):8d}" + "".join(shares))
    speeds = "".join(f"{len(found) / seconds:20.0f}" for found, seconds in columns.values())
    say(f"{'answers/s of one core':32s}{speeds}")
    here = Path(__file__).resolve().parents[1]
    lines = [f"{lines_of_code(folder):20d}" for folder in (args.before, here) if folder]
    say(f"{'lines of the plugin':32s}" + "".join(lines))
    if args.show:
        for index, case in enumerate(cases):
            judged = {name: found[index] for name, (found, _) in columns.items() if index < len(found)}
            if judged["plugin"] != case.right:
                say(f"{case.group}: right={case.right} {judged} {case.truth!r} | {case.response[-200:]!r}")


if __name__ == "__main__":
    main()
