"""Cores of a CPU node that engines do not share with the trainer (rollout.own_devices)."""

from collections.abc import Collection
from dataclasses import dataclass

from omegaconf import DictConfig

from nemo_prorl.errors import UnfitMachine


@dataclass(frozen=True)
class Cores:
    """The cores of each rank and of each engine of a node.  No engine shares one; a reward server may use all."""

    ranks: list[list[int]]
    engines: list[list[int]]

    @classmethod
    def of(cls, cfg: DictConfig, there: Collection[int]) -> "Cores | None":
        """Each engine has rollout.threads of the last cores for each of its ranks; the trainer's ranks have the others,
        each its own where there are enough.

        None where engines and trainer share devices, or have GPUs.  Raises UnfitMachine where none is left to train on.
        """
        if not cfg.rollout.own_devices or cfg.trainer.accelerator != "cpu":
            return None
        threads, devices = cfg.rollout.threads * cfg.rollout.tensor_parallel_size, cfg.trainer.devices
        engines = cfg.rollout.engines // cfg.trainer.num_nodes
        cores, left = sorted(there), len(there) - engines * threads
        if left < 1:
            raise UnfitMachine(
                f"rollout.own_devices=true: {engines} engines take {threads} cores each (rollout.threads), and of the"
                f" {len(there)} here none is left to train on. With rollout.own_devices=false they share them"
            )
        each = left // devices
        ranks = [cores[k * each : (k + 1) * each] or cores[:left] for k in range(devices)]
        return cls(ranks, [cores[left + k * threads : left + (k + 1) * threads] for k in range(engines)])
