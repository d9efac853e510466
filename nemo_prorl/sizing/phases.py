"""The allocations on a GPU in each phase of a step.  The plan adds them up, and tests hold the trainer to them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_prorl.sizing.memory import Memory

ASLEEP, LOADING, AWAKE = "asleep", "loading", "awake"  # of the engines
SAVING, RESETTING = "awake and saving", "awake and resetting"  # the trainer, while the engines are awake
PHASES = (ASLEEP, LOADING, AWAKE, SAVING, RESETTING)
# Bytes that the trainer may take at most while engines are awake, beside its weights, gradients and optimizer: engines
# take nearly all of the rest for their KV cache.
MOST_BESIDE_ENGINES = 5 * 10**8


@dataclass(frozen=True)
class Allocation:
    """Bytes on the fullest GPU, and the phases in which they are there."""

    name: str
    bytes: int
    phases: tuple[str, ...]


def allocations(m: "Memory") -> list[Allocation]:
    """Return all allocations.  If engines have separate GPUs, the trainer's GPU has the phase `ASLEEP` only.

    The KV cache is as configured, otherwise one full sequence.  Engines that never sleep are there in all phases.
    """
    trainer = (ASLEEP,) if m.engines_apart else PHASES
    engine = PHASES[1:] if m.engines_sleep or m.engines_apart else PHASES
    cache = tuple(phase for phase in engine if phase != LOADING)
    pieces = () if m.engines_apart else (SAVING, RESETTING)
    parts = [
        Allocation("weights", m.weights, trainer),
        Allocation("gradients", m.gradients, trainer),
        Allocation("optimizer", m.optimizer, trainer),
        Allocation("trainer's work", m.trainer_peak - m.trainer_resident, (ASLEEP,)),
        Allocation("pieces of whole weights", m.gathered, pieces),
        Allocation("engine's weights", m.engine_weights, engine),
        Allocation("engine's work", m.engine_work, engine),
        Allocation("KV cache", m.kv_planned, cache),
        Allocation("reserve", m.reserve, PHASES),
    ]
    return [allocation for allocation in parts if allocation.bytes and allocation.phases]


def phase_bytes(m: "Memory") -> dict[str, int]:
    """Return the sum of the allocations of each phase."""
    every = allocations(m)
    return {phase: sum(a.bytes for a in every if phase in a.phases) for phase in PHASES}
