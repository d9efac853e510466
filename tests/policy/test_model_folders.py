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
from nemo_prorl.data.hf_config import tensor_shapes
from nemo_prorl.data.laptop.model import CHAT_TEMPLATE
from nemo_prorl.data.model_folder import no_template, other_eos, unwritten_eos, vocabulary_fault, weights_fault
from nemo_prorl.errors import ConfigError
from nemo_prorl.policy.tools import export_hf, import_hf
from nemo_prorl.rollout.engine.weight_load import shapes_of_model
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
    "a whole number": (
        lambda model: change_tensor(model, "model.norm.weight", lambda tensor: tensor.to(torch.int8)),
        "model.norm.weight has the dtype I8; expected F32 or BF16 or F16",
    ),
    "head of its own": (
        lambda model: tie(model, more=1),
        "tie_word_embeddings=true in config.json, but lm_head.weight differs from model.embed_tokens.weight",
    ),
    "dtype": (
        lambda model: change_config(model, torch_dtype="bf16"),
        "torch_dtype='bf16': expected one of float32, bfloat16, float16. Fix: the model's own config.json",
    ),
    "another class of model": (
        lambda model: change_config(model, architectures=["LlamaForCausalLM"]),
        r'architectures=\["LlamaForCausalLM"\]: model_type=qwen2 has \["Qwen2ForCausalLM"\]; engines load what',
    ),
    "a rotary base with a fraction": (
        lambda model: change_config(model, rope_theta=10000.5),
        "rope_theta=10000.5: expected a whole number, the only kind that NeMo takes. Fix: another model",
    ),
    "size as text": (
        lambda model: change_config(model, hidden_size="64"),
        'hidden_size="64": expected a whole number of at least 1. Fix: the model',
    ),
    "no vocabulary size": (
        lambda model: change_config(model, vocab_size=None),
        "(?<!interpolation: )/[^ ]*: vocab_size=null: expected a whole number of at least 1",
    ),
    "another class": (
        lambda model: change_tokenizer(model, tokenizer_class="TokenizersBackend"),
        "tokenizer_class=TokenizersBackend is of transformers 5, .* tokenizer_class=PreTrainedTokenizerFast",
    ),
    "a list of tokens": (
        lambda model: change_tokenizer(model, extra_special_tokens=["<bos>"]),
        "extra_special_tokens as a list is of transformers 5, .* rename it additional_special_tokens",
    ),
    "an eos that is no token": (
        lambda model: change_tokenizer(model, eos_token="</s>"),
        "eos_token='</s>' is not a token of this tokenizer. Fix: eos_token in tokenizer_config.json",
    ),
    "two copies": (
        lambda model: index(model, "model-00001-of-00001.safetensors", keep=True),
        "model.safetensors is not part of the model beside it. Fix: move this file away",
    ),
    "a missing shard": (
        lambda model: index(model, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        "its index names model-00002-of-00002.safetensors, which is missing. Fix: copy this file",
    ),
    "an adapter": (
        lambda model: shutil.copyfile(model / "model.safetensors", model / "adapter_model.safetensors"),
        "adapter_model.safetensors is not part of the model beside it. Fix: move this file away",
    ),
    "no eos": (
        lambda model: change_tokenizer(model, eos_token=None),
        "the tokenizer does not have an eos token.* set eos_token in tokenizer_config.json",
    ),
    "header": (lambda model: os.truncate(model / "model.safetensors", 90), "its header is cut off"),
}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
HEADS = {"head_dim": 16}
# Problems that leave room for a response in the context of 64 tokens: the tokenizer's tokens are characters.
SHORT = ["data.train=[{name: sums, generator: arithmetic, size: 9}]", "data.validation=[]"]
SHORT += ['data.templates.math="{problem}"']
# A model, a change of its config.json, and the key that the error names.
KEYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (QWEN2, {"hidden_size": 128}, "hidden_size: 64 instead of 128"),
    (QWEN2, {"vocab_size": 120}, "vocab_size: 99 instead of 120"),
    (QWEN2, {"intermediate_size": 64}, "intermediate_size: 96 instead of 64"),
    (
        QWEN2,
        {"num_hidden_layers": 3, "vocab_size": 98},
        "vocab_size: 99 instead of 98, num_hidden_layers: 4 instead of 3",
    ),
    (QWEN2, {"model_type": "llama", "architectures": None}, 'model_type: "qwen2" instead of "llama"'),
    (QWEN2, {"num_key_value_heads": 1}, "num_attention_heads: 2 instead of 4 or num_key_value_heads: 2 instead of 1"),
    (QWEN2 | HEADS, {"num_attention_heads": 8}, "num_attention_heads: 4 instead of 8"),
    (QWEN2 | HEADS, {"num_key_value_heads": 4}, "num_key_value_heads: 2 instead of 4"),
    (QWEN2 | HEADS, {"head_dim": 32}, "head_dim: 16 instead of 32"),
    (MODELS["qwen3"], {"head_dim": None}, "head_dim: 32 instead of null"),
    (MODELS["qwen3"], {"model_type": "qwen2", "architectures": None}, 'model_type: "qwen3" instead of "qwen2"'),
    (MODELS["llama_tied"], {"tie_word_embeddings": False}, "tie_word_embeddings: true instead of false"),
]


