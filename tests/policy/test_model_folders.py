"""Model folders whose weights are not of their config.json, and the dtype of an exported policy."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_prorl import cli, settings
from nemo_prorl.data.hf_config import tensor_shapes, weights_fault
from nemo_prorl.data.render import no_template, vocabulary_fault
from nemo_prorl.policy.tools import export_hf, import_hf
from tests.policy.models import MODELS, QWEN2, shapes_of, write_model

CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fewer layers": (
        lambda model: change_config(model, num_hidden_layers=3),
        "12 tensors that config.json does not have, such as model.layers.3.input_layernorm.weight",
    ),
    "more layers": (
        lambda model: change_config(model, num_hidden_layers=5),
        "12 tensors that config.json asks for are missing, such as model.layers.4.",
    ),
    "another size": (
        lambda model: change_config(model, intermediate_size=64),
        r"model.layers.0.mlp.gate_proj.weight has the shape \[96, 64\]; config.json asks for \[64, 64\]",
    ),
    "end": (
        lambda model: os.truncate(model / "model.safetensors", 50_000),
        "model.safetensors: expected a whole file in the safetensors format .its end is cut off.. Fix: copy it again",
    ),
    "header": (lambda model: os.truncate(model / "model.safetensors", 90), "its header is cut off"),
}


def test_a_configuration_that_is_not_json_names_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    (model / "config.json").write_text("{")
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 2
    assert f"{model}/config.json:1: expected JSON: Expecting property name" in caplog.text


def change_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


CASES = [(command, name) for name in CHANGES for command in ("import-hf", "plan")]
CASES += [(command, "another size") for command in ("train --dry-run", "train", "doctor")]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_weights_that_are_not_of_their_config_are_refused_before_anything_starts(
    command: str,
    name: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    change, told = CHANGES[name]
    change(model)
    words = [*command.split(), f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    if command == "import-hf":
        words = [command, str(model), str(tmp_path / "imported")]
    assert cli.main(words) in (2, 3)
    shown = capsys.readouterr().out if command == "doctor" else caplog.text
    assert re.search(told, shown.replace("\n", " ")), shown
    assert not (tmp_path / "run" / "endpoints").exists()
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("command", ["import-hf", "plan", "train --dry-run", "train"])
def test_a_tokenizer_of_another_model_is_told(command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    assert vocabulary_fault(model) is None
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 99, "content": "<one more>"})
    file.write_text(json.dumps(tokenizer))
    words = [*command.split(), f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    if command == "import-hf":
        words = [command, str(model), str(tmp_path / "imported")]
    assert cli.main(words) == 2
    assert "the tokenizer has ids up to 99, and config.json has vocab_size=99: some ids have no row" in caplog.text
    assert not (tmp_path / "imported").exists()
    if command in ("import-hf", "plan"):
        file.unlink()
        assert cli.main(words) == 2
        assert "no vocabulary (tokenizer.json" in caplog.text
    assert not (tmp_path / "run" / "endpoints").exists()


def test_a_run_whose_prompts_all_need_a_chat_template_is_refused_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    words = ["plan", f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    assert cli.main([*words, "data.prompt=chat"]) == 2
    assert f"{model}: {no_template('data.prompt=chat')}" in caplog.text
    caplog.clear()
    assert cli.main([*words, "data.prompt=text"]) == 0
    record = {"id": "a", "task": "math", "prompt": [{"role": "user", "content": "ab"}], "truth": {"answer": "2"}}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record))
    own = f"data.train=[{{name: mine, path: {tmp_path / 'chat.jsonl'}}}]"
    for given, need in (([own], "its message list"), ([own, "data.prompt=chat"], "data.prompt=chat")):
        for command in (["plan"], ["train", "--dry-run"]):
            caplog.clear()
            assert cli.main([*command, *words[1:], *given]) == 2
            assert f"{model}: {no_template(need)}" in caplog.text
        capsys.readouterr()
        assert cli.main(["doctor", *words[1:], *given]) == 3
        assert no_template("source 'mine'").replace(". Fix: ", " ") in " ".join(capsys.readouterr().out.split())
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert cli.main([*words, "data.prompt=chat"]) == 0


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_their_config_have_no_fault(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", MODELS[name])
    assert tensor_shapes(MODELS[name], "config.json") == shapes_of(MODELS[name])
    assert weights_fault(model) is None
    tensors = load_file(model / "model.safetensors")  # as older versions of transformers wrote, and of a tied head
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(99, 64)}
    save_file(tensors | more, model / "model.safetensors")
    assert weights_fault(model) is None
    (model / "model.safetensors").unlink()
    assert weights_fault(model) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_exported_in_the_dtype_of_the_engines(dtype: str, tmp_path: Path) -> None:
    model, run = write_model(tmp_path / "model", QWEN2, torch.bfloat16), tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000004"
    checkpoint.parent.mkdir(parents=True)
    import_hf(model, checkpoint)
    shutil.rmtree(checkpoint / "hf")
    words = [f"run_dir={run}", f"pretrained_checkpoint.restore_from_path={model}", f"rollout.dtype={dtype}"]
    (run / "config.yaml").write_text(settings.resolved_yaml(settings.load(words)))
    export_hf(run, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **json.loads((model / "config.json").read_text()),
        "torch_dtype": dtype,
    }
