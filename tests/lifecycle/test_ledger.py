"""The ledger: equal runs have equal lines, a planted fault is found where it was planted, stored steps train again."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_prorl import rank, replay_training, settings
from nemo_prorl.algorithms.correction import rollout_correction
from nemo_prorl.config import AdaptiveEntropyConfig, GRPOConfig, ResetsConfig
from nemo_prorl.errors import DataError
from nemo_prorl.lifecycle import batches as batches_module
from nemo_prorl.lifecycle.batches import Batches, batch_file, read_batch, read_trainer_logprobs, stored_batch
from nemo_prorl.lifecycle.journal_events import Reset
from nemo_prorl.lifecycle.ledger import Ledger, read_ledger
from nemo_prorl.lifecycle.ledger_diff import Norms, Parting, parting
from nemo_prorl.metrics import Metrics
from nemo_prorl.planning.bisect import norms_of, other_settings
from nemo_prorl.trainer import Trainer
from tests.lifecycle.faults import Killed, killed_at
from tests.lifecycle.small_run import SmallRun, config
from tests.lifecycle.small_store import SmallStore
from tests.whole_runs import metrics_of

AT = 3  # step of the planted faults
Plant = Callable[[SmallRun, Trainer], None]


def whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prepare: Plant = lambda run, trainer: None, **grpo: Any
) -> SmallRun:
    run = SmallRun(config(folder, ResetsConfig(at_steps=[4]), **{"max_steps": 6, **grpo}))
    run.process(monkeypatch, lambda trainer: prepare(run, trainer))
    return run


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A finished run without faults, which tests only read."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return whole(tmp_path_factory.mktemp("clean"), monkeypatch)


def lines_of(run: SmallRun) -> dict[int, dict[str, Any]]:
    return read_ledger(run.folder)


def test_equal_runs_have_equal_ledgers_also_if_one_is_killed(
    clean: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = SmallRun(config(tmp_path / "second", ResetsConfig(at_steps=[4]), max_steps=6))
    with killed_at("reset:reference", monkeypatch), pytest.raises(Killed):
        second.process(monkeypatch, lambda trainer: None)
    second.process(monkeypatch, lambda trainer: None)
    assert list(lines_of(clean)) == [1, 2, 3, 4, 5, 6]
    assert lines_of(clean) == lines_of(second)
    chain = ""
    for line in lines_of(clean).values():
        text = json.dumps([chain, line["objects"]], separators=(",", ":"))
        chain = hashlib.sha256(text.encode()).hexdigest()[:16]
        assert line["chain"] == chain


def test_the_digests_of_responses_are_in_their_order_on_any_number_of_ranks(tmp_path: Path) -> None:
    value_BT = torch.rand(5, 3)
    lines = []
    for parts in ([[0, 1, 2, 3, 4]], [[3, 0], [4, 1, 2]]):
        ledgers: list[Ledger] = []
        ranks = SimpleNamespace(gather=lambda own, ledgers=ledgers: [ledger._rows for ledger in ledgers])
        folder = tmp_path / str(len(parts))
        folder.mkdir()
        for rows in parts:
            ledgers.append(Ledger(folder, not ledgers, SimpleNamespace(data_ranks=ranks)))
            ledgers[-1].responses(torch.tensor(rows), old_logp=value_BT[rows])
        for ledger in ledgers:
            ledger.end(Metrics(1, "none"))
        lines.append(read_ledger(folder))
    assert len(lines[0][1]["objects"]["old_logp"]) == 40
    assert lines[0] == lines[1]


def test_a_line_has_the_settings_of_each_update_and_a_step_without_groups_has_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: SmallRun, trainer: Trainer) -> None:
        run.cfg.model["optim"]["sched"] = {"name": "linear", "warmup_steps": 2}
        change_batch(run, lambda batch: replace(batch, groups=[]))

    run = whole(tmp_path, monkeypatch, prepare)
    lines, metrics = lines_of(run), {line["step"]: line for line in run.lines()}
    assert list(lines) == [1, 2, 3, 4, 5, 6]
    assert lines[AT]["draws"] == []
    for step, line in lines.items():
        outcomes = [outcome for _, outcome in line["outcomes"]]  # also of dropped groups
        assert outcomes.count("solved") / len(outcomes) == metrics[step]["solved/all"]
        assert outcomes.count("unsolved") / len(outcomes) == metrics[step]["unsolved/all"]
    rates = {step: metrics[step]["policy/lr"] for step in (1, 2, 4, 5, 6)}
    assert len(set(rates.values())) > 2
    for step, rate in rates.items():
        own = [value for name, value in lines[step]["objects"].items() if name.endswith("/settings")]
        assert own == [{"lr": repr(rate), "entropy_coef": repr(run.cfg.trainer.grpo.entropy_coef)}] * 2


# --- planted faults --------------------------------------------------------------------------------------------------


def at_step(trainer: Trainer, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Let `change(original, *arguments)` take the place of a method in its calls of step AT."""
    original, early = getattr(owner, name), name in ("generate", "begin")  # called before the step counts

    def changed(*given: Any, **named: Any) -> Any:
        is_due = trainer.progress.step + early == AT
        return change(original, *given, **named) if is_due else original(*given, **named)

    setattr(owner, name, changed)


