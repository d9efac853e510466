"""The composition root of a trainer rank: builds policy, rollouts, resets and records, and runs the training loop.

python -m nemo_prorl.run RUN_DIR [warmup]     started by the node supervisor, once for each rank
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nemo_prorl import __version__
from nemo_prorl.algorithms.losses import LossConfig
from nemo_prorl.config import Config
from nemo_prorl.data.blend import Blend, load_sources
from nemo_prorl.data.generators import warmup_target
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.errors import CheckpointError, ProrlError, StoppedCleanly, disk_full
from nemo_prorl.metrics import Metrics
from nemo_prorl.recipe.base_model import base_folder, initial_model
from nemo_prorl.recipe.records import Journal, MetricsLog, write_json, write_rollouts
from nemo_prorl.recipe.resets import Resets
from nemo_prorl.recipe.summary import heldout_scores, summary
from nemo_prorl.recipe.warmup import warm_up
from nemo_prorl.rollout.groups import CollectedBatch, Group
from nemo_prorl.rollout.prompts import PromptStream, Visit
from nemo_prorl.rollout.publication import WeightStore, weights_folder
from nemo_prorl.run_services import Services, die_with_parent
from nemo_prorl.trainer import train

_log = logging.getLogger("nemo_prorl.run")  # also as __main__
T = TypeVar("T")


class Run:
    """What `trainer.train` is handed: one object a rank.

    Rank 0 alone talks to engines, reward servers and the run directory; what it finds or fails at, all ranks learn.
    """

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg, self.dir = cfg, run_dir
        self.rank = int(os.environ.get("RANK", 0))
        self.step = 0
        self.validations: dict[int, dict[str, Any]] = {}
        self.resets = Resets(cfg.trainer.resets)
        grpo = cfg.trainer.grpo
        self.loss_config = LossConfig(
            grpo.clip_low,
            grpo.clip_high,
            grpo.dual_clip,
            grpo.kl_coef,
            grpo.kl_estimator,
            grpo.entropy_coef,
            grpo.aggregation,
        )
        self._stop = False
        self._published = -1
        self._phase_s: dict[str, float] = {}
        self._rewards_s = {"wait": 0.0, "open": 0.0}
        self._tokens = 0
        self._began = time.monotonic()
        for sig in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(sig, self._ask_to_stop)

    # --- building --------------------------------------------------------------------------------------------------

    def build_policy(self) -> None:
        """Policy and data; makes RUN/base, what reinforcement learning starts from, where a warm-up is due."""
        from nemo_prorl.policy import checkpoint
        from nemo_prorl.policy.build import build_actor

        cfg, grpo = self.cfg, self.cfg.trainer.grpo
        base = base_folder(cfg, self.dir)
        folder = base if base.exists() else initial_model(cfg, self.dir)
        built = build_actor(cfg, folder, self.dir / "logs" / "nemo")  # type: ignore[arg-type]
        self.policy, self.loggers, self.checkpoint = built.actor, built.trainer.loggers, checkpoint
        self.renderer = PromptRenderer(folder, grpo.context_tokens, grpo.max_response_tokens)
        train_sources, self.validation_sources = load_sources(cfg.data)
        self.prompts = PromptStream(Blend(train_sources, cfg.seed), self.renderer)
        self.heldout = [
            (source.name, [Visit(record, self.renderer.prompt_ids(record), 0) for record in records])
            for source, records in self.validation_sources
        ]
        if not base.exists():
            self._make_base(base, Blend(train_sources, cfg.seed + 1))

    def connect(self) -> None:
        """Services and records; continues the newest checkpoint where there is one."""
        if self.rank == 0:
            self.metrics_log, self.journal = MetricsLog(self.dir), Journal(self.dir)
            self.services = Services.connect(self.cfg, self.dir, self.prompts, self.renderer)
        self.store = WeightStore(weights_folder(self.dir)) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
        self._resume()

    def _make_base(self, base: Path, blend: Blend) -> None:
        """The policy that the reinforcement learning starts from: warmed up, and kept as a Hugging Face folder."""
        warmup = self.cfg.trainer.warmup
        _log.info("warm-up: %d supervised steps of %d", warmup.steps, warmup.batch_size)
        records = [blend.next()[0] for _ in range(warmup.steps * warmup.batch_size)]
        examples = [(self.renderer.prompt_ids(r), self.renderer.target_ids(warmup_target(r))) for r in records]
        warm_up(self.policy, examples, warmup, float(self.cfg.model["optim"]["lr"]))
        self.policy.set_reference()
        self._write_hf(base)

    def _write_hf(self, folder: Path) -> None:
        from nemo_prorl.policy.weights import write_hf_folder

        tensors = [(name, t.cpu()) for name, t in self.policy.export_weights()]
        if self.rank == 0:
            write_hf_folder(folder, iter(tensors), initial_model(self.cfg, self.dir), None)
        dist.barrier()

    def _resume(self) -> None:
        found = self.checkpoint.complete(self.dir / "checkpoints")
        if not found:
            self.on_rank_0(partial(self._begin, None))
            return
        state = self.checkpoint.load(self.policy, found[-1])
        if state["version"] != __version__:
            raise CheckpointError(f"{found[-1]} was written by version {state['version']}; this is {__version__}")
        self.policy.set_learning_rate(float(self.cfg.model["optim"]["lr"]))
        self.step = state["step"]
        self.validations = {int(step): scores for step, scores in state["validations"].items()}
        self.resets.load_state_dict(state["resets"])
        self.prompts.load_state_dict(state["blend"])
        self._tokens, self._rewards_s, self._phase_s = state["tokens"], state["rewards_s"], state["phase_s"]
        self.on_rank_0(partial(self._begin, state))

    def _begin(self, state: dict[str, Any] | None) -> None:
        """Rank 0: the records and rollouts go on where the checkpoint was taken."""
        if state is None:
            self.metrics_log.cut(0)
            self.journal.append("start", 0, stage=self.cfg.stage, version=__version__)
            return
        self.services.rollouts.load_state_dict(state["rollouts"])
        self.metrics_log.cut(state["metrics_bytes"])
        self.resets.recall(self.metrics_log.lines(), self.validations)
        self.journal.append("resume", self.step, stage=self.cfg.stage, version=__version__)
        last = self.resets.done[-1:] if self.resets.state_dict()["fresh"] else []
        told = [e for e in self.journal.events() if e["event"] == "reset_commit"]
        for reset in last:  # killed between the checkpoint of a reset and its commit
            if reset["step"] == self.step and not any(e["step"] == self.step for e in told):
                self.journal.append("reset_commit", self.step, **{k: v for k, v in reset.items() if k != "step"})

    # --- what the loop asks ----------------------------------------------------------------------------------------

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, on every rank; what it raises there is raised on every rank."""
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(work(), None)]
            except ProrlError as error:
                box = [(None, error)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, 0)
        value, failure = box[0]
        if failure is not None:
            raise failure
        return value

    @contextmanager
    def phase(self, name: str, metrics: Metrics) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        metrics.put(f"time/{name}", seconds)
        self._phase_s[name] = self._phase_s.get(name, 0.0) + seconds

    def remaining_steps(self) -> range:
        return range(self.step + 1, self.cfg.trainer.grpo.max_steps + 1)

    def publish(self, version: int) -> None:
        """Hands the policy's weights to all engines, once a version."""
        if version == self._published:
            return
        weights = self.policy.export_weights()
        if self.store is not None:
            path = self.store.write(weights, version)
        else:
            for _ in weights:  # a collective
                pass
        dist.barrier()
        self.on_rank_0(lambda: self.services.rollouts.publish(str(path), version))
        self._published = version

    def collect(self, metrics: Metrics) -> list[Group]:
        """The groups of this step, the same on every rank."""
        step = metrics.step
        batch: CollectedBatch = self.on_rank_0(lambda: self.services.rollouts.collect(step, step - 1))
        report_rollout(metrics, batch)
        self._tokens += batch.generated_tokens
        self._rewards_s["wait"] += batch.reward_wait_s
        self._rewards_s["open"] += batch.reward_open_s
        if self.rank == 0 and self.cfg.trainer.grpo.save_rollout_groups:
            texts = [[self.renderer.decode(r.token_ids) for r in group.responses] for group in batch.groups]
            write_rollouts(self.dir, step, batch.groups, texts, self.cfg.trainer.grpo.save_rollout_groups)
        return batch.groups

    def validation_due(self, step: int) -> bool:
        grpo = self.cfg.trainer.grpo
        return bool(self.heldout) and (step % grpo.validate_every == 0 or step == grpo.max_steps)

    def validate(self, metrics: Metrics) -> None:
        """Mean reward on the held-out prompts, with the same seeds each time, so that differences are the policy's."""
        if not self.heldout:
            return
        step = metrics.step
        with self.phase("validate", metrics):
            self.publish(version=step)
            scores = self.on_rank_0(lambda: self._score_heldout(step))
        self.validations[step] = scores
        for name, score in scores["tasks"].items():
            metrics.put(f"validation/{name}", score["mean"])
        metrics.put("validation/all", scores["all"]["mean"])
        if self.rank == 0:
            self.journal.append("validation", step, **scores)
            self.write_summary(finished=False)

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
        grpo = self.cfg.trainer.grpo
        return step % grpo.checkpoint_every == 0 or step == grpo.max_steps

    def save_checkpoint(self, step: int) -> None:
        """A checkpoint from which the run goes on as if never stopped.  A collective; does nothing the second time."""
        folder = self.checkpoint.step_folder(self.dir / "checkpoints", step)
        if folder.exists() and self._saved == step:
            return
        mine = self.on_rank_0(
            lambda: {"metrics_bytes": self.metrics_log.length(), "rollouts": self.services.rollouts.state_dict()}
        )
        began = time.monotonic()
        state = {
            "step": step,
            "stage": self.cfg.stage,
            "version": __version__,
            "blend": self.on_rank_0(self.prompts.state_dict),
            "resets": self.resets.state_dict(),
            "validations": self.validations,
            "tokens": self._tokens,
            "rewards_s": self._rewards_s,
            "phase_s": self._phase_s,
            **mine,
        }
        self.checkpoint.save(self.policy, folder, state)
        if self.rank == 0:
            self.checkpoint.prune(self.dir / "checkpoints", self.cfg.trainer.grpo.keep_checkpoints)
        self._saved = step
        self._phase_s["checkpoint"] = self._phase_s.get("checkpoint", 0.0) + time.monotonic() - began

    _saved = -1

    def hard_reset(self, step: int, reason: str) -> None:
        """pi_ref <- pi_theta, optimizer anew, in one transaction: journal the intent, checkpoint, commit."""
        if self.rank == 0:
            self.journal.append("reset_intent", step, reason=reason)
        self.policy.set_reference()
        self.policy.reset_optimizer()
        sha256 = self.policy.reference_sha256()
        self.resets.record(step, reason, sha256)
        self.save_checkpoint(step)
        if self.rank == 0:
            self.journal.append("reset_commit", step, reason=reason, reference_sha256=sha256)
            _log.info("hard reset after step %d (%s)", step, reason)

    def alarm(self, step: int, what: str) -> None:
        """Something a person should look at: in the log and in the journal."""
        if self.rank == 0:
            _log.warning("step %d: %s", step, what)
            self.journal.append("alarm", step, what=what)

    def stop_requested(self) -> bool:
        return self.on_rank_0(lambda: self._stop)

    def _ask_to_stop(self, signum: int, _: object) -> None:
        _log.warning("%s: stopping after this step", signal.Signals(signum).name)
        self._stop = True

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
                tokens=self._tokens,
                phase_s=self._phase_s,
                rewards_s=self._rewards_s,
            ),
        )

    def finish(self) -> None:
        hashes = {"weights_sha256": self.policy.weights_sha256(), "reference_sha256": self.policy.reference_sha256()}
        if self.rank == 0:
            self.write_summary(True, hashes)
            self.journal.append("finish", self.step)


