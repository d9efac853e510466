"""Computes the expected results that a source's tests lack, by running the source's own solution in the sandbox."""

import json
from dataclasses import replace

from prorl_sandbox import Program, Sandbox

from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.manifest import ExpectedCheck
from nemo_prorl.rewards.sandbox import open_sandbox

MAX_RESULT_BYTES = 100_000  # longest result as JSON that is kept
_TIME_S = 60.0  # seconds for all calls of one problem
_OUTPUT_MB = 128


class Oracles:
    """Runs the `oracle` of drafts in a sandbox.  The first draft starts the sandbox, and `close` ends it."""

    def __init__(self, unsafe_no_sandbox: bool) -> None:
        self._unsafe = unsafe_no_sandbox
        self._sandbox: Sandbox | None = None
        self.counts: ExpectedCheck = {"tests": 0, "left_out": 0}

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    def with_expected(self, draft: Draft) -> Draft | Drop:
        """Return the draft with the oracle's result as the expected value of each test.

        Tests on which the oracle fails, or whose result is not JSON or too long, are removed; if
        no test is left, return a Drop.  Raises UnfitMachine if no sandbox level works here.
        """
        tests, name = draft.truth["tests"], draft.truth["fn_name"]
        inputs = tuple(json.dumps(test["args"]) for test in tests)
        program = Program(draft.oracle, "call", inputs, name, time_limit_s=_TIME_S, output_mb=_OUTPUT_MB)
        run = self._started_sandbox().run(program, lambda index, output: True)
        if run.refused or run.over_time:
            reason = run.refused or f"over {_TIME_S:g} s"
            return Drop("broken tests", f"the source's own solution does not run: {reason}")
        kept = [
            {**test, "expected": json.loads(output)}
            for test, output in zip(tests, run.outputs, strict=True)
            if output is not None and len(output) <= MAX_RESULT_BYTES
        ]
        self.counts["tests"] += len(tests)
        self.counts["left_out"] += len(tests) - len(kept)
        if not kept:
            return Drop("no tests", f"the source's own solution fails on all tests: {run.details[0]}")
        return replace(draft, truth={**draft.truth, "tests": kept})

    def _started_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._unsafe)
        return self._sandbox
