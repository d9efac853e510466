"""The whole command, killed and resumed: against a real HTTP server with the real reward service; with real engines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli
from nemo_prorl.deadlines import Deadline
from tests import paper_model
from tests.test_formats import against

pytestmark = pytest.mark.starts

ROOT = Path(__file__).resolve().parents[2]
VLLM = pytest.mark.skipif(not (ROOT / ".venv" / "rollout").is_dir(), reason="no rollout environment: make setup")


STARTED: "list[subprocess.Popen[str]]" = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Ends what a failed test left; the services of an evaluation end with it."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
    STARTED.clear()


def prorl(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "nemo_prorl.cli", "evaluate", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe))
    return STARTED[-1]


def ended(process: "subprocess.Popen[str]", seconds: float = 400) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def kill_after(process: "subprocess.Popen[str]", samples: Path, lines: int, seconds: float = 300) -> None:
    """SIGKILL once so many responses are stored."""

    def enough() -> bool:
        assert process.poll() is None, process.communicate()
        return samples.exists() and samples.read_bytes().count(b"\n") >= lines

    Deadline(seconds, f"{lines} lines in {samples}").wait_until(enough, every=0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def numbers(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results.json").read_text())
    assert against("evaluation-results", found) == []
    return {key: value for key, value in found.items() if key not in ("time", "model")}


class Address:
    """The server of `openai_server` in a process of its own."""

    def __init__(self, delay_s: float) -> None:
        command = [sys.executable, "-m", "tests.evaluation.openai_server", str(delay_s)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    @property
    def asked(self) -> int:
        """Responses that were asked for so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def address() -> Iterator[Address]:
    server = Address(0.03)
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.mark.slow
def test_killed_half_way_and_run_again_it_gives_the_same_and_asks_for_nothing_twice(
    address: Address, tmp_path: Path
) -> None:
    """SIGKILL at a real evaluation of an address, judged by the real reward server."""
    options = ["--model", "tiny", "--benchmarks", "laptop_gcd", "--limit", "20", "--samples", "8", "--requests", "4"]
    whole = prorl(address.url, *options, "--out", str(tmp_path / "whole"))
    broken = prorl(address.url, *options, "--out", str(tmp_path / "broken"))
    kill_after(broken, tmp_path / "broken" / "samples" / "laptop_gcd.jsonl", 30)
    code, out, err = ended(whole)
    assert code == 0, err
    assert "laptop_gcd" in out
    before = address.asked
    there = (tmp_path / "broken" / "samples" / "laptop_gcd.jsonl").read_bytes()
    code, _, err = ended(prorl(address.url, *options, "--out", str(tmp_path / "broken")))
    assert code == 0, err
    assert (tmp_path / "broken" / "samples" / "laptop_gcd.jsonl").read_bytes().startswith(there)
    assert address.asked - before == 160 - there.count(b"\n")
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert against("evaluation-manifest", manifest) == []
    assert numbers(tmp_path / "whole")["benchmarks"]["laptop_gcd"]["unjudged"] == 0


Wrong = Callable[..., tuple[int, str]]


@pytest.fixture
def wrong(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Wrong:
    """The exit code of the command in this process, and what it says: a start of its own costs a second or two."""

    def run(*words: str) -> tuple[int, str]:
        caplog.clear()
        try:
            code = cli.main(["evaluate", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err + caplog.text

    return run


def test_wrong_use_is_told(wrong: Wrong, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    code, err = wrong("nowhere", "--benchmarks", "aime42", *out)
    assert code == 2
    assert "aime42: no such benchmark" in err
    assert "laptop_gcd" in err
    (tmp_path / "config.json").write_text("{}")
    code, err = wrong(str(tmp_path), "--benchmarks", "aime24", *out)
    assert code == 4
    assert "aime24.jsonl" in err
    assert "--data DIR" in err
    assert wrong("http://127.0.0.1:1/v1", "--benchmarks", "laptop", *out)[0] == 2
    (tmp_path / "mine.jsonl").write_text('{"id": "a", "task": "math", "prompt": "?", "truth": {"answer": "1"}}\n')
    (tmp_path / "own.yaml").write_text("{task: maths, prompts: mine.jsonl}")
    paper_model.write(tmp_path)
    code, err = wrong(str(tmp_path), "--benchmarks", str(tmp_path / "own.yaml"), *out)
    assert code == 2
    assert f"{tmp_path}/own.yaml: task is 'maths': no reward plugin judges task 'maths'; known: code, " in err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def laptop_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The laptop job's model, untrained."""
    from nemo_prorl.data.laptop.model import build_base_model
    from nemo_prorl.evaluation.catalogue import catalogue, load_records
    from nemo_prorl.settings import load

    folder = tmp_path_factory.mktemp("model") / "laptop"
    texts = [record["prompt"] for record in load_records(catalogue()["laptop_gcd"], None)]
    build_base_model(folder, load(["cluster=laptop"]).model, 1, texts)
    return folder


@VLLM
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_with_real_engines_killed_resumed_and_done_again_by_its_manifest(laptop_model: Path, tmp_path: Path) -> None:
    options = [str(laptop_model), "--benchmarks", "laptop_gcd,laptop_arithmetic", "--limit", "30", "--samples", "8"]
    options += ["--max-response", "40", "--context", "128"]
    samples = tmp_path / "broken" / "samples" / "laptop_gcd.jsonl"
    broken = prorl(*options, "--out", str(tmp_path / "broken"), "rollout.max_num_seqs=8")
    kill_after(broken, samples, 60)
    there = samples.read_bytes()
    assert there.count(b"\n") < 240
    code, _, err = ended(prorl(*options, "--out", str(tmp_path / "broken")))
    assert code == 0, err
    assert samples.read_bytes().startswith(there[: there.rfind(b"\n") + 1])
    code, _, err = ended(prorl(*options, "--out", str(tmp_path / "whole"), "--engines", "2"))
    assert code == 0, err
    assert numbers(tmp_path / "broken") == numbers(tmp_path / "whole")
    served = [(tmp_path / "whole" / "logs" / f"engine-{k}.log").exists() for k in range(2)]
    assert served == [True, True]
    again = ["--manifest", str(tmp_path / "whole" / "manifest.json"), "--out", str(tmp_path / "again")]
    code, out, err = ended(prorl(*again))
    assert code == 0, err
    assert out.splitlines()[-1].startswith("equal to")
    (tmp_path / "whole" / "results.json").write_text(
        (tmp_path / "whole" / "results.json").read_text().replace('"unjudged": 0', '"unjudged": 1', 1)
    )
    code, out, _ = ended(prorl(*again))
    assert code == 1
    assert "numbers differ" in out
    code, _, err = ended(prorl(*options, "--temperature", "0.5", "--out", str(tmp_path / "whole")))
    assert code == 2
    assert "temperature 0.5 (there: 1.0)" in err


@VLLM
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_asked_to_stop_it_keeps_what_it_has(laptop_model: Path, tmp_path: Path) -> None:
    process = prorl(
        *(str(laptop_model), "--benchmarks", "laptop_gcd", "--samples", "64", "--out", str(tmp_path)),
        *("--max-response", "60", "rollout.max_num_seqs=4"),
    )
    samples = tmp_path / "samples" / "laptop_gcd.jsonl"
    Deadline(300, "responses").wait_until(lambda: samples.exists() and samples.read_bytes().count(b"\n") > 8)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 75
    assert "Run the same command to continue" in err
    assert not list((tmp_path / "endpoints").glob("engine-*.json"))
