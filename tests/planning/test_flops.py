"""Operations of a step's updates, and what a run says of its speed."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_prorl import device
from nemo_prorl.report.status import status
from nemo_prorl.sizing.flops import PEAKS, UpdateSpeed, update_flops
from nemo_prorl.sizing.memory import ModelShape
from tests.lifecycle.small_run import SmallRun, config

TINY = ModelShape(2, 8, 16, 2, 1, 4, 12, 12, tied=False, qkv_bias=False)
QWEN_1P5B = ModelShape(28, 1536, 8960, 12, 2, 128, 151_936, 151_936, tied=False, qkv_bias=True)


def test_operations_by_hand() -> None:
    """Queries, keys and values 8 x 16, the attention's output 8 x 8, three matrices 8 x 16; output layer 8 x 12."""
    weights = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16) + 8 * 12
    pairs = (5**2 + 3**2) / 2
    attention = 2 * (2 * pairs * 8) * 2  # layers, two products of 2 operations for each pair and number of a query
    assert update_flops(TINY, 5 + 3, 5**2 + 3**2) == 3 * (2 * 8 * weights + attention)


def test_short_sequences_take_six_operations_per_weight_and_token() -> None:
    """1.54e9 weights without the embedding; attention adds 11 % at 4,096 tokens."""
    dense = update_flops(QWEN_1P5B, 1.0, 0.0)
    assert dense == pytest.approx(6 * 1.543e9, rel=1e-3)
    assert update_flops(QWEN_1P5B, 4096.0, 4096.0**2) / (4096 * dense) == pytest.approx(1.11, abs=0.005)


def test_the_peak_is_known_for_whole_names_of_cards_only() -> None:
    for card in PEAKS:
        found = UpdateSpeed(QWEN_1P5B, 4, card).metrics(1e6, 4e9, 10.0)
        assert found["tflops_per_device"] == pytest.approx(update_flops(QWEN_1P5B, 1e6, 4e9) / 4 / 10 / 1e12)
        assert found["mfu"] == pytest.approx(found["tflops_per_device"] / 989)
    for other in ("NVIDIA H100 NVL", "NVIDIA H100 PCIe", None):
        assert UpdateSpeed(QWEN_1P5B, 4, other).metrics(1e6, 4e9, 10.0).keys() == {"tokens", "tflops_per_device"}


def test_a_run_tells_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of prompts (3 tokens) and responses of the groups that are trained on."""
    monkeypatch.setattr(device, "card", lambda: "NVIDIA H200")
    cfg = config(tmp_path, max_steps=2, validate_every=9)
    run = SmallRun(cfg)
    trainer = run.start(monkeypatch)
    trainer.train()
    run.close()
    seen = run.policy.updates[:2]  # of the first step
    lengths = [int(length) for batch, _, _ in seen for length in batch.length_B]
    assert len(lengths) == 16
    line = trainer.records.lines()[0]
    assert line["time/updates/tokens"] == sum(lengths)
    shape = ModelShape.of(OmegaConf.create(cfg.model), 12)
    flops = update_flops(shape, sum(lengths), sum(length**2 for length in lengths))
    assert line["time/updates/tflops_per_device"] == pytest.approx(flops / line["time/updates"] / 1e12)
    assert line["time/updates/mfu"] == pytest.approx(line["time/updates/tflops_per_device"] / 989)
    assert line["time/step/tokens_per_s_per_device"] == pytest.approx(sum(lengths) / line["time/step"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    words = next(row for row in status(tmp_path).splitlines() if row.startswith("speed"))
    assert " tokens/s per device, updates " in words
    assert "(MFU " in words