def another_seed(run: SmallRun, trainer: Trainer) -> None:
    async def generate(original: Any, prompt_ids: Any, seeds: Any, *rest: Any, **named: Any) -> Any:
        return await original(prompt_ids, [seeds[0] ^ 1, *seeds[1:]], *rest, **named)

    at_step(trainer, run.engines, "generate", generate)


def another_verdict(run: SmallRun, trainer: Trainer) -> None:
    def changed(batch: Any) -> Any:
        verdicts = list(batch.groups[0].verdicts)
        verdicts[1] = {**verdicts[1], "score": 0.5}
        return replace(batch, groups=[replace(batch.groups[0], verdicts=verdicts), *batch.groups[1:]])

    change_batch(run, changed)


def change_batch(run: SmallRun, change: Callable[[Any], Any]) -> None:
    take = run.collector.take

    def taken(step: int, version: int) -> Any:
        return change(take(step, version)) if step == AT else take(step, version)

    run.collector.take = taken  # type: ignore[method-assign]


def swapped_rows(run: SmallRun, trainer: Trainer) -> None:
    def logprobs(original: Any, batch: Any) -> Any:
        logp_BT, entropy_BT = original(batch)
        order = torch.arange(len(logp_BT))
        order[[0, 1]] = order[[1, 0]]
        return logp_BT[order], entropy_BT

    at_step(trainer, run.policy, "logprobs", logprobs)


def stale_tensor(run: SmallRun, trainer: Trainer) -> None:
    async def announce(original: Any, path: str, version: int) -> None:
        before = run.engines.logits_VV.clone()
        await original(path, version)
        run.engines.logits_VV[:, :4] = before[:, :4]

    original = run.engines.announce

    async def changed(path: str, version: int) -> None:
        await (announce(original, path, version) if version == AT - 1 else original(path, version))

    run.engines.announce = changed  # type: ignore[method-assign]


def flipped_bit(run: SmallRun, trainer: Trainer) -> None:
    def begin(original: Any) -> Any:
        with torch.no_grad():
            run.policy.weights["head"].view(torch.int32)[3, 3] ^= 1
        return original()

    at_step(trainer, trainer.ledger, "begin", begin)


def other_order_of_sums(run: SmallRun, trainer: Trainer) -> None:
    def update(original: Any, batch: Any, loss: Any, *given: Any, **named: Any) -> Any:
        def scaled(*parts: Any) -> Any:
            value, sums = loss(*parts)
            return value * (1 + 2e-7), sums

        return original(batch, scaled, *given, **named)

    at_step(trainer, run.policy, "update", update)


def learning_rate(run: SmallRun, trainer: Trainer) -> None:
    def set_rate(original: Any, lr: float) -> None:
        original(2 * lr)

    at_step(trainer, run.policy, "set_learning_rate", set_rate)


def rounded_head(run: SmallRun, trainer: Trainer) -> None:
    def logprobs(original: Any, batch: Any) -> Any:
        logp_BT, entropy_BT = original(batch)
        return logp_BT.bfloat16().float(), entropy_BT

    at_step(trainer, run.policy, "logprobs", logprobs)


def temperature(run: SmallRun, trainer: Trainer) -> None:
    async def generate(original: Any, prompt_ids: Any, seeds: Any, sampling: Any, *rest: Any, **named: Any) -> Any:
        return await original(
            prompt_ids, seeds, replace(sampling, temperature=1.1 * sampling.temperature), *rest, **named
        )

    at_step(trainer, run.engines, "generate", generate)


def dropped_group(run: SmallRun, trainer: Trainer) -> None:
    change_batch(run, lambda batch: replace(batch, groups=batch.groups[1:]))


def other_reference(run: SmallRun, trainer: Trainer) -> None:
    def reference_logprobs(original: Any, batch: Any) -> Any:
        return run.policy.logprobs(batch)[0]

    at_step(trainer, run.policy, "reference_logprobs", reference_logprobs)


