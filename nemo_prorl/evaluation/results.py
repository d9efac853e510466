"""The numbers of one model on benchmarks, computed from its judged samples: results.json and its table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from nemo_prorl.evaluation.catalogue import Benchmark, BenchmarkAbout, part_of
from nemo_prorl.evaluation.estimates import Floats, Mean, ks_up_to, mean_of, mean_of_means, pass_at_k
from nemo_prorl.evaluation.formats import (
    BenchmarkNumbers,
    EvaluationResults,
    EvaluationSample,
    EvaluationTime,
    GroupNumbers,
    ModelJson,
    Numbers,
)
from nemo_prorl.evaluation.readings import FORMS, domain_name
from nemo_prorl.evaluation.store import Key, StoredVerdict
from nemo_prorl.planning.columns import columns

_CORRECT_FROM = 1.0 - 1e-9  # a verdict without `correct` counts as correct at this score or more


@dataclass(frozen=True)
class Sample:
    """One response with its verdict.  `correct` and `score` are None if the infrastructure failed to judge it."""

    correct: bool | None
    score: float | None
    tokens: int | None  # None: the endpoint did not report it
    finished: bool  # False: cut off before its end
    failure: str | None  # of the verdict; "infrastructure" also if the response has no verdict
    has_form: bool | None = None  # it has the answer's form (`FORMS`); None: the task has no form


@dataclass
class Scored:
    """The samples of a benchmark.  Each list has one entry per prompt, in the order of the prompt records."""

    ids: list[str]
    parts: list[str]  # category of each prompt in the report
    samples: list[list[Sample]]

    def only(self, part: str) -> "Scored":
        at = [i for i, name in enumerate(self.parts) if name == part]
        return Scored([self.ids[i] for i in at], [part] * len(at), [self.samples[i] for i in at])

    def by_part(self) -> dict[str, "Scored"]:
        """Return the prompts and samples by category of `parts`; an empty dict if there is only one category."""
        names = sorted(set(self.parts))
        return {name: self.only(name) for name in names} if len(names) > 1 else {}

    def by_category(self) -> dict[str, "Scored"]:
        """Return the puzzles by category of reasoning-gym, see `categories`; empty if there is only one category."""
        known = categories() if len(set(self.parts)) > 1 else {}
        names = [known.get(part) for part in self.parts]
        found = {}
        for name in sorted({name for name in names if name is not None}):
            at = [i for i, category in enumerate(names) if category == name]
            parts = [self.parts[i] for i in at]
            found[name] = Scored([self.ids[i] for i in at], parts, [self.samples[i] for i in at])
        return found if len(found) > 1 else {}

    def judged(self) -> "Scored":
        """Return the samples that have a verdict, without prompts that have no such sample."""
        kept = [[s for s in samples if s.score is not None] for samples in self.samples]
        at = [i for i, samples in enumerate(kept) if samples]
        return Scored([self.ids[i] for i in at], [self.parts[i] for i in at], [kept[i] for i in at])

    def pass_table(self, ks: Sequence[int]) -> Floats:
        """Return [P, K] unbiased pass@k of each prompt."""
        correct_P = [sum(bool(s.correct) for s in samples) for samples in self.samples]
        rows = [[pass_at_k(len(s), c, k) for k in ks] for s, c in zip(self.samples, correct_P, strict=True)]
        return np.asarray(rows, dtype=np.float64)

    def rewards(self) -> Floats:
        """Return [P] mean reward of each prompt."""
        return np.asarray(
            [float(np.mean([s.score for s in samples if s.score is not None])) for samples in self.samples]
        )

    @property
    def least_samples(self) -> int:
        return min(map(len, self.samples), default=0)


@cache
def categories() -> dict[str, str]:
    """Return the category of each task of reasoning-gym: the package of its module, such as algebra."""
    from reasoning_gym.factory import DATASETS  # seconds to import

    modules = {name: one[0].__module__.split(".") for name, one in DATASETS.items()}
    return {name: words[1] for name, words in modules.items() if words[0] == "reasoning_gym" and len(words) > 2}


def sample_of(line: EvaluationSample, verdict: StoredVerdict | None, task: str = "") -> Sample:
    """Return the sample for a stored response to a prompt of `task`.

    `verdict` is None if the response has not been judged.
    """
    has_form = FORMS[task] in line["response"] if task in FORMS else None
    if verdict is None or verdict["score"] is None:
        return Sample(None, None, line["tokens"], line["finished"], "infrastructure", has_form)
    correct = verdict["correct"]
    correct = verdict["score"] >= _CORRECT_FROM if correct is None else bool(correct)
    return Sample(correct, verdict["score"], line["tokens"], line["finished"], verdict["failure"], has_form)


def scored(
    records: Sequence[Mapping[str, Any]],
    lines: Mapping[Key, EvaluationSample],
    verdicts: Mapping[Key, StoredVerdict],
    n: int,
) -> Scored:
    """Return the stored samples of each record with their verdicts; only sample numbers 0 to n - 1 count."""
    rows = []
    for record in records:
        keys = [(record["id"], k) for k in range(n)]
        rows.append([sample_of(lines[key], verdicts.get(key), record["task"]) for key in keys if key in lines])
    return Scored([record["id"] for record in records], [part_of(record) for record in records], rows)


def numbers(found: Scored) -> Numbers:
    """Return a model's scores and counts on a set of prompts.

    Means are over prompts, after a mean over the samples of each prompt.
    """
    judged = found.judged()
    drawn = [sample for samples in found.samples for sample in samples]
    forms = [sample.has_form for sample in drawn if sample.has_form is not None]
    lengths = [
        float(np.mean(row))
        for row in ([s.tokens for s in some if s.tokens is not None] for some in found.samples)
        if row
    ]
    ks = ks_up_to(judged.least_samples)
    pass_PK = judged.pass_table(ks)
    return {
        "pass@1": mean_of(pass_PK[:, 0]) if ks else None,
        "reward": mean_of(judged.rewards()) if ks else None,
        "pass@k": {str(k): mean_of(pass_PK[:, i]) for i, k in enumerate(ks)},
        "prompts": len(found.ids),
        "samples": found.least_samples,
        "unjudged": sum(s.score is None for s in drawn),
        "failures": {
            "timeout": sum(s.failure == "timeout" for s in drawn),
            "invalid": sum(s.failure == "invalid" for s in drawn),
        },
        "tokens": mean_of(lengths) if lengths else None,
        "truncated": float(np.mean([not s.finished for s in drawn])) if drawn else None,
        "without_form": float(np.mean([not one for one in forms])) if forms else None,
    }


def benchmark_numbers(benchmark: Benchmark, found: Scored) -> BenchmarkNumbers:
    """Return a benchmark's entry in results.json."""
    entry: BenchmarkNumbers = {
        **benchmark.about(),
        "sampling": asdict(benchmark.sampling),
        **numbers(found),
        "parts": {part: numbers(some) for part, some in found.by_part().items()},
    }
    if benchmark.task == "puzzles" and (by_category := found.by_category()):
        entry["categories"] = {name: numbers(some) for name, some in by_category.items()}
    return entry


