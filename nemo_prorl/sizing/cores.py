"""Assignment of CPU cores to the trainer ranks and engines of a node.

On a CPU with rollout.own_devices, ranks and engines get separate cores.  With GPUs, each process gets the cores of the
NUMA node that its GPU belongs to.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from nemo_prorl.errors import UnfitMachine
from nemo_prorl.sizing.memory import is_small


def engine_threads(cfg: DictConfig, available: int) -> int:
    """Return the threads of each rank of a CPU engine: rollout.threads, or a number derived from cores and model size.

    Engines and trainer take turns, so the engines share all cores.  With rollout.own_devices they work at the same
    time, and the engines share half of the cores.

    Args:
        available: number of cores of the node.
    """
    if cfg.rollout.threads is not None:
        return int(cfg.rollout.threads)
    if cfg.trainer.accelerator != "cpu" or is_small(cfg):  # one thread is faster for 1 million parameters
        return 1
    ranks = cfg.rollout.engines // cfg.trainer.num_nodes * cfg.rollout.tensor_parallel_size
    return max(1, available // (2 if cfg.rollout.own_devices else 1) // ranks)


@dataclass(frozen=True)
class Cores:
    """The cores of each rank and of each engine of a node.  An empty list means all cores."""

    ranks: list[list[int]]
    engines: list[list[int]]

    @classmethod
    def of(cls, cfg: DictConfig, available: Collection[int]) -> "Cores | None":
        """Return separate cores for engines and trainer ranks on a CPU (rollout.own_devices).

        Engines get the last cores, `engine_threads` for each rank of an engine.  The other cores are divided among the
        trainer ranks; if there are fewer cores than ranks, each rank may use all of them.

        Args:
            available: cores that this process may use.

        Returns:
            The cores; None if the run uses GPUs, or if engines and trainer share devices.

        Raises:
            UnfitMachine: no core is left for the trainer.
        """
        if not cfg.rollout.own_devices or cfg.trainer.accelerator != "cpu":
            return None
        threads = engine_threads(cfg, len(available)) * cfg.rollout.tensor_parallel_size
        devices = cfg.trainer.devices
        engines = cfg.rollout.engines // cfg.trainer.num_nodes
        cores, left = sorted(available), len(available) - engines * threads
        if left < 1:
            raise UnfitMachine(
                f"rollout.own_devices=true: {engines} engines take {threads} cores each (rollout.threads); of"
                f" {len(available)} cores none is left for the trainer. Fix: set rollout.own_devices=false to share"
                " cores, or lower rollout.threads"
            )
        each = left // devices
        ranks = [cores[k * each : (k + 1) * each] or cores[:left] for k in range(devices)]
        return cls(ranks, [cores[left + k * threads : left + (k + 1) * threads] for k in range(engines)])

    @classmethod
    def near_gpus(
        cls, cfg: DictConfig, available: Collection[int], buses: Sequence[str], sysfs: Path = Path("/sys")
    ) -> "Cores":
        """Return for each rank and engine the cores of its GPUs' NUMA nodes, so that copies stay on one socket.

        Processes of one NUMA node share its cores.  A process may use all cores if its GPUs or their NUMA nodes are not
        all known, or if a NUMA node has no available core.

        Args:
            available: cores that this process may use.
            buses: PCI addresses of the node's GPUs as nvidia-smi writes them, in the order in which CUDA numbers the
                GPUs: trainer ranks use the first GPUs, engines with separate GPUs the following.
        """
        near = [_near(bus, available, sysfs) for bus in buses]
        devices, tp = cfg.trainer.devices, cfg.rollout.tensor_parallel_size
        first = devices if cfg.rollout.own_devices else 0

        def of_gpus(begin: int, end: int) -> list[int]:
            cores = near[begin:end]
            return sorted(set().union(*cores)) if len(cores) == end - begin and all(cores) else []

        engines = range(cfg.rollout.engines // cfg.trainer.num_nodes)
        return cls(
            [of_gpus(k, k + 1) for k in range(devices)],
            [of_gpus(first + k * tp, first + (k + 1) * tp) for k in engines],
        )


def _near(bus: str, available: Collection[int], sysfs: Path) -> set[int]:
    """Return the available cores of a GPU's NUMA node; empty if the NUMA node is not known."""
    domain, _, rest = bus.strip().lower().partition(":")
    try:
        device = sysfs / "bus" / "pci" / "devices" / f"{int(domain, 16):04x}:{rest}"
        node = int((device / "numa_node").read_text())
        cores = (sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text()
        return _listed(cores) & set(available)
    except (OSError, ValueError):  # also for node -1: a machine with one NUMA node
        return set()


def _listed(text: str) -> set[int]:
    """Return the numbers in a list as the kernel writes it, such as 0-3,8-11."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        begin, _, end = part.partition("-")
        numbers |= set(range(int(begin), int(end or begin) + 1))
    return numbers
