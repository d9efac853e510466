"""Comparison of two or more evaluated models on the same prompts, with paired bootstrap intervals: comparison.json.

The first model is the base.  A gain over the base at k = 1 may come from solutions that the base also finds, but less
often.  A gain at the largest k comes from solutions that the base did not find in that many tries.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.estimates import Floats, Interval, bootstrap_means, intervals, ks_up_to
from nemo_prorl.evaluation.formats import (
    ComparedBenchmark,
    ComparedGroup,
    ComparedPart,
    Difference,
    EvaluationComparison,
    EvaluationManifest,
    GroupDifference,
    Numbers,
    SolvedCounts,
)
from nemo_prorl.evaluation.gains import gain_text, gains_by_start
from nemo_prorl.evaluation.manifest import is_another
from nemo_prorl.evaluation.readings import Reading, domain_name, explained
from nemo_prorl.evaluation.results import Scored, by_domain, is_graded, numbers, percent, scored
from nemo_prorl.evaluation.store import Store, read_json
from nemo_prorl.files import read_object
from nemo_prorl.planning.columns import columns

_log = logging.getLogger(__name__)

RESAMPLES, SEED, LEVEL = 4000, 0, 0.95


@dataclass(frozen=True)
class Evaluated:
    """One model's evaluation, read from its folder."""

    name: str
    folder: Path
    manifest: EvaluationManifest
    found: dict[str, Scored]  # by benchmark


@dataclass(frozen=True)
class Paired:
    """Differences of a model's scores from the base model's, with bootstrap draws.

    The differences are means over the prompts judged for both models.  The 2 + K columns are pass@1, reward, and
    pass@k for each k in `ks`.
    """

    prompts: int  # number of prompts judged for both models
    ks: tuple[int, ...]
    mean_K: Floats  # [2 + K] mean difference
    drawn_RK: Floats  # [R, 2 + K] mean difference of each bootstrap draw
    solved: SolvedCounts


def read(folders: Sequence[Path], least: int = 2) -> list[Evaluated]:
    """Read the folders of at least `least` evaluations.

    Raises:
        ConfigError: A folder does not contain an evaluation, or folders are given twice.
        DataError: A file is broken.
    """
    if len(folders) < least:
        raise ConfigError("--compare: expected at least two folders of evaluations, the base first")
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare: {', '.join(names)}: a folder is given twice")
    return [_read(name, folder) for name, folder in zip(names, folders, strict=True)]


def _read(name: str, folder: Path) -> Evaluated:
    manifest: EvaluationManifest = read_json(folder / "manifest.json")
    if not (read_object(folder / "results.json") or {}).get("complete"):
        _log.warning("%s: not all responses are judged; prorl evaluate with the same arguments completes it", folder)
    samples = {}
    for benchmark, entry in manifest["benchmarks"].items():
        store = Store(folder, benchmark, writable=False)
        samples[benchmark] = scored(store.records(), store.lines, store.verdicts, entry["sampling"]["samples"])
    return Evaluated(name, folder, manifest, samples)


