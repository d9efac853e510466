"""A checkpoint's policy without a model: what import and export refuse, and how much memory they take."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_prorl import cli
from nemo_prorl.errors import CheckpointError, ConfigError, DamagedCheckpoint
from nemo_prorl.policy.tools import export_hf, import_hf
from tests.policy.models import LLAMA_TIED, MODELS, QWEN2, write_model

pytestmark = pytest.mark.starts

Prorl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_are_each_other_s_inverse(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_model(tmp_path / "model", MODELS[name], dtype)
    import_hf(tmp_path / "model", tmp_path / "imported")
    export_hf(tmp_path / "imported", tmp_path / "again")
    original, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "again"))
    assert original.keys() == again.keys()
    assert all(torch.equal(original[key], again[key]) and again[key].dtype == dtype for key in original)
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
    assert not list((tmp_path / "imported").rglob("*.safetensors"))


def test_shards_are_read_and_all_small_files_are_kept(tmp_path: Path) -> None:
    """Transformers writes shards; the exported folder has the same greedy text and the same settings."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # seconds, for each worker

    folder, text = write_model(tmp_path / "whole", MODELS["qwen3"]), "abcdefgh"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=[2, 5])
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    (tmp_path / "shards" / "pytorch_model.bin").write_bytes(b"the same weights as a pickle")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3

    import_hf(tmp_path / "shards", tmp_path / "imported")
    export_hf(tmp_path / "imported", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    tokens = tokenizer(text, return_tensors="pt").input_ids
    made = [one.generate(tokens, do_sample=False, max_new_tokens=12) for one in (model, again)]
    assert torch.equal(*made)
    assert (again.generation_config.top_k, again.generation_config.eos_token_id) == (7, [2, 5])
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == tokenizer.chat_template
    small = {file.name for file in (tmp_path / "shards").iterdir() if file.suffix in (".json", ".jinja")}
    assert {file.name for file in (tmp_path / "again").iterdir()} == small - {"model.safetensors.index.json"} | {
        "model.safetensors"
    }


def test_export_prints_one_line(prorl: Prorl, tmp_path: Path) -> None:
    import_hf(write_model(tmp_path / "model", QWEN2), tmp_path / "imported")
    told = prorl("export-hf", "imported", "again")
    assert (told.returncode, told.stdout) == (0, "")
    [line] = told.stderr.splitlines()
    assert line.startswith("again: wrote a Hugging Face folder")


def without(name: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def test_a_model_without_all_its_tensors_is_not_imported(tmp_path: Path) -> None:
    write_model(tmp_path / "model", QWEN2)
    without("model.layers.2.mlp.up_proj.weight", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"are missing, such as model\.layers\.2\.mlp\.up_proj\.weight"):
        import_hf(tmp_path / "model", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_tensor_of_another_size_than_config_json_says_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model", LLAMA_TIED)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(64, 48)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    told = r"layers\.1\.self_attn\.o_proj\.weight has the shape \[64, 48\]; config.json asks for \[64, 64\]"
    with pytest.raises(ConfigError, match=told):
        import_hf(tmp_path / "model", tmp_path / "imported")


def test_key_value_heads_that_do_not_divide_the_heads_are_refused_as_by_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    write_model(model, LLAMA_TIED | {"num_key_value_heads": 3})
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 2
    assert cli.main(["plan", f"pretrained_checkpoint.restore_from_path={model}"]) == 2
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("num_key_value_heads=3: expected a divisor of num_attention_heads=4. Fix: " in line for line in told)
    assert not (tmp_path / "imported").exists()


def test_a_checkpoint_that_is_not_what_was_saved_is_not_exported(tmp_path: Path) -> None:
    write_model(tmp_path / "model", QWEN2)
    import_hf(tmp_path / "model", tmp_path / "imported")
    file = tmp_path / "imported" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"weights_sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match="weights_sha256=0000"):
        export_hf(tmp_path / "imported", tmp_path / "again")
    file.write_text("")
    with pytest.raises(DamagedCheckpoint, match="state.json cannot be read: .* Fix: mv "):
        export_hf(tmp_path / "imported", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("which", "model"), [("best", "qwen2"), ("2", "qwen2"), ("newest", "llama")])
def test_the_checkpoint_of_a_run_that_is_named_is_exported(which: str, model: str, tmp_path: Path) -> None:
    """The run has one of Qwen2, and a newer and worse one of Llama."""
    newest = tmp_path / "run" / "checkpoints" / "step-000004"
    for folder, config in ((newest.with_name("step-000002"), QWEN2), (newest, LLAMA_TIED)):
        import_hf(write_model(tmp_path / folder.name, config), folder)
    state = json.loads((newest / "state.json").read_text())
    scores = {step: {"all": {"mean": mean}} for step, mean in (("2", 0.5), ("4", 0.1))}
    state |= {"validation": {"scores": scores}, "resets": {"done": []}}
    (newest / "state.json").write_text(json.dumps(state))
    assert cli.main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--checkpoint", which]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    write_model(tmp_path / "model", QWEN2)
    import_hf(tmp_path / "model", tmp_path / "imported")
    file = tmp_path / "imported" / "hf" / "config.json"
    file.write_text(json.dumps(QWEN2 | {"num_hidden_layers": 5}))
    with pytest.raises(CheckpointError, match=r"expected shape \(5, .*from config\.json; got \(4, "):
        export_hf(tmp_path / "imported", tmp_path / "again")


PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from nemo_prorl.policy.tools import export_hf, import_hf
from safetensors import safe_open
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
folder = Path(sys.argv[1])
import_hf(folder / "model", folder / "imported")
export_hf(folder / "imported", folder / "again")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_follows_one_layer_and_not_the_model(tmp_path: Path) -> None:
    """300 MB in 24 layers: less than a third of it is in memory at a time, pages of its file included."""
    shape = {"hidden_size": 512, "intermediate_size": 5120, "num_hidden_layers": 24, "vocab_size": 512}
    write_model(tmp_path / "model", QWEN2 | shape, torch.bfloat16)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    env_free = [sys.executable, "-c", "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    done = subprocess.run(
        [*env_free, "-c", PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert size > 300e6
    assert int(done.stdout.split()[-1]) * 1024 < 0.33 * size, done.stdout
