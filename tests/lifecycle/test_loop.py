"""What surrounds the steps of a run: stops, requests, sleeping engines, batches made ahead, checkpoints, stages."""

import json
import logging
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_prorl import rank
from nemo_prorl.batch import Batch
from nemo_prorl.config import DataSource, DeadlinesConfig, ResetsConfig, WarmupConfig
from nemo_prorl.data.blend import LoadedData
from nemo_prorl.errors import DeadlineExceeded, RewardFailure, StoppedCleanly
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle import stages
from nemo_prorl.lifecycle.control import Request, Requests
from nemo_prorl.lifecycle.stages import Origin
from nemo_prorl.lifecycle.step_traces import StepTraces
from nemo_prorl.lifecycle.stopping import FORWARDED_AS
from nemo_prorl.lifecycle.warmup import warm_up
from nemo_prorl.rewards.second import SecondVerifiers
from nemo_prorl.rollout.group_arrays import decode
from nemo_prorl.rollout.overlap import OneStepOff
from nemo_prorl.rollout.rollouts import Rollouts
from nemo_prorl.rollout.weight_store import weights_folder
from nemo_prorl.trainer import Trainer
from tests.lifecycle.faults import Killed
from tests.lifecycle.small_run import LR, Ranks, SmallPolicy, SmallRun, config, parts_of
from tests.lifecycle.test_control import age, answers, left, place
from tests.lifecycle.test_hard_resets import same, saved, trained
from tests.lifecycle.test_wiring import go


def at_step(run: SmallRun, steps: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a preparation after which a function is called at the start of each of these steps."""

    def prepare(trainer: Trainer) -> None:
        step_of = trainer.train_step

        def train_step(step: int) -> Any:
            if step in steps:
                steps[step]()
            return step_of(step)

        monkeypatch.setattr(trainer, "train_step", train_step)

    return prepare


def state_of(run: SmallRun, step: int) -> dict[str, Any]:
    return dict(json.loads((run.folder / "checkpoints" / f"step-{step:06d}" / "state.json").read_text()))


def kept(run: SmallRun) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").iterdir())


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_stopped_process_says_why_and_answers_whoever_still_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, checkpoint_every=99))

    def asked() -> None:
        place(tmp_path, "stop", "r-1", 1.0)
        place(tmp_path, "checkpoint", "r-2", 2.0)

    with pytest.raises(StoppedCleanly, match="control r-1: stopped after step 2"):
        run.process(monkeypatch, at_step(run, {2: asked}, monkeypatch))
    assert [(e["step"], e["reason"].split(":")[0]) for e in run.events("stop")] == [(2, "control r-1")]
    assert [(e["request"], e["status"]) for e in answers(tmp_path)] == [("r-1", "done"), ("r-2", "dropped")]
    assert left(tmp_path) == []
    assert kept(run) == [2]


def test_a_finished_process_answers_whoever_still_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=2))

    def prepare(trainer: Trainer) -> None:
        hash_of = run.policy.weights_sha256

        def late() -> str:
            place(tmp_path, "checkpoint", "r-1")
            return hash_of()

        monkeypatch.setattr(
            trainer.checkpoints, "wait", lambda: monkeypatch.setattr(run.policy, "weights_sha256", late)
        )

    run.process(monkeypatch, prepare)
    assert [(e["request"], e["status"]) for e in answers(tmp_path)] == [("r-1", "dropped")]


def test_a_finished_process_has_waited_for_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=2))
    run.cfg.trainer.trace_steps = [2]
    merge = StepTraces._merge

    def slow(*arguments: Any) -> None:
        time.sleep(0.5)
        merge(*arguments)

    monkeypatch.setattr(StepTraces, "_merge", slow)
    run.process(monkeypatch, lambda trainer: None)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step-2.json"]


def test_a_signal_stops_a_process_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, checkpoint_every=99))
    prepare = at_step(run, {2: lambda: signal.raise_signal(FORWARDED_AS[signal.SIGUSR1])}, monkeypatch)
    with pytest.raises(StoppedCleanly, match="SIGUSR1: stopped after step 2"):
        run.process(monkeypatch, prepare)
    assert kept(run) == [2]
    run.process(monkeypatch, lambda trainer: None)
    assert run.events("finish")[0]["step"] == 6


def test_a_signal_ends_a_process_that_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up, or a wait for engines, may take long; from the first file of the run on, a stop is a clean one."""
    run, begin, seen = SmallRun(config(tmp_path)), rank.begin, list[list[Any]]()

    def look() -> None:
        seen.append([signal.getsignal(number) for number in FORWARDED_AS.values()])

    def asked(trainer: Trainer, run_dir: Path) -> None:
        look()
        signal.raise_signal(signal.SIGTERM)
        begin(trainer, run_dir)

    monkeypatch.setattr(rank, "begin", asked)
    with pytest.raises(StoppedCleanly, match="SIGTERM: stopped after step 0, which is saved"):
        run.process(monkeypatch, lambda trainer: look())
    assert seen[0] == [signal.SIG_DFL] * 3
    assert signal.SIG_DFL not in seen[1]


def test_a_process_that_fails_completes_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, checkpoint_every=2, validate_every=99))
    run.cfg.rewards.max_infrastructure_failures = 1

    def breaks() -> None:
        assert not (run.folder / "checkpoints").exists()  # that of step 2 is still being written
        run.verifier.broken = lambda request: True

    with pytest.raises(RewardFailure):
        run.process(monkeypatch, at_step(run, {3: breaks}, monkeypatch))
    assert kept(run) == [2]
    assert run.events("stop", "finish") == []


