"""`prorl audit`: the table and the sides that it calls off; tests/test_main_job.py audits a real run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nemo_prorl import cli, settings
from nemo_prorl.replay_training import OLDER, POLICY
from nemo_prorl.report.audit import Tokens, differences, exact, with_engine
from nemo_prorl.report.audit_engine import engine_logprobs
from nemo_prorl.report.step_groups import StoredStep
from nemo_prorl.rollout.weight_store import weights_folder
from tests.report.made import make_step
from tests.rollout.engines import write_model

EXACT = torch.tensor([-1.0, -2.0], dtype=torch.float64)
FLOAT32 = {"engine": "float32", "trainer": "float32"}


def test_a_side_is_off_beyond_what_its_precision_explains(capsys: pytest.CaptureFixture[str]) -> None:
    exact = EXACT
    found = [
        Tokens(0, "response 0 of draw 7", exact, exact, exact),
        Tokens(1, "response 1 of draw 7", exact, exact, exact),
    ]
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}, 2) == []
    found[1] = Tokens(1, "response 1 of draw 7", exact, exact + torch.tensor([0.0, 0.04]), exact)
    assert differences(found, {"engine": "float32", "trainer": "bfloat16"}, 2) == []
    told = "trainer: 0.01 nats per token from float64, expected at most 0.001 in float32"
    assert differences(found, FLOAT32, 2) == [told]
    assert capsys.readouterr().out.splitlines()[-1].split() == (
        ["trainer", "float32", "0.01", "0.04", "response", "1", "of", "draw", "7,", "token", "1"]
    )
    broken = Tokens(2, "response 2 of draw 7", exact * torch.nan, exact, exact)
    [told] = differences([broken], {"engine": "bfloat16"}, 2)
    assert told.startswith("engine: nan nats")


def off(recorded: torch.Tensor, forced: dict[int, torch.Tensor]) -> list[str]:
    """What is off in step 3, in which an engine was given the tokens with the weights after these steps."""
    return differences([Tokens(0, "response 0 of draw 7", recorded, EXACT, EXACT, forced)], FLOAT32, 2)


def test_an_engine_that_is_given_the_tokens_tells_what_was_off(capsys: pytest.CaptureFixture[str]) -> None:
    right = {2: EXACT + 1e-6, 1: EXACT + 0.01, 0: EXACT + 0.5}
    assert off(EXACT + 1e-6, right) == []
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[-3:] == [["2", "0"], ["1", "0.01"], ["0", "0.5"]]
    stale = (
        "engine: it had the weights after step {}: 0 nats per token from the recorded log-probabilities, those after"
    )
    assert off(right[1], right) == [stale.format(1) + " step 2 0.01"]
    assert off(right[0], right) == [stale.format(0) + " step 2 0.5"]
    nearly = {**right, 1: EXACT + 1e-4}  # too near to be off: the other weights explain the recorded ones better still
    assert off(nearly[1], nearly) == [stale.format(1) + " step 2 9.9e-05"]
    assert off(right[2], {2: right[2], 1: right[2], 0: right[2]}) == []  # a step without an update
    [decode] = off(EXACT - 0.7, right)
    assert decode.startswith("engine: 0.7 nats per token from float64, expected at most 0.001 in float32; an engine")
    assert decode.endswith("its decode was off, unless it had yet other weights")
    [kernels] = off(EXACT - 0.7, {2: EXACT - 0.7, 1: EXACT - 0.9})
    assert kernels.startswith("engine, given the tokens: 0.7 nats per token from float64")
    assert kernels.endswith("its kernels, or how it loads weights")


# --- with an engine --------------------------------------------------------------------------------------------------


def audited(run: Path, *overrides: str) -> tuple[Any, StoredStep, Path]:
    """A run whose step 3 was audited up to the engine: configuration, step, and folder with the weights to try."""
    write_model(run / "init", True, 0)
    given = ("cluster=laptop", "trainer.warmup.steps=0", "trainer.grpo.temperature=1.2", *overrides)
    make_step(run, 3, 1, True, *given)
    folder = run / "audits" / "3"
    for name, seed in ((POLICY, 2), (OLDER, 1)):
        write_model(folder / name, True, seed)
    (folder / "logs").mkdir()
    (folder / "init").symlink_to(run / "init")
    cfg = settings.load([f"run_dir={folder}"], run / "config.yaml")
    return cfg, StoredStep(run, 3), folder


def engines_left() -> list[list[str]]:
    """Commands of engines that this process started."""
    return [
        child.cmdline() for child in psutil.Process().children(recursive=True) if "--weights-dir" in child.cmdline()
    ]


@pytest.mark.slow
@pytest.mark.vllm
def test_an_engine_of_the_run_tells_stale_weights_from_a_decode_that_is_off(tmp_path: Path) -> None:
    cfg, stored, folder = audited(tmp_path / "run", "rollout.kv_cache_mb=64")
    made = engine_logprobs(cfg, stored, folder, [0, 1])
    assert list(made) == [2, 1, 0]
    assert engines_left() == []
    assert not weights_folder(folder).exists()
    chosen = dict(enumerate(stored.responses))
    trainer = {str(n): made[2][n].float() for n in chosen}
    found = exact(folder / POLICY, chosen, trainer, 1.2)
    for one in found:
        assert (one.exact - made[2][one.number]).abs().max() < 1e-5

    def told(recorded: list[torch.Tensor]) -> list[str]:
        forced = [{version: logps[n] for version, logps in made.items()} for n in chosen]
        pairs = zip(found, recorded, forced, strict=True)
        return differences([replace(one, engine=logp_T, forced=given) for one, logp_T, given in pairs], FLOAT32, 2)

    assert told(made[2]) == []
    for version in (1, 0):
        [stale] = told(made[version])
        assert stale.startswith(f"engine: it had the weights after step {version}: 0 nats per token")
    [decode] = told([logp_T - 0.5 for logp_T in made[2]])
    assert "engine: 0.5 nats per token" in decode
    assert "its decode was off" in decode


@pytest.mark.parametrize(
    ("script", "told"),
    [(None, "No such file or directory"), ("sleep 60", "waited 1 s for 1 x"), ("exit 3", "engine-0")],
)
def test_an_audit_without_an_engine_says_so_and_goes_on(
    script: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o700)
    few = ("trainer.deadlines.startup_s=1", "rollout.max_restarts=0")
    cfg, stored, folder = audited(tmp_path / "run", f"rollout.python={python}", *few)
    found = [Tokens(0, "response 0 of draw 10", EXACT, EXACT, EXACT)]
    assert with_engine(cfg, stored, folder, found) == found
    said = capsys.readouterr().out
    assert said.startswith("no engine could be asked: ")
    assert told in said
    assert engines_left() == []
    assert not weights_folder(folder).exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [(["gone", "--step", "3"], "gone is not a run directory"), (["a", "--step", "0"], "--step=0 --responses=16")],
)
def test_wrong_use_is_refused(words: list[str], told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["audit", *words]) == 2
    assert told in caplog.text
