"""The catalogue of benchmarks: one yaml file each, with prompt records from a file or a generator.

The files are in benchmarks/, in packages with an entry point of the group `nemo_prorl.benchmarks`, or the user's own.
"""

import hashlib
import importlib.metadata
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from nemo_prorl.errors import ConfigError, DataError, did_you_mean

FOLDER = Path(__file__).parent / "benchmarks"
ENTRY_POINTS = "nemo_prorl.benchmarks"  # each names a package that contains yaml files
Domain = Literal["math", "code", "stem", "puzzles", "instructions", "other"]
Metric = Literal["pass@1", "reward"]
_CONFIG = ConfigDict(extra="forbid")


class BenchmarkAbout(TypedDict):
    """The facts about a benchmark that manifest.json, results.json and comparison.json repeat."""

    title: str
    domain: Domain
    metric: Metric
    out_of_distribution: bool


@dataclass(frozen=True, config=_CONFIG)
class Sampling:
    """How responses are sampled.  `context` counts the tokens of prompt and response together."""

    samples: int = Field(default=16, ge=1, le=4096)
    temperature: float = Field(default=0.6, ge=0, le=100)  # 0: greedy
    top_p: float = Field(default=0.95, gt=0, le=1)
    context: int = Field(default=32768, ge=2)
    max_response: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "Sampling":
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature is {self.temperature!r}; expected 0 (greedy) or 0.01 to 100")
        if self.max_response is not None and self.max_response >= self.context:
            raise ValueError(f"max_response is {self.max_response}; expected 1 to {self.context - 1}, or null")
        return self


@dataclass(frozen=True, config=_CONFIG)
class Benchmark:
    """One benchmark: a yaml file of the catalogue, or the user's own .yaml or .jsonl file.

    Exactly one of `prompts` (a file that the user provides) and `generate` (settings of a generator) is set.
    """

    name: str
    sha256: str  # of the .yaml or .jsonl file that defines the benchmark
    task: str  # task of its records, which selects the reward plugin
    title: str = ""
    domain: Domain = "other"
    metric: Metric = "reward"  # the number to report: binary correctness, or mean continuous reward
    sets: tuple[str, ...] = ()  # names that select several benchmarks in --benchmarks
    source: str = ""  # origin of the problems, as text
    licence: str = ""
    prompts: str | None = None  # name of the prompt file or folder in --data or beside the yaml file, see `file_of`
    file: str | None = None  # path of the .yaml or .jsonl file; None for a benchmark that this package ships
    prepare: str = ""  # command or instruction that creates the prompt file
    generate: dict[str, Any] | None = None  # generator, size, seed and options, as in a run's data source
    out_of_distribution: bool = False
    sampling: Sampling = Field(default_factory=Sampling)

    @model_validator(mode="after")
    def _check(self) -> "Benchmark":
        if (self.prompts is None) == (self.generate is None):
            raise ValueError("expected exactly one of 'prompts' (name of a file or folder in --data) and 'generate'")
        return self

    def changed(self, values: Mapping[str, Any]) -> "Benchmark":
        """Return a copy with these sampling values replaced.  Raises ConfigError for an invalid value."""
        try:
            return replace(self, sampling=replace(self.sampling, **values))
        except ValidationError as error:
            raise _wrong(self.name, error) from None

    def about(self) -> BenchmarkAbout:
        """Return the facts that manifest.json and results.json repeat."""
        return {
            "title": self.title or self.name,
            "domain": self.domain,
            "metric": self.metric,
            "out_of_distribution": self.out_of_distribution,
        }