def test_a_rollout_that_is_given_up_leaves_its_step_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run then goes on as if nothing had been."""
    lines = []
    for name in ("whole", "stopped"):
        run = SmallRun(config(tmp_path / name, validate_every=99, max_steps=4, checkpoint_every=99))
        run.cfg.trainer.deadlines = DeadlinesConfig(finish_step_s=0.1)
        if name == "stopped":

            def stops(run: SmallRun = run) -> None:
                run.verifier.delay = 30.0
                run.stopping.request_stop("SIGTERM", logging.DEBUG)

            with pytest.raises(StoppedCleanly, match="finished steps are saved"):
                go(run, monkeypatch, at_step(run, {3: stops}, monkeypatch))
            assert kept(run) == [2]
            assert state_of(run, 2)["trainer"]["step"] == 2
        trainer = go(run, monkeypatch)
        lines.append((run.lines(), parts_of(trainer.checkpoints)["prompts"], run.policy.weights_sha256()))
    assert lines[0] == lines[1]


def test_metrics_of_a_start_without_a_checkpoint_are_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=3, checkpoint_every=99))

    def dies() -> None:
        raise Killed("in step 3")

    with pytest.raises(Killed):
        go(run, monkeypatch, at_step(run, {3: dies}, monkeypatch))
    go(run, monkeypatch)
    assert [line["step"] for line in run.lines()] == [1, 2, 3]
    assert len((tmp_path / "metrics.lost.jsonl").read_text().splitlines()) == 2
    assert [event["event"] for event in run.events("start", "resume", "finish")] == ["start", "start", "finish"]


def test_a_run_resumed_at_its_start_is_not_validated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets = ResetsConfig(roll_back=True)
    run = SmallRun(config(tmp_path, resets, max_steps=1, keep_best=1, async_checkpoints=False))

    def dies() -> None:
        raise Killed("in step 1")

    with pytest.raises(Killed):
        go(run, monkeypatch, at_step(run, {1: dies}, monkeypatch))
    assert kept(run) == [0]
    go(run, monkeypatch)
    assert [event["step"] for event in run.events("validation")] == [0, 1]


def test_a_checkpoint_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a stop right after it nor a stop right after a resume writes it again."""
    run = SmallRun(config(tmp_path, max_steps=3, checkpoint_every=2))

    def stops() -> None:
        run.stopping.request_stop("SIGTERM", logging.DEBUG)

    written: list[Any] = []
    for _ in range(2):
        trainer = run.start(monkeypatch)
        written.append(trainer.checkpoints.files.written)  # type: ignore[attr-defined]
        if trainer.progress.step:
            stops()
        at_step(run, {2: stops}, monkeypatch)(trainer)
        with pytest.raises(StoppedCleanly, match="stopped after step 2"):
            trainer.train()
        run.close()
    assert written == [[2], []]
    assert [(event["step"], event["stage"]) for event in run.events("resume")] == [(2, "none")]


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_are_served_after_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=5, validate_every=99, checkpoint_every=99))
    place(tmp_path, "stop", "r-0")
    age(tmp_path / "control" / "r-0.json")  # of an earlier process: dropped
    complete: dict[str, list[int]] = {}  # at the answer
    answer: Any = Requests.answer

    def answered(requests: Requests, request: Request, *given: Any, **more: Any) -> None:
        complete[request.id] = kept(run) if (tmp_path / "checkpoints").exists() else []
        answer(requests, request, *given, **more)

    monkeypatch.setattr(Requests, "answer", answered)
    steps = {
        2: lambda: (place(tmp_path, "validate", "r-1"), place(tmp_path, "checkpoint", "r-2")),
        3: lambda: place(tmp_path, "reset", "r-3"),
        4: lambda: place(tmp_path, "stop", "r-4"),
    }
    with pytest.raises(StoppedCleanly, match="control r-4: stopped after step 4"):
        go(run, monkeypatch, at_step(run, steps, monkeypatch))
    assert [(e["request"], e["status"], e["step"]) for e in answers(tmp_path)] == [
        *(("r-0", "dropped", 0), ("r-1", "done", 2), ("r-2", "done", 2), ("r-3", "done", 3), ("r-4", "done", 4))
    ]
    assert complete == {"r-0": [], "r-1": [], "r-2": [2], "r-3": [2, 3], "r-4": [2, 3, 4]}
    assert [event["step"] for event in run.events("validation")] == [0, 2]
    validations = [version for sampling, _, version in run.engines.sampled if sampling.temperature == 0.6]
    assert validations == [0] * 8 + [2] * 8
    assert not any("validation/all" in line for line in run.lines())
    assert [(reset["step"], reset["reason"]) for reset in run.events("reset_commit")] == [(3, "control r-3")]
    assert [line["kl"] == 0.0 for line in run.lines()] == [True, False, False, True]


