"""The stream of prompts that a rollout draws from: the data blend, rendered to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_prorl.data.blend import Blend, BlendState
from nemo_prorl.data.render import PromptRenderer


@dataclass(frozen=True)
class PromptDraw:
    """One draw of a prompt record; `visit` counts the earlier ones of the same record."""

    record: dict[str, Any]
    prompt_ids: list[int]
    visit: int


class PromptStream:
    """Endless, in an order that a checkpoint continues exactly."""

    def __init__(self, blend: Blend, renderer: PromptRenderer) -> None:
        self._blend, self._renderer = blend, renderer

    def next(self) -> PromptDraw:
        record, visit = self._blend.next()
        return PromptDraw(record, self._renderer.prompt_ids(record), visit)

    def position(self) -> list[tuple[int, int]]:
        """Where the stream stands, for `return_to`."""
        return self._blend.position()

    def return_to(self, position: list[tuple[int, int]]) -> None:
        """What was drawn since counts as not drawn."""
        self._blend.return_to(position)

    @property
    def retired(self) -> int:
        return self._blend.retired

    def observe(self, outcomes: Sequence[tuple[str, str]]) -> int:
        """Takes what became of the groups of a step; how many prompts are retired now (`data.retire_after`)."""
        return self._blend.observe(outcomes)

    def carry(self, state: BlendState) -> None:
        """Goes on in the data where the stage before, whose state this is, stood."""
        self._blend.carry(state)

    def state_dict(self) -> BlendState:
        return self._blend.state_dict()

    def load_state_dict(self, state: BlendState) -> None:
        self._blend.load_state_dict(state)
