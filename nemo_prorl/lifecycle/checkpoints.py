"""How a run is saved, continued, begun from the stage before, and hard reset.  Collectives of all trainer ranks."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_prorl import __version__
from nemo_prorl.lifecycle import retention, stages
from nemo_prorl.lifecycle.killpoints import killpoint
from nemo_prorl.lifecycle.records import code_sha256, interrupted_reset
from nemo_prorl.lifecycle.resets import policy_scores
from nemo_prorl.metrics import Metrics

if TYPE_CHECKING:
    from nemo_prorl.rank import Run

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run: `begin` once, then `save` and `hard_reset` between steps."""

    def __init__(self, run: "Run") -> None:
        from nemo_prorl.policy import checkpoint  # NeMo: on a CPU only after the policy was built

        self.run, self.files = run, checkpoint
        self.folder = run.dir / "checkpoints"
        cfg = run.cfg.trainer
        self._writer = checkpoint.Writer(run.policy, cfg.grpo.async_checkpoints, cfg.deadlines.collective_s)
        self._saved: tuple[int, bool] | None = None
        code_sha256()  # of what runs: the files may change later

    # --- beginning and going on ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Continues the newest checkpoint; without one starts, where there is a stage before from its checkpoint."""
        run = self.run
        run.on_rank_0(lambda: retention.clean(self.folder))
        found = run.on_rank_0(lambda: retention.complete(self.folder))
        if found:
            self._resume(found[-1])
        elif (start := run.on_rank_0(lambda: stages.origin(run.cfg, run.dir))) is not None:
            self._start_stage(start)
        else:
            run.on_rank_0(self._start)

    def _resume(self, folder: Path) -> None:
        run = self.run
        retention.check_continuable(folder)
        state = self.files.load(run.policy, folder)
        run.step = state["step"]
        run.validations = {int(step): scores for step, scores in state["validations"].items()}
        run.resets.load_state_dict(state["resets"])
        run.prompts.load_state_dict(state["blend"])
        run.entropy.load_state_dict(state["entropy"])
        run.tokens, run.rewards_s, run.phase_s = state["tokens"], state["rewards_s"], state["phase_s"]
        if state["unfinished"] is not None:
            run.unfinished = Metrics.from_json(state["unfinished"])
        self._saved = run.step, run.unfinished is not None
        run.on_rank_0(partial(self._recall, state))

    def _recall(self, state: dict[str, Any]) -> None:
        """Rank 0: records and rollouts go on where the checkpoint was taken."""
        run = self.run
        run.services.supply.load_state_dict(state["rollouts"])
        run.metrics_log.cut(state["metrics_bytes"])
        run.resets.recall(run.metrics_log.lines(), run.validations)
        interrupted = interrupted_reset(run.journal.events())
        run.journal.append("resume", run.step, stage=run.cfg.stage, version=__version__)
        if state["code"] != code_sha256():
            run.alarm(run.step, "the code is not that which wrote the checkpoint: the run goes on, perhaps not exactly")
        last = run.resets.done[-1] if run.resets.done else {"step": None}
        if interrupted == last["step"] == run.step:  # killed between the checkpoint of a reset and its commit
            run.journal.append("reset_commit", **last)
        if run.remaining_steps() or run.unfinished is not None:
            run.write_summary(finished=False)

    def _start(self, **fields: Any) -> None:
        """Rank 0: the records of a run that begins."""
        self.run.metrics_log.cut(0)
        self.run.journal.append("start", 0, stage=self.run.cfg.stage, version=__version__, **fields)

    def _start_stage(self, start: stages.Origin) -> None:
        """Policy, master weights, reference, optimizer and the place in the data are those of the stage before."""
        run = self.run
        sha256 = self.files.load(run.policy, start.checkpoint)["weights_sha256"]

        def begin() -> None:
            self._start(start_from=str(start.checkpoint), weights_sha256=sha256)
            state = self.files.read_state(start.newest)  # the data moves on, also where the weights go back
            if "blend" in state:  # not where it was imported
                run.prompts.carry(state["blend"])
                run.services.rollouts.keep_rates.load_state_dict(state["rollouts"]["keep_rates"])
            if (version := state.get("version", __version__)) != __version__:
                run.alarm(0, f"{start.checkpoint} was written by version {version}; this is {__version__}")
            _log.info("stage %s begins from %s", run.cfg.stage, start.checkpoint)

        run.on_rank_0(begin)
        if run.cfg.chain.hard_reset:
            self.hard_reset(0, f"stage {run.cfg.stage} begins")
        else:
            run.resets.continue_reference()
            self.save(0)

    # --- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """A checkpoint from which the run goes on as if never stopped.  Does nothing the second time.

        It may still be being written on return; see `wait`.
        """
        run, key = self.run, (step, self.run.unfinished is not None)
        if self._saved == key:
            return
        began = time.monotonic()
        mine = run.on_rank_0(
            lambda: {
                "metrics_bytes": run.metrics_log.length(),
                "rollouts": run.services.supply.state_dict(),
                "blend": run.prompts.state_dict(),
                "entropy": run.entropy.state_dict(),
                "code": code_sha256(),
            }
        )
        state = {
            "step": step,
            "stage": run.cfg.stage,
            "version": __version__,
            "resets": run.resets.state_dict(),
            "validations": run.validations,
            "unfinished": run.unfinished.to_json() if run.unfinished is not None else None,
            "tokens": run.tokens,
            "rewards_s": run.rewards_s,
            "phase_s": run.phase_s,
            **mine,
        }
        self._writer.save(retention.step_folder(self.folder, step), state, self._retention())
        self._saved = key
        run.phase_s["checkpoint"] = run.phase_s.get("checkpoint", 0.0) + time.monotonic() - began

    def wait(self) -> None:
        """Returns when the last checkpoint is complete.  Raises CheckpointError if it could not be written."""
        self._writer.wait()

    def drain(self, seconds: float) -> None:
        """After a failure: so long may a checkpoint still take that is being written."""
        self._writer.drain(seconds)

    def _retention(self) -> Callable[[], object]:
        """What removes the checkpoints that need not stay, by what is known now."""
        grpo, best = self.run.cfg.trainer.grpo, self.run.best_validation()
        return partial(
            retention.retain,
            self.folder,
            policy_scores(self.run.validations, self.run.resets.done),
            grpo.keep_checkpoints,
            grpo.keep_best,
            None if grpo.checkpoint_budget_gb is None else int(grpo.checkpoint_budget_gb * 1e9),
            needed=[best] if best is not None and self.run.cfg.trainer.resets.roll_back else [],
        )

    # --- hard resets -----------------------------------------------------------------------------------------------

    def hard_reset(self, step: int, reason: str) -> None:
        """pi_ref <- pi_theta, optimizer anew, in one transaction: journal the intent, checkpoint, commit."""
        run, resets = self.run, self.run.cfg.trainer.resets
        self.wait()
        back_to = self._best_before(step) if resets.roll_back else None
        if run.rank == 0:
            run.journal.append("reset_intent", step, reason=reason)
        killpoint("reset:intent")
        if back_to is not None:
            self._roll_back(back_to)
        if resets.parts != "optimizer":
            run.policy.set_reference()
        killpoint("reset:reference")
        if resets.parts != "reference" or back_to is not None:  # the earlier step's moments are nobody's
            run.policy.reset_optimizer()
        killpoint("reset:optimizer")
        sha256 = run.policy.reference_sha256()
        run.resets.record(step, reason, sha256, back_to)
        self._saved = None
        self.save(step)
        self.wait()
        killpoint("reset:checkpointed")
        if run.rank == 0:
            run.journal.append("reset_commit", **run.resets.done[-1])
            killpoint("reset:committed")
            _log.info("hard reset after step %d (%s)%s", step, reason, f", back to step {back_to}" if back_to else "")

    def _best_before(self, step: int) -> int | None:
        """The step of the best validation since the last reset, if it is an earlier one and its weights are kept.

        Chosen first and looked for then, so that what else happens to lie there changes nothing.
        """
        run, best = self.run, self.run.best_validation()
        if best is None or best == step:
            return None

        def there() -> bool:
            if retention.step_folder(self.folder, best) in retention.complete(self.folder):
                return True
            run.alarm(step, f"no roll-back: the checkpoint of step {best}, the best validation, is not kept")
            return False

        return best if run.on_rank_0(there) else None

    def _roll_back(self, step: int) -> None:
        """The weights of an earlier step; steps and data position move on.  Groups of the bad weights go."""
        self.files.load_policy(self.run.policy, retention.step_folder(self.folder, step))
        self.run.weights_changed()
        self.run.on_rank_0(lambda: self.run.services.supply.drop())
