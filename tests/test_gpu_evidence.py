"""The hardware proof on a CPU with tiny sizes: sections, limits, the page."""

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_evidence.py"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_evidence")


def prove(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the page of a small run."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--device=cpu", "--small", f"--out={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.split()]
    assert [file.suffix for file in files] == [".json", ".md"]
    return json.loads(files[0].read_text()), files[1].read_text()


def test_a_python_without_packages_skips_every_section(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [str(tmp_path / "bare" / "bin" / "python"), str(SCRIPT), f"--out={tmp_path}", "--name=bare"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(Path(done.stdout.split()[0]).read_text())
    assert {(one["state"], one["reason"]) for one in result["sections"].values()} == {
        ("skipped", "torch is not installed here")
    }
    assert result["machine"]["packages"]["torch"] is None


@pytest.mark.slow
@pytest.mark.nemo
def test_the_real_actor_works_in_bf16_and_the_chunked_kernel_agrees_and_needs_least(tmp_path: Path) -> None:
    result, page = prove(tmp_path, "--sections=actor,kernels", "--name=here")
    assert result["sections"]["actor"]["state"] == "done", page
    actor = {row["what"]: row for row in result["sections"]["actor"]["rows"]}
    built = actor["built"]
    assert (built["weights"], built["masters"], built["wrapper"]) == (
        "torch.bfloat16",
        "torch.float32",
        "Float16Module",
    )
    assert actor["update: forward, backward, optimizer"]["tokens_per_s"] > 0
    assert actor["reference, right after a hard reset"]["mean_logp_gap"] == 0
    assert actor["loaded, and the same update again"]["same_bits"]
    section = result["sections"]["kernels"]
    rows = {row["what"]: row for row in section["rows"]}
    measured = {what: row for what, row in rows.items() if "peak_bytes" in row}
    assert list(measured) == ["chunked, 16 tokens", "vocab-parallel softmax, restated", "naive"]
    for row in measured.values():
        assert row["logp_gap"] < 1e-5
        assert max(row["grad_hidden_gap"], row["grad_weight_gap"]) < 1e-5
    logits = 4 * rows["sizes"]["tokens"] * rows["sizes"]["words"]
    assert measured["chunked, 16 tokens"]["forward_peak_bytes"] < logits / 3  # 16 of 64 tokens, and no copy of them
    assert measured["naive"]["forward_peak_bytes"] > 2 * logits
    assert "| Log-probabilities and loss | done |" in page
    assert "its formula is restated" in page
    assert "Tiny sizes in float32" in page


def test_a_section_that_fails_or_hangs_keeps_its_rows(
    evidence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "gpu" / "section.py").write_text(
        "import json, sys, time\n"
        "open(sys.argv[2], 'a').write(json.dumps({'what': 'first', 'seconds': 0.5}) + '\\n')\n"
        "if sys.argv[1] == 'hangs':\n    time.sleep(60)\n"
        "raise RuntimeError('on purpose')\n"
    )
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    hung = evidence.run_section("hangs", {}, tmp_path, 2.0)
    broke = evidence.run_section("breaks", {}, tmp_path, 60.0)
    assert (hung["state"], broke["state"]) == ("timed out", "failed")
    assert [row["what"] for row in hung["rows"] + broke["rows"]] == ["first", "first"]
    assert "RuntimeError: on purpose" in broke["last_lines"][-1]
    page = importlib.import_module("gpu.page").page(
        {
            "date": "today",
            "machine": {"gpu": None, "host": "here", "packages": {"torch": "2", "vllm": None}},
            "small": False,
            "wheels": None,
            "sections": {
                "a": {"title": "A", **hung},
                "b": {"title": "B", **broke},
                "c": {"title": "C", "state": "skipped", "seconds": 0.1, "reason": "no|thing", "rows": []},
            },
        }
    )
    assert "| A | timed out |" in page
    assert "| B | failed |" in page
    assert "no\\|thing" in page
    assert "not installed: vllm" in page
    assert page.count("| first | 500.00 ms |") == 2


def test_a_package_that_is_missing_skips_a_section_also_where_its_parent_is_missing(evidence: Any) -> None:
    common = importlib.import_module("gpu.common")
    for name in ("surely_missing", "surely_missing.part"):
        with pytest.raises(common.Skipped, match=f"{name} is not installed here"):
            common.require("torch", name)


def test_live_tensors_are_counted_until_they_are_gone(evidence: Any) -> None:
    common = importlib.import_module("gpu.common")
    given = torch.ones(1000)
    with common.peak_bytes("cpu") as found:
        kept = given.view(10, 100) + 1  # 4,000 bytes; a view is nothing new
        for _ in range(3):
            gone = kept * 2  # 4,000 more, one at a time
            del gone
        kept.add_(1)
    assert found == [8000]


def test_the_wheels_are_those_of_the_train_environment() -> None:
    def pins(name: str) -> set[str]:
        return {line.split()[0].lower() for line in (ROOT / "setup" / name).read_text().splitlines() if "==" in line}

    assert pins("gpu-wheels.txt") <= pins("train.lock")
    assert len(pins("gpu-wheels.txt")) == 7


def test_wheels_are_unpacked_without_network_and_a_numpy_that_is_there_stays(evidence: Any, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    assert "holds no *.whl" in evidence.install(tmp_path / "wheels", tmp_path / "target")
    for name in ("numpy", "tiny_thing"):
        information = f"{name}-9.dist-info"
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-9-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "here = True\n")
            wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
            wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{information}/RECORD", "")
    assert evidence.install(tmp_path / "wheels", tmp_path / "target") is None
    assert (tmp_path / "target" / "tiny_thing.py").is_file()
    assert not (tmp_path / "target" / "numpy.py").exists()


def test_a_wrong_section_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--sections=kernel"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no such section; known: actor," in done.stderr


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_all_sections_run_or_say_why_not(tmp_path: Path) -> None:
    result, page = prove(tmp_path)
    states = {name: section["state"] for name, section in result["sections"].items()}
    assert {name: state for name, state in states.items() if state != "done"} == {"fp8": "skipped"}, page
    update = next(r for r in result["sections"]["mcore"]["rows"] if r["what"].startswith("update"))
    assert update["tokens_per_s"] > 0
    gaps = {row["what"]: row for row in result["sections"]["gap"]["rows"] if "mean_logp_gap" in row}
    assert list(gaps) == ["bf16, float32 heads", "bf16, 16-bit heads"]
    assert all(0 < gap["mean_logp_gap"] < 0.05 for gap in gaps.values())
    naps = [row for row in result["sections"]["engine"]["rows"] if "same_answers" in row]
    assert len(naps) == 5
    assert all(row["same_answers"] for row in naps)


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.timeout(600)
def test_the_fp8_section_runs_with_the_stand_in_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "te_stand_in"))
    result, page = prove(tmp_path, "--sections=fp8", "--name=stand-in")
    assert result["sections"]["fp8"]["state"] == "done", page
    ways = {row["what"]: row for row in result["sections"]["fp8"]["rows"] if "update_s" in row}
    assert list(ways) == ["bf16", "FP8 hybrid, tensorwise scales", "FP8 hybrid, delayed scales"]
    assert ways["bf16"]["mean_logp_gap"] == 0 < ways["FP8 hybrid, tensorwise scales"]["mean_logp_gap"]
    assert "a stand-in for Transformer Engine: no number of it means anything" in page
