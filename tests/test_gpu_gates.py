"""The gates of the hardware proof: a violation of each is planted in its rows, and of three at their source, too."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import gates, real, repeat, resume, steps, wakes  # noqa: E402
from gpu.common import Settings  # noqa: E402
from gpu_evidence import status_of  # noqa: E402

ROLLOUT = ROOT / ".venv" / "rollout" / "bin" / "python"
Sections = dict[str, dict[str, Any]]
STEP = {"step_s": 40.0, "logprobs_s": 6.0, "updates_s": 8.0, "tokens": 400_000, "decoded_per_s": 20_000.0}
SAMPLED = {"mean_ratio": 1.01, "generation_kl": 2e-4, "preemptions": 0.0}


def good() -> Sections:
    """Sections of a machine that passes all gates.  Its first two steps are slow, and its first wakes take memory."""
    rows: dict[str, list[dict[str, Any]]] = {
        "actor": [
            {"what": "log-probabilities and entropies", "peak_share": 0.1},
            {"what": "update: forward, backward, optimizer", "peak_share": 0.4},
        ],
        "steps": [row for k in range(1, 9) for row in ({"what": f"step {k}"} | STEP, {"what": f"step {k}"} | SAMPLED)],
        "wakes": [
            {"what": f"wake {k}", "seconds": 60.0 if k == 1 else 4.0, "held_bytes": 10**9 if k == 1 else 2 * 10**9 + k}
            for k in range(1, 21)
        ],
        "resume": [{"what": what, "weights_sha256": "a"} for what in ("undisturbed", "resumed")],
        "repeat": [{"what": what, "weights_sha256": "b"} for what in ("first", "second")],
    }
    for row in rows["steps"][:4]:
        row |= {key: 10 * row[key] for key in ("step_s", "updates_s") if key in row}
    return {name: {"state": "done", "rows": rows[name]} for name in rows}


def found(sections: Sections, small: bool = False) -> dict[str, str]:
    return {row["gate"]: row["verdict"] for row in gates.verdicts(sections, small)}


def every_row(section: str, **values: Any) -> Callable[[Sections], None]:
    def plant(sections: Sections) -> None:
        for row in sections[section]["rows"]:
            row.update({key: value for key, value in values.items() if key in row})

    return plant


def one_row(section: str, number: int, **values: Any) -> Callable[[Sections], None]:
    return lambda sections: sections[section]["rows"][number].update(values)


PLANTED = {
    "whole step": every_row("steps", tokens=239_999),
    "decoding": every_row("steps", decoded_per_s=14_999.0),
    "update (MFU)": one_row("actor", 1, peak_share=0.349),
    "log-probabilities and updates": every_row("steps", updates_s=12.1),
    "sleep, wake and load": every_row("wakes", seconds=6.01),
    "KV cache, preemptions": one_row("steps", -1, preemptions=1.0),
    "mean ratio, engine and trainer": one_row("steps", 1, mean_ratio=1.02),
    "generation KL": one_row("steps", 9, generation_kl=5e-4),
    "leak over twenty wakes": one_row("wakes", -1, held_bytes=2 * 10**9 + 2 + 50 * 10**6),
    "resumed and undisturbed training": one_row("resume", 1, weights_sha256="other"),
    "repeated run": one_row("repeat", 1, weights_sha256="other"),
}


def test_all_gates_pass_where_nothing_is_planted_and_a_better_step_is_called_good() -> None:
    verdicts = found(good())
    assert list(verdicts) == list(PLANTED)
    assert verdicts.pop("whole step") == "passed, good"
    assert set(verdicts.values()) == {"passed"}
    slower = good()
    every_row("steps", tokens=240_000)(slower)
    assert found(slower)["whole step"] == "passed"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_misses_its_gate_alone(name: str) -> None:
    sections = good()
    PLANTED[name](sections)
    verdicts = found(sections)
    assert [gate for gate, verdict in verdicts.items() if verdict == gates.MISSED] == [name]
    for device, status in (("cuda", 1), ("cpu", 0)):
        result = {"sections": sections, "gates": gates.verdicts(sections, False), "machine": {"device": device}}
        assert status_of(result) == status


@pytest.mark.parametrize("key", ["mean_ratio", "generation_kl", "preemptions"])
def test_a_number_that_is_not_finite_or_absent_in_a_step_misses(key: str) -> None:
    for value in (None, math.nan):
        sections = good()
        one_row("steps", 1, **{key: value})(sections)
        assert list(found(sections).values()).count(gates.MISSED) == 1


def test_with_tiny_sizes_gates_of_speed_show_their_number_without_a_verdict() -> None:
    sections = good()
    for plant in PLANTED.values():
        plant(sections)
    rows = {row["gate"]: row for row in gates.verdicts(sections, small=True)}
    speed = {gate.name for gate in gates.GATES if gate.speed}
    assert {name for name, row in rows.items() if row["verdict"].startswith(gates.SHOWN)} == speed
    assert {name for name, row in rows.items() if row["verdict"] == gates.MISSED} == set(rows) - speed
    assert rows["sleep, wake and load"]["text"] == "6.01 s"


def test_a_gate_without_its_number_says_why_and_is_not_missed() -> None:
    sections = good()
    del sections["repeat"]
    sections["steps"] = {"state": "skipped", "reason": "apex is not installed here", "rows": []}
    sections["resume"] = {"state": "timed out", "rows": sections["resume"]["rows"][:1]}
    sections["actor"]["rows"][1]["peak_share"] = None
    rows = {row["gate"]: row for row in gates.verdicts(sections, False)}
    reasons = {name: row["verdict"].partition(": ")[2] for name, row in rows.items() if row["value"] is None}
    assert reasons["repeated run"] == "section repeat was not chosen"
    assert reasons["decoding"] == "apex is not installed here"
    assert reasons["resumed and undisturbed training"] == "section resume timed out"
    assert reasons["update (MFU)"] == "section actor has no such number on this device"
    assert all(row["verdict"] == gates.PASSED for name, row in rows.items() if name not in reasons)
    result = {"sections": good(), "gates": list(rows.values()), "machine": {"device": "cuda"}}
    assert status_of(result) == 0


def test_the_page_of_the_docs_has_the_gates_and_their_bounds() -> None:
    page = (ROOT / "docs" / "howto" / "gpu_evidence.md").read_text()
    table = page.partition("| gate | bound |")[2].partition("\n<!-- /table")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert rows == [[gate.name, gate.wanted] for gate in gates.GATES]


# --- planted at the source -----------------------------------------------------------------------------------------


def verdict_of(section: Any, settings: Settings, gate: str) -> str:
    rows: list[dict[str, Any]] = []
    section.run(lambda what, **values: rows.append({"what": what, **values}), settings)
    return found({section.__name__.removeprefix("gpu."): {"state": "done", "rows": rows}}, small=True)[gate]


LEAKS = """
import sys

