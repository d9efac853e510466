"""The model with which a run begins: made from its data, or taken over from the run before."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import Config, DataSource
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.lifecycle.base_model import base_folder, initial_model, make_initial_model
from nemo_prorl.lifecycle.stages import Origin
from tests.data.test_laptop_model import SHAPE


def record(name: str, **truth: Any) -> dict[str, Any]:
    return {"id": name, "task": "math", "prompt": f"what is {name}", "truth": truth, "meta": {}}


def config() -> Config:
    cfg = Config(model=dict(SHAPE))
    cfg.pretrained_checkpoint.restore_from_path = None
    return cfg


def make(cfg: Config, folder: Path, *records: dict[str, Any], start: Origin | None = None) -> Path:
    return make_initial_model(cfg, folder, [(DataSource(name="train"), list(records))], start)


def test_a_model_is_made_once_from_prompts_and_answers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    cfg = config()
    cfg.trainer.warmup.steps = 0
    (tmp_path / "init.tmp").mkdir()
    (tmp_path / "init.tmp" / "half").touch()
    folder = make(cfg, tmp_path, *[record("seven", answer="nine"), record("eleven")] * 50)  # the second has no answer
    assert folder == initial_model(cfg, tmp_path) == base_folder(cfg, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["init"]
    assert not (folder / "half").exists()
    vocabulary = "".join(PreTrainedTokenizerFast.from_pretrained(folder).get_vocab())
    assert all(word in vocabulary for word in ("seven", "nine", "eleven"))
    began = (folder / "config.json").stat().st_mtime_ns
    assert make(cfg, tmp_path, record("twelve")) == folder
    assert (folder / "config.json").stat().st_mtime_ns == began


def test_a_warm_up_needs_answers_and_makes_a_base(tmp_path: Path) -> None:
    cfg = config()
    cfg.trainer.warmup.steps = 1
    with pytest.raises(DataError, match="record 'seven': its answer is None"):
        make(cfg, tmp_path, record("seven"))
    assert base_folder(cfg, tmp_path) == tmp_path / "base"
    cfg.chain.start_from = "run1"  # a run that continues another one has no warm-up
    assert base_folder(cfg, tmp_path) == tmp_path / "init"


def test_a_stage_takes_over_the_model_of_its_checkpoint_or_else_of_its_run(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "run1", tmp_path / "run1" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    start, alone = Origin(checkpoint, run, checkpoint), Origin(checkpoint, None, checkpoint)
    with pytest.raises(ConfigError, match="step-000004: expected a model folder"):
        make(config(), tmp_path / "run2", start=start)
    for folder in (run / "init", checkpoint / "hf"):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    assert (make(config(), tmp_path / "run2", start=start) / "config.json").read_text() == "hf"
    shutil.rmtree(checkpoint / "hf")
    assert (make(config(), tmp_path / "run3", start=start) / "config.json").read_text() == "init"
    with pytest.raises(ConfigError, match="got neither"):
        make(config(), tmp_path / "run4", start=alone)


def test_a_given_model_is_only_named(tmp_path: Path) -> None:
    cfg = config()
    cfg.pretrained_checkpoint.restore_from_path = "/models/qwen"
    assert make(cfg, tmp_path) == base_folder(cfg, tmp_path) == Path("/models/qwen")
    assert list(tmp_path.iterdir()) == []