def test_a_requested_validation_that_cannot_be_judged_is_refused_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=3, validate_every=99))
    run.cfg.rewards.max_infrastructure_failures = 99

    def breaks() -> None:
        place(tmp_path, "validate")
        run.verifier.broken = lambda request: request["id"] == "held-3"

    def mends() -> None:
        run.verifier.broken = lambda request: False

    trainer = go(run, monkeypatch, at_step(run, {2: breaks, 3: mends}, monkeypatch))
    assert trainer.progress.step == 3
    (answer,) = answers(tmp_path)
    assert (answer["status"], answer["detail"]) == (
        "refused",
        "validation: prompt held-3 of held could not be judged: the scorer broke",
    )


# --- engines ---------------------------------------------------------------------------------------------------------


def test_engines_sleep_while_a_step_trains_and_wake_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=3, validate_every=2))
    run.cfg.rollout.sleep, run.cfg.rollout.dtype = 2, "bfloat16"
    asleep: list[bool] = []
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(run.engines.asleep))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def prepare(trainer: Trainer) -> None:
        run.policy.on_update = lambda: asleep.append(run.engines.asleep)

    go(run, monkeypatch, prepare)
    assert asleep == [True] * 2 * 3
    assert run.engines.naps == [2] * 3
    assert emptied == [False, True, True, True]  # PyTorch's memory, before engines take theirs
    assert run.engines.loads == [0, 1, 2, 3]
    deadlines = run.cfg.trainer.deadlines
    assert set(run.engines.waits) == {deadlines.publish_s + deadlines.startup_s}  # with a restart of an engine


