"""The conformance kit: checks of the rules for every reward plugin, in real workers.

`prorl rewards test` runs the kit, and so does pytest:

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(check):                  # fixture `report`: check_plugin("my_plugin"), scope module
        report[check].require()

Verdicts are requested three times: in order from a first worker; in reverse order from a second worker with another
hash seed; from both workers at once.  A separate process records import, truths and network use (`import_probe.py`).
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_prorl.errors import RewardFailure, UnfitMachine
from nemo_prorl.rewards.conformance_cases import Case, TruthTrial, canary_cases, make_cases, truth_trials
from nemo_prorl.rewards.discovery import Registry, discover
from nemo_prorl.rewards.interface import FULL_SCORE, Example, RewardPlugin, Verdict, one_line
from nemo_prorl.rewards.judging import pool_specs
from nemo_prorl.rewards.pool import WALL_FACTOR, PluginPool, PoolSpec, worker_environment

PROBE_S = 180.0  # seconds for the whole probe process
MAX_TIMEOUTS = 3  # per kind of request; then the kind is skipped: each timeout costs a time budget and a new worker

# Check -> how to fix its failure.
CHECKS = {
    "import": "move imports of heavy packages, and all code with side effects, into prepare()",
    "start": "prepare() must end without an exception, within two minutes; `prorl rewards describe` shows the settings",
    "examples": "the good response of an example must score 1 (correct: true or None), the bad one less",
    "canaries": "a right canary must score 1 (correct: true or None), a wrong one less; correct canaries() or score()",
    "form": "return RewardResult with a finite score in [0, 1]; raise InvalidAnswer for a malformed answer",
    "truth": "validate_truth must raise ValueError that names the field, for each field that is wrong",
    "thinking": "judge request.answer_text, and return no_answer() if it is None",
    "unicode": "catch the errors that unusual characters cause, and raise InvalidAnswer",
    "empty": "an answer may be empty: test before you index, split or parse, and raise InvalidAnswer or score 0",
    "long": "limit the length of text that you parse, and raise InvalidAnswer for longer text",
    "adversarial": "catch the errors of your parser, and raise InvalidAnswer; never evaluate an answer as code",
    "time": "limit the work for one answer, or increase time_budget_s, and wait for nothing: a late worker is killed",
    "determinism": "a verdict must not depend on random numbers, clocks, set order or earlier requests",
    "concurrency": "share no file, port or other state with the other workers; name temporary files at random",
    "network": "put the needed data into the package or the truth; a verdict must not depend on the network",
}
NO_EXAMPLES = "the plugin has no examples: define examples(), or use --examples FILE"


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check: `state` is "passed", "failed" or "skipped"; `fix` says what makes a failed check pass."""

    check: str
    state: str
    text: str
    fix: str = ""

    def require(self) -> None:
        """Fail or skip the calling test; for pytest."""
        if self.state == "skipped":
            import pytest

            pytest.skip(self.text)
        if self.state == "failed":
            raise AssertionError(f"{self.check}: {self.text}; {self.fix}")


@dataclass(frozen=True)
class Report:
    """The outcomes of all checks, in the order of CHECKS."""

    plugin: str
    outcomes: list[CheckOutcome]

    def __getitem__(self, check: str) -> CheckOutcome:
        return next(outcome for outcome in self.outcomes if outcome.check == check)

    @property
    def failed(self) -> list[str]:
        return [outcome.check for outcome in self.outcomes if outcome.state == "failed"]

    def lines(self) -> list[str]:
        lines = []
        for outcome in self.outcomes:
            lines.append(f"{outcome.state:<7}  {outcome.check:<11}  {outcome.text}")
            if outcome.state == "failed":
                lines.append(f"{'':<7}  {'':<11}  fix: {outcome.fix}")
        counts = Counter(outcome.state for outcome in self.outcomes)
        lines.append(", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "skipped")))
        if counts["skipped"]:
            lines[-1] += ": a skipped check proves nothing; most need `examples()` of the plugin, or --examples"
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "plugin": self.plugin,
            "passed": not self.failed,
            "checks": list(map(dataclasses.asdict, self.outcomes)),
        }


