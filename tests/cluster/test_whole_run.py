"""A real run on several nodes, through sbatch, against the same run on one: NeMo-Aligner's model, vLLM, real verifiers.

The first step's rollouts are the same, because weights, prompts and seeds are; so its losses must be, and the weights
after its updates, but for the order of sums.
"""

from pathlib import Path

import pytest
import torch

from tests.background import Background
from tests.cluster.conftest import unless_there_is_no_slurm
from tests.cluster.whole import STEPS, recorded, run_on_nodes, saved_tensors
from tests.whole_runs import events_of, metrics_of, without_time

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(900)]

METRICS_RTOL, METRICS_ATOL = 1e-3, 1e-5
WEIGHTS_ATOL = 1e-4  # the largest update of a weight in the two steps is about 1e-3
# Of the layout and of what ran beside it, not of the maths.
OTHER = ("max_abs", "max_ratio", "min_ratio")


@pytest.fixture(scope="session")
def on_four_nodes(undisturbed: Path, background: Background) -> Path:
    """The small run's first steps on four nodes: four data-parallel ranks, an engine and a reward server a node."""
    unless_there_is_no_slurm()
    return background.result("on_four_nodes")


def assert_same_maths(one: Path, other: Path) -> None:
    for step in range(1, STEPS + 1):
        assert recorded(other, step) == recorded(one, step), f"rollouts of step {step}"
        here, there = (without_time(metrics_of(run)[step - 1]) for run in (one, other))
        assert here.keys() == there.keys()
        for key, value in here.items():
            if isinstance(value, float) and not key.endswith(OTHER):
                assert there[key] == pytest.approx(value, rel=METRICS_RTOL, abs=METRICS_ATOL), f"{key} of step {step}"
    folders = [run / "checkpoints" / f"step-{STEPS:06d}" for run in (one, other)]
    here, there = (saved_tensors(folder) for folder in folders)
    ours = {name for name in here if name.startswith(("model.", "reference."))}
    assert ours
    for name in ours:
        torch.testing.assert_close(there[name], here[name], rtol=0.0, atol=WEIGHTS_ATOL, msg=name)


def test_four_nodes_do_what_one_does(undisturbed: Path, on_four_nodes: Path) -> None:
    assert_same_maths(undisturbed, on_four_nodes)


def test_engines_and_reward_servers_are_on_every_node(on_four_nodes: Path) -> None:
    logs = on_four_nodes / "logs"
    for kind in ("trainer", "engine", "rewards"):
        assert sorted(path.name for path in logs.glob(f"{kind}-*.log")) == [f"{kind}-{k}.log" for k in range(4)]
    merged = (logs / "all.log").read_text()
    assert all(f"engine {k} serves" in merged for k in range(4))
    hosts = [path.read_text() for path in sorted((on_four_nodes / "endpoints").glob("rewards-*.json"))]
    assert [f"http://node{k}:" in text for k, text in enumerate(hosts)] == [True] * 4
    assert [e["event"] for e in events_of(on_four_nodes)][-1] == "finish"


@pytest.mark.slow
def test_tensor_and_pipeline_parallel_over_four_nodes(undisturbed: Path) -> None:
    unless_there_is_no_slurm()
    layout = ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    assert_same_maths(undisturbed, run_on_nodes(undisturbed, "tp2_pp2", 4, *layout))
