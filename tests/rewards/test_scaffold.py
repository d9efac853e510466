"""`prorl rewards new`, and each command of docs/tutorial/plugins.md, run unchanged in an environment of its own.

The environment is an empty one over the present one: what is installed into it leaves no trace here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prorl_reward_math.plugin import MathReward

from nemo_prorl.data.records import read_records
from nemo_prorl.errors import ConfigError
from nemo_prorl.rewards.discovery import Registry
from nemo_prorl.rewards.scaffold import new_plugin
from tests.lines import read_lines
from tests.rewards.conftest import ROOT

pytestmark = pytest.mark.starts

DOCS = (ROOT / "docs" / "tutorial" / "plugins.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", DOCS, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
TRAIN_AT = next(at for at, line in enumerate(COMMANDS) if line.startswith("prorl train"))
# Overrides that make the run of docs/tutorial/plugins.md small.
SMALL = [
    "trainer.grpo.max_steps=2",
    "trainer.grpo.samples_per_prompt=4",
    "rollout.max_num_seqs=64",
    "rollout.kv_cache_mb=128",
    f"rollout.python={ROOT}/.venv/rollout/bin/python",
]


@dataclass
class Environment:
    """An environment over the present one, and a folder to work in."""

    folder: Path
    told: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """`python -m venv` without pip; pip, prorl and pytest are those of the present environment."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.bin.parent)], check=True, timeout=60)
        here = sysconfig.get_paths(vars={"base": str(self.bin.parent), "platbase": str(self.bin.parent)})["purelib"]
        present = sysconfig.get_paths()["purelib"]
        (Path(here) / "present.pth").write_text(f"import site; site.addsitedir({present!r})\n")
        for name, module in (("pip", "pip"), ("prorl", "nemo_prorl.cli"), ("pytest", "pytest")):
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec "{self.bin}/python" -m {module} "$@"\n')
            script.chmod(0o755)

    @property
    def bin(self) -> Path:
        return self.folder / "env" / "bin"

    def run(self, command: str, *more: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        words = [*shlex.split(command), *more]
        self.told[command] = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        return self.told[command]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The commands of docs/tutorial/plugins.md up to the training have been run; all went well."""
    made = Environment(tmp_path_factory.mktemp("plugin"))
    for command in COMMANDS[:TRAIN_AT]:
        told = made.run(command)
        assert told.returncode == 0, f"{command}: {told.stdout}\n{told.stderr}"
    return made


@pytest.mark.slow
def test_the_commands_of_the_page_make_install_and_test_a_plugin(environment: Environment) -> None:
    told = environment.told
    assert "with its tests and 32 prompt records" in told["prorl rewards new word_count"].stdout
    assert re.search(r"^word_count +ok +tasks word_count", told["prorl rewards list"].stdout, re.M)
    assert "rewards.plugins.word_count.max_chars" in told["prorl rewards describe word_count"].stdout
    assert re.search(r"\b\d\d passed in", told["pytest word_count"].stdout)
    assert "skipped" not in told["pytest word_count"].stdout


def test_the_page_shows_what_the_kit_says(environment: Environment) -> None:
    *lines, counts = environment.told["prorl rewards test word_count"].stdout.splitlines()
    assert counts == f"{len(lines)} passed, 0 failed, 0 skipped"
    assert {line.split()[0] for line in lines} == {"passed"}
    [shown] = [block for block in re.findall(r"^```text\n(.*?)^```", DOCS, re.M | re.S) if block.startswith("passed")]
    assert shown.splitlines() == lines[: len(shown.splitlines())]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DOCS.split("## 4.")[1].split("## 5.")[0], re.M)
    assert [name for row in rows for name in re.findall(r"\w+", row)] == [line.split()[1] for line in lines]


def test_an_installed_name_is_taken(environment: Environment) -> None:
    told = environment.run("prorl rewards new word_count --dir other")
    assert told.returncode == 2
    assert "plugin name 'word_count' is taken by an installed plugin" in told.stderr
    assert not (environment.folder / "other").exists()


def test_the_installed_plugin_judges_by_its_settings(environment: Environment) -> None:
    record = json.loads((environment.folder / "word_count" / "prompts.jsonl").read_text().splitlines()[0])
    request = {**record, "response": record["meta"]["target"], "finished": True}
    (environment.folder / "requests.jsonl").write_text(json.dumps(request))
    for settings, failure in (("{}", None), ('{"word_count": {"max_chars": 2}}', "invalid")):
        told = environment.run("prorl rewards score --in requests.jsonl --settings", settings)
        assert told.returncode == 0, told.stderr
        verdict = json.loads(told.stdout)
        assert (verdict["score"], verdict["failure"]) == (0.0 if failure else 1.0, failure)


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_run_trains_with_it_and_is_judged_again(environment: Environment) -> None:
    """The rest of the page: NeMo-Aligner's model, vLLM, the reward server with the new plugin, and reverify."""
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    told = environment.run(COMMANDS[TRAIN_AT], *SMALL, timeout=600)
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-5000:]
    run = environment.folder / "runs" / "word_count"
    metrics = read_lines(run / "metrics.jsonl")
    assert [sorted(key for key in m if key.startswith("reward/word")) for m in metrics] == [["reward/word_count"]] * 2
    assert json.loads((run / "summary.json").read_text())["heldout"]["tasks"].keys() == {"word_count"}
    rollouts = read_lines(run / "rollouts" / "step-1.jsonl")
    assert all(re.fullmatch(r"\d+ of \d words|the answer is empty", r["verdict"]["detail"]) for r in rollouts)
    assert any(r["verdict"]["score"] > 0 for r in rollouts)

    for command in COMMANDS[TRAIN_AT + 1 :]:
        told = environment.run(command)
        assert told.returncode == 0, f"{command}: {told.stdout}\n{told.stderr}"
    score, again, changed = COMMANDS[TRAIN_AT + 1 :]
    assert environment.told[score].stdout == ""
    verdicts = read_lines(environment.folder / "verdicts.jsonl")
    assert verdicts == [r["verdict"] for r in rollouts]
    [header, row] = environment.told[again].stdout.splitlines()  # nothing changed
    assert header in DOCS
    assert row.split()[3] == "0"
    rows = read_lines(environment.folder / "changed.jsonl")
    assert rows
    assert all(one["changed"] and one["new"]["failure"] == "invalid" for one in rows)
    assert len(environment.told[changed].stdout.splitlines()) == len(rows) + 2