def test_engines_that_stay_awake_get_each_version_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=3, validate_every=2))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("nobody needs the memory"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    go(run, monkeypatch)
    assert (run.engines.loads, run.engines.naps) == ([0, 1, 2, 3], [])
    assert set(run.engines.waits) == {run.cfg.trainer.deadlines.publish_s}


def test_one_step_off_each_batch_is_made_while_the_step_before_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = []
    for name in ("whole", "stopped"):
        run = SmallRun(config(tmp_path / name, max_steps=4, validate_every=3))
        run.cfg.rollout.own_devices, run.cfg.rollout.engines = True, 2
        if name == "stopped":
            stops = at_step(run, {2: lambda run=run: run.stopping.request_stop("SIGTERM")}, monkeypatch)
            with pytest.raises(StoppedCleanly):
                go(run, monkeypatch, stops)
            waiting = state_of(run, 2)["rollouts"]["waiting"]
            assert (waiting["step"], waiting["version"]) == (3, 1)
            stored = decode((run.folder / "checkpoints" / "step-000002" / "groups.safetensors").read_bytes())
            assert {*waiting["groups"]} <= {group.draw_index for group in stored}
        go(run, monkeypatch)
        assert isinstance(run.collector, OneStepOff)
        assert run.alarms() == []  # also in steps without a token of the present weights
        lines.append(run.lines())
    assert lines[0] == lines[1]
    assert [{line["version"] for line in run.rollouts(step)} for step in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    assert run.collector.state_dict()["waiting"] is None
    text = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert ["time/ahead" in json.loads(line) for line in text] == [True, True, True, False]


def test_a_run_waits_for_every_engine_and_reward_server(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.rollout.engines, cfg.trainer.num_nodes, cfg.trainer.deadlines.startup_s = 2, 2, 0.1
    endpoints = tmp_path / "endpoints"
    endpoints.mkdir()
    nothing: Any = None
    for name, missing in (
        ("rewards-0", "2 x .*rewards-"),
        ("rewards-1", "2 x .*engine-"),
        ("engine-0", "2 x .*engine-"),
    ):
        (endpoints / f"{name}.json").touch()
        with pytest.raises(DeadlineExceeded, match=missing):
            rank.connect(cfg, tmp_path, nothing, nothing)


def test_an_engine_that_grows_too_large_is_restarted_and_no_alarm_when_it_does_not_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=2, validate_every=99))
    run.cfg.rollout.recycle_gb = 1.5

    def prepare(trainer: Trainer) -> None:
        process = {"pid": 7, "proportional_bytes": 2e9}
        monkeypatch.setattr("nemo_prorl.usage.newest", lambda folder: [{"processes": {"engine-0": process}}])
        endpoint = {"kind": "engine", "url": "http://localhost:1", "pid": 7, "state": "ready"}
        (tmp_path / "endpoints" / "engine-0.json").write_text(json.dumps(endpoint))
        run.engines.wake_failures = {"engine-0": "it ended", "engine-1": "out of memory"}

    go(run, monkeypatch, prepare)
    assert (tmp_path / "endpoints" / "engine-0.restart").exists()
    assert [alarm.split(" (")[0] for alarm in run.alarms()] == [
        "0: engine-0 did not wake",  # not asked to restart
        "0: engine-1 did not wake",
        "1: engine-1 did not wake",
        "2: engine-0 did not wake",  # asked to restart before version 1, not again
        "2: engine-1 did not wake",
    ]


@pytest.mark.parametrize(("local", "writes"), [("0", True), ("1", False)])
def test_one_rank_of_each_node_writes_weights_in_the_folder_of_its_node(
    local: str, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(tmp_path)
    cfg.trainer.num_nodes = 2
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("GROUP_RANK", "1")
    nothing: Any = None
    store = Rollouts(cfg, tmp_path, *[nothing] * 6)._store
    assert (store is not None) == writes
    if store is not None:
        assert store.folder == weights_folder(tmp_path, 1)
        store.remove()


def test_rank_0_knows_what_a_rollout_waits_for_and_who_judges_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path))
    run.cfg.seed = 5
    monkeypatch.setattr("tests.lifecycle.small_run.TASKS", ("math", "stem"))
    trainer = run.start(monkeypatch)
    run.close()
    assert trainer.watchdog._waiting is not None
    assert trainer.watchdog._waiting() == "no request is open"
    second = run.collector._second
    assert second.task_for({"task": "math", "truth": {"answer": "2"}}) == "math_second"
    alike = SecondVerifiers.none()
    alike._seed = 5
    assert [second.chooses(k) for k in range(500)] == [alike.chooses(k) for k in range(500)]


# --- checkpoints -----------------------------------------------------------------------------------------------------

SCORES = {0: 0.0, 1: 0.2, 2: 0.9, 3: 0.5, 4: 0.3, 5: 0.1}


