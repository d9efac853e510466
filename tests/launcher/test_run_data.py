"""A prompt that is too long is refused before anything starts, and what the limit leaves out is told by source."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.data import lengths
from nemo_prorl.data.blend import load_sources
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.launcher import doctor
from tests import paper_model
from tests.conftest import ROOT
from tests.lines import write_lines

pytestmark = pytest.mark.starts

LONG = "seven three " * 3000
COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", "stage=run1"],
    "train": ["train", "--dry-run", "stage=run1"],
    "launch": ["launch", "--stages", "run1..run2", "--dry-run"],
    "launch here": ["launch", "--stages", "run1", "--here", "--dry-run"],
    "doctor": ["doctor", "stage=run1"],
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run on four nodes: one source, with a record that is too long, and a held-out source."""
    model = paper_model.write(tmp_path / "model")
    build_tokenizer(["one two three seven " * 9, "?"]).save_pretrained(model)
    write(tmp_path / "mine.jsonl", {f"m-{k}": f"one two three seven {k}?" for k in range(19)} | {"m-19": LONG})
    write(tmp_path / "held.jsonl", {"h-0": "one?", "h-1": "two three " * 20})
    monkeypatch.setattr(doctor, "checks", lambda cfg, *_: doctor.data(cfg))  # the others are of this machine
    return [
        "cluster=h100_4x8",
        f"pretrained_checkpoint.restore_from_path={model}",
        f"data.train=[{{name: mine, path: {tmp_path / 'mine.jsonl'}}}]",
        f"data.validation=[{{name: held, path: {tmp_path / 'held.jsonl'}}}]",
        "data.max_prompt_tokens=null",
        "data.tasks=null",
        f"run_dir={tmp_path / 'run'}",
    ]


def write(file: Path, prompts: dict[str, str]) -> None:
    rows = [{"id": name, "task": "math", "prompt": text, "truth": {"answer": "1"}} for name, text in prompts.items()]
    write_lines(file, rows)


