"""Finds what is wrong with a Hugging Face model folder, from its files alone: weights, tokenizer, chat template.

Each function returns the fault with its fix, or None.  Neither torch nor transformers is imported, so that all
commands refuse the same folders with the same words, before a GPU is allocated.
"""

import json
import re
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from nemo_prorl.data.hf_config import HEAD, json_fault, keys_for, pointer_fault, read_config, takes_part, tensor_shapes
from nemo_prorl.files import read_object

_EMBEDDING = "model.embed_tokens.weight"
_DTYPES = ("F32", "BF16", "F16")
_PART = re.compile(r"-of-(\d+)\.safetensors$")
_CHUNK = 1 << 24  # bytes that are compared at once
# One of these has the vocabulary of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
_TEMPLATE_FILES = "chat_template in tokenizer_config.json, or chat_template.jinja"


def model_fault(folder: Path) -> str | None:
    """Return the first of all faults for which every run refuses a folder.

    Raises ConfigError: as `weights_fault`.
    """
    return weights_fault(folder) or tokenizer_fault(folder) or vocabulary_fault(folder) or eos_fault(folder)


def no_config(folder: Path) -> str:
    """Return that a folder has no config.json, what it is instead, and the fix."""
    if (folder / "adapter_config.json").is_file():
        kind, fix = "an adapter", "merge it into its model (peft: merge_and_unload), and save_pretrained the result"
    elif folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        kind, fix = "GGUF, which is not for training", "the same model's folder with config.json and *.safetensors"
    elif (folder / "checkpoints").is_dir() or (folder / "state.json").is_file():
        kind, fix = "a run or checkpoint of this project", f"prorl export-hf {folder} NEW, then NEW"
    elif inner := sorted(path.parent for path in folder.glob("*/config.json")):
        kind, fix = "a folder of models", str(inner[-1])
    else:
        kind, fix = "a folder without config.json" if folder.is_dir() else "a file", "the folder of a complete model"
    return f"expected a Hugging Face model folder; got {kind}. Fix: {fix}"


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def weights_fault(folder: Path) -> str | None:
    """Return how the weights in a model folder differ from its config.json.

    Of the *.safetensors files only the headers are read, and a tied model's output layer, if it is stored.  Without
    such files there is no fault.

    Raises ConfigError: config.json cannot be read, or the actor does not support the model.
    """
    tensors: dict[str, _Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            tensors |= _tensors_in(file)
        except (OSError, ValueError, KeyError) as error:
            broken = f"{file}: expected a whole file in the safetensors format ({error}). Fix: copy it again"
            return pointer_fault(file) or broken
    if not tensors:
        return None
    if fault := _index_fault(folder, {file.name for file in folder.glob("*.safetensors")}):
        return fault
    hf = read_config(folder)
    wanted = tensor_shapes(hf, str(folder / "config.json"))
    more = [name for name in tensors if name not in wanted and takes_part(name, hf)]
    wrong = next((name for name, shape in wanted.items() if name in tensors and tensors[name].shape != shape), None)
    other = next((name for name in wanted if name in tensors and tensors[name].dtype not in _DTYPES), None)
    if lacking := [name for name in wanted if name not in tensors]:
        fault = f"{len(lacking)} tensors that config.json asks for are missing, such as {lacking[0]}"
    elif more:
        fault = f"{len(more)} tensors that config.json does not have, such as {min(more)}"
    elif wrong is not None:
        fault = f"{wrong} has the shape {list(tensors[wrong].shape)}; config.json asks for {list(wanted[wrong])}"
    elif other is not None:
        dtype = f"{other} has the dtype {tensors[other].dtype}; expected {' or '.join(_DTYPES)}"
        return f"{folder}: {dtype}. Fix: the weights of this model in floating point"
    elif HEAD in tensors and HEAD not in wanted and not _equal(tensors[HEAD], tensors[_EMBEDDING]):
        return (
            f"{folder}: tie_word_embeddings=true in config.json, but {HEAD} differs from {_EMBEDDING}: the model has"
            " an output layer of its own. Fix: tie_word_embeddings=false in config.json, or delete this tensor"
        )
    else:
        return None
    keys = keys_for({name: tensor.shape for name, tensor in tensors.items()}, hf)
    fix = f"in config.json {keys}; or the weights of this config.json" if keys else _fix_of_names(tensors, wanted)
    return f"{folder}: the weights are not of this config.json: {fault}. Fix: {fix}"


def _fix_of_names(names: Collection[str], wanted: Collection[str]) -> str:
    """Return the fix for tensors under other names than the model's."""
    if all(f"model.{name}" in wanted for name in names):
        return "save the whole model, with transformers' AutoModelForCausalLM instead of AutoModel"
    if wrapper := next((name.removesuffix(_EMBEDDING) for name in names if name.endswith(f".{_EMBEDDING}")), None):
        return f"save the model inside of the wrapper that puts {wrapper!r} before the names of its tensors"
    return "config.json and weights of one model"


def _index_fault(folder: Path, files: set[str]) -> str | None:
    """Return that other files of weights are there than the index names, or an adapter's."""
    named = set(_json(folder / "model.safetensors.index.json").get("weight_map", {}).values())
    of_parts = [match for match in map(_PART.search, files) if match]
    if not named and of_parts and len(of_parts) != (parts := int(of_parts[0][1])):
        return f"{folder}: {len(of_parts)} of {parts} files of weights. Fix: copy the other files of the model, too"
    if missing := sorted(named - files):
        return f"{folder}: its index names {missing[0]}, which is missing. Fix: copy this file of the model, too"
    others = sorted(files - named if named else files & {"adapter_model.safetensors", "consolidated.safetensors"})
    if others:  # engines read what the index names, others would read all
        return f"{folder}: {others[0]} is not part of the model beside it. Fix: move this file away"
    return None


def missing_weights(folder: Path) -> str | None:
    """Return that a model folder has no weights that are read."""
    if any(folder.glob("*.safetensors")):
        return None
    fix = (
        "copy the model's model.safetensors, or all its model-*.safetensors, into it:"
        f" hf download NAME --include '*.safetensors' --local-dir {folder}"
    )
    if others := sorted(file.name for file in folder.glob("*.bin")):
        fix = (
            f'convert {others[0]} with transformers: python -c "from transformers import AutoModelForCausalLM as M;'
            f" M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return f"{folder}: no weights (*.safetensors). Fix: {fix}"


def _tensors_in(file: Path) -> dict[str, _Tensor]:
    """Return the tensors of a safetensors file by name.  Raises ValueError if the file is not whole."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= (room := file.stat().st_size - 8):
            raise ValueError("its header is cut off")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0) > room:
        raise ValueError("its end is cut off")
    start = 8 + length
    return {
        name: _Tensor(file, tensor["dtype"], tuple(tensor["shape"]), *(start + at for at in tensor["data_offsets"]))
        for name, tensor in header.items()
    }


def _equal(left: _Tensor, right: _Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with left.file.open("rb") as first, right.file.open("rb") as second:
        first.seek(left.begin)
        second.seek(right.begin)
        size = left.end - left.begin
        parts = (min(_CHUNK, size - at) for at in range(0, size, _CHUNK))
        return all(first.read(part) == second.read(part) for part in parts)


def tokenizer_fault(folder: Path) -> str | None:
    """Return which files of a tokenizer a model folder lacks, or that transformers 4 cannot load it."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    for file in (folder / name for name in names):
        if file.is_file() and (fault := json_fault(file) if file.suffix == ".json" else pointer_fault(file)):
            return fault
    lacks = [] if (folder / "tokenizer_config.json").is_file() else ["no tokenizer_config.json"]
    vocabularies = {file.name for pattern in _VOCABULARIES for file in folder.glob(pattern)}
    if not vocabularies or (vocabularies == {"vocab.json"} and not (folder / "merges.txt").is_file()):
        lacks.append("no vocabulary (tokenizer.json, or vocab.json with merges.txt)")
    settings = _json(folder / "tokenizer_config.json")
    newer = None
    if settings.get("tokenizer_class") == "TokenizersBackend":
        newer = "tokenizer_class=TokenizersBackend", "tokenizer_class=PreTrainedTokenizerFast"
    elif isinstance(settings.get("extra_special_tokens"), list):
        newer = "extra_special_tokens as a list", "rename it additional_special_tokens"
    if newer:
        file = folder / "tokenizer_config.json"
        return f"{file}: {newer[0]} is of transformers 5, and the trainer has transformers 4. Fix: {newer[1]}"
    if not lacks:
        return None
    return (
        f"{folder}: {' and '.join(lacks)}, so no tokenizer. Fix: copy the model's tokenizer files into it, or name"
        " another Hugging Face model folder"
    )


def vocabulary_fault(folder: Path) -> str | None:
    """Return that a tokenizer has ids without a row in the embedding.  Reads tokenizer.json only."""
    ids, rows = _ids(folder), _json(folder / "config.json").get("vocab_size")
    highest = max(ids.values(), default=-1)
    if not isinstance(rows, int) or highest < rows:
        return None  # other checks name what is missing
    return (
        f"{folder}: the tokenizer has ids up to {highest}, and config.json has vocab_size={rows}: some ids have no row"
        " in the embedding. Fix: the model's own tokenizer"
    )


def eos_fault(folder: Path) -> str | None:
    """Return that a tokenizer has no eos token.  A class with an eos of its own, such as Qwen2Tokenizer, has one."""
    settings, ids, text = _tokenizer_settings(folder), _ids(folder), _eos(folder)
    if text and ids and text not in ids:
        fix = "Fix: eos_token in tokenizer_config.json, one of the tokens"
        return f"{folder}: eos_token={text!r} is not a token of this tokenizer. {fix}"
    kind = settings.get("tokenizer_class")
    if text or not (kind in ("PreTrainedTokenizer", "PreTrainedTokenizerFast") or "eos_token" in settings):
        return None
    return no_eos(folder)


def no_eos(folder: Path) -> str:
    return f"{folder}: the tokenizer does not have an eos token. Fix: set eos_token in tokenizer_config.json"


def other_eos(folder: Path) -> str | None:
    """Return that config.json names other eos tokens than the tokenizer, whose eos alone ends a response of a run."""
    own, named = _ids(folder).get(_eos(folder) or ""), _json(folder / "config.json").get("eos_token_id")
    others = named if isinstance(named, list) else [named]
    if own is None or named is None or own in others:
        return None
    return (
        f"{folder}: the tokenizer's eos is {own}; config.json has eos_token_id={named}. A run ends a response only at"
        " the tokenizer's. Fix: set both to the token with which this model ends a response"
    )


def unwritten_eos(folder: Path) -> str | None:
    """Return that a chat template ends a reply with another token than eos, which a model trained with it never writes.

    Without jinja2, or with a template that refuses a plain dialogue, there is no fault.
    """
    eos, template, reply = _eos(folder), chat_template(folder), "REPLY"
    if not eos or template is None:
        return None
    try:
        dialogue = [{"role": "user", "content": "PROMPT"}, {"role": "assistant", "content": reply}]
        _, separator, end = rendered(template, dialogue, add_generation_prompt=False, eos_token=eos).rpartition(reply)
        tokens, end = _added(folder), end.lstrip()
    except Exception:  # a template may raise anything
        return None
    closing = max((token for token in tokens if token and end.startswith(token)), key=len, default=None)
    if not separator or closing is None or eos in end:
        return None
    named = [name for name in ("config.json", "generation_config.json") if "eos_token_id" in _json(folder / name)]
    return (
        f"{folder}: the chat template ends a reply with {closing!r}, but the tokenizer's eos is {eos!r}, and a run ends"
        " a response only at eos. A model that was trained with this template writes each response up to the limit."
        f" Fix: eos_token={json.dumps(closing)} in tokenizer_config.json, and eos_token_id={tokens[closing]} in"
        f" {' and '.join(named) or 'config.json'}"
    )


def eos_caution(folder: Path, messages: bool) -> str | None:
    """Return that a model may end its responses with another token than eos.  `messages`: it gets messages."""
    return (unwritten_eos(folder) if messages else None) or other_eos(folder)


def chat_template(folder: Path) -> str | None:
    """Return a folder's chat template: chat_template.jinja, or the key `chat_template` of tokenizer_config.json."""
    try:
        if (file := folder / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    templates = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(templates, list):  # several named templates
        templates = {template["name"]: template["template"] for template in templates}.get("default")
    return templates if isinstance(templates, str) else None


def no_template(need: str) -> str:
    """Return that a tokenizer lacks the chat template that `need` (a key, a prompt) needs, and the fix."""
    return (
        f"the tokenizer has no chat template, which {need} needs. Fix: add the template of the model's chat variant to"
        " the folder, as the file chat_template.jinja or the key chat_template of tokenizer_config.json; or"
        " data.prompt=text, which makes text of messages"
    )


def refused_messages(error: Exception, system: str | None) -> str:
    """Return that a chat template refuses messages, and the fix.  `system`: value of `data.system`."""
    if system is None:
        fix = "write the messages as the template expects them, or data.prompt=text"
        return f"the tokenizer's chat template refuses its messages: {error}. Fix: {fix}"
    fix = "leave data.system out, and write its text into the prompts (data.templates), or data.prompt=text"
    return f"the tokenizer's chat template refuses the messages with data.system={system!r}: {error}. Fix: {fix}"


def syntax_fault(folder: Path) -> str | None:
    """Return that a folder's chat template is not Jinja; None, too, where jinja2 is not installed."""
    if (template := chat_template(folder)) is None:
        return None
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError:  # the package installed without what trains
        return None

    try:
        _jinja().parse(template)
    except TemplateSyntaxError as error:
        if "tag 'generation'" in str(error):  # a tag of transformers, in templates for training
            return None
        return f"{folder}: the chat template is not Jinja: line {error.lineno}: {error}. Fix: repair {_TEMPLATE_FILES}"
    return None


class TemplateRefused(Exception):
    """A chat template refuses the messages."""


def rendered(template: str, messages: Any, *, add_generation_prompt: bool = True, eos_token: str = "<eos>") -> str:
    """Return messages in a chat template's form, like transformers.

    Raises TemplateRefused, or whatever the template raises.
    """

    def refuse(text: str) -> None:
        raise TemplateRefused(text)

    jinja = _jinja()
    jinja.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    values = {"add_generation_prompt": add_generation_prompt, "bos_token": "<bos>", "eos_token": eos_token}
    return jinja.from_string(template).render(messages=messages, **values)


def _jinja() -> Any:
    """Return the Jinja environment of transformers, without its tag `generation`."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])


def _eos(folder: Path) -> str | None:
    """Return the eos token that the tokenizer's files name."""
    token = _tokenizer_settings(folder).get("eos_token")
    return token["content"] if isinstance(token, dict) else token


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def _ids(folder: Path) -> dict[str, int]:
    """Return the id of each token in tokenizer.json; {} if it is missing, or of another form."""
    try:
        words = _json(folder / "tokenizer.json")["model"]["vocab"]
        ids = {word: at for at, (word, *_) in enumerate(words)} if isinstance(words, list) else dict(words)
        return ids | _added(folder)
    except (KeyError, TypeError, ValueError):
        return {}


def _added(folder: Path) -> dict[str, int]:
    """Return the id of each token that was added to the vocabulary, such as the special ones."""
    return {token["content"]: token["id"] for token in _json(folder / "tokenizer.json").get("added_tokens", [])}


def _json(file: Path) -> dict[str, Any]:
    return read_object(file) or {}