def together(entries: Mapping[str, BenchmarkNumbers]) -> GroupNumbers:
    """Return the unweighted means over benchmarks.

    A mean is None if a benchmark lacks the number.  pass@k has only the values of k that all benchmarks have.
    """
    whole = all(entry["pass@1"] is not None for entry in entries.values())
    ks = sorted(set.intersection(*(set(entry["pass@k"]) for entry in entries.values())), key=int)

    def mean(values: list[Mean | None]) -> Mean | None:
        known = [value for value in values if value is not None]
        return mean_of_means(known) if whole and len(known) == len(values) else None

    every = list(entries.values())
    truncated = [entry["truncated"] for entry in every if entry["truncated"] is not None]
    return {
        "benchmarks": sorted(entries),
        "headline": mean([entry[entry["metric"]] for entry in every]),
        "pass@1": mean([entry["pass@1"] for entry in every]),
        "reward": mean([entry["reward"] for entry in every]),
        "tokens": mean([entry["tokens"] for entry in every]),
        "pass@k": {k: mean_of_means([entry["pass@k"][k] for entry in every]) for k in ks},
        "truncated": float(np.mean(truncated)) if whole else None,
    }


def by_domain(entries: Mapping[str, BenchmarkAbout]) -> dict[str, list[str]]:
    """Return benchmark names by domain; out-of-distribution benchmarks are under `out_of_distribution` instead."""
    groups: dict[str, list[str]] = {}
    for name, entry in entries.items():
        groups.setdefault("out_of_distribution" if entry["out_of_distribution"] else entry["domain"], []).append(name)
    return dict(sorted(groups.items()))