@pytest.mark.parametrize(("model", "change", "keys"), KEYS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_keys_that_the_weights_contradict_are_named(
    model: dict[str, Any], change: dict[str, Any], keys: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", model)
    change_config(folder, **change)
    assert str(weights_fault(folder)).endswith(f". Fix: in config.json {keys}; or the weights of this config.json")


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (lambda name: name.removeprefix("model."), "AutoModelForCausalLM instead of AutoModel"),
        (lambda name: f"_orig_mod.{name}", "the model inside of the wrapper that puts '_orig_mod.' before the names"),
        (lambda name: f"transformer.{name}.x", "Fix: config.json and weights of one model"),
    ],
)
def test_tensors_under_other_names_are_told_with_their_cause(
    rename: Callable[[str], str], told: str, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "model", MODELS["llama_tied"]) / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
    assert told in str(weights_fault(file.parent))


def test_files_of_a_model_in_parts_are_counted_without_an_index(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    assert "1 of 2 files of weights. Fix: copy the other files" in str(weights_fault(model))
    (model / "model-00001-of-00002.safetensors").rename(model / "model-00001-of-00001.safetensors")
    assert weights_fault(model) is None


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "tokenizer.model", "config.json"])
@pytest.mark.parametrize("command", ["plan", "train --dry-run", "import-hf"])
def test_a_pointer_of_git_lfs_is_told_as_one(
    file: str, command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    (model / file).write_text(POINTER)
    words = [*command.split(), f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    assert cli.main([command, str(model), str(tmp_path / "imported")] if command == "import-hf" else words) == 2
    assert f"{model}/{file}: it is a pointer of git-lfs to the file. Fix: git lfs pull, in {model}" in caplog.text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda model: os.truncate(model / "tokenizer.json", 500),
            r"tokenizer.json:\d+: expected JSON: .* copy the model",
        ),
        (
            lambda model: (model / "tokenizer.json").rename(model / "vocab.json"),
            r"no vocabulary .tokenizer.json, or vocab",
        ),
    ],
)
def test_import_refuses_half_a_tokenizer(
    change: Callable[[Path], object], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(model := write_model(tmp_path / "model", QWEN2))
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 2
    assert re.search(told, caplog.text)
    assert not (tmp_path / "imported").exists()


def test_a_configuration_that_is_not_json_names_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    (model / "config.json").write_text("{")
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 2
    assert f"{model}/config.json:1: expected JSON: Expecting property name" in caplog.text


def change_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def change_tensor(model: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], to: str = "") -> None:
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {to or name: change(tensors[name])}, model / "model.safetensors")


