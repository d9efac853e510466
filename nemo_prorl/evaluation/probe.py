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
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from nemo_prorl.errors import ConfigError
from nemo_prorl.evaluation.readings import FORMS

if TYPE_CHECKING:  # these import torch, which wrong use need not wait for
    from nemo_prorl.evaluation.catalogue import Sampling
    from nemo_prorl.evaluation.services import Services
    from nemo_prorl.evaluation.sources import LocalEngines
    from nemo_prorl.rewards.client import RewardClient

_log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 300
_TOLERANCE = 1e-6  # rewards that differ by less are equal


@dataclass
class Judged:
    """A response with its reward.  `score` is None if the response could not be judged."""

    text: str
    finished: bool  # False: cut off before its end
    tokens: int
    score: float | None = None
    detail: str = ""  # detail of the verdict


@dataclass
class SourceProbe:
    """The judged responses to the prompts of one training source, and their statistics.

    `groups` has the responses to each prompt in `records`.
    """

    name: str
    task: str
    records: list[dict[str, Any]]
    groups: list[list[Judged]] = field(default_factory=list)

    @property
    def responses(self) -> list[Judged]:
        return [response for group in self.groups for response in group]

    def share(self, count: int) -> float:
        return count / max(1, len(self.responses))

    def facts(self) -> dict[str, Any]:
        """Return the numbers of the source; shares and rewards are in 0..1, `tokens` is the mean length."""
        scores = [[one.score for one in group if one.score is not None] for group in self.groups]
        judged = [group for group in scores if group]
        mixed = [group for group in judged if max(group) - min(group) > _TOLERANCE]
        solved = [group for group in judged if min(group) >= 1 - _TOLERANCE]
        passed = [group for group in judged if max(group) >= 1 - _TOLERANCE]
        everything, form = self.responses, FORMS.get(self.task)
        return {
            "source": self.name,
            "task": self.task,
            "prompts": len(self.groups),
            "responses": len(everything),
            "reward": _mean([score for group in judged for score in group]),
            "keep_rate": len(mixed) / max(1, len(judged)),
            "solved": len(solved) / max(1, len(judged)),
            "pass_at_n": len(passed) / max(1, len(judged)),
            "cut_off": self.share(sum(not one.finished for one in everything)),
            "tokens": _mean([one.tokens for one in everything]),
            "without_form": None if form is None else self.share(sum(form not in one.text for one in everything)),
            "unjudged": self.share(sum(one.score is None for one in everything)),
        }

    def first_failure(self) -> str:
        """Return the reason why the first unjudged response has no reward; "" if all are judged."""
        return next((one.detail for one in self.responses if one.score is None), "")

    def examples(self) -> list[Judged]:
        """Return the best, the worst and the longest response."""
        ranked = sorted(self.responses, key=lambda one: -1.0 if one.score is None else one.score)
        return [ranked[-1], ranked[0], max(ranked, key=lambda one: one.tokens)] if ranked else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def advice(facts: Mapping[str, Any]) -> str:
    """Return what to change for a source with these facts, in words."""
    task = facts["task"]
    if facts["unjudged"] > 0:
        why = facts.get("why") or "see logs/ in the folder of the probe"
        return f"{facts['unjudged']:.0%} of the responses could not be judged: {why}"
    if facts["cut_off"] > 0.5:
        return (
            f"{facts['cut_off']:.0%} of the responses are cut off: give them more room"
            " (trainer.grpo.max_response_tokens, trainer.grpo.context_tokens)"
        )
    if (facts["without_form"] or 0.0) > 0.5:
        message = "" if facts.get("prompt") == "chat" else " send it as a message (data.prompt=chat),"
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


def estimate(cfg: DictConfig, sources: Sequence[SourceProbe], seconds: float) -> dict[str, float | None]:
    """Return the expected tokens of a step's rollout, the seconds to generate them, and the measured tokens per second.

    Tokens and seconds are None if the run samples dynamically but no group of the probe carries a signal.

    Args:
        seconds: time in which the probe's responses were sampled.
    """
    weights = {source.name: float(source.weight) for source in cfg.data.train}
    total = sum(weights[one.name] for one in sources)
    facts = [(weights[one.name] / total, one.facts()) for one in sources]
    keep_rate = sum(share * one["keep_rate"] for share, one in facts)
    length = sum(share * one["tokens"] for share, one in facts)
    rate = sum(one.tokens for source in sources for one in source.responses) / max(seconds, 1e-9)
    grpo = cfg.trainer.grpo
    groups = grpo.prompts_per_step
    if grpo.dynamic_sampling.enabled:
        if not keep_rate:
            return {"tokens_per_step": None, "generation_s_per_step": None, "tokens_per_s": rate}
        groups *= min(1 / keep_rate, grpo.dynamic_sampling.max_draw_factor)
    tokens = groups * grpo.samples_per_prompt * length
    return {"tokens_per_step": tokens, "generation_s_per_step": tokens / max(rate, 1e-9), "tokens_per_s": rate}


