"""What a run counts, raises alarms about, and takes up again after a kill; every part is the real one."""

import ast
import json
import logging
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl.config import ResetRulesConfig, ResetsConfig
from nemo_prorl.errors import RewardFailure, RolloutAbandoned, StoppedCleanly
from nemo_prorl.lifecycle.checkpoints import LeaderState
from nemo_prorl.lifecycle.retention import complete
from nemo_prorl.lifecycle.stages import Origin
from nemo_prorl.rank import begin_stage
from nemo_prorl.trainer import Trainer
from tests.lifecycle.faults import infinite_in
from tests.lifecycle.small_run import LR, SmallRun, config, parts_of


def go(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Trainer], object] = lambda _: None
) -> Trainer:
    """Start or resume the run, and train; return the trainer of its process."""
    trainer = run.start(monkeypatch)
    try:
        prepare(trainer)
        trainer.train()
        trainer.finish()
    finally:
        run.close()
    return trainer


def hopeless_in(run: SmallRun, steps: set[int]) -> Callable[[Trainer], None]:
    """Return a preparation after which no response of these steps is right."""

    def prepare(trainer: Trainer) -> None:
        collect = trainer.rollouts.collect

        def collected(metrics: Any) -> Any:
            run.verifier.hopeless = metrics.step in steps
            try:
                return collect(metrics)
            finally:
                run.verifier.hopeless = False

        trainer.rollouts.collect = collected  # type: ignore[method-assign]

    return prepare


# --- counts in a row -------------------------------------------------------------------------------------------------


def static(folder: Path, **grpo: Any) -> SmallRun:
    """A run without surplus, whose steps depend on their own draws only."""
    run = SmallRun(config(folder, **{"validate_every": 99, **grpo}))
    run.cfg.trainer.grpo.dynamic_sampling.max_staleness = 0
    return run


def test_steps_without_a_signal_are_counted_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of eight steps learn nothing, never three in a row: the run goes on, and tells the 1st, 2nd, 4th .. time."""
    run = static(tmp_path, max_steps=8, max_steps_without_signal=3)
    trainer = go(run, monkeypatch, hopeless_in(run, {1, 2, 4, 5, 7}))
    assert trainer.progress.step == 8
    assert trainer.progress.without_signal == 0
    told = [alarm.split(":")[:2] for alarm in run.alarms() if "no group carries a signal" in alarm]
    assert told == [["1", " no group carries a signal"], ["4", " no group carries a signal (2 times so far)"]]
    assert trainer.progress.signal_lost == 3
    assert [line["rollout/groups"] == 0 for line in run.lines()] == [step in {1, 2, 4, 5, 7} for step in range(1, 9)]
    assert len(run.policy.updates) == 2 * 3


def test_three_steps_in_a_row_stop_the_run_also_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = static(tmp_path, max_steps=8, max_steps_without_signal=3, checkpoint_every=99)
    with pytest.raises(StoppedCleanly, match="after step 4: 3 steps in a row"):
        go(run, monkeypatch, hopeless_in(run, {2, 3, 4, 5, 6}))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert json.loads((tmp_path / "summary.json").read_text())["heldout"]["steps"] == [0, 0]  # since its validation
    run.cfg.trainer.grpo.max_steps_without_signal = 5
    with pytest.raises(StoppedCleanly, match="after step 6: 5 steps in a row"):
        go(run, monkeypatch, hopeless_in(run, {2, 3, 4, 5, 6}))
    run.cfg.trainer.grpo.max_steps = 7
    assert go(run, monkeypatch, hopeless_in(run, {7})).progress.step == 7  # the last step ends the run, not a stop


@pytest.mark.parametrize("most", [2, 3])
def test_reward_failures_are_counted_in_a_row(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third verdict comes: two failures in a row, again and again."""
    run = static(tmp_path, max_steps=3)
    run.cfg.data.validation = []
    run.cfg.rewards.max_infrastructure_failures = most
    asked: list[int] = []

    def broken(request: Any) -> bool:
        asked.append(1)
        return len(asked) % 3 != 0

    def prepare(trainer: Trainer) -> None:
        run.verifier.broken = broken

    if most == 2:
        with pytest.raises(RewardFailure, match="2 responses in a row could not be judged"):
            go(run, monkeypatch, prepare)
    else:
        assert go(run, monkeypatch, prepare).progress.step == 3
        assert len(asked) > 3 * 16


