"""Reads what `prorl evaluate` wrote, for the report's tables: results.json and, where there is one, comparison.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.report.read import number

_FILES = ("results.json", "comparison.json")


def read(folder: Path) -> dict[str, Any]:
    """What a page shows of an evaluation; raises ConfigError where there is none, DataError where it is broken."""
    found = {name: _object(folder / name) for name in _FILES}
    results, comparison = found["results.json"], found["comparison.json"]
    if results is None and comparison is None:
        raise ConfigError(
            f"--evaluation {folder}: holds neither {' nor '.join(_FILES)}: give what prorl evaluate wrote"
        )
    shown: dict[str, Any] = {"name": folder.resolve().name, "folder": str(folder)}
    if results is not None:
        shown |= _results(results, folder / "results.json")
    if comparison is not None:
        shown["comparison"] = comparison
    return shown


def _object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes().decode(errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: must be an object, as prorl evaluate writes it")
    return value


def _results(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    benchmarks = value.get("benchmarks")
    if not isinstance(benchmarks, dict):
        raise DataError(f"{path}: benchmarks: must be an object")
    model = value.get("model")
    groups = value.get("domains")
    means = {f"mean of {name}": entry for name, entry in groups.items()} if isinstance(groups, dict) else {}
    if isinstance(outside := value.get("out_of_distribution"), dict):
        means["mean out of distribution"] = outside | {"out_of_distribution": True}
    return {
        "model": _model(model),
        "complete": value.get("complete") is True,
        "rows": [_row(name, entry, False) for name, entry in benchmarks.items() if isinstance(entry, dict)]
        + [_row(name, entry, True) for name, entry in means.items() if isinstance(entry, dict)],
    }


def _model(model: Any) -> str:
    """The model's name, or the first text that says which it is."""
    if isinstance(model, dict):
        told = [model.get(key) for key in ("name", "path", "model", "url")]
        return next((text for text in told if isinstance(text, str)), json.dumps(model)[:200])
    return str(model)


def _row(name: str, entry: Mapping[str, Any], is_mean: bool) -> dict[str, Any]:
    passes = entry.get("pass@k")
    passes = passes if isinstance(passes, dict) else {}
    return {
        "name": name,
        "title": str(entry.get("title") or name),
        "domain": str(entry.get("domain") or ""),
        "metric": str(entry.get("metric") or ""),
        "outside": entry.get("out_of_distribution") is True,
        "is_mean": is_mean,
        "prompts": number(entry.get("prompts")),
        "samples": number(entry.get("samples")),
        "unjudged": number(entry.get("unjudged")),
        "truncated": number(entry.get("truncated")),
        **{key: _mean(entry.get(key)) for key in ("pass@1", "reward", "tokens")},
        "pass@k": {k: m for k, of in passes.items() if k.isdigit() and (m := _mean(of))},
    }


def _mean(value: Any) -> dict[str, float | None] | None:
    """Mean and standard error, None without a mean."""
    if not isinstance(value, dict) or (mean := number(value.get("mean"))) is None:
        return None
    return {"mean": mean, "se": number(value.get("se"))}
