"""The numbers of one model on benchmarks, computed from its judged samples: results.json and its table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from nemo_prorl.evaluation.catalogue import Benchmark, BenchmarkAbout, part_of
from nemo_prorl.evaluation.estimates import Floats, Mean, ks_up_to, mean_of, mean_of_means, pass_at_k
from nemo_prorl.evaluation.formats import (
    BenchmarkNumbers,
    EvaluationManifest,
    EvaluationResults,
    EvaluationSample,
    EvaluationTime,
    GroupNumbers,
    Numbers,
)
from nemo_prorl.evaluation.readings import FORMS, domain_name
from nemo_prorl.evaluation.store import Key, StoredVerdict, verdicts_folder
from nemo_prorl.planning.columns import columns
from nemo_prorl.rewards.interface import is_right


@dataclass(frozen=True)
class Sample:
    """One response with its verdict.  `correct` and `score` are None if the infrastructure failed to judge it."""

    correct: bool | None
    score: float | None
    tokens: int | None  # None: the endpoint did not report it
    finished: bool  # False: cut off before its end
    failure: str | None  # of the verdict; "infrastructure" also if the response has no verdict
    has_form: bool | None = None  # it has the answer's form (`FORMS`); None: the task has no form


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt.  `part`: category of the prompt in the report."""

    id: str
    part: str
    samples: list[Sample]


@dataclass(frozen=True)
class Scored:
    """The samples of a benchmark, by prompt in the order of the prompt records."""

    prompts: list[PromptSamples]

    def by_part(self) -> dict[str, "Scored"]:
        """Return the prompts by their part; an empty dict if there is only one part."""
        return self._by(lambda part: part)

    def by_category(self) -> dict[str, "Scored"]:
        """Return the puzzles by category of reasoning-gym, see `categories`; empty if there is only one category."""
        return self._by(categories().get) if self.by_part() else {}

    def _by(self, name_of: Callable[[str], str | None]) -> dict[str, "Scored"]:
        named = [(name, prompt) for prompt in self.prompts if (name := name_of(prompt.part)) is not None]
        names = sorted({name for name, _ in named})
        groups = {name: Scored([prompt for other, prompt in named if other == name]) for name in names}
        return groups if len(groups) > 1 else {}

    def judged(self) -> "Scored":
        """Return the samples that have a verdict, without prompts that have no such sample."""
        kept = [replace(prompt, samples=[s for s in prompt.samples if s.score is not None]) for prompt in self.prompts]
        return Scored([prompt for prompt in kept if prompt.samples])

    def pass_table(self, ks: Sequence[int]) -> Floats:
        """Return [P, K] unbiased pass@k of each prompt."""
        correct_P = [sum(bool(s.correct) for s in prompt.samples) for prompt in self.prompts]
        rows = [[pass_at_k(len(one.samples), c, k) for k in ks] for one, c in zip(self.prompts, correct_P, strict=True)]
        return np.asarray(rows, dtype=np.float64)

    def rewards(self) -> Floats:
        """Return [P] mean reward of each prompt."""
        return np.asarray(
            [float(np.mean([s.score for s in prompt.samples if s.score is not None])) for prompt in self.prompts]
        )

    @property
    def least_samples(self) -> int:
        return min((len(prompt.samples) for prompt in self.prompts), default=0)


@cache
def categories() -> dict[str, str]:
    """Return the category of each task of reasoning-gym: the package of its module, such as algebra."""
    from reasoning_gym.factory import DATASETS  # seconds to import

    modules = {name: classes[0].__module__.split(".") for name, classes in DATASETS.items()}
    return {name: words[1] for name, words in modules.items() if words[0] == "reasoning_gym" and len(words) > 2}


def sample_of(line: EvaluationSample, verdict: StoredVerdict | None, task: str = "") -> Sample:
    """Return the sample for a stored response to a prompt of `task`.

    `verdict` is None if the response has not been judged.
    """
    score = None if verdict is None else verdict["score"]
    correct = None if verdict is None else is_right(verdict)
    failure = "infrastructure" if verdict is None else verdict["failure"]
    return Sample(
        correct=correct,
        score=score,
        tokens=line["tokens"],
        finished=line["finished"],
        failure=failure,
        has_form=FORMS[task] in line["response"] if task in FORMS else None,
    )


