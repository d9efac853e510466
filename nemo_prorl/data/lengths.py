"""Compares the length of every prompt with the limits of a run, before and in the run by the same function.

Lengths are tokens, by the model's tokenizer and chat template.  Those of a large file are cached, so that `prorl plan`,
`launch`, `doctor` and each start of the run count them once.  The name of a cache file is a hash of everything that the
lengths follow from: the prompts, their form, the system prompt, the files of the tokenizer and the versions of the
packages.  So a file that was changed in any way has another cache file.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nemo_prorl.caches import cache_folder
from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.blend import LoadedData, LoadedSource
from nemo_prorl.data.laptop.generators import Record
from nemo_prorl.errors import ConfigError, DataError, UnfitMachine
from nemo_prorl.files import write_json

_log = logging.getLogger(__name__)

CACHE = ".prompt_lengths"  # folder beside a data file
_CACHED_FROM = 1000  # records; fewer are counted in less than a second
_TOLD_FROM = 20_000  # records whose first count takes long enough to be announced
_KEPT = 8  # cache files per data file: models and forms of the prompt that are in use at the same time
_TOKENIZER = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")


@dataclass(frozen=True)
class SourceLengths:
    """The lengths of a source's prompts, compared with `data.max_prompt_tokens`."""

    part: str  # of `data`: train, validation
    source: str
    records: int
    longer: int  # prompts longer than data.max_prompt_tokens; training leaves them out, validation keeps them
    longest: int  # tokens of the longest prompt that is kept

    @property
    def share(self) -> str:
        """Return as text how many of the records are longer than the limit."""
        return f"{self.longer:,} of {self.records:,} ({self.longer / self.records:.2%})"


@dataclass(frozen=True)
class FittedData:
    """The records that a run uses, and how many records of each source are longer than the limit."""

    train: list[LoadedSource]
    sources: list[SourceLengths]
    most: int | None  # data.max_prompt_tokens

    def words(self) -> str:
        """Return one line for `prorl plan`: what the limit leaves out, by source."""
        train = [source for source in self.sources if source.part == "train"]
        text = f"training at most {max((source.longest for source in train), default=0):,} tokens"
        if self.most is not None:
            shares = ", ".join(f"{source.source} {source.share if source.longer else 'none'}" for source in train)
            text += f"; longer than {self.most:,} (data.max_prompt_tokens) and left out: {shares}"
        held_out = [source for source in self.sources if source.part == "validation"]
        if held_out:
            text += f"; validation at most {max(source.longest for source in held_out):,}, none left out"
        return text

    def tell(self) -> None:
        """Log for each source how many training prompts are left out."""
        for source in self.sources:
            if source.part == "train" and source.longer:
                text = "data source '%s': %s prompts have more than data.max_prompt_tokens=%d tokens and are left out"
                _log.warning(text, source.source, source.share, self.most)


def fit(cfg: Any, data: LoadedData, lengths: "PromptLengths") -> FittedData:
    """Return the records that the run `cfg` uses: the training prompts that are longer than the limit are left out.

    No validation prompt is ever left out, because scores of different validation sets cannot be compared.

    Args:
        data: the sources after `blend.of_tasks`.

    Raises:
        DataError: a prompt leaves no room for a response in the context, or the limit leaves no record of a source.
    """
    most, context = cfg.data.max_prompt_tokens, cfg.trainer.grpo.context_tokens
    train: list[LoadedSource] = []
    sources: list[SourceLengths] = []
    faults: list[_TooLong] = []
    for part, loaded in (("train", data.train), ("validation", data.validation)):
        for source, records in loaded:
            counts = lengths.of(source, records)
            longer = sum(most is not None and count > most for count in counts)
            kept = list(zip(records, counts, strict=True))
            if part == "train":
                kept = [(record, count) for record, count in kept if most is None or count <= most]
                if not kept:
                    text = f"{longer} of {len(records)} prompts have more than data.max_prompt_tokens={most} tokens"
                    raise DataError(f"data source '{source.name}': {text}; no record is left. Fix: raise this key")
                train.append((source, [record for record, _ in kept]))
            record, longest = max(kept, key=lambda pair: pair[1])
            sources.append(SourceLengths(part, source.name, len(records), longer, longest))
            if over := sum(count >= context for _, count in kept):
                faults.append(
                    _TooLong(part, source.name, number=over, records=len(kept), record=record["id"], tokens=longest)
                )
    if faults:
        raise _no_room(faults, context, lengths.folder, cfg.pretrained_checkpoint.restore_from_path is None)
    return FittedData(train, sources, most)


@dataclass(frozen=True)
class _TooLong:
    part: str
    source: str
    number: int  # prompts without room for a response
    records: int
    record: str  # id of the longest
    tokens: int  # of the longest


