"""comparison.json: two or more evaluated models on the same prompts, with paired bootstrap intervals.

The first is the base.  What a model gained over it at k = 1 may be old solutions found more surely; what it gained at
the largest k are solutions that the base did not find in so many tries.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.estimates import Floats, Interval, bootstrap_means, intervals, ks_up_to
from nemo_prorl.evaluation.formats import (
    ComparedBenchmark,
    ComparedGroup,
    ComparedModel,
    ComparedPart,
    Difference,
    EvaluationComparison,
    EvaluationManifest,
    GroupDifference,
    MeanJson,
    Numbers,
    Reading,
    SolvedCounts,
)
from nemo_prorl.evaluation.results import Scored, aligned, numbers, percent, scored
from nemo_prorl.evaluation.store import Store

FORMAT: Literal[1] = 1
RESAMPLES, SEED, LEVEL = 4000, 0, 0.95
_COLUMNS = ("pass@1", "reward")  # before the columns of pass@k


@dataclass(frozen=True)
class Evaluated:
    """One model's evaluation, as it lies in a folder."""

    name: str
    folder: Path
    manifest: EvaluationManifest
    found: dict[str, Scored]


@dataclass(frozen=True)
class Paired:
    """Two models on the prompts that both have a verdict on.  Columns: pass@1, reward, then pass@k for each of ks."""

    prompts: int
    ks: tuple[int, ...]
    mean_K: Floats  # [2 + K] of the differences
    drawn_RK: Floats
    solved: SolvedCounts

    def intervals(self) -> list[Interval]:
        return intervals(self.mean_K, self.drawn_RK, LEVEL)


def read(folders: Sequence[Path]) -> list[Evaluated]:
    """Raises ConfigError for a folder that holds no evaluation, DataError where its files do not fit together."""
    if len(folders) < 2:
        raise ConfigError("--compare: name two folders of evaluations at least, the base first")
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare: {', '.join(names)}: each folder once")
    return [_read(name, folder) for name, folder in zip(names, folders, strict=True)]


def _read(name: str, folder: Path) -> Evaluated:
    try:
        manifest: EvaluationManifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: holds no evaluation (manifest.json); make one with prorl evaluate --out"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / 'manifest.json'}: cannot be read: {error}") from error
    found = {}
    for benchmark, entry in manifest["benchmarks"].items():
        store = Store(folder, benchmark, writable=False)
        found[benchmark] = scored(store.records(), store.lines, store.verdicts, entry["sampling"]["samples"])
    return Evaluated(name, folder, manifest, found)


def compare(models: Sequence[Evaluated]) -> EvaluationComparison:
    """comparison.json, as docs/formats.md describes it."""
    common = [name for name in models[0].found if all(name in model.found for model in models)]
    if not common:
        raise ConfigError("--compare: the evaluations have no benchmark in common")
    for name in common:
        _check_same_prompts(name, models)
    entries: dict[str, ComparedBenchmark] = {}
    paired: dict[tuple[str, str], Paired] = {}
    for name in common:
        about = models[0].manifest["benchmarks"][name]
        entry, pairs = _entry([model.found[name] for model in models], models, name)
        paired |= {(other, name): pair for other, pair in pairs.items()}
        parts = sorted(set(models[0].found[name].parts))
        inner = {
            part: _entry([model.found[name].only(part) for model in models], models, f"{name}/{part}")[0]
            for part in (parts if len(parts) > 1 else [])
        }
        entries[name] = {
            "title": about["title"],
            "domain": about["domain"],
            "metric": about["metric"],
            "out_of_distribution": about["out_of_distribution"],
            **entry,
            "parts": inner,
        }
    skipped = sorted({name for model in models for name in model.found} - set(common))
    return {
        "format": FORMAT,
        "base": models[0].name,
        "models": [_about(model) for model in models],
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED, "level": LEVEL},
        "skipped": skipped,
        "benchmarks": entries,
        "domains": _groups(models, entries, paired, outside=False),
        "out_of_distribution": _groups(models, entries, paired, outside=True).get("out_of_distribution"),
    }


