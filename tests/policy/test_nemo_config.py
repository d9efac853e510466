"""What NeMo is told of a configuration."""

from dataclasses import fields
from pathlib import Path

import pytest

from nemo_prorl import settings
from nemo_prorl.policy.build import nemo_config

pytestmark = pytest.mark.nemo


def test_fp8_goes_by_nemo_s_three_keys_and_megatron_s_name_of_its_scales() -> None:
    from megatron.core.enums import Fp8Recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    start = ["cluster=h100_4x8_fp8", "pretrained_checkpoint.restore_from_path=null"]
    hf = {"vocab_size": 151_936}
    model = nemo_config(settings.load(start), Path("model"), hf, None).model
    assert (model.fp8, model.fp8_hybrid, model.fp8_e4m3) == (True, True, False)
    assert model.fp8_recipe == Fp8Recipe.tensorwise
    assert "fp8_recipe" in {field.name for field in fields(TransformerConfig)}  # NeMo hands on what has a field's name
    plain = nemo_config(settings.load([*start, "model.fp8=null"]), Path("model"), hf, None).model
    assert (plain.fp8, plain.fp8_hybrid, plain.fp8_e4m3) == (False, False, False)
    assert "fp8_recipe" not in plain


def test_nemo_builds_no_scheduler_of_its_own() -> None:
    cfg = settings.load(
        ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "model.optim.sched.name=cosine"]
    )
    optim = nemo_config(cfg, Path("model"), {"vocab_size": 151_936}, None).model.optim
    assert "sched" not in optim
    assert optim.lr == cfg.model.optim.lr
    assert cfg.model.optim.sched.name == "cosine"  # the run's own configuration keeps it