# --- alarms ----------------------------------------------------------------------------------------------------------


def alarmed(run: SmallRun, monkeypatch: pytest.MonkeyPatch, **engines: Any) -> list[str]:
    def prepare(trainer: Trainer) -> None:
        for name, value in engines.items():
            setattr(run.engines, name, value)

    go(run, monkeypatch, prepare)
    return run.alarms()


def test_a_healthy_run_raises_no_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alarmed(SmallRun(config(tmp_path)), monkeypatch) == []


@pytest.mark.parametrize(("warmth", "text"), [(1.1, "higher"), (0.9, "lower")])
def test_an_engine_with_another_temperature_alarms_in_every_step_beside_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmth: float, text: str
) -> None:
    found = alarmed(static(tmp_path, max_steps=2, prompts_per_step=16), monkeypatch, warmth=warmth)
    for step in (1, 2):
        temperature, gap = (alarm for alarm in found if alarm.startswith(f"{step}: "))
        match = re.fullmatch(
            rf"{step}: the temperature of the engine is at least ([\d.]+) % {text} than trainer.grpo.temperature",
            temperature,
        )
        assert match is not None
        assert 7.0 < float(match[1]) < 11.0
        assert gap.startswith(f"{step}: engine and trainer differ by ")


def test_three_alarms_of_the_gap_come_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = static(tmp_path, max_steps=1, prompts_per_step=16)
    run.cfg.trainer.grpo.correction.alarm = 0.01
    found = alarmed(run, monkeypatch, warmth=1.4, noise=3.0, noise_in=97)
    assert [alarm.split(" by ")[0].split(" at least ")[0].split(": their")[0] for alarm in found] == [
        "1: the temperature of the engine is",
        "1: engine and trainer differ",
        "1: engine and trainer differ much in few tokens",
    ]


def test_an_engine_that_differs_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = alarmed(static(tmp_path, max_steps=1), monkeypatch, noise=0.002)
    assert found == "1: engine and trainer differ by 0.002 nats per token; 0.001 is allowed (correction.alarm)"


def test_a_gap_just_allowed_does_not_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alarmed(static(tmp_path, max_steps=1), monkeypatch, noise=0.0009) == []


def test_a_large_difference_in_few_tokens_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = static(tmp_path, max_steps=1, prompts_per_step=16)
    run.cfg.trainer.grpo.correction.alarm = 0.5
    (found,) = alarmed(run, monkeypatch, noise=3.0, noise_in=11)
    assert "engine and trainer differ much in few tokens: their ratio of probabilities is" in found


