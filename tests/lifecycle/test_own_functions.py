"""Losses, advantages and reset rules that a run names: of a file of the user, and each that comes with the project."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.cli import main
from nemo_prorl.config import DataSource, ResetRulesConfig, ResetsConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.own_functions import module_of, sha256, sources
from nemo_prorl.planning import algorithm
from nemo_prorl.rewards.functions import code_of
from nemo_prorl.settings import load
from tests.algorithms.choices import choices
from tests.lifecycle.small_run import SmallRun, config

ROOT = Path(__file__).parents[2]
OWN = """
import torch


def clipped(logp_BT, old_logp_BT, advantage_BT, mask_BT, config):
    ratio = (logp_BT - old_logp_BT).exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.minimum(ratio * advantage_BT, bounded * advantage_BT)


def normed(centred_GN, reward_GN, valid_GN):
    variance = centred_GN.square().sum(1, keepdim=True) / (valid_GN.sum(1, keepdim=True) - 1)
    return centred_GN / variance.sqrt().clamp(min=1e-6)


def doubled(centred_GN, reward_GN, valid_GN):
    return 2 * centred_GN
"""


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **grpo: Any) -> list[dict[str, Any]]:
    run = SmallRun(config(folder, max_steps=3, **grpo))
    run.cfg.data.validation = [DataSource(name="held")]
    trainer = run.start(monkeypatch)
    try:
        trainer.train()
        trainer.finish()
    finally:
        run.close()
    return run.lines()


def test_a_loss_and_an_advantage_of_the_user_train_as_the_same_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    ours = trained(tmp_path / "ours", monkeypatch)
    own = trained(tmp_path / "own", monkeypatch, loss=f"{tmp_path}/own.py:clipped")
    assert own == ours
    normed = trained(tmp_path / "normed", monkeypatch, advantage=f"{tmp_path}/own.py:normed")
    doubled = trained(tmp_path / "doubled", monkeypatch, advantage=f"{tmp_path}/own.py:doubled")
    assert normed[0]["policy/surrogate"] == pytest.approx(ours[0]["policy/surrogate"], abs=1e-5)
    assert doubled[0]["policy/grad_norm"] != pytest.approx(ours[0]["policy/grad_norm"], rel=0.01)


@pytest.mark.parametrize(
    "grpo",
    [{key: value} for key in ("loss", "advantage", "aggregation") for value in choices(key)],
    ids=lambda grpo: "-".join(*grpo.items()),
)
def test_a_run_trains_with_each_name(grpo: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained(tmp_path, monkeypatch, **grpo)
    assert [line["step"] for line in lines if line["step"]] == [1, 2, 3]
    assert any(line.get("policy/grad_norm", 0.0) > 0.0 for line in lines)


def test_a_mean_over_prompts_counts_the_tokens_of_the_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {kind: trained(tmp_path / kind, monkeypatch, aggregation=kind)[0] for kind in ("prompt", "sequence")}
    assert first["prompt"]["rollout/response_tokens"] == first["sequence"]["rollout/response_tokens"]
    assert first["prompt"]["policy/loss"] != pytest.approx(first["sequence"]["policy/loss"], rel=1e-6)


def test_what_the_configuration_names_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def f(:\n")
    cfg = load(["trainer.grpo.loss=own.py:clipped", "trainer.grpo.advantage=own.py:normed"])
    assert f"loss {tmp_path}/own.py:clipped" in " ".join(text for _, text in algorithm.rows(cfg))
    assert cfg.trainer.grpo.loss == f"{tmp_path}/own.py:clipped"
    for value, told in (
        (
            "own.py:clippd",
            r"trainer.grpo.loss=/.*own.py:clippd: the file has no function clippd. Did you mean clipped\?",
        ),
        ("own.py:seen", r"has no function seen; expected one of: clipped, normed[a-z_, ]*$"),
        ("other.py:clipped", r"trainer.grpo.loss=/.*other.py cannot be read: No such file"),
        ("broken.py:f", r"broken.py is not Python"),
        ("no_such_package:f", r"there is no module no_such_package. Fix: install its package"),
        ("ppo", r"trainer.grpo.loss=ppo: expected one of clip, cispo, gspo, dppo, or a function of your own"),
    ):
        with pytest.raises(ConfigError, match=told):
            load([f"trainer.grpo.loss={value}"])
    for key, value, right in (("unfinished_penalty", "0.5", "0"), ("shaping.cosine", "true", "false")):
        told = f"trainer.grpo.{key}={value}: expected {right}: .*maxrl divides by .*Fix: trainer.grpo.{key}={right}"
        with pytest.raises(ConfigError, match=told):
            load(["trainer.grpo.advantage=maxrl", f"trainer.grpo.{key}={value}"])


def test_the_page_s_examples_pass_the_check_and_a_faulty_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "own_loss.md").read_text()
    (tmp_path / "mine.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    commands = re.findall(r"^prorl (check-function .*)$", page, re.MULTILINE)
    assert [main(command.split()) for command in commands] == [0, 0, 0]
    assert "/mine.py:pure: 9 of 9 properties hold" in capsys.readouterr().out
    runs = re.findall(r"^prorl train (.*)$", page, re.MULTILINE)
    assert [main(["train", "--dry-run", *words.split()]) for words in runs] == [0, 0, 0]
    assert f"advantage: {tmp_path}/mine.py:sign" in capsys.readouterr().out
    (tmp_path / "other.py").write_text(
        "def pure(logp_BT, old, advantage_BT, mask, c):\n    return -logp_BT * advantage_BT\n"
    )
    assert main(["check-function", "loss", f"{tmp_path}/other.py:pure", "trainer.grpo.aggregation=prompt"]) == 1
    assert "direction: at ratio 1, " in capsys.readouterr().out


AGAINST = "def own(logp_BT, old, advantage_BT, mask, c):\n    return -logp_BT * advantage_BT\n"
HUGE = "def own(centred_GN, reward_GN, valid_GN):\n    return 1e30 * centred_GN\n"
RULE = "def own(history, rules):\n    yield history.finding('kl', history.series['kl'][-1][1], 0.0, 'words')\n"
REWARD = "def own(prompt, response):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("trainer.grpo.loss", AGAINST, "direction: at ratio 1, "),
        ("trainer.grpo.advantage", HUGE, "scale: rewards from 0 to 1 give an advantage of 8e.29"),
        (
            "trainer.resets.rules.asks",
            RULE,
            "rule_call: after step 0 it raised KeyError: 'kl'",
        ),
        ("rewards.functions.units", REWARD, "expected a function of .prompt, response, truth."),
    ],
    ids=["loss", "advantage", "rule", "reward"],
)
@pytest.mark.parametrize(
    "command", [["plan"], ["train", "--dry-run"], ["launch", "--here", "--stages=run1..run2"]], ids=" ".join
)
def test_a_wrong_function_is_refused_before_a_run(
    command: list[str],
    key: str,
    text: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    place = "[mine.py:own]" if key.endswith("asks") else "mine.py:own"
    words = [*command, "run_dir=run", f"{key}={place}"]
    assert main(words if command[0] != "launch" else [*words, "data=domains", "--dry-run"]) == 2
    assert re.search(told, caplog.text), caplog.text
    assert f"{key}" in caplog.text
    assert not (tmp_path / "run" / "logs").exists()


def test_an_unusual_loss_is_named_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(AGAINST.replace("-logp", "logp"))
    caplog.set_level("INFO")
    assert main(["train", "--dry-run", "run_dir=run", "trainer.grpo.loss=mine.py:own"]) == 0
    assert f"trainer.grpo.loss={tmp_path}/mine.py:own: clip_range: a token far outside the clip range" in caplog.text


def names(place: str) -> list[str]:
    return [name.rpartition("/")[2] for name in sources(place)]


def test_the_code_of_a_function_has_the_files_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside of functions, through packages, and in a circle; installed packages by version."""
    files = {
        "mine.py": "import json, yaml\nfrom kit.deep import text\nimport nemo_prorl.errors\nimport not_there\n",
        "kit/__init__.py": "",
        "kit/deep.py": "def text():\n    from . import other\n    from .further.last import x, y\n    import mine\n",
        "kit/other.py": "from kit import deep",
        "kit/further/last.py": "x = y = 1",
        "kit/unused.py": "",
        "json.py": "",
        "broken.py": "def f(:\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    place = f"{tmp_path}/mine.py:f"
    code = sources(place)
    local = sorted(str(Path(name).relative_to(tmp_path)) for name in code if name.startswith("/"))
    assert local == ["kit/__init__.py", "kit/deep.py", "kit/further/last.py", "kit/other.py", "mine.py"]
    assert code.keys() - {str(tmp_path / name) for name in files} == {"PyYAML"}
    assert names(f"{tmp_path}/broken.py:f") == ["broken.py"]
    assert names(f"{tmp_path}/gone.py:f") == names("gspo") == names("gone:f") == []
    monkeypatch.syspath_prepend(tmp_path)  # as an installed package
    found = names("kit.deep:text")
    assert sorted(found) == ["PyYAML", "__init__.py", "deep.py", "last.py", "mine.py", "other.py"]


def test_the_code_of_a_run_has_each_function_that_its_configuration_names(tmp_path: Path) -> None:
    """A checkpoint records it, and a resume names what has changed since."""
    own = {name: tmp_path / f"{name}.py" for name in ("loss", "advantage", "rule", "reward")}
    for file in own.values():
        file.touch()
    rules = ResetRulesConfig(asks=["kl_spike", f"{own['rule']}:f"])
    of_grpo = {name: f"{own[name]}:f" for name in ("loss", "advantage")}
    cfg = config(tmp_path / "run", ResetsConfig(rules=rules), **of_grpo)
    cfg.rewards.functions["units"] = f"{own['reward']}:f*0.5"
    assert code_of(cfg).keys() == set(map(str, own.values()))


def test_an_installed_package_of_the_function_itself_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "losses"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from losses.one import own\nimport torch\n")
    (package / "one.py").write_text(AGAINST)
    monkeypatch.syspath_prepend(package.parent)
    assert sorted(names("losses:own")) == ["__init__.py", "one.py", "torch"]


def test_the_hash_changes_with_a_helper_and_not_with_the_folder(tmp_path: Path) -> None:
    def made(file: str, helper: str) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("import own_helper\n")
        (tmp_path / file).with_name("own_helper.py").write_text(helper)
        return sha256(f"{tmp_path}/{file}:f")

    before = made("b/moved.py", "x = 1")
    assert made("a/mine.py", "x = 1") == before != made("a/mine.py", "x = 2")
    module_of(tmp_path / "a" / "mine.py", "key")  # its folder, with another helper, is in sys.path now
    assert sha256(f"{tmp_path}/b/moved.py:f") == before
    (tmp_path / "alone.py").write_text(AGAINST)
    assert sha256(f"{tmp_path}/alone.py:own") == hashlib.sha256(AGAINST.encode()).hexdigest()


# Fifteen lines outside of the package are a rule.
LONGER = """
def longer(history, rules):
    key = "policy/grad_norm"
    norms = [norm for step, norm in history.series.get(key, [])]
    if len(norms) >= 2:
        yield history.finding(key, norms[-1], 0.0, f"{len(norms)} steps since {history.since}")
"""


def test_a_rule_of_the_user_resets_the_run_and_replay_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(LONGER)
    place = f"{tmp_path}/mine.py:longer"
    rules = ResetRulesConfig(asks=[place], cooldown_steps=1, plateau_steps=3, plateau_gain=9.0, plateau_sigma=0.0)
    run = SmallRun(config(tmp_path / "run", ResetsConfig(mode="auto", rules=rules), max_steps=5, validate_every=1))
    trainer = run.start(monkeypatch)
    try:
        trainer.train()
    finally:
        run.close()
    said = [(reset["step"], reset["reason"]) for reset in trainer.resets.done]
    assert said == [(2, f"{place}: 2 steps since 0"), (4, f"{place}: 2 steps since 2")]
    assert [line["step"] for line in run.lines() if line["kl"] == 0.0] == [1, 3, 5]
    settings = [f"{key}={value}" for key, value in asdict(rules).items() if key != "asks"]
    command = ["replay", str(run.folder), "--json", "--rules", *settings]
    assert main([*command, f"asks=['{place}']"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["step"], f["rule"], f["asks"]) for f in found if f["rule"] == place] == [
        (2, place, True),
        (4, place, True),
    ]
    assert main(command) == 0
    assert place not in capsys.readouterr().out


def test_a_rule_that_was_edited_while_the_run_was_stopped_raises_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(LONGER)
    rules = ResetRulesConfig(asks=[f"{tmp_path}/mine.py:longer"])
    run = SmallRun(config(tmp_path / "run", ResetsConfig(rules=rules), max_steps=2))
    for steps in (2, 3):
        run.cfg.trainer.grpo.max_steps = steps
        trainer = run.start(monkeypatch)
        try:
            trainer.train()
            trainer.finish()
        finally:
            run.close()
        (tmp_path / "mine.py").write_text(LONGER + "# edited\n")
    assert f"{tmp_path}/mine.py was changed after the checkpoint" in "".join(run.alarms())


def test_the_configuration_makes_the_place_of_a_rule_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LONGER)
    cfg = load(["trainer.resets.mode=auto", "trainer.resets.rules.asks=[plateau,mine.py:longer]"])
    assert cfg.trainer.resets.rules.asks == ["plateau", f"{tmp_path}/mine.py:longer"]
    with pytest.raises(ConfigError, match="has no function longr. Did you mean longer?"):
        load(["trainer.resets.rules.asks=[mine.py:longr]"])
