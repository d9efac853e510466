"""The Python API: what a run directory contains, and the calls behind the commands."""

import json
from pathlib import Path

import pytest

import nemo_prorl
from nemo_prorl import api
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


def test_only_the_api_is_exported() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        nemo_prorl.trainn  # type: ignore[attr-defined]  # noqa: B018
