"""Checks of a run's model folder: shape in config.json against the key `model`, tokenizer, eos, chat template."""

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
from nemo_prorl.data.hf_config import read_config
from nemo_prorl.data.model_folder import (
    missing_weights,
    no_eos,
    no_template,
    tokenizer_fault,
    unwritten_eos,
    weights_fault,
)
from nemo_prorl.data.prepared import missing_files, read_sources
from nemo_prorl.files import objects_in
from nemo_prorl.launcher.doctor.check import Check, NoAnswer, ask
from nemo_prorl.lifecycle.base_model import initial_model
from nemo_prorl.planning.prompts import template_fault
from nemo_prorl.rewards.interface import opened_thought

_TOKENIZER = """
import os, sys
os.environ.update(HF_HUB_OFFLINE="1", USE_TORCH="0", USE_TF="0", USE_FLAX="0")  # a tokenizer needs no framework
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
    """Measured facts about a tokenizer."""

    ids: int  # the highest token id plus 1
    eos: int | None  # id of the eos token; None: there is none
    chat: bool  # there is a chat template, and it renders a message
    end: str = ""  # the last characters of the rendered prompt, or the error of the template


def check_model(cfg: DictConfig) -> Iterator[Check]:
    """Check the configured model folder; without a configured folder, RUN/init, which the run's first start makes."""
    folder = initial_model(cast(Config, cfg), Path(cfg.run_dir))
    if not folder.is_dir():
        yield Check("model", "pass", f"{folder} does not exist yet; the first start makes it")
        return
    generation_file = folder / "generation_config.json"
    try:
        config = read_config(folder)
        check_shape(cfg.model, config, str(folder))
        fault = weights_fault(folder) or missing_weights(folder)
        generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    except (OSError, ValueError) as error:
        fix = "choose the group of this model (model=...), or another folder; it must be a complete Hugging Face folder"
        text, _, known = str(error).partition(". Fix: ")
        yield Check("model", "fail", text, known or fix)
        return
    if fault is not None:
        yield _failed("model", fault)
        return
    layers = f"{config.get('num_hidden_layers')} layers of {config.get('hidden_size')}"
    yield Check("model", "pass", f"{folder}: {layers}, as configured by model.*")
    if (fault := tokenizer_fault(folder)) is not None:
        yield _failed("tokenizer", fault)
        return
    try:
        answer = ask(sys.executable, _TOKENIZER, [str(folder)])
    except NoAnswer as error:
        answer = {"error": str(error)}
    if "error" in answer:
        fix = "copy the model's tokenizer files into the folder: tokenizer.json, tokenizer_config.json"
        yield Check("tokenizer", "fail", f"{folder}: the tokenizer cannot be loaded: {answer['error']}", fix)
        return
    facts = TokenizerFacts(**answer)
    yield assess_vocabulary(facts, config.get("vocab_size"))
    source = source_with_messages(cfg)
    unwritten = None if source is None else unwritten_eos(folder)
    yield _check("eos", "warn", unwritten) if unwritten else assess_eos(facts, config, generation, folder)
    if facts.chat and (fault := template_fault(cfg.data, folder)) is not None:
        yield _failed("chat", fault)
        return
    missing = len(missing_files(cfg)) if cfg.data.prompt == "as_written" else 0  # otherwise the key decides
    yield assess_chat(facts, source, missing)


def _failed(name: str, fault: str) -> Check:
    return _check(name, "fail", fault)


def _check(name: str, state: str, fault: str) -> Check:
    """Return a check whose text is followed by its fix, as in the errors of other commands."""
    text, _, fix = fault.partition(". Fix: ")
    return Check(name, state, text, fix)


def assess_vocabulary(facts: TokenizerFacts, rows: Any) -> Check:
    """Assess whether the embedding has a row for each token id; rows beyond the ids are padding."""
    if not isinstance(rows, int):
        text = f"config.json: expected a number in vocab_size; got {rows}"
        return Check("tokenizer", "fail", text, "set vocab_size to the embedding's number of rows")
    text = f"ids below {facts.ids}, vocab_size {rows}"
    if facts.ids > rows:
        fix = "use the model's own tokenizer: this one is another model's, or has tokens that the embedding lacks"
        return Check("tokenizer", "fail", f"{text}: some ids have no row in the embedding", fix)
    return Check("tokenizer", "pass", text)


def assess_eos(facts: TokenizerFacts, config: dict[str, Any], generation: dict[str, Any], folder: Path) -> Check:
    """Assess whether the model's files name the eos of the tokenizer, the only token at which a run ends a response."""
    if facts.eos is None:
        return _failed("eos", no_eos(folder))
    text = f"the tokenizer's eos is {facts.eos}; that of"
    for file, content in (("config", config), ("generation_config", generation)):
        if (ids := _ids(content.get("eos_token_id"))) and facts.eos not in ids:
            fix = "set both to the token that ends a response; a run ends a response only at the tokenizer's eos"
            return Check("eos", "warn", f"{text} {file}.json is {_listed(ids)}", fix)
    if others := (_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id"))) - {facts.eos}:
        fix = "if the model ends its responses with the tokenizer's eos, do nothing: a run ends a response only there"
        text = f"the tokenizer's eos is {facts.eos}; the model's files also name {_listed(others)}"
        return Check("eos", "warn", text, fix)
    return Check("eos", "pass", f"{facts.eos} in the tokenizer and in the model's files")


def _ids(value: Any) -> set[int]:
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _listed(ids: set[int]) -> str:
    return " and ".join(map(str, sorted(ids)))


def source_with_messages(cfg: DictConfig) -> str | None:
    """Return the name of the first source whose message lists need a chat template; None if no source does."""
    if cfg.data.prompt in ("text", "r1"):  # message lists become texts
        return None
    for source in read_sources(cfg):
        if cfg.data.prompt == "chat" or (source.path is not None and _has_messages(Path(source.path))):
            return str(source.name)
    return None


def _has_messages(file: Path) -> bool:
    """Return whether a file has prompts that are message lists; a start of the run reports missing and wrong files."""
    if not file.is_file():
        return False
    if tables.is_parquet(file):
        return tables.has_messages(file)
    with file.open("rb") as lines:
        records = (record for line in lines if b'"role"' in line for record in objects_in(line))
        return any(isinstance(record.get("prompt"), list) for record in records)


def assess_chat(facts: TokenizerFacts, source: str | None, missing: int = 0) -> Check:
    """Assess the chat template.

    Args:
        source: name of a source whose prompts need it; None: no file that exists does.
        missing: number of data files that do not exist, whose prompts may need it.
    """
    if source is None and missing:
        files = "1 data file is" if missing == 1 else f"{missing} data files are"
        has = "has a" if facts.chat else "does not have a"
        text = f"cannot be assessed yet, because {files} missing; the tokenizer {has} chat template"
        return Check("chat", "warn", text, "make the data files, then repeat this command")
    if source is None:
        return Check("chat", "pass", "not needed: all prompts are strings")
    if not facts.chat and facts.end:
        fix = "repair chat_template in tokenizer_config.json (or chat_template.jinja)"
        return Check("chat", "fail", f"the tokenizer's chat template does not render a message: {facts.end}", fix)
    if not facts.chat:
        return _failed("chat", no_template(f"source {source!r}"))
    text = f"the tokenizer has a chat template, which source {source!r} needs"
    if opened_thought(facts.end):
        text += "; its prompts end in <think>, and a response that does not close this thought has no answer"
    return Check("chat", "pass", text)
