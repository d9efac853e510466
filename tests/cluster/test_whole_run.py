"""A real run on several nodes, through sbatch, against the same run on one: NeMo-Aligner's model, vLLM, real verifiers.

The first step's rollouts are the same, because weights, prompts and seeds are; so its losses must be, and the weights
after its updates, but for the order of sums.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from nemo_prorl.deadlines import Deadline
from tests.cluster.conftest import unless_there_is_no_slurm
from tests.cluster.emulated import Ended, cluster
from tests.cluster.whole import FIRST_STEPS, recorded, run_on_nodes, run_stage, saved_tensors
from tests.lines import read_lines
from tests.test_formats import against
from tests.whole_runs import STEPS, Job, events_of, metrics_of, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]

METRICS_RTOL, METRICS_ATOL = 1e-3, 1e-5
WEIGHTS_ATOL = 1e-4  # the largest update of a weight in the two steps is about 1e-3
# Of the layout and of what ran beside it, not of the maths.
OTHER = ("max_abs", "max_ratio", "min_ratio", "padding")


NODES = 2  # what lies between nodes is there; a slow test has four


@pytest.fixture(scope="session")
def stage_run(undisturbed: Path) -> Path:
    """A stage that begins from the finished run, on several nodes, and was stopped."""
    unless_there_is_no_slurm()
    return run_stage(undisturbed, NODES)


@pytest.fixture(scope="session")
def on_nodes(undisturbed: Path) -> Path:
    """The small run's first steps on several nodes."""
    unless_there_is_no_slurm()
    return run_on_nodes(undisturbed, "on_nodes", NODES)


def assert_same_maths(one: Path, other: Path, steps: int = FIRST_STEPS) -> None:
    for step in range(1, steps + 1):
        assert recorded(other, step) == recorded(one, step), f"rollouts of step {step}"
        here, there = (without_time(metrics_of(run)[step - 1]) for run in (one, other))
        assert here.keys() == there.keys()
        for key, value in here.items():
            if isinstance(value, float) and not key.endswith(OTHER):
                assert there[key] == pytest.approx(value, rel=METRICS_RTOL, abs=METRICS_ATOL), f"{key} of step {step}"
    folders = [run / "checkpoints" / f"step-{steps:06d}" for run in (one, other)]
    here, there = (saved_tensors(folder) for folder in folders)
    ours = {name for name in here if name.startswith(("model.", "reference."))}
    assert ours
    for name in ours:
        torch.testing.assert_close(there[name], here[name], rtol=0.0, atol=WEIGHTS_ATOL, msg=name)


