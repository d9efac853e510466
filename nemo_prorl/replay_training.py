"""Trains stored steps of a run again, without engines and reward servers, and writes a ledger of its own.

Every trainer rank runs this file in a folder that `launcher.replayed` made (`prorl replay-training`):

    python -m nemo_prorl.replay_training FOLDER

FOLDER has a config.yaml, which is the run's but for the keys that the user changes, and a replay.json (`ReplaySpec`).
"""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_prorl import rank
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.config import Config
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle import retention
from nemo_prorl.lifecycle.batches import read_batch
from nemo_prorl.lifecycle.journal_events import Reset
from nemo_prorl.lifecycle.ledger import Ledger
from nemo_prorl.lifecycle.run_records import Records, write_rollouts
from nemo_prorl.metrics import Metrics
from nemo_prorl.trainer import RunProgress, Trainer, advantages

SPEC_FILE = "replay.json"
POLICY, OLDER = "policy", "older"  # folders of an audit: the weights before the step, and before the step before
LOGPROBS = "logprobs.safetensors"


@dataclass(frozen=True)
class ReplaySpec:
    """What to train again.

    `checkpoint`: of the run; None: from the weights that the run began with.  `before`: step of these weights.
    `chain`: the ledger's chain after that step.  `resets`: hard resets after it, by step.  `audit`: before the last
    step, also write what `prorl audit` compares (`write_evidence`).
    """

    run_dir: str
    checkpoint: str | None
    before: int
    last: int
    chain: str
    resets: Mapping[int, Reset]
    audit: bool = False

    def write(self, folder: Path) -> None:
        (folder / SPEC_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "ReplaySpec":
        spec = json.loads((folder / SPEC_FILE).read_text())
        return cls(**{**spec, "resets": {int(step): reset for step, reset in spec["resets"].items()}})


@dataclass(frozen=True)
class StoredRollouts:
    """The training loop's interface to engines and rewards, as `rollout.rollouts.Rollouts`, for stored batches."""

    cfg: Config
    run_dir: Path  # of the run that stored the batches
    policy: Any
    ledger: Ledger
    leader: Leader

    def publish(self, version: int) -> None:
        """Do nothing: there are no engines."""

    def collect(self, metrics: Metrics) -> JudgedGroups:
        """Return the groups that the run trained on in this step, with this data rank's tokens.

        Raises DataError: the batch was not kept.
        """
        return self.leader.share(partial(self._take, metrics.step))

    def _take(self, step: int) -> list[JudgedGroups]:
        groups = read_batch(self.run_dir, step)
        judged = JudgedGroups.of(groups)
        self.ledger.groups(step, groups, judged, [])
        return judged.for_ranks(self.cfg.trainer.grpo.updates_per_step, self.policy.data_ranks.size)


def build(cfg: Config, folder: Path, policy: Any, spec: ReplaySpec) -> Trainer:
    """Build the parts of a trainer that its `train_step` uses.  A collective."""
    actor, leader, nothing = policy.actor, policy.leader, None  # type: Any, Leader, Any
    records = Records(cfg, folder, leader.rank == 0)
    ledger = Ledger(folder, leader.rank == 0, actor)
    ledger.chain = spec.chain
    rollouts: Any = StoredRollouts(cfg, Path(spec.run_dir), actor, ledger, leader)
    parts: dict[str, Any] = {"rollouts": rollouts, "validation": nothing, "records": records}
    unused = dict.fromkeys(("trials", "checkpoints", "control", "stopping", "traces", "watchdog"), nothing)
    return Trainer(**rank.step_parts(cfg, policy, RunProgress(step=spec.before), **parts), **unused, ledger=ledger)


def replay(cfg: Config, folder: Path) -> None:
    """Load the weights before the first step, and train the steps of replay.json with their stored batches."""
    spec = ReplaySpec.read(folder)
    policy = rank.Policy(cfg, folder)
    trainer, store = build(cfg, folder, policy, spec), policy.checkpoint_files(cfg)
    if spec.checkpoint is not None:
        state = store.load(Path(spec.checkpoint))
        trainer.entropy.load_state_dict(state["entropy"])
        trainer.resets.done, trainer.resets.fresh = list(state["resets"]["done"]), bool(state["resets"]["fresh"])
    checkpoints = Path(spec.run_dir) / "checkpoints"
    for step in range(spec.before + 1, spec.last + 1):
        if spec.audit and step == spec.last - 1:
            rank.write_policy(policy, folder / OLDER)
        if spec.audit and step == spec.last:
            write_evidence(cfg, folder, policy, trainer.rollouts, step)
        metrics = trainer.train_step(step)
        trainer.records.log(metrics)
        if (reset := spec.resets.get(step)) is not None:
            trainer.resets.repeat(reset, lambda back_to: store.load_policy(retention.step_folder(checkpoints, back_to)))


def write_evidence(cfg: Config, folder: Path, policy: Any, rollouts: Any, step: int) -> None:
    """Write the policy before a step, the trainer's log-probabilities, and all responses with verdicts.  A collective.

    The files in `folder`: policy/ (Hugging Face), logprobs.safetensors (of each response by its number; and
    `advantage`, of all responses), and rollouts/step-N.jsonl.
    """
    ranks, metrics = policy.actor.data_ranks, Metrics(step, cfg.stage)
    judged = rollouts.collect(metrics)
    rows, numbers = judged.rows, judged.rows_of_updates(cfg.trainer.grpo.updates_per_step, ranks.size)[ranks.rank]
    logp_BT, _ = policy.actor.logprobs(judged.batch())
    own = {
        str(number): logp_T
        for number, logp_T in zip(torch.cat(numbers).tolist(), rows.of_responses(logp_BT), strict=True)
    }
    every = {name: value for part in ranks.gather(own) for name, value in part.items()}
    rank.write_policy(policy, folder / POLICY)
    if policy.leader.rank == 0:
        save_file({**every, "advantage": advantages(judged, cfg.trainer.grpo, metrics)}, folder / LOGPROBS)
        groups = read_batch(rollouts.run_dir, step)
        write_rollouts(folder, step, groups, set(judged.draws), policy.renderer.judged_text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    directory = Path(sys.argv[1])
    rank.end(rank.main(partial(replay, rank.read(directory), directory)))
