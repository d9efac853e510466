"""The cores of a node's ranks and engines: apart from each other on a CPU, near its GPU where there are GPUs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import UnfitMachine


@dataclass(frozen=True)
class Cores:
    """The cores of each rank and of each engine of a node; an empty list: all.  A reward server may use all."""

    ranks: list[list[int]]
    engines: list[list[int]]

    @classmethod
    def of(cls, cfg: DictConfig, there: Collection[int]) -> "Cores | None":
        """Return cores for engines that share none with the trainer (rollout.own_devices) nor with each other.

        Each engine has rollout.threads of the last cores for each of its ranks; the trainer's ranks have the others,
        each its own where there are enough.  None where engines and trainer share devices, or have GPUs.  Raises
        UnfitMachine where none is left to train on.
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

    @classmethod
    def near_gpus(
        cls, cfg: DictConfig, there: Collection[int], buses: Sequence[str], sysfs: Path = Path("/sys")
    ) -> "Cores":
        """Return for each rank and engine the cores of its GPU's NUMA node, so that copies stay on one socket.

        Processes of one NUMA node share its cores.  A process may use all cores where the node is not known, where it
        has none of `there`, or where its GPUs are not all known.

        Args:
            there: the cores that this process may use.
            buses: PCI addresses of the node's GPUs as nvidia-smi writes them, in the order of their use.
        """
        near = [_near(bus, there, sysfs) for bus in buses]
        devices, tp = cfg.trainer.devices, cfg.rollout.tensor_parallel_size
        first = devices if cfg.rollout.own_devices else 0

        def of_gpus(begin: int, end: int) -> list[int]:
            found = near[begin:end]
            return sorted(set().union(*found)) if len(found) == end - begin and all(found) else []

        engines = range(cfg.rollout.engines // cfg.trainer.num_nodes)
        return cls(
            [of_gpus(k, k + 1) for k in range(devices)],
            [of_gpus(first + k * tp, first + (k + 1) * tp) for k in engines],
        )


def _near(bus: str, there: Collection[int], sysfs: Path) -> set[int]:
    """Return the usable cores of a GPU's NUMA node; empty where the machine does not say."""
    domain, _, rest = bus.strip().lower().partition(":")
    try:
        device = sysfs / "bus" / "pci" / "devices" / f"{int(domain, 16):04x}:{rest}"
        node = int((device / "numa_node").read_text())
        cores = (sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text()
        return _listed(cores) & set(there)
    except (OSError, ValueError):  # also of node -1: a machine with one
        return set()


def _listed(text: str) -> set[int]:
    """Return the numbers of a kernel's list, such as 0-3,8-11."""
    found: set[int] = set()
    for part in text.strip().split(","):
        begin, _, end = part.partition("-")
        found |= set(range(int(begin), int(end or begin) + 1))
    return found