def check_plugin(
    name: str, settings: dict[str, Any] | None = None, examples: Sequence[Example] | None = None
) -> Report:
    """Run all checks on the installed plugin `name`.  Raises ConfigError for an unknown name or a wrong setting.

    `settings`: settings of the plugin.  `examples`: examples to test with; None or empty: the plugin's `examples()`.
    """
    registry = discover()
    plugin = registry.plugin(name)
    chosen = list(examples) if examples else list(plugin.examples())
    return asyncio.run(_run_checks(registry, plugin, settings or {}, chosen))


# --- requests to workers ---------------------------------------------------------------------------------------------


@dataclass
class _Trial:
    """The data that the checks read: test requests, the findings of the probe, and the verdicts of the workers."""

    plugin: type[RewardPlugin]
    examples: list[Example]
    cases: list[Case]
    trials: list[TruthTrial]  # truths that `validate_truth` must accept or reject
    probe: dict[str, Any] = field(default_factory=dict)  # findings of `import_probe.py`
    spec: PoolSpec | None = None  # configuration of the workers; None: this machine cannot run a worker
    failed: str | None = None  # reason if no worker starts
    unfit: str | None = None  # reason if this machine cannot run a worker
    first: dict[str, Verdict] = field(default_factory=dict)  # verdicts of the first worker by case id
    second: dict[str, Verdict] = field(default_factory=dict)  # verdicts of the second worker by case id
    mixed: list[tuple[str, Verdict]] = field(default_factory=list)  # (case id, verdict) from both workers at once
    seconds: dict[str, float] = field(default_factory=dict)  # seconds of the first worker's verdict by case id

    def kind(self, *kinds: str) -> list[Case]:
        return [case for case in self.cases if case.kind in kinds]


async def _run_checks(
    registry: Registry, plugin: type[RewardPlugin], settings: dict[str, Any], examples: list[Example]
) -> Report:
    cases = [*make_cases(examples, plugin.tasks[0]), *canary_cases(plugin)]
    trial = _Trial(plugin, examples, cases, truth_trials(examples))
    try:
        [trial.spec] = pool_specs(registry, plugin.tasks, 1, {plugin.name: settings})
    except UnfitMachine as error:
        trial.unfit = str(error)
    trial.probe = _probe(trial, settings)
    if trial.spec is not None:
        await _take_verdicts(trial, trial.spec)
    return Report(plugin.name, [_outcome(trial, check) for check in CHECKS])


async def _take_verdicts(trial: _Trial, spec: PoolSpec) -> None:
    pools = [PluginPool(dataclasses.replace(spec, hash_seed=seed)) for seed in (0, 1)]
    try:
        await pools[0].start()
        await _one_by_one(trial, pools[0])
        steady = [case for case in trial.cases if _outcome_of(trial.first.get(case.id)) in ("judged", "invalid")]
        if not steady:
            return
        await pools[1].start()
        for case in reversed(steady):
            trial.second[case.id] = await pools[1].submit(case.request)
        await _both_at_once(trial, pools, steady)
    except RewardFailure as error:
        trial.failed = str(error)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools))


async def _one_by_one(trial: _Trial, pool: PluginPool) -> None:
    late: dict[str, int] = {}
    for case in trial.cases:
        if late.get(case.kind, 0) >= MAX_TIMEOUTS:
            continue
        started = time.monotonic()
        verdict = await pool.submit(case.request)
        trial.first[case.id], trial.seconds[case.id] = verdict, time.monotonic() - started
        if _outcome_of(verdict) == "killed":
            late[case.kind] = late.get(case.kind, 0) + 1


