"""A run from a Hugging Face folder, whose configuration says nothing else about the model."""

from pathlib import Path

import pytest

from tests.policy.models import MODELS, write_model
from tests.whole_runs import Job, events_of, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.nemo, pytest.mark.vllm, pytest.mark.timeout(600)]

# Code at the start of each process of the train environment: heads of 16 values are let through to the engine.
NO_CHECK = """
from nemo_prorl import checks
checks.CPU_HEAD_SIZES = (16,)
"""


@pytest.mark.parametrize("name", MODELS)
def test_actor_and_engine_compute_the_folder_s_model(name: str, root: Path, tmp_path: Path) -> None:
    """Qwen2, Qwen3, and Llama with tied embeddings and scaled rotary positions; vLLM on a CPU wants heads of 32."""
    write_model(tmp_path / "model", MODELS[name] | {"hidden_size": 128, "max_position_embeddings": 512})
    job = Job(
        root,
        tmp_path / "run",
        f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}",
        "trainer.warmup.steps=0",
        "trainer.grpo.max_steps=2",
        "trainer.trace_steps=[]",
        "trainer.resets.at_steps=[]",
        "trainer.grpo.context_tokens=256",
        "trainer.grpo.dynamic_sampling.enabled=false",  # random weights are never right
        "data.validation=[]",
    )
    assert job.wait() == 0, job.text()
    gaps = [metrics["engine_gap/mean_abs"] for metrics in metrics_of(job.run_dir)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4


def test_an_engine_that_cannot_compute_the_model_ends_the_start_with_its_exception(root: Path, tmp_path: Path) -> None:
    """vLLM has no attention kernel for heads of 16 values on a CPU, and says so at the first request."""
    write_model(tmp_path / "model", MODELS["llama_tied"] | {"max_position_embeddings": 512})
    (tmp_path / "sitecustomize.py").write_text(NO_CHECK)
    job = Job(
        root,
        tmp_path / "run",
        f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}",
        *("trainer.warmup.steps=0", "trainer.trace_steps=[]", "trainer.resets.at_steps=[]"),
        "trainer.grpo.context_tokens=256",
        faults=tmp_path,
    )
    assert job.wait() == 1, job.text()
    raised = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    assert f"engine-0 ended with status 70 ({raised}" in job.text()
    assert (
        f"prorl: engine-0 ended twice with the same exception before any response was generated: {raised}" in job.text()
    )
    assert job.text().count("starting it again") == 1
    [failure] = [event for event in events_of(job.run_dir) if event["event"] == "failure"]
    assert raised in failure["reason"]