def probe(cfg: DictConfig, out: Path, prompts: int, samples: int) -> dict[str, Any]:
    """Probe the starting model of a run, and return the content of probe.json.

    Args:
        out: folder for probe.json, and for logs and endpoints of engine and reward server.
        prompts: prompts of each training source, chosen at random by the run's seed.
        samples: responses to each prompt.

    Raises:
        ConfigError: the run has no model folder yet.
        DataError: a record is wrong.
    """
    from nemo_prorl.data.blend import LoadedData, load_sources, of_tasks
    from nemo_prorl.data.lengths import PromptLengths, fit
    from nemo_prorl.evaluation.models import open_model
    from nemo_prorl.evaluation.run import local_engines
    from nemo_prorl.files import write_json
    from nemo_prorl.launcher.job import locked
    from nemo_prorl.launcher.prepare import check_node

    folder = _starting_model(cfg)
    cfg.pretrained_checkpoint.restore_from_path = str(folder.resolve())  # the engines' model
    check_node(cfg, trains=False)
    with locked(out):
        engines = local_engines(cfg, open_model(folder, out, "newest"), cfg.trainer.grpo.context_tokens)
        used = LoadedData(of_tasks(load_sources(cfg.data).train, cfg.data), [])
        train = fit(cfg, used, PromptLengths(folder, cfg.data)).train
        sources = []
        for source, records in train:
            chosen = random.Random(f"{cfg.seed} {source.name}").sample(records, min(prompts, len(records)))
            for record in chosen:
                engines.check(record, _sampling(cfg, samples))
            sources.append(SourceProbe(source.name, chosen[0]["task"], chosen))
        try:
            seconds = asyncio.run(_work(cfg, out, sources, samples, engines))
        except BaseExceptionGroup as errors:  # of the responses; the first error cancelled the others
            raise errors.exceptions[0] from None
        facts = [one.facts() for one in sources]
        found = {
            "format": 1,
            "model": str(folder),
            "samples": samples,
            "sources": [
                {**one, "advice": advice({**one, "prompt": cfg.data.prompt, "why": source.first_failure()})}
                for one, source in zip(facts, sources, strict=True)
            ],
            "estimate": estimate(cfg, sources, seconds),
            "responses": [_json(source) for source in sources],
        }
        write_json(out / "probe.json", found)
        return found


def _sampling(cfg: DictConfig, samples: int) -> "Sampling":
    """Return the sampling settings of a training step."""
    from nemo_prorl.evaluation.catalogue import Sampling

    grpo = cfg.trainer.grpo
    return Sampling(samples, grpo.temperature, 1.0, grpo.context_tokens, grpo.max_response_tokens)


def _json(source: SourceProbe) -> dict[str, Any]:
    groups = zip(source.records, source.groups, strict=True)
    return {
        "source": source.name,
        "groups": [
            {"id": record["id"], "prompt": record["prompt"], "responses": [vars(one) for one in group]}
            for record, group in groups
        ],
        "examples": [vars(one) for one in source.examples()],
    }


def _starting_model(cfg: DictConfig) -> Path:
    from nemo_prorl.lifecycle.base_model import base_folder

    given = cfg.pretrained_checkpoint.restore_from_path
    base = base_folder(cfg, Path(cfg.run_dir))  # type: ignore[arg-type]
    folder = base if base.is_dir() else Path(given) if given else None
    if folder is None:
        raise ConfigError(
            f"run_dir={cfg.run_dir}: expected a starting model in {base}; there is none, because the laptop's model is"
            " random before its warm-up. Fix: prorl warmup with the same overrides, or"
            " pretrained_checkpoint.restore_from_path=FOLDER"
        )
    if folder != base:
        _log.warning(
            "the warm-up of this run has not been made, so the model before its warm-up is probed. Fix: prorl warmup"
            " with the same overrides, then probe again"
        )
    return folder


async def _work(
    cfg: DictConfig, out: Path, sources: Sequence[SourceProbe], samples: int, engines: "LocalEngines"
) -> float:
    """Sample and judge the responses of all sources; return the seconds of the sampling."""
    from nemo_prorl.evaluation.services import Services
    from nemo_prorl.service import read_token

    try:
        async with (
            Services(cfg, out, sorted({one.task for one in sources}), cfg.rollout.engines) as services,
            services.reward_client() as rewards,
        ):
            engines.connect(services.endpoints, read_token(services.token_file), cfg.rollout.engines)
            return await services.watching(_sample(cfg, services, sources, samples, engines, rewards))
    finally:
        await engines.close()


