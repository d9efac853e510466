"""`prorl probe`: tests before a run whether the starting model can learn from the run's training prompts.

For a few prompts of each training source, the probe samples as the run would, judges the responses, and prints reward,
share of groups with a signal, response length, pass@n, and what to change.  DIR/probe.json (`--out DIR`) has the
numbers and all responses.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation.readings import FORMS
from nemo_prorl.lifecycle.stages import chosen_checkpoint

if TYPE_CHECKING:  # these import torch, which wrong use need not wait for
    from nemo_prorl.evaluation.sampling import BenchmarkWork

_log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 300
_TOLERANCE = 1e-6  # rewards that differ by less are equal


def facts(source: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the numbers of a source; shares and rewards are in 0..1, `tokens` is the mean length.

    Args:
        source: entry of a training source under `responses` in probe.json.
    """
    groups = [group["responses"] for group in source["groups"]]
    responses, form = _responses(source), FORMS.get(task)
    scores = [[response["score"] for response in group if response["score"] is not None] for group in groups]
    judged = [group for group in scores if group]
    return {
        "source": source["source"],
        "task": task,
        "prompts": len(groups),
        "responses": len(responses),
        "reward": _mean([score for group in judged for score in group]),
        "keep_rate": _mean([max(group) - min(group) > _TOLERANCE for group in judged]),
        "solved": _mean([min(group) >= 1 - _TOLERANCE for group in judged]),
        "pass_at_n": _mean([max(group) >= 1 - _TOLERANCE for group in judged]),
        "cut_off": _mean([not response["finished"] for response in responses]),
        "tokens": _mean([response["tokens"] for response in responses]),
        "without_form": None if form is None else _mean([form not in response["text"] for response in responses]),
        "unjudged": _mean([response["score"] is None for response in responses]),
    }