def test_a_verifier_that_errs_on_canaries_alarms_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five errors of a task and side reach the limit; some of each come before the restart."""
    run = static(tmp_path, max_steps=10, prompts_per_step=25, checkpoint_every=10)  # 100 responses: one canary a step

    def lies(trainer: Trainer) -> None:
        run.verifier.canaries_lie = True

    go(run, monkeypatch, lies)
    counts = [{k: v for k, v in line.items() if k.startswith("canaries/")} for line in run.lines()]
    assert all(counts)
    assert len({key for count in counts for key in count if "false" in key}) >= 3
    assert run.alarms() == []
    run.cfg.trainer.grpo.max_steps = 24
    go(run, monkeypatch, lies)
    told = [alarm for alarm in run.alarms() if "errs on responses whose verdict is known" in alarm]
    assert told
    errors: dict[str, int] = {}
    for line in run.lines():
        for key, value in line.items():
            if key.startswith("canaries/false_"):
                errors[key] = errors.get(key, 0) + int(value)
        if line["step"] == int(told[0].split(":")[0]):
            break
    assert max(errors.values()) == 5  # 5 x 250 passes 1,050


def test_every_prompt_retired_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = static(tmp_path, max_steps=8)
    run.train_prompts, run.cfg.data.retire_after, run.cfg.data.retire_rate = 4, 1, 0.2
    go(run, monkeypatch)
    assert any("every training prompt was retired (data.retire_after)" in alarm for alarm in run.alarms())
    assert any(line["data/retired"] for line in run.lines())


def test_an_engine_that_did_not_wake_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = alarmed(static(tmp_path, max_steps=1), monkeypatch, wake_failures={"engine-0": "out of memory"})
    assert found == [
        f"{k}: engine-0 did not wake (out of memory); it was restarted and has weights {k}" for k in (0, 1)
    ]


def test_tensors_that_engines_cannot_compare_alarm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [f"model.layers.{k}.mlp.down_proj.weight" for k in range(10)]
    unread = {"engine-0": several, "engine-1": several, "engine-2": [], "engine-3": several[:8]}
    found = alarmed(static(tmp_path, max_steps=2), monkeypatch, unread=unread)
    unseen = "with the published ones"
    assert found == [
        f"1: engine-0 cannot compare 10 tensors {unseen}: {', '.join(several[:8])} and 2 more",
        f"1: engine-3 cannot compare 8 tensors {unseen}: {', '.join(several[:8])}",
    ]


def test_other_code_and_other_rewards_alarm_at_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = tmp_path / "mine.py"
    function.write_text("def score(prompt, response, truth):\n    return 1.0\n")
    run = static(tmp_path / "run", max_steps=2)
    run.cfg.rewards.functions = {"mine": f"{function}:score"}
    go(run, monkeypatch)
    assert run.alarms() == []
    function.write_text("def score(prompt, response, truth):\n    return 0.0\n")
    monkeypatch.setattr("nemo_prorl.lifecycle.checkpoints.code_sha256", lambda: "0" * 64)
    run.cfg.trainer.grpo.max_steps = 3
    go(run, monkeypatch)
    assert [alarm.split(": ", 1)[1][:35] for alarm in run.alarms()] == [
        "this code differs from the code that wrote"[:35],
        f"{function} was changed"[:35],
    ]


def test_the_rules_findings_are_alarms_and_memory_that_runs_out_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, always_plateau("advise"), validate_every=1, max_steps=6))

    def prepare(trainer: Trainer) -> None:
        monkeypatch.setattr(trainer.records._growth, "observe", lambda step, *_: ["rank-0"] if step == 2 else [])

    trainer = go(run, monkeypatch, prepare)
    assert trainer.resets.done == []
    memory, plateau = run.alarms()
    assert memory == "2: memory will be full before the last step: rank-0"
    assert plateau.startswith("4: plateau: the mean of 1 validation score changed by")


def test_the_rules_reset_the_run_in_mode_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, always_plateau("auto"), validate_every=1, max_steps=6))
    trainer = go(run, monkeypatch)
    (reset,) = trainer.resets.done
    assert reset["step"] == 4
    assert reset["reason"].startswith("plateau: ")
    assert [line["kl"] == 0.0 for line in run.lines()][4]


def test_a_rule_that_advises_resets_or_stops_the_run_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(mode: str) -> SmallRun:
        rules = ResetRulesConfig(asks=["entropy"], entropy_share=1.0, cooldown_steps=20)
        return SmallRun(config(tmp_path / mode, ResetsConfig(mode=mode, rules=rules), max_steps=22))

    resets = go(run("auto"), monkeypatch).resets
    assert [(reset["step"], reset["reason"][:8]) for reset in resets.done] == [(20, "entropy:")]
    advised, stopped = run("advise"), run("stop")
    go(advised, monkeypatch)
    with pytest.raises(StoppedCleanly, match=r"after step 20, which is saved: entropy: .* .trainer.resets.mode=stop."):
        go(stopped, monkeypatch)
    assert complete(stopped.folder / "checkpoints")[-1].name == "step-000020"
    assert go(stopped, monkeypatch).progress.step == 22
    assert stopped.lines() == advised.lines()  # the stop changes nothing


def always_plateau(mode: str) -> ResetsConfig:
    """Return rules to which every course of four validations is a plateau."""
    rules = ResetRulesConfig(cooldown_steps=3, plateau_steps=4, plateau_gain=9.0, plateau_sigma=0.0, asks=["plateau"])
    return ResetsConfig(mode=mode, rules=rules)


def test_a_stage_of_another_version_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SmallRun(config(tmp_path / "first", max_steps=2))
    trained = go(first, monkeypatch)
    checkpoint = first.folder / "checkpoints" / "step-000002"
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, "version": "0.0.1"}))
    second = SmallRun(config(tmp_path / "second", max_steps=1))
    trainer = second.start(monkeypatch)
    begin_stage(trainer, Origin(checkpoint, first.folder, checkpoint))
    (told,) = second.alarms()
    assert "was written by version 0.0.1" in told
    assert second.policy.weights_sha256() == second.policy.reference_sha256() == first.policy.weights_sha256()
    assert second.policy.moments() == {}
    carried, end = parts_of(trainer.checkpoints), parts_of(trained.checkpoints)
    assert carried["rollouts"]["keep_rates"] == end["rollouts"]["keep_rates"] != {}
    drawn = [one["drawn"] for one in carried["prompts"]["sources"].values()]
    assert drawn == [one["drawn"] for one in end["prompts"]["sources"].values()]
    second.close()


# The test in which each alarm of the package is raised, by the first words of the alarm.
RAISED = {
    "no group carries a signal": "test_wiring.py::test_steps_without_a_signal_are_counted_in_a_row",
    "an update was skipped": "test_nonfinite.py::test_an_update_that_is_not_finite_is_skipped_and_told",
    "the temperature of the engine": "test_wiring.py::test_an_engine_with_another_temperature_alarms_in_every_step",
    "engine and trainer differ by": "test_wiring.py::test_an_engine_that_differs_alarms",
    "engine and trainer differ much": "test_wiring.py::test_a_large_difference_in_few_tokens_alarms",
    "the verifier of task": "test_wiring.py::test_a_verifier_that_errs_on_canaries_alarms_also_after_a_resume",
    "every training prompt was": "test_wiring.py::test_every_prompt_retired_alarms",
    " cannot compare ": "test_wiring.py::test_tensors_that_engines_cannot_compare_alarm_once",
    "; the first: ": "../rollout/test_report.py::test_responses_without_a_verdict_are_an_alarm_once_in_a_row_of_steps",
    " did not wake (": "test_wiring.py::test_an_engine_that_did_not_wake_alarms",
    " is restarted again after": "../test_usage.py::test_",
    " was written by version": "test_wiring.py::test_a_stage_of_another_version_alarms",
    "this code differs from the code": "test_wiring.py::test_other_code_and_other_rewards_alarm_at_a_resume",
    " was changed after the": "test_wiring.py::test_other_code_and_other_rewards_alarm_at_a_resume",
    " was damaged; the run": "test_damage.py::test_a_damaged_checkpoint_ends_the_start_with_the_fix",
    "memory will be full": "test_wiring.py::test_the_rules_findings_are_alarms_and_memory_that_runs_out_is_one",
    "": "test_wiring.py::test_the_rules_findings_are_alarms_and_memory_that_runs_out_is_one",  # str(finding)
    "no roll-back: the checkpoint": "test_hard_resets.py::test_no_roll_back_where_the_last_weights_are_the_best",
    " is not a valid request": "test_control.py::test_a_file_that_is_no_request_is_moved_aside",
    " was not written: ": "test_ledger.py::test_a_batch_that_cannot_be_written_alarms_once",
    "no progress for ": "test_watchdog.py::test_",
}


def test_each_alarm_of_the_package_has_a_test_that_raises_it(root: Path) -> None:
    """A new alarm fails here until its test is named in RAISED."""
    texts = []
    for file in sorted((root / "nemo_prorl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if isinstance(node, ast.Call) and called in ("alarm", "_alarm") and len(node.args) == 2:
                texts.append(first_words(node.args[1]))
    missing = [text for text in texts if not any(text.startswith(known) and known for known in RAISED) and text]
    assert missing == []
    assert len(texts) == len(RAISED)
    for place in RAISED.values():
        name, _, test = place.partition("::")
        assert f"def {test}" in (Path(__file__).parent / name).read_text(), place


def first_words(argument: ast.expr) -> str:
    """Return the first constant text of an argument; empty if it has none."""
    constants = [node for node in ast.walk(argument) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    constants.sort(key=lambda node: (node.lineno, node.col_offset))
    return str(constants[0].value) if constants and not isinstance(argument, ast.Call) else ""


# --- resume ----------------------------------------------------------------------------------------------------------

# Fields of parts that are not in a checkpoint, with the reason.
NOT_SAVED = {
    "records": {"_growth"},  # begins again: the processes are new, too
    "rollouts": {
        "_published",
        "_asleep",
        "_recycled",
        "_restarting",
        "collector",
    },  # the engines are new; the collector has state
    "collector": {"_clock", "_background", "_engines", "_rewards", "renderer", "_second"},  # a step's clock; services
    "blend": {"_orders"},  # derived
}


HOPELESS = [True, False]


def full(tmp_path: Path, hopeless: bool) -> SmallRun:
    """A run whose every part has something to save when it stops in the validation of step 6.

    A step 6 without a signal (`hopeless`) has no surplus; the other has no steps without a signal in a row.
    """
    resets = always_plateau("advise")
    resets.at_steps = [5]
    run = SmallRun(config(tmp_path, resets, validate_every=1, max_steps=9, max_steps_without_signal=0))
    adaptive = run.cfg.trainer.grpo.adaptive_entropy
    adaptive.enabled, adaptive.target = True, 9.0
    run.cfg.data.retire_after, run.cfg.data.retire_rate = 1, 0.7
    run.cfg.trainer.grpo.dynamic_sampling.max_staleness = 0 if hopeless else 1
    return run


def stopped_in_validation(run: SmallRun, hopeless: bool, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    def prepare(trainer: Trainer) -> None:
        hopeless_in(run, {6} if hopeless else set())(trainer)
        infinite_in(run, {(6, 1)})(trainer)
        judge = trainer.validation.judge

        def abandoned(metrics: Any) -> Any:
            if metrics.step == 6:
                trainer.stopping.request_stop("SIGUSR1")
                raise RolloutAbandoned("the rollout was abandoned")
            return judge(metrics)

        monkeypatch.setattr(trainer.validation, "judge", abandoned)

    trainer = run.start(monkeypatch)
    prepare(trainer)
    with pytest.raises(StoppedCleanly, match=r"^SIGUSR1: the rollout was abandoned; finished steps are saved"):
        trainer.train()
    run.close()
    return trainer


def plain(value: Any) -> Any:
    """Return data as JSON values, so that objects can be compared; other objects by their type."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return (
        {k: plain(v) for k, v in vars(value).items()}
        if hasattr(value, "__dict__") and not callable(value)
        else str(type(value))
    )