async def _sample(
    cfg: DictConfig,
    services: "Services",
    sources: Sequence[SourceProbe],
    samples: int,
    engines: "LocalEngines",
    rewards: "RewardClient",
) -> float:
    from nemo_prorl.deadlines import Deadline
    from nemo_prorl.evaluation.sources import Reply
    from nemo_prorl.rollout.endpoints import response_seed

    sampling = _sampling(cfg, samples)
    await services.ready()
    began, total, ended = time.monotonic(), samples * sum(len(one.records) for one in sources), 0
    _log.info("sampling %d responses", total)

    def count() -> None:
        nonlocal ended
        ended += 1
        if ended % max(1, total // 8) == 0:
            _log.info("%d of %d responses have ended, after %.0f s", ended, total, time.monotonic() - began)

    async def group(record: dict[str, Any]) -> list[Judged]:
        seeds = [response_seed(cfg.seed, record["id"], 0, sample) for sample in range(samples)]
        replies: dict[int, Reply] = {}

        def keep(place: int, reply: Reply) -> None:
            replies[place] = reply
            count()

        await engines.generate(record, sampling, seeds, keep)
        return [Judged(replies[at].text, replies[at].finished, replies[at].tokens or 0) for at in range(samples)]

    async def judge(record: dict[str, Any], response: Judged) -> None:
        what = f"the verdict on {record['id']!r} (trainer.deadlines.reward_s)"
        request = {**record, "response": response.text, "finished": response.finished}
        verdict = await rewards.score(request, Deadline(cfg.trainer.deadlines.reward_s, what))
        response.score, response.detail = verdict["score"], verdict["detail"]

    async with asyncio.TaskGroup() as running:
        tasks = [[running.create_task(group(record)) for record in one.records] for one in sources]
    seconds = time.monotonic() - began
    async with asyncio.TaskGroup() as judging:
        for source, made in zip(sources, tasks, strict=True):
            source.groups = [task.result() for task in made]
            for record, responses in zip(source.records, source.groups, strict=True):
                for response in responses:
                    judging.create_task(judge(record, response))
    return seconds


# --- the command -----------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Add `probe` to the main command line."""
    text = "sample the starting model of a run on its own prompts: reward, signal, length, and what to change"
    parser = commands.add_parser("probe", help=text, description=text)
    add = parser.add_argument
    add("overrides", metavar="OVERRIDE", nargs="*", default=[], help="KEY=VALUE as for prorl train")
    add("--config", metavar="FILE", type=Path, help="config.yaml of a run, used instead of conf/")
    add("--prompts", metavar="N", type=int, default=8, help="prompts of each training source (default: 8)")
    add("--samples", metavar="N", type=int, help="responses per prompt (default: trainer.grpo.samples_per_prompt)")
    add("--out", metavar="DIR", type=Path, help="folder for probe.json and logs (default: RUN_DIR/probe)")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from nemo_prorl import settings

    cfg = settings.load_run(args.overrides, args.config)
    samples = args.samples or int(cfg.trainer.grpo.samples_per_prompt)
    if args.prompts < 1 or samples < 1:
        raise ConfigError(f"--prompts {args.prompts} --samples {samples}: expected at least 1 of each")
    cfg.rollout.engines = max(1, cfg.rollout.engines // cfg.trainer.num_nodes)
    cfg.trainer.num_nodes = 1
    found = probe(cfg, args.out or Path(cfg.run_dir) / "probe", args.prompts, samples)
    sys.stdout.write(table(found))
    return 0


def table(found: Mapping[str, Any]) -> str:
    """Return the numbers, the advice and three responses of each source as text."""
    from nemo_prorl.planning.columns import columns

    head = ["source", "reward", "signal", "solved", f"pass@{found['samples']}", "no form", "cut off", "tokens"]
    rows = [head]
    for one in found["sources"]:
        form = "-" if one["without_form"] is None else f"{one['without_form']:.0%}"
        shares = [f"{one[key]:.0%}" for key in ("keep_rate", "solved", "pass_at_n")]
        rows.append(
            [one["source"], f"{one['reward']:.3f}", *shares, form, f"{one['cut_off']:.0%}", f"{one['tokens']:.0f}"]
        )
    text = columns(rows, right=range(1, len(head)))
    expected = found["estimate"]
    text += "\n" + "".join(f"{one['source']}: {one['advice']}\n" for one in found["sources"])
    if expected["tokens_per_step"] is None:
        text += "a step: no group carries a signal, so no step would train\n"
    else:
        text += (
            f"a step: about {expected['tokens_per_step']:,.0f} tokens, {expected['generation_s_per_step']:,.0f} s of"
            f" generation at {expected['tokens_per_s']:,.0f} tokens/s\n"
        )
    for source in found["responses"]:
        for name, one in zip(("best", "worst", "longest"), source["examples"], strict=False):
            shown = one["text"][:_SHOWN_CHARACTERS]
            text += f"\n{source['source']}, {name} (reward {one['score']}, {one['tokens']} tokens): {shown!r}\n"
    return text
