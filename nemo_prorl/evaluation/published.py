"""Evaluated models compared with published scores: published.json of `prorl evaluate --compare paper`.

Two errors are counted.  If both sides answered the same prompts, ours is that of the sampling within each prompt, and
theirs, which is unknown, is at most that of a mean p of numbers between 0 and 1: p (1 - p) / (prompts x samples).
Over other prompts theirs is at most p (1 - p) / prompts, and ours the same, or that over prompts if it is larger.
A row is outside if its difference has more standard errors than a level for all rows together (Bonferroni) allows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NotRequired, TypedDict

import numpy as np
import yaml

from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation.catalogue import Metric
from nemo_prorl.evaluation.compare import Evaluated
from nemo_prorl.evaluation.estimates import mean_of_means
from nemo_prorl.evaluation.formats import (
    BenchmarkManifest,
    ModelJson,
    Numbers,
    PublishedColumn,
    PublishedComparison,
    PublishedModel,
    PublishedRow,
)
from nemo_prorl.evaluation.readings import FORMS
from nemo_prorl.evaluation.results import Scored, numbers, percent
from nemo_prorl.planning.columns import columns

LEVEL = 0.05
FILE = Path(__file__).with_name("published.yaml")
_GENERIC = "prompt? grader?"  # causes that an evaluation cannot see itself


class Elsewhere(TypedDict):
    """A model's score in another source."""

    score: float
    source: str


class PublishedBenchmark(TypedDict):
    """A benchmark's entry in published.yaml; scores in percent by column."""

    scores: dict[str, float]
    fixed: NotRequired[Literal[True]]
    prompts: NotRequired[int]
    tasks: NotRequired[int]
    unnamed: NotRequired[str]
    elsewhere: NotRequired[dict[str, Elsewhere]]


class PublishedDomain(TypedDict):
    """A mean over benchmarks in published.yaml, in percent by column."""

    benchmarks: list[str]
    scores: dict[str, float]


class PublishedScores(TypedDict):
    """The content of published.yaml."""

    sources: dict[str, str]
    models: dict[str, PublishedColumn]
    sampling: dict[str, float]
    benchmarks: dict[str, PublishedBenchmark]
    categories: dict[str, dict[str, float]]
    domains: dict[str, PublishedDomain]


@cache
def scores() -> PublishedScores:
    """Return the published scores."""
    published: PublishedScores = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return published


def column_of(model: str, is_run: bool, requested: str | None) -> str:
    """Return the column that a model is compared with.

    Args:
        model: path or name of the model.  A run is compared with the paper's end, other models by name.
        is_run: the model was trained by a run of this project.
        requested: value of --as.

    Raises:
        ConfigError: `requested` is no column, or it is None and `model` does not name one.
    """
    known = scores()["models"]
    if requested is not None:
        if requested not in known:
            raise ConfigError(f"--as={requested}: expected one of {', '.join(known)}")
        return requested
    if is_run:
        return "end"
    named = [column for column, entry in known.items() if entry["name"].lower() in model.lower()]
    if not named:
        raise ConfigError(
            f"--compare paper: {model}: expected a run directory, or the name of a published model in the path. Fix:"
            f" --as base, or another of {', '.join(known)}"
        )
    return max(named, key=lambda column: len(known[column]["name"]))


def compare(models: Sequence[Evaluated], requested: Sequence[str | None]) -> PublishedComparison:
    """Return the content of published.json.  `requested`: each model's column, or None to find it by `column_of`."""
    published = scores()
    chosen = [_column(model.manifest["model"], name) for model, name in zip(models, requested, strict=True)]
    return {
        "format": 1,
        "sources": published["sources"],
        "columns": published["models"],
        "level": LEVEL,
        "models": [_model(model, column) for model, column in zip(models, chosen, strict=True)],
    }


