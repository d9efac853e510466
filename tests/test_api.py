"""The Python API: what a run directory contains, and the calls behind the commands."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nemo_prorl
from nemo_prorl import api, settings
from nemo_prorl.errors import ConfigError, RunFailed
from tests.report.made import make_run


def test_a_run_is_read(tmp_path: Path) -> None:
    run = nemo_prorl.load_run(make_run(tmp_path / "run"))
    assert run.finished
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    assert run.config["seed"] == 1
    assert [event["event"] for event in run.journal][:2] == ["start", "validation"]
    assert run.steps == list(range(1, 13))
    assert {sample["verdict"]["score"] for sample in run.samples(3)} == {0.0, 0.25, 1.0}
    with pytest.raises(KeyError, match=r"step 99 has no stored responses; 12 steps have: 1 to 12"):
        run.samples(99)
    assert run.frame().loc[12, "kl"] == pytest.approx(0.011)


def test_an_unfinished_run_is_read_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 0)
    (folder / "summary.json").unlink()
    run = nemo_prorl.load_run(folder)
    assert (run.finished, run.metrics, len(run.frame())) == (False, [], 0)
    with pytest.raises(ConfigError, match="expected a run directory"):
        nemo_prorl.load_run(tmp_path)


def test_train_refuses_what_the_command_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.optim.lr"):
        nemo_prorl.train([f"run_dir={tmp_path / 'run'}", "lr=1"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("code", "finished"), [(0, True), (75, False), (1, None)])
def test_how_a_run_ended(code: int, finished: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({"finished": code == 0}))
    monkeypatch.setattr(api, "start", lambda overrides, config: (folder, code))
    if finished is None:
        with pytest.raises(RunFailed, match="ended with exit code 1; see .*all.log"):
            nemo_prorl.train()
    else:
        assert nemo_prorl.train().finished is finished


def test_evaluate_refuses_what_the_command_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such benchmark"):
        nemo_prorl.evaluate("model", ["acre", "nothing"], tmp_path / "out")
    with pytest.raises(ConfigError, match="temperature"):
        nemo_prorl.evaluate("model", "acre", tmp_path / "out", temperature=-1)

    async def in_a_notebook() -> None:
        with pytest.raises(ConfigError, match="an event loop runs here, as in a notebook"):
            nemo_prorl.evaluate("model", "acre", tmp_path / "out")

    asyncio.run(in_a_notebook())
    assert not (tmp_path / "out").exists()


class Anything:
    def method(self, prompt: Any, response: str, truth: Any) -> float:
        return 1.0


def half(prompt: Any, response: str, truth: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    "value",
    [1, 1e-6, True, None, "", "true", "1", "null", "a'b\\", "x\\'y", '"q"', "a, b: {c} = [d]", "two\nlines", "é"]
    + [[], {}, [1, "2", [None, 0.5]], [{"name": "x y", "options": {"a": [1]}, "size": None}]],
)
def test_a_value_of_python_is_the_value_of_its_override(value: Any) -> None:
    [override] = settings._parse(api._texts({"key": value}))
    assert (override.key_or_group, override.value()) == ("key", value)
    assert type(override.value()) is type(value)


def test_dictionaries_and_texts_are_overrides(tmp_path: Path) -> None:
    source = {"name": "mine", "path": tmp_path / "it's mine.jsonl"}
    tree: dict[str, Any] = {
        "cluster": "laptop",
        "run_dir": tmp_path,
        "trainer": {"grpo": {"max_steps": 7}, "resets": {"at_steps": (3, 5)}, "grpo.kl_coef": 0},
        "model.optim.lr": 3e-4,
        "data": {"train": [source], "validation": [], "templates": {"puzzles": "{problem} Answer: 'x'"}},
        "rewards": {"functions": {"mine": half}},
    }
    cfg = settings.load(api._texts([tree, "seed=5", {"data.retire_after": None}]))
    assert cfg == settings.load([*api._texts(tree), "seed=5"])
    assert (cfg.run_dir, cfg.seed, cfg.trainer.grpo.max_steps, cfg.trainer.grpo.kl_coef) == (str(tmp_path), 5, 7, 0)
    assert (cfg.trainer.resets.at_steps, cfg.model.optim.lr) == ([3, 5], 3e-4)
    assert (cfg.data.train[0].path, cfg.data.validation) == (str(source["path"]), [])
    assert cfg.data.templates.puzzles == tree["data"]["templates"]["puzzles"]
    assert cfg.rewards.functions == {"mine": f"{__file__}:half"}
    assert api._texts("seed=5") == ["seed=5"]
    with pytest.raises(ConfigError, match="seed=.*Anything.*: expected a text, number, path"):
        api._texts({"seed": Anything()})
    with pytest.raises(ConfigError, match="trainer.grpo.max_step"):
        nemo_prorl.train({"trainer": {"grpo": {"max_step": 2}}})


def test_the_overrides_of_the_page_make_a_configuration(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "units.py").write_text("def score(prompt, response, truth):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    made: list[Any] = []
    monkeypatch.setattr(nemo_prorl, "train", lambda overrides: made.append(settings.load(api._texts(overrides))))
    page = (root / "docs" / "reference" / "api_python.md").read_text()
    [code] = [block.split("```")[0] for block in page.split("```python\n") if block.startswith("from units import")]
    exec(code, {"nemo_prorl": nemo_prorl})
    [cfg] = made
    assert (cfg.trainer.grpo.max_steps, cfg.trainer.warmup.steps, cfg.data.train[0].name) == (20, 0, "units")
    assert cfg.rewards.functions == {"units": f"{tmp_path}/units.py:score"}


def test_evaluate_takes_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("nemo_prorl.evaluation.run.evaluate", asked.append)
    nemo_prorl.evaluate("model", "acre", tmp_path, {"rollout": {"max_num_seqs": 8}}, checkpoint=40)
    assert (asked[0].overrides, asked[0].checkpoint) == (("rollout.max_num_seqs=8",), "40")


def nested() -> Any:
    def inner(prompt: Any, response: str, truth: Any) -> float:
        return 1.0

    return inner


@pytest.mark.parametrize("function", [lambda prompt, response, truth: 1.0, nested(), Anything().method])
def test_a_reward_function_without_a_place_in_a_file_is_refused(function: Any) -> None:
    name = re.escape(function.__name__)
    with pytest.raises(
        ConfigError, match=f"rewards.functions.mine={name}: expected a function at the top level of a file"
    ):
        nemo_prorl.train({"rewards": {"functions": {"mine": function}}})


SCRIPT = """
import nemo_prorl
from nemo_prorl import api