def results(
    model: ModelJson, seed: int, benchmarks: Sequence[Benchmark], found: Mapping[str, Scored], time: EvaluationTime
) -> EvaluationResults:
    """Return the content of results.json, which docs/reference/formats.md describes."""
    entries = {one.name: benchmark_numbers(one, found[one.name]) for one in benchmarks}
    domains = {group: together({name: entries[name] for name in names}) for group, names in by_domain(entries).items()}
    outside = domains.pop("out_of_distribution", None)
    complete = all(
        entry["unjudged"] == 0 and entry["samples"] == entry["sampling"]["samples"] for entry in entries.values()
    )
    return {
        "format": 1,
        "complete": complete,
        "model": model,
        "seed": seed,
        "benchmarks": entries,
        "domains": domains,
        "out_of_distribution": outside,
        "time": time,
    }


# --- the table -------------------------------------------------------------------------------------------------------


def table(result: EvaluationResults) -> str:
    """Return the printed table: benchmarks, means by domain, and last the out-of-distribution benchmarks."""
    entries = result["benchmarks"]
    largest = max((int(k) for entry in entries.values() for k in entry["pass@k"]), default=1)
    heads = ["", "prompts", "samples", "pass@1", "reward", f"pass@{largest}"]
    heads += ["tokens", "truncated", "no form", "unjudged"]
    rows = [heads]
    for name, entry in entries.items():
        if not entry["out_of_distribution"]:
            rows.append(_row(name, entry, largest))
            rows += [_row(f"  {kind}", its, largest) for kind, its in entry.get("categories", {}).items()]
    several = {name: entry for name, entry in result["domains"].items() if len(entry["benchmarks"]) > 1}
    rows += [_row(f"mean of {domain_name(domain)}", entry, largest) for domain, entry in several.items()]
    if result["out_of_distribution"] is not None:
        rows += [["out of distribution:"]]
        rows += [_row(name, entry, largest) for name, entry in entries.items() if entry["out_of_distribution"]]
        if len(result["out_of_distribution"]["benchmarks"]) > 1:
            rows += [_row("mean of these", result["out_of_distribution"], largest)]
    if is_graded(entries.values()):
        rows = [[cell for at, cell in enumerate(row) if not heads[at].startswith("pass@")] for row in rows]
    return columns(rows, right=range(1, len(rows[0])))


def is_graded(entries: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether rewards were given and no response was right; pass@k is then 0 for each k, and is not shown."""
    known = list(entries)
    rewarded = any(entry["reward"] is not None and entry["reward"]["mean"] > 0 for entry in known)
    return rewarded and not any(one["mean"] for entry in known for one in entry["pass@k"].values())


def _row(name: str, entry: Mapping[str, Any], largest: int) -> list[str]:
    tokens, graded = entry["tokens"], is_graded([entry])
    return [
        name,
        str(entry.get("prompts", "")),
        str(entry.get("samples", "")),
        percent(None if graded else entry["pass@1"]),
        percent(entry["reward"]),
        percent(None if graded else entry["pass@k"].get(str(largest))),
        "-" if tokens is None else f"{tokens['mean']:.0f}",
        *("-" if (one := entry.get(key)) is None else f"{100 * one:.1f}" for key in ("truncated", "without_form")),
        str(entry.get("unjudged", "")),
    ]


def percent(value: Mean | None) -> str:
    """Return mean and standard error in percent, such as `51.2 ± 1.3`."""
    if value is None:
        return "-"
    error = value["se"]
    return f"{100 * value['mean']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
