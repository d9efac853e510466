"""The main job, end to end, as a user runs it: NeMo-Aligner's model, vLLM and real verifiers, small but whole."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from nemo_prorl import cli
from nemo_prorl.lifecycle.batches import batch_file, read_batch
from nemo_prorl.replay_training import OLDER
from nemo_prorl.report.audit import exact
from nemo_prorl.report.status import run_state, status
from nemo_prorl.report.step_groups import StoredStep
from nemo_prorl.rollout.group_arrays import encode
from tests.lines import read_lines
from tests.test_formats import against
from tests.whole_runs import (
    STEPS,
    Job,
    engine_process,
    events_of,
    metrics_of,
    run_disturbed,
    run_undisturbed,
    stopped_without_patience,
    without_time,
)

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_run_writes_what_the_contract_names(undisturbed: Path) -> None:
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "journal.jsonl",
        "summary.json",
        "curves.png",
        "rollouts/step-1.jsonl",
    ):
        assert (undisturbed / name).is_file(), name
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["finished"] is True
    assert summary["step"] == STEPS
    assert set(summary["heldout"]["tasks"]) >= {"chain_sum"}
    assert 0.0 < summary["time"]["reward_hidden_share"] <= 1.0
    assert [m["step"] for m in metrics_of(undisturbed)] == list(range(1, STEPS + 1))
    last = metrics_of(undisturbed)[-1]
    assert 0.05 < last["system/engine_gb"] < 20  # the newest sample may be of their start
    assert 0.05 < last["system/rank_gb"] < 20
    assert 0 < last["system/engine_kv_cache_peak"] <= 1
    assert last["time/rollout/preemptions"] == 0
    assert last["system/run_dir_gb"] > 0.001
    assert not (undisturbed / "endpoints" / "engine-0.json").exists() or not any(
        "rollout/engine/server.py" in " ".join(p.info["cmdline"] or [])
        and str(undisturbed) in " ".join(p.info["cmdline"])
        for p in psutil.process_iter(["cmdline"])
    )


def test_a_log_holds_no_lines_that_say_nothing(undisturbed: Path) -> None:
    log = (undisturbed / "logs" / "all.log").read_text()
    assert "trainer-0" in log
    for text in ("does not have field.name", "pynvml package is deprecated"):
        assert text not in log


def test_the_start_shows_what_it_waits_for(undisturbed: Path) -> None:
    shown = min(undisturbed.parent.glob(f"{undisturbed.name}.*.log")).read_text()
    waits = (
        "checking data and machine for",
        "starting the trainer, which imports NeMo, and the engines",
        "the model is built",
        "warm-up: 40 supervised steps",
        "ready: rollout engines: 1, reward servers: 1",
        f"the run starts with the weights of {undisturbed}/base",
        "validating the policy on held-out prompts before the first step",
        "step  reward  held-out",
    )
    places = [shown.index(text) for text in waits]
    assert places == sorted(places)


def test_the_engine_and_the_actor_agree(undisturbed: Path) -> None:
    for m in metrics_of(undisturbed):
        assert 0.0 < m["engine_gap/mean_abs"] < 1e-5  # of log-probabilities at T = 1.2, float32


@pytest.mark.parametrize("step", [STEPS - 1, STEPS])
def test_a_step_has_a_timeline_of_every_process(undisturbed: Path, step: int) -> None:
    trace = json.loads((undisturbed / "traces" / f"step-{step}.json").read_text())
    assert not against("trace", trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metrics, seconds = metrics_of(undisturbed)[step - 1], trace["otherData"]["seconds"]
    assert not trace["otherData"]["missing"]
    assert not (undisturbed / "traces" / f"step-{step}.parts").exists()
    plugins = {"puzzles", "math", *(["math_second"] if "second/judged/math" in metrics else [])}
    wanted = {"trainer-0", "engine-0", "rewards-0", *(f"reward worker {plugin}" for plugin in plugins)}
    assert set(trace["otherData"]["processes"]) == wanted
    assert {e["pid"] for e in spans} <= {e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    phases = {e["name"]: e for e in spans if e["cat"] == "phase"}
    begin, end = phases["rollout"]["ts"], phases["rollout"]["ts"] + phases["rollout"]["dur"]
    rolled = [e for e in spans if begin <= e["ts"] <= e["ts"] + e["dur"] <= end]  # all processes on one clock
    responses = [e for e in rolled if e["cat"] == "responses"]
    assert len(responses) == metrics["time/rollout/responses"]
    assert sum(e["args"]["tokens"] for e in responses) == metrics["rollout/generated_tokens"]
    canaries = sum(value for key, value in metrics.items() if key.startswith(("canaries/right/", "canaries/wrong/")))
    again = metrics.get("second/judged/math", 0.0)
    assert len([e for e in rolled if e["cat"] == "judgements"]) == len(responses) + canaries + again
    validated = "time/validate" in metrics  # every second step: its weights are in the engines when the next begins
    loaded = {f"load weights {k}" for k in (step - 1, step)} if validated else set()
    assert {e["name"] for e in spans if e["cat"] == "weights"} == loaded
    for name in ("publish", "rollout", "logprobs", "advantages", "updates", *(["validate"] if validated else [])):
        assert phases[name]["dur"] == pytest.approx(1e6 * metrics[f"time/{name}"], rel=0.02, abs=20_000)
    assert max(e["ts"] + e["dur"] for e in spans if e["cat"] == "phase") <= 1e6 * seconds


def test_what_holds_the_steps_up_is_told(undisturbed: Path) -> None:
    told = json.loads((undisturbed / "summary.json").read_text())["time"]["bottleneck"]
    assert told.startswith("engines ")
    assert run_state(undisturbed)["bottleneck"] == told
    assert told in status(undisturbed)


def test_a_hard_reset_makes_kl_zero(undisturbed: Path) -> None:
    kl = {m["step"]: m["kl"] for m in metrics_of(undisturbed)}
    assert kl[1] == 0.0
    assert kl[2] > 1e-6
    assert kl[3] == 0.0  # the step after the reset
    assert kl[4] > 1e-6
    events = [e["event"] for e in events_of(undisturbed) if e["step"] == 2]
    assert events[-2:] == ["reset_intent", "reset_commit"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert [r["step"] for r in summary["resets"]] == [2]
    assert summary["resets"][0]["reference_sha256"] == summary["reference_sha256"]
    assert summary["weights_sha256"] != summary["reference_sha256"]


def test_a_hard_reset_empties_the_optimizer(undisturbed: Path) -> None:
    """The checkpoint after the reset of step 2 has no moments and no steps; that of step 4 has those of two steps."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    found = {}
    for step in (2, STEPS):
        reader = FileSystemReader(undisturbed / "checkpoints" / f"step-{step:06d}")
        sizes: dict[str, Any] = reader.read_metadata().state_dict_metadata
        moments = {key: torch.full(about.size, torch.nan) for key, about in sizes.items() if "exp_avg" in key}
        load(dict(moments), storage_reader=reader, no_dist=True)
        common = torch.load(undisturbed / "checkpoints" / f"step-{step:06d}" / "common.pt", weights_only=False)
        counts = {float(group["step"]) for group in common["optimizer"]["optimizer"]["param_groups"]}
        found[step] = max(float(moment.abs().max()) for moment in moments.values()), counts
    assert found[2] == (0.0, {0.0})
    assert found[STEPS][0] > 0.0
    assert found[STEPS][1] == {2.0 * 4}  # updates_per_step is 4