def change_tokenizer(model: Path, **changes: Any) -> None:
    file = model / "tokenizer_config.json"
    (model / "special_tokens_map.json").unlink(missing_ok=True)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def index(model: Path, file: str, *more: str, keep: bool = False) -> None:
    """Give a model an index, as of a model in several files, of which `file` has all tensors."""
    shutil.copyfile(model / "model.safetensors", model / file)
    names = {str(number): name for number, name in enumerate([file, *more])}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    if not keep:
        (model / "model.safetensors").unlink()


def tie(model: Path, more: float = 0) -> None:
    """Make a model share the weights of its embedding and output layer; the file has both, and `more` in the latter."""
    change_config(model, tie_word_embeddings=True)
    change_tensor(model, "model.embed_tokens.weight", lambda tensor: tensor + more, to="lm_head.weight")


CASES = [(command, name) for name in CHANGES for command in ("import-hf", "plan")]
CASES += [(command, "another size") for command in ("train --dry-run", "train", "doctor")]
CASES += [
    (command, name) for name in ("head of its own", "no eos") for command in ("train --dry-run", "train", "doctor")
]
REPEATED = [case for case in CASES if case[0] in ("train", "doctor") and case != ("train", "another size")]


@pytest.mark.parametrize(
    ("command", "name"), [pytest.param(*case, marks=pytest.mark.slow if case in REPEATED else ()) for case in CASES]
)
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


@pytest.mark.parametrize(
    "command", ["import-hf", "plan", "train --dry-run", pytest.param("train", marks=pytest.mark.slow)]
)
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
    words = ["plan", f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}", *SHORT]
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
    head = tensors["model.embed_tokens.weight" if MODELS[name]["tie_word_embeddings"] else "lm_head.weight"].clone()
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": head}
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


def test_a_tensor_with_values_that_are_not_finite_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    change_tensor(model, "model.norm.weight", lambda tensor: tensor * float("nan"))
    assert cli.main(["import-hf", str(model), str(tmp_path / "imported")]) == 2
    assert "model.safetensors: model.norm.weight has NaN or infinite values. Fix: copy the file again" in caplog.text
    assert not (tmp_path / "imported").exists()


def test_an_output_layer_that_is_stored_though_it_is_the_embedding_changes_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", QWEN2)
    tie(model)
    assert weights_fault(model) is None
    assert "lm_head.weight" not in shapes_of_model(str(model))  # what the trainer publishes for the engines
    import_hf(model, tmp_path / "imported")
    export_hf(tmp_path / "imported", tmp_path / "exported")
    tensors, exported = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "exported"))
    assert sorted(exported) == sorted(tensors.keys() - {"lm_head.weight"})
    assert all(torch.equal(exported[name], tensors[name]) for name in exported)


