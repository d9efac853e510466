"""Tries one training step at full context and batch with random tokens, as a run needs it when responses have grown.

Real responses fill the context only after days; then it is too late to learn that a GPU's memory does not hold it.
Runs on every trainer rank, in a run directory that is thrown away afterwards (`prorl doctor --preflight`):

    build        policy, optimizer, reference
    engines      engines and reward servers are ready
    publish      weights to the engines
    fill         as many sequences as an engine has in flight, all but their last tokens as prompts: the KV cache
    generate     those last tokens, stop tokens off
    sleep        engines give their memory away (rollout.sleep)
    batch        a step's responses, of which each rank gets its own, as a rollout hands them out
    first update one micro-batch: the optimizer's moments come into being, and stay
    logprobs     of an update's rows of this rank, each filling the context
    reference    the same of the reference policy
    update       a whole one
    wake         engines take their memory back, with new weights
    checkpoint   written and complete
    resume       the checkpoint loaded

Each rank writes preflight-RANK.jsonl: a line when a part begins, and one when it ends or fails.
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

from nemo_prorl import rank
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.config import Config
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import EngineFailure
from nemo_prorl.lifecycle.stopping import Stopping
from nemo_prorl.lifecycle.tolerances import engine_gap_alarm, kl_after_reset
from nemo_prorl.metrics import Metrics
from nemo_prorl.rewards.interface import RewardResult, verdict_of
from nemo_prorl.rollout.endpoints import Response, SamplingParams, read_token
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.groups import Group
from nemo_prorl.trainer import Trainer, update

_log = logging.getLogger(__name__)

PLAN = "preflight.json"
MAX_IN_FLIGHT = 512  # of one engine: `EnginePool`'s default
GENERATED = 64  # tokens that each engine sequence generates at the end of its context


@dataclass(frozen=True)
class Plan:
    """The share of a step that this node tries.  The run may have more nodes than are tried."""

    data_ranks: int  # of the run
    prompts: int  # of a step
    samples: int  # responses to each
    updates: int  # of a step
    rows: int  # that one rank gets in one update
    tried_rows: int  # of them
    context: int  # tokens
    response: int  # of them, the longest response's
    sequences: int  # in flight at one engine
    generated: int  # tokens of each that are generated here
    engines: int  # of this node
    all_engines: int  # of the run

    @classmethod
    def of(cls, cfg: Config, rows: int | None = None) -> "Plan":
        """Plan for a run's configuration; `rows`: try only this many rows of an update."""
        grpo, model, nodes = cfg.trainer.grpo, cfg.model, cfg.trainer.num_nodes
        ranks = nodes * cfg.trainer.devices
        data_ranks = ranks // (model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"])
        in_update = -(-grpo.prompts_per_step // grpo.updates_per_step * grpo.samples_per_prompt // data_ranks)
        started = grpo.prompts_per_step * grpo.samples_per_prompt
        context = grpo.context_tokens
        response = min(context - 1, grpo.max_response_tokens or context)
        return cls(
            data_ranks=data_ranks,
            prompts=grpo.prompts_per_step,
            samples=grpo.samples_per_prompt,
            updates=grpo.updates_per_step,
            rows=in_update,
            tried_rows=in_update if rows is None else min(rows, in_update),
            context=context,
            response=response,
            sequences=min(cfg.rollout.max_num_seqs, MAX_IN_FLIGHT, -(-started // cfg.rollout.engines)),
            generated=min(GENERATED, response),
            engines=cfg.rollout.engines // nodes,
            all_engines=cfg.rollout.engines,
        )

    @property
    def tried_prompts(self) -> int:
        """Return the number of prompts whose responses are made up: all, or as many as the tried rows need."""
        if self.tried_rows == self.rows:
            return self.prompts
        return min(self.prompts, -(-self.tried_rows * self.data_ranks // self.samples) * self.updates)

    def write(self, run_dir: Path) -> None:
        (run_dir / PLAN).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> "Plan":
        return cls(**json.loads((run_dir / PLAN).read_text()))


class TrialRecorder:
    """Time and memory of each part, in a file that is up to date whatever ends this process."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = run_dir / f"preflight-{rank}.jsonl"

    @contextmanager
    def part(self, name: str, **numbers: float) -> Iterator[None]:
        """`numbers` go into the record as they are."""
        self._write(part=name, event="begin")
        _reset_peak()
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            lines = str(error).strip().splitlines()
            self._write(part=name, event="error", what=f"{type(error).__name__}: {lines[0] if lines else ''}"[:600])
            raise
        seconds = time.monotonic() - began
        self._write(part=name, event="end", seconds=seconds, **numbers, **_memory())
        _log.info("preflight: %s took %.1f s", name, seconds)

    def _write(self, **fields: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def _reset_peak() -> None:
    """Reset the peaks of the GPU's memory and of this process's (Linux)."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory() -> dict[str, int]:
    """Return in bytes this process's peak in host memory, and on a GPU its peak and the free memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {"host_peak": int(status["VmHWM"].split()[0]) << 10}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found |= {"gpu_peak": torch.cuda.max_memory_allocated(), "gpu_free": free, "gpu_total": total}
    return found


def measure(cfg: Config, run_dir: Path) -> None:
    """Do all parts, in a run directory that holds a Plan.  Raises what a part raises."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is nothing to save
    plan, recorder = Plan.read(run_dir), TrialRecorder(run_dir, int(os.environ.get("RANK", 0)))
    allowed, alarm = kl_after_reset(cfg), engine_gap_alarm(cfg)  # type: ignore[arg-type]
    _log.info("a reset's step may differ from its reference by %g a token; engine gaps above %g alarm", allowed, alarm)
    with recorder.part("build"):
        policy = rank.Policy(cfg, run_dir)
    with recorder.part("engines"):
        trainer = rank.build(cfg, run_dir, policy, Stopping(cfg.trainer.deadlines))
        rank.begin(trainer, run_dir)
    with recorder.part("publish"):
        trainer.rollouts.publish(version=0)
    _fill_engines(trainer, run_dir, plan, recorder)
    sleeps = cfg.rollout.sleep is not None
    if sleeps:
        with recorder.part("sleep"):
            trainer.rollouts.sleep()
    _train(trainer, plan, recorder)
    if sleeps:
        with recorder.part("wake"):
            trainer.rollouts.publish(version=1)
    with recorder.part("checkpoint"):
        trainer.checkpoints.save(1, wait=True)
    with recorder.part("resume"):
        newest = trainer.checkpoints.newest()
        assert newest is not None
        trainer.checkpoints.load_all(newest)


def _train(trainer: Trainer, plan: Plan, recorder: TrialRecorder) -> None:
    """Do the parts of a step that the trainer does.

    The first update is made before the others are measured, because the optimizer has no moments before it.
    """
    policy, cfg = trainer.policy, trainer.cfg
    grpo, metrics = cfg.trainer.grpo, Metrics(1, cfg.stage)
    with recorder.part("batch"):
        groups = trainer.rollouts.collector.share(
            lambda _: tried_rows(plan, random_groups(plan, policy.shape.vocab, cfg.seed))
        )
        mine = groups.batch()
        advantage_B = torch.randn(len(mine), generator=torch.Generator().manual_seed(cfg.seed))
        mine = mine.with_targets(advantage_B=advantage_B)
    metrics.put("entropy", 0.0)
    config = trainer.before_updates(metrics)
    if grpo.adaptive_entropy.enabled:  # begins at 0, and takes memory once it is above
        config = replace(config, entropy_coef=grpo.adaptive_entropy.maximum)

    numbers = {"rows": len(mine), "tokens": int(mine.length_B.sum())}
    with recorder.part("first update"):
        few = mine.rows(slice(0, policy.limits.rows_of_length(plan.context)))
        few_logp_BT, _ = policy.logprobs(few)
        few = few.with_targets(old_logp_BT=few_logp_BT, ref_logp_BT=few_logp_BT)
        update(policy, few, config, Metrics(1, cfg.stage))
    with recorder.part("logprobs", **numbers):
        old_logp_BT, _ = policy.logprobs(mine)
    with recorder.part("reference", **numbers):
        ref_logp_BT = policy.reference_logprobs(mine)
    with recorder.part("update", **numbers):
        mine = mine.with_targets(old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT)
        update(policy, mine, config, metrics)


def tried_rows(plan: Plan, groups: list[Group]) -> list[JudgedGroups]:
    """Return for each data rank the rows of the first update that it tries."""
    judged = JudgedGroups.of(groups)
    updates = judged.rows_of_updates(plan.updates, plan.data_ranks)
    return judged.dealt([rows[0][: plan.tried_rows].tolist() for rows in updates])


def random_groups(plan: Plan, vocab: int, seed: int) -> list[Group]:
    """Return groups as a rollout gives them; every response fills the context with its prompt, and has no eos."""
    generator = torch.Generator().manual_seed(seed)
    prompt = plan.context - plan.response

    def response(index: int) -> Response:
        tokens = torch.randint(vocab, (plan.response,), generator=generator).tolist()
        return Response(index, tokens, torch.rand(plan.response, generator=generator).neg().tolist(), "length", 0)

    def group(index: int) -> Group:
        prompt_ids = torch.randint(vocab, (prompt,), generator=generator).tolist()
        responses = [response(k) for k in range(plan.samples)]
        verdicts = [verdict_of(f"random-{index}", RewardResult(float(k % 2))) for k in range(plan.samples)]
        return Group(f"random-{index}", "preflight", {}, prompt_ids, 0, responses, verdicts, 1, 0, index)

    return [group(index) for index in range(plan.tried_prompts)]


def _fill_engines(trainer: Trainer, run_dir: Path, plan: Plan, recorder: TrialRecorder) -> None:
    """Fill the engines of this node at full context: prompts first, and then the last tokens of the same sequences.

    The second request finds its prompt in the prefix cache, as far as that holds all of them, so its time is that of
    generating.
    """
    cfg, endpoints = trainer.cfg, run_dir / "endpoints"
    count, length = plan.sequences * plan.engines, plan.context - plan.generated
    generator = torch.Generator().manual_seed(cfg.seed)
    prompts = torch.randint(trainer.policy.shape.vocab, (count, length), generator=generator).tolist()

    def ask(tokens: int) -> None:
        sampling = SamplingParams(cfg.trainer.grpo.temperature, max_tokens=tokens, stop_token_ids=())
        seconds = cfg.trainer.deadlines.rollout_s
        deadline = Deadline(seconds, "full responses of random tokens (trainer.deadlines.rollout_s)")
        pool = EnginePool(endpoints, read_token(endpoints / "token"), plan.engines)
        check_full(asyncio.run(responses_of(pool, prompts, sampling, deadline)), tokens)

    with recorder.part("fill", rows=count, tokens=count * length):
        trainer.leader.call(partial(ask, 1))
    with recorder.part("generate", rows=count, tokens=count * plan.generated):
        trainer.leader.call(partial(ask, plan.generated))


async def responses_of(
    pool: EnginePool, prompts: Sequence[list[int]], sampling: SamplingParams, deadline: Deadline
) -> list[Response]:
    """Return a response to each prompt, all in flight at once.  Closes the pool."""
    try:
        groups = await asyncio.gather(*(pool.generate(p, [k], sampling, deadline) for k, p in enumerate(prompts)))
    finally:
        await pool.close()
    return [response for group in groups for response in group]


def check_full(responses: Sequence[Response], tokens: int) -> None:
    """Raises EngineFailure where a response is shorter than asked for: then the engine was not filled."""
    if short := [r for r in responses if len(r.token_ids) != tokens]:
        lengths = sorted({len(r.token_ids) for r in short})
        raise EngineFailure(
            f"{len(short)} of {len(responses)} responses have {lengths[0]} to {lengths[-1]} tokens where {tokens} were"
            " asked for, without stop tokens"
        )


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    rank.end(rank.main(partial(measure, rank.read(directory), directory)))