def test_a_resume_names_only_the_checkpoint_of_its_weights(disturbed: Path) -> None:
    starts = (disturbed / "logs" / "all.log").read_text().split("the model is built")[1:]
    resumes = [text for text in starts if "continuing after step" in text]
    assert resumes
    assert not [text for text in resumes if "weights of" in text.partition("continuing after step")[0]]


def test_killed_and_resumed_is_equal_to_the_bit(undisturbed: Path, disturbed: Path) -> None:
    """Also what two runs of one configuration are to each other: one was killed, one was not."""
    assert_equal_to_the_bit(undisturbed, disturbed)


def assert_equal_to_the_bit(undisturbed: Path, disturbed: Path) -> None:
    """Between a run and the same one disturbed by `run_disturbed`."""
    wanted, found = metrics_of(undisturbed), metrics_of(disturbed)
    assert [without_time(m) for m in found] == [without_time(m) for m in wanted]
    summaries = [json.loads((run / "summary.json").read_text()) for run in (undisturbed, disturbed)]
    assert without_time(summaries[1]) == without_time(summaries[0])
    rollouts = [(run / "rollouts" / f"step-{STEPS}.jsonl").read_text() for run in (undisturbed, disturbed)]
    assert rollouts[0] == rollouts[1]
    assert (disturbed / "metrics.lost.jsonl").is_file()  # step 3 stood in no checkpoint
    resets = [(e["event"], e["step"]) for e in events_of(disturbed) if e["event"].startswith("reset")]
    # A reset that is killed before its checkpoint is complete is begun again.
    assert list(dict.fromkeys(resets)) == [("reset_intent", 2), ("reset_commit", 2)]