async def _both_at_once(trial: _Trial, pools: list[PluginPool], cases: list[Case]) -> None:
    """Send many requests to both workers at once, in opposite orders, and record the verdicts in `trial.mixed`.

    The requests are of the kinds good, bad, unicode and thinking.  Nothing is sent if the two workers already gave
    different verdicts on one of `cases` when they judged the requests one at a time.
    """
    some = [case for case in cases if case.kind in ("good", "bad", "unicode", "thinking")]
    if not some or any(trial.first[case.id] != trial.second[case.id] for case in cases):
        return
    some = (some * 20)[: max(40, len(some))]
    pairs = [
        (pool, case) for two in zip(some, reversed(some), strict=True) for pool, case in zip(pools, two, strict=True)
    ]
    verdicts = await asyncio.gather(*(pool.submit(case.request) for pool, case in pairs))
    trial.mixed = [(case.id, verdict) for (_, case), verdict in zip(pairs, verdicts, strict=True)]


def _outcome_of(verdict: Verdict | None) -> str:
    """Return the outcome of a request, given its verdict.

    The outcome is "judged", "invalid", "timeout", "raised" (an exception), "died" (the worker), "form" (a malformed
    result), "killed" (over the time budget, or no verdict for several times as long) or "untried" (not sent).
    """
    if verdict is None:
        return "untried"
    if verdict["failure"] and any(
        text in verdict["detail"] for text in (": over the time budget of", ": no verdict after")
    ):
        return "killed"
    if verdict["failure"] != "infrastructure":
        return verdict["failure"] or "judged"
    if "' raised " in verdict["detail"]:
        return "raised"
    return "died" if "worker died" in verdict["detail"] else "form"


def _probe(trial: _Trial, settings: dict[str, Any]) -> dict[str, Any]:
    """Run `import_probe.py` in a separate process and return its findings."""
    sandboxed = trial.plugin.needs_sandbox
    requests = [] if sandboxed else [case.request.to_json() for case in trial.kind("good", "bad")]
    probe_task = {"settings": settings, "prepare": not sandboxed, "requests": requests}
    probe_task["truths"] = [truth.truth for truth in trial.trials]
    command = [sys.executable, "-B", "-m", "nemo_prorl.rewards.import_probe", str(os.getpid()), trial.plugin.name]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=worker_environment(), start_new_session=True
    )
    try:
        out, _ = process.communicate(json.dumps(probe_task), timeout=PROBE_S)
        findings: dict[str, Any] = json.loads(out)
    except subprocess.TimeoutExpired:
        findings = {"failed": f"import, prepare and the examples took over {PROBE_S:g} s"}
    except ValueError:
        findings = {"failed": f"the process ended with status {process.wait()}"}
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return {"import": None, "network": [], "truths": [], "failed": None, **findings}


# --- checks of the observations --------------------------------------------------------------------------------------


class _Skip(Exception):
    """Raised if a check cannot be made; the message is the reason."""


class _CheckFailed(Exception):
    """Raised if a check fails; the message is the finding."""


def _outcome(trial: _Trial, check: str) -> CheckOutcome:
    try:
        if check not in ("import", "start", "canaries") and not trial.examples:
            raise _Skip(NO_EXAMPLES)
        if check not in ("import", "truth"):
            if trial.unfit:
                raise _Skip(trial.unfit)
            if trial.failed and check != "start":
                raise _Skip("no worker starts")
        return CheckOutcome(check, "passed", _CHECKERS.get(check, _hostile)(trial, check))
    except _Skip as skip:
        return CheckOutcome(check, "skipped", str(skip))
    except _CheckFailed as fault:
        return CheckOutcome(check, "failed", one_line(str(fault)), CHECKS[check])


def _import(trial: _Trial, check: str) -> str:
    if trial.probe["import"] is None:
        raise _Skip(f"the plugin could not be tried: {trial.probe['failed']}")
    if trial.probe["import"]:
        raise _CheckFailed("importing its module " + "; ".join(trial.probe["import"]))
    return "writes nothing, prints nothing, starts nothing, loads nothing heavy"


