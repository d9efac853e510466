"""Commands with all their options, each in a process of its own: server, warm-up, doctor, evaluation, the hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.deadlines import Deadline
from tests.conftest import ROOT
from tests.data.hub_server import COMMIT, environment, serving
from tests.data.preparing import SUMS
from tests.evaluation.test_evaluate import Address
from tests.lines import write_lines
from tests.policy.models import QWEN2, write_model

pytestmark = pytest.mark.starts


def start(words: list[str], folder: Path, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "nemo_prorl.cli", *words]
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "OMP_NUM_THREADS": "1", **variables}
    with (folder / "said.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=log)


def output_of(words: list[str], folder: Path, **variables: str) -> str:
    process = start(words, folder, **variables)
    try:
        out, _ = process.communicate(timeout=700)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, (folder / "said.log").read_text()[-3000:]
    return out


SERVE = [
    *(
        "rewards",
        "serve",
        "--tasks",
        "math",
        "--workers",
        "1",
        "--token-file",
        "token",
        "--endpoint-file",
        "served.json",
    ),
    *("--host", "127.0.0.1", "--public-host", "here.example", "--port", "0", "--max-queue", "5", "--drain-s", "2"),
    *("--worker-memory-mb", "2048", "--unsafe-no-sandbox", "--settings", '{"math": {"time_budget_s": 3}}'),
]


def test_the_reward_server_with_all_its_options(tmp_path: Path) -> None:
    """It ends with the process that `--parent-pid` names."""
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    parent = subprocess.Popen(["sleep", "300"])
    server = start([*SERVE, "--parent-pid", str(parent.pid)], tmp_path)
    try:
        file = tmp_path / "served.json"

        def ready() -> bool:
            assert server.poll() is None, (tmp_path / "said.log").read_text()
            return file.exists() and json.loads(file.read_text())["state"] == "ready"

        Deadline(60, "the reward server").wait_until(ready, every=0.1)
        assert json.loads(file.read_text())["url"].startswith("http://here.example:")
        parent.kill()
        parent.wait()
        server.wait(60)
    finally:
        for process in (parent, server):
            process.kill()
            process.wait()
        assert server.stdout is not None
        server.stdout.close()


@pytest.mark.slow
def test_names_on_the_hub(tmp_path: Path) -> None:
    """A model to import, and a data set at a revision."""
    files = {file.name: file.read_bytes() for file in write_model(tmp_path / "model", QWEN2).iterdir()}
    with serving("some/model", files) as hub:
        output_of(["import-hf", "some/model", "imported"], tmp_path, **environment(tmp_path / "cache", hub))
    assert (tmp_path / "imported" / "state.json").is_file()
    repo = "agentica-org/DeepScaleR-Preview-Dataset"
    words = ["data", "prepare", "deepscaler", "--from", "hub", "--revision", COMMIT, "--out", "out", "--check", "0"]
    with serving(repo, {"deepscaler.json": json.dumps(SUMS).encode()}) as hub:
        output_of(words, tmp_path, **environment(tmp_path / "more", hub))
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["commit"] == COMMIT


WARMUP = ["warmup", "--config", "full.yaml", "trainer.warmup.steps=2", "run_dir=warm"]
DOCTOR = ["doctor", "--config", "full.yaml", "--nodes", "--srun", "{srun}", "--json", "--rollout-python", "{python}"]


@pytest.mark.slow
@pytest.mark.nemo
def test_a_warm_up(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(settings.resolved_yaml(settings.load([])))
    base = Path(output_of(WARMUP, tmp_path).strip())
    assert (tmp_path / base / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.vllm
def test_the_doctor_of_nodes(tmp_path: Path) -> None:
    """A stand-in for srun runs the probe as one node."""
    python = ROOT / ".venv" / "rollout" / "bin" / "python"
    if not python.exists():
        pytest.skip("no rollout environment: make setup")
    srun = write_script(tmp_path / "srun")
    (tmp_path / "full.yaml").write_text(settings.resolved_yaml(settings.load([])))
    lines = output_of([word.format(srun=f"{srun} --overlap", python=python) for word in DOCTOR], tmp_path).splitlines()
    checks = {check["name"]: check for check in map(json.loads, lines)}
    assert checks["rollout"]["state"] == "pass"
    assert any(name.startswith("node") for name in checks)


def write_script(file: Path) -> Path:
    """Runs what follows the options as another node would."""
    file.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nSLURMD_NODENAME=a exec "$@"\n')
    file.chmod(0o755)
    return file


EVALUATE = [
    *("evaluate", "{url}", "--model", "tiny", "--benchmarks", "laptop_gcd,laptop,aime24,own.yaml,mine.jsonl"),
    *("--data", "sets", "--limit", "2", "--samples", "2", "--temperature", "0", "--top-p", "0.9", "--context", "256"),
    *("--max-response", "30", "--seed", "5", "--requests", "2", "--token-env", "TOKEN", "--opens-thought"),
    *("--out", "one"),
]


@pytest.mark.slow
def test_an_address_is_evaluated_with_all_the_options(tmp_path: Path) -> None:
    """Names of benchmarks, a set, a file of each kind; then again by its manifest, and both compared."""
    record = {"id": "a", "task": "math", "prompt": "?", "truth": {"answer": "1"}}
    write_lines(tmp_path / "mine.jsonl", [record])
    (tmp_path / "sets").mkdir()
    write_lines(tmp_path / "sets" / "aime24.jsonl", [record])
    (tmp_path / "own.yaml").write_text("{task: math, prompts: mine.jsonl}\n")
    server = Address(0.0)
    try:
        output_of([word.format(url=server.url) for word in EVALUATE], tmp_path, TOKEN="secret")
        found = json.loads((tmp_path / "one" / "results.json").read_text())["benchmarks"]
        assert {"laptop_gcd", "laptop_arithmetic", "aime24", "own", "mine"} <= set(found)
        assert {(one["prompts"], one["samples"]) for one in found.values()} <= {(1, 2), (2, 2)}
        sampling = json.loads((tmp_path / "one" / "manifest.json").read_text())["benchmarks"]["aime24"]["sampling"]
        assert (sampling["temperature"], sampling["top_p"], sampling["context"]) == (0.0, 0.9, 256)
        again = output_of(["evaluate", "--manifest", "one/manifest.json", "--out", "two"], tmp_path)
        assert again.splitlines()[-1].startswith("equal to")
        assert "laptop_gcd" in output_of(["evaluate", "--compare", "one", "two", "--out", "both"], tmp_path)
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.nemo
@pytest.mark.timeout(1500)
def test_a_checkpoint_and_a_name_on_the_hub_are_evaluated(tmp_path: Path) -> None:
    """With an engine: `evaluate` of what `import-hf` wrote, and of a model that is fetched."""
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    model = write_model(tmp_path / "model", QWEN2 | {"hidden_size": 128, "max_position_embeddings": 512})
    write_lines(tmp_path / "mine.jsonl", [{"id": "a", "task": "math", "prompt": "?", "truth": {"answer": "1"}}])
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 0
    few = ["--benchmarks", "mine.jsonl", "--samples", "2", "--context", "64", "--temperature", "0.7", "--engines", "1"]
    with serving("some/model", {file.name: file.read_bytes() for file in model.iterdir()}) as hub:
        for name in ("imported", "some/model"):
            out = tmp_path / f"of-{Path(name).name}"
            output_of(["evaluate", name, *few, "--out", str(out)], tmp_path, **environment(tmp_path / "cache", hub))
            assert json.loads((out / "results.json").read_text())["benchmarks"]["mine"]["samples"] == 2
