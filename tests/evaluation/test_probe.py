"""`prorl probe`: its numbers, what it advises, its estimate, and a whole probe with a real engine."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_prorl import settings
from nemo_prorl.config import DataSource
from nemo_prorl.evaluation.probe import advice, estimate, facts, probe, table
from nemo_prorl.evaluation.sampling import BenchmarkWork
from tests.policy.models import MODELS, write_model
from tests.policy.test_model_folders import change_config


def source(*groups: Sequence[float | None], text: str = "<answer>1</answer>") -> dict[str, Any]:
    def response(score: float | None) -> dict[str, Any]:
        return {"text": text, "finished": bool(score), "tokens": 10, "score": score, "detail": ""}

    return {"source": "s", "groups": [{"responses": [response(score) for score in group]} for group in groups]}


def numbers(*groups: Sequence[float | None], task: str = "puzzles", **how: str) -> dict[str, Any]:
    return facts(source(*groups, **how), task)


def test_the_numbers_of_a_source() -> None:
    found = numbers([1.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.0, None])
    assert (found["prompts"], found["responses"], found["reward"]) == (4, 8, 4 / 7)
    assert (found["keep_rate"], found["solved"], found["pass_at_n"]) == (0.25, 0.25, 0.5)
    assert (found["cut_off"], found["without_form"], found["unjudged"], found["tokens"]) == (3 / 8, 0.0, 1 / 8, 10)
    assert numbers([1.0, 0.0], task="instructions")["without_form"] is None


@pytest.mark.parametrize(
    ("probed", "words"),
    [
        (numbers([1.0, None]), "could not be judged"),
        (numbers([0.0, 0.0, 1.0]), "trainer.grpo.max_response_tokens"),
        (numbers([1.0, 0.5], text="42"), "have no <answer>: state the form in the prompt"),
        (numbers([1.0, 1.0]), "harder problems"),
        (numbers(*[[0.5, 0.5]] * 9, [0.5, 1.0]), "only 10% of the groups carry a signal"),
        (numbers([0.5, 1.0]), "fits"),
    ],
)
def test_what_it_advises(probed: dict[str, Any], words: str) -> None:
    assert words in advice(probed)


def test_a_caution_about_eos_is_the_fix_for_responses_that_are_cut_off() -> None:
    assert advice(numbers([0.0, 0.0]), eos="FOLDER: set eos") == "100% of the responses are cut off: FOLDER: set eos"
    assert advice(numbers([0.5, 1.0]), eos="FOLDER: set eos").startswith("fits")


def test_the_estimate_draws_as_dynamic_sampling_does() -> None:
    cfg = settings.load(["trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=4"])
    cfg.data.train = [DataSource(name="s")]
    half = numbers([0.0, 1.0], [1.0, 1.0])
    assert estimate(cfg, [half], 2.0) == {"tokens_per_step": 640.0, "generation_s_per_step": 32.0, "tokens_per_s": 20.0}
    none = estimate(cfg, [numbers([0.0, 0.0])], 2.0)
    assert none["tokens_per_step"] is None
    cfg.trainer.grpo.dynamic_sampling.enabled = False
    assert estimate(cfg, [half], 2.0)["tokens_per_step"] == 320.0
    found = {"samples": 2, "sources": [{**half, "advice": "a"}], "estimate": none, "responses": []}
    assert "no group carries a signal, so no step would train" in table(found)


def run(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "nemo_prorl.cli", "probe", f"run_dir={tmp_path / 'run'}", *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.starts
def test_a_run_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert "Fix: prorl warmup" in found.stderr


@pytest.mark.starts
def test_a_small_model_that_would_be_warmed_up_has_one_fix(tmp_path: Path) -> None:
    write_model(tmp_path / "model", MODELS[next(iter(MODELS))] | {"hidden_size": 128, "max_position_embeddings": 512})
    model = f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}"
    few = "data.train=[{name: few, generator: reasoning_gym:chain_sum, size: 20}]"
    told = run(tmp_path, model, "trainer.grpo.context_tokens=8", "trainer.grpo.max_response_tokens=4", few).stderr
    assert told.count("Fix: trainer.warmup.steps=0; if they are untrained, leave it") == 1
    assert "the model before its warm-up is probed; `prorl warmup` with the same overrides would make it" in told
    assert "Fix: prorl warmup" not in told


@pytest.mark.slow
@pytest.mark.starts
def test_a_context_that_is_too_small_is_named_as_train_names_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model", MODELS[next(iter(MODELS))] | {"hidden_size": 128, "max_position_embeddings": 512})
    model = f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}"
    tiny = ("trainer.warmup.steps=0", "trainer.grpo.context_tokens=8", "trainer.grpo.max_response_tokens=4")
    few = "data.train=[{name: few, generator: reasoning_gym:chain_sum, size: 20}]"
    found = run(tmp_path, model, *tiny, "data.prompt=text", few)
    assert "trainer.grpo.context_tokens=8 leaves no room for a response to these prompts" in found.stderr
    assert "--context" not in found.stderr


@pytest.mark.starts
def test_a_probe_names_another_end_of_responses_as_their_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine runs: every response is cut off."""
    model = write_model(tmp_path / "model", MODELS[next(iter(MODELS))] | {"max_position_embeddings": 512})
    change_config(model, eos_token_id=7)

    async def cut_off(cfg: Any, out: Path, parts: list[BenchmarkWork], engines: Any, **_: Any) -> SimpleNamespace:
        for part in parts:
            for key in ((record["id"], sample) for record in part.records for sample in range(2)):
                part.store.lines[key] = {"response": "", "finished": False, "tokens": 9}  # type: ignore[typeddict-item]
                part.store.verdicts[key] = {"score": 0.0, "detail": ""}  # type: ignore[typeddict-item]
        return SimpleNamespace(sampling_s=1.0)

    monkeypatch.setattr("nemo_prorl.launcher.prepare.check_node", lambda *_, **__: None)
    monkeypatch.setattr("nemo_prorl.evaluation.run.local_engines", lambda *_: None)
    monkeypatch.setattr("nemo_prorl.evaluation.sampling.sample_and_judge", cut_off)
    few = "data.train=[{name: few, generator: reasoning_gym:chain_sum, size: 20}]"
    words = [few, "trainer.warmup.steps=0", "trainer.grpo.context_tokens=256", f"run_dir={tmp_path / 'run'}"]
    cfg = settings.load([*words, f"pretrained_checkpoint.restore_from_path={model}"])
    [found] = probe(cfg, tmp_path / "out", prompts=2, samples=2)["sources"]
    assert found["advice"].startswith("100% of the responses are cut off: ")
    assert "config.json has eos_token_id=7. A run ends a response only at the tokenizer's" in found["advice"]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_whole_probe(tmp_path: Path) -> None:
    """The model has random weights, so every response is wrong and has no answer."""
    name = next(iter(MODELS))
    write_model(tmp_path / "model", MODELS[name] | {"hidden_size": 128, "max_position_embeddings": 512})
    model = f"pretrained_checkpoint.restore_from_path={tmp_path / 'model'}"
    small = ("trainer.warmup.steps=0", "trainer.grpo.context_tokens=256", "trainer.grpo.samples_per_prompt=4")
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(settings.load([model, *small, "data.prompt=text"])))
    out = tmp_path / "out"
    found = run(tmp_path, f"--config={tmp_path / 'config.yaml'}", "--prompts=2", f"--out={out}")
    assert found.returncode == 0, found.stderr
    assert "no step would train" in found.stdout
    written = json.loads((out / "probe.json").read_text())
    assert [(one["prompts"], one["responses"], one["reward"]) for one in written["sources"]] == [(2, 8, 0.0)] * 5
    groups = written["responses"][0]["groups"]
    assert all(one["score"] == 0.0 and one["tokens"] for group in groups for one in group["responses"])