def report_rollout(metrics: Metrics, batch: CollectedBatch) -> None:
    """What a collected batch says of itself, by task and in all."""
    for task, tally in sorted(batch.tasks.items()):
        metrics.put(f"reward/{task}", tally.mean_score)
        metrics.put(f"keep_rate/{task}", tally.keep_rate)
    tallies = list(batch.tasks.values())
    judged = sum(t.judged for t in tallies)
    responses = max(1, judged + sum(t.masked for t in tallies))
    metrics.put("reward/all", sum(t.score_sum for t in tallies) / max(1, judged))
    metrics.put("keep_rate/all", sum(t.kept for t in tallies) / max(1, sum(t.decided for t in tallies)))
    metrics.put("rollout/groups", len(batch.groups))
    metrics.put("rollout/truncated", 1.0 - sum(t.finished for t in tallies) / responses)
    metrics.put("rollout/response_tokens", sum(t.tokens for t in tallies) / responses)
    metrics.put("rollout/masked", sum(t.masked for t in tallies))
    for name in ("drawn", "carried", "stale", "surplus", "generated_tokens"):
        metrics.put(f"rollout/{name}", getattr(batch, name))
    metrics.put("rollout/staleness", sum(batch.version - g.version for g in batch.groups) / max(1, len(batch.groups)))
    for name in ("engine_s", "reward_open_s", "reward_wait_s"):
        metrics.put(f"time/rollout/{name}", getattr(batch, name))
    metrics.put("time/rollout/tokens_per_s", batch.generated_tokens / max(batch.wall_s, 1e-9))


def setup_process(cfg: Config, rank: int) -> None:
    """Logging, threads and determinism of this rank."""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


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
        run.build_policy()
        if arguments[1:] == ["warmup"]:
            return 0
        run.connect()
        train(run)
        run.finish()
    except StoppedCleanly as stopped:
        if run.rank == 0:
            run.journal.append("stop", run.step, reason=str(stopped))
        _log.warning("%s", stopped)
        return stopped.exit_code
    except ProrlError as error:
        _log.error("%s: %s", type(error).__name__, error)
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
