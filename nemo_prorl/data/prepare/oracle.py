"""Expected results of tests that have arguments only: those of the source's own solution, run in the sandbox."""

import json
from dataclasses import replace

from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.manifest import ExpectedCheck
from nemo_prorl.rewards.interface import Program
from nemo_prorl.rewards.sandbox.client import ProcessSandbox

MOST_BYTES = 100_000  # of a result as JSON
_TIME_S = 60.0  # for all calls of one problem
_OUTPUT_MB = 128


class Oracles:
    """Fills in what drafts with an `oracle` lack; opens a sandbox with the first of them, `close` ends it."""

    def __init__(self, unsafe_no_sandbox: bool) -> None:
        self._unsafe = unsafe_no_sandbox
        self._sandbox: ProcessSandbox | None = None
        self.counts: ExpectedCheck = {"tests": 0, "left_out": 0}

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def answered(self, draft: Draft) -> Draft | Drop:
        """With what the oracle gives on each of the truth's tests.

        Left out are tests on which it ends badly, and those whose result is no JSON or longer than MOST_BYTES.
        Raises UnfitMachine where no sandbox holds.
        """
        tests, name = draft.truth["tests"], draft.truth["fn_name"]
        inputs = tuple(json.dumps(test["args"]) for test in tests)
        program = Program(draft.oracle, "call", inputs, name, time_limit_s=_TIME_S, output_mb=_OUTPUT_MB)
        run = self._opened().run(program, lambda index, output: True)
        if run.refused or run.over_time:
            why = run.refused or f"over {_TIME_S:g} s"
            return Drop("broken tests", f"the source's own solution does not run: {why}")
        kept = [
            {**test, "expected": json.loads(output)}
            for test, output in zip(tests, run.outputs, strict=True)
            if output is not None and len(output) <= MOST_BYTES
        ]
        self.counts["tests"] += len(tests)
        self.counts["left_out"] += len(tests) - len(kept)
        if not kept:
            return Drop("no tests", f"the source's own solution ends well on none: {run.details[0]}")
        return replace(draft, truth={**draft.truth, "tests": kept})

    def _opened(self) -> ProcessSandbox:
        from nemo_prorl.rewards.sandbox.levels import open_sandbox

        if self._sandbox is None:
            self._sandbox = open_sandbox(self._unsafe)
        return self._sandbox