@pytest.mark.parametrize(
    ("keys", "resets", "steps"),
    [
        ({"keep_checkpoints": 2, "keep_best": 1}, {}, [2, 4, 5]),
        ({"keep_checkpoints": 1, "keep_best": 2}, {}, [2, 3, 5]),
        ({"keep_checkpoints": 1, "keep_best": 0}, {}, [5]),
        ({"keep_checkpoints": 1, "keep_best": 0}, {"roll_back": True}, [2, 5]),
        # After the reset at step 3, the best since then is needed.
        ({"keep_checkpoints": 1, "keep_best": 0}, {"roll_back": True, "at_steps": [4]}, [4, 5]),
        # The weights of step 4 are those of step 2 again: they have its score.
        ({"keep_checkpoints": 1, "keep_best": 2}, {"roll_back": True, "at_steps": [4]}, [2, 4, 5]),
    ],
)
def test_the_newest_and_the_best_checkpoints_are_kept(
    keys: dict[str, int], resets: dict[str, Any], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, ResetsConfig(**resets), max_steps=5, validate_every=1, checkpoint_every=1, **keys))
    trained(run, monkeypatch, SCORES)
    assert kept(run) == steps


def test_a_second_roll_back_goes_no_further_than_the_last_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = ResetsConfig(at_steps=[3, 6], roll_back=True)
    run = SmallRun(config(tmp_path, resets, validate_every=1, checkpoint_every=1))
    trained(run, monkeypatch, {1: 0.9, 5: 0.7})
    assert [(reset["step"], reset["rolled_back_to"]) for reset in run.events("reset_commit")] == [(3, 1), (6, 3)]
    assert same(saved(run, 6)["weights"], saved(run, 1)["weights"])


def test_checkpoints_stay_within_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path / "size", max_steps=2))
    trained(run, monkeypatch)
    size = sum(file.stat().st_size for file in (run.folder / "checkpoints" / "step-000002").iterdir())
    run = SmallRun(config(tmp_path / "run", max_steps=5, checkpoint_every=1, checkpoint_budget_gb=3.5 * size / 1e9))
    trained(run, monkeypatch)
    assert kept(run) == [3, 4, 5]


