"""The stream of prompts that a rollout draws from: the data blend, rendered to token ids."""

from dataclasses import dataclass
from typing import Any

from nemo_prorl.data.blend import Blend
from nemo_prorl.data.render import PromptRenderer


@dataclass(frozen=True)
class Visit:
    """One draw of a prompt record; `visit` counts the earlier ones of the same record."""

    record: dict[str, Any]
    prompt_ids: list[int]
    visit: int


class PromptStream:
    """Endless, in an order that a checkpoint continues exactly."""

    def __init__(self, blend: Blend, renderer: PromptRenderer) -> None:
        self._blend, self._renderer = blend, renderer

    def next(self) -> Visit:
        record, visit = self._blend.next()
        return Visit(record, self._renderer.prompt_ids(record), visit)

    def state_dict(self) -> dict[str, Any]:
        return self._blend.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._blend.load_state_dict(state)
