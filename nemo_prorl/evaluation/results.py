"""results.json and its table: the numbers of one model on some benchmarks, from its judged samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemo_prorl.evaluation.catalogue import Benchmark, part_of, sampling_json
from nemo_prorl.evaluation.estimates import Floats, Mean, ks_up_to, mean_of, mean_of_means, pass_table
from nemo_prorl.evaluation.formats import (
    BenchmarkNumbers,
    EvaluationResults,
    EvaluationTime,
    GroupNumbers,
    MeanJson,
    ModelJson,
    Numbers,
)

FORMAT: Literal[1] = 1
_RIGHT = 1.0 - 1e-9  # a verdict that says nothing of correctness is right with the full score

Key = tuple[str, int]  # (prompt id, sample)


@dataclass(frozen=True)
class Sample:
    """One response as it counts; `correct` and `score` None: the infrastructure failed to judge it."""

    correct: bool | None
    score: float | None
    tokens: int | None  # None: the endpoint did not say
    finished: bool
    failure: str | None


@dataclass
class Scored:
    """The judged samples of a benchmark by prompt, in the order of prompts."""

    ids: list[str]
    parts: list[str]  # of each prompt: what it is reported under
    samples: list[list[Sample]]

    def only(self, part: str) -> "Scored":
        at = [i for i, name in enumerate(self.parts) if name == part]
        return Scored([self.ids[i] for i in at], [part] * len(at), [self.samples[i] for i in at])

    def judged(self) -> "Scored":
        """Without samples that lack a verdict, and prompts that then have none."""
        kept = [[s for s in samples if s.score is not None] for samples in self.samples]
        at = [i for i, samples in enumerate(kept) if samples]
        return Scored([self.ids[i] for i in at], [self.parts[i] for i in at], [kept[i] for i in at])

    def pass_table(self, ks: Sequence[int]) -> Floats:
        """Return pass@k of each problem and each k, [P, K]."""
        n_P = [len(samples) for samples in self.samples]
        return pass_table(n_P, [sum(bool(s.correct) for s in samples) for samples in self.samples], ks)

    def rewards(self) -> Floats:
        """[P] mean reward of each prompt."""
        return np.asarray(
            [float(np.mean([s.score for s in samples if s.score is not None])) for samples in self.samples]
        )

    @property
    def least_samples(self) -> int:
        return min(map(len, self.samples), default=0)


def sample_of(line: Mapping[str, Any], verdict: Mapping[str, Any] | None) -> Sample:
    """From a stored response and its verdict, if it has one."""
    if verdict is None or verdict["score"] is None:
        return Sample(None, None, line["tokens"], line["finished"], "infrastructure")
    correct = verdict["correct"]
    correct = verdict["score"] >= _RIGHT if correct is None else bool(correct)
    return Sample(correct, verdict["score"], line["tokens"], line["finished"], verdict["failure"])


def scored(
    records: Sequence[Mapping[str, Any]], lines: Mapping[Key, Any], verdicts: Mapping[Key, Any], n: int
) -> Scored:
    """The first n samples of each record, as far as they are there."""
    rows = []
    for record in records:
        keys = [(record["id"], k) for k in range(n)]
        rows.append([sample_of(lines[key], verdicts.get(key)) for key in keys if key in lines])
    return Scored([record["id"] for record in records], [part_of(record) for record in records], rows)


def numbers(found: Scored) -> Numbers:
    """All numbers of some prompts; means over prompts of the means over their samples."""
    judged = found.judged()
    drawn = [sample for samples in found.samples for sample in samples]
    lengths = [[s.tokens for s in samples if s.tokens is not None] for samples in found.samples]
    ks = ks_up_to(judged.least_samples)
    pass_PK = judged.pass_table(ks)
    return {
        "pass@1": mean_of(pass_PK[:, 0]).to_json() if judged.ids else None,
        "reward": mean_of(judged.rewards()).to_json() if judged.ids else None,
        "pass@k": {str(k): mean_of(pass_PK[:, i]).to_json() for i, k in enumerate(ks)},
        "prompts": len(found.ids),
        "samples": found.least_samples,
        "unjudged": sum(s.score is None for s in drawn),
        "failures": {
            "timeout": sum(s.failure == "timeout" for s in drawn),
            "invalid": sum(s.failure == "invalid" for s in drawn),
        },
        "tokens": mean_of([float(np.mean(row)) for row in lengths if row]).to_json() if any(lengths) else None,
        "truncated": float(np.mean([not s.finished for s in drawn])) if drawn else None,
    }


def benchmark_numbers(benchmark: Benchmark, found: Scored) -> BenchmarkNumbers:
    """A benchmark's entry in results.json."""
    parts = sorted(set(found.parts))
    return {
        "title": benchmark.title,
        "domain": benchmark.domain,
        "metric": benchmark.metric,
        "out_of_distribution": benchmark.out_of_distribution,
        "sampling": sampling_json(benchmark.sampling),
        **numbers(found),
        "parts": {part: numbers(found.only(part)) for part in parts} if len(parts) > 1 else {},
    }