def compare(models: Sequence[Evaluated]) -> EvaluationComparison:
    """Return the content of comparison.json, which docs/reference/formats.md describes."""
    common = [name for name in models[0].found if all(name in model.found for model in models)]
    if not common:
        raise ConfigError("--compare: the evaluations have no benchmark in common")
    entries: dict[str, ComparedBenchmark] = {}
    paired: dict[tuple[str, str], Paired] = {}
    for name in common:
        _check_comparable(name, models)
        _tell_other_sampling(name, models)
        about = models[0].manifest["benchmarks"][name]
        samples = {model.name: model.found[name] for model in models}
        entry, pairs = _entry(samples, name)
        paired |= {(other, name): pair for other, pair in pairs.items()}
        entries[name] = {
            "title": about["title"],
            "domain": about["domain"],
            "metric": about["metric"],
            "out_of_distribution": about["out_of_distribution"],
            **entry,
            "parts": _parts({model: its.by_part() for model, its in samples.items()}, name),
        }
        if about["domain"] == "puzzles" and models[0].found[name].by_category():
            entries[name]["categories"] = _parts({model: its.by_category() for model, its in samples.items()}, name)
    others = [model.name for model in models[1:]]
    groups = {group: _group(names, others, paired) for group, names in by_domain(entries).items()}
    outside = groups.pop("out_of_distribution", None)
    return {
        "format": 1,
        "base": models[0].name,
        "models": [{"name": one.name, "folder": str(one.folder), "model": one.manifest["model"]} for one in models],
        "bootstrap": {"resamples": RESAMPLES, "seed": SEED, "level": LEVEL},
        "skipped": sorted({name for model in models for name in model.found} - set(common)),
        "benchmarks": entries,
        "domains": groups,
        "out_of_distribution": outside,
        "gains": gains_by_start(entries, others, models[0].name, RESAMPLES, LEVEL),
    }


def _check_comparable(name: str, models: Sequence[Evaluated]) -> None:
    """Raise DataError unless all evaluations of a benchmark have the same prompts and the same reward function."""
    scorers = [model.manifest["benchmarks"][name].get("scorer") for model in models]
    for model, scorer in zip(models, scorers, strict=True):
        if is_another(scorers[0], scorer):
            raise DataError(
                f"{model.folder}: its responses to {name} were judged by another reward function than those of"
                f" {models[0].folder} (scorer in manifest.json: {scorer}, {scorers[0]}). Fix: `prorl evaluate"
                " --judge-again --out DIR` for the older one judges its stored responses with the present function"
            )
    hashes = [model.manifest["benchmarks"][name]["prompts_sha256"] for model in models]
    for model, value in zip(models, hashes, strict=True):
        if value != hashes[0]:
            raise DataError(
                f"{model.folder}: its prompts of {name} differ from those of {models[0].folder} (sha256 {value[:12]},"
                f" {hashes[0][:12]}); a paired comparison needs the same prompts"
            )


def _tell_other_sampling(name: str, models: Sequence[Evaluated]) -> None:
    """Warn that the evaluations of a benchmark drew their responses with different settings."""
    drawn = [model.manifest["benchmarks"][name]["sampling"] for model in models]
    for key in sorted(drawn[0].keys() - {"samples"}):
        if len({its.get(key) for its in drawn}) > 1:
            values = ", ".join(f"{its.get(key)} in {model.name}" for its, model in zip(drawn, models, strict=True))
            _log.warning("%s: %s differs (%s), so the differences below are not of the models alone", name, key, values)


def _parts(samples: Mapping[str, Mapping[str, Scored]], where: str) -> dict[str, ComparedPart]:
    """Return the entries of a benchmark's parts.  `samples`: by name of the model and by part."""
    names = next(iter(samples.values()))
    return {part: _entry({model: its[part] for model, its in samples.items()}, f"{where}/{part}")[0] for part in names}


def _entry(models: Mapping[str, Scored], where: str) -> tuple[ComparedPart, dict[str, Paired]]:
    """Return what comparison.json has for a benchmark or part, and a `Paired` by name of each model but the base.

    Models without a prompt that is also judged for the base have no `Paired`.

    Args:
        models: samples by name of the model; the first model is the base.
        where: BENCHMARK or BENCHMARK/PART, which seeds the bootstrap.
    """
    numbers_of = {model: numbers(its) for model, its in models.items()}
    base, *others = models
    pairs = {
        other: pair for other in others if (pair := _pair(models[base], models[other], f"{other}/{where}")) is not None
    }
    differences: list[Difference] = [
        {
            **_difference(other, pair.mean_K, pair.drawn_RK, pair.ks),
            "prompts": pair.prompts,
            "solved": pair.solved,
            "base_k": base_k(numbers_of[base], numbers_of[other]),
        }
        for other, pair in pairs.items()
    ]
    return {"models": numbers_of, "differences": differences}, pairs


