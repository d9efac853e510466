"""The options of a preparation, and the files that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from nemo_prorl.data.prepare import puzzles
from nemo_prorl.data.prepare.judge import JudgeOptions
from nemo_prorl.data.prepare.manifest import PreparedManifest
from nemo_prorl.data.prepare.rows import data_files, sha256_of, used_patterns
from nemo_prorl.data.prepare.sources import Source

HUB = "hub"


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `prorl data prepare`.  Fields not described here have the name and meaning of their option.

    `origin`: --from: a path, `hub`, or None for a source that is generated.
    `size`: None means all records, or the source's default if the source is generated.
    `holdout`: None means the source's default, `ALL` means all records.
    `form`: --format.
    `task`: task of the records; None: that of the source, whose plugin then checks truths and gold answers, and whose
        form of the answer is written into the prompts.
    `target`: --target: column with a right response, for the warm-up; None: no such column.
    `keep`: --keep: columns for the truth of the user's own task, which a reward function gets; otherwise for `meta`.
    `only`: --only: a part of the source; "" means the whole source.
    `since`, `until`: the first and the last date, YYYY-MM-DD; None means the source's default.
    `columns`: --field: field -> name of its column in the source.
    `check`: number of gold answers to judge; None means all.
    `agreement`: judge | grader | none.
    `judge`: None if no judge is needed.
    `goes_on`: the command that continues with files downloaded by hand into FOLDER; "" means that of this source.
    """

    source: Source
    origin: str | None
    out: Path
    name: str
    only: str = ""
    since: str | None = None
    until: str | None = None
    size: int | None = None
    holdout: int | None = None
    limit: int | None = None
    seed: int = 0
    prompt: str = "messages"
    form: str = "jsonl"
    task: str | None = None
    target: str | None = None
    keep: Sequence[str] = ()
    columns: dict[str, str] = field(default_factory=dict)
    licence: str = ""
    revision: str | None = None
    tokenizer: Path | None = None
    max_prompt_tokens: int | None = None
    against: tuple[Path, ...] = ()
    ngram: int = 13
    overlap: float = 0.6
    check: int | None = 200
    drop_worded: bool = False
    workers: int = 1
    unsafe_no_sandbox: bool = False
    agreement: str = "judge"
    judge: JudgeOptions | None = None
    goes_on: str = ""


def tasks_file_of(options: PrepareOptions) -> Path | None:
    """Return the list of tasks of a source that is generated, from --from or as shipped; None for any other source."""
    return None if options.source.size is None else puzzles.tasks_file(options.origin)


def generator() -> str:
    """Return the package that generates puzzles, with its version."""
    return f"reasoning_gym {version('reasoning_gym')}"


def patterns_of(options: PrepareOptions) -> tuple[str, ...]:
    """Return the patterns of the source's files, or of those of --only."""
    return options.source.parts.get(options.only, ()) or options.source.files


def source_files(options: PrepareOptions, folder: Path) -> list[Path]:
    """Return the data files to read: `folder` itself if it is a file, else those with the names of the source's files.

    A folder without such names may hold the data in another form, so all its data files are returned, unless --only
    selects by name.
    """
    return data_files(folder, options.source.parts.get(options.only) or used_patterns(folder, options.source.files))


def name_in(folder: Path, file: Path) -> str:
    return file.name if file == folder else str(file.relative_to(folder))


def has_inputs(options: PrepareOptions, manifest: PreparedManifest) -> bool:
    """Return whether a preparation with these options would read the inputs that a manifest names.

    Files of the hub are the same if the commit is.  Without a pinned commit, the recorded commit is used again.
    """
    if (file := tasks_file_of(options)) is not None:
        return manifest["from"] == generator() and manifest["inputs"][0]["sha256"] == sha256_of(file)
    if options.origin == HUB:
        wanted = options.revision or options.source.revision or manifest.get("commit")
        return manifest.get("repo") == options.source.repo and manifest.get("commit") == wanted
    folder = Path(str(options.origin))
    inputs = [(name_in(folder, file), sha256_of(file)) for file in source_files(options, folder)]
    return inputs == [(entry["file"], entry["sha256"]) for entry in manifest["inputs"]]
