"""The hardware proof on a CPU with tiny sizes: sections, limits, the page."""

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl.errors import ConfigError
from nemo_prorl.settings import load
from nemo_prorl.sizing.memory import memory_of

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
    plan = {what: row["planned_bytes"] for what, row in actor.items() if "planned_bytes" in row}
    kept = ("weights", "gradients", "optimizer")  # the optimizer's moments, too, before any update
    assert plan["before the first update"] == sum(plan[f"plan: {part}"] for part in kept)
    assert 0 < actor["taken while awake and saving"]["measured_bytes"] < plan["taken while awake and saving"]
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
    assert "**Tiny sizes" in page
    assert re.search(r"\| update \(MFU\) \| 0\.\d\d of the peak \| at least 0\.35 of the peak \| shown only", page)
    assert 0 < actor["update: forward, backward, optimizer"]["peak_share"] < 1  # of a matrix product on this CPU
    assert "| decoding | - | at least 15,000 tokens/s | not measured: section steps was not chosen |" in page


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
            "gates": [],
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


def config_folder(evidence: Any, folder: Path) -> Path:
    """A model folder of the real size, without weights."""
    real, common = importlib.import_module("gpu.real"), importlib.import_module("gpu.common")
    (folder / "config.json").write_text(json.dumps(real.hf_config(common.Settings("cuda", small=False))))
    return folder


@pytest.mark.parametrize(("device_bytes", "cache"), [(84 * 10**9, 59.2e9), (150_123_456_789, 125.3e9)])
def test_the_engine_gets_the_memory_of_a_run_s_plan(
    device_bytes: int, cache: float, evidence: Any, tmp_path: Path
) -> None:
    """With 84 GB the sum that docs/howto/gpu.md prints."""
    engine = importlib.import_module("gpu.engine")
    memory, kv_mb = engine.plan(config_folder(evidence, tmp_path), device_bytes)
    assert kv_mb * 2**20 == pytest.approx(cache, abs=0.05e9)
    place = engine.Place("", tmp_path, tmp_path, memory, device_bytes, "cpu", [])
    rows: list[dict[str, Any]] = []
    engine.free(lambda what, **values: rows.append({"what": what, **values}), place, "now", "awake")
    assert rows[0]["free_bytes"] is None
    assert 0 <= rows[0]["planned_free_bytes"] < 2**20  # the cache takes what is left
    assert memory.trainer_resident == pytest.approx(11.3e9, abs=0.05e9)


def test_a_micro_batch_fits_one_gpu_of_80_gb_that_holds_the_whole_optimizer(evidence: Any, tmp_path: Path) -> None:
    real, common = importlib.import_module("gpu.real"), importlib.import_module("gpu.common")
    folder, settings = config_folder(evidence, tmp_path), common.Settings("cuda", small=False)
    real.config(settings, folder)  # with nemo_prorl's own layers
    te = ("model.transformer_engine=true", "rollout.device_memory_gb=84")
    assert memory_of(real.config(settings, folder, *te)).while_training < 84e9
    cluster = load(["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={folder}"])
    with pytest.raises(ConfigError, match="it fits with .* model.micro_batch_tokens=8192"):
        real.config(settings, folder, *te, f"model.micro_batch_tokens={cluster.model.micro_batch_tokens}")


def test_one_gpu_holds_the_cache_of_all_responses_of_a_step(evidence: Any, tmp_path: Path) -> None:
    real, steps = importlib.import_module("gpu.real"), importlib.import_module("gpu.steps")
    folder, settings = config_folder(evidence, tmp_path), importlib.import_module("gpu.common").Settings("cuda", False)
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "reward.py").write_text(steps.REWARD)
    one_h100 = ("model.transformer_engine=true", "rollout.device_memory_gb=84")
    cfg = real.config(settings, folder, *steps.job(tmp_path, settings), *one_h100)
    sequences = memory_of(cfg).sequences(84e9)
    assert sequences is not None
    assert sequences > cfg.trainer.grpo.prompts_per_step * cfg.trainer.grpo.samples_per_prompt == 256


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
@pytest.mark.timeout(3000)
def test_all_sections_run_or_say_why_not(evidence: Any, tmp_path: Path) -> None:
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
    verdicts = {row["gate"]: row["verdict"] for row in result["gates"]}
    gates = importlib.import_module("gpu.gates")
    kinds = {gate.name: gates.SHOWN if gate.speed else gates.PASSED for gate in gates.GATES}
    assert {name: verdict.split(":")[0] for name, verdict in verdicts.items()} == kinds, page
    steps = [row for row in result["sections"]["steps"]["rows"] if row["what"].startswith("step ")]
    assert len(steps) == 2 * 8
    lengths = [row["response_tokens"] for row in steps if "response_tokens" in row]
    assert 0.7 * 18.3 < sum(lengths) / len(lengths) < 1.3 * 18.3  # 20 tokens, cut off at 48
    shapes = [row["shapes"] for row in result["sections"]["widths"]["rows"] if "shapes" in row]
    assert shapes == [45, 23]


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