def _pair(base: Scored, other: Scored, key: str) -> Paired | None:
    """Return the differences over the prompts that are judged for both models; None if there are no such prompts.

    The bootstrap draws depend only on `key` and SEED.
    """
    left, right = ({prompt.id: prompt for prompt in samples.judged().prompts} for samples in (base, other))
    shared = [name for name in left if name in right]
    if not shared:
        return None
    first, second = (Scored([side[name] for name in shared]) for side in (left, right))
    ks = ks_up_to(min(first.least_samples, second.least_samples))
    table_PK, base_PK = second.pass_table(ks), first.pass_table(ks)
    reward_P = second.rewards() - first.rewards()
    difference_PK = np.column_stack([table_PK[:, 0] - base_PK[:, 0], reward_P, table_PK - base_PK])
    rng = np.random.default_rng([SEED, *key.encode()])
    return Paired(
        prompts=len(shared),
        ks=ks,
        mean_K=difference_PK.mean(axis=0),
        drawn_RK=bootstrap_means(difference_PK, RESAMPLES, rng),
        solved=_solved(first, second),
    )


def _solved(base: Scored, other: Scored) -> SolvedCounts:
    """Count the prompts solved at least once: by both models, by `base` only (lost), by `other` only (gained), by none.

    For each prompt, the same number of samples of both models is counted; surplus samples are ignored.
    """
    counts: SolvedCounts = {"both": 0, "gained": 0, "lost": 0, "neither": 0}
    for first, second in zip(base.prompts, other.prompts, strict=True):
        n = min(len(first.samples), len(second.samples))
        was, now = (any(s.correct for s in prompt.samples[:n]) for prompt in (first, second))
        counts["both" if was and now else "gained" if now else "lost" if was else "neither"] += 1
    return counts


def _difference(model: str, mean_K: Floats, drawn_RK: Floats, ks: Sequence[int]) -> GroupDifference:
    """Return a model's differences from the base with confidence intervals, as in comparison.json.

    Args:
        model: name of the model.
        mean_K: [2 + K] mean differences in pass@1, reward, and pass@k for each k in `ks`.
        drawn_RK: [R, 2 + K] these mean differences in each bootstrap draw.
    """
    first, reward, *rest = intervals(mean_K, drawn_RK, LEVEL)
    curve = {str(k): interval for k, interval in zip(ks, rest, strict=True)}
    return {"model": model, "pass@1": first, "reward": reward, "pass@k": curve, "reading": reading(curve, reward)}


def base_k(base: Numbers, other: Numbers) -> int | None:
    """Return the least k at which the base's pass@k reaches the other's pass@1, or None if no measured k does."""
    curve, target = base["pass@k"], other["pass@1"]
    assert target is not None  # _pair found a judged prompt
    return next((int(k) for k in sorted(curve, key=int) if curve[k]["mean"] >= target["mean"]), None)


def reading(curve: Mapping[str, Interval], reward: Interval) -> Reading:
    """Return as text what the intervals show, such as `new solutions`; docs/reference/formats.md explains each."""
    first, most = curve["1"], curve[max(curve, key=int)]
    better, more = first["low"] > 0, most["low"] > 0
    worse, less = first["high"] < 0, most["high"] < 0
    if more:
        return "new solutions"
    if better:
        return "narrowed" if less else "sharpened"
    if worse or less:
        return "worse"
    return "closer" if reward["low"] > 0 else "no difference"


