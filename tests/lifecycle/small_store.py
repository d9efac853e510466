"""Checkpoints of `small_run`: the weights of its policy and state.json, in the folders of a real run."""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_prorl.lifecycle.retention import FORMAT, put_in_place, read_state

if TYPE_CHECKING:
    from tests.lifecycle.small_run import SmallPolicy


class SmallStore:
    """Writes and loads checkpoints of a `SmallPolicy`, as `policy.checkpoint_files.CheckpointFiles` those of an actor.

    With `background` it is as slow as that may be: nothing is on disk until somebody waits for it.
    """

    def __init__(self, policy: "SmallPolicy", background: bool = False) -> None:
        self.policy, self.background = policy, background
        self.written: list[int] = []  # step of each checkpoint
        self._open: Callable[[], None] = lambda: None

    def save(
        self,
        folder: Path,
        state: dict[str, Any],
        on_complete: Callable[[], object] | None = None,
        files: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        self.wait()
        hashes = {"weights_sha256": self.policy.weights_sha256(), "reference_sha256": self.policy.reference_sha256()}
        text = json.dumps({"format": FORMAT, **hashes, **state})
        self._open = partial(self._write, folder, self.policy.state(), text, files or {}, on_complete)
        if not self.background:
            self.wait()

    def _write(
        self,
        folder: Path,
        policy: dict[str, Any],
        text: str,
        files: Mapping[str, Callable[[], bytes]],
        on_complete: Callable[[], object] | None,
    ) -> None:
        temporary = folder.with_name(folder.name + ".tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        torch.save(policy, temporary / "policy.pt")
        hashes = {}
        for name, content in files.items():
            (temporary / name).write_bytes(data := content())
            hashes[name] = hashlib.sha256(data).hexdigest()
        (temporary / "state.json").write_text(json.dumps({**json.loads(text), "files": hashes}))
        put_in_place(temporary, folder)
        self.written.append(int(folder.name.removeprefix("step-")))
        if on_complete is not None:
            on_complete()

    def wait(self) -> None:
        work, self._open = self._open, lambda: None
        work()

    def drain(self, seconds: float) -> None:
        if seconds > 0:
            self.wait()

    def load(self, folder: Path) -> dict[str, Any]:
        self.policy.load(torch.load(folder / "policy.pt"))
        return read_state(folder)

    def load_policy(self, folder: Path) -> dict[str, Any]:
        self.policy.load(torch.load(folder / "policy.pt"), reference=False)
        return read_state(folder)