def _wrong(where: object, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":
        inner = Sampling if first["loc"][0] == "sampling" else Benchmark
        known = [field.name for field in fields(inner) if field.name not in ("name", "sha256", "file")]
        guess = did_you_mean(str(first["loc"][-1]), known)
        return ConfigError(f"{where}: unknown key {key} (={first['input']}).{guess} Known: {', '.join(known)}")
    value = f"{key} is {first['input']!r}: " if key and first["type"] != "missing" else f"{key}: " if key else ""
    return ConfigError(f"{where}: {value}{first['msg'].removeprefix('Value error, ')}")


def catalogue(own: Iterable[str] = ()) -> dict[str, Benchmark]:
    """Return all benchmarks by name: shipped ones, those of installed packages, and the user's files `own`."""
    benchmarks = {path.stem: read(path) for path in sorted(FOLDER.glob("*.yaml"))}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        with importlib.resources.as_file(importlib.resources.files(point.value)) as folder:
            benchmarks |= {path.stem: read(path, str(path)) for path in sorted(folder.glob("*.yaml"))}
    return benchmarks | {Path(path).stem: read_own(Path(path)) for path in own}


def read(path: Path, own: str | None = None) -> Benchmark:
    """Read a benchmark's yaml file.  Raises ConfigError with file and key.

    `own`: path that becomes the benchmark's `file`; None for a benchmark that this package ships.
    """
    try:
        text = path.read_bytes()
        return Benchmark(name=path.stem, sha256=hashlib.sha256(text).hexdigest(), file=own, **yaml.safe_load(text))
    except OSError as error:
        raise ConfigError(f"--benchmarks {path}: expected the yaml file of a benchmark: {error.strerror}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{path}: expected a yaml mapping: {error}") from error
    except ValidationError as error:
        raise _wrong(path, error) from None


def read_own(path: Path) -> Benchmark:
    """Return the user's benchmark: a yaml file of the catalogue's form, or a .jsonl file of prompt records of one task.

    Raises ConfigError: the file is of neither form, or has another benchmark's name.  DataError: as `read_records`.
    """
    from nemo_prorl.data.records import of_table, read_records

    if path.suffix in (".csv", ".tsv"):
        raise ConfigError(f"--benchmarks {path}: {of_table(path, ' --holdout all', 'validation.jsonl')}")
    if (known := catalogue().get(path.stem)) is not None:
        if known.file is not None and Path(known.file) == path.resolve():  # of an installed package
            return known
        raise ConfigError(f"--benchmarks {path}: another benchmark has this name (--list). Fix: rename the file")
    if path.suffix != ".jsonl":
        return read(path, str(path.resolve()))
    task = read_records(path)[0]["task"]
    digest, whole = hashlib.sha256(path.read_bytes()).hexdigest(), str(path.resolve())
    return Benchmark(name=path.stem, sha256=digest, task=task, source=path.name, prompts=path.name, file=whole)


def choose(text: str) -> list[Benchmark]:
    """Return the benchmarks of a list such as `A,./mine.yaml`: names, sets and the user's files; each benchmark once.

    Raises:
        ConfigError: A name is unknown (the message lists the known names and sets), or a file is not a benchmark.
    """
    known = catalogue()
    sets = sorted({name for benchmark in known.values() for name in benchmark.sets})
    chosen: dict[str, Benchmark] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word.endswith((".yaml", ".jsonl", ".csv", ".tsv")):
            own = read_own(Path(word))
            if (other := chosen.get(own.name, own)).file != own.file:
                raise ConfigError(
                    f"--benchmarks {text}: {other.file} and {own.file} are both named {own.name}. Fix: rename one, or"
                    " write a yaml file with another name, whose key `prompts` is the path of the records"
                )
            chosen[own.name] = own
            continue
        matches = [benchmark for benchmark in known.values() if word == benchmark.name or word in benchmark.sets]
        if not matches:
            hint = did_you_mean(word.lower(), [*known, *sets])
            raise ConfigError(
                f"--benchmarks {word}: no such benchmark.{hint} Known are {', '.join(known)}; sets: {', '.join(sets)}"
            )
        chosen.update({benchmark.name: benchmark for benchmark in matches})
    if not chosen:
        raise ConfigError(
            f"--benchmarks: expected at least one name; known are {', '.join(known)}; sets: {', '.join(sets)}"
        )
    return list(chosen.values())


def check_files(chosen: Iterable[Benchmark], data: Path | None) -> None:
    """Raise DataError if prompt files are missing, naming each file and how to get it."""
    lacking = [entry for entry in chosen if entry.prompts is not None and file_of(entry, data) is None]
    if not lacking:
        return
    lines = [
        f"  {entry.name}: {entry.prompts}.jsonl or {entry.prompts}/validation.jsonl ({entry.prepare})"
        if entry.file is None
        else f"  {entry.name}: {Path(entry.file).parent / str(entry.prompts)}, which {entry.file} names (prompts)"
        for entry in lacking
    ]
    if sum("paper" in entry.sets for entry in lacking) > 1:
        lines.append(f"Fix: prorl data prepare paper --out {data or 'DIR'} makes all of the set paper (DIR: --data)")
    where = "--data DIR was not given" if data is None else f"{data} (--data) does not contain it"
    raise DataError(
        f"{len(lacking)} of the benchmarks need a file of prompt records, and {where}:\n" + "\n".join(lines)
    )


def file_of(benchmark: Benchmark, data: Path | None) -> Path | None:
    """Return the file with the benchmark's prompt records, or None if it does not exist.

    The file is NAME.jsonl in the folder `data` (option --data), or NAME/validation.jsonl, the held-out part that
    `prorl data prepare` writes; both may be .parquet instead.  For a user's benchmark, a file beside the yaml file is
    found first.
    """
    name = benchmark.prompts
    if benchmark.file is not None and (beside := Path(benchmark.file).parent / str(name)).is_file():
        return beside
    if data is None:
        return None
    forms = [f"{stem}.{form}" for stem in (name, f"{name}/validation") for form in ("jsonl", "parquet")]
    return next((data / form for form in forms if (data / form).is_file()), None)


def load_records(benchmark: Benchmark, data: Path | None, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first `limit` prompt records, in order.

    Raises DataError naming file, line and field; ConfigError if a record has another task than the benchmark.
    """
    from nemo_prorl.data.records import as_messages, read_records

    if benchmark.generate is not None:
        from nemo_prorl.config import DataConfig, DataSource
        from nemo_prorl.data.laptop.generators import LAPTOP_TEMPLATES, generate

        source = DataSource(name=benchmark.name, **benchmark.generate)
        if "laptop" in benchmark.sets:  # for a model without chat template
            return generate(source, templates=LAPTOP_TEMPLATES)[:limit]
        made = generate(source, templates=DataConfig().templates)[:limit]
        return [{**record, "prompt": as_messages(record["prompt"])} for record in made]

    file = file_of(benchmark, data)
    assert file is not None, "call check_files first"
    records = read_records(file)
    for record in records:
        if record["task"] != benchmark.task:
            raise ConfigError(
                f"{benchmark.file or benchmark.name}: task is {benchmark.task!r}, but record {record['id']!r} of {file}"
                f" has the task {record['task']!r}.  Fix: make them equal"
            )
    return records[:limit]


def records_sha256(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the sha256 over id, task, prompt and truth of the records in order, which is all that scores depend on."""
    digest = hashlib.sha256()
    for record in records:
        hashed = {key: record[key] for key in ("id", "task", "prompt", "truth")}
        digest.update(json.dumps(hashed, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def part_of(record: Mapping[str, Any]) -> str:
    """Return the part of the benchmark that a record belongs to: a puzzle's data set, otherwise the record's source."""
    dataset = record["truth"].get("dataset") if record["task"] == "puzzles" else None
    return str(dataset or record.get("source") or record["task"])


def table(chosen: Iterable[Benchmark]) -> list[list[str]]:
    """Return the rows that `--list` prints."""
    rows = [["benchmark", "domain", "metric", "samples", "context", "sets", "needs"]]
    for entry in chosen:
        counts = [str(entry.sampling.samples), str(entry.sampling.context)]
        rows.append([entry.name, entry.domain, entry.metric, *counts, ",".join(entry.sets), entry.prompts or "nothing"])
    return rows
