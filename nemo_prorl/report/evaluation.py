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
        shown["comparison"] = _comparison(comparison, folder / "comparison.json")
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
        "pass@k": _passes(entry),
    }


def _comparison(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Differences from the base, a row for each benchmark, domain and model; and every model's pass@k."""
    benchmarks = value.get("benchmarks")
    if not isinstance(benchmarks, dict):
        raise DataError(f"{path}: benchmarks: must be an object")
    entries = {str(entry.get("title") or name): entry for name, entry in _objects(benchmarks)}
    groups = [(f"mean of {name}", entry) for name, entry in _objects(value.get("domains"))]
    groups += _objects({"mean out of distribution": value.get("out_of_distribution")})
    bootstrap = value.get("bootstrap")
    skipped = value.get("skipped")
    return {
        "base": str(value.get("base")),
        "level": number(bootstrap.get("level")) if isinstance(bootstrap, dict) else None,
        "skipped": [str(name) for name in skipped] if isinstance(skipped, list) else [],
        "rows": [row for title, entry in [*entries.items(), *groups] for row in _differences(title, entry)],
        "curves": [
            {"title": title, "models": [{"name": n, "pass@k": _passes(of)} for n, of in _objects(entry.get("models"))]}
            for title, entry in entries.items()
        ],
    }


def _objects(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """The entries of an object that are objects themselves."""
    return [(k, of) for k, of in value.items() if isinstance(of, dict)] if isinstance(value, dict) else []


def _differences(title: str, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    found = entry.get("differences")
    for one in found if isinstance(found, list) else []:
        if not isinstance(one, dict):
            continue
        ks = sorted((k for k, _ in _objects(one.get("pass@k")) if k.isascii() and k.isdecimal()), key=int)
        solved = one.get("solved")
        rows.append(
            {
                "title": title,
                "outside": entry.get("out_of_distribution") is True,
                "model": str(one.get("model")),
                "prompts": number(one.get("prompts")),
                "pass@1": _interval(one.get("pass@1")),
                "reward": _interval(one.get("reward")),
                "k": int(ks[-1]) if ks else None,
                "largest": _interval(one["pass@k"][ks[-1]]) if ks else None,
                "gained": number(solved.get("gained")) if isinstance(solved, dict) else None,
                "lost": number(solved.get("lost")) if isinstance(solved, dict) else None,
                "base_k": number(one.get("base_k")),
                "reading": str(one.get("reading") or ""),
            }
        )
    return rows


def _interval(value: Any) -> dict[str, float | None] | None:
    """Difference with the ends of its interval, None without a difference."""
    if not isinstance(value, dict) or (difference := number(value.get("difference"))) is None:
        return None
    return {"difference": difference, "low": number(value.get("low")), "high": number(value.get("high"))}


def _passes(entry: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """pass@k by k."""
    return {k: m for k, of in _objects(entry.get("pass@k")) if k.isascii() and k.isdecimal() and (m := _mean(of))}


def _mean(value: Any) -> dict[str, float | None] | None:
    """Mean and standard error, None without a mean."""
    if not isinstance(value, dict) or (mean := number(value.get("mean"))) is None:
        return None
    return {"mean": mean, "se": number(value.get("se"))}
