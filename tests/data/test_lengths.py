"""Lengths of prompts: what the limits leave out, what they refuse, and a cache that is never stale."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from nemo_prorl import settings
from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data import lengths
from nemo_prorl.data.blend import LoadedData
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.lengths import CACHE, FittedData, PromptLengths, fit
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import ConfigError, DataError

TEXTS = ["one two three", "one", "", "two one two one two one", [{"role": "user", "content": "three two"}]]
Counted = list[list[str]]  # ids of the prompts that each call of the tokenizer got


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of a tokenizer that begins a text with a token, as Llama's does, if it is asked for special tokens."""
    folder = tmp_path / "model"
    tokenizer = build_tokenizer(["one two three " * 9, "User: Hi. Assistant: one"])
    begin = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Makes the cache hold files of any size, and notes what is counted in spite of it."""
    found: Counted = []
    count = PromptRenderer.lengths

    def noted(self: PromptRenderer, records: Any) -> list[int]:
        found.append([record["id"] for record in records])
        return count(self, records)

    monkeypatch.setattr(PromptRenderer, "lengths", noted)
    monkeypatch.setattr(lengths, "_CACHED_FROM", 1)
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "users"))  # where no earlier test has left a file
    return found


def record(name: str, prompt: Any, **more: Any) -> dict[str, Any]:
    return {"id": name, "task": "math", "prompt": prompt, "truth": {"answer": "1"}, "source": "", "meta": {}, **more}


def source(tmp_path: Path, name: str = "mine") -> DataSource:
    return DataSource(name=name, path=str(tmp_path / "data" / f"{name}.jsonl"))


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "data").mkdir()
    return [record(f"r{k}", "one " * (k + 1)) for k in range(9)]


def fitted(model: Path, data: LoadedData, *overrides: str) -> FittedData:
    words = ["trainer.grpo.context_tokens=16", "trainer.grpo.max_response_tokens=4", *overrides]
    cfg = settings.load([*words, "pretrained_checkpoint.restore_from_path=null"])
    return fit(cfg, data, PromptLengths(model, cfg.data))


@pytest.mark.parametrize("form", ["as_written", "chat", "text", "r1"])
def test_a_batch_has_the_lengths_that_the_run_gets(model: Path, form: str) -> None:
    data = DataConfig(prompt=form, system="Be brief.")
    renderer = PromptRenderer(model, 4096, data)
    every = [record(str(k), text or "x") for k, text in enumerate(TEXTS)] * 400  # more than one batch
    assert renderer.encode("one two") == renderer.encode("one") + renderer.encode(" two")  # no special token
    assert renderer.lengths(every) == [len(renderer.prompt_ids(one)) for one in every]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"  # ranks fork


def test_the_limit_leaves_out_training_prompts_and_no_validation_prompt(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    counts = PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    most = sorted(counts)[3]
    held_out = [record("v0", "one " * 9), record("v1", "one")]
    data = LoadedData(
        [(source(tmp_path), records), (source(tmp_path, "short"), held_out[1:])], [(source(tmp_path, "held"), held_out)]
    )
    found = fitted(model, data, "trainer.grpo.context_tokens=64", f"data.max_prompt_tokens={most}")
    kept = found.train[0][1]
    assert kept == [one for one, count in zip(records, counts, strict=True) if count <= most]
    left = len(records) - len(kept)
    assert 0 < left < 9
    train, _, held = found.sources
    assert (train.longer, train.records, train.longest) == (left, 9, most)
    assert (held.longer, held.records, held.longest > most) == (1, 2, True)
    share = f"{left} of 9 ({left / 9:.2%})"
    assert found.words() == (
        f"training at most {most} tokens; longer than {most} (data.max_prompt_tokens) and left out: mine {share}, short"
        f" none; validation at most {held.longest}, none left out"
    )
    found.tell()
    text = f"data source 'mine': {share} prompts have more than data.max_prompt_tokens={most} tokens and are left out"
    assert caplog.messages == [text]


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_prompt_that_fills_the_context_is_named(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], part: str
) -> None:
    long = [(source(tmp_path, "held"), [record("long-7", "three one " * 40), *records[3:4]])]
    mine = [(source(tmp_path), records[:3])]
    data = LoadedData([*mine, *long], []) if part == "train" else LoadedData(mine, long)
    tokens = PromptLengths(model, DataConfig()).of(*long[0])[0]
    with pytest.raises(DataError) as caught:
        fitted(model, data)
    text = str(caught.value)
    assert f"data.{part}, source 'held': 1 of 2 prompts; the longest, record 'long-7', has {tokens} tokens" in text
    assert "source 'mine'" not in text
    fix = "Fix: data.max_prompt_tokens below 16" if part == "train" else f"--tokenizer {model} --max-prompt-tokens 15"
    assert fix in text
    assert "\n  The tokenizer was made for data.train, so words that data.train lacks take more tokens.\nFix: " in text
    assert f"trainer.grpo.context_tokens above {tokens}" in text
    if part == "train":
        data = LoadedData([*mine, (long[0][0], long[0][1][:1])], [])
        with pytest.raises(DataError, match="1 of 1 prompts(.|\n)*\nFix: trainer.grpo.context_tokens above"):
            fitted(model, data)
        with pytest.raises(DataError, match=r"'held': 1 of 1 prompts .*max_prompt_tokens=9 .*no record is left"):
            fitted(model, data, "data.max_prompt_tokens=9")


def test_a_second_time_reads_the_cache_and_needs_no_tokenizer(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "own"))
    first = PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    assert len(list((tmp_path / "data" / CACHE).iterdir())) == len(counted) == 1
    assert not list((tmp_path / "own").rglob("*.json"))
    monkeypatch.setattr(PromptRenderer, "__init__", None)  # so that loading a tokenizer fails
    assert PromptLengths(model, DataConfig()).of(source(tmp_path), records) == first
    shutil.copytree(model, tmp_path / "copy")  # such as RUN/base
    assert PromptLengths(tmp_path / "copy", DataConfig()).of(source(tmp_path), records) == first
    assert len(counted) == 1


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        text = (model / name).read_text()
        assert old in text
        (model / name).write_text(text.replace(old, new))

    return change


def add_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for m in messages %}one one {{ m['content'] }}{% endfor %}")


def other_tokenizer(model: Path) -> None:
    build_tokenizer(["none of them"]).save_pretrained(model)


CHANGES: dict[str, tuple[Callable[[Path], None] | None, DataConfig, dict[str, Any]]] = {
    "prompt": (None, DataConfig(), {"prompt": "one two two two three three three three three three"}),
    "template": (add_template, DataConfig(), {}),
    "tokenizer": (other_tokenizer, DataConfig(), {}),
    "form": (None, DataConfig(prompt="r1"), {}),
    "system": (None, DataConfig(system="one two three"), {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_cache_is_never_stale(
    what: str, model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted
) -> None:
    change, data, fields = CHANGES[what]
    records[4]["prompt"] = [{"role": "user", "content": "one two"}]
    before = PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    if change is not None:
        change(model)
    records[0] |= fields
    now = PromptLengths(model, data).of(source(tmp_path), records)
    renderer = PromptRenderer(model, 4096, data)
    assert now == [renderer.length(one) for one in records] != before
    assert len(counted) == 2


def test_a_template_with_the_date_is_counted_anew_each_day(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%B') }}{{ messages[0]['content'] }}")
    for day in ("2026-05-31", "2026-05-31", "2026-09-01"):
        monkeypatch.setattr(lengths, "date", type("Day", (), {"today": staticmethod(lambda d=day: _Day(d))}))
        PromptLengths(model, DataConfig(prompt="chat")).of(source(tmp_path), records)
    assert len(counted) == 2


class _Day:
    def __init__(self, text: str) -> None:
        self.isoformat = lambda: text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "x", "tokens": [1]}', "short", "zero", "other"])
def test_a_damaged_cache_file_is_not_used(
    content: str, model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted
) -> None:
    first = PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    file = next((tmp_path / "data" / CACHE).iterdir())
    good = json.loads(file.read_text())
    damaged = {
        "short": {**good, "tokens": good["tokens"][1:]},
        "zero": {**good, "tokens": [0, *good["tokens"][1:]]},
        "other": {**good, "key": "0" * 64},
    }
    file.write_text(json.dumps(damaged[content]) if content in damaged else content)
    assert PromptLengths(model, DataConfig()).of(source(tmp_path), records) == first
    assert len(counted) == 2
    assert json.loads(file.read_text()) == good


def test_a_folder_that_cannot_be_written_uses_the_users_cache(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / CACHE).touch()  # no folder can be made here, also not by root
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "own"))
    first = PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    assert PromptLengths(model, DataConfig()).of(source(tmp_path), records) == first
    assert len(counted) == 1
    assert len(list((tmp_path / "own").glob("*/mine.jsonl-*.json"))) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "file" / "no"))  # neither can be written: counted each time
    assert PromptLengths(model, DataConfig()).of(source(tmp_path), records) == first
    assert len(counted) == 2


def test_few_cache_files_are_kept(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "_KEPT", 2)
    for k in range(4):
        PromptLengths(model, DataConfig(system="one " * k or None)).of(source(tmp_path), records)
    assert len(list((tmp_path / "data" / CACHE).iterdir())) == 2


def test_small_and_generated_sources_write_no_file(model: Path, tmp_path: Path, records: list[dict[str, Any]]) -> None:
    PromptLengths(model, DataConfig()).of(source(tmp_path), records)
    PromptLengths(model, DataConfig()).of(DataSource(name="made", generator="stem", size=9), records * 200)
    assert not (tmp_path / "data" / CACHE).exists()


def test_what_cannot_be_counted_names_source_and_record(model: Path, tmp_path: Path) -> None:
    counting = PromptLengths(model, DataConfig())
    with pytest.raises(DataError, match="data source 'mine': record 'b': its prompt is empty"):
        counting.of(source(tmp_path), [record("a", "one"), record("b", "")])
    (model / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    message = [{"role": "user", "content": "one"}]
    with pytest.raises(DataError, match=r"'mine': record 'c': .*chat template refuses .*alternate.*data\.prompt=text"):
        PromptLengths(model, DataConfig()).of(source(tmp_path), [record("c", message)])
    with pytest.raises(ConfigError, match="no tokenizer"):
        PromptLengths(tmp_path, DataConfig()).of(source(tmp_path), [record("a", "one")])