@pytest.mark.parametrize("command", [["plan"], ["train", "--dry-run"]])
def test_a_chat_template_that_is_not_jinja_is_refused_with_its_line(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    (model / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }")
    words = [*command, f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}", *SHORT]
    assert cli.main([*words, "data.prompt=chat"]) == 2
    assert f"{model}: the chat template is not Jinja: line 2: " in caplog.text
    assert cli.main([*words, "data.prompt=text"]) == 0
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert cli.main([*words, "data.prompt=chat"]) == 0  # transformers has this tag


@pytest.mark.parametrize(
    "command", ["plan", "train --dry-run", "train", pytest.param("doctor", marks=pytest.mark.slow)]
)
def test_a_chat_template_that_refuses_a_system_prompt_is_told_before_a_start(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}"
    (model / "chat_template.jinja").write_text(refuse + "{{ messages[0].content }}")
    words = [f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}", "data.prompt=chat"]
    words += ["trainer.warmup.steps=0", *SHORT]
    assert cli.main([*command.split(), *words, "data.system=Hi."]) in (2, 3, 4)
    told = caplog.text + capsys.readouterr().out
    assert "chat template refuses the messages with data.system='Hi.': No system role." in told
    assert "leave data.system out, and write its text into the prompts (data.templates)" in told
    assert not (tmp_path / "run" / "endpoints").exists()
    if command in ("plan", "train --dry-run"):
        assert cli.main([*command.split(), *words]) == 0


@pytest.mark.parametrize("command", ["plan", "train --dry-run", "train"])
def test_a_tokenizer_that_transformers_cannot_load_is_told(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    (model / "tokenizer.json").write_text("{}")
    words = [f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    assert cli.main([*command.split(), *words, "trainer.warmup.steps=0", *SHORT]) == 2
    assert f"{model}: transformers cannot load the tokenizer: Exception: " in caplog.text
    assert "Fix: copy the model's tokenizer files again, in a form for transformers 4" in caplog.text


@pytest.mark.parametrize("command", ["plan", "train --dry-run", pytest.param("doctor", marks=pytest.mark.slow)])
def test_generated_prompts_that_fill_the_context_are_told_before_a_start(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    model = write_model(tmp_path / "model", QWEN2 | shape)
    words = [f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}"]
    words += ["trainer.warmup.steps=0", "data=domains", "data.tasks=[instructions]"]
    assert cli.main([*command.split(), *words, "trainer.grpo.context_tokens=32"]) in (3, 4)
    told = caplog.text + capsys.readouterr().out
    assert "trainer.grpo.context_tokens=32 leaves no room for a response to these prompts" in told
    assert re.search(r"data.train, source 'instructions': \d+ of 64 prompts; the longest, record 'instructions-", told)
    assert "source 'gcd': 32 of 32 prompts" in told  # of data.validation, which data.tasks leaves as it is
    assert "data.train, source 'gcd'" not in told
    if command == "plan":
        assert cli.main(["plan", *words, "trainer.grpo.context_tokens=512"]) == 0
        longest = re.search(r"in a sample of the generated problems at most (\d+) tokens", capsys.readouterr().out)
        assert longest is not None
        close = int(longest[1]) + 1  # transformers counts exactly, and agrees
        assert cli.main(["plan", *words, f"trainer.grpo.context_tokens={close}"]) == 0
        assert cli.main(["plan", *words, f"trainer.grpo.context_tokens={close - 1}"]) == 4


def test_a_checkpoint_whose_model_folder_was_moved_names_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, run = write_model(tmp_path / "model", QWEN2), tmp_path / "run"
    checkpoint = run / "checkpoints" / "step-000004"
    checkpoint.parent.mkdir(parents=True)
    import_hf(model, checkpoint)
    shutil.rmtree(checkpoint / "hf")
    words = [f"run_dir={run}", f"pretrained_checkpoint.restore_from_path={model}"]
    (run / "config.yaml").write_text(settings.resolved_yaml(settings.load(words)))
    moved = model.rename(tmp_path / "moved")
    assert cli.main(["export-hf", str(run), str(tmp_path / "out")]) == 2
    assert f"Fix: move the folder back, or a link: ln -s FOLDER {model}" in caplog.text
    with pytest.raises(ConfigError, match=f"if the folder was moved, a link: ln -s {moved} {model}"):
        settings.load_run([words[0], f"pretrained_checkpoint.restore_from_path={moved}"])
    model.symlink_to(moved)
    assert cli.main(["export-hf", str(run), str(tmp_path / "out")]) == 0
    model.unlink()
    shutil.copytree(moved, run / "base")  # made by a warm-up
    assert cli.main(["export-hf", str(run), str(tmp_path / "again")]) == 0


def test_another_end_token_in_config_json_is_a_caution(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    words = ["plan", f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}", *SHORT]
    assert cli.main(words) == 0
    assert "eos" not in caplog.text
    change_config(model, eos_token_id=7)
    assert cli.main(words) == 0
    assert f"{model}: the tokenizer's eos is 2; config.json has eos_token_id=7. A run ends" in caplog.text


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def with_template(model: Path, template: str) -> Path:
    """The model whose token 1 is <|im_end|>; eos, token 2, is <eos>."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((model / name).read_text().replace("<bos>", "<|im_end|>"))
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CHATML, True),
        (CHATML.replace("<|im_end|>", " <|im_end|> "), True),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), False),  # as of DeepSeek-R1-Distill, in effect
        (CHATML.replace("<|im_end|>", "<eos>"), False),  # as of Qwen2.5, Qwen3, Llama 3 and SmolLM2, in effect
        (CHATML + "<eos>", False),  # eos follows
        (CHATML.replace("<|im_end|>", "\n\nUser:"), False),  # text
        (CHATML + "{{ raise_exception('no') }}", False),
        ("{% for", False),
        ("no reply<|im_end|>", False),
        (CHAT_TEMPLATE, False),
    ],
)
def test_an_end_of_replies_that_is_not_eos_is_told(template: str, told: bool, tmp_path: Path) -> None:
    model = with_template(write_model(tmp_path / "model", QWEN2), template)
    fault = unwritten_eos(model)
    assert bool(fault) == told
    if fault:
        assert "ends a reply with '<|im_end|>', but the tokenizer's eos is '<eos>'" in fault
        assert fault.endswith('Fix: eos_token="<|im_end|>" in tokenizer_config.json, and eos_token_id=1 in config.json')
        (model / "generation_config.json").write_text('{"eos_token_id": 2}')
        assert str(unwritten_eos(model)).endswith(", and eos_token_id=1 in config.json and generation_config.json")
        change_config(model, eos_token_id=1)
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|im_end|>"}))
        assert unwritten_eos(model) is other_eos(model) is None


def test_an_end_of_replies_that_is_not_eos_matters_only_where_messages_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    with_template(model, CHATML)
    words = ["plan", f"run_dir={tmp_path / 'run'}", f"pretrained_checkpoint.restore_from_path={model}", *SHORT]
    record = {"id": "a", "task": "math", "truth": {"answer": "2"}}
    messages = [{"role": "user", "content": "1+1"}]
    for name, prompt in (("text", "1+1"), ("messages", messages)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record | {"prompt": prompt}) + "\n")
    files = {name: f"data.train=[{{name: a, path: {tmp_path / name}.jsonl}}]" for name in ("text", "messages")}
    for more, told in (
        (["data.prompt=chat"], True),
        ([files["messages"]], True),
        ([files["messages"], "data.prompt=text"], False),
        ([files["text"]], False),
        ([], False),
    ):
        caplog.clear()
        assert cli.main([*words, *more]) == 0, caplog.text
        assert ("ends a reply with '<|im_end|>'" in caplog.text) == told, more


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("adapter_config.json", "got an adapter. Fix: merge it into its model"),
        ("state.json", "got a run or checkpoint of this project. Fix: prorl export-hf"),
        ("checkpoint-5/config.json", "got a folder of models. Fix: .*/checkpoint-5"),
        ("model-Q4_K_M.gguf", "got GGUF, which is not for training. Fix: the same model's folder with config.json"),
        ("README.md", "got a folder without config.json. Fix: the folder of a complete model"),
    ],
)
def test_a_folder_without_config_json_is_told_as_what_it_is(
    file: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model" / file).parent.mkdir(parents=True)
    (tmp_path / "model" / file).write_text("{}")
    assert (
        cli.main(["plan", f"run_dir={tmp_path}/run", f"pretrained_checkpoint.restore_from_path={tmp_path}/model"]) == 2
    )
    assert re.search(told, caplog.text)
    caplog.clear()
    inner = f"{tmp_path}/model/{file}"
    assert cli.main(["plan", f"run_dir={tmp_path}/run", f"pretrained_checkpoint.restore_from_path={inner}"]) == 2
    assert re.search("got (a file|GGUF.*). Fix: the .*(folder of a complete model|same model's folder)", caplog.text)


def test_an_exported_rotary_base_is_read_by_transformers_4_and_5(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    model = write_model(tmp_path / "model", {key: value for key, value in QWEN2.items() if key != "rope_theta"})
    change_config(model, rope_parameters=rope)
    import_hf(model, tmp_path / "imported")
    export_hf(tmp_path / "imported", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_parameters"], config.get("rope_scaling")) == (1000000.0, rope, None)