def _start(trial: _Trial, check: str) -> str:
    if trial.failed:
        raise _CheckFailed(trial.failed)
    if trial.unfit:
        raise _Skip(trial.unfit)
    return "a worker starts and prepares the plugin"


def _shown(trial: _Trial, case: Case) -> str:
    verdict = trial.first[case.id]
    return f"{case.label}: score {verdict['score']}, correct {verdict['correct']}, {verdict['detail']!r}"


def _examples(trial: _Trial, check: str) -> str:
    _require_verdicts(trial, "good", "bad")
    return f"{len(trial.examples)} good responses score 1, and {len(trial.examples)} bad ones less"


def _canaries(trial: _Trial, check: str) -> str:
    right, wrong = trial.kind("right canary"), trial.kind("wrong canary")
    if not right and not wrong:
        if not trial.plugin.canaries():
            raise _Skip("the plugin has no canaries: define canaries() or examples()")
        return "the examples are the canaries"
    _require_verdicts(trial, "right canary", "wrong canary")
    return f"{len(right)} right canaries score 1, and {len(wrong)} wrong ones less"


def _require_verdicts(trial: _Trial, full: str, less: str) -> None:
    """Raise _CheckFailed unless the responses of the kind `full` score 1, and those of the kind `less` less."""
    for case in trial.kind(full, less):
        verdict, outcome = trial.first[case.id], _outcome_of(trial.first[case.id])
        if outcome in ("form", "killed"):
            continue  # the checks `form` and `time` report it
        if outcome in ("raised", "died"):
            raise _CheckFailed(_shown(trial, case))
        scores_1 = (verdict["score"] or 0.0) >= FULL_SCORE
        if case.kind == full and (not scores_1 or verdict["correct"] is False):
            raise _CheckFailed(f"{_shown(trial, case)}; expected score 1, and field 'correct' true or null")
        if case.kind == less and (scores_1 or verdict["correct"]):
            raise _CheckFailed(f"{_shown(trial, case)}; expected a score below 1, and field 'correct' false or null")


def _form(trial: _Trial, check: str) -> str:
    for case in trial.cases:
        if _outcome_of(trial.first.get(case.id)) == "form":
            raise _CheckFailed(_shown(trial, case))
    return f"{len(trial.first)} results are well formed"


def _truth(trial: _Trial, check: str) -> str:
    if trial.probe["failed"]:
        raise _Skip(f"the plugin could not be tried: {trial.probe['failed']}")
    accepted: dict[tuple[str, str], bool] = {}
    for truth, seen in zip(trial.trials, trial.probe["truths"], strict=True):
        where = f"{truth.example}: truth.{truth.key} {truth.wrong}" if truth.key else f"{truth.example}: its truth"
        if seen["raised"] not in ("", "ValueError"):
            raise _CheckFailed(f"{where}: validate_truth raises {seen['raised']}: {seen['text']}")
        if seen["raised"] and not truth.key:
            raise _CheckFailed(f"{where} is refused: {seen['text']}")
        if seen["raised"] and truth.key not in seen["text"]:
            raise _CheckFailed(f"{where}: refused without naming the field: {seen['text']}")
        if truth.key and truth.wrong != "missing":
            accepted[truth.example, truth.key] = accepted.get((truth.example, truth.key), True) and not seen["raised"]
    if free := [f"{example}: truth.{key}" for (example, key), every in accepted.items() if every]:
        raise _CheckFailed(
            f"{free[0]} is not checked: null, true, -1.5, a string, a list and an object are all accepted"
        )
    if not accepted:
        raise _Skip("the examples' truths have no fields")
    return f"{len(accepted)} fields, each named where it is wrong"


