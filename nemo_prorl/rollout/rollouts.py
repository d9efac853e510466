"""Rollouts as used by the training loop: publish weights to the engines, and get the judged groups of a step.

The way of the weights: `Rollouts.publish` exports them from the policy, and one rank of each node writes a file into
shared memory (`weight_store.WeightStore.write`).  `engines.EnginePool.publish` asks each engine by POST /weights to
load the file of its node; engines on devices of their own are only told (`EnginePool.announce`), and load the file
before their next response.  In the engine, `engine.server` lets `engine.weight_load` check the file and load it into
vLLM's worker.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl import device
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.config import Config
from nemo_prorl.data.blend import Blend
from nemo_prorl.files import listed
from nemo_prorl.leader import Leader, LeaderOnly
from nemo_prorl.metrics import Metrics
from nemo_prorl.rewards.canaries import BOUND, CanaryWatch
from nemo_prorl.rollout.collector import Collector, CollectorState
from nemo_prorl.rollout.group_arrays import decode, encode
from nemo_prorl.rollout.groups import CollectedBatch, Group, TaskTally
from nemo_prorl.rollout.overlap import OneStepOff
from nemo_prorl.rollout.report import report_rollout
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
from nemo_prorl.tracing import RECORDER
from nemo_prorl.usage import request_restart

if TYPE_CHECKING:
    from nemo_prorl.lifecycle.ledger import Ledger
    from nemo_prorl.lifecycle.run_records import Records
    from nemo_prorl.policy.actor import Actor

_log = logging.getLogger(__name__)

_RECYCLE_STEPS = 10  # restarts of one engine in fewer steps than this are an alarm
_NAMED = 8  # tensors in an alarm
_Dealt = tuple[CollectedBatch, JudgedGroups]  # the batch without tokens, and the rows of one data rank


class Rollouts:
    """The training loop's interface to engines and rewards: one object per trainer rank, saved in checkpoints.

    All trainer ranks must call each method together.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        policy: "Actor",
        blend: LeaderOnly[Blend],
        collector: LeaderOnly[Collector],
        records: "Records",
        leader: Leader,
        ledger: "Ledger",
    ) -> None:
        """Wrap the collector."""
        self.collector = collector
        self._ledger = ledger
        self._cfg, self._policy, self._blend, self._records, self._leader = cfg, policy, blend, records, leader
        self._published: object = None  # (version at the engines, version of the policy then)
        self._asleep = False
        self._endpoints = run_dir / "endpoints"
        self._canaries = CanaryWatch()
        self._unread: set[tuple[str, ...]] = set()  # names in alarms; rank 0 only
        self._recycled: dict[str, int] = {}  # step of the last requested restart by engine; rank 0 only
        self._restarting: str | None = None  # engine whose restart was requested since the last publication
        node = int(os.environ["GROUP_RANK"]) if cfg.trainer.num_nodes > 1 else None
        # Only the first rank of each node writes the weights, for the engines of its node.
        writes = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self._store = WeightStore(weights_folder(run_dir, node), cfg.rollout.dtype) if writes else None

    # --- weights ---------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Publish the policy's weights to all engines under this version, and wake sleeping engines.

        Does nothing if the engines are awake and have these weights already.  If the engines have their own devices,
        returns immediately, and each engine loads the weights before its next response.  Otherwise, returns when all
        engines have the weights.
        """
        if self._published == (version, self._policy.version) and not self._asleep:
            return
        weights, path = self._policy.export_weights(), ""
        with RECORDER.span(f"write weights {version}", "publication"):
            if self._store is not None:
                path = str(self._store.write(weights, version))
            else:
                for _ in weights:  # the export communicates, so every rank must iterate
                    pass
            if self._cfg.rollout.sleep is not None:
                device.empty_cache()  # waking engines need the memory that PyTorch keeps cached
            self._leader.barrier()
        self._published = version, self._policy.version
        if self._cfg.rollout.own_devices:
            self.collector.call(lambda collector: _one_step_off(collector).announce(path, version))
            return
        with RECORDER.span(f"engines load weights {version}", "publication"):
            late = self.collector.call(lambda collector: collector.publish(path, version))
        for name, error in late:
            if name == self._restarting:  # it was restarted while it slept
                continue
            self._records.alarm(version, f"{name} did not wake ({error}); it was restarted and has weights {version}")
        self._asleep, self._restarting = False, None

    def sleep(self) -> float:
        """Make the engines release the memory of shared GPUs, if `rollout.sleep` is set; return the seconds it took."""
        began = time.monotonic()
        if self._cfg.rollout.sleep is not None:
            with RECORDER.span("engines go to sleep", "publication"):
                freed = self.collector.call(lambda collector: collector.sleep())
            self._asleep = True
            _log.info("the engines are asleep: %.1f GB of device memory freed", freed / 1e9)
        return time.monotonic() - began

    # --- groups ----------------------------------------------------------------------------------------------------

    def collect(self, metrics: Metrics) -> JudgedGroups:
        """Return the groups of this step, with tokens only of the responses that this data-parallel rank trains on.

        Records the rollout's metrics.  Engines on their own devices then begin to generate the next step's groups.
        """
        step = metrics.step
        batch, own_groups = self.collector.share(partial(self._take, step))
        report_rollout(metrics, batch)
        for task, errors in self._canaries.observe(batch.canaries):
            self._records.alarm(
                step,
                f"the verifier of task {task} errs on responses whose verdict is known: {errors};"
                f" {BOUND:g} is tolerated",
            )
        self._tell_unjudged(step, batch)
        if self._cfg.rollout.sleep is not None:
            metrics.put("time/rollout/sleep_s", self.sleep())
        if self._cfg.data.retire_after is not None:
            self._retire(metrics, batch)
        if (limit := self._cfg.rollout.recycle_gb) is not None:  # the engines have no work now
            self.collector.run_on_leader(lambda _: self._recycle(step, limit))
        if self._collects_ahead(step):
            self.collector.call(lambda collector: _one_step_off(collector).begin_next(step + 1, step - 1))
        return own_groups

    def _tell_unjudged(self, step: int, batch: CollectedBatch) -> None:
        """Raise an alarm for the responses of a step without a verdict, unless the step before had some, too."""
        if batch.unjudged and not any(line.get("rollout/masked") for line in self._records.lines()[-1:]):
            total = TaskTally.total(batch.tasks.values())
            masked = f"{total.masked} of {total.responses} responses have no verdict and are masked"
            self._records.alarm(step, f"{masked}; the first: {batch.unjudged}")

    def _recycle(self, step: int, limit_gb: float) -> None:
        """Have an engine restarted that is larger than rollout.recycle_gb, on rank 0; alarm if that does not help."""
        if (name := request_restart(self._endpoints, limit_gb * 1e9)) is None:
            return
        if step - self._recycled.get(name, -_RECYCLE_STEPS) < _RECYCLE_STEPS:
            self._records.alarm(
                step,
                f"{name} is restarted again after a few steps: rollout.recycle_gb={limit_gb:g} is less than a new"
                " engine needs (system/engine_gb)",
            )
        self._recycled[name], self._restarting = step, name

    def _take(self, step: int, collector: Collector) -> list[_Dealt]:
        """Collect the batch of a step on rank 0; return what each data-parallel rank gets, in order of ranks."""
        batch = collector.take(step, step - 1)
        self._report_unread(step, collector.unread_weights)
        self._records.rollouts(step, batch.groups, batch.dropped, collector.renderer.judged_text)
        self._records.disagreements(step, batch.disagreements)
        judged, summary = JudgedGroups.of(batch.groups), batch.without_tokens()
        self._ledger.groups(step, batch.groups, judged, batch.outcomes)
        shares = judged.for_ranks(self._cfg.trainer.grpo.updates_per_step, self._policy.data_ranks.size)
        return [(summary, rows) for rows in shares]

    def _report_unread(self, step: int, unread: Mapping[str, Sequence[str]]) -> None:
        """Raise an alarm for engines with tensors that nothing compares, once for each set of tensors."""
        for engine, tensors in sorted(unread.items()):
            if tensors and (names := tuple(tensors)) not in self._unread:
                self._unread.add(names)
                shown = listed(names, _NAMED)
                self._records.alarm(
                    step, f"{engine} cannot compare {len(names)} tensors with the published ones: {shown}"
                )

    def await_next(self, metrics: Metrics) -> None:
        """Wait for the batch collected while this step trains, if there is one; record the engines' idle seconds."""
        if self._collects_ahead(metrics.step):
            with metrics.phase("ahead"):
                idle_s = self.collector.call(lambda collector: _one_step_off(collector).finish_next())
            metrics.put("time/ahead/engines_wait_s", idle_s)

    def _collects_ahead(self, step: int) -> bool:
        """Return whether the next step's batch is collected while this step trains."""
        return self._cfg.rollout.own_devices and step < self._cfg.trainer.grpo.max_steps

    def _retire(self, metrics: Metrics, batch: CollectedBatch) -> None:
        """Retire the prompts that were solved often enough (data.retire_after); record how many are retired."""
        before, retired = self._blend.call(lambda blend: (blend.retired, blend.observe(batch.outcomes)))
        metrics.put("data/retired", retired)
        if retired < before:
            self._records.alarm(
                metrics.step, "every training prompt was retired (data.retire_after): all are drawn again"
            )

    def discard(self) -> None:
        """Discard the groups that were left for the next step."""
        self.collector.call(lambda collector: collector.discard())

    # --- in a checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> CollectorState:
        return self.collector.call(lambda collector: collector.state_dict())

    def groups(self) -> Callable[[], bytes]:
        """Return a function that encodes the groups of `state_dict` as they are now; on ranks other than 0, no groups.

        It may be called later and in another thread, because groups never change.
        """
        groups: list[Group] = []
        self.collector.run_on_leader(lambda collector: groups.extend(collector.groups()))
        return partial(encode, groups)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to the state of a checkpoint.

        Args:
            state: result of `state_dict`; on rank 0 with `groups`, the bytes that the function of `groups` returned.
        """

        def load(collector: Collector) -> None:
            collector.load_state_dict(state, {group.draw_index: group for group in decode(state["groups"])})  # type: ignore[arg-type]

        self.collector.call(load)
        self._canaries = CanaryWatch.replay(self._records.lines())  # empty on ranks other than 0, which raise no alarm

    def begin_stage(self, state: dict[str, Any]) -> None:
        """Begin a new stage of a chain with the keep rates (`KeepRates`, by task) that the previous stage ended with.

        Args:
            state: the last `state_dict` of the previous stage.
        """
        self.collector.call(lambda collector: collector.keep_rates.load_state_dict(state["keep_rates"]))


def _one_step_off(collector: Collector) -> OneStepOff:
    assert isinstance(collector, OneStepOff)
    return collector
