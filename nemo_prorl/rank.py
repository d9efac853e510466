"""The composition root of a trainer rank: builds policy, rollouts, resets and records, and runs the training loop.

python -m nemo_prorl.rank RUN_DIR [warmup | preflight]     started by the node supervisor, once for each rank
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.algorithms.losses import LossConfig
from nemo_prorl.algorithms.reset import best_step, learning_rate
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.config import Config
from nemo_prorl.data.blend import Blend, LoadedSource, load_sources, without_long
from nemo_prorl.data.laptop.generators import warmup_target
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import ProrlError, StoppedCleanly, disk_full
from nemo_prorl.leader import RankZero
from nemo_prorl.lifecycle import control
from nemo_prorl.lifecycle.base_model import base_folder, initial_model
from nemo_prorl.lifecycle.checkpoints import Checkpoints
from nemo_prorl.lifecycle.records import Journal, MetricsLog, write_json, write_rollouts
from nemo_prorl.lifecycle.resets import Resets, policy_scores
from nemo_prorl.lifecycle.retention import complete
from nemo_prorl.lifecycle.step_traces import StepTraces
from nemo_prorl.lifecycle.stopping import Stopping
from nemo_prorl.lifecycle.summary import heldout_scores, summary
from nemo_prorl.lifecycle.warmup import warm_up
from nemo_prorl.metrics import Metrics
from nemo_prorl.planning import preflight
from nemo_prorl.planning.tolerances import kl_after_reset
from nemo_prorl.rollout.collected import CollectedBatch
from nemo_prorl.rollout.prompts import PromptStream, Visit
from nemo_prorl.rollout.publication import WeightStore, weights_folder
from nemo_prorl.rollout.report import report_rollout
from nemo_prorl.rollout.scores import Dealt, GroupScores, deal_batch
from nemo_prorl.rollout.services import Services, die_with_parent
from nemo_prorl.tracing import RECORDER
from nemo_prorl.trainer import policy_loss, train

_log = logging.getLogger("nemo_prorl.rank")  # also as __main__
T = TypeVar("T")


class Run:
    """What `trainer.train` is handed: one object a rank.

    Rank 0 alone talks to engines, reward servers and the run directory; what it finds or fails at, all ranks learn.
    """

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.dir = cfg, run_dir
        self.rank = int(os.environ.get("RANK", 0))
        self.step = 0
        self.unfinished: Metrics | None = None  # of a step whose updates are made and which is not logged yet
        self.validations: dict[int, dict[str, Any]] = {}
        self.resets = Resets(cfg.trainer.resets, kl_after_reset(cfg))  # type: ignore[arg-type]
        grpo, adaptive = cfg.trainer.grpo, cfg.trainer.grpo.adaptive_entropy
        self.entropy = AdaptiveEntropy(adaptive.target, adaptive.step, maximum=adaptive.maximum)
        self._loss_config = LossConfig(
            grpo.clip_low,
            grpo.clip_high,
            grpo.dual_clip,
            grpo.kl_coef,
            grpo.kl_estimator,
            grpo.entropy_coef,
            grpo.aggregation,
        )
        self.phase_s: dict[str, float] = {}
        self.rewards_s = {"wait": 0.0, "open": 0.0}
        self.tokens = 0
        self._published = -1
        self._scores: GroupScores | None = None  # of the present step; None one step off
        self._blocks: list[JudgedGroups] = []  # of the present step
        self._engines_sleep = False
        services = {"engine": cfg.rollout.engines, "rewards": cfg.trainer.num_nodes}
        self._traces = StepTraces(
            run_dir, cfg.trainer.trace_steps, self.rank, cfg.trainer.num_nodes * cfg.trainer.devices, services
        )
        self._stopping = Stopping(cfg.trainer.deadlines)
        for sig in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(sig, self._stopping.on_signal)

    # --- building --------------------------------------------------------------------------------------------------

    def build_policy(self) -> None:
        """Policy and data; makes RUN/base, what reinforcement learning starts from, where a warm-up is due."""
        from nemo_prorl.policy.build import build_actor

        cfg, grpo = self.cfg, self.cfg.trainer.grpo
        base = base_folder(cfg, self.dir)
        folder = base if base.exists() else initial_model(cfg, self.dir)
        built = build_actor(cfg, folder, self.dir / "logs" / "nemo")  # type: ignore[arg-type]
        self.policy, self.loggers = built.actor, built.trainer.loggers
        self._rank_0 = RankZero(cfg.trainer.deadlines, self.policy.data_rank)
        self.checkpoints = Checkpoints(self)
        self.renderer = PromptRenderer(folder, grpo.context_tokens, grpo.max_response_tokens)
        train_sources, self.validation_sources = self._sources()
        self.prompts = PromptStream(Blend(train_sources, cfg.seed, cfg.data.retire_after), self.renderer)
        self.heldout = [
            (source.name, [Visit(record, self.renderer.prompt_ids(record), 0) for record in records])
            for source, records in self.validation_sources
        ]
        if not base.exists() and not complete(self.dir / "checkpoints"):
            self._make_base(base, Blend(self._sources(every_task=True)[0], cfg.seed + 1))

    def _sources(self, every_task: bool = False) -> tuple[list[LoadedSource], list[LoadedSource]]:
        """Training and validation; of training prompts those that are not too long."""
        train, validation = load_sources(self.cfg.data, every_task)
        if (most := self.cfg.data.max_prompt_tokens) is not None:
            train = without_long(train, self.renderer.length, most)
        return train, validation

    def connect(self) -> None:
        """Services and records; continues the newest checkpoint where there is one."""
        if self.rank == 0:
            self.metrics_log, self.journal = MetricsLog(self.dir), Journal(self.dir)
            self.requests = control.Requests(self.dir, self.journal, self.alarm)  # before the journal says `resume`
            self.services = Services.connect(self.cfg, self.dir, self.prompts, self.renderer)
            self._stopping.abandons(self.services.rollouts.abandon)
        self.store = WeightStore(weights_folder(self.dir, self._node())) if self._publishes() else None
        self.checkpoints.begin()
        if self.rank == 0:
            self.requests.settle(self.step, [reset["reason"] for reset in self.resets.done])

    def _make_base(self, base: Path, blend: Blend) -> None:
        """The policy that the reinforcement learning starts from: warmed up, and kept as a Hugging Face folder."""
        warmup = self.cfg.trainer.warmup
        _log.info("warm-up: %d supervised steps of %d", warmup.steps, warmup.batch_size)
        records = [blend.next()[0] for _ in range(warmup.steps * warmup.batch_size)]
        prompts = [self.renderer.prompt_ids(record) for record in records]
        answers = [warmup_target(record) for record in records]
        examples = [(ids, self.renderer.target_ids(ids, text)) for ids, text in zip(prompts, answers, strict=True)]
        warm_up(self.policy, examples, warmup, float(self.cfg.model["optim"]["lr"]))
        self.policy.set_reference()
        self._write_hf(base)

    def _write_hf(self, folder: Path) -> None:
        from nemo_prorl.policy.weights import write_hf_folder

        tensors = [(name, t.cpu()) for name, t in self.policy.export_weights()]
        if self.rank == 0:
            write_hf_folder(folder, iter(tensors), initial_model(self.cfg, self.dir), None)
        self._rank_0.barrier()

    def _node(self) -> int | None:
        """Which node this rank is on, in a run on several."""
        return int(os.environ["GROUP_RANK"]) if self.cfg.trainer.num_nodes > 1 else None

    def _publishes(self) -> bool:
        """Whether this rank writes the weights for the engines of its node."""
        return int(os.environ.get("LOCAL_RANK", 0)) == 0

    # --- what the loop asks ----------------------------------------------------------------------------------------

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on every rank; what it raises there is raised on every rank."""
        return self._rank_0.result(work)

    def share(self, work: Callable[[], Sequence[T]]) -> T:
        """This data rank's entry of what `work` makes on rank 0, where it is given all of them."""
        return self._rank_0.share(work)

    @contextmanager
    def phase(self, name: str, metrics: Metrics) -> Iterator[None]:
        began = time.monotonic()
        with RECORDER.span(name, "phase"):
            yield
        seconds = time.monotonic() - began
        metrics.put(f"time/{name}", seconds)
        self.phase_s[name] = self.phase_s.get(name, 0.0) + seconds

    def traced(self, step: int) -> AbstractContextManager[None]:
        """Inside, what all processes do is recorded, if this step is one of `trainer.trace_steps`."""
        return self._traces.step(step)

    def remaining_steps(self) -> range:
        return range(self.step + 1, self.cfg.trainer.grpo.max_steps + 1)

    def publish(self, version: int) -> None:
        """Hands the policy's weights to all engines, once a version."""
        if version == self._published and not self._engines_sleep:
            return
        weights = self.policy.export_weights()
        with RECORDER.span(f"write weights {version}", "publication"):
            if self.store is not None:
                path = self.store.write(weights, version)
            else:
                for _ in weights:  # a collective
                    pass
            if self.cfg.rollout.sleep is not None and torch.cuda.is_available():
                torch.cuda.empty_cache()  # of its work nothing is in use now: engines that wake take the room
            self._rank_0.barrier()
        self._published = version
        if self.cfg.trainer.grpo.one_step_off:  # engines load them while the trainer goes on with the batch that waits
            self.on_rank_0(lambda: self.services.rollouts.announce(str(path), version))
            return
        with RECORDER.span(f"engines load weights {version}", "publication"):
            late = self.on_rank_0(lambda: self.services.rollouts.publish(str(path), version))
        for name, said in late:
            self.alarm(version, f"{name} did not wake ({said}); it was started again and has weights {version}")
        self._engines_sleep = False

    def sleep_engines(self) -> float:
        """Engines on the trainer's GPUs give their memory to it, where so configured; seconds that this took."""
        began = time.monotonic()
        if self.cfg.rollout.sleep is not None:
            with RECORDER.span("engines go to sleep", "publication"):
                freed = self.on_rank_0(lambda: self.services.rollouts.sleep())
            self._engines_sleep = True
            _log.info("the engines sleep: %.1f GB freed", freed / 1e9)
        return time.monotonic() - began

    def weights_changed(self) -> None:
        """The policy is not what was published under its version any more."""
        self._published = -1

    def collect(self, metrics: Metrics) -> JudgedGroups:
        """The groups of this step, with the tokens of the rows that this data rank trains on."""
        step = metrics.step
        self._scores = None
        if not self.cfg.trainer.grpo.one_step_off:
            self._score_meanwhile(step)
        batch, judged, self._blocks = self.share(partial(self._take, step))
        report_rollout(metrics, batch)
        if self._scores is not None:
            metrics.add("time/logprobs", self._scores.shares(judged.draws))
        if self.cfg.rollout.sleep is not None:
            metrics.put("time/rollout/sleep_s", batch.sleep_s + self.sleep_engines())
        if self.cfg.data.retire_after is not None:
            self._retire(metrics, batch)
        self.tokens += batch.generated_tokens
        self.rewards_s["wait"] += batch.reward_wait_s
        self.rewards_s["open"] += batch.reward_open_s
        if self._one_step_off(step):
            self.on_rank_0(lambda: self.services.supply.begin(step + 1, step - 1, aside=True))
        return judged

    def _take(self, step: int) -> list[Dealt]:
        """The batch of a step as each data rank gets it; on rank 0."""
        batch, grpo = self.services.supply.take(step, step - 1), self.cfg.trainer.grpo
        if grpo.save_rollout_groups:
            text = self.renderer.judged_text
            texts = [[text(group.prompt_ids, r.token_ids) for r in group.responses] for group in batch.groups]
            write_rollouts(self.dir, step, batch.groups, texts, grpo.save_rollout_groups)
        return deal_batch(batch, grpo.updates_per_step, self.policy.data_size, self._scores)

    def _score_meanwhile(self, step: int) -> None:
        """Collects the batch of a step, and computes log-probabilities that can be had before it is complete: while
        engines on other devices generate, or while no more than verdicts are waited for."""
        scores = self._scores = GroupScores(self.policy)
        self.on_rank_0(lambda: self.services.supply.begin(step, step - 1))
        while blocks := self.share(lambda: scores.deal([JudgedGroups.of(b) for b in self.services.supply.ready()])):
            busy = self.services.supply.training() if self.rank == 0 else nullcontext()
            groups = sum(len(block.draws) for block in blocks)
            with RECORDER.span(f"log-probabilities of {groups} groups", "logprobs"), busy:
                scores.add(blocks)
        self.on_rank_0(lambda: self.services.supply.finish())

    def logprobs(self, mine: Batch, rows_B: Tensor) -> tuple[Tensor, ...]:
        """(logp_BT, entropy_BT, ref_logp_BT) of `mine`, the rows `rows_B` of the groups that were collected last."""
        if self._scores is not None:
            return self._scores.of_rows(self._blocks, rows_B, mine.tokens_BT.shape[1])
        return *self.policy.logprobs(mine), *self.policy.reference_logprobs(mine)

    def await_next(self, metrics: Metrics) -> None:
        """The batch that is collected while this step trains is complete on return."""
        if not self._one_step_off(metrics.step):
            return
        with self.phase("ahead", metrics):
            idle_s = self.on_rank_0(lambda: self.services.supply.finish())
        metrics.put("time/ahead/engines_wait_s", idle_s)

    def _one_step_off(self, step: int) -> bool:
        """Whether the batch of the step after this one is collected while this one trains."""
        grpo = self.cfg.trainer.grpo
        return grpo.one_step_off and step < grpo.max_steps

    def _retire(self, metrics: Metrics, batch: CollectedBatch) -> None:
        """Every rank keeps the count, so that all know it; rank 0 draws by it."""
        before = self.prompts.retired
        retired = self.prompts.observe(batch.outcomes)
        metrics.put("data/retired", retired)
        if retired < before:
            self.alarm(metrics.step, "every training prompt was solved often enough to retire: all come back")

    def validation_due(self, step: int) -> bool:
        grpo = self.cfg.trainer.grpo
        return bool(self.heldout) and (step % grpo.validate_every == 0 or step == grpo.max_steps)

    def validate(self, metrics: Metrics) -> None:
        """Mean reward on the held-out prompts, with the same seeds each time, so that differences are the policy's."""
        if not self.heldout:
            return
        scores = self.judge_heldout(metrics)
        self.validations[metrics.step] = scores
        for name, score in scores["tasks"].items():
            metrics.put(f"validation/{name}", score["mean"])
        metrics.put("validation/all", scores["all"]["mean"])
        if self.rank == 0:
            self.write_summary(finished=False)

    def judge_heldout(self, metrics: Metrics) -> dict[str, Any]:
        """The scores of the present policy, written into the journal only."""
        step = metrics.step
        with self.phase("validate", metrics):
            self.publish(version=step)
            scores = self.on_rank_0(lambda: self._score_heldout(step))
        if self.rank == 0:
            self.journal.append("validation", step, **scores)
        return scores

    def _score_heldout(self, step: int) -> dict[str, Any]:
        grpo = self.cfg.trainer.grpo
        visits = [visit for _, group in self.heldout for visit in group]
        groups = self.services.rollouts.sample(
            visits,
            grpo.validation_samples,
            grpo.validation_temperature,
            grpo.validation_top_p,
            seed=self.cfg.seed,
            version=step,
            step=step,
        )
        names = [name for name, visits in self.heldout for _ in visits]
        return heldout_scores(names, groups)

    def log(self, metrics: Metrics) -> None:
        seconds = sum(v for k, v in metrics.as_json().items() if k.startswith("time/") and k.count("/") == 1)
        metrics.put("time/step", seconds)
        if self.rank != 0:
            return
        values = metrics.as_json()
        self.metrics_log.append(values)
        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        for logger in self.loggers:
            logger.log_metrics(numbers, step=metrics.step)

    def reset_due(self, metrics: Metrics) -> str | None:
        """The reason to reset after this step, if there is one: decided on rank 0.  A collective."""
        scores = self.validations.get(metrics.step)
        findings = self.on_rank_0(lambda: self.resets.observe(metrics.as_json(), scores))
        reason = self.resets.decide(metrics, findings)
        for finding in findings:
            self.alarm(metrics.step, str(finding))
        return reason

    def checkpoint_due(self, step: int) -> bool:
        """By cadence, at the end, and where the validation is the best so far and such weights are kept.

        Step 0 is what the run began with: it is kept where a roll-back could go back to it.
        """
        grpo = self.cfg.trainer.grpo
        best = grpo.keep_best > 0 and step in self.validations and step == self.best_validation()
        if step == 0:
            return best and self.cfg.trainer.resets.roll_back
        return step % grpo.checkpoint_every == 0 or step == grpo.max_steps or best

    def best_validation(self) -> int | None:
        """The step since the last hard reset whose weights have the best validation."""
        return best_step(policy_scores(self.validations, self.resets.done), max(self.resets.steps, default=0))

    def before_updates(self, step: int, metrics: Metrics) -> LossConfig:
        """Sets the learning rate of this step; the loss, with the coefficient that its entropy asks for."""
        resets, base = self.cfg.trainer.resets, float(self.cfg.model["optim"]["lr"])
        lr = learning_rate(base, step, self.resets.steps, resets.lr_factor, resets.lr_warmup_steps)
        self.policy.set_learning_rate(lr)
        metrics.put("policy/lr", lr)
        if not self.cfg.trainer.grpo.adaptive_entropy.enabled:
            return self._loss_config
        coefficient = self.on_rank_0(lambda: self.entropy.update(metrics["entropy"]))
        metrics.put("policy/entropy_coef", coefficient)
        return replace(self._loss_config, entropy_coef=coefficient)

    def save_checkpoint(self, step: int, wait: bool = False) -> None:
        """In the background, where so configured; with `wait` complete on return."""
        with RECORDER.span("checkpoint", "phase"):
            self.checkpoints.save(step)
            if wait:
                self.checkpoints.wait()

    def hard_reset(self, step: int, reason: str) -> None:
        self.checkpoints.hard_reset(step, reason)

    def alarm(self, step: int, what: str) -> None:
        """Something a person should look at: in the log and in the journal."""
        if self.rank == 0:
            _log.warning("step %d: %s", step, what)
            self.journal.append("alarm", step, what=what)

    def asked(self, step: int) -> list[control.Request]:
        """What `prorl control` asks for after this step: the same on all ranks."""
        return self.on_rank_0(lambda: self.requests.pending(step))

    def serve(self, asked: list[control.Request], step: int) -> None:
        control.serve(self, asked, step)

    def ask_to_stop(self, reason: str) -> None:
        self._stopping.ask(reason)

    def stop_reason(self) -> str | None:
        """Why the run should stop between two steps, if it should."""
        return self.on_rank_0(self._stopping.reason)

    def write_summary(self, finished: bool, hashes: dict[str, str] | None = None) -> None:
        write_json(
            self.dir / "summary.json",
            summary(
                finished=finished,
                step=max(self.step, *self.validations, 0),
                stage=self.cfg.stage,
                seed=self.cfg.seed,
                validations=self.validations,
                resets=self.resets.done,
                hashes=hashes or {},
                tokens=self.tokens,
                phase_s=self.phase_s,
                rewards_s=self.rewards_s,
                recent=self.metrics_log.lines()[-10:],
            ),
        )

    def let_checkpoint_end(self) -> None:
        """After a failure: a checkpoint that is being written still counts, if it takes no longer than a stop may."""
        if hasattr(self, "checkpoints"):
            self.checkpoints.drain(self.cfg.trainer.deadlines.stop_s)

    def finish(self) -> None:
        self.checkpoints.wait()
        self._traces.close()
        hashes = {"weights_sha256": self.policy.weights_sha256(), "reference_sha256": self.policy.reference_sha256()}
        if self.rank == 0:
            self.write_summary(True, hashes)
            self.journal.append("finish", self.step)
            self.requests.close(self.step)