def fields_of(trainer: Trainer) -> dict[str, Any]:
    """Return every field of every part, except configuration, handles to other parts, and NOT_SAVED."""
    parts: dict[str, Any] = dict(trainer.checkpoints.parts)
    parts["collector"] = trainer.rollouts.collector._made[0]
    for name, part in list(parts.items()):
        if isinstance(part, LeaderState):
            parts["blend" if name == "prompts" else name] = part.part._made[0]
    found: dict[str, Any] = {
        "canaries": plain(trainer.rollouts._canaries),
        "history": plain(trainer.resets.history._made[0]),
    }
    for name, part in parts.items():
        if not isinstance(part, LeaderState):
            own = {k: v for k, v in vars(part).items() if k not in NOT_SAVED.get(name, set())}
            data = {
                k: v
                for k, v in own.items()
                if isinstance(v, dict | list | tuple | set | str | int | float | bool | None)
            }
            simple = {k: v for k, v in own.items() if k in ("unfinished", "keep_rates")}
            found[name] = plain({**data, **simple})
    return found


@pytest.mark.parametrize("hopeless", HOPELESS)
def test_a_resume_restores_every_field_of_every_part(
    hopeless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = full(tmp_path, hopeless)
    before = stopped_in_validation(run, hopeless, monkeypatch)
    states, fields, policy = parts_of(before.checkpoints), fields_of(before), run.policy.state()
    after = run.start(monkeypatch)
    run.close()
    found = parts_of(after.checkpoints)
    found["records"]["checkpoint_s"] = states["records"]["checkpoint_s"]  # grew while the checkpoint was written
    assert found == states
    resumed = fields_of(after)
    resumed["records"]["checkpoint_s"] = fields["records"]["checkpoint_s"]
    assert resumed == fields
    assert torch.utils._pytree.tree_all(
        lambda pair: pair,
        [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in leaves(run.policy.state(), policy)],
    )


def leaves(one: Any, other: Any) -> list[tuple[Any, Any]]:
    (left, left_tree), (right, right_tree) = (torch.utils._pytree.tree_flatten(value) for value in (one, other))
    assert left_tree == right_tree
    return list(zip(left, right, strict=True))


def test_in_these_runs_every_part_has_something_to_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above shows nothing: in one of them, each value differs from that of a new run."""
    same: list[set[str]] = []
    for hopeless in HOPELESS:
        new = full(tmp_path / f"new-{hopeless}", hopeless)
        fresh = parts_of(new.start(monkeypatch).checkpoints)
        new.close()
        run = full(tmp_path / f"old-{hopeless}", hopeless)
        states = parts_of(stopped_in_validation(run, hopeless, monkeypatch).checkpoints)
        same.append(
            {f"{name}.{key}" for name, state in states.items() for key in state if state[key] == fresh[name][key]}
        )
        assert states["trainer"]["unfinished"]["step"] == 6
    assert same[0] & same[1] == {"prompts.seed", "resets.trial"}  # for the latter: test_trials.py


def test_fresh_is_restored_in_both_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun(config(tmp_path, max_steps=2))
    go(run, monkeypatch)
    after = run.start(monkeypatch)
    run.close()
    assert after.resets.state_dict()["fresh"] is False


@pytest.mark.parametrize("hopeless", HOPELESS)
def test_a_stopped_run_ends_as_one_that_was_not(
    hopeless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in a validation and continued, the run computes what an undisturbed run computes."""
    lines = []
    for name in ("whole", "stopped"):
        run = full(tmp_path / name, hopeless)
        if name == "stopped":
            stopped_in_validation(run, hopeless, monkeypatch)
        trainer = run.start(monkeypatch)
        hopeless_in(run, {6} if hopeless else set())(trainer)
        infinite_in(run, {(6, 1)})(trainer)
        trainer.train()
        trainer.finish()
        run.close()
        summary = json.loads((run.folder / "summary.json").read_text())
        lines.append((run.lines(), summary["weights_sha256"], summary["resets"], summary["heldout"]))
    assert lines[0] == lines[1]
    assert len(lines[0][0]) == 9


# --- the loop --------------------------------------------------------------------------------------------------------


def test_what_a_run_writes_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = SmallRun(config(tmp_path, max_steps=5, validate_every=2, checkpoint_every=3, keep_best=0))
    trainer = run.start(monkeypatch)
    trainer.train()
    trainer.finish()
    run.close()
    first = run.events("validation")[0]
    assert [record.message for record in caplog.records if record.name == "nemo_prorl.lifecycle.validation"] == [
        "validating the policy on held-out prompts before the first step",
        f"held-out mean reward before the first step: {first['all']['mean']:.3f}",
    ]
    assert [event["step"] for event in run.events("validation")] == [0, 2, 4, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000005"]
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5]
    assert [("validation/all" in line) for line in run.lines()] == [False, True, False, True, True]
    assert [event["event"] for event in run.events() if event["event"] != "validation"] == ["start", "finish"]
    for event in run.events("validation"):  # a file has the score of each prompt
        by_prompt = json.loads((run.folder / "validations" / f"step-{event['step']:06d}.json").read_text())
        assert all(name.startswith("held/") for name in by_prompt)
        assert len(set(by_prompt.values())) > 1
        assert statistics.fmean(by_prompt.values()) == pytest.approx(event["all"]["mean"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["finished"], summary["step"], summary["heldout"]["steps"]) == (True, 5, [0, 5])
    assert summary["weights_sha256"] == run.policy.weights_sha256()
    assert summary["reference_sha256"] == run.policy.reference_sha256()
    assert {line["policy/lr"] for line in run.lines()} == {LR}


def test_a_stop_request_saves_the_step_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = SmallRun(config(tmp_path, max_steps=6, checkpoint_every=99))

    def prepare(trainer: Trainer) -> None:
        step_of = trainer.train_step

        def train_step(step: int) -> Any:
            if step == 3:
                run.stopping.request_stop("SIGTERM", logging.DEBUG)
            return step_of(step)

        monkeypatch.setattr(trainer, "train_step", train_step)

    with pytest.raises(StoppedCleanly, match="SIGTERM: stopped after step 3, which is saved"):
        go(run, monkeypatch, prepare)
    assert (tmp_path / "checkpoints" / "step-000003").is_dir()
    trainer = go(run, monkeypatch)
    assert trainer.progress.step == 6
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4, 5, 6]
