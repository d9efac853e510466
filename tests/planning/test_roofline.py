"""The estimate of a step's seconds on GPUs: by hand, beside the simulation, and its assumptions."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from nemo_prorl import settings
from nemo_prorl.sizing import roofline
from nemo_prorl.sizing.flops import update_flops
from nemo_prorl.sizing.memory import ModelShape, memory_of
from nemo_prorl.sizing.roofline import MEAN_SHARE, OTHER_S, PROMPT_TOKENS, StepTime, longest_response, step_time

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import simulate

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

BASE = "pretrained_checkpoint.restore_from_path=null"
H100 = 84e9


def config(*overrides: str, cluster: str = "h100_4x8") -> DictConfig:
    return settings.load([f"cluster={cluster}", BASE, *overrides])


def estimate(cfg: DictConfig, mean: float, per_trained: float = 1.8) -> StepTime:
    return step_time(cfg, memory_of(cfg), H100, mean, per_trained)


def test_responses_of_one_length_by_hand() -> None:
    """All responses fill the context: as many run from the first token to the last."""
    cfg = config("trainer.grpo.context_tokens=2001")
    b, longest = 256 * 16 / 32, 2000
    found = estimate(cfg, 2000.0, 1.0)
    assert (found.responses, found.running, longest_response(cfg)) == (b, b, longest)
    weights, cached = 2 * 1_777_088_000, 2 * 28 * 2 * 128 * 2  # bytes: of the model in bf16, of a token in the cache
    read = (weights + b * (PROMPT_TOKENS + longest / 2) * cached) / (0.8 * 3.35e12)
    assert found.rollout_s == pytest.approx(longest * (read + 3.1e-3 + b * 1.2e-5), rel=1e-9)
    tokens, squares = 4096 * (PROMPT_TOKENS + longest), 4096 * (PROMPT_TOKENS + longest) ** 2
    shape = ModelShape.of(cfg.model, 151_936)
    assert found.training_s == pytest.approx(5 / 3 * update_flops(shape, tokens, squares) / (32 * 0.4 * 989e12))
    assert found.seconds == pytest.approx(found.rollout_s + found.training_s + OTHER_S)


def test_many_short_sequences_are_bound_by_operations() -> None:
    """At 4,096 sequences of one token, products take longer than reading weights and cache."""
    cfg = config(
        "rollout.max_num_seqs=4096", "trainer.grpo.max_response_tokens=1", "trainer.grpo.prompts_per_step=8192"
    )
    operations = 4096 * update_flops(ModelShape.of(cfg.model, 151_936), 1, 0) / 3 / (0.4 * 989e12)
    assert estimate(cfg, 1.0, 1.0).rollout_s == pytest.approx(operations + 3.1e-3 + 4096 * 1.2e-5, rel=1e-9)


@pytest.mark.parametrize("mean", [500.0, 3358.0, 8191.0])
def test_the_mean_of_the_assumed_lengths_is_the_given_one(mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the time per sequence grew, a rollout would grow by it for each token of each response."""
    before = estimate(config(), mean)
    monkeypatch.setattr(roofline, "SEQUENCE_S", roofline.SEQUENCE_S + 1.0)
    grown = estimate(config(), mean).rollout_s - before.rollout_s
    assert grown / before.responses == pytest.approx(mean, rel=2e-3)


def test_no_response_is_longer_than_its_context() -> None:
    assert estimate(config(), 8191.0) == estimate(config(), 20_000.0)
    assert longest_response(config("trainer.grpo.max_response_tokens=4000")) == 4000


def test_what_does_not_fit_at_once_follows_at_full_load() -> None:
    """Twice the responses, of which only the first 512 run at once: the rollout gets longer by their tokens."""
    one, two, three = (
        estimate(config(f"trainer.grpo.prompts_per_step={prompts}"), 3000.0, 1.0) for prompts in (1024, 2048, 3072)
    )
    assert (one.running, two.running, two.responses) == (512, 512, 1024)
    assert two.rollout_s - one.rollout_s == pytest.approx(three.rollout_s - two.rollout_s)
    assert 0.3 * one.rollout_s < two.rollout_s - one.rollout_s < one.rollout_s  # without another end
    small = config("trainer.grpo.prompts_per_step=1024", "rollout.kv_cache_mb=4096")
    assert estimate(small, 3000.0, 1.0).running == pytest.approx(4096 * 2**20 / 28672 / 3300)
    assert estimate(small, 3000.0, 1.0).rollout_s > one.rollout_s


def test_engines_with_their_own_gpus_work_beside_the_trainer() -> None:
    apart = estimate(config(cluster="h100_4x8_split"), 3000.0)
    assert apart.apart
    assert apart.seconds == OTHER_S + max(apart.rollout_s, apart.training_s)
    shared = replace(apart, apart=False)
    assert shared.seconds == OTHER_S + apart.rollout_s + apart.training_s


def test_it_assumes_what_the_simulation_assumes() -> None:
    assert pytest.approx(simulate.FIXED_S) == roofline.TOKEN_S + 0.9e-3  # weights of 3.1 GB at the full bandwidth
    assert simulate.PER_SEQUENCE_S == roofline.SEQUENCE_S
    assert pytest.approx(simulate.PER_CACHED_TOKEN_S, rel=0.01) == 28672 / (
        roofline.BANDWIDTH * roofline.BANDWIDTH_SHARE
    )
    assert (simulate.PROMPT_TOKENS, simulate.OTHER_S) == (roofline.PROMPT_TOKENS, roofline.OTHER_S)


def ours(root: Path, name: str) -> list[tuple[float, float, float]]:
    """Seconds of a step, groups drawn and millions of tokens of a run's scheduler, at 8k and at 16k."""
    text = (root / "benchmarks" / "results" / name).read_text()
    lines = re.findall(r"^OURS.*?deviations +(.*)$", text, re.MULTILINE)
    return [(float(row[1]), float(row[3]), float(row[6])) for row in map(str.split, lines)]


def test_it_agrees_with_the_simulation(root: Path) -> None:
    (short, drawn, millions), (long, _, longer) = ours(root, "simulate-2026-11-23.txt")
    assert pytest.approx(millions * 1e6 / (drawn * 16) / 8192, abs=0.005) == MEAN_SHARE
    assert pytest.approx(drawn / 256, abs=0.005) == roofline.DRAWN
    cfg = config("stage=run1")
    assert estimate(cfg, MEAN_SHARE * longest_response(cfg)).seconds == pytest.approx(short, rel=0.06)
    at_16k = estimate(config("stage=run8"), longer * 1e6 / (drawn * 16))
    assert at_16k.seconds == pytest.approx(long, rel=0.06)
    seconds, drawn, millions = ours(root, "simulate-n32-2026-11-26.txt")[0]
    found = estimate(config("stage=run6"), millions * 1e6 / (drawn * 32), drawn / 256)
    assert found.seconds == pytest.approx(seconds, rel=0.06)