def together(entries: Mapping[str, BenchmarkNumbers]) -> GroupNumbers:
    """Return the unweighted mean of some benchmarks; k as far as all of them go."""
    judged = [entry for entry in entries.values() if entry["pass@1"] is not None]
    lacking = len(judged) < len(entries) or not judged
    ks = sorted(set.intersection(*(set(entry["pass@k"]) for entry in judged)), key=int) if judged else []

    def mean(values: Sequence[MeanJson | None]) -> MeanJson | None:
        known = [Mean(**value) for value in values if value is not None]
        return None if lacking or len(known) < len(values) else mean_of_means(known).to_json()

    at_k = {k: mean([entry["pass@k"][k] for entry in judged]) for k in ks}
    truncated = [entry["truncated"] for entry in judged if entry["truncated"] is not None]
    return {
        "benchmarks": sorted(entries),
        "headline": mean([entry[entry["metric"]] for entry in judged]),
        "pass@1": mean([entry["pass@1"] for entry in judged]),
        "reward": mean([entry["reward"] for entry in judged]),
        "pass@k": {k: value for k, value in at_k.items() if value is not None},
        "tokens": mean([entry["tokens"] for entry in judged]),
        "truncated": None if lacking else float(np.mean(truncated)),
    }


def groups_of(entries: Mapping[str, BenchmarkNumbers]) -> tuple[dict[str, GroupNumbers], GroupNumbers | None]:
    """(by domain, out of distribution): means over benchmarks, those kept out of training apart."""
    inside = {name: entry for name, entry in entries.items() if not entry["out_of_distribution"]}
    outside = {name: entry for name, entry in entries.items() if entry["out_of_distribution"]}
    domains: dict[str, dict[str, BenchmarkNumbers]] = {}
    for name, entry in inside.items():
        domains.setdefault(entry["domain"], {})[name] = entry
    return {d: together(of) for d, of in sorted(domains.items())}, together(outside) if outside else None


def results(
    model: ModelJson,
    seed: int,
    benchmarks: Sequence[Benchmark],
    found: Mapping[str, Scored],
    time: EvaluationTime,
) -> EvaluationResults:
    """results.json, as docs/formats.md describes it."""
    entries = {one.name: benchmark_numbers(one, found[one.name]) for one in benchmarks}
    domains, outside = groups_of(entries)
    complete = all(
        entry["unjudged"] == 0 and entry["samples"] == entry["sampling"]["samples"] for entry in entries.values()
    )
    return {
        "format": FORMAT,
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
    """One line a benchmark, then the domains, then what was kept out of training."""
    entries = result["benchmarks"]
    largest = max((int(k) for entry in entries.values() for k in entry["pass@k"]), default=1)
    heads = ["", "prompts", "samples", "pass@1", "reward", f"pass@{largest}", "tokens", "truncated", "unjudged"]
    rows = [heads]
    rows += [_row(name, entry, largest) for name, entry in entries.items() if not entry["out_of_distribution"]]
    rows += [_row(f"mean of {domain}", entry, largest) for domain, entry in result["domains"].items()]
    if result["out_of_distribution"] is not None:
        rows += [["out of distribution:"]]
        rows += [_row(name, entry, largest) for name, entry in entries.items() if entry["out_of_distribution"]]
        rows += [_row("mean of these", result["out_of_distribution"], largest)]
    return aligned(rows)


def _row(name: str, entry: Mapping[str, Any], largest: int) -> list[str]:
    tokens, truncated = entry["tokens"], entry["truncated"]
    return [
        name,
        str(entry.get("prompts", "")),
        str(entry.get("samples", "")),
        percent(entry["pass@1"]),
        percent(entry["reward"]),
        percent(entry["pass@k"].get(str(largest))),
        "-" if tokens is None else f"{tokens['mean']:.0f}",
        "-" if truncated is None else f"{100 * truncated:.1f}",
        str(entry.get("unjudged", "")),
    ]


def percent(value: Mapping[str, float | None] | None) -> str:
    """`51.2 ± 1.3`: mean and standard error, in percent."""
    if value is None or value["mean"] is None:
        return "-"
    error = value["se"]
    return f"{100 * value['mean']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right; rows of one cell are headings."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(len(row[i]) for row in full) for i in range(len(full[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=False))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
