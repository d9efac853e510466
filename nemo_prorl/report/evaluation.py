"""Reader of an evaluation's results.json and comparison.json, for the tables of the report."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.readings import domain_name, explained
from nemo_prorl.evaluation.store import read_json

_FACTS = (
    *("title", "out_of_distribution", "prompts", "samples", "unjudged", "truncated", "without_form"),
    *("pass@1", "reward", "tokens"),
)


def read(folder: Path) -> dict[str, Any]:
    """Return the tables of an evaluation.  Raises ConfigError if there is no evaluation, DataError if it is broken."""
    results, comparison = folder / "results.json", folder / "comparison.json"
    if not results.is_file() and not comparison.is_file():
        raise ConfigError(
            f"--evaluation {folder}: expected {results.name} or {comparison.name} in the folder; got neither."
            " Fix: give the --out folder of prorl evaluate"
        )
    shown: dict[str, Any] = {"name": folder.resolve().name}
    if results.is_file():
        shown |= _shown(results, _results)
    if comparison.is_file():
        shown["comparison"] = _shown(comparison, _comparison)
    return shown


def _shown(path: Path, shape: Callable[[Mapping[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    value = read_json(path)
    try:
        shown = shape(value)
        json.dumps(shown, allow_nan=False)  # a page cannot show NaN
        return shown
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: expected a file that prorl evaluate wrote; got an invalid value: {error!r}"
        ) from error


def _groups(value: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    outside, domains = value["out_of_distribution"], value["domains"].items()
    groups = {f"mean of {domain_name(name)}": group for name, group in domains if len(group.get("benchmarks", ())) != 1}
    return groups | ({"mean out of distribution": {**outside, "out_of_distribution": True}} if outside else {})


def _results(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluated model's name, and the table of its results.

    The table has a row for each benchmark, for the mean of each domain, and for the mean out of distribution.
    """
    entries = [*value["benchmarks"].items(), *_groups(value).items()]
    return {
        "model": value["model"]["name"],
        "complete": value["complete"],
        "rows": [
            {"title": name, "is_mean": name not in value["benchmarks"], "pass@k": entry["pass@k"]}
            | {key: entry[key] for key in _FACTS if key in entry}
            for name, entry in entries
        ],
    }


def _comparison(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the compared models differ from the base model of the comparison.

    Returns:
        `rows`: for each benchmark or mean over benchmarks, one row per model with its difference from the base model.
        `curves`: for each benchmark, the pass@k of every model, including the base model.
    """
    titled = {entry["title"]: entry for entry in value["benchmarks"].values()}
    return {
        "base": value["base"],
        "level": value["bootstrap"]["level"],
        "skipped": value["skipped"],
        "rows": [
            _difference(title, entry, difference, value["base"])
            for title, entry in (titled | _groups(value)).items()
            for difference in entry["differences"]
        ],
        "curves": [
            {"title": title, "models": [{"name": m, "pass@k": of["pass@k"]} for m, of in entry["models"].items()]}
            for title, entry in titled.items()
        ],
    }


def _difference(title: str, entry: Mapping[str, Any], gap: Mapping[str, Any], base: str) -> dict[str, Any]:
    most = max(gap["pass@k"], key=int)
    facts = {key: gap[key] for key in ("model", "pass@1", "reward")}
    facts["reading"] = explained(gap["reading"], base, int(most))
    more = {key: gap[key] for key in ("prompts", "base_k") if key in gap} | gap.get("solved", {})  # no means have these
    outside = entry.get("out_of_distribution", False)
    return {
        "title": title,
        "out_of_distribution": outside,
        "k": int(most),
        "largest": gap["pass@k"][most],
        **facts,
        **more,
    }
