"""The benchmarks: one yaml file each in benchmarks/, and their prompt records, from a file or made on the spot."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from nemo_prorl.errors import ConfigError, DataError

FOLDER = Path(__file__).parent / "benchmarks"
Domain = Literal["math", "code", "stem", "puzzles", "instructions"]
Metric = Literal["pass@1", "reward"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; `context` is prompt and response together, in tokens."""

    samples: int = 16
    temperature: float = 0.6
    top_p: float = 0.95
    context: int = 32768
    max_response: int | None = None

    def check(self, where: str) -> None:
        """Raises ConfigError naming the key."""
        top = self.context - 1
        for key, good, right in (
            ("samples", 1 <= self.samples <= 4096, "a number from 1 to 4096"),
            ("temperature", self.temperature == 0 or 0.01 <= self.temperature <= 100, "0 (greedy), or 0.01 to 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("context", self.context >= 2, "2 tokens or more"),
            ("max_response", self.max_response is None or 1 <= self.max_response <= top, f"from 1 to {top}, or null"),
        ):
            if not good:
                raise ConfigError(f"{where}: {key} is {getattr(self, key)!r}; it must be {right}")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.  Exactly one of `prompts` (a file that the user gives) and `generate` is set."""

    name: str
    title: str
    domain: Domain
    task: str  # of its records: which reward plugin judges
    metric: Metric  # what the paper reports of it: pass@1 (binary correctness) or reward (mean continuous reward)
    sets: tuple[str, ...]
    source: str
    licence: str
    prompts: str | None = None  # NAME of the file or folder in --data, see `file_of`
    prepare: str = ""  # how to get that file
    generate: Mapping[str, Any] | None = None  # generator, size, seed, options, as a data source of a run
    out_of_distribution: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    sha256: str = ""  # of the yaml file

    def changed(self, given: Mapping[str, Any]) -> "Benchmark":
        """With these sampling values in place of its own."""
        sampling = replace(self.sampling, **given)
        sampling.check(self.name)
        return replace(self, sampling=sampling)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def catalogue() -> dict[str, Benchmark]:
    """All benchmarks by name."""
    return {name: read(FOLDER / f"{name}.yaml") for name in names()}


def read(path: Path) -> Benchmark:
    """One file; raises ConfigError naming file and key."""
    text = path.read_bytes()
    try:
        obj = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not yaml: {error}") from error
    if not isinstance(obj, dict):
        raise ConfigError(f"{path}: must be a mapping")
    known = {one.name for one in fields(Benchmark)} - {"name", "sha256"}
    if unknown := sorted(set(obj) - known):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    required = ("title", "domain", "task", "metric", "sets", "source", "licence")
    if missing := [key for key in required if key not in obj]:
        raise ConfigError(f"{path}: {missing[0]} is missing")
    for key, choices in (("domain", DOMAINS), ("metric", METRICS)):
        if obj[key] not in choices:
            raise ConfigError(f"{path}: {key} is {obj[key]!r}; it must be one of {', '.join(choices)}")
    if (obj.get("prompts") is None) == (obj.get("generate") is None):
        raise ConfigError(f"{path}: needs either 'prompts', a name in --data, or 'generate'")
    try:
        sampling = Sampling(**obj.pop("sampling", {}))
    except TypeError as error:
        raise ConfigError(f"{path}: sampling: {error}") from error
    sampling.check(str(path))
    obj["sets"] = tuple(obj["sets"])
    return Benchmark(name=path.stem, sampling=sampling, sha256=hashlib.sha256(text).hexdigest(), **obj)


def choose(text: str) -> list[Benchmark]:
    """The benchmarks of `A,B`, names or sets, each once.  Raises ConfigError listing what is known."""
    known = catalogue()
    sets = sorted({name for one in known.values() for name in one.sets})
    chosen: dict[str, Benchmark] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        found = [one for one in known.values() if word == one.name or word in one.sets]
        if not found:
            near = difflib.get_close_matches(word, [*known, *sets], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"--benchmarks {word}: no such benchmark.{hint} Known are {', '.join(known)}; sets: {', '.join(sets)}"
            )
        chosen.update({one.name: one for one in found})
    if not chosen:
        raise ConfigError(f"--benchmarks: name one at least; known are {', '.join(known)}; sets: {', '.join(sets)}")
    return list(chosen.values())


def check_files(chosen: Iterable[Benchmark], data: Path | None) -> None:
    """Raises DataError that names every file which is missing and how to get it."""
    lacking = [one for one in chosen if one.prompts is not None and (data is None or file_of(one, data) is None)]
    if not lacking:
        return
    lines = [f"  {one.name}: {one.prompts}.jsonl or {one.prompts}/validation.jsonl ({one.prepare})" for one in lacking]
    where = "--data DIR is not given" if data is None else f"{data} (--data) lacks it"
    raise DataError(
        f"{len(lacking)} of the benchmarks need a file of prompt records, and {where}:\n" + "\n".join(lines)
    )


def file_of(benchmark: Benchmark, data: Path) -> Path | None:
    """Its records in --data: NAME.jsonl, or what `prorl data prepare` held out in NAME/; None where neither is."""
    name = benchmark.prompts
    forms = [f"{stem}.{form}" for stem in (name, f"{name}/validation") for form in ("jsonl", "parquet")]
    return next((data / form for form in forms if (data / form).is_file()), None)


def load_records(benchmark: Benchmark, data: Path | None, limit: int | None = None) -> list[dict[str, Any]]:
    """Its prompt records, in order.  Raises DataError naming file, line and field."""
    if benchmark.prompts is not None:
        from nemo_prorl.data.records import read_records

        check_files([benchmark], data)
        assert data is not None
        file = file_of(benchmark, data)
        assert file is not None
        records = read_records(file, {benchmark.task})
    else:
        from nemo_prorl.config import DataSource
        from nemo_prorl.data.laptop.generators import generate

        assert benchmark.generate is not None
        try:
            source = DataSource(name=benchmark.name, **benchmark.generate)
        except TypeError as error:
            raise ConfigError(f"{FOLDER / benchmark.name}.yaml: generate: {error}") from error
        records = generate(source)
    return records[:limit]


def records_sha256(records: Iterable[Mapping[str, Any]]) -> str:
    """sha256 over id, task, prompt and truth of the records, in order: what is asked and how it is judged."""
    digest = hashlib.sha256()
    for record in records:
        asked = {key: record[key] for key in ("id", "task", "prompt", "truth")}
        digest.update(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def part_of(record: Mapping[str, Any]) -> str:
    """Within a benchmark, what a record is reported under: the data set of a puzzle, else its source."""
    dataset = record["truth"].get("dataset") if record["task"] == "puzzles" else None
    return str(dataset or record.get("source") or record["task"])


def table(chosen: Iterable[Benchmark]) -> str:
    """What `--list` prints."""
    rows = [("benchmark", "domain", "metric", "samples", "context", "sets", "needs")]
    for one in chosen:
        s = one.sampling
        sets = ",".join(one.sets)
        rows.append((one.name, one.domain, one.metric, str(s.samples), str(s.context), sets, one.prompts or "nothing"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def sampling_json(sampling: Sampling) -> dict[str, Any]:
    return asdict(sampling)
