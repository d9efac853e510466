"""How a program's tests are shared out over children, with which limits, and what their ends are worth.

The children are written down: a sandbox that only hands them out says what it was asked for.
"""

import json
import os
import signal
from typing import Any

import pytest
from prorl_sandbox import Program, ProgramRun, Sandbox, SandboxFailure
from prorl_sandbox.client import _Child

Asked = tuple[int, int, float, float, bool]  # first test, number of tests, seconds, seconds of waiting, go_on
GOOD, WRONG, ERROR = (True, b"right", True), (True, b"wrong", True), (False, b"", False)
LAST = (True, b"right", False)  # a right test after which no other may run in this child
GOES_ON = (False, b"", True)  # an exception of a program whose tests cannot influence each other
MIB = 1 << 20


def child(
    *ends: tuple[bool, bytes | None, bool] | None, first: int = 0, used_s: float = 0.25, status: int = 0, **more: Any
) -> _Child:
    """Return a child whose tests from `first` on ended so: (ok, output, more); None: without a report."""
    made = _Child(status, more.pop("killed", None), used_s, more.pop("queued_s", 0.0), more.pop("compiled", True))
    made.started = first + len(ends) - 1
    for index, end in enumerate(ends, first):
        if end is not None:
            made.ends[index] = {"end": index, "ok": end[0], "more": end[2], "detail": "" if end[0] else f"E\n{index}"}
        if end is None or end[1] is not None:
            made.outputs[index] = b"right" if end is None else end[1] or b""
    for name, value in more.items():
        setattr(made, name, value)
    return made


def asked_first(independent: bool = False) -> _Child:
    """Return the child that tells whether tests can influence each other."""
    return child(used_s=0.125, independent=independent)


class Children(Sandbox):
    """A sandbox whose children are given."""

    def __init__(self, *children: _Child) -> None:
        super().__init__("none")
        self.children, self.asked, self.jobs, self.starts = list(children), list[Asked](), list[Any](), 0

    def start(self) -> None:
        self.starts += 1

    def run_child(self, program: Program, first: int, count: int, job: int, code: int, *rest: Any) -> _Child:
        seconds, queued_s, go_on = rest
        self.asked.append((first, count, seconds, queued_s, go_on))
        self.jobs.append(json.loads(os.pread(job, 1 << 16, 0)))
        os.fstat(code)
        return self.children.pop(0)


def run(
    box: Children, tests: int, style: str = "stdin", output_mb: int = 1, time_limit_s: float = 4.0
) -> tuple[ProgramRun, list[Asked]]:
    program = Program("source", style, ("[]",) * tests, "f", "setup", time_limit_s, output_mb=output_mb)
    done = box.run(program, lambda _, output: output.startswith(b"right"))
    assert not box.children
    return done, box.asked


def test_right_tests_cost_one_child_with_all_the_time() -> None:
    box, files = Children(child(GOOD, GOOD, GOOD)), os.listdir("/proc/self/fd")
    done, asked = run(box, 3)
    assert os.listdir("/proc/self/fd") == files
    assert done == ProgramRun((b"right",) * 3, ("",) * 3)
    assert asked == [(0, 3, 4.0, 30.0, False)]
    assert box.jobs == [{"source": "source", "style": "stdin", "function": "f", "setup": "setup", "inputs": []}]
    box = Children(child(GOOD, GOOD))
    run(box, 2, "call")
    assert box.jobs[0]["inputs"] == ["[]", "[]"]


@pytest.mark.parametrize(("output_mb", "most"), [(1, 100), (5, 100), (6, 85), (512, 1), (1024, 1)])
def test_a_child_takes_as_many_tests_as_its_files_and_outputs_permit(output_mb: int, most: int) -> None:
    tests = most + 1
    box = Children(child(*[GOOD] * most), asked_first(), child(GOOD, first=most))
    done, asked = run(box, tests, output_mb=output_mb)
    assert done.outputs == (b"right",) * tests
    assert asked == [(0, most, 4.0, 30.0, False), (0, 0, 1.0, 30.0, False), (most, 1, 3.75, 30.0, False)]


def test_tests_that_failed_after_others_run_alone_in_what_time_is_left() -> None:
    box = Children(
        child(GOOD, WRONG, WRONG, WRONG, WRONG),
        asked_first(),
        child(GOOD, first=1, used_s=3.0),
        child(WRONG, first=2, used_s=2.25),
        child(GOOD, first=3, used_s=0.5),
    )
    done, asked = run(box, 5)
    assert done.outputs == (b"right", b"right", b"wrong", b"right", b"wrong")  # no time is left for the last
    assert asked[1] == (0, 0, 1.0, 30.0, False)
    left = 2.0 + 4.0 - 0.25
    assert asked[2:] == [(index, 1, left - used, 30.0, False) for index, used in ((1, 0.0), (2, 3.0), (3, 5.25))]