@pytest.mark.slow
def test_a_run_can_be_asked_why(undisturbed: Path, disturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal runs have equal ledgers; stored steps train again without engines, also across the reset after step 2."""
    assert cli.main(["bisect", str(undisturbed), str(disturbed)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"equal in steps 1 to {STEPS}\n")
    assert cli.main(["bisect", str(undisturbed), str(disturbed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert replay(undisturbed, 1, STEPS) == 0
    told, waits = capsys.readouterr()
    assert told.count(" equal ") == STEPS
    assert "starting the trainer, which imports NeMo (on a laptop" in waits
    assert not [word for word in ("engines", "weights of") if word in waits]
    logs = {log.stem for log in (undisturbed / "replays" / f"1-{STEPS}" / "logs").glob("*.log")}
    assert logs == {"all", "trainer-0"}
    assert replay(undisturbed, 3, 3, "--with", "model.optim.lr=1e-3") == 0
    assert "update 1/settings: lr (configuration)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_names_the_side_that_is_off(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = ["audit", str(undisturbed), "--step", "4", "--responses", "4"]
    assert cli.main(audit) == 0
    told = capsys.readouterr().out
    assert told.endswith("off: nothing\n")
    sides = dict(re.findall(r"^(engine|trainer|engine, given the tokens) +float32 +(\S+)", told, re.M))
    assert set(sides) == {"engine", "trainer", "engine, given the tokens"}
    assert all(0.0 < float(gap) < 1e-5 for gap in sides.values())
    gaps = {int(step): float(gap) for step, gap in re.findall(r"^(\d) +(\S+)$", told, re.M)}
    assert list(gaps) == [3, 2, 0]  # the replay begins with the checkpoint of step 2
    assert gaps[3] < 1e-5 < 1e-3 < min(gaps[2], gaps[0])
    page = (undisturbed / "audits" / "4" / "tokens.html").read_text()
    assert page.count("<h3>response ") == 4
    assert page.count("engine with weights 2 -") == page.count('title="engine -')
    assert cli.main(["report", str(undisturbed), "--step", "4", "--samples=-1"]) == 0
    whole = (undisturbed / "step-4.html").read_text()
    assert whole.count("<h3>response ") == 64
    advantages = re.findall("advantage (-?[0-9.e-]+)", whole)
    assert set(re.findall("advantage (-?[0-9.e-]+)", page)) <= set(advantages)
    assert len(set(advantages)) > 1
    assert whole.count(", trainer -") > 64  # the run has stored them
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    stored = StoredStep(run, 4)  # its engine had the weights of the step before
    fresh = {n: response for n, response in enumerate(stored.responses) if response[0].version == 3}
    nothing = {str(n): torch.zeros(0) for n in fresh}
    temperature = stored.cfg.trainer.grpo.temperature
    for one in exact(run / "audits" / "4" / OLDER, fresh, nothing, temperature):
        group, k = fresh[one.number]
        group.responses[k].logprobs[:] = one.exact.tolist()
    batch_file(run / "batches", 4).write_bytes(encode(stored.groups))
    monkeypatch.setattr("nemo_prorl.report.audit.train_again", lambda *_, **__: 0)  # as at the beginning
    assert cli.main(["audit", str(run), "--step", "4", "--responses", "4"]) == 1
    assert "off: engine: it had the weights after step 2: " in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_of_a_changed_batch_names_all_that_is_off(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    groups, file = read_batch(run, 3), batch_file(run / "batches", 3)
    group = next(group for group in groups if group.version == 2)
    group.responses[1].logprobs[:] = [logprob - 1.0 for logprob in group.responses[1].logprobs]
    group.verdicts[0]["score"] = 1.0 - float(group.verdicts[0]["score"] or 0.0)
    file.write_bytes(encode(groups))
    assert cli.main(["audit", str(run), "--step", "3", "--responses", "1"]) == 1
    told = capsys.readouterr().out
    beyond = "off: engine: 1 nats per token from float64, expected at most 0.001 in float32"
    right = "an engine with the weights after step 2 that is given the tokens is right: its decode was off"
    assert f"{beyond}; {right}" in told
    assert "off: trainer" not in told
    assert "off: rewards: 1 verdicts differ when the responses are judged again" in told
    assert "off: the step is not the same when it is trained again: step 3, sampling: " in told


def replay(run: Path, first: int, last: int, *options: str) -> int:
    """Return the exit code of `prorl replay-training`."""
    return cli.main(["replay-training", str(run), "--from", str(first), "--to", str(last), *options])


@pytest.mark.slow
def test_in_16_bits_killed_and_resumed_is_equal_to_the_bit(root: Path, tmp_path: Path) -> None:
    """The job of `cluster=laptop_bf16`: killed before the first checkpoint, in a hard reset and twice after it.

    In the reset its checkpoint is complete, and the journal does not know it yet: the commit is the resume's.
    """
    undisturbed = run_undisturbed(root, tmp_path, "cluster=laptop_bf16")
    for point in ("checkpoint:begin", "reset:checkpointed"):
        assert Job(root, tmp_path / "disturbed", "cluster=laptop_bf16", kill_at=point).wait() == 1
    assert [e["event"] for e in events_of(tmp_path / "disturbed")][-2:] == ["reset_intent", "failure"]
    assert_equal_to_the_bit(undisturbed, run_disturbed(root, undisturbed, "cluster=laptop_bf16"))
    metrics = metrics_of(undisturbed)
    assert [m["kl"] == 0 for m in metrics] == [True, False, True, False]  # the third comes after the reset
    assert all(1e-4 < m["engine_gap/mean_abs"] < 0.02 for m in metrics)  # both round, each in its own order
    weights = load_file(undisturbed / "base" / "model.safetensors")  # killed before a checkpoint it begins from these
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert replay(undisturbed, 1, STEPS) == 0


@pytest.mark.slow
def test_stops_that_give_up_change_nothing(root: Path, undisturbed: Path) -> None:
    """SIGTERM with no patience: in a rollout, in a validation, wherever it falls."""
    run = undisturbed.with_name("impatient")
    stops = stopped_without_patience(root, run, (0.1, 0.4, 0.9, 1.4, 2.0))
    assert stops[-1] == 0
    assert stops.count(75) >= 3
    assert [without_time(m) for m in metrics_of(run)] == [without_time(m) for m in metrics_of(undisturbed)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (undisturbed, run)]
    assert without_time(summaries[1]) == without_time(summaries[0])
    assert any("abandoned" in e["reason"] for e in events_of(run) if e["event"] == "stop")


@pytest.mark.slow
def test_an_engine_that_is_too_large_is_restarted_and_changes_nothing(root: Path, undisturbed: Path) -> None:
    """Every engine is larger than 0.2 GB, so each new one is restarted after a step."""
    run = undisturbed.with_name("recycled")
    job = Job(root, run, "rollout.recycle_gb=0.2")
    assert job.wait() == 0, job.text()
    assert "engine-0 is restarted on request" in job.log.read_text()
    assert [without_time(m) for m in metrics_of(run)] == [without_time(m) for m in metrics_of(undisturbed)]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (undisturbed, run)]
    assert without_time(summaries[1]) == without_time(summaries[0])


@pytest.mark.slow
def test_a_run_without_a_signal_says_why_shows_responses_and_stops(root: Path, undisturbed: Path) -> None:
    """Random weights without a warm-up are never right."""
    run = undisturbed.with_name("hopeless")
    hopeless = ["trainer.warmup.steps=0", "data.validation=[]", "trainer.grpo.max_response_tokens=2"]
    job = Job(root, run, *hopeless, "trainer.grpo.max_steps_without_signal=2")
    assert job.wait() == 75, job.text()
    _, alarm, stop = (e for e in events_of(run) if not e["event"].startswith("reset"))  # the job resets after step 2
    assert (alarm["event"], alarm["step"], stop["event"], stop["step"]) == ("alarm", 1, "stop", 2)
    assert alarm["what"].startswith("no group carries a signal: 100% of the groups have only wrong")
    reason = stop["reason"]
    assert reason.startswith("stopped after step 2: 2 steps in a row made no update")
    assert "trainer.grpo.max_response_tokens" in reason
    responses = read_lines(run / "rollouts" / "step-2.jsonl")
    assert responses
    assert {response["verdict"]["score"] for response in responses} == {0.0}
    job = Job(root, run, *hopeless, "trainer.grpo.max_steps_without_signal=2")
    assert job.wait() == 75, job.text()
    assert events_of(run)[-1]["step"] == 3  # the count goes on where it was
    job = Job(root, run, *hopeless, "trainer.grpo.max_steps_without_signal=0")
    assert job.wait() == 0, job.text()
    assert metrics_of(run)[-1]["step"] == STEPS


@pytest.mark.slow
def test_engines_that_sleep_change_nothing_and_one_that_is_killed_in_its_sleep_is_started_again(
    root: Path, undisturbed: Path
) -> None:
    job = Job(root, undisturbed.with_name("asleep"), "rollout.sleep=2")
    hold = job.run_dir / "endpoints" / "engines-asleep"
    job.until(lambda: len(metrics_of(job.run_dir)) >= 1)
    job.until(hold.exists)
    engine_process(job).kill()
    assert job.wait() == 0, job.text()
    assert [without_time(m) for m in metrics_of(job.run_dir)] == [without_time(m) for m in metrics_of(undisturbed)]
    assert all(m["time/rollout/sleep_s"] > 0 for m in metrics_of(job.run_dir))
    (alarm,) = [e for e in events_of(job.run_dir) if "did not wake" in e.get("what", "")]
    assert "engine-0 did not wake" in alarm["what"]
    assert "it was restarted and has weights" in alarm["what"]


@pytest.mark.slow
def test_an_automatic_reset_on_two_ranks_survives_a_kill(root: Path, undisturbed: Path) -> None:
    """Every course of the scores is a plateau to these rules; the first rank dies within the first reset."""
    run = undisturbed.with_name("automatic")
    rules = ["cooldown_steps=3", "plateau_steps=4", "plateau_gain=1", "plateau_sigma=0", "asks=[plateau]"]
    overrides = ["trainer.devices=2", "trainer.grpo.max_steps=8", "trainer.grpo.validate_every=1"]
    overrides += ["trainer.resets.at_steps=[]", "trainer.resets.mode=auto"]
    overrides += [f"trainer.resets.rules.{rule}" for rule in rules]
    first = Job(root, run, *overrides, kill_at="reset:optimizer")
    assert first.wait() == 1, first.text()
    assert [e["event"] for e in events_of(run)][-2:] == ["reset_intent", "failure"]
    again = Job(root, run, *overrides)
    assert again.wait() == 0, again.text()
    commits = [e for e in events_of(run) if e["event"] == "reset_commit"]
    assert commits
    assert commits[0]["reason"].startswith("plateau: ")
    kl = {m["step"]: m["kl"] for m in metrics_of(run)}
    assert sorted(kl) == list(range(1, 9))
    assert [step for step in kl if kl[step] == 0.0] == [1, *(e["step"] + 1 for e in commits if e["step"] < 8)]
    assert replay(run, 1, 8) == 0


@pytest.mark.slow
def test_an_advised_run_computes_what_a_manual_one_does(root: Path, undisturbed: Path) -> None:
    job = Job(root, undisturbed.with_name("advised"), "trainer.resets.mode=advise")
    assert job.wait() == 0, job.text()
    assert [without_time(m) for m in metrics_of(job.run_dir)] == [without_time(m) for m in metrics_of(undisturbed)]
    ends = [json.loads((run / "summary.json").read_text()) for run in (job.run_dir, undisturbed)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]


@pytest.mark.slow
def test_a_warm_up_alone(root: Path, tmp_path: Path) -> None:
    job = Job(root, tmp_path / "run", command="warmup")
    assert job.wait() == 0, job.text()
    assert (job.run_dir / "base" / "model.safetensors").is_file()


def test_a_finished_run_says_so(root: Path, undisturbed: Path) -> None:
    job = Job(root, undisturbed)
    assert job.wait(60) == 0
    assert "is finished" in job.text()


def test_other_overrides_are_refused(root: Path, undisturbed: Path) -> None:
    job = Job(root, undisturbed, "seed=7")
    assert job.wait(60) == 2
    assert "seed=7" in job.text()


@pytest.mark.slow
def test_a_clean_stop_and_a_longer_run(root: Path, disturbed: Path) -> None:
    """SIGTERM ends the run after its step with 75; the same command goes on, also to more steps than first asked."""
    longer = f"trainer.grpo.max_steps={STEPS + 40}"
    job = Job(root, disturbed, longer)
    job.until(lambda: len(metrics_of(disturbed)) > STEPS)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(120) == 75, job.text()
    steps = len(metrics_of(disturbed))
    assert STEPS < steps < STEPS + 40
    assert (disturbed / "checkpoints" / f"step-{steps:06d}" / "state.json").is_file()
    assert events_of(disturbed)[-1]["event"] == "stop"