def test_a_stage_begins_with_the_weights_of_the_one_before(undisturbed: Path, stage_run: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    first = events_of(stage_run)[0]
    assert (first["event"], first["stage"], first["step"]) == ("start", "run2", 0)
    assert first["start_from"] == str(undisturbed / "checkpoints" / f"step-{STEPS:06d}")
    assert first["weights_sha256"] == summary["weights_sha256"]
    scores = [[e for e in events_of(run) if e["event"] == "validation"] for run in (undisturbed, stage_run)]
    assert (scores[1][0]["step"], scores[1][0]["tasks"]) == (0, scores[0][-1]["tasks"])  # same weights, same seeds
    assert not (stage_run / "base").exists()


def test_a_stage_begins_with_a_hard_reset(undisturbed: Path, stage_run: Path) -> None:
    resets = [e for e in events_of(stage_run) if e["event"].startswith("reset")]
    assert [(e["event"], e["step"]) for e in resets] == [("reset_intent", 0), ("reset_commit", 0)]
    assert resets[1]["reference_sha256"] == json.loads((undisturbed / "summary.json").read_text())["weights_sha256"]
    kl = [m["kl"] for m in metrics_of(stage_run)]
    assert kl[0] == 0.0
    assert all(value > 1e-6 for value in kl[1:])
    assert {m["stage"] for m in metrics_of(stage_run)} == {"run2"}


def test_a_live_run_does_what_it_is_asked_stops_and_calls_on_event(stage_run: Path) -> None:
    events = [e for e in events_of(stage_run) if e["event"] in ("control", "stop")]
    assert [(e["event"], e.get("status")) for e in events] == [("control", "done"), ("stop", None)]
    assert events[0]["detail"] == f"checkpoint of step {events[0]['step']}"
    assert (stage_run / "checkpoints" / f"step-{events[1]['step']:06d}" / "state.json").is_file()
    assert metrics_of(stage_run)[-1]["step"] == events[1]["step"] < 40
    told = read_lines(stage_run.with_name("told.jsonl"))
    assert [e["event"] for e in told] == ["reset", "stop"]


def test_the_engines_of_all_nodes_have_the_weights_of_their_step(stage_run: Path) -> None:
    """After each update of ranks on two nodes."""
    for m in metrics_of(stage_run):
        assert 0.0 < m["engine_gap/mean_abs"] < 1e-5


@pytest.mark.slow
def test_nodes_do_what_one_does(undisturbed: Path, on_nodes: Path) -> None:
    assert_same_maths(undisturbed, on_nodes)


@pytest.mark.slow
def test_four_nodes_do_what_one_does(undisturbed: Path) -> None:
    unless_there_is_no_slurm()
    assert_same_maths(undisturbed, run_on_nodes(undisturbed, "on_four_nodes", 4))


def test_a_timeline_has_the_processes_of_all_nodes(stage_run: Path) -> None:
    trace = json.loads((stage_run / "traces" / "step-1.json").read_text())
    assert not against("trace", trace)
    assert not trace["otherData"]["missing"]
    wanted = {f"{kind}-{k}" for kind in ("trainer", "engine", "rewards") for k in range(NODES)}
    assert wanted <= set(trace["otherData"]["processes"])
    begins = [e["ts"] for e in trace["traceEvents"] if e["name"] == "updates"]
    assert len(begins) == NODES
    assert max(begins) - min(begins) < 1e6  # the ranks go in step


def test_engines_and_reward_servers_are_on_every_node(stage_run: Path) -> None:
    logs = stage_run / "logs"
    for kind in ("trainer", "engine", "rewards"):
        assert sorted(path.name for path in logs.glob(f"{kind}-*.log")) == [f"{kind}-{k}.log" for k in range(NODES)]
    merged = (logs / "all.log").read_text()
    assert all(f"engine {k} serves" in merged for k in range(NODES))
    hosts = [path.read_text() for path in sorted((stage_run / "endpoints").glob("rewards-*.json"))]
    assert [f"http://node{k}:" in text for k, text in enumerate(hosts)] == [True] * NODES


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_over_four_nodes(undisturbed: Path) -> None:
    unless_there_is_no_slurm()
    layout = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    assert_same_maths(undisturbed, run_on_nodes(undisturbed, "tp2_pp2", 4, *layout))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_nodes(root: Path, undisturbed: Path, on_nodes: Path) -> None:
    """Begun on several nodes, ended on one: prompts, weights, moments and reference are as if always there."""
    run = undisturbed.with_name("fewer_nodes")
    shutil.copytree(on_nodes, run)
    base = [f"pretrained_checkpoint.restore_from_path={undisturbed / 'base'}", "trainer.warmup.steps=0"]
    job = Job(root, run, *base, "trainer.num_nodes=1", "rollout.engines=1")
    assert job.wait() == 0, job.text()
    assert [e["step"] for e in events_of(run) if e["event"] == "resume"] == [FIRST_STEPS]
    assert_same_maths(undisturbed, run, steps=4)


@pytest.mark.slow
def test_a_chain_of_three_stages_goes_through_a_requeue_unattended(tmp_path: Path, root: Path) -> None:
    """Stage 2 is told that its time is nearly over; the third waits for it, however often it starts."""
    unless_there_is_no_slurm()
    folder, prorl = tmp_path / "chain", str(Path(sys.executable).with_name("prorl"))
    flags = f"--nodes=2 --gpus-per-node=0 --mem=0 --output={tmp_path}/%x.log"
    words = [f"run_dir={folder}", "cluster=slurm_dev", "data=domains", "trainer.num_nodes=2", "rollout.engines=2"]
    words += ["trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8", "trainer.warmup.steps=40"]
    words += ["chain.step_scale=0.01", "trainer.grpo.checkpoint_every=2", "rollout.max_num_seqs=64"]
    with cluster(nodes=2) as slurm:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        slurm.run(prorl, "launch", "--stages", "run1..run3", f"--sbatch={flags}", *words, env=environment)
        chain = json.loads((folder / "chain.json").read_text())["stages"]
        jobs = {stage["stage"]: int(stage["job"]) for stage in chain}
        deadline = Deadline(600, "a step of run2")
        deadline.wait_until(lambda: bool(metrics_of(folder / "run2")), every=0.1)
        slurm.scancel(jobs["run2"], "--batch", "--signal=USR1")
        ends = [slurm.wait(jobs[name], 600) for name in ("run1", "run2", "run3")]
        assert ends == [Ended("COMPLETED", 0, 0), Ended("COMPLETED", 0, 1), Ended("COMPLETED", 0, 0)]
        slurm.no_orphans()
        told = json.loads(slurm.run(prorl, "status", str(folder), "--json", env=environment))
    assert [stage["finished"] for stage in told["stages"]] == [True] * 3
    weights = [json.loads((folder / name / "summary.json").read_text())["weights_sha256"] for name in ("run1", "run2")]
    assert [events_of(folder / name)[0].get("weights_sha256") for name in ("run2", "run3")] == weights


@pytest.mark.slow
def test_a_stopped_stage_hands_over_to_the_next_at_a_checkpoint(tmp_path: Path, root: Path) -> None:
    """run3 is stopped on purpose, so Slurm cancels run4; `launch --from` submits it again."""
    unless_there_is_no_slurm()
    folder, prorl = tmp_path / "chain", str(Path(sys.executable).with_name("prorl"))
    flags = f"--nodes=1 --gpus-per-node=0 --mem=0 --output={tmp_path}/%x-%j.log"
    words = ["cluster=slurm_dev", "data=domains", "trainer.num_nodes=1", "rollout.engines=1", "rollout.max_num_seqs=64"]
    words += ["trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8", "trainer.warmup.steps=40"]
    words += ["trainer.grpo.checkpoint_every=1"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}

    def jobs() -> dict[str, int]:
        return {one["stage"]: int(one["job"]) for one in json.loads((folder / "chain.json").read_text())["stages"]}

    with cluster(nodes=1) as slurm:
        first = ["--stages", "run3..run4", "chain.after=null", f"run_dir={folder}", "trainer.grpo.max_steps=90"]
        slurm.run(prorl, "launch", *first, f"--sbatch={flags}", *words, env=environment)
        before = jobs()
        Deadline(600, "two steps of run3").wait_until(lambda: len(metrics_of(folder / "run3")) >= 2, every=0.1)
        slurm.run(prorl, "control", str(folder / "run3"), "stop", "--wait", "0", env=environment)
        assert slurm.wait(before["run3"], 300).code == 75
        assert slurm.wait(before["run4"], 60).state == "CANCELLED"
        picked = sorted((folder / "run3" / "checkpoints").glob("step-*"))[0]
        more = ["--from", str(picked), "--stages", "run4", "trainer.grpo.max_steps=2"]
        slurm.run(prorl, "launch", *more, f"--sbatch={flags}", *words, env=environment)
        assert jobs()["run3"] == before["run3"]
        assert slurm.wait(jobs()["run4"], 600) == Ended("COMPLETED", 0, 0)
        told = json.loads(slurm.run(prorl, "status", str(folder), "--json", env=environment))
    three, four = told["stages"]
    assert three["ended"].startswith("stopped by ")
    assert (four["from"], four["ended"]) == (f"run3, step {int(picked.name[5:])}", "done")
    assert events_of(folder / "run4")[0]["start_from"] == str(picked)


@pytest.mark.slow
def test_the_arms_of_a_fork_train_as_jobs(undisturbed: Path, tmp_path: Path, root: Path) -> None:
    """An arm whose job was cancelled is submitted again; after that the same command compares."""
    unless_there_is_no_slurm()
    out, prorl = tmp_path / "fork", str(Path(sys.executable).with_name("prorl"))
    flags = f"--nodes=1 --gpus-per-node=0 --mem=0 --output={tmp_path}/%x-%j.log"
    command = ["fork", str(undisturbed), "--checkpoint", "4", "--steps", "2", "--out", str(out), f"--sbatch={flags}"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}

    def jobs() -> list[int]:
        return [int(arm["job"]) for arm in json.loads((out / "fork.json").read_text())["arms"]]

    with cluster(nodes=1) as slurm:
        slurm.run(prorl, *command, env=environment)
        first, second = jobs()
        slurm.run("scancel", str(second))
        assert slurm.wait(second, 60).state == "CANCELLED"
        assert slurm.wait(first, 600) == Ended("COMPLETED", 0, 0)
        slurm.run(prorl, *command, env=environment)
        assert jobs()[0] == first
        assert slurm.wait(jobs()[1], 600) == Ended("COMPLETED", 0, 0)
        table = slurm.run(prorl, *command, env=environment).splitlines()
    assert [line.split()[0] for line in table[:3]] == ["arm", "none", "reset"]
    assert [event["event"] for event in events_of(out / "reset")].count("reset_commit") == 1
    assert "reset_commit" not in [event["event"] for event in events_of(out / "none")]
