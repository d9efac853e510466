"""Weights & Biases: a run without its key is refused before anything starts."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from nemo_prorl import cli, settings
from nemo_prorl.launcher.doctor import network


def run(*overrides: str) -> DictConfig:
    return settings.load(["cluster=laptop", *overrides])


@pytest.mark.parametrize(
    ("variables", "netrc_of", "ok"),
    [
        ({}, None, False),
        ({}, "example.org", False),
        ({}, "api.wandb.ai", True),
        ({"WANDB_BASE_URL": "https://wandb.example.org/"}, "api.wandb.ai", False),
        ({"WANDB_BASE_URL": "https://wandb.example.org/"}, "wandb.example.org", True),
        ({"WANDB_API_KEY": "x"}, None, True),
        ({"WANDB_MODE": "offline"}, None, True),
        ({"WANDB_MODE": "online"}, None, False),
    ],
)
def test_wandb_without_a_key_is_refused_before_the_start(
    variables: dict[str, str], netrc_of: str | None, ok: bool, tmp_path: Path
) -> None:
    if netrc_of:
        (tmp_path / ".netrc").write_text(f"machine {netrc_of} login user password key\n")
    wanted = run("exp_manager.create_wandb_logger=true")
    environment = {"HOME": str(tmp_path), **variables}
    fault = network.wandb_fault(wanted, environment)
    assert (fault is None) == ok
    assert fault is None or "WANDB_API_KEY" in fault
    assert network.wandb_fault(run(), environment) is None
    if not ok:
        offline = run("exp_manager.create_wandb_logger=true", "+exp_manager.wandb_logger_kwargs.offline=true")
        assert network.wandb_fault(offline, environment) is None
        assert "wandb" in [check.name for check in network.check_network(wanted, environment)]


def test_a_start_without_a_key_ends_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    overrides = [f"run_dir={tmp_path / 'run'}", "exp_manager.create_wandb_logger=true"]
    assert cli.main(["train", *overrides]) == 2
    assert "exp_manager.create_wandb_logger=true, but there is no key for api.wandb.ai" in caplog.text
    assert not (tmp_path / "run" / "config.yaml").exists()
