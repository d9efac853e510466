"""`--from hub`, against a small server in the hub's place."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.hub_server import COMMIT, environment, serving
from tests.data.preparing import SUMS, manifest, records

pytestmark = pytest.mark.starts

REPO = "agentica-org/DeepScaleR-Preview-Dataset"
FILES = {"deepscaler.json": json.dumps(SUMS).encode(), "README.md": b"# not data\n"}


@pytest.fixture
def hub() -> Iterator[str]:
    with serving(REPO, FILES) as endpoint:
        yield endpoint


def prepare(folder: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemo_prorl.cli", "data", "prepare", *words, "--from", "hub", "--check", "0"]
    command += ["--out", str(folder / "out")]
    return subprocess.run(
        command, env=environment(folder / "cache", endpoint), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_data_set_of_the_hub(tmp_path: Path, hub: str) -> None:
    told = prepare(tmp_path, hub, "deepscaler")
    assert told.returncode == 0, told.stderr
    assert len(records(tmp_path / "out")) == len(SUMS)
    made = manifest(tmp_path / "out")
    assert (made["from"], made["repo"], made["commit"]) == ("hub", REPO, COMMIT)
    assert made["inputs"] == [
        {"file": "deepscaler.json", "sha256": hashlib.sha256(FILES["deepscaler.json"]).hexdigest(), "rows": 8}
    ]


def test_one_that_is_not_there_and_a_hub_that_is_not_there(tmp_path: Path, hub: str) -> None:
    told = prepare(tmp_path, hub, "eurus2-rl")
    assert told.returncode == 2
    assert "the hub has no data set PRIME-RL/Eurus-2-RL-Data" in told.stderr
    told = prepare(tmp_path, "http://127.0.0.1:9", "scp-116k", "--agreement", "none")
    assert told.returncode == 3
    assert "EricLu/SCP-116K cannot be fetched" in told.stderr
    assert "download *.jsonl and *.parquet of https://huggingface.co/datasets/EricLu/SCP-116K" in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "out").exists()
