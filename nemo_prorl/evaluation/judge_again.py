"""`prorl evaluate --judge-again`: judge the stored responses of an evaluation again, with a corrected scorer.

The new verdicts go into a folder of their own, `verdicts-2` the first time.  Once each stored response has one,
manifest.json names this folder and its scorers, in one step, and results.json is computed from it.  So the verdicts of
two scorers are never in one result, and a command that was killed continues.  Earlier verdicts are kept.
"""

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl import settings
from nemo_prorl.errors import ProrlError
from nemo_prorl.evaluation.catalogue import Benchmark, Sampling
from nemo_prorl.evaluation.formats import BenchmarkManifest, EvaluationManifest, EvaluationResults
from nemo_prorl.evaluation.manifest import is_given, recorded_functions, scorer_entry
from nemo_prorl.evaluation.run import check_rewards, stoppable, write_results
from nemo_prorl.evaluation.sampling import BenchmarkWork, sample_and_judge
from nemo_prorl.evaluation.store import Store, read_json, verdicts_folder
from nemo_prorl.files import read_object, write_json
from nemo_prorl.launcher.one_node import locked
from nemo_prorl.launcher.run_data import plain
from nemo_prorl.rewards.discovery import discover
from nemo_prorl.rewards.reverify import Summary, differs

_log = logging.getLogger(__name__)


def judge_again(out: Path, overrides: Sequence[str]) -> tuple[EvaluationResults, Summary]:
    """Judge the stored responses in `out` again; return the new results, and how the verdicts changed.

    Reward functions and settings of plugins are those in manifest.json, unless `overrides` (KEY=VALUE) change them.

    Raises:
        ConfigError, DataError, UnfitMachine: A check failed; nothing was judged.
        StoppedCleanly: A signal stopped the command; the same command continues.
        ProrlError: Responses could not be judged; the earlier verdicts and results stay.
    """
    read_json(out / "manifest.json")  # before the lock makes the folder
    with locked(out):
        manifest: EvaluationManifest = read_json(out / "manifest.json")
        before = {name: Store(out, name, writable=False) for name in manifest["benchmarks"]}
        records = {name: store.records() for name, store in before.items()}
        tasks = {name: some[0]["task"] for name, some in records.items()}
        cfg = _configuration(manifest, tasks, overrides)
        known = discover(functions=plain(cfg.rewards.functions))
        check_rewards(cfg, known, [record for some in records.values() for record in some])
        for name, entry in manifest["benchmarks"].items():
            entry.pop("function", None)
            entry.update(scorer_entry(cfg, known, tasks[name]))
        manifest["rewards"] = plain(cfg.rewards.plugins)
        manifest["functions_time_s"] = cfg.rewards.functions_time_s
        manifest["verdicts"] = _folder(out, manifest)
        parts = [
            BenchmarkWork(_benchmark(name, entry, tasks[name]), Store(out, name, verdicts=manifest["verdicts"]), some)
            for (name, entry), some in zip(manifest["benchmarks"].items(), records.values(), strict=True)
        ]
        try:
            judging = sample_and_judge(cfg, out, parts, None, seed=manifest["seed"], num_engines=0)
            work = asyncio.run(stoppable(judging))
        finally:
            for part in parts:
                part.store.close()
        _check_judged(parts)
        write_json(out / "manifest.json", manifest)
        return write_results(out, manifest, parts, work), _summary(before, parts)


def _configuration(manifest: EvaluationManifest, tasks: Mapping[str, str], overrides: Sequence[str]) -> DictConfig:
    has_cluster = any(word.startswith("cluster=") for word in overrides)
    base = [*([] if has_cluster else ["cluster=laptop"]), "pretrained_checkpoint.restore_from_path=null"]
    cfg = settings.load([*base, *overrides])
    functions = plain(cfg.rewards.functions)
    cfg.rewards.functions = {**recorded_functions(manifest, tasks, functions), **functions}
    cfg.rewards.plugins = OmegaConf.merge(manifest["rewards"], cfg.rewards.plugins)
    if not is_given("rewards.functions_time_s", overrides):
        cfg.rewards.functions_time_s = manifest.get("functions_time_s", cfg.rewards.functions_time_s)
    return cfg


def _folder(out: Path, manifest: EvaluationManifest) -> str:
    """Return the folder of the new verdicts: that of a stopped command with the same scorers, or a new one."""
    scorers = {benchmark: entry.get("scorer") for benchmark, entry in manifest["benchmarks"].items()}
    wanted = {"scorers": scorers, "rewards": manifest["rewards"], "functions_time_s": manifest["functions_time_s"]}
    current = verdicts_folder(manifest)
    if verdicts_folder(read_object(out / "results.json") or {}) != current and _is_of(out / current, wanted):
        return current  # of a command that was killed right before it wrote results.json
    number = current.rpartition("-")[2]
    name = f"verdicts-{int(number) + 1 if number.isdecimal() else 2}"
    if not _is_of(out / name, wanted):
        shutil.rmtree(out / name, ignore_errors=True)  # of a command with other scorers, which was stopped
        (out / name).mkdir()
        write_json(out / name / "scorers.json", wanted)
    return name


def _is_of(folder: Path, scorers: Mapping[str, Any]) -> bool:
    return read_object(folder / "scorers.json") == scorers


def _benchmark(name: str, entry: BenchmarkManifest, task: str) -> Benchmark:
    """Return a benchmark from its entry in the manifest, because its own file may have changed since."""
    about: dict[str, Any] = {key: entry[key] for key in ("title", "domain", "metric", "out_of_distribution")}
    sampling = Sampling(**entry["sampling"])
    return Benchmark(name, entry["file_sha256"], task, **about, prompts=f"{name}.jsonl", sampling=sampling)


def _check_judged(parts: Sequence[BenchmarkWork]) -> None:
    failed = [verdict for part in parts for verdict in part.store.verdicts.values() if verdict["score"] is None]
    if failed:
        raise ProrlError(
            f"{len(failed)} responses have no new verdict, so the earlier verdicts and results stay; the first:"
            f" {failed[0]['id']}: {failed[0]['detail']}. Fix: remove the cause, and run the same command again"
        )


def _summary(before: Mapping[str, Store], parts: Sequence[BenchmarkWork]) -> Summary:
    summary = Summary()
    for benchmark, store, _ in parts:
        for key, new in store.verdicts.items():
            if (old := before[benchmark.name].verdicts.get(key)) is not None:
                summary.add(benchmark.task, old, new, differs(old, new))
    return summary
