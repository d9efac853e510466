"""Models by their name on the hub, against a small server in the hub's place."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_prorl.data.hub import _has_weights, _reason, model_folder
from nemo_prorl.errors import UnfitMachine
from tests import paper_model
from tests.data.hub_server import COMMIT, environment, serving

pytestmark = pytest.mark.starts

REPO = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": json.dumps(paper_model.CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "pytorch_model.bin": b"a pickle",
}
FOLDER = """
import sys
from nemo_prorl.data.hub import model_folder
print(model_folder(sys.argv[1], "MODEL", sys.argv[2] == "weights"))
"""


@pytest.fixture
def hub() -> Iterator[str]:
    with serving(REPO, FILES) as endpoint:
        yield endpoint


def run(cache: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    found = environment(cache, endpoint)
    return subprocess.run(
        [sys.executable, *words], env=found, cwd=cache, capture_output=True, text=True, timeout=120, check=False
    )


def files_of(told: subprocess.CompletedProcess[str]) -> set[str]:
    assert told.returncode == 0, told.stderr
    folder = Path(told.stdout.strip())
    assert folder.name == COMMIT
    return {file.name for file in folder.iterdir()}


def test_the_weights_are_fetched_when_they_are_needed(tmp_path: Path, hub: str) -> None:
    small = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert files_of(run(tmp_path, hub, "-c", FOLDER, REPO, "config")) == small
    assert files_of(run(tmp_path, hub, "-c", FOLDER, REPO, "weights")) == set(FILES) - {"pytorch_model.bin"}


def test_a_cached_model_needs_no_network(tmp_path: Path, hub: str) -> None:
    nowhere = "http://127.0.0.1:9"
    whole = files_of(run(tmp_path, hub, "-c", FOLDER, f"{REPO}@{COMMIT}", "weights"))
    assert files_of(run(tmp_path, nowhere, "-c", FOLDER, f"{REPO}@{COMMIT}", "weights")) == whole
    for file in tmp_path.rglob("model-00002*"):
        file.unlink()
    told = run(tmp_path, nowhere, "-c", FOLDER, f"{REPO}@{COMMIT}", "weights")
    assert "cannot be fetched" in told.stderr


def test_a_model_without_an_index_has_one_file_of_weights(tmp_path: Path) -> None:
    assert not _has_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert _has_weights(tmp_path)


@pytest.mark.parametrize("text", ["qwen", "models/qwen/base", "/nowhere/models/qwen", "models/.qwen", "a b/c"])
def test_what_is_no_name_on_the_hub_is_a_folder(text: str) -> None:
    assert model_folder(text, "MODEL", True) == Path(text)


def test_without_the_client_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnfitMachine, match="MODEL=qwen/small needs the package huggingface_hub .*: install it, or if"):
        model_folder("qwen/small", "MODEL", True)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("one\ntwo"), "one"),
        (OSError(), "OSError"),
        (OSError("x" * 200), "x" * 200),
        (OSError("x" * 201), "x" * 200 + " ..."),
        (OSError("word " * 60), "word " * 40 + "..."),
    ],
)
def test_a_reason_is_one_short_line(error: Exception, told: str) -> None:
    assert _reason(error) == told


def test_a_plan_by_name(tmp_path: Path, hub: str) -> None:
    words = ["-m", "nemo_prorl.cli", "plan", "cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={REPO}"]
    told = run(tmp_path, hub, *words)
    assert told.returncode == 0, told.stderr
    assert "28 layers x 1536" in told.stdout
    assert f"snapshots/{COMMIT}" in told.stdout
    assert not list(tmp_path.rglob("model-00001*"))
    # A start would load what the cache lacks.
    assert not list(tmp_path.rglob("tokenizer_config.json"))


def test_a_name_that_no_hub_has(tmp_path: Path, hub: str) -> None:
    for command in (["plan", "pretrained_checkpoint.restore_from_path=models/qwen"], ["import-hf", "models/qwen", "x"]):
        told = run(tmp_path, hub, "-m", "nemo_prorl.cli", *command)
        assert told.returncode == 2
        assert "=models/qwen: the hub has no model models/qwen; if models/qwen is a folder, correct" in told.stderr
    told = run(
        tmp_path,
        "http://127.0.0.1:9",
        "-m",
        "nemo_prorl.cli",
        "evaluate",
        "models/qwen",
        "--benchmarks=laptop",
        "--out=x",
    )
    assert told.returncode == 3
    assert "MODEL=models/qwen: models/qwen cannot be fetched. Fix: if models/qwen is a folder" in told.stderr
    assert told.stderr.rstrip().endswith("name the folder. Cause: no connection to the hub (ConnectionError)")
    assert "*.json, *.jinja, *.txt, *.model, *.safetensors of https://huggingface.co/models/qwen" in told.stderr
    assert "Traceback" not in told.stderr
