"""The keys of the learning rate's schedule: what is refused and with which fix, and what has which default."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_prorl import cli, settings
from nemo_prorl.errors import ConfigError
from nemo_prorl.policy.build import nemo_config

SCHED = "model.optim.sched"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{SCHED}.name=CosineAnnealing"], [f"{SCHED}.name=CosineAnnealing", "one of constant, linear, cosine"]),
        ([f"{SCHED}.warmup_steps=-1"], [f"{SCHED}.warmup_steps=-1", "at least 0"]),
        ([f"{SCHED}.warmup_steps=0.5"], [f"{SCHED}.warmup_steps=0.5", "a whole number"]),
        ([f"{SCHED}.warmup_ratio=1.5"], [f"{SCHED}.warmup_ratio=1.5", "at most 1"]),
        (
            [f"{SCHED}.warmup_steps=7", "trainer.grpo.max_steps=6"],
            [f"{SCHED}.warmup_steps=7: expected at most trainer.grpo.max_steps=6", f"{SCHED}.warmup_ratio=0.1"],
        ),
        (
            [f"{SCHED}.warmup_steps=7", f"{SCHED}.warmup_ratio=0.1"],
            [f"{SCHED}.warmup_ratio=0.1: expected 0 together with {SCHED}.warmup_steps=7. Fix: set one of them"],
        ),
        (
            [f"{SCHED}.name=linear", f"{SCHED}.min_lr=1e-3"],
            [f"{SCHED}.min_lr=0.001: expected at most model.optim.lr=0.0002", "Fix: a lower"],
        ),
        ([f"{SCHED}.min_lr=1e-5"], [f"{SCHED}.min_lr=1e-05: expected 0 if {SCHED}.name=constant", "linear or cosine"]),
        ([f"{SCHED}.min_lr=null"], [f"{SCHED}.min_lr=null", "at least 0"]),
        (
            [f"+{SCHED}.constant_steps=5"],
            [f"{SCHED}.constant_steps=5: not supported. Known in {SCHED}: name, warmup_steps, warmup_ratio, min_lr"],
        ),
        ([f"{SCHED}.warmup=5"], [f"unknown key {SCHED}.warmup", f"Did you mean {SCHED}.warmup_steps?"]),
        ([f"{SCHED}.warmup_steps=0.1"], [f"Fix: {SCHED}.warmup_ratio=0.1"]),
        ([SCHED + "=cosine"], [f"expected a mapping {{key: value, ...}}. Fix: {SCHED}.name=cosine"]),
        ([f"{SCHED}.min_lr_ratio=0.1"], [f"mean {SCHED}.min_lr? It is a rate: 0.1 x model.optim.lr. Known in"]),
        (["model.optim.eps=-1"], ["model.optim.eps=-1", "at least 0"]),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_fix(overrides: list[str], message: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        settings.load(overrides)
    for part in message:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{SCHED}.warmup_steps=6", "trainer.grpo.max_steps=6"],
        [f"{SCHED}.name=cosine", f"{SCHED}.min_lr=2e-4"],
        [f"{SCHED}.name=linear", f"{SCHED}.warmup_ratio=1"],
        [f"+{SCHED}.name=linear", "+model.optim.eps=1e-6"],  # as where no file sets the key
        ["model.optim.lr=0", f"{SCHED}.name=linear"],
    ],
)
def test_what_is_at_a_bound_is_taken(overrides: list[str]) -> None:
    cfg = settings.load(overrides)
    assert cfg.model.optim.sched.name in ("constant", "linear", "cosine")


@pytest.mark.parametrize("cluster", ["laptop", "h100_4x8"])
def test_the_defaults_are_a_constant_rate_and_megatron_s_eps(cluster: str) -> None:
    cfg = settings.load([f"cluster={cluster}", "pretrained_checkpoint.restore_from_path=null"])
    assert cfg.model.optim.sched == {"name": "constant", "warmup_steps": 0, "warmup_ratio": 0.0, "min_lr": 0.0}
    assert (cfg.model.optim.eps, list(cfg.model.optim.betas)) == (1e-8, [0.9, 0.999])


def test_a_run_from_before_these_keys_is_continued(tmp_path: Path) -> None:
    """Also by the command with its groups, which composes the configuration again."""
    start = ["cluster=laptop", f"run_dir={tmp_path}"]
    old = settings.load(start)
    OmegaConf.set_struct(old, False)
    del old.model.optim.sched, old.model.optim["eps"]
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(old))
    assert settings.load_run(start, need_files=False) == settings.load(start)
    again = settings.load([f"{SCHED}.name=linear"], tmp_path / "config.yaml")
    assert (again.model.optim.sched.name, again.model.optim.eps) == ("linear", 1e-8)
    with pytest.raises(ConfigError, match=rf"{SCHED}.name=linear \(the run has constant\)"):
        settings.load_run([*start, f"{SCHED}.name=linear"])


def test_nemo_gets_no_scheduler_of_its_own() -> None:
    cfg = settings.load([f"{SCHED}.name=cosine", f"{SCHED}.warmup_steps=2", "model.optim.eps=1e-6"])
    optim = nemo_config(cfg, Path("model"), {"vocab_size": 128}, None).model.optim
    assert "sched" not in optim
    assert (optim.eps, list(optim.betas)) == (1e-6, [0.9, 0.999])
    assert cfg.model.optim.sched.name == "cosine"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "4 updates of 192, lr 0.0002"),
        ([f"{SCHED}.name=linear"], "lr 0.0002, linear to 0"),
        (
            [f"{SCHED}.name=cosine", f"{SCHED}.min_lr=1e-5", f"{SCHED}.warmup_ratio=0.1"],
            "lr 0.0002, cosine to 1e-05, rising over 12 steps",
        ),
    ],
)
def test_a_plan_tells_the_schedule(
    overrides: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", f"run_dir={tmp_path / 'run'}", "trainer.grpo.max_steps=120", *overrides]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("a step")]
    assert line.endswith(told)