def _column(model: ModelJson, requested: str | None) -> str:
    return column_of(f"{model.get('folder', '')} {model['name']}".strip(), bool(model.get("step")), requested)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A score of ours: its samples, its numbers, and how it was evaluated."""

    found: Scored
    numbers: Numbers
    entry: BenchmarkManifest
    limit: int | None  # maximum number of prompts per benchmark
    is_endpoint: bool
    is_trained: bool  # by a run of this project

    def part(self, some: Scored) -> "Measured":
        return replace(self, found=some, numbers=numbers(some))


@dataclass(frozen=True)
class Compared:
    """A row with what it was computed from; `measured` is None for a mean of rows and for what was not evaluated."""

    row: PublishedRow
    published: PublishedBenchmark
    measured: Measured | None = None


def _model(evaluated: Evaluated, column: str) -> PublishedModel:
    known = scores()
    measured = {name: _measured(evaluated, name) for name in evaluated.found}
    every: dict[str, PublishedBenchmark] = {name: {"scores": {}} for name in evaluated.found}
    every = known["benchmarks"] | {name: entry for name, entry in every.items() if name not in known["benchmarks"]}
    benchmarks = {name: _compared(measured.get(name), entry, column) for name, entry in every.items()}
    categories = _categories(measured.get("reasoning_gym"), column)
    domains = {
        name: _mean([benchmarks[key].row for key in entry["benchmarks"]], entry["scores"], column)
        for name, entry in known["domains"].items()
        if column in entry["scores"]
    }
    rows = [*benchmarks.values(), *categories.values(), *domains.values()]
    compared = sum(row.row["difference"] is not None for row in rows)
    threshold = NormalDist().inv_cdf(1.0 - LEVEL / (2.0 * max(1, compared)))
    for row in rows:
        _judge(row, column, threshold)
    return {
        "name": evaluated.name,
        "folder": str(evaluated.folder),
        "model": evaluated.manifest["model"],
        "column": column,
        "threshold": threshold,
        "benchmarks": {name: row.row for name, row in benchmarks.items()},
        "categories": {name: row.row for name, row in categories.items()},
        "domains": {name: row.row for name, row in domains.items()},
    }


def _measured(evaluated: Evaluated, name: str) -> Measured:
    samples, manifest = evaluated.found[name], evaluated.manifest
    model, entry = manifest["model"], manifest["benchmarks"][name]
    return Measured(
        found=samples,
        numbers=numbers(samples),
        entry=entry,
        limit=manifest["limit"],
        is_endpoint=model["kind"] == "endpoint",
        is_trained=bool(model.get("step")),
    )


def _categories(gym: Measured | None, column: str) -> dict[str, Compared]:
    if gym is None or not (parts := gym.found.by_category()):
        return {}
    entries: dict[str, PublishedBenchmark] = {name: {"scores": means} for name, means in scores()["categories"].items()}
    return {
        name: _compared(gym.part(parts[name]) if name in parts else None, entry, column)
        for name, entry in entries.items()
        if column in entry["scores"]
    }


def _compared(measured: Measured | None, published: PublishedBenchmark, column: str) -> Compared:
    """Return a row without its verdict."""
    shares = {name: value / 100.0 for name, value in published["scores"].items()}
    metric: Metric = "reward" if measured is None else measured.entry["metric"]
    row: PublishedRow = {
        "ours": None if measured is None else measured.numbers[metric],
        "published": shares,
        "difference": None,
        "se": None,
        "same_prompts": False,
        "verdict": "not evaluated" if measured is None else "no number" if column in shares else "not published",
        "hints": [],
    }
    if measured is not None and row["ours"] is not None and column in shares:
        row["same_prompts"] = same = _same_prompts(measured, published)
        row["difference"] = row["ours"]["mean"] - shares[column]
        row["se"] = standard_error(measured, metric, shares[column], same, published.get("prompts"))
    return Compared(row, published, measured)


def _same_prompts(measured: Measured, published: PublishedBenchmark) -> bool:
    judged = len(measured.found.judged().prompts)
    whole = measured.limit is None and judged == measured.numbers["prompts"]
    return "fixed" in published and whole and published.get("prompts", judged) == judged


def standard_error(measured: Measured, metric: Metric, share: float, same: bool, prompts: int | None) -> float | None:
    """Return the standard error of a difference, see the module; None for other prompts, if there is only one.

    `prompts`: number of published prompts; None: as many as ours.
    """
    judged = measured.found.judged()
    value_P = [
        [float(s.correct or False) if metric == "pass@1" else s.score or 0.0 for s in prompt.samples]
        for prompt in judged.prompts
    ]
    mean_P = np.asarray([np.mean(values) for values in value_P])
    count = len(value_P)
    their_prompts = count if prompts is None else prompts
    at_most = share * (1.0 - share)
    if not same:  # few prompts, all wrong, say little: the larger of what was seen and what may be
        return math.sqrt(max(mean_P.var(ddof=1), at_most) / count + at_most / their_prompts) if count > 1 else None
    if judged.least_samples > 1:
        within = float(np.mean([np.var(values, ddof=1) / len(values) for values in value_P])) / count
    else:
        within = float(mean_P.mean() * (1.0 - mean_P.mean())) / count
    return math.sqrt(within + at_most / (their_prompts * scores()["sampling"]["samples"]))


def _mean(rows: Sequence[PublishedRow], published: Mapping[str, float], column: str) -> Compared:
    """Return the row of the mean over some rows; without a number if one of them has none."""
    shares = {name: value / 100.0 for name, value in published.items()}
    ours = [row["ours"] for row in rows if row["ours"] is not None]
    errors = [row["se"] for row in rows if row["se"] is not None]
    whole = len(ours) == len(errors) == len(rows)
    mean = mean_of_means(ours) if whole else None
    row: PublishedRow = {
        "ours": mean,
        "published": shares,
        "difference": None if mean is None else mean["mean"] - shares[column],
        "se": float(np.sqrt(np.sum(np.square(errors)))) / len(rows) if whole else None,
        "same_prompts": all(row["same_prompts"] for row in rows),
        "verdict": "no number" if ours else "not evaluated",
        "hints": [],
    }
    return Compared(row, {"scores": dict(published)})


def _judge(compared: Compared, column: str, threshold: float) -> None:
    """Set the verdict and the hints of a row."""
    row = compared.row
    if row["difference"] is not None and row["se"] is not None:
        inside = abs(row["difference"]) <= threshold * row["se"]
        row["verdict"] = "within" if inside else "lower" if row["difference"] < 0 else "higher"
    if compared.measured is not None:
        row["hints"] = [*unfinished(compared.measured), *_causes(compared, compared.measured, column, threshold)]


# --- hints -----------------------------------------------------------------------------------------------------------


def unfinished(measured: Measured) -> list[str]:
    """Return what is missing of the evaluation itself."""
    its, wanted = measured.numbers, measured.entry["sampling"]["samples"]
    hints = [f"{its['samples']} of {wanted} samples: run it again"] if its["samples"] < wanted else []
    if its["unjudged"]:
        hints.append(f"{its['unjudged']} responses without a verdict: run it again")
    if not its["unjudged"] and its["prompts"] == 1:
        hints.append("a single prompt has no standard error")
    return hints


def _causes(compared: Compared, measured: Measured, column: str, threshold: float) -> list[str]:
    """Return what may have caused a difference: what the evaluation knows, otherwise what it cannot know."""
    row = compared.row
    if row["verdict"] not in ("lower", "higher") or row["difference"] is None or row["se"] is None:
        return []
    lower, size = row["difference"] < 0, abs(row["difference"])
    causes = [*_other_sampling(measured, lower), *_other_prompts(measured, compared.published)]
    if lower:
        causes += _lost(measured, size)
    elif (
        column == "base"
        and measured.entry["domain"] == "puzzles"
        and (form := measured.numbers["without_form"]) is not None
    ):
        causes.append(
            f"{100 * (1 - form):.0f} % have {FORMS['puzzles']}; the paper's base mostly wrote \\boxed{{}} (its F.1)"
        )
    ours = row["published"][column] + row["difference"]
    others = {name: abs(ours - score) for name, score in row["published"].items() if name != column}
    other = compared.published.get("elsewhere", {}).get(column)
    if other is not None and abs(ours - other["score"] / 100.0) < size:
        causes.append(f"{other['score']} by {other['source']}")
    elif near := [name for name, far in others.items() if far <= threshold * row["se"]]:
        causes.append(f"as {' or '.join(near)}: is it this model?")
    if measured.is_endpoint:
        causes.append("the server's chat template?")
    return causes or [f"training? {_GENERIC}" if measured.is_trained else _GENERIC]


def _other_sampling(measured: Measured, lower: bool) -> list[str]:
    """Return the settings of the sampling that differ; a shorter context only explains a lower score."""
    ours, paper = measured.entry["sampling"], scores()["sampling"]
    causes = [f"{key} {ours[key]:g}, not {paper[key]:g}" for key in ("temperature", "top_p") if ours[key] != paper[key]]
    if lower and ours["context"] < paper["context"]:
        causes.append(f"context {ours['context']}, not {paper['context']:g}")
    if lower and ours["max_response"] is not None and ours["max_response"] < paper["context"] // 2:
        causes.append(f"responses of {ours['max_response']} tokens")
    return causes


def _other_prompts(measured: Measured, published: PublishedBenchmark) -> list[str]:
    count, tasks = measured.numbers["prompts"], len({prompt.part for prompt in measured.found.prompts})
    causes = []
    if (prompts := published.get("prompts")) is not None and prompts != count:
        causes.append(f"{count} prompts, not {prompts}")
    elif measured.limit is not None:
        causes.append(f"the first {count} prompts only")
    if (number := published.get("tasks")) is not None and number != tasks:
        causes.append(f"{tasks} tasks, not {number}")
    if "unnamed" in published:
        causes.append(f"another {published['unnamed']}?")
    return causes


def _lost(measured: Measured, size: float) -> list[str]:
    """Return losses of score that are as large as the difference."""
    its = measured.numbers
    responses = sum(len(prompt.samples) for prompt in measured.found.prompts)
    shares = {
        "cut off": its["truncated"] or 0.0,
        "without the asked form: prompt?": its["without_form"] or 0.0,
        "out of the grader's time": its["failures"]["timeout"] / max(1, responses),
    }
    return [f"{100 * share:.1f} % {loss}" for loss, share in shares.items() if share >= size]


# --- the table -------------------------------------------------------------------------------------------------------


def table(result: PublishedComparison) -> str:
    """Return the text that `--compare paper` prints."""
    text = []
    for model in result["models"]:
        heads = ["", *result["columns"], model["name"], f"- {model['column']}", "verdict"]
        rows = [heads]
        for section in ("benchmarks", "domains", "categories"):
            its: dict[str, PublishedRow] = model[section]
            if its and section != "benchmarks":
                rows.append([{"domains": "means of six:", "categories": "reasoning_gym by category:"}[section]])
            rows += [_line(name, row, list(result["columns"])) for name, row in its.items()]
        text.append(columns(rows, right=range(1, len(heads) - 1)))
        every = [*model["benchmarks"].values(), *model["categories"].values(), *model["domains"].values()]
        compared = [row for row in every if row["verdict"] in ("within", "lower", "higher")]
        outside = sum(row["verdict"] != "within" for row in compared)
        text.append(
            f"{model['name']} compared with {result['columns'][model['column']]['name']}: {outside} of {len(compared)}"
            f" rows are outside, by more than {model['threshold']:.1f} standard errors. Such a row is found by chance"
            f" in {100 * result['level']:.0f} % of whole tables.\n"
        )
    text.append("In percent, with standard errors. Sources:\n")
    text += [f"  {', '.join(names)}: {result['sources'][source]}\n" for source, names in _by_source(result).items()]
    return "".join(text)


def _by_source(result: PublishedComparison) -> dict[str, list[str]]:
    by: dict[str, list[str]] = {}
    for name, column in result["columns"].items():
        by.setdefault(column["source"], []).append(name)
    return by


def _line(name: str, row: PublishedRow, names: Sequence[str]) -> list[str]:
    published = [f"{100 * row['published'][column]:.1f}" if column in row["published"] else "-" for column in names]
    difference = "-"
    if row["difference"] is not None:
        difference = f"{round(100 * row['difference'], 1) + 0.0:+.1f}" + (
            "" if row["se"] is None else f" ± {100 * row['se']:.1f}"
        )
    return [f"  {name}", *published, percent(row["ours"]), difference, verdict(row)]


def verdict(row: PublishedRow) -> str:
    """Return a row's verdict as text, such as `lower by 3.1 ± 1.2: prompt? grader?`."""
    words = "within the paper's" if row["verdict"] == "within" else str(row["verdict"])
    if row["verdict"] in ("lower", "higher") and row["difference"] is not None and row["se"] is not None:
        words += f" by {100 * abs(row['difference']):.1f} ± {100 * row['se']:.1f}"
    return words + (": " if row["hints"] else "") + "; ".join(row["hints"])
