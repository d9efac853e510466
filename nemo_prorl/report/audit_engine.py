"""The engine's side of `prorl audit`: an engine of the run computes the log-probabilities of recorded tokens again.

The engine is started, gets its weights and is ended as in a run.  It is given the tokens, so it decodes nothing
(`forced` of POST /generate).  With several versions of the weights one sees which of them made a response.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_prorl.data.hf_config import takes_part
from nemo_prorl.deadlines import Deadline
from nemo_prorl.evaluation.run import stoppable
from nemo_prorl.evaluation.services import Services
from nemo_prorl.launcher.one_node import locked
from nemo_prorl.lifecycle.base_model import base_folder
from nemo_prorl.lifecycle.run_records import Journal
from nemo_prorl.policy.weights import HFFolder
from nemo_prorl.replay_training import OLDER, POLICY
from nemo_prorl.report.step_groups import StoredStep
from nemo_prorl.rollout.endpoints import SamplingParams
from nemo_prorl.rollout.engines import EnginePool
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
from nemo_prorl.service import read_token

if TYPE_CHECKING:
    from nemo_prorl.rollout.groups import Group


def engine_logprobs(cfg: Any, stored: StoredStep, folder: Path, numbers: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return float64 log-probabilities of the tokens of some responses, by the step after which the weights were made.

    The first are those of the weights that the step begins with; then come, if they are there, those of the step before
    and those that the run began with.  The engine has ended when this returns or raises.

    Args:
        cfg: of the audit's folder.
        folder: of the audit, where the trainer has written the weights.
        numbers: of the responses, among all of the step.

    Raises:
        ProrlError, OSError: the engine cannot be started, does not answer in time, or refuses the weights.
    """
    store = WeightStore(weights_folder(folder), cfg.rollout.dtype)
    try:
        with locked(folder):
            responses = [stored.responses[number] for number in numbers]
            work = _asked(cfg, folder, store, _versions(cfg, stored, folder), responses)
            return asyncio.run(stoppable(work, "nothing was changed"))
    finally:
        store.remove()


def _versions(cfg: Any, stored: StoredStep, folder: Path) -> dict[int, Path]:
    """Return the model folders of the weights to try, by version."""
    folders = {stored.step - 1: folder / POLICY}
    if (folder / OLDER).is_dir():
        folders[stored.step - 2] = folder / OLDER
    begun = next((event for event in Journal(stored.run_dir).events() if event["event"] == "start"), {})
    if not begun.get("start_from"):
        folders.setdefault(0, base_folder(cfg, folder))
    return folders


async def _asked(
    cfg: Any, folder: Path, store: WeightStore, versions: Mapping[int, Path], responses: "Sequence[tuple[Group, int]]"
) -> dict[int, list[Tensor]]:
    async with Services(cfg, folder, tasks=[], engines=1, weights=store.folder) as services:
        pool = EnginePool(services.endpoints, read_token(services.token_file))

        async def one(group: "Group", k: int, version: int) -> Tensor:
            tokens = tuple(group.responses[k].token_ids)
            sampling = SamplingParams(cfg.trainer.grpo.temperature, forced=tokens)
            awaited = f"the engine's log-probabilities of draw {group.draw_index} (trainer.deadlines.rollout_s)"
            deadline = Deadline(cfg.trainer.deadlines.rollout_s, awaited)
            [response] = await pool.generate(group.prompt_ids, [0], sampling, deadline, version=version)
            return torch.tensor(response.logprobs, dtype=torch.float64)

        async def every() -> dict[int, list[Tensor]]:
            await services.ready()
            logprobs = {}
            for version, model in versions.items():
                weights = HFFolder(model)
                used = ((name, tensor) for name, tensor in weights.tensors() if takes_part(name, weights.config))
                path = store.write(used, version)
                awaited = f"the engine to load {model} (trainer.deadlines.publish_s)"
                await pool.publish(path, version, Deadline(cfg.trainer.deadlines.publish_s, awaited))
                logprobs[version] = list(await asyncio.gather(*(one(group, k, version) for group, k in responses)))
            return logprobs

        try:
            return await services.watching(every())
        finally:
            await pool.close()