def _group(names: list[str], others: Sequence[str], paired: Mapping[tuple[str, str], Paired]) -> ComparedGroup:
    """Return how much the mean score of each model in `others` differs from the mean score of the base.

    The mean score is the unweighted mean over the benchmarks `names`.  A model is left out if `paired` lacks one of
    these benchmarks for the model.
    """
    differences: list[GroupDifference] = []
    for other in others:
        pairs = [paired[other, name] for name in names if (other, name) in paired]
        if len(pairs) == len(names):
            ks = min((pair.ks for pair in pairs), key=len)
            width = 2 + len(ks)  # ks are powers of 2 from 1, so the shorter tuple is a prefix of the longer
            mean_K = np.mean([pair.mean_K[:width] for pair in pairs], axis=0)
            drawn_RK = np.mean([pair.drawn_RK[:, :width] for pair in pairs], axis=0)
            differences.append(_difference(other, mean_K, drawn_RK, ks))
    return {"benchmarks": names, "differences": differences}


# --- the table -------------------------------------------------------------------------------------------------------


def table(comparison: EvaluationComparison) -> str:
    """Return the text that `--compare` prints: per benchmark, each model's curve and its differences from the base."""
    text = []
    for name, entry in comparison["benchmarks"].items():
        text.append(f"{name}{' (out of distribution)' if entry['out_of_distribution'] else ''}")
        ks = sorted({k for its in entry["models"].values() for k in its["pass@k"]}, key=int)
        ks = [] if is_graded(entry["models"].values()) else ks
        rows = [["", "reward", *(f"pass@{k}" for k in ks)]]
        for model, its in entry["models"].items():
            rows.append([f"  {model}", percent(its["reward"]), *(percent(its["pass@k"].get(k)) for k in ks)])
        shown = [(f"  {difference['model']} - {comparison['base']}", difference) for difference in entry["differences"]]
        for category, part in entry.get("categories", {}).items():
            shown += [(f"    {category}: {difference['model']}", difference) for difference in part["differences"]]
        for label, difference in shown:
            rows.append([label, _percent(difference["reward"]), *(_percent(difference["pass@k"].get(k)) for k in ks)])
        text.append(columns(rows, right=range(1, len(rows[0]))).rstrip("\n"))
        text += [f"  {_summary(difference, comparison['base'])}" for difference in entry["differences"]]
    groups = dict(comparison["domains"])
    if comparison["out_of_distribution"] is not None:
        groups["out of distribution"] = comparison["out_of_distribution"]
    for group, compared in groups.items():
        for mean in compared["differences"] if len(compared["benchmarks"]) > 1 else ():
            largest = max(mean["pass@k"], key=int)
            gains = f"pass@1 {_percent(mean['pass@1'])}, pass@{largest} {_percent(mean['pass@k'][largest])}"
            words = explained(mean["reading"], comparison["base"], int(largest))
            text.append(
                f"{domain_name(group)}: {mean['model']} - {comparison['base']}: {gains}: {mean['model']} {words}"
            )
    text += [gain_text(gain, comparison["base"]).rstrip("\n") for gain in comparison["gains"]]
    if comparison["skipped"]:
        text.append(f"left out, because not in all evaluations: {', '.join(comparison['skipped'])}")
    text.append(f"All in percent; in brackets: {100 * LEVEL:.0f} % intervals of a paired bootstrap over prompts.")
    return "\n".join(text) + "\n"


def _percent(value: Interval | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value['difference']:+.1f} [{100 * value['low']:+.1f}, {100 * value['high']:+.1f}]"


def _summary(difference: Difference, base: str) -> str:
    solved, k = difference["solved"], difference["base_k"]
    text = f"{difference['model']} {explained(difference['reading'], base, max(map(int, difference['pass@k'])))}.\n  "
    if not (solved["gained"] or solved["lost"] or solved["both"]):
        return f"{text}No prompt was solved by either of them."
    text += (
        f"Prompts solved at least once in as many tries: by {difference['model']} alone {solved['gained']},"
        f" by {base} alone {solved['lost']}, by both {solved['both']}."
    )
    if k == 1:  # the base is as good at the first try
        return text
    tries = "more tries than were sampled" if k is None else f"{k} tries"
    return f"{text} {base} needs {tries} to reach {difference['model']}'s pass@1."