def _no_room(faults: Sequence[_TooLong], context: int, folder: Path, made: bool) -> DataError:
    """Return the error for prompts that fill the context.

    Args:
        made: the tokenizer is made from the training data, so it does not know all words of validation.
    """
    lines = [
        f"  data.{fault.part}, source {fault.source!r}: {fault.number} of {fault.records} prompts; the longest, record"
        f" {fault.record!r}, has {fault.tokens} tokens"
        for fault in faults
    ]
    parts = {fault.part for fault in faults}
    leaves_some = all(fault.number < fault.records for fault in faults if fault.part == "train")
    fixes = [f"trainer.grpo.context_tokens above {max(fault.tokens for fault in faults)}"]
    if "train" in parts and leaves_some:
        fixes.insert(0, f"data.max_prompt_tokens below {context} leaves long prompts of data.train out")
    if "validation" in parts:
        fixes.append(
            "data.validation=[{name: NAME, path: FILE}] with shorter prompts (prorl data prepare --tokenizer"
            f" {folder} --max-prompt-tokens {context - 1}), or data.validation=[]"
        )
    if made:
        lines.append("  The tokenizer was made for data.train, so words that data.train lacks take more tokens.")
    return DataError(
        f"trainer.grpo.context_tokens={context} leaves no room for a response to these prompts:\n"
        + "\n".join([*lines, f"Fix: {'; or '.join(fixes)}"])
    )


class PromptLengths:
    """Counts the tokens of prompts as the model in `folder` gets them.

    The tokenizer is loaded only if a source is not in the cache.
    """

    def __init__(self, folder: Path, data: DataConfig) -> None:
        self.folder, self._data = folder, data
        self._count: Callable[[Sequence[Record]], list[int]] | None = None
        self._found: dict[str, list[int]] = {}

    def of(self, source: DataSource, records: Sequence[Record]) -> list[int]:
        """Return the number of tokens of each record's prompt.

        Raises:
            ConfigError: the folder does not contain a tokenizer with an eos token, or with a chat template if needed.
            DataError: a prompt is empty, or the chat template cannot render it.
        """
        key = self._key(records)
        if key not in self._found:
            use_files = source.path is not None and len(records) >= _CACHED_FROM
            self._found[key] = self._from_file(source, records, key) if use_files else self._counted(source, records)
        return self._found[key]

    def _from_file(self, source: DataSource, records: Sequence[Record], key: str) -> list[int]:
        """Return the lengths in the cache; count them and write the cache if it does not have them."""
        assert source.path is not None
        file, places = Path(source.path), _places(source.path)
        name = f"{file.name}-{key[:24]}.json"
        for place in places:
            if (cached := _read(place / name, key, len(records))) is not None:
                return cached
        counts = self._counted(source, records)
        for place in places:
            if _write(place, name, file.name, {"key": key, "tokens": counts}):
                break
        return counts

    def _counted(self, source: DataSource, records: Sequence[Record]) -> list[int]:
        from nemo_prorl.data.render import PromptRenderer

        if self._count is None:
            self._count = PromptRenderer(self.folder, 1, self._data).lengths
        if len(records) >= _TOLD_FROM:
            _log.info("counting the tokens of %d prompts of '%s'; the result is kept", len(records), source.name)
        try:
            return self._count(records)
        except (ConfigError, DataError) as error:
            raise type(error)(f"data source '{source.name}': {error}") from error

    def _key(self, records: Sequence[Record]) -> str:
        digest = hashlib.sha256(json.dumps([self._model, self._data.prompt, self._data.system]).encode())
        for record in records:
            digest.update(json.dumps(record["prompt"], sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def _model(self) -> list[str]:
        """Return what a count depends on besides the prompts: packages and the names and hashes of tokenizer files."""
        parts = [f"{package} {version(package)}" for package in ("transformers", "tokenizers")]
        for file in sorted({file for pattern in _TOKENIZER for file in self.folder.glob(pattern)}):
            if file.name.endswith(".index.json"):  # of the weights
                continue
            content = file.read_bytes()
            parts.append(f"{file.relative_to(self.folder)} {hashlib.sha256(content).hexdigest()}")
            if b"strftime_now" in content:  # the template writes the date into each prompt
                parts.append(date.today().isoformat())
        return parts


def _places(path: str) -> list[Path]:
    """Return the folders for the cache of a data file: beside the file, then in the user's cache folder."""
    places = [Path(path).absolute().parent / CACHE]
    with suppress(UnfitMachine):  # the machine is not fit for a run, but lengths can be counted
        places.append(cache_folder(os.environ) / CACHE.lstrip("."))
    return places


def _read(file: Path, key: str, number: int) -> list[int] | None:
    """Return the lengths in a cache file; None if there is no such file, or if it is not what `_write` wrote."""
    try:
        cache = json.loads(file.read_bytes())
        tokens = cache["tokens"]
        fits = cache["key"] == key and len(tokens) == number and all(type(size) is int and size > 0 for size in tokens)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tokens if fits else None


def _write(folder: Path, name: str, stem: str, content: dict[str, Any]) -> bool:
    """Write a cache file and remove the oldest ones of the same data file; return whether the folder is writable."""
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / name, content, indent=None)
        others = sorted(folder.glob(f"{stem}-*.json"), key=lambda file: file.stat().st_mtime)
        for old in others[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:
        return False
    return True
