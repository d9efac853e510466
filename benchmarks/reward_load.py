"""Requests of the five domains with their right scores, which `rewards.py` and `reward_soak.py` send."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_prorl.rewards.interface import Verdict

DOMAINS = ("math", "stem", "puzzles", "instructions", "code")
CODE_TESTS = 10


@dataclass(frozen=True)
class Load:
    """A request and its right score."""

    request: dict[str, Any]
    score: float


def _request(task: str, number: int, truth: dict[str, Any], response: str) -> dict[str, Any]:
    return {
        "id": f"{task}-{number}",
        "task": task,
        "prompt": "?",
        "truth": truth,
        "response": response,
        "finished": True,
    }


def plain_numbers(number: int, rng: random.Random) -> Load:
    """Return a math request with a whole number; half of the answers are off by one."""
    value, wrong = rng.randrange(10**6), rng.random() < 0.5
    response = f"<think>let me see</think>The answer is \\boxed{{{value + wrong}}}."
    return Load(_request("math", number, {"answer": str(value)}, response), float(not wrong))


def formulas(number: int, rng: random.Random) -> Load:
    """Return a math request whose answer has another notation than the truth; half of the answers are wrong."""
    a, b, wrong = rng.randrange(2, 50), rng.randrange(2, 50), rng.random() < 0.5
    shift = a + wrong
    forms = (
        (f"\\frac{{{a}}}{{{a * b + 1}}}", f"{shift}/{a * b + 1}"),
        (f"{a}\\sqrt{{{b * b + 1}}}", f"\\sqrt{{{b * b + 1}}}\\cdot {shift}"),
        (f"x^2+{a}x+{b}", f"{b}+x^2+{shift}x"),
        (f"[{a},\\infty)", f"[{shift}, \\infty)"),
    )
    truth, answer = forms[number % len(forms)]
    return Load(_request("math", number, {"answer": truth}, f"So \\boxed{{{answer}}}"), float(not wrong))


def stem(number: int, rng: random.Random) -> Load:
    """Return a stem request: a choice among four, or a value with a unit; half of the answers are wrong."""
    wrong = rng.random() < 0.5
    if number % 2:
        truth: dict[str, Any] = {"answer": "C", "options": ["iron", "gold", "tin", "lead"]}
        return Load(_request("stem", number, truth, f"\\boxed{{{'B' if wrong else 'C'}}}"), float(not wrong))
    value = rng.randrange(1, 1000)
    truth = {"answer": f"{value}", "unit": "m/s"}
    return Load(_request("stem", number, truth, f"\\boxed{{{value + wrong}\\ \\text{{m/s}}}}"), float(not wrong))


def puzzles(number: int, rng: random.Random) -> Load:
    """Return a request of reasoning-gym's chain_sum; half of the answers are wrong."""
    a, b, wrong = rng.randrange(1000), rng.randrange(1000), rng.random() < 0.5
    entry = {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": {}}
    truth = {"dataset": "chain_sum", "entry": entry}
    response = f"<answer>{'no idea' if wrong else a + b}</answer>"
    return Load(_request("puzzles", number, truth, response), float(not wrong))


def instructions(number: int, rng: random.Random) -> Load:
    """Return a request with two instructions; some responses break one of them."""
    truth = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 5}],
    }
    wrong = rng.random() < 0.5
    response = " ".join(["word"] * rng.randrange(10, 200)) + (", and more" if wrong else "")
    return Load(_request("instructions", number, truth, response), 0.5 if wrong else 1.0)


PROGRAM = """import sys
from collections import Counter


def solve(numbers):
    counts = Counter(numbers)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:{top}]


def main():
    n = int(input())
    numbers = list(map(int, input().split()))
    assert len(numbers) == n
    for value, count in solve(numbers):
        print(value, count)


if __name__ == "__main__":
    main()
"""
_SEEDS = random.Random(0)
_INPUTS = [[_SEEDS.randrange(20) for _ in range(50)] for _ in range(CODE_TESTS)]


def _expected(numbers: list[int]) -> str:
    counts = {value: numbers.count(value) for value in numbers}
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
    return "".join(f"{value} {count}\n" for value, count in top)


CODE_TRUTH = {
    "tests": [
        {"input": f"{len(numbers)}\n{' '.join(map(str, numbers))}\n", "output": _expected(numbers)}
        for numbers in _INPUTS
    ]
}


def code_of(number: int, kind: str) -> Load:
    """Return a code request of a kind: it "passes" all ten tests, prints "wrong" output in all, or "raises" in all."""
    sources = {"passes": PROGRAM.format(top=3), "wrong": PROGRAM.format(top=2), "raises": PROGRAM.format(top="'3'")}
    response = f"<think>counting</think>\n```python\n# {number}\n{sources[kind]}```\n"
    return Load(_request("code", number, CODE_TRUTH, response), float(kind == "passes"))


def code(number: int, rng: random.Random) -> Load:
    """Return a code request of a random kind."""
    return code_of(number, rng.choice(("passes", "wrong", "raises")))


MAKERS = {"math": formulas, "stem": stem, "puzzles": puzzles, "instructions": instructions, "code": code}


def mixture(seed: int) -> Iterator[Load]:
    """Yield requests of all domains in turn, without end."""
    rng, number = random.Random(seed), 0
    while True:
        for task in DOMAINS:
            maker = plain_numbers if task == "math" and rng.random() < 0.5 else MAKERS[task]
            yield maker(number, rng)
            number += 1


def same(load: Load, verdict: Verdict) -> bool:
    """Return whether the verdict belongs to this request and has the expected score."""
    return verdict["id"] == load.request["id"] and verdict["score"] == load.score


def lines(loads: list[Load]) -> str:
    """Return the requests as JSON Lines, for `prorl rewards score`."""
    return "".join(json.dumps(load.request) + "\n" for load in loads)