def test_a_resumed_run_has_spent_the_seconds_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=4))
    go(run, monkeypatch)
    before = state_of(run, 4)["records"]["checkpoint_s"]
    trainer = run.start(monkeypatch)
    run.close()
    assert trainer.records.state_dict()["checkpoint_s"] == before > 0.0


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imported", [False, True])
def test_a_stage_without_a_reset_keeps_reference_and_moments(
    imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the weights of an older checkpoint and goes on in the data after the newest."""
    first = SmallRun(config(tmp_path / "first", max_steps=4))
    go(first, monkeypatch)
    older, newest = (first.folder / "checkpoints" / f"step-00000{step}" for step in (2, 4))
    state = state_of(first, 4)
    if imported:
        for name in ("prompts", "rollouts"):
            state.pop(name)
        (newest / "state.json").write_text(json.dumps({**state, "imported_from": "/model"}))
    second = SmallRun(config(tmp_path / "second", max_steps=2))
    second.cfg.chain.start_from, second.cfg.chain.hard_reset = "given", False
    monkeypatch.setattr(stages, "origin", lambda cfg, run_dir: Origin(older, first.folder, newest))
    trainer = second.start(monkeypatch)
    assert same(second.policy.state(), saved(first, 2))
    assert not same(second.policy.state()["reference"], second.policy.state()["weights"])
    drawn = {name: one["drawn"] for name, one in parts_of(trainer.checkpoints)["prompts"]["sources"].items()}
    assert drawn == ({"train": 0} if imported else {n: one["drawn"] for n, one in state["prompts"]["sources"].items()})
    (start,) = second.events("start")
    assert (start["start_from"], start["weights_sha256"]) == (str(older), state_of(first, 2)["weights_sha256"])
    trainer.train()
    trainer.finish()
    second.close()
    assert same(saved(second, 0), saved(first, 2))
    assert second.lines()[0]["kl"] > 0.0
    assert second.events("reset_commit") == []


# --- the warm-up -----------------------------------------------------------------------------------------------------


EXAMPLES = [([3, 4, 8 + k % 2], [5 + k, 2]) for k in range(6)]


def warmed_by_hand(examples: list[list[tuple[list[int], list[int]]]], lr: float) -> SmallPolicy:
    """Return a policy after a step of Adam on each of these batches, at temperature 1."""
    policy = SmallPolicy(temperature=1.0)
    policy.set_learning_rate(lr)
    for part in examples:
        batch = Batch.from_sequences([p for p, _ in part], [r for _, r in part], [[0.0] * len(r) for _, r in part])
        policy.adam.zero_grad()
        loss = -policy._logprobs(policy.weights, batch)[0].sum() / batch.num_response_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.weights.values(), 1.0)
        policy.adam.step()
    return policy


def test_a_warm_up_tells_its_loss_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    warm_up(SmallPolicy(temperature=0.5), EXAMPLES, WarmupConfig(steps=51, batch_size=1, lr=0.05), lr=LR)
    assert [record.message.split(":")[0] for record in caplog.records] == ["warm-up 50/51", "warm-up 51/51"]


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 2)])
def test_a_warm_up_takes_its_examples_in_turn_and_leaves_a_new_optimizer(ranks: Ranks) -> None:
    policy = SmallPolicy(temperature=0.5)
    policy.data_ranks = ranks
    warm_up(policy, EXAMPLES, WarmupConfig(steps=2, batch_size=4, lr=0.05), lr=LR / 2)
    batches = [EXAMPLES[:4], [*EXAMPLES[4:], *EXAMPLES[:2]]]
    wanted = warmed_by_hand([batch[ranks.rank :: ranks.size] for batch in batches], 0.05)
    assert same(policy.state()["weights"], wanted.state()["weights"])
    assert policy.moments() == {}
    assert policy.reloaded == 1
    assert policy.adam.param_groups[0]["lr"] == LR / 2


def test_a_warmed_up_policy_is_the_reference_and_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, actor, leader = config(tmp_path), SmallPolicy(temperature=1.0), Leader(DeadlinesConfig(), data_rank=0)
    cfg.trainer.warmup = WarmupConfig(steps=2, batch_size=3, lr=0.05)
    cfg.pretrained_checkpoint.restore_from_path = None
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    monkeypatch.setattr(rank, "warmup_examples", lambda cfg, data, policy: EXAMPLES)
    policy: Any = SimpleNamespace(actor=actor, leader=leader, data=leader.only(dict), folder=tmp_path / "init")
    rank.make_base(cfg, policy, tmp_path / "base")
    wanted = warmed_by_hand([EXAMPLES[:3], EXAMPLES[3:]], 0.05).state()["weights"]
    assert same(actor.state()["weights"], wanted)
    assert same(actor.reference, wanted)
    assert same(load_file(tmp_path / "base" / "model.safetensors"), wanted)


def test_a_warm_up_is_on_prompts_of_the_run_s_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path)
    cfg.trainer.warmup, cfg.data.max_prompt_tokens = WarmupConfig(steps=4, batch_size=5), 3
    puzzles = [
        {"id": str(k), "task": "puzzles", "prompt": str(k), "truth": {"entry": {"answer": str(k)}}, "meta": {}}
        for k in range(9)
    ]

    class Lengths:
        def of(self, source: Any, records: list[Any]) -> list[int]:
            return [3 + int(record["id"]) % 2 for record in records]

    monkeypatch.setattr(rank, "PromptLengths", lambda folder, data: Lengths())
    renderer = SimpleNamespace(
        prompt_ids=lambda record: [int(record["prompt"])], target_ids=lambda ids, text: [*ids, text]
    )
    policy: Any = SimpleNamespace(renderer=renderer, folder=tmp_path)
    examples = rank.warmup_examples(cfg, LoadedData([(DataSource(name="train"), puzzles)], []), policy)
    drawn = [ids[0] for ids, _ in examples]  # a resumed warm-up draws what it drew before
    assert drawn == [0, 2, 6, 8, 4, 8, 2, 6, 0, 4, 4, 2, 8, 0, 6, 6, 2, 4, 0, 8]
    assert all(
        (*ids, *target) == (k, k, f"<answer>{k}</answer>") for k, (ids, target) in zip(drawn, examples, strict=True)
    )
