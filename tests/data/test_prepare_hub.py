"""`--from hub`, against a small server in the hub's place."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_prorl.data.prepare.sources import SOURCES
from tests.data.hub_server import COMMIT, environment, serving
from tests.data.preparing import SUMS, made_anew, manifest, records

pytestmark = pytest.mark.starts

REPO = "agentica-org/DeepScaleR-Preview-Dataset"
FILES = {"deepscaler.json": json.dumps(SUMS).encode(), "README.md": b"# not data\n"}


def prepare(folder: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemo_prorl.cli", "data", "prepare", *words, "--from", "hub", "--check", "0"]
    command += ["--out", str(folder / "out")]
    return subprocess.run(
        command, env=environment(folder / "cache", endpoint), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_data_set_of_the_hub_at_its_pinned_commit(tmp_path: Path) -> None:
    asked: list[str] = []
    with serving(REPO, FILES, asked) as hub:
        told = prepare(tmp_path, hub, "deepscaler")
        assert told.returncode == 0, told.stderr
        pinned = f"/api/datasets/{REPO}/revision/{SOURCES['deepscaler'].revision}"
        assert {path.split("?")[0] for path in asked if path.startswith("/api/")} == {pinned}
        asked.clear()
        made_anew(tmp_path / "out")
        assert prepare(tmp_path, hub, "deepscaler", "--revision", "v2").returncode == 0
        assert f"/api/datasets/{REPO}/revision/v2" in {path.split("?")[0] for path in asked}
    assert len(records(tmp_path / "out")) == len(SUMS)
    made = manifest(tmp_path / "out")
    assert (made["from"], made["repo"], made["commit"]) == ("hub", REPO, COMMIT)
    assert made["inputs"] == [
        {"file": "deepscaler.json", "sha256": hashlib.sha256(FILES["deepscaler.json"]).hexdigest(), "rows": 8}
    ]


def test_without_a_pin_the_first_commit_is_recorded_and_used_again(tmp_path: Path) -> None:
    """A folder that lacks a file is made again from the recorded commit, from the cache if the hub is gone."""
    asked: list[str] = []
    repo = SOURCES["gpqa-open"].repo
    assert SOURCES["gpqa-open"].revision == ""
    row = {"record_id": "rec1", "question": "What is 2 plus 3?", "correct_answer": "5"}
    with serving(repo, {"data.jsonl": json.dumps(row).encode()}, asked) as hub:
        assert prepare(tmp_path, hub, "gpqa-open").returncode == 0
        assert f"/api/datasets/{repo}" in {path.split("?")[0] for path in asked}
        asked.clear()
        (tmp_path / "out" / "validation.jsonl").unlink()
        assert prepare(tmp_path, hub, "gpqa-open").returncode == 0
        assert {path.split("?")[0] for path in asked if path.startswith("/api/")} == {
            f"/api/datasets/{repo}/revision/{COMMIT}"
        }
    (tmp_path / "out" / "validation.jsonl").unlink()
    assert prepare(tmp_path, hub, "gpqa-open").returncode == 0  # the hub is gone
    assert manifest(tmp_path / "out")["commit"] == COMMIT


def test_without_network_the_message_says_what_to_fetch_and_how_to_go_on(tmp_path: Path) -> None:
    with serving(REPO, FILES) as hub:
        told = prepare(tmp_path, hub, "eurus2-rl")
    assert told.returncode == 2
    assert "the hub has no data set PRIME-RL/Eurus-2-RL-Data" in told.stderr
    told = prepare(tmp_path, "http://127.0.0.1:9", "aime25")
    assert told.returncode == 3
    source = SOURCES["aime25"]
    assert f"{source.repo} cannot be fetched" in told.stderr
    fetch = f"hf download {source.repo} --repo-type dataset --revision {source.revision} --include test.jsonl"
    assert f"`{fetch} --local-dir FOLDER/aime25`" in told.stderr
    assert f"`prorl data prepare aime25 --from FOLDER/aime25 --out {tmp_path / 'out'}`" in told.stderr
    told = prepare(tmp_path, "http://127.0.0.1:9", "scp-116k", "--agreement", "none")
    assert told.returncode == 3
    assert "hf download EricLu/SCP-116K --repo-type dataset --include '*.jsonl' '*.parquet'" in told.stderr
    assert "Traceback" not in told.stderr
    assert not (tmp_path / "out").exists()
