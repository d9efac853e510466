"""The model folder of a run: config.json against `model`, tokenizer, eos, chat template."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from nemo_prorl.checks import check_shape
from nemo_prorl.config import Config
from nemo_prorl.data import parquet as tables
from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask
from nemo_prorl.lifecycle.base_model import initial_model
from nemo_prorl.rewards.interface import opened_thought

_TOKENIZER = """
import os, sys
os.environ.update(HF_HUB_OFFLINE="1", USE_TORCH="0", USE_TF="0", USE_FLAX="0")  # a tokenizer needs none of them
from transformers import AutoTokenizer
try:
    t = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    ids = max(t.get_vocab().values(), default=-1) + 1
    chat, end = t.chat_template is not None, ""
    if chat:
        try:
            end = t.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True)
        except Exception as error:
            end, chat = str(error), False
    answer({"ids": ids, "eos": t.eos_token_id, "chat": chat, "end": end[-200:]})
except Exception as error:
    answer({"error": (str(error).strip() or repr(error)).splitlines()[0]})
"""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer as it loads.

    `ids`: one more than its highest token id.  `chat`: the chat template renders a message.  `end`: the last
    characters of the rendered prompt, or why the template does not render.
    """

    ids: int
    eos: int | None
    chat: bool
    end: str = ""


def check_model(cfg: DictConfig) -> Iterator[Check]:
    """Check the given folder, or the one that the run made at its first start."""
    folder = initial_model(cast(Config, cfg), Path(cfg.run_dir))
    if not folder.is_dir():
        yield Check("model", "pass", f"{folder} is made at the first start")
        return
    generation_file = folder / "generation_config.json"
    try:
        config = json.loads((folder / "config.json").read_text())
        check_shape(cfg.model, config, str(folder))
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    except (OSError, ValueError) as error:
        cure = "choose the model's own group (model=...), or another folder: a complete Hugging Face folder"
        yield Check("model", "fail", f"{folder}: {error}", cure)
        return
    layers = f"{config.get('num_hidden_layers')} layers of {config.get('hidden_size')}"
    yield Check("model", "pass", f"{folder}: {layers}, as model says")
    try:
        told = ask(sys.executable, _TOKENIZER, [str(folder)])
    except NoAnswer as error:
        told = {"error": str(error)}
    if "error" in told:
        cure = "copy the model's tokenizer files into the folder: tokenizer.json, tokenizer_config.json"
        yield Check("tokenizer", "fail", f"{folder}: no tokenizer loads: {told['error']}", cure)
        return
    facts = TokenizerFacts(**told)
    yield vocabulary_judged(facts, config.get("vocab_size"))
    yield from eos_judged(facts, config, generation)
    yield chat_judged(facts, source_with_messages(cfg))


def vocabulary_judged(facts: TokenizerFacts, rows: Any) -> Check:
    """Check that each id has a row of the embedding; more rows than ids are padding."""
    if not isinstance(rows, int):
        return Check(
            "tokenizer", "fail", f"config.json: vocab_size={rows}", "write the embedding's number of rows there"
        )
    text = f"ids below {facts.ids}, vocab_size {rows}"
    if facts.ids > rows:
        cure = (
            "this is another model's tokenizer, or one with added tokens that the embedding lacks: take the model's own"
        )
        return Check("tokenizer", "fail", text, cure)
    return Check("tokenizer", "pass", text)


def eos_judged(facts: TokenizerFacts, config: dict[str, Any], generation: dict[str, Any]) -> Iterator[Check]:
    """Responses end with the tokenizer's eos; a model that was taught to end otherwise would never end one."""
    if facts.eos is None:
        yield Check("eos", "fail", "the tokenizer has no eos token", "set eos_token in tokenizer_config.json")
        return
    ours = _ids(config.get("eos_token_id"))
    if ours and facts.eos not in ours:
        cure = "make eos_token in tokenizer_config.json and eos_token_id in config.json the one that ends a response"
        yield Check("eos", "fail", f"the tokenizer's is {facts.eos}, config.json's {_said(ours)}", cure)
        return
    theirs = _ids(generation.get("eos_token_id"))
    if theirs and facts.eos not in theirs:
        cure = "the run stops at the tokenizer's only: see which token ends the model's responses, and make both it"
        yield Check("eos", "warn", f"the tokenizer's is {facts.eos}, generation_config.json's {_said(theirs)}", cure)
    elif others := sorted((ours | theirs) - {facts.eos}):
        cure = "only the tokenizer's ends a response in a run: nothing to do where the model ends with it"
        yield Check("eos", "warn", f"{facts.eos}; the model's files name {_said(set(others))} beside it", cure)
    else:
        yield Check("eos", "pass", f"{facts.eos} in tokenizer and the model's files")


def _ids(value: Any) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _said(ids: set[int]) -> str:
    return " and ".join(map(str, sorted(ids)))


def source_with_messages(cfg: DictConfig) -> str | None:
    """Return the name of the first source with a file that has a prompt which is a message list."""
    for source in (*cfg.data.train, *cfg.data.validation):
        if source.path is None or not Path(source.path).is_file():  # doctor/data.py names the missing ones
            continue
        if tables.is_parquet(source.path):
            if tables.has_messages(source.path):
                return str(source.name)
            continue
        with Path(source.path).open(errors="replace") as lines:
            if any(_has_messages(line) for line in lines):
                return str(source.name)
    return None


def _has_messages(line: str) -> bool:
    try:
        record = json.loads(line) if '"role"' in line else None
    except ValueError:  # a start says what is wrong with a record
        return False
    return isinstance(record, dict) and isinstance(record.get("prompt"), list)


def chat_judged(facts: TokenizerFacts, source: str | None) -> Check:
    if source is None:
        return Check("chat", "pass", "no file of prompts has message lists: no chat template is needed")
    if not facts.chat and facts.end:
        cure = "repair chat_template in tokenizer_config.json (or chat_template.jinja)"
        return Check("chat", "fail", f"the tokenizer's chat template does not render a message: {facts.end}", cure)
    if not facts.chat:
        cure = "put chat_template into tokenizer_config.json (or chat_template.jinja), or write prompts as strings"
        return Check("chat", "fail", f"source {source!r} has message lists, the tokenizer no chat template", cure)
    text = f"the tokenizer has a chat template, for source {source!r} and others"
    if opened_thought(facts.end):
        text += "; its prompts end in <think>, and a response that never closes this thought is not an answer"
    return Check("chat", "pass", text)
