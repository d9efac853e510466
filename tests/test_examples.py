"""The files of examples/: each runs in an empty folder, small."""

import json
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nemo_prorl
from nemo_prorl import api, settings
from tests.report.made import make_run
from tests.whole_runs import SMALL

SHORT = (
    "trainer.grpo.max_steps=2",
    "trainer.grpo.validate_every=2",
    "trainer.trace_steps=[]",
    "trainer.resets.at_steps=[]",
)
QUICK = ("trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=8", "rollout.kv_cache_mb=128", *SHORT)


def run_example(root: Path, folder: Path, name: str, *words: str) -> str:
    command = [sys.executable, str(root / "examples" / name), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_example_is_in_the_table_and_in_a_test(root: Path) -> None:
    names = {path.name for path in (root / "examples").glob("*.py")}
    table, tests = (root / "examples" / "README.md").read_text(), Path(__file__).read_text()
    assert names
    for name in names:
        assert f"[{name}]({name})" in table
        assert f'"{name}"' in tests


@pytest.mark.starts
def test_reading_a_run(root: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    shown = run_example(root, tmp_path, "read_run.py", str(run))
    assert "12 steps, finished: True" in shown
    assert "step    0  held-out mean reward 0.250 +- 0.020" in shown
    assert "score 1.0:" in shown
    assert (run / "three-curves.png").stat().st_size > 1000


@dataclass
class Field:
    """A field of a GGUF file, as gguf's reader gives it."""

    value: Any

    def contents(self) -> Any:
        return self.value


def test_the_tokenizer_of_a_gguf_file(root: Path) -> None:
    """Single digits, bytes without a leading blank, and whole special tokens, whose kind is 3."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "¯"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "12"]
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    fields = {
        "tokenizer.ggml.tokens": Field(tokens),
        "tokenizer.ggml.token_type": Field([3, 3, 3, *[1] * (len(tokens) - 3)]),
        "tokenizer.ggml.merges": Field(["h e", "1 2"]),
        "tokenizer.chat_template": Field(template),
    }
    tokenizer = runpy.run_path(str(root / "examples" / "smollm2.py"))["tokenizer_of"](fields)
    text = "<|im_start|>hen ï 12"
    ids = tokenizer(text)["input_ids"]
    assert [tokens[at] for at in ids] == ["<|im_start|>", "he", "n", "Ġ", "Ã", "¯", "Ġ", "1", "2"]
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>user\nhe<|im_end|>\n"


def test_the_pages_name_the_packages_of_the_model_and_a_present_folder_is_kept(root: Path, tmp_path: Path) -> None:
    script = root / "examples" / "smollm2.py"
    names = {package.partition("==")[0] for package in runpy.run_path(str(script))["PACKAGES"]}
    for name in ("explanation/real_model.md", "tutorial/model.md"):
        page = (root / "docs" / name).read_text()
        assert ".venv/train/bin/python examples/smollm2.py models/SmolLM2-135M-Instruct" in page
        assert all(name in page for name in names)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {tmp_path} exists. Fix: another FOLDER\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.starts
def test_own_data_goes_through_the_chat_template(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop's tokenizer has one, and the prepared prompts are messages."""
    made: list[Any] = []

    def train(overrides: Any) -> SimpleNamespace:
        made.append(overrides)
        return SimpleNamespace(finished=True, metrics=[{"reward/all": 0.5}])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nemo_prorl, "train", train)
    Path("sums.csv").write_text("problem,answer\n" + "".join(f"What is {n} plus 1?,{n + 1}\n" for n in range(30)))
    runpy.run_path(str(root / "examples" / "own_data.py"))["main"]("sums.csv", ["seed=7"])
    cfg = settings.load(api._texts(made[0]))
    assert (cfg.data.prompt, cfg.seed, cfg.data.train[0].path) == ("as_written", 7, "prepared/mine/train.jsonl")
    [first, *_] = Path(cfg.data.train[0].path).read_text().splitlines()
    assert json.loads(first)["prompt"][0]["role"] == "user"


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(900)
class TestRuns:
    def test_own_reward(self, root: Path, tmp_path: Path) -> None:
        shown = run_example(root, tmp_path, "own_reward.py", *QUICK)
        assert "share of vowels: " in shown
        assert "after 2 steps" in shown

    def test_own_data(self, root: Path, tmp_path: Path) -> None:
        rows = "".join(f"What is {n} plus {n + 1}?,{2 * n + 1}\n" for n in range(60))
        (tmp_path / "sums.csv").write_text("problem,answer\n" + rows)
        shown = run_example(root, tmp_path, "own_data.py", "sums.csv", "trainer.warmup.steps=0", *QUICK)
        assert "finished: True" in shown
        stored = next((tmp_path / "runs" / "mine" / "rollouts").glob("*.jsonl")).read_text().split("\n")[0]
        assert json.loads(stored)["prompt"][0]["role"] == "user"  # goes through the laptop's own chat template
        assert "\n  prompt: as_written\n" in (tmp_path / "runs" / "mine" / "config.yaml").read_text()

    def test_own_model(self, root: Path, tmp_path: Path, undisturbed: Path) -> None:
        model = str(undisturbed / "base")
        shown = run_example(root, tmp_path, "own_model.py", model, "trainer.warmup.steps=0", *SMALL, *SHORT)
        assert "before: mean reward" in shown
        assert "after: mean reward" in shown
        assert (tmp_path / "runs" / "own-model" / "model.safetensors").is_file()

    def test_seeds(self, root: Path, tmp_path: Path) -> None:
        shown = run_example(root, tmp_path, "seeds.py", *SMALL, *SHORT)
        assert "gain on held-out problems: " in shown
        assert (tmp_path / "runs" / "seeds" / "3" / "summary.json").is_file()