def _about(model: Evaluated) -> ComparedModel:
    return {"name": model.name, "folder": str(model.folder), "model": model.manifest["model"]}


def _check_same_prompts(name: str, models: Sequence[Evaluated]) -> None:
    hashes = [model.manifest["benchmarks"][name]["prompts_sha256"] for model in models]
    for model, value in zip(models, hashes, strict=True):
        if value != hashes[0]:
            raise DataError(
                f"{model.folder}: its prompts of {name} are not those of {models[0].folder} (sha256 {value[:12]},"
                f" {hashes[0][:12]}); a paired comparison needs the same"
            )


def _entry(found: Sequence[Scored], models: Sequence[Evaluated], where: str) -> tuple[ComparedPart, dict[str, Paired]]:
    """One benchmark or part of it: each model's numbers, and each one's differences from the base."""
    told = {model.name: numbers(one) for model, one in zip(models, found, strict=True)}
    pairs, differences = {}, []
    for model, one in itertools.islice(zip(models, found, strict=True), 1, None):
        pair = _pair(found[0], one, f"{model.name}/{where}")
        if pair is None:
            continue
        pairs[model.name] = pair
        differences.append(_difference(model.name, pair, told[models[0].name], told[model.name]))
    return {"models": told, "differences": differences}, pairs


def _pair(base: Scored, other: Scored, key: str) -> Paired | None:
    """The prompts that both have, drawn together; None where there is none.  The draws depend on `key` and SEED."""
    left, right = base.judged(), other.judged()
    at = {name: i for i, name in enumerate(right.ids)}
    pairs = [(i, at[name]) for i, name in enumerate(left.ids) if name in at]
    if not pairs:
        return None
    first, second = (
        Scored([one.ids[p[side]] for p in pairs], [], [one.samples[p[side]] for p in pairs])
        for side, one in ((0, left), (1, right))
    )
    ks = ks_up_to(min(first.least_samples, second.least_samples))
    table_PK, base_PK = second.pass_table(ks), first.pass_table(ks)
    reward_P = second.rewards() - first.rewards()
    difference_PK = np.column_stack([table_PK[:, 0] - base_PK[:, 0], reward_P, table_PK - base_PK])
    rng = np.random.default_rng([SEED, *key.encode()])
    return Paired(
        len(pairs),
        ks,
        difference_PK.mean(axis=0),
        bootstrap_means(difference_PK, RESAMPLES, rng),
        _solved(first, second),
    )


def _solved(base: Scored, other: Scored) -> SolvedCounts:
    """Prompts by who solved them at least once, each with the same number of samples."""
    counts: SolvedCounts = {"both": 0, "gained": 0, "lost": 0, "neither": 0}
    for mine, theirs in zip(base.samples, other.samples, strict=True):
        n = min(len(mine), len(theirs))
        was, now = any(s.correct for s in mine[:n]), any(s.correct for s in theirs[:n])
        counts["both" if was and now else "gained" if now else "lost" if was else "neither"] += 1
    return counts


def _difference(name: str, pair: Paired, base: Numbers, other: Numbers) -> Difference:
    assert other["pass@1"] is not None  # the pair has prompts that both were judged on
    return {
        **_group_difference(name, pair.intervals(), pair.ks),
        "prompts": pair.prompts,
        "solved": pair.solved,
        "base_k": base_k(base["pass@k"], other["pass@1"]["mean"]),
    }


def _group_difference(name: str, found: Sequence[Interval], ks: Sequence[int]) -> GroupDifference:
    pass_1, reward, *curve = [one.to_json() for one in found]
    at_k = {str(k): one for k, one in zip(ks, curve, strict=True)}
    return {"model": name, "pass@1": pass_1, "reward": reward, "pass@k": at_k, "reading": reading(at_k, reward)}


def base_k(curve: Mapping[str, MeanJson], target: float) -> int | None:
    """The least k at which the base's pass@k reaches the other's pass@1: the tries that it replaces by one."""
    return next((int(k) for k in sorted(curve, key=int) if curve[k]["mean"] >= target), None)