def tokens(tmp_path: Path) -> int:
    return PromptRenderer(tmp_path / "model", 1).length({"id": "x", "prompt": LONG})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_prompt_without_room_is_refused_before_anything_starts(
    command: str, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*COMMANDS[command], *words]) == 4
    told = caplog.text + capsys.readouterr().out
    number = tokens(tmp_path)
    assert number >= 8192
    assert f"data.train, source 'mine': 1 of 20 prompts; the longest, record 'm-19', has {number} tokens" in told
    assert "Fix: data.max_prompt_tokens below 8192" in told
    assert ("stage run1: " in told) == command.startswith("launch")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_with_the_limit_each_tells_what_is_left_out(
    command: str, words: list[str], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    assert cli.main([*COMMANDS[command], *words, "data.max_prompt_tokens=1024"]) == 0
    told = caplog.text + capsys.readouterr().out
    assert "mine 1 of 20 (5.00%)" in told or "'mine': 1 of 20 (5.00%) prompts have more than" in told
    assert told.count("1 of 20") == 1


@pytest.mark.slow
def test_the_batch_script_s_dry_run_refuses_it(words: list[str]) -> None:
    script = [str(ROOT / "slurm" / "stage.sbatch"), "run1", *words, "--dry-run"]
    told = subprocess.run(["bash", *script], capture_output=True, text=True, check=False)
    assert told.returncode == 4
    assert "record 'm-19'" in told.stderr


def test_the_rank_trains_on_the_records_that_the_plan_announced(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nemo_prorl import rank

    words = [*words, "data.max_prompt_tokens=1024"]
    assert cli.main(["plan", "--json", *words]) == 0
    train, held = json.loads(capsys.readouterr().out)["prompt_lengths"]
    cfg: Any = settings.load(words)
    monkeypatch.setattr(rank, "connect", lambda *_, **__: None)
    folder = tmp_path / "model"
    policy = SimpleNamespace(folder=folder, renderer=PromptRenderer(folder, 8192, cfg.data))
    source = rank.rollout_source(cfg, tmp_path / "run", load_sources(cfg.data), policy)  # type: ignore[arg-type]
    drawn = {source.blend.next()[0]["id"] for _ in range(100)}
    assert drawn == {f"m-{k}" for k in range(19)}
    assert (train["source"], train["records"] - train["longer"]) == ("mine", len(drawn))
    assert (held["longer"], held["records"]) == (0, 2)


def test_the_stage_whose_context_is_too_short_is_named(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All stages are checked before the first of them starts."""
    write(tmp_path / "held.jsonl", {"h-0": "seven three " * 300})
    words = [*words, "data.max_prompt_tokens=1024", "chain.long_context_tokens=1500"]
    assert cli.main(["launch", "--stages", "run7..run8", "--dry-run", *words]) == 4
    assert "stage run8: trainer.grpo.context_tokens=1500 leaves no room" in caplog.text
    assert "data.validation, source 'held': 1 of 1 prompts; the longest, record 'h-0', has" in caplog.text
    assert "prorl data prepare --tokenizer" in caplog.text


def test_files_are_read_once_for_all_stages(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_prorl.data import blend

    read: list[Any] = []
    loading = blend.load_sources

    def noted(data: Any) -> Any:
        read.append(data)
        return loading(data)

    monkeypatch.setattr(blend, "load_sources", noted)
    assert cli.main(["launch", "--stages", "run1..run8", "--dry-run", *words, "data.max_prompt_tokens=1024"]) == 0
    assert len(read) == 1


def test_without_a_tokenizer_a_plan_is_refused_like_the_run(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    generated = ["data.train=[{name: sums, generator: arithmetic, size: 99}]", "data.validation=[]"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
        lacks = (
            "no vocabulary (tokenizer.json, or vocab.json with merges.txt), so no tokenizer. Fix: copy the model's tok"
        )
        lacks = lacks if name == "tokenizer.json" else f"no tokenizer_config.json and {lacks}"
        for given in (words, [*words, *generated]):
            for command in (["plan"], ["train", "--dry-run"]):
                caplog.clear()
                assert cli.main([*command, *given]) == 2
                assert f"{model}: {lacks}" in caplog.text
    told = capsys.readouterr().out
    assert f"prompt lengths   not checked: {model} has no tokenizer\n" in told
    assert "refused: the model folder has no tokenizer\n" in told
    assert "chat template" not in told
    assert cli.main(["plan", "--json", *words, "pretrained_checkpoint.restore_from_path=null"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prompt_lengths"] is None
    assert told["run"]["prompt lengths"].startswith("not checked: the run makes its tokenizer when it starts")


def test_the_cache_is_shared_by_plan_and_run(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command does not load the tokenizer, so it cannot have counted anything else."""
    monkeypatch.setattr(lengths, "_CACHED_FROM", 1)
    assert cli.main(["plan", *words, "data.max_prompt_tokens=1024"]) == 0
    monkeypatch.setattr(PromptRenderer, "__init__", None)
    assert cli.main(["train", "--dry-run", *words, "data.max_prompt_tokens=1024"]) == 0
    (tmp_path / "mine.jsonl").write_text((tmp_path / "mine.jsonl").read_text().replace("three", "thrice"))
    with pytest.raises(TypeError):  # counted again
        cli.main(["train", "--dry-run", *words, "data.max_prompt_tokens=1024"])


def test_a_warm_up_s_records_are_checked_before_the_rank_draws_them(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = ["data.max_prompt_tokens=1024", "trainer.warmup.steps=2", "trainer.warmup.batch_size=30"]
    assert cli.main(["train", "--dry-run", *words, *more]) == 0
    (tmp_path / "mine.jsonl").write_text(
        (tmp_path / "mine.jsonl").read_text().replace('{"answer": "1"}', '{"answer": ["1", "2"]}')
    )
    assert cli.main(["train", "--dry-run", *words, *more]) == 4
    assert "a warm-up needs one string" in caplog.text


@pytest.mark.parametrize("command", ["launch", "launch here"])
def test_a_run_directory_that_cannot_be_made_is_refused(
    command: str, words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    words = [*words, "data.max_prompt_tokens=1024", f"run_dir={tmp_path / 'file' / 'run'}"]
    assert cli.main([*COMMANDS[command], *words]) == 2
    assert f"{tmp_path / 'file'} is not a folder. Fix: run_dir=FOLDER" in caplog.text
    if command == "launch":
        assert cli.main([*COMMANDS["plan"], *words]) == 2
        assert cli.main([*COMMANDS["train"], *words]) == 2
        assert caplog.text.count("is not a folder. Fix: run_dir=FOLDER") == 3


def test_a_launch_warns_of_data_that_the_container_does_not_see(
    words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = ["--container-image=x.sqsh", f"--container-mounts={tmp_path / 'run'},{tmp_path / 'model'}"]
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.jsonl").rename(tmp_path / "data" / "mine.jsonl")
    words = [*words, "data.max_prompt_tokens=1024", f"data.folder={tmp_path / 'data'}"]
    words.append(f"data.train=[{{name: mine, path: {tmp_path / 'data' / 'mine.jsonl'}}}]")
    assert cli.main([*COMMANDS["launch"], *image, *words]) == 0
    told = caplog.text
    assert f"data.folder={tmp_path / 'data'}: expected a path under a mount of the container" in told
    assert f"path: {tmp_path / 'data' / 'mine.jsonl'}}}]: expected a path under a mount of the container" in told
    assert told.count("expected a path under a mount") == 4  # data.train is given twice; data.validation
