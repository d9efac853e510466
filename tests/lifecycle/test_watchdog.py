"""A step that takes too long is reported once; the alarm says which rank, engine or reward server holds it up."""

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_prorl.config import Config
from nemo_prorl.launcher.processes import free_port
from nemo_prorl.lifecycle.watchdog import Watchdog, Whereabouts, culprits
from nemo_prorl.metrics import Metrics
from nemo_prorl.trainer import RunProgress, Trainer

Alarms = list[tuple[int, str]]


def watchdog(folder: Path, alarms: Alarms, rank: int = 0, ranks: int = 1, steps: int = 3) -> Watchdog:
    """A watchdog that reports after 0.2 s, once it has seen three quick steps."""
    (folder / "endpoints").mkdir(exist_ok=True)
    made = Watchdog(rank, ranks, folder, lambda step, what: alarms.append((step, what)), least_s=0.2)
    for step in range(1, 1 + steps):
        with made.watch(step):
            pass
    return made


def hang(dog: Watchdog, phase: str, seconds: float = 0.6) -> None:
    with dog.watch(9), Metrics(9, "none").phase(phase):
        time.sleep(seconds)


def test_a_hang_is_reported_once_with_phase_and_function(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms), "updates")
    [(step, what)] = alarms
    assert step == 9
    assert what.startswith(
        "no progress for 0 s, 5 times the longest of the last steps: rank 0: in phase updates, hang (test_watchdog.py:"
    )
    assert what.endswith(f"the stacks of all processes are in {tmp_path}/logs/stacks-*.txt")


def test_in_a_rollout_it_says_what_is_open(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms)
    dog.set_waiting(lambda: "engine-3 has 12 open responses, no token for 400 s")
    hang(dog, "rollout")
    assert ": engine-3 has 12 open responses, no token for 400 s; rank 0: in phase rollout, " in alarms[0][1]


def test_a_checkpoint_is_compared_with_checkpoints(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms)
    for step in (3, 6, 9, 12):
        with dog.watch(step, "checkpoint"):
            time.sleep(0.3 if step < 12 else 2.2)  # 0.3 s would be too long for a step
    [(step, what)] = alarms
    assert step == 12
    assert what.startswith("no progress for 2 s, 5 times the longest of the last checkpoints: rank 0: in phase checkp")


def test_another_rank_only_reports_to_rank_0(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms, rank=1, ranks=2), "updates")
    assert alarms == []
    hang(watchdog(tmp_path, alarms, rank=0, ranks=2), "logprobs")
    [(_, what)] = alarms
    assert "; rank 1: in phase updates, hang (test_watchdog.py:" in what


def test_a_report_of_another_step_does_not_count(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms, rank=1, ranks=2)
    with dog.watch(8), Metrics(8, "none").phase("updates"):
        time.sleep(0.6)
    hang(watchdog(tmp_path, alarms, rank=0, ranks=2), "updates", 7.0)  # rank 0 waits 5 s for the report
    assert "; rank 1: no report, so hanging in native code or not in this step;" in alarms[0][1]


def test_the_ranks_that_do_not_wait_are_named_first() -> None:
    waiting, working = Whereabouts(9, "updates", "reduce", True), Whereabouts(9, "logprobs", "nap (a.py:3)", False)
    where = dict.fromkeys(range(4), Whereabouts(9, "advantages", "add (b.py:4)", False))
    where |= {5: working, **dict.fromkeys(range(7, 12), waiting)}
    assert culprits(where, 12) == [
        "rank 5: in phase logprobs, nap (a.py:3)",
        "ranks 0, 1, 2, 3: in phase advantages, add (b.py:4)",
        "ranks 4, 6: no report, so hanging in native code or not in this step",
        "ranks 7, 8, 9, 10 and 1 others: waiting for other ranks in phase updates",
    ]


RANKS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from nemo_prorl.lifecycle.watchdog import Watchdog
from nemo_prorl.metrics import Metrics

def nap():
    time.sleep(20)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dog = Watchdog(rank, 3, Path(sys.argv[1]), lambda step, what: (print(what, flush=True), os._exit(0)), least_s=1.0)