def scored(
    records: Sequence[Mapping[str, Any]],
    lines: Mapping[Key, EvaluationSample],
    verdicts: Mapping[Key, StoredVerdict],
    n: int,
) -> Scored:
    """Return the stored samples of each record with their verdicts; only sample numbers 0 to n - 1 count."""
    prompts = []
    for record in records:
        keys = [(record["id"], k) for k in range(n) if (record["id"], k) in lines]
        samples = [sample_of(lines[key], verdicts.get(key), record["task"]) for key in keys]
        prompts.append(PromptSamples(record["id"], part_of(record), samples))
    return Scored(prompts)


def numbers(samples: Scored) -> Numbers:
    """Return a model's scores and counts on a set of prompts.

    Means are over prompts, after a mean over the samples of each prompt.
    """
    judged = samples.judged()
    drawn = [sample for prompt in samples.prompts for sample in prompt.samples]
    forms = [sample.has_form for sample in drawn if sample.has_form is not None]
    known = ([s.tokens for s in prompt.samples if s.tokens is not None] for prompt in samples.prompts)
    lengths = [float(np.mean(row)) for row in known if row]
    ks = ks_up_to(judged.least_samples)
    pass_PK = judged.pass_table(ks)
    return {
        "pass@1": mean_of(pass_PK[:, 0]) if ks else None,
        "reward": mean_of(judged.rewards()) if ks else None,
        "pass@k": {str(k): mean_of(pass_PK[:, i]) for i, k in enumerate(ks)},
        "prompts": len(samples.prompts),
        "samples": samples.least_samples,
        "unjudged": sum(s.score is None for s in drawn),
        "failures": {
            "timeout": sum(s.failure == "timeout" for s in drawn),
            "invalid": sum(s.failure == "invalid" for s in drawn),
        },
        "tokens": mean_of(lengths) if lengths else None,
        "truncated": float(np.mean([not s.finished for s in drawn])) if drawn else None,
        "without_form": float(np.mean([not has_form for has_form in forms])) if forms else None,
    }


def benchmark_numbers(benchmark: Benchmark, samples: Scored) -> BenchmarkNumbers:
    """Return a benchmark's entry in results.json."""
    entry: BenchmarkNumbers = {
        **benchmark.about(),
        "sampling": asdict(benchmark.sampling),
        **numbers(samples),
        "parts": {part: numbers(some) for part, some in samples.by_part().items()},
    }
    if benchmark.task == "puzzles" and (by_category := samples.by_category()):
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
    manifest: EvaluationManifest, benchmarks: Sequence[Benchmark], samples: Mapping[str, Scored], time: EvaluationTime
) -> EvaluationResults:
    """Return the content of results.json, which docs/reference/formats.md describes."""
    entries = {benchmark.name: benchmark_numbers(benchmark, samples[benchmark.name]) for benchmark in benchmarks}
    for name, entry in entries.items():
        if (scorer := manifest["benchmarks"][name].get("scorer")) is not None:
            entry["scorer"] = scorer
    domains = {group: together({name: entries[name] for name in names}) for group, names in by_domain(entries).items()}
    outside = domains.pop("out_of_distribution", None)
    complete = all(
        entry["unjudged"] == 0 and entry["samples"] == entry["sampling"]["samples"] for entry in entries.values()
    )
    return {
        "format": 1,
        "complete": complete,
        "model": manifest["model"],
        "seed": manifest["seed"],
        "verdicts": verdicts_folder(manifest),
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
    return rewarded and not any(mean["mean"] for entry in known for mean in entry["pass@k"].values())


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
        *("-" if (share := entry.get(key)) is None else f"{100 * share:.1f}" for key in ("truncated", "without_form")),
        str(entry.get("unjudged", "")),
    ]


def percent(value: Mean | None) -> str:
    """Return mean and standard error in percent, such as `51.2 ± 1.3`."""
    if value is None:
        return "-"
    error = value["se"]
    return f"{100 * value['mean']:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