def _responses(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [response for group in source["groups"] for response in group["responses"]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def advice(facts: Mapping[str, Any], prompt: str = "", failure: str = "", eos: str | None = None) -> str:
    """Return a sentence on what to change for a source with these facts.

    Args:
        prompt: the run's `data.prompt`.
        failure: reason why a response has no reward.
        eos: the caution about the model's eos token, if any.
    """
    task = facts["task"]
    if facts["unjudged"] > 0:
        reason = failure or "see logs/ in the folder of the probe"
        return f"{facts['unjudged']:.0%} of the responses could not be judged: {reason}"
    if facts["cut_off"] > 0.5:
        fix = eos or "give them more room (trainer.grpo.max_response_tokens, trainer.grpo.context_tokens)"
        return f"{facts['cut_off']:.0%} of the responses are cut off: {fix}"
    if (facts["without_form"] or 0.0) > 0.5:
        message = "" if prompt == "chat" else " send it as a message (data.prompt=chat),"
        return (
            f"{facts['without_form']:.0%} of the responses have no {FORMS[task]}: state the form in the prompt"
            f" ('data.templates.{task}=\"TEXT WITH {{problem}}\"'),{message} or add a warm-up (trainer.warmup.steps)"
        )
    if facts["solved"] > 0.5:
        return f"{facts['solved']:.0%} of the prompts are solved by every response: take harder problems"
    if facts["keep_rate"] < 0.2:
        return (
            f"only {facts['keep_rate']:.0%} of the groups carry a signal: take easier problems, or more samples"
            " (trainer.grpo.samples_per_prompt)"
        )
    return "fits: enough groups carry a signal"


def estimate(cfg: DictConfig, sources: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float | None]:
    """Return the expected tokens of a step's rollout, the seconds to generate them, and the measured tokens per second.

    Tokens and seconds are None if the run samples dynamically but no group of the probe carries a signal.

    Args:
        sources: facts of the training sources.
        seconds: time in which the probe's responses were sampled.
    """
    weights = {source.name: float(source.weight) for source in cfg.data.train}
    total = sum(weights[source["source"]] for source in sources)
    keep_rate, length = (
        sum(weights[source["source"]] / total * source[key] for source in sources) for key in ("keep_rate", "tokens")
    )
    rate = sum(source["tokens"] * source["responses"] for source in sources) / max(seconds, 1e-9)
    grpo = cfg.trainer.grpo
    groups = grpo.prompts_per_step
    if grpo.dynamic_sampling.enabled:
        if not keep_rate:
            return {"tokens_per_step": None, "generation_s_per_step": None, "tokens_per_s": rate}
        groups *= min(1 / keep_rate, grpo.dynamic_sampling.max_draw_factor)
    tokens = groups * grpo.samples_per_prompt * length
    return {"tokens_per_step": tokens, "generation_s_per_step": tokens / max(rate, 1e-9), "tokens_per_s": rate}


def probe(cfg: DictConfig, out: Path, prompts: int, samples: int, which: str | None = None) -> dict[str, Any]:
    """Probe the starting model of a run, or its policy in a checkpoint, and return the content of probe.json.

    Args:
        out: folder for probe.json, and for logs and endpoints of engine and reward server.
        prompts: prompts of each training source, chosen at random by the run's seed.
        samples: responses to each prompt.
        which: checkpoint, as in `chosen_checkpoint`; None: the starting model.

    Raises:
        ConfigError: the run has no model folder yet, or not this checkpoint.
        DataError: a record is wrong.
    """
    from nemo_prorl.cautions import eos_caution
    from nemo_prorl.data.blend import LoadedData, load_sources, of_tasks
    from nemo_prorl.data.lengths import PromptLengths, fit
    from nemo_prorl.evaluation import models
    from nemo_prorl.evaluation.run import local_engines
    from nemo_prorl.evaluation.sampling import sample_and_judge
    from nemo_prorl.files import write_json
    from nemo_prorl.launcher.one_node import locked
    from nemo_prorl.launcher.prepare import check_node

    probed = folder = _starting_model(cfg) if which is None else chosen_checkpoint(Path(cfg.run_dir), which)
    check_node(cfg, trains=False)
    with locked(out), tempfile.TemporaryDirectory() as stored:  # probe.json has all responses at the end
        folder = folder if which is None else models.exported(folder, out / "model")
        cfg.pretrained_checkpoint.restore_from_path = str(folder.resolve())  # the engines' model
        engines = local_engines(cfg, folder, cfg.trainer.grpo.context_tokens)
        used = LoadedData(of_tasks(load_sources(cfg.data).train, cfg.data), [])
        parts: list[BenchmarkWork] = []
        for source, records in fit(cfg, used, PromptLengths(folder, cfg.data)).train:
            chosen = random.Random(f"{cfg.seed} {source.name}").sample(records, min(prompts, len(records)))
            parts.append(_part(cfg, source.name, chosen, samples, Path(stored) / str(len(parts))))
        num_engines = cfg.rollout.engines
        work = asyncio.run(sample_and_judge(cfg, out, parts, engines, seed=cfg.seed, num_engines=num_engines))
        assert work is not None, "nothing was stored before"
        sources = [_judged(part) for part in parts]
        numbers = [facts(source, part.benchmark.task) for source, part in zip(sources, parts, strict=True)]
        failures = [next((r["detail"] for r in _responses(source) if r["score"] is None), "") for source in sources]
        result = {
            "format": 1,
            "model": str(probed),
            "samples": samples,
            "sources": [
                {**entry, "advice": advice(entry, cfg.data.prompt, failure, eos_caution(cfg))}
                for entry, failure in zip(numbers, failures, strict=True)
            ],
            "estimate": estimate(cfg, numbers, work.sampling_s),
            "responses": sources,
        }
        write_json(out / "probe.json", result)
        models.remove_export(out)
        return result


def _part(cfg: DictConfig, name: str, records: list[dict[str, Any]], samples: int, stored: Path) -> "BenchmarkWork":
    """Return prompts of a training source as a benchmark, with the sampling settings of a training step."""
    from nemo_prorl.evaluation.catalogue import Benchmark, Sampling
    from nemo_prorl.evaluation.sampling import BenchmarkWork
    from nemo_prorl.evaluation.store import Store

    grpo = cfg.trainer.grpo
    sampling = Sampling(samples, grpo.temperature, 1.0, grpo.context_tokens, grpo.max_response_tokens)
    benchmark = Benchmark(name=name, sha256="", task=records[0]["task"], generate={}, sampling=sampling)
    return BenchmarkWork(benchmark, Store(stored, "source"), records)


def _judged(part: "BenchmarkWork") -> dict[str, Any]:
    """Return the stored responses of a source as probe.json has them, with the best, the worst and the longest."""

    def response(key: tuple[str, int]) -> dict[str, Any]:
        line, verdict = part.store.lines[key], part.store.verdicts[key]
        text = {"text": line["response"], "finished": line["finished"], "tokens": line["tokens"] or 0}
        return {**text, "score": verdict["score"], "detail": verdict["detail"]}

    part.store.close()
    samples = range(part.benchmark.sampling.samples)
    groups = [
        {"id": record["id"], "prompt": record["prompt"], "responses": [response((record["id"], k)) for k in samples]}
        for record in part.records
    ]
    source = {"source": part.benchmark.name, "groups": groups}
    ranked = sorted(_responses(source), key=lambda answer: -1.0 if answer["score"] is None else answer["score"])
    return {**source, "examples": [ranked[-1], ranked[0], max(ranked, key=lambda answer: answer["tokens"])]}


def _starting_model(cfg: DictConfig) -> Path:
    from nemo_prorl.lifecycle.base_model import base_folder

    path = cfg.pretrained_checkpoint.restore_from_path
    base = base_folder(cfg, Path(cfg.run_dir))  # type: ignore[arg-type]
    folder = base if base.is_dir() else Path(path) if path else None
    if folder is None:
        raise ConfigError(
            f"run_dir={cfg.run_dir}: expected a starting model in {base}; there is none, because the laptop's model is"
            " random before its warm-up. Fix: prorl warmup with the same overrides, or"
            " pretrained_checkpoint.restore_from_path=FOLDER"
        )
    if folder != base:
        # `cautions` has the fix for a model that needs no warm-up.
        _log.warning("the model before its warm-up is probed; `prorl warmup` with the same overrides would make it")
    return folder


# --- the command -----------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add `probe` to the main command line."""
    text = "sample the starting model of a run, or a checkpoint, on its own prompts: reward, signal, what to change"
    parser = commands.add_parser("probe", help=text, description=text)
    add = parser.add_argument
    add("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE as for prorl train")
    add("--config", metavar="FILE", type=Path, help="config.yaml of a run, used instead of conf/")
    add("--prompts", metavar="N", type=int, default=8, help="prompts of each training source (default: 8)")
    add("--samples", metavar="N", type=int, help="responses per prompt (default: trainer.grpo.samples_per_prompt)")
    add("--out", metavar="DIR", type=Path, help="folder for probe.json and logs (default: RUN_DIR/probe)")
    which = "checkpoint of RUN_DIR: newest, best or a step number (default: the starting model)"
    add("--checkpoint", metavar="WHICH", help=which)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from nemo_prorl import settings

    cfg = settings.load_run(args.overrides, args.config)
    samples = args.samples or int(cfg.trainer.grpo.samples_per_prompt)
    if args.prompts < 1 or samples < 1:
        raise ConfigError(f"--prompts {args.prompts} --samples {samples}: expected at least 1 of each")
    cfg.rollout.engines = max(1, cfg.rollout.engines // cfg.trainer.num_nodes)
    cfg.trainer.num_nodes = 1
    result = probe(cfg, args.out or Path(cfg.run_dir) / "probe", args.prompts, samples, args.checkpoint)
    sys.stdout.write(table(result))
    return 0


def table(result: Mapping[str, Any]) -> str:
    """Return the numbers, the advice and three responses of each source as text."""
    from nemo_prorl.planning.columns import columns

    head = ["source", "reward", "signal", "solved", f"pass@{result['samples']}", "no form", "cut off", "tokens"]
    rows = [head]
    for its in result["sources"]:
        form = "-" if its["without_form"] is None else f"{its['without_form']:.0%}"
        shares = [f"{its[key]:.0%}" for key in ("keep_rate", "solved", "pass_at_n")]
        rows.append(
            [its["source"], f"{its['reward']:.3f}", *shares, form, f"{its['cut_off']:.0%}", f"{its['tokens']:.0f}"]
        )
    text = columns(rows, right=range(1, len(head)))
    expected = result["estimate"]
    text += "\n" + "".join(f"{its['source']}: {its['advice']}\n" for its in result["sources"])
    if expected["tokens_per_step"] is None:
        text += "a step: no group carries a signal, so no step would train\n"
    else:
        text += (
            f"a step: about {expected['tokens_per_step']:,.0f} tokens, {expected['generation_s_per_step']:,.0f} s of"
            f" generation at {expected['tokens_per_s']:,.0f} tokens/s\n"
        )
    for source in result["responses"]:
        for name, answer in zip(("best", "worst", "longest"), source["examples"], strict=False):
            shown = answer["text"][:_SHOWN_CHARACTERS]
            text += f"\n{source['source']}, {name} (reward {answer['score']}, {answer['tokens']} tokens): {shown!r}\n"
    return text