@pytest.mark.parametrize(("time_limit_s", "extra_s"), [(1.0, 0.5), (4.0, 2.0), (16.0, 2.0)])
def test_repeats_have_half_of_the_time_more_but_at_most_two_seconds(time_limit_s: float, extra_s: float) -> None:
    box = Children(child(GOOD, WRONG), asked_first(), child(GOOD, first=1))
    _, asked = run(box, 2, time_limit_s=time_limit_s)
    assert asked[-1] == (1, 1, time_limit_s - 0.25 + extra_s, 30.0, False)


def test_a_first_test_that_fails_is_not_repeated() -> None:
    done, asked = run(Children(child(WRONG, GOOD)), 2)
    assert (done.outputs, len(asked)) == ((b"wrong", b"right"), 1)
    done, _ = run(Children(child(ERROR)), 1)
    assert done == ProgramRun((None,), ("E 0",))


def test_a_test_that_ends_badly_after_others_begins_the_next_child() -> None:
    """It gets back half of the time that the child used, as long as there is time to give."""
    for end in (None, ERROR, GOES_ON):
        box = Children(child(GOOD, end, used_s=3.0), asked_first(), child(GOOD, GOOD, first=1))
        done, asked = run(box, 3)
        assert done == ProgramRun((b"right",) * 3, ("",) * 3)
        assert asked[2] == (1, 2, 4.0 - 3.0 + 1.5, 30.0, False)
    slow = [child(GOOD, None, first=index, used_s=used_s) for index, used_s in enumerate((2.0, 2.5, 1.25))]
    _, asked = run(Children(slow[0], asked_first(), *slow[1:], child(GOOD, first=3)), 4)
    assert [seconds for _, count, seconds, _, _ in asked if count] == [4.0, 3.0, 1.5, 0.25]


def test_a_test_after_which_no_other_may_run_ends_the_child() -> None:
    for last in (LAST, (True, b"wrong", False)):
        box = Children(child(last), asked_first(), child(GOOD, LAST, first=1), child(GOOD, first=3))
        done, asked = run(box, 4)
        assert done.outputs == (last[1], *[b"right"] * 3)
        assert [(first, count) for first, count, *_ in asked] == [(0, 4), (0, 0), (1, 3), (3, 1)]


def test_independent_tests_go_on_and_are_not_repeated() -> None:
    box = Children(child(GOOD, ERROR), asked_first(independent=True), child(GOES_ON, GOES_ON, WRONG, LAST, first=1))
    done, asked = run(box, 5)
    assert done == ProgramRun((b"right", None, None, b"wrong", b"right"), ("", "E 1", "E 2", "", ""))
    assert asked[1:] == [(0, 0, 1.0, 30.0, False), (1, 4, 4.0 - 0.25 + 0.125, 30.0, True)]


def test_independent_functions_are_repeated_together_and_who_is_left_alone() -> None:
    box = Children(
        child(GOOD, WRONG, GOOD, WRONG, WRONG),
        asked_first(independent=True),
        child(GOOD, GOOD, WRONG, first=1, used_s=1.0),
        child(GOOD, first=4, used_s=0.5),
    )
    done, asked = run(box, 5, "call")
    left = 2.0 + 4.0 - 0.25
    assert asked[2:] == [(1, 4, left, 30.0, True), (4, 1, left - 1.0, 30.0, False)]
    assert done.outputs == (b"right", b"right", b"right", b"wrong", b"right")
    for failed, go_on in ((1, False), (2, True)):
        ends = child(GOOD, *[WRONG] * failed), asked_first(independent=True), child(*[GOOD] * failed, first=1)
        _, asked = run(Children(*ends), failed + 1, "call")
        assert asked[2:] == [(1, failed, left, 30.0, go_on)]


def test_who_lies_about_independence_is_not_believed() -> None:
    liar = child(used_s=0.125, independent=True, status=1 << 8)
    done, asked = run(Children(child(GOOD, WRONG), liar, child(GOOD, first=1)), 2)
    assert (done.outputs, len(asked)) == ((b"right", b"right"), 3)


@pytest.mark.parametrize("how", [{"killed": "time"}, {"used_s": 4.0}])
def test_over_the_time_nothing_more_is_tried(how: dict[str, Any]) -> None:
    done, asked = run(Children(child(GOOD, None, **how)), 3)
    assert done == ProgramRun((None,) * 3, ("not run",) * 3, over_time=True)
    assert len(asked) == 1