for step in range(1, 5):
    with dog.watch(step), Metrics(step, "none").phase("updates"):
        if (step, rank) == (4, 1):
            nap()
        dist.all_reduce(torch.ones(3))
"""


@pytest.mark.starts
def test_of_ranks_in_the_same_phase_the_one_that_keeps_the_others_waiting_is_named(tmp_path: Path) -> None:
    """Three real ranks: rank 1 does not come to a collective of torch."""
    (tmp_path / "endpoints").mkdir()
    env = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", RANKS, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (
        ": rank 1: in phase updates, nap (<string>:10); ranks 0, 2: waiting for other ranks in phase updates;" in said
    )


class Steps(Trainer):
    """The trainer's loop around a step that only takes time."""

    def train_step(self, step: int) -> Metrics:
        self.progress.step = step
        time.sleep(0.6 if step == 4 else 0.0)
        return Metrics(step, "none")

    def finish_step(self, metrics: Metrics) -> None:
        time.sleep(0.6)  # a validation or a checkpoint, which may take long

    def stop_if_requested(self, step: int) -> None: ...
    def stop_without_signal(self, metrics: Metrics) -> None: ...


def test_the_trainer_watches_a_step_without_what_follows(tmp_path: Path) -> None:
    alarms: Alarms = []
    no: Any = None
    cfg, progress = Config(), RunProgress(step=1)
    cfg.trainer.grpo.max_steps = 5
    rollouts: Any = SimpleNamespace(await_next=lambda metrics: None)
    traces: Any = SimpleNamespace(step=lambda step: nullcontext())
    dog = watchdog(tmp_path, alarms)
    trials: Any = SimpleNamespace(change_arm=lambda step: None)
    Steps(cfg, no, progress, rollouts, no, no, trials, no, no, no, no, no, no, traces, dog, no, no).train()
    assert [step for step, _ in alarms] == [4]


class Finished(Trainer):
    """The trainer's work after a step, with a validation that does nothing."""

    def validate(self, metrics: Metrics) -> None: ...
    def stop_if_requested(self, step: int) -> None: ...


@pytest.mark.parametrize(("reset", "kinds"), [("every", ["validation", "reset"]), (None, ["validation", "checkpoint"])])
def test_the_trainer_watches_what_follows_a_step(reset: str | None, kinds: list[str]) -> None:
    seen: list[str] = []

    def watch(step: int, what: str) -> AbstractContextManager[None]:
        seen.append(what)
        return nullcontext()

    no: Any = None
    due: Any = SimpleNamespace(due=lambda step: True, save=lambda step, wait: None)
    resets: Any = SimpleNamespace(reason=lambda metrics: reset, perform=lambda *given: None, stop=None)
    control: Any = SimpleNamespace(pending=lambda step: [], serve=lambda *given: None)
    records: Any = SimpleNamespace(log=lambda metrics: None)
    dog: Any = SimpleNamespace(watch=watch)
    progress = RunProgress(step=1)
    trials: Any = SimpleNamespace(on=False, begin=lambda *given: False, end_by_request=lambda step: None)
    parts = (no, due, resets, trials, due, control, records, no, no, no, no, dog, no, no)
    trainer = Finished(Config(), no, progress, *parts)
    trainer.finish_step(Metrics(1, "none"))
    assert seen == kinds


def test_a_step_like_those_before_is_not_reported(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms)
    hang(dog, "updates", 0.1)
    hang(dog, "updates", 0.3)  # more than 0.2 s, but less than 5 times the longest
    assert alarms == []
    assert list((tmp_path / "endpoints").iterdir()) == []


def test_without_a_past_there_is_no_limit(tmp_path: Path) -> None:
    alarms: Alarms = []
    hang(watchdog(tmp_path, alarms, steps=2), "updates")
    assert alarms == []


def test_a_step_that_fails_is_no_past(tmp_path: Path) -> None:
    alarms: Alarms = []
    dog = watchdog(tmp_path, alarms, steps=2)
    with pytest.raises(ZeroDivisionError), dog.watch(3):
        raise ZeroDivisionError
    hang(dog, "updates")
    assert alarms == []
