"""The gates of `gpu_evidence.py`: bounds for numbers of its sections, on one H200 with the 1.5B model.

Standard library only.
"""

import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Rows = list[dict[str, Any]]
PASSED, MISSED, SHOWN, NOT_MEASURED = "passed", "missed", "shown only", "not measured"
WARM_STEPS = ("step 1", "step 2")  # kernels are compiled and caches filled; their speed does not count
SETTLED = 2  # wakes after which the memory must not grow
_HOLDS = {"at least": operator.ge, "at most": operator.le, "below": operator.lt, "": operator.eq}


@dataclass(frozen=True)
class Gate:
    """A bound for a number of a section.

    Attributes:
        value: computes the number from the section's rows; None if they do not have it.
        how: relation of a number that passes to `bound`; empty: equal.
        form: format of number and bound.
        speed: depends on the device's speed, which tiny sizes do not show.
        good: a number that is better than required.
    """

    name: str
    section: str
    value: Callable[[Rows], Any]
    how: str
    bound: float | str
    form: str = "{}"
    speed: bool = False
    good: float | None = None

    def passes(self, value: Any) -> bool:
        return bool(_HOLDS[self.how](value, self.bound))

    @property
    def wanted(self) -> str:
        good = "" if self.good is None else f" (good: {self.form.format(self.good)})"
        return f"{self.how} {self.form.format(self.bound)}{good}".strip()


# --- numbers of the sections ---------------------------------------------------------------------------------------


def step_speed(rows: Rows) -> float | None:
    return _ratio(_warm(rows, "tokens"), _warm(rows, "step_s"))


def decoding_speed(rows: Rows) -> float | None:
    return _median(_warm(rows, "decoded_per_s"))


def trainer_share(rows: Rows) -> float | None:
    return _ratio([*_warm(rows, "logprobs_s"), *_warm(rows, "updates_s")], _warm(rows, "step_s"))


def update_mfu(rows: Rows) -> float | None:
    return next((row.get("peak_share") for row in rows if row["what"].startswith("update: ")), None)


def seconds_of_wakes(rows: Rows) -> float | None:
    return _median([row["seconds"] for row in rows if "held_bytes" in row])


def leaked_mb(rows: Rows) -> float | None:
    held = _column(rows, "held_bytes")
    return (held[-1] - held[SETTLED - 1]) / 1e6 if len(held) > SETTLED else None


def largest(key: str) -> Callable[[Rows], float | None]:
    """Return the largest number of a column: nan if some rows have none, None if no row has one."""

    def value(rows: Rows) -> float | None:
        found = _column(rows, key)
        if all(number is None for number in found):
            return None
        return math.nan if None in found else max(found)

    return value


def equality(rows: Rows) -> str | None:
    hashes = _column(rows, "weights_sha256")
    return ("equal" if hashes[0] == hashes[1] else "different") if len(hashes) == 2 else None


def _column(rows: Rows, key: str) -> list[Any]:
    return [row[key] for row in rows if key in row]


def _warm(rows: Rows, key: str) -> list[float]:
    return _column([row for row in rows if row["what"] not in WARM_STEPS], key)


def _ratio(above: list[float], below: list[float]) -> float | None:
    return sum(above) / sum(below) if below else None


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None


GATES = (
    Gate("whole step", "steps", step_speed, "at least", 6000, "{:,.0f} tokens/s/GPU", speed=True, good=9000),
    Gate("decoding", "steps", decoding_speed, "at least", 15_000, "{:,.0f} tokens/s", speed=True),
    Gate("update (MFU)", "actor", update_mfu, "at least", 0.35, "{:.2f} of the peak", speed=True),
    Gate("log-probabilities and updates", "steps", trainer_share, "at most", 0.45, "{:.2f} of a step", speed=True),
    Gate("sleep, wake and load", "wakes", seconds_of_wakes, "at most", 6.0, "{:.2f} s", speed=True),
    Gate("KV cache, preemptions", "steps", largest("preemptions"), "at most", 0, "{:.0f} in a step"),
    Gate("mean ratio, engine and trainer", "steps", largest("mean_ratio"), "below", 1.02, "{:.4f}"),
    Gate("generation KL", "steps", largest("generation_kl"), "below", 5e-4, "{:.1e} nats per token"),
    Gate("leak over twenty wakes", "wakes", leaked_mb, "below", 50, "{:,.1f} MB"),
    Gate("resumed and undisturbed training", "resume", equality, "", "equal"),
    Gate("repeated run", "repeat", equality, "", "equal"),
)  # fmt: skip


# --- verdicts ------------------------------------------------------------------------------------------------------


def verdicts(sections: Mapping[str, Mapping[str, Any]], small: bool) -> list[dict[str, Any]]:
    """Return a row for each gate: its name, value (None: not measured), the value as text, bound and verdict.

    Args:
        sections: state, rows and, if skipped, reason of each section that was chosen.
        small: tiny sizes; gates of speed get no verdict.
    """
    return [_verdict(gate, sections.get(gate.section), small) for gate in GATES]


def _verdict(gate: Gate, section: Mapping[str, Any] | None, small: bool) -> dict[str, Any]:
    value = None if section is None else gate.value(section["rows"])
    if value is None:
        verdict, text = f"{NOT_MEASURED}: {_why(gate, section)}", "-"
    else:
        text = gate.form.format(value)
        verdict = PASSED if gate.passes(value) else MISSED
        if gate.good is not None and value >= gate.good:
            verdict = f"{PASSED}, good"
        if small and gate.speed:
            verdict = f"{SHOWN}: tiny sizes have no bound of speed"
    return {"gate": gate.name, "value": value, "text": text, "bound": gate.wanted, "verdict": verdict}


def _why(gate: Gate, section: Mapping[str, Any] | None) -> str:
    if section is None:
        return f"section {gate.section} was not chosen"
    if section["state"] == "done":
        return f"section {gate.section} has no such number on this device"
    return str(section.get("reason") or f"section {gate.section} {section['state']}")
