"""Tries one training step at full context and batch with random tokens, to show before a run that its memory suffices.

Responses of a real run fill the context only after days, too late to learn that a GPU's memory is too small.  Every
trainer rank runs these parts, in a temporary run directory (`prorl doctor --preflight`):

    build        build policy, optimizer and reference
    engines      wait until engines and reward servers are ready
    publish      send the weights to the engines
    fill         fill the KV cache: prompts of nearly the full context, as many as an engine has in flight
    generate     generate the last tokens of these sequences, without stop tokens
    sleep        let the engines release their memory (rollout.sleep)
    batch        give each rank its random responses of a step, like a rollout does
    first update update on one micro-batch, which allocates the optimizer's moments
    logprobs     compute log-probabilities of this rank's rows of one update, each as long as the context
    reference    compute the reference policy's log-probabilities of the same rows
    update       update on all these rows
    wake         let the engines take their memory back and load new weights
    checkpoint   write a complete checkpoint
    resume       load the checkpoint

Each rank writes preflight-RANK.jsonl: one line when a part begins, and one when it ends or fails.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_prorl import device, rank
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.config import Config, num_data_ranks, responses_per_step
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineFailure
from nemo_prorl.files import first_line
from nemo_prorl.lifecycle.stopping import Stopping
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm, kl_after_reset
from nemo_prorl.metrics import Metrics
from nemo_prorl.rewards.interface import RewardResult, verdict_of
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.groups import Group
from nemo_prorl.service import read_token
from nemo_prorl.trainer import Trainer, update

_log = logging.getLogger(__name__)

SIZES_FILE = "preflight.json"
MAX_IN_FLIGHT = 512  # requests per engine, the default of `EnginePool`
GENERATED = 64  # tokens to generate at the end of each engine sequence


@dataclass(frozen=True)
class PreflightSizes:
    """The part of a step that this node tries; the run itself may have more nodes."""

    data_ranks: int  # data-parallel ranks of the run
    prompts: int  # prompts per step
    samples: int  # responses per prompt
    updates: int  # updates per step
    rows: int  # rows of one rank in one update
    tried_rows: int  # the number of these rows that is tried
    context: int  # tokens of prompt and response
    response: int  # tokens of the longest response
    sequences: int  # sequences in flight at one engine
    generated: int  # tokens that the preflight generates per sequence
    engines: int  # engines of this node
    all_engines: int  # engines of the run

    @classmethod
    def of(cls, cfg: Config, rows: int | None = None) -> "PreflightSizes":
        """Return the sizes for a run's configuration; `rows`: try at most this many rows of each rank's update."""
        grpo, data_ranks = cfg.trainer.grpo, num_data_ranks(cfg)
        in_update = -(-grpo.prompts_per_step // grpo.updates_per_step * grpo.samples_per_prompt // data_ranks)
        context = grpo.context_tokens
        response = min(context - 1, grpo.max_response_tokens or context)
        in_engine = -(-responses_per_step(cfg) // cfg.rollout.engines)
        return cls(
            data_ranks=data_ranks,
            prompts=grpo.prompts_per_step,
            samples=grpo.samples_per_prompt,
            updates=grpo.updates_per_step,
            rows=in_update,
            tried_rows=in_update if rows is None else min(rows, in_update),
            context=context,
            response=response,
            sequences=min(cfg.rollout.max_num_seqs, MAX_IN_FLIGHT, in_engine),
            generated=min(GENERATED, response),
            engines=cfg.rollout.engines // cfg.trainer.num_nodes,
            all_engines=cfg.rollout.engines,
        )

    @property
    def tried_prompts(self) -> int:
        """Return the number of prompts that need random responses: all, or as many as the tried rows need."""
        if self.tried_rows == self.rows:
            return self.prompts
        return min(self.prompts, -(-self.tried_rows * self.data_ranks // self.samples) * self.updates)

    def write(self, run_dir: Path) -> None:
        (run_dir / SIZES_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> "PreflightSizes":
        return cls(**json.loads((run_dir / SIZES_FILE).read_text()))


class TrialRecorder:
    """A log of the time and memory of each part, which is complete even if this process is killed."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = run_dir / f"preflight-{rank}.jsonl"

    @contextmanager
    def part(self, name: str, **numbers: float) -> Iterator[None]:
        """Measure the body as one part; `numbers` are added to its record."""
        self._write(part=name, event="begin")
        device.reset_peak()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of host memory (Linux)
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._write(part=name, event="error", what=f"{type(error).__name__}: {first_line(error)}"[:600])
            raise
        seconds = time.monotonic() - began
        self._write(part=name, event="end", seconds=seconds, **numbers, **_memory())
        _log.info("preflight: %s took %.1f s", name, seconds)

    def _write(self, **fields: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def _memory() -> dict[str, int]:
    """Return this process's peak host memory and, with a GPU, its peak, free and total memory, all in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"host_peak": int(status["VmHWM"].split()[0]) << 10, **device.memory()}


def measure(cfg: Config, run_dir: Path) -> None:
    """Run all parts of the preflight.  Errors of a part are raised unchanged.

    Args:
        run_dir: temporary run directory with config.yaml and the sizes, preflight.json.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the preflight has no state to save
    sizes, recorder = PreflightSizes.read(run_dir), TrialRecorder(run_dir, int(os.environ.get("RANK", 0)))
    allowed, alarm = kl_after_reset(cfg), engine_gap_alarm(cfg)  # type: ignore[arg-type]
    _log.info(
        "limits of this run: policy and reference may differ by %g nats per token after a reset; an engine gap above %g"
        " nats per token raises an alarm",
        allowed,
        alarm,
    )
    with recorder.part("build"):
        policy = rank.Policy(cfg, run_dir)
    with recorder.part("engines"):
        trainer = rank.build(cfg, run_dir, policy, Stopping(cfg.trainer.deadlines))
        rank.begin(trainer, run_dir)
    with recorder.part("publish"):
        trainer.rollouts.publish(version=0)
    _fill_engines(trainer, run_dir, sizes, recorder)
    sleeps = cfg.rollout.sleep is not None
    if sleeps:
        with recorder.part("sleep"):
            trainer.rollouts.sleep()
    _train(trainer, sizes, recorder)
    if sleeps:
        with recorder.part("wake"):
            trainer.rollouts.publish(version=1)
    with recorder.part("checkpoint"):
        trainer.checkpoints.save(1, wait=True)
    with recorder.part("resume"):
        newest = trainer.checkpoints.newest()
        assert newest is not None
        trainer.checkpoints.files.load(newest)


def _train(trainer: Trainer, sizes: PreflightSizes, recorder: TrialRecorder) -> None:
    """Run the parts of a step that the trainer does.

    The part `first update` allocates the optimizer's moments, so that the later parts are measured with them.
    """
    policy, cfg = trainer.policy, trainer.cfg
    grpo, metrics = cfg.trainer.grpo, Metrics(1, cfg.stage)
    with recorder.part("batch"):
        groups = trainer.rollouts.collector.share(
            lambda _: tried_rows(sizes, random_groups(sizes, policy.shape.vocab, cfg.seed))
        )
        batch = groups.batch()
        advantage_B = torch.randn(len(batch), generator=torch.Generator().manual_seed(cfg.seed))
        batch = batch.with_targets(advantage_B=advantage_B)
    metrics.put("entropy", 0.0)
    config = trainer.before_updates(metrics)
    if grpo.adaptive_entropy.enabled:  # the coefficient starts at 0, and needs memory only once it is above 0
        config = replace(config, entropy_coef=grpo.adaptive_entropy.maximum)

    numbers = {"rows": len(batch), "tokens": int(batch.length_B.sum())}
    with recorder.part("first update"):
        few = batch.rows(slice(0, policy.limits.rows_of_length(sizes.context)))
        few_logp_BT, _ = policy.logprobs(few)
        few = few.with_targets(old_logp_BT=few_logp_BT, ref_logp_BT=few_logp_BT)
        update(policy, few, config, Metrics(1, cfg.stage))
    with recorder.part("logprobs", **numbers):
        old_logp_BT, _ = policy.logprobs(batch)
    with recorder.part("reference", **numbers):
        ref_logp_BT = policy.reference_logprobs(batch)
    with recorder.part("update", **numbers):
        batch = batch.with_targets(old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT)
        update(policy, batch, config, metrics)


def tried_rows(sizes: PreflightSizes, groups: list[Group]) -> list[JudgedGroups]:
    """Return for each data rank the rows that it tries: the first `sizes.tried_rows` rows of its first update."""
    judged = JudgedGroups.of(groups)
    updates = judged.rows_of_updates(sizes.updates, sizes.data_ranks)
    return judged.dealt([rows[0][: sizes.tried_rows].tolist() for rows in updates])


def random_groups(sizes: PreflightSizes, vocab: int, seed: int) -> list[Group]:
    """Return groups like those of a rollout, with random tokens that fill the context; all responses are cut off."""
    generator = torch.Generator().manual_seed(seed)
    prompt = sizes.context - sizes.response

    def response(index: int) -> Response:
        tokens = torch.randint(vocab, (sizes.response,), generator=generator).tolist()
        return Response(index, tokens, torch.rand(sizes.response, generator=generator).neg().tolist(), "length", 0)

    def group(index: int) -> Group:
        prompt_ids = torch.randint(vocab, (prompt,), generator=generator).tolist()
        responses = [response(k) for k in range(sizes.samples)]
        verdicts = [verdict_of(f"random-{index}", RewardResult(float(k % 2))) for k in range(sizes.samples)]
        return Group(
            prompt_id=f"random-{index}",
            task="preflight",
            record={},
            prompt_ids=prompt_ids,
            visit=0,
            responses=responses,
            verdicts=verdicts,
            step=1,
            version=0,
            draw_index=index,
        )

    return [group(index) for index in range(sizes.tried_prompts)]


def _fill_engines(trainer: Trainer, run_dir: Path, sizes: PreflightSizes, recorder: TrialRecorder) -> None:
    """Fill the engines of this node at full context: first the prompts, then the last tokens of the same sequences.

    The second requests find their prompts in the prefix cache, as far as the cache holds them, so that the time of
    part `generate` is mostly generation.
    """
    cfg, endpoints = trainer.cfg, run_dir / "endpoints"
    count, length = sizes.sequences * sizes.engines, sizes.context - sizes.generated
    generator = torch.Generator().manual_seed(cfg.seed)
    prompts = torch.randint(trainer.policy.shape.vocab, (count, length), generator=generator).tolist()

    def generate(tokens: int) -> None:
        sampling = SamplingParams(cfg.trainer.grpo.temperature, max_tokens=tokens, stop_token_ids=())
        seconds = cfg.trainer.deadlines.rollout_s
        deadline = Deadline(seconds, "full responses of random tokens (trainer.deadlines.rollout_s)")
        pool = EnginePool(endpoints, read_token(endpoints / "token"), sizes.engines)
        check_full(asyncio.run(responses_of(pool, prompts, sampling, deadline)), tokens)

    with recorder.part("fill", rows=count, tokens=count * length):
        trainer.leader.call(partial(generate, 1))
    with recorder.part("generate", rows=count, tokens=count * sizes.generated):
        trainer.leader.call(partial(generate, sizes.generated))


async def responses_of(
    pool: EnginePool, prompts: Sequence[list[int]], sampling: SamplingParams, deadline: Deadline
) -> list[Response]:
    """Return a response to each prompt, with all requests in flight at once.  Closes the pool."""
    try:
        groups = await asyncio.gather(*(pool.generate(p, [k], sampling, deadline) for k, p in enumerate(prompts)))
    finally:
        await pool.close()
    return [response for group in groups for response in group]


def check_full(responses: Sequence[Response], tokens: int) -> None:
    """Raise EngineFailure if a response has fewer than `tokens` tokens, because then the engine was not full."""
    if short := [r for r in responses if len(r.token_ids) != tokens]:
        lengths = sorted({len(r.token_ids) for r in short})
        raise EngineFailure(
            f"{len(short)} of {len(responses)} responses have {lengths[0]} to {lengths[-1]} tokens; expected {tokens},"
            " because the request has no stop tokens: the engine ended them early; its log has the reason"
        )


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    rank.end(rank.main(partial(measure, rank.read(directory), directory)))