def _thinking(trial: _Trial, check: str) -> str:
    for case in trial.kind("thinking"):
        verdict = trial.first.get(case.id)
        if verdict is None or verdict["score"] is None:
            if _outcome_of(verdict) in ("raised", "died"):
                raise _CheckFailed(_shown(trial, case))
            continue
        wanted = trial.first[case.equals]["score"] if case.equals else 0.0
        if wanted is not None and verdict["score"] != wanted:
            raise _CheckFailed(f"{_shown(trial, case)}; expected score {wanted}")
    return "what follows the last </think> is judged; an open <think> is no answer"


def _hostile(trial: _Trial, check: str) -> str:
    """Check that no response causes an exception or kills a worker; return the finding as text.

    `check`: the kind of responses, which is "unicode", "empty", "long" or "adversarial".
    """
    cases = trial.kind(check)
    bad = [case for case in cases if _outcome_of(trial.first.get(case.id)) in ("raised", "died")]
    if bad:
        raise _CheckFailed(
            f"{len(bad)} of {len(cases)} responses raise an exception or end the worker, such as"
            f" {_shown(trial, bad[0])}"
        )
    invalid = sum(_outcome_of(trial.first.get(case.id)) == "invalid" for case in cases)
    return f"{len(cases)} responses: all have a verdict, {invalid} of them invalid"


def _time(trial: _Trial, check: str) -> str:
    assert trial.spec is not None
    killed = [case for case in trial.cases if _outcome_of(trial.first.get(case.id)) == "killed"]
    if killed:
        raise _CheckFailed(
            f"{len(killed)} responses exceed time_budget_s={trial.spec.budget_s:g}, such as {_shown(trial, killed[0])}"
        )
    slowest = max(trial.cases, key=lambda case: trial.seconds[case.id])
    limit = f"{trial.spec.budget_s:g} s of CPU, {WALL_FACTOR * trial.spec.budget_s:g} s in all"
    return f"slowest: {trial.seconds[slowest.id]:.2f} s ({slowest.label}); allowed: {limit}"


def _determinism(trial: _Trial, check: str) -> str:
    for case in trial.cases:
        first, second = trial.first.get(case.id), trial.second.get(case.id)
        if first is not None and second is not None and first != second:
            raise _CheckFailed(f"{case.label}: {_difference(first, second)}")
    if not trial.second:
        raise _Skip("the plugin gave no verdict to compare: see the failed checks above")
    return f"{len(trial.second)} requests have equal verdicts in another worker, order and hash seed"


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    key = next(key for key in first if first[key] != second.get(key))
    return f"{key} is {first[key]!r}, then {second.get(key)!r}"


def _concurrency(trial: _Trial, check: str) -> str:
    if not trial.mixed:
        raise _Skip("requests judged one at a time get different verdicts, or no verdict: see the failed checks above")
    for name, verdict in trial.mixed:
        if verdict != trial.first[name]:
            label = next(case.label for case in trial.cases if case.id == name)
            raise _CheckFailed(f"{label}, with concurrent requests: {_difference(trial.first[name], verdict)}")
    return f"{len(trial.mixed)} requests to two workers at once: no verdict changed"


def _network(trial: _Trial, check: str) -> str:
    if trial.plugin.needs_sandbox:
        raise _Skip("the plugin needs the sandbox, which has no network")
    if trial.probe["network"]:
        raise _CheckFailed("prepare() or score() uses the network: " + "; ".join(trial.probe["network"]))
    if trial.probe["failed"]:
        raise _Skip(f"the plugin could not be tried: {trial.probe['failed']}")
    return "no address looked up, no connection made"


_CHECKERS: dict[str, Callable[[_Trial, str], str]] = {
    "import": _import,
    "start": _start,
    "examples": _examples,
    "canaries": _canaries,
    "form": _form,
    "truth": _truth,
    "thinking": _thinking,
    "time": _time,
    "determinism": _determinism,
    "concurrency": _concurrency,
    "network": _network,
}
