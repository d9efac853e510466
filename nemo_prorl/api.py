"""The Python API: start a run, read it, and evaluate a model.

The package `nemo_prorl` exports its functions: `nemo_prorl.train`, `nemo_prorl.evaluate`, `nemo_prorl.load_run`.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl.errors import ConfigError, RunFailed
from nemo_prorl.files import read_objects

if TYPE_CHECKING:
    import pandas

    from nemo_prorl.evaluation.formats import EvaluationResults

# Overrides as texts KEY=VALUE, or as dictionaries, nested or with dots in their keys
Overrides = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

STOPPED = 75  # exit code of a run that stopped cleanly before its last step; `train` again continues it


@dataclass(frozen=True)
class Run:
    """The content of a run directory at the time of reading.

    Attributes:
        path: the run directory.
        config: the run's configuration, as nested dictionaries.
        metrics: a dictionary for each step, in order (docs/reference/metrics.md).
        journal: events such as validations, resets and stops (docs/reference/journal.md).
        summary: the results, once the run has validated; empty before.
    """

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    journal: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Tell whether the run has made all its steps."""
        return self.summary.get("finished") is True

    @property
    def best(self) -> Path:
        """The checkpoint with the best validation.  Raises ConfigError if no kept checkpoint was validated."""
        from nemo_prorl.lifecycle.stages import chosen_checkpoint

        return chosen_checkpoint(self.path, "best")

    @property
    def steps(self) -> list[int]:
        """The steps whose responses are stored, in order."""
        return sorted(self._rollouts())

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return a step's stored responses, each with prompt, truth and verdict.

        Raises:
            KeyError: The step has no stored responses; the message names the steps that have some.
        """
        stored = self._rollouts()
        if step not in stored:
            have = (
                f"{len(stored)} steps have: {min(stored)} to {max(stored)}; see Run.steps" if stored else "no step has"
            )
            raise KeyError(f"step {step} has no stored responses; {have}")
        return read_objects(stored[step])

    def frame(self) -> "pandas.DataFrame":
        """Return the metrics as a table with the step as its index; needs pandas."""
        import pandas

        return pandas.DataFrame(self.metrics).set_index("step") if self.metrics else pandas.DataFrame()

    def _rollouts(self) -> dict[int, Path]:
        from nemo_prorl.files import step_files

        return step_files(self.path / "rollouts")


def load_run(path: str | Path) -> Run:
    """Read a run directory, finished or not.  Raises ConfigError if `path` is not a run directory."""
    from nemo_prorl.report.read import is_run, read_run

    if not is_run(Path(path)):
        raise ConfigError(f"{path}: expected a run directory; it has none of a run's files")
    run = read_run(Path(path))
    return Run(Path(path), run.config, run.metrics, run.events, run.summary)


def train(overrides: Overrides = (), config: str | Path | None = None) -> Run:
    """Start or continue a run on this machine, and return it when it has ended.

    Args:
        overrides: KEY=VALUE and GROUP=NAME, as for `prorl train`, or dictionaries with nested keys or keys with dots.
            A value of `rewards.functions` in a dictionary may be a Python function.
        config: config.yaml of a run, used in place of the shipped configuration.

    Returns:
        The run; `finished` is False if it stopped cleanly before its last step.

    Raises:
        ConfigError, DataError, UnfitMachine: a check failed, and nothing was started.
        RunFailed: the run ended with an error, which its logs contain.
    """
    run_dir, code = start(_texts(overrides), None if config is None else Path(config))
    if code not in (0, STOPPED):
        raise RunFailed(f"the run in {run_dir} ended with exit code {code}; see {run_dir / 'logs' / 'all.log'}")
    return load_run(run_dir)


def start(overrides: list[str], config: Path | None) -> tuple[Path, int]:
    """Start or continue a run; return its directory and the exit code of `prorl train`."""
    from nemo_prorl import settings
    from nemo_prorl.launcher import one_node

    cfg = settings.load_run(overrides, config)
    return Path(cfg.run_dir), one_node.run(cfg, settings.resolved_yaml(cfg))


def evaluate(
    model: str | Path,
    benchmarks: str | Iterable[str],
    out: str | Path,
    overrides: Overrides = (),
    data: str | Path | None = None,
    limit: int | None = None,
    seed: int = 1,
    checkpoint: str | int = "newest",
    model_name: str | None = None,
    **sampling: float | None,
) -> "EvaluationResults":
    """Evaluate a model as `prorl evaluate` does, and return the content of results.json.

    Args:
        model: Hugging Face folder or name, checkpoint, run directory, or address of a server.
        benchmarks: names of benchmarks, names of sets of benchmarks, and paths of your own benchmark files: one text
            separated by commas, or several texts.
        out: folder of the results; a call with the folder of an unfinished evaluation continues it.
        overrides: as for `train`.
        data: folder with the prompt records that a benchmark needs and this package does not ship.
        limit: prompts of each benchmark; None: all.
        checkpoint: of a run directory: newest, best (by validation) or a step.
        model_name: name of the model on a server; only with an address.
        sampling: samples, temperature, top_p, context and max_response; default: those of each benchmark.

    Raises:
        ConfigError, DataError, UnfitMachine: a check failed, and nothing was started.
    """
    from nemo_prorl.evaluation.catalogue import choose
    from nemo_prorl.evaluation.run import EvaluationOptions
    from nemo_prorl.evaluation.run import evaluate as run_evaluation

    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError("evaluate: an event loop runs here, as in a notebook. Fix: a script, or `!prorl evaluate`")
    chosen = choose(benchmarks if isinstance(benchmarks, str) else ",".join(benchmarks))
    options = EvaluationOptions(
        model=str(model),
        benchmarks=[benchmark.changed(sampling) for benchmark in chosen],
        out=Path(out),
        seed=seed,
        data=None if data is None else Path(data),
        limit=limit,
        checkpoint=str(checkpoint),
        model_name=model_name,
        overrides=tuple(_texts(overrides)),
    )
    return run_evaluation(options)


def _texts(overrides: Overrides) -> list[str]:
    """Return overrides as texts KEY=VALUE.  Raises ConfigError for a value that has no such text."""
    from nemo_prorl.config_changes import leaves

    texts: list[str] = []
    for override in [overrides] if isinstance(overrides, str | Mapping) else overrides:
        if isinstance(override, str):
            texts.append(override)
        else:
            texts += [f"{key}={_value_text(key, value)}" for key, value in leaves(override, into_lists=False)]
    return texts


def _value_text(key: str, value: Any) -> str:
    """Return a Python value in the syntax of overrides."""
    from hydra.core.override_parser.types import Quote, QuotedString

    from nemo_prorl.rewards.functions import place_of
    from nemo_prorl.value_types import shown

    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, Integral | Real):  # also numpy's
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if callable(value) and key.startswith("rewards.functions."):
        value = place_of(value, key)
    if isinstance(value, str | os.PathLike):
        return QuotedString(os.fspath(value), Quote.single).with_quotes()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_value_text(f'{key}.{name}', item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "[" + ", ".join(_value_text(key, item) for item in value) + "]"
    raise ConfigError(f"{key}={value!r}: expected a text, number, path, list or dictionary, True, False or None")
