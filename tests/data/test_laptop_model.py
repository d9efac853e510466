"""The base model's folder: the same bytes each time, readable by transformers, lossless tokens; and the renderer."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.config import DataSource
from nemo_prorl.data.laptop.generators import generate, warmup_target
from nemo_prorl.data.laptop.model import EOS, MARKUP, build_base_model, build_tokenizer, qwen2_config
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import ConfigError, DataError

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 256,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 10000,
    "share_embeddings_and_output_weights": False,
}


def records() -> list[dict[str, Any]]:
    words = {"min_word_len": 3, "max_word_len": 5}
    return [
        *generate(DataSource(name="s", generator="reasoning_gym:spell_backward", options=words, size=100)),
        *generate(DataSource(name="c", generator="reasoning_gym:chain_sum", options={"max_terms": 2}, size=100)),
        *generate(DataSource(name="a", generator="arithmetic", size=100)),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    build_base_model(path, SHAPE, 1, [record["prompt"] for record in records()])
    return path


@pytest.fixture(scope="module")
def renderer(folder: Path) -> PromptRenderer:
    return PromptRenderer(folder, context_tokens=64)


def test_two_builds_are_equal_to_the_byte(folder: Path, tmp_path: Path) -> None:
    texts = [record["prompt"] for record in records()]
    build_base_model(tmp_path / "again", SHAPE, 1, texts)
    build_base_model(tmp_path / "other", SHAPE, 2, texts)
    names = sorted(path.name for path in folder.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


@pytest.mark.starts
def test_transformers_reads_it_and_agrees_on_every_tensor(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    assert all(not tensor.any() for name, tensor in state.items() if name.endswith(".bias"))
    assert all((tensor == 1).all() for name, tensor in state.items() if name.endswith("norm.weight"))
    # A random model of this scale is close to indifferent: nearly the uniform distribution's entropy.
    logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.item() == pytest.approx(torch.tensor(float(logits.shape[0])).log().item(), rel=0.02)


@pytest.mark.starts
def test_transformers_generates_from_what_the_tokenizer_returns(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked = AutoTokenizer.from_pretrained(folder)("Compute 1 + 2.", return_tensors="pt")
    made = AutoModelForCausalLM.from_pretrained(folder).generate(**asked, max_new_tokens=2, do_sample=False)
    assert made.shape[1] > asked["input_ids"].shape[1]


def test_config_names_the_special_tokens(folder: Path, renderer: PromptRenderer) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == renderer.eos_id
    assert config["vocab_size"] % 64 == 0
    assert renderer.encode(EOS) == [renderer.eos_id]


def test_tied_model_has_no_output_weight(tmp_path: Path) -> None:
    from safetensors import safe_open

    build_base_model(tmp_path, {**SHAPE, "share_embeddings_and_output_weights": True}, 1, ["some text"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  two  spaces\n\n\ttab ",
        "naïve 東京 🎉 Ελλάδα ﷽ \u200b \x00",
        "<think>1 + 23</think> so \\boxed{-24}, <answer>x</answer>",
        "it's 1,234.5e6 don't",
        "<ans wer> \\boxe {} <|unused_9|>",
    ],
)
def test_any_text_comes_back(renderer: PromptRenderer, text: str) -> None:
    assert renderer.decode(renderer.encode(text)) == text


def test_generated_prompts_and_answers_are_short_and_come_back(renderer: PromptRenderer) -> None:
    for record in records():
        ids = renderer.prompt_ids(record)
        answer = renderer.target_ids(ids, warmup_target(record))
        assert len(ids) < 45
        assert renderer.decode(ids) == record["prompt"]
        assert answer[-1] == renderer.eos_id
        assert len(answer) <= 16
        assert renderer.decode(answer) == warmup_target(record)


def test_markup_is_one_visible_token_each_and_digits_stand_alone(renderer: PromptRenderer) -> None:
    for token in MARKUP:
        assert len(renderer.encode(token)) == 1
        assert renderer.decode(renderer.encode(token)) == token
    assert len(renderer.encode("2026")) == 4
    assert renderer.decode([*renderer.encode("4"), renderer.eos_id]) == "4"


def test_rare_words_fall_into_letters_and_common_ones_do_not() -> None:
    texts = [f"Spell {word}" for word in ("alpha", "beta", "gamma", "delta", "spell")]
    tokenizer = build_tokenizer(texts)
    assert tokenizer.tokenize("Spell alpha") == ["Spell", "Ġ", "a", "l", "p", "h", "a"]


def test_message_lists_go_through_the_chat_template(renderer: PromptRenderer) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Compute 1 + 1."}]
    ids = renderer.prompt_ids({"id": "m-1", "prompt": messages})
    assert renderer.decode(ids) == "<|system|>Be short.\n<|user|>Compute 1 + 1.\n<|assistant|>"


def test_a_prompt_must_leave_room_for_a_response(renderer: PromptRenderer) -> None:
    assert len(renderer.prompt_ids({"id": "x", "prompt": "1" * 63})) == 63


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("1" * 64, "'long-3': its prompt has 64 tokens, and the context of 64"), ("", "'long-3': its prompt is empty")],
)
def test_prompt_that_does_not_fit_is_named(renderer: PromptRenderer, prompt: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        renderer.prompt_ids({"id": "long-3", "prompt": prompt})


def test_tokenizer_without_template_or_folder_is_named(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(folder)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"'m-1'.*no chat template, which its message list needs. Fix: add the temp"):
        PromptRenderer(tmp_path / "bare", 64).prompt_ids({"id": "m-1", "prompt": [{"role": "user", "content": "x"}]})
    with pytest.raises(ConfigError, match="no tokenizer_config.json"):
        PromptRenderer(tmp_path, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size=32 and model.num_attention_heads=5"),
        ({"num_query_groups": 3}, "num_query_groups=3 does not divide"),
    ],
)
def test_impossible_shapes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        qwen2_config({**SHAPE, **change}, 320)


def test_missing_shape_and_texts_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.ffn_hidden_size is missing"):
        qwen2_config({key: value for key, value in SHAPE.items() if key != "ffn_hidden_size"}, 320)
    with pytest.raises(DataError, match="at least one record"):
        build_tokenizer([])
