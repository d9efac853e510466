"""`--checkpoint newest, best, N` of evaluate, export-hf, probe, Python, on checkpoints that a real run wrote."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import nemo_prorl
from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation import models
from nemo_prorl.policy.tools import export_hf
from nemo_prorl.policy.weights import HFFolder, sha256_of

pytestmark = [pytest.mark.nemo, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def state_of(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of(run, step) / "state.json").read_text())
    return found


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """The finished run with checkpoints of steps 2 and 4, both validated; the test may change its state.json."""
    copy = tmp_path / "run"
    shutil.copytree(undisturbed, copy, copy_function=os.link, ignore=shutil.ignore_patterns("logs", "traces"))
    for step in (2, 4):
        file = folder_of(copy, step) / "state.json"
        text = file.read_bytes()
        file.unlink()
        file.write_bytes(text)
    return copy


def change(run: Path, scores: dict[int, float], **reset: int) -> None:
    """Give the newest checkpoint other scores, under the keys that the run wrote."""
    state = state_of(run, 4)
    assert set(state["validation"]["scores"]) == {"0", "2", "4"}
    for step, mean in scores.items():
        state["validation"]["scores"][str(step)]["all"]["mean"] = mean
    state["resets"]["done"][0].update(reset)
    (folder_of(run, 4) / "state.json").write_text(json.dumps(state))


def test_best_is_the_best_validation_of_all_that_are_kept(run: Path) -> None:
    scores = {int(step): one["all"]["mean"] for step, one in state_of(run, 4)["validation"]["scores"].items()}
    expected = max((2, 4), key=lambda step: (scores[step], step))
    assert models.find(run, "best") == ("run", folder_of(run, expected))
    change(run, {0: 0.9, 2: 0.5, 4: 0.4})  # step 0 has no checkpoint; the run's reset after step 2 hides nothing
    assert models.find(run, "best")[1] == nemo_prorl.load_run(run).best == folder_of(run, 2)
    change(run, {2: 0.4})
    assert nemo_prorl.load_run(run).best == folder_of(run, 4)
    state = state_of(run, 4)
    state["validation"]["scores"] = {}
    (folder_of(run, 4) / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"none of the steps 2, 4 of .* was validated. Fix: --checkpoint newest"):
        models.find(run, "best")


def test_a_rolled_back_checkpoint_has_the_score_of_its_weights(run: Path) -> None:
    change(run, {0: 0.1, 2: 0.9, 4: 0.4}, rolled_back_to=0)  # the checkpoint of step 2 has the weights of step 0
    assert nemo_prorl.load_run(run).best == folder_of(run, 4)


def test_what_is_exported_and_evaluated(
    run: Path, tmp_path: Path, prorl: Callable[..., "CompletedProcess[str]"]
) -> None:
    change(run, {2: 0.9, 4: 0.1})
    for which, step in (("best", 2), ("newest", 4), ("4", 4)):
        export_hf(run, tmp_path / which, which)
        assert sha256_of(HFFolder(tmp_path / which).tensors()) == state_of(run, step)["weights_sha256"]
    done = prorl("export-hf", str(run), str(tmp_path / "named"), "--checkpoint", "best")
    assert done.returncode == 0, done.stderr
    assert sha256_of(HFFolder(tmp_path / "named").tensors()) == state_of(run, 2)["weights_sha256"]
    options = {"samples": 1, "limit": 2, "max_response": 4}
    found = nemo_prorl.evaluate(run, "laptop_gcd", tmp_path / "evaluation", checkpoint="best", **options)  # type: ignore[arg-type]
    assert found["model"]["step"] == 2
    assert found["model"]["weights_sha256"] == state_of(run, 2)["weights_sha256"]
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = ["evaluate", str(run), "--benchmarks", "laptop_gcd", *words, "--out", str(tmp_path / "by command")]
    done = prorl(*command, "--checkpoint", "best")
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "by command" / "results.json").read_text())
    assert again["benchmarks"] == found["benchmarks"]


def test_what_is_probed(run: Path, tmp_path: Path, prorl: Callable[..., "CompletedProcess[str]"]) -> None:
    change(run, {2: 0.9, 4: 0.1})
    out = tmp_path / "probe"
    words = ["probe", f"run_dir={run}", "--config", str(run / "config.yaml"), "--prompts", "1", "--out", str(out)]
    for which, step in (("best", 2), ("newest", 4), ("4", 4)):
        done = prorl(*words, "--samples", "2", "--checkpoint", which)
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "probe.json").read_text())["model"] == str(folder_of(run, step))
        assert not (out / "model").exists()
    done = prorl(*words, "--checkpoint", "bset")
    assert done.returncode == 2
    assert "--checkpoint=bset" in done.stderr


@pytest.mark.parametrize("which", ["3", "bset"])
def test_a_checkpoint_that_is_not_there(run: Path, which: str, tmp_path: Path) -> None:
    told = f"--checkpoint={which}: expected newest, best, or one of the steps 2, 4"
    with pytest.raises(ConfigError, match=told):
        models.find(run, which)
    with pytest.raises(ConfigError, match=told):
        export_hf(run, tmp_path / "out", which)
    for folder in (folder_of(run, 2), run / "base"):  # has no choice
        with pytest.raises(ConfigError, match=f"--checkpoint={which}: expected a run directory"):
            models.find(folder, which)
    with pytest.raises(ConfigError, match="expected a run directory; got .*step-000002. Fix: leave it out"):
        export_hf(folder_of(run, 2), tmp_path / "out", which)