sys.path.insert(0, {root!r})
from nemo_prorl.rollout.engine import server

kept, load = [], server.EngineServer._load


async def leaking(self, request):
    kept.append(b"1" * 5_000_000)
    return await load(self, request)


server.EngineServer._load = leaking
if __name__ == "__main__":  # vLLM's core process imports this file
    sys.exit(server.main())
"""


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_engine_that_leaks_at_each_load_misses_the_gate(tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS.format(root=str(ROOT)))
    python = tmp_path / "python"  # runs leaks.py in place of the server, and anything else as it is
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || {{ shift; set -- {tmp_path}/leaks.py "$@"; }}\nexec {ROLLOUT} "$@"\n'
    )
    python.chmod(0o755)
    assert verdict_of(wakes, Settings("cpu", True, str(python)), "leak over twenty wakes") == gates.MISSED


def forgetful(settings: Settings, folder: Path, saved: Path) -> dict[str, Any]:
    """Go on from the checkpoint, but with new moments of Adam."""
    from nemo_prorl.policy.checkpoint_files import CheckpointFiles

    actor, cfg = real.build(settings, folder, "deterministic=true")
    CheckpointFiles(actor).load(saved)
    actor.reset_optimizer()
    return resume.updates(settings, actor, cfg)


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.timeout(600)
def test_a_resume_that_loses_the_moments_misses_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "resumed", forgetful)
    gate = "resumed and undisturbed training"
    assert verdict_of(resume, Settings("cpu", True), gate) == gates.MISSED


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_repeated_run_with_another_seed_misses_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    train, seeds = steps.train, iter((1, 2))

    def seeded(folder: Path, settings: Settings, step: Any, *overrides: str) -> str:
        return train(folder, settings, step, *overrides, f"seed={next(seeds)}")

    monkeypatch.setattr(steps, "train", seeded)
    gate = "repeated run"
    assert verdict_of(repeat, Settings("cpu", True, str(ROLLOUT)), gate) == gates.MISSED