def reading(curve: Mapping[str, Mapping[str, float]], reward: Mapping[str, float]) -> Reading:
    """What the intervals say, in the words that docs/formats.md explains."""
    one, most = curve["1"], curve[max(curve, key=int)]
    better, more = one["low"] > 0, most["low"] > 0
    worse, less = one["high"] < 0, most["high"] < 0
    if more:
        return "new solutions"
    if better:
        return "narrowed" if less else "sharpened"
    if worse or less:
        return "worse"
    return "closer" if reward["low"] > 0 else "no difference"


def _groups(
    models: Sequence[Evaluated],
    entries: Mapping[str, ComparedBenchmark],
    paired: Mapping[tuple[str, str], Paired],
    outside: bool,
) -> dict[str, ComparedGroup]:
    """Differences of the unweighted mean over benchmarks, by domain, or of all that was kept out of training."""
    groups: dict[str, list[str]] = {}
    for name, entry in entries.items():
        if entry["out_of_distribution"] == outside:
            groups.setdefault("out_of_distribution" if outside else entry["domain"], []).append(name)
    told: dict[str, ComparedGroup] = {}
    for group, names in sorted(groups.items()):
        differences: list[GroupDifference] = []
        for model in models[1:]:
            pairs = [paired[model.name, name] for name in names if (model.name, name) in paired]
            if len(pairs) < len(names):
                continue  # a benchmark without a verdict: its domain has no mean
            ks = min((pair.ks for pair in pairs), key=len)
            width = len(_COLUMNS) + len(ks)  # ks are powers of 2 from 1: the shorter is a beginning of the longer
            mean_K = np.mean([pair.mean_K[:width] for pair in pairs], axis=0)
            drawn_RK = np.mean([pair.drawn_RK[:, :width] for pair in pairs], axis=0)
            differences.append(_group_difference(model.name, intervals(mean_K, drawn_RK, LEVEL), ks))
        told[group] = {"benchmarks": names, "differences": differences}
    return told


# --- the table -------------------------------------------------------------------------------------------------------


def table(comparison: EvaluationComparison) -> str:
    """For each benchmark: the models' curves, then the differences from the base with their intervals."""
    text = []
    for name, entry in comparison["benchmarks"].items():
        text.append(f"{name}{' (out of distribution)' if entry['out_of_distribution'] else ''}")
        ks = sorted({k for told in entry["models"].values() for k in told["pass@k"]}, key=int)
        rows = [["", "reward", *(f"pass@{k}" for k in ks)]]
        for model, told in entry["models"].items():
            rows.append([f"  {model}", percent(told["reward"]), *(percent(told["pass@k"].get(k)) for k in ks)])
        for one in entry["differences"]:
            cells = [_percent(one["pass@k"].get(k)) for k in ks]
            rows.append([f"  {one['model']} - {comparison['base']}", _percent(one["reward"]), *cells])
        text.append(aligned(rows).rstrip("\n"))
        text += [f"  {_read_out(one, comparison['base'])}" for one in entry["differences"]]
    groups = dict(comparison["domains"])
    if comparison["out_of_distribution"] is not None:
        groups["out of distribution"] = comparison["out_of_distribution"]
    for group, compared in groups.items():
        for mean in compared["differences"]:
            largest = max(mean["pass@k"], key=int)
            shown = f"pass@1 {_percent(mean['pass@1'])}, pass@{largest} {_percent(mean['pass@k'][largest])}"
            text.append(f"{group}: {mean['model']} - {comparison['base']}: {shown}: {mean['reading']}")
    if comparison["skipped"]:
        text.append(f"not in all evaluations, left out: {', '.join(comparison['skipped'])}")
    text.append(f"In percent; in brackets {100 * LEVEL:.0f} % paired bootstrap intervals over prompts.")
    return "\n".join(text) + "\n"


def _percent(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value['difference']:+.1f} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]"


def _read_out(one: Difference, base: str) -> str:
    solved, k = one["solved"], one["base_k"]
    tries = "more tries than were made" if k is None else f"{k} {'try' if k == 1 else 'tries'}"
    return (
        f"{one['model']}: {one['reading']}; prompts solved by it alone {solved['gained']}, by {base} alone"
        f" {solved['lost']}, by both {solved['both']}; {base} needs {tries} for what it does in one"
    )