def other_moment(run: SmallRun, trainer: Trainer) -> None:
    def update(original: Any, *given: Any, **named: Any) -> Any:
        state = run.policy.adam.state[run.policy.weights["head"]]
        state["exp_avg"][0, 0] += 1e-3
        return original(*given, **named)

    at_step(trainer, run.policy, "update", update)


# fault: (phase, object, beginning of the kind)
FAULTS: dict[Plant, tuple[str, str, str]] = {
    another_seed: ("sampling", "first", "sampling: another seed"),
    another_verdict: ("rewards", "verdicts", "reward"),
    swapped_rows: ("trainer", "old_logp", "trainer: the same values in other rows"),
    stale_tensor: ("sampling", "first", "sampling: temperature, or other weights in the engine"),
    flipped_bit: ("trainer", "weights", "trainer"),
    other_order_of_sums: ("trainer", "update 1/gradient", "order of sums"),
    learning_rate: ("trainer", "update 1/masters", "optimizer"),
    rounded_head: ("trainer", "old_logp", "trainer"),
    temperature: ("sampling", "first", "sampling: temperature, or other weights in the engine"),
    dropped_group: ("selection", "groups", "data"),
    other_reference: ("trainer", "ref_logp", "trainer"),
    other_moment: ("trainer", "update 1/moments", "optimizer"),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_in_its_step_phase_and_object(
    clean: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    second = whole(tmp_path, monkeypatch, plant)
    found = parting(lines_of(clean), lines_of(second), Norms(norms_of(clean.folder), norms_of(second.folder)))
    assert isinstance(found, Parting)
    phase, name, kind = FAULTS[plant]
    assert (found.step, found.phase, found.object) == (AT, phase, name), found.words()
    assert found.kind.startswith(kind), found.words()
    assert parting(lines_of(clean), lines_of(clean)) is None


def test_other_weights_of_the_loss_are_found(clean: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(*given: Any) -> Any:
        weight_BT, metrics = rollout_correction(*given)
        return 2 * weight_BT, metrics

    monkeypatch.setattr("nemo_prorl.trainer.rollout_correction", doubled)
    found = parting(lines_of(clean), lines_of(whole(tmp_path, monkeypatch)))
    assert found is not None
    assert (found.step, found.object) == (1, "weight")


def test_settings_that_differ_are_named_also_those_of_a_fork(tmp_path: Path) -> None:
    for name, resets in (("none", "false"), ("reset", "true")):
        (tmp_path / name).mkdir()
        cfg = settings.load([f"run_dir={tmp_path / name}", "chain.start_from=a", f"chain.hard_reset={resets}"])
        (tmp_path / name / "config.yaml").write_text(settings.resolved_yaml(cfg))
    assert other_settings(tmp_path / "none", tmp_path / "reset") == "chain.hard_reset=True (was False)"


# --- stored batches --------------------------------------------------------------------------------------------------


def test_the_newest_batches_are_kept_and_those_of_each_nth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(tmp_path, monkeypatch, max_steps=9, keep_batches=2, keep_batches_every=4)
    assert [step for step in range(1, 10) if stored_batch(run.folder, step)] == [4, 8, 9]
    groups = read_batch(run.folder, 8)
    assert [group.draw_index for group in groups] == lines_of(run)[8]["draws"]
    assert {file.stem for file in (run.folder / "batches").glob("trainer-*")} == {
        f"trainer-{step:06d}" for step in (4, 8, 9)
    }
    with pytest.raises(DataError, match=r"step 5 has no stored batch \(stored: 4, 8, 9\). Fix: keep more with"):
        read_batch(run.folder, 5)
    batch_file(run.folder / "batches", 8).write_bytes(b"short")
    with pytest.raises(DataError, match="step-000008.safetensors cannot be read"):
        read_batch(run.folder, 8)


def test_the_trainer_s_log_probabilities_are_stored_beside_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(tmp_path, monkeypatch, max_steps=3)
    groups = read_batch(run.folder, 3)
    stored = read_trainer_logprobs(run.folder, 3, groups)
    assert stored is not None
    gaps = [
        trainer - engine
        for logprobs, response in zip(stored, [r for g in groups for r in g.responses], strict=True)
        for trainer, engine in zip(logprobs, response.logprobs, strict=True)
    ]
    measured = metrics_of(run.folder)[2]
    assert measured["correction/mean_abs"] > 0.01
    assert statistics.fmean(map(abs, gaps)) == pytest.approx(measured["correction/mean_abs"], rel=0.03)
    assert max(map(abs, gaps)) == pytest.approx(measured["correction/max_abs"], rel=0.0626)
    run.cfg.trainer.grpo.old_logp, run.cfg.trainer.grpo.max_steps = "engine", 4
    run.process(monkeypatch, lambda trainer: None)
    assert read_trainer_logprobs(run.folder, 4, read_batch(run.folder, 4)) is None  # not measured in this step


def test_a_start_removes_the_batches_of_steps_that_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(tmp_path, monkeypatch, max_steps=4)
    for step in (4, 7):
        batch_file(run.folder / "batches", step).write_bytes(b"of an earlier attempt")
    whole(tmp_path, monkeypatch, max_steps=6)
    assert [step for step in range(9) if stored_batch(run.folder, step)] == [1, 2, 3, 4, 5, 6]


def test_batches_can_be_kept_for_ever(tmp_path: Path) -> None:
    batches = Batches(tmp_path, GRPOConfig(keep_batches=2, keep_batches_every=None), lambda step, what: None)
    for step in (1, 2, 3):
        batches.store(step, [])
    assert batches.keep() == [2, 3]
    for step in (4, 5, 6):
        batches.store(step, [])
    batches.wait()
    assert [step for step in range(7) if stored_batch(tmp_path, step)] == [2, 3, 5, 6]


def test_a_batch_that_cannot_be_written_alarms_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(groups: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batches_module, "encode", full)
    run = whole(tmp_path, monkeypatch)
    (told,) = run.alarms()
    assert "step-000001.safetensors was not written: No space left on device" in told
    assert len(run.lines()) == 6


def test_a_run_ends_only_when_its_last_batch_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(groups: Any) -> bytes:
        time.sleep(0.3)
        return b"groups"

    monkeypatch.setattr(batches_module, "encode", slow)
    run = whole(tmp_path, monkeypatch)
    assert stored_batch(run.folder, 6)


def test_a_batch_that_takes_too_long_does_not_keep_a_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches_module, "_WAIT_S", 0.05)
    monkeypatch.setattr(batches_module, "encode", lambda groups: time.sleep(1.0))
    batches = Batches(tmp_path, GRPOConfig(), lambda step, what: None)
    batches.store(1, [])
    batches.wait()
    assert "the last batch was not written within 0.05 s" in caplog.text


# --- replay ----------------------------------------------------------------------------------------------------------


def replayed(
    run: SmallRun, folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: int, last: int, **grpo: Any
) -> dict[int, Any]:
    """Return the ledger of a replay, in a new folder, of the run's steps after a checkpoint, or from its start (0)."""
    other = SmallRun(replace(run.cfg, trainer=replace(run.cfg.trainer, grpo=replace(run.cfg.trainer.grpo, **grpo))))
    policy = other._policy(monkeypatch)
    policy.checkpoint_files = lambda cfg: SmallStore(other.policy)
    monkeypatch.setattr(rank, "Policy", lambda cfg, run_dir: policy)
    folder.mkdir()
    path = run.folder / "checkpoints" / f"step-{checkpoint:06d}" if checkpoint else None
    lines = lines_of(run)
    resets: dict[int, Reset] = (
        {4: {"step": 4, "reason": "at_steps", "reference_sha256": ""}} if checkpoint < 4 < last else {}
    )
    chain = lines[checkpoint]["chain"] if checkpoint else ""
    replay_training.ReplaySpec(
        run_dir=str(run.folder),
        checkpoint=None if path is None else str(path),
        before=checkpoint,
        last=last,
        chain=chain,
        resets=resets,
    ).write(folder)
    replay_training.replay(other.cfg, folder)
    return read_ledger(folder)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A finished run whose entropy coefficient is state of a checkpoint."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        target = AdaptiveEntropyConfig(enabled=True, target=9.0)
        return whole(tmp_path_factory.mktemp("adaptive"), monkeypatch, adaptive_entropy=target)


@pytest.mark.parametrize("checkpoint", [0, 2, 4])
def test_steps_trained_again_have_the_same_digests_also_across_a_reset(
    adaptive: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: int
) -> None:
    again, lines = replayed(adaptive, tmp_path / "replay", monkeypatch, checkpoint, 6), lines_of(adaptive)
    assert len({str(line["objects"]["update 1/settings"]) for line in lines.values()}) > 1
    assert list(again) == list(range(checkpoint + 1, 7))
    assert {step: line["chain"] for step, line in again.items()} == {s: lines[s]["chain"] for s in again}


def test_another_setting_parts_where_it_has_an_effect(
    clean: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parting(lines_of(clean), replayed(clean, tmp_path / "replay", monkeypatch, 2, 3, clip_high=0.001))
    assert found is not None
    assert (found.step, found.object.partition("/")[2]) == (3, "gradient")