# --- what is written, without an environment --------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", [False, True], ids=["plain", "sandbox"])
@pytest.mark.parametrize("name", ["ab", "word_count2", "a_plugin_with_a_very_long_name"])
def test_a_project_is_formatted_and_lints_clean(name: str, sandbox: bool, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    new_plugin(name, folder, sandbox)
    ruff = Path(sysconfig.get_paths()["scripts"]) / "ruff"
    for words in (["format", "--check"], ["check"]):
        command = [str(ruff), *words, "--no-cache", "."]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stdout
    ours, theirs = (tomllib.loads((at / "pyproject.toml").read_text())["tool"]["ruff"] for at in (ROOT, folder))
    assert theirs["line-length"] == ours["line-length"]
    assert set(theirs["lint"]["select"]) <= set(ours["lint"]["select"])
    assert set(theirs["lint"]["ignore"]) <= set(ours["lint"]["ignore"])
    plugin = (folder / f"prorl_reward_{name}" / "plugin.py").read_text()
    assert ("needs_sandbox = True" in plugin) == sandbox
    assert ("sandbox" in (folder / "README.md").read_text()) == sandbox
    assert not [path for path in folder.rglob("*") if path.is_file() and re.search("@[A-Z_]+@", path.read_text())]
    assert not list(tmp_path.glob(".*"))


def test_prompts_are_records_and_none_is_held_out_too(tmp_path: Path) -> None:
    new_plugin("word_count2", tmp_path / "p")
    train, held_out = (read_records(tmp_path / "p" / f"{name}.jsonl") for name in ("prompts", "heldout"))
    assert {record["task"] for record in train + held_out} == {"word_count2"}
    assert len({record["id"] for record in train + held_out}) == len(train + held_out) == 32
    assert not {str(record["prompt"]) for record in train} & {str(record["prompt"]) for record in held_out}


@pytest.mark.parametrize(
    "name", ["", "a", "A", "Word", "1st", "_x", "x_", "a-b", "a.b", "../a", "a b", "é1", "x" * 31, "ab\n"]
)
def test_a_bad_name_is_refused_with_what_is_right(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 to 30 lower-case letters, digits and underscores"):
        new_plugin(name, tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_taken_names_and_folders_are_refused(broken_plugins: Path, tmp_path: Path) -> None:
    for name in ("echo", "broken", "math"):
        with pytest.raises(ConfigError, match=f"'{name}' is taken"):
            new_plugin(name, tmp_path / "p")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists.  Fix: --dir OTHER"):
        new_plugin("fresh", tmp_path / "there")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        new_plugin("fresh", tmp_path / "file" / "p")


def test_a_task_of_another_plugin_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(MathReward):
        tasks = ("other_task",)

    monkeypatch.setattr("nemo_prorl.rewards.scaffold.discover", lambda: Registry({"other": Other}, {}))
    with pytest.raises(ConfigError, match="plugin 'other' has a task of this name"):
        new_plugin("other_task", tmp_path / "p")


def test_the_command_says_what_is_wrong(prorl: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    told = prorl("rewards", "new", "Bad-Name")
    assert (told.returncode, told.stdout) == (2, "")
    assert "plugin name 'Bad-Name'" in told.stderr
    assert not list(tmp_path.iterdir())