def test_an_idle_child_and_one_that_others_killed_are_tried_again_a_few_times() -> None:
    idle: dict[str, Any] = {"killed": "idle", "status": signal.SIGKILL}
    done, asked = run(Children(child(None, **idle), child(GOOD)), 1)
    assert (done.outputs, len(asked)) == ((b"right",), 2)
    done, asked = run(Children(child(None, **idle), child(None, **idle)), 1)
    assert (done.over_time, len(asked)) == (True, 2)
    killed = [child(None, status=signal.SIGKILL) for _ in range(3)]
    known = child((True, b"42\n", True))
    done, asked = run(Children(*killed, known), 1)
    assert done == ProgramRun((None,), ("ended by SIGKILL",))
    assert asked == [(0, 1, 4.0, 30.0, False)] * 3 + [(0, 1, 5.0, 30.0, False)]
    crash = child(None, status=signal.SIGSEGV)
    done, asked = run(Children(crash), 1)
    assert (done.details, len(asked)) == (("ended by SIGSEGV",), 1)


@pytest.mark.parametrize("compiled", [None, True])
def test_a_kill_by_others_is_nobody_s_fault_where_a_known_program_fails_too(compiled: bool | None) -> None:
    killed = [child(None, status=signal.SIGKILL, compiled=compiled) for _ in range(3)]
    box = Children(*killed, child(WRONG), *killed, child(WRONG), child(WRONG))
    with pytest.raises(SandboxFailure, match="fails to run a trivial test program"):
        run(box, 1)
    assert (box.starts, box.children) == (2, [])


def test_waiting_for_a_cpu_is_counted_over_all_children() -> None:
    box = Children(child(GOOD, WRONG, queued_s=20.0), asked_first(), child(GOOD, first=1, queued_s=15.0))
    _, asked = run(box, 2)
    assert [queued for *_, queued, _ in asked] == [30.0, 10.0, 10.0]
    box = Children(child(GOOD, WRONG, WRONG, queued_s=40.0), asked_first(), *(child(GOOD, first=i) for i in (1, 2)))
    _, asked = run(box, 3)
    assert [queued for *_, queued, _ in asked] == [30.0, 0.0, 0.0, 0.0]
    with pytest.raises(SandboxFailure, match="waited over 30 s for a CPU"):
        run(Children(child(None, killed="starved")), 1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"compiled": False, "detail": "SyntaxError: x"}, "SyntaxError: x"),
        ({"compiled": None, "killed": "time"}, "compiling took too long"),
        ({"compiled": None, "status": signal.SIGSEGV}, "the compiler broke on it"),
    ],
)
def test_a_program_that_does_not_compile_is_refused_with_the_reason(more: dict[str, Any], why: str) -> None:
    done, _ = run(Children(child(None, **more)), 1)
    assert done == ProgramRun((None,), ("not run",), refused=why)


def test_a_machine_that_stands_still_while_it_compiles_is_not_the_program_s_fault() -> None:
    idle: dict[str, Any] = {"compiled": None, "killed": "idle", "status": signal.SIGKILL}
    done, asked = run(Children(child(None, **idle), child(GOOD)), 1)
    assert (done.outputs, len(asked)) == ((b"right",), 2)
    with pytest.raises(SandboxFailure, match="waited too long to be compiled"):
        run(Children(child(None, **idle), child(None, **idle)), 1)


@pytest.mark.parametrize(("style", "ended"), [("stdin", b""), ("assert", b""), ("call", None)])
def test_a_test_without_output_printed_nothing_or_returned_nothing(style: str, ended: bytes | None) -> None:
    done, _ = run(Children(child((True, None, True))), 1, style)
    assert done.outputs == (ended,)


@pytest.mark.parametrize(
    ("style", "how", "output"),
    [
        ("stdin", {}, b"right"),  # as `os._exit(0)` after printing
        ("stdin", {"status": 1 << 8}, None),
        ("stdin", {"killed": "disk"}, None),
        ("stdin", {"started": -1}, None),
        ("call", {}, None),
    ],
)
def test_a_process_that_ends_in_a_test_may_have_ended_it(style: str, how: dict[str, Any], output: bytes | None) -> None:
    done, _ = run(Children(child(None, **how)), 1, style)
    assert done.outputs == (output,)
    assert bool(done.details[0]) == (output is None)


def test_a_wrong_output_of_over_a_mebibyte_is_not_kept() -> None:
    for size, kept in ((MIB, True), (MIB + 1, False)):
        done, _ = run(Children(child((True, b"wrong".ljust(size), True))), 1)
        assert done.outputs == ((b"wrong".ljust(size),) if kept else (None,))
        done, _ = run(Children(child((True, b"right".ljust(size), True))), 1)
        assert done.outputs == (b"right".ljust(size),)