def setup_process(cfg: Config, rank: int) -> None:
    """Logging, threads and determinism of this rank."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if cfg.deterministic:  # the environment comes from launcher.determinism
        # An operation of a library that has no such algorithm on GPUs would end the run: there it is logged.
        torch.use_deterministic_algorithms(True, warn_only=cfg.trainer.accelerator == "gpu")


def main(argv: list[str] | None = None) -> int:
    """Runs this rank; the exit code is that of the `prorl` command."""
    from nemo_prorl.settings import read_config

    die_with_parent()
    arguments = sys.argv[1:] if argv is None else argv
    run_dir = Path(arguments[0])
    cfg: Any = read_config(run_dir / "config.yaml")
    setup_process(cfg, int(os.environ.get("RANK", 0)))
    run = Run(cfg, run_dir)
    try:
        if arguments[1:] == ["preflight"]:
            preflight.measure(run, policy_loss)
            return 0
        run.build_policy()
        if arguments[1:] == ["warmup"]:
            return 0
        run.connect()
        gc.collect()
        gc.freeze()  # NeMo and torch stay: they are not looked through again and again
        train(run)
        run.finish()
    except StoppedCleanly as stopped:
        if run.rank == 0:
            run.journal.append("stop", run.step, reason=str(stopped))
            run.requests.close(run.step)
        _log.warning("%s", stopped)
        return stopped.exit_code
    except ProrlError as error:
        _log.error("%s: %s", type(error).__name__, error)
        run.let_checkpoint_end()
        return error.exit_code
    except Exception as error:
        if (text := disk_full(error)) is None:
            raise
        _log.error("%s", text)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads of loggers and collectives must not keep a finished rank alive