def score(prompt, response, truth):
    return 1.0

"""


@pytest.mark.starts
def test_a_reward_function_of_the_script_that_runs_is_that_of_its_file(root: Path, tmp_path: Path) -> None:
    def ran(*command: str) -> "subprocess.CompletedProcess[str]":
        words, env = [sys.executable, *command], {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120)

    told = f"{SCRIPT}print(api._texts({{'rewards.functions.mine': score}}))"
    (tmp_path / "script.py").write_text(told)
    place = f"rewards.functions.mine='{tmp_path}/script.py:score'"
    assert ran("script.py").stdout == f"{[place]}\n"
    refused = ran("-c", told).stderr
    assert "rewards.functions.mine=score: expected a function of a file; got a function of a notebook" in refused
    assert "Fix: write def score(prompt, response, truth) into a file, and import it or name it as FILE.py" in refused

    (tmp_path / "mine.jsonl").write_text(json.dumps({"id": "1", "task": "mine", "prompt": "?", "truth": {}}) + "\n")
    data = {"train": [{"name": "mine", "path": "mine.jsonl"}], "validation": []}
    overrides = f"{{'data': {data}, 'trainer.warmup.steps': 0, 'rewards.functions.mine': score}}"
    (tmp_path / "script.py").write_text(f"{SCRIPT}nemo_prorl.train({overrides})\n")
    assert "script.py starts a run while workers import it" in (again := ran("script.py").stderr)
    assert 'Fix: start the run below `if __name__ == "__main__":`' in again


@pytest.mark.starts
def test_torch_does_not_warn_of_nemo_s_pynvml_after_the_import(root: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": ""}
    for code, warned in (("import torch", True), ("import nemo_prorl, torch", False)):
        command = [sys.executable, "-c", code]
        said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stderr
        assert ("pynvml package is deprecated" in said) is warned


def test_only_the_api_is_exported() -> None:
    assert dir(nemo_prorl) == ["Run", "__version__", "evaluate", "load_run", "train"]
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        nemo_prorl.trainn  # type: ignore[attr-defined]  # noqa: B018
