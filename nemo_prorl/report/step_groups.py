"""The groups of a stored step, with verdicts and advantages, for pages of tokens (`report.tokens`)."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from nemo_prorl import settings
from nemo_prorl.batch import JudgedGroups
from nemo_prorl.data.model_folder import tokenizer_fault
from nemo_prorl.errors import ConfigError
from nemo_prorl.lifecycle.base_model import initial_model
from nemo_prorl.lifecycle.batches import read_batch, read_trainer_logprobs
from nemo_prorl.metrics import Metrics
from nemo_prorl.report.tokens import ShownGroup, ShownResponse, write_page
from nemo_prorl.rollout.groups import Group
from nemo_prorl.trainer import advantages

_log = logging.getLogger(__name__)

_PAGE_TOKENS = 200_000  # of a page, which then has about 20 MB

Logprobs = Mapping[str, Sequence[float]]  # of a response's tokens, by whose they are


class StoredStep:
    """The groups that a step of a run trained on.  The numbers of responses count those of all groups."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Read the groups.  Raises ConfigError: no run; DataError: the step's batch was not kept."""
        if not (run_dir / "config.yaml").is_file():
            raise ConfigError(f"{run_dir} is not a run directory: it has no config.yaml")
        self.run_dir, self.step = run_dir, step
        self.cfg: Any = OmegaConf.to_object(settings.read_config(run_dir / "config.yaml"))
        self.groups = read_batch(run_dir, step)
        self.responses = [(group, k) for group in self.groups for k in range(len(group.responses))]

    @cached_property
    def advantage_B(self) -> Tensor:
        """Return the advantages of all responses, as the step computed them."""
        judged = JudgedGroups.of(self.groups)
        return advantages(judged, self.cfg.trainer.grpo, Metrics(self.step, self.cfg.stage))

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        folder = initial_model(self.cfg, self.run_dir)
        if fault := tokenizer_fault(folder):
            raise ConfigError(fault)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @property
    def title(self) -> str:
        return f"{self.run_dir.name}, step {self.step}"

    def logprobs(self) -> list[Logprobs]:
        """Return the engine's log-probabilities of each response, and the trainer's where the run has stored them."""
        trainer = read_trainer_logprobs(self.run_dir, self.step, self.groups)
        logprobs: list[Logprobs] = []
        for number, (group, k) in enumerate(self.responses):
            known = {"engine": group.responses[k].logprobs}
            if trainer is not None and group.valid[k]:
                known["trainer"] = trainer[number]
            logprobs.append(known)
        return logprobs

    def shown(self, logprobs: Mapping[int, Logprobs]) -> list[ShownGroup]:
        """Return the responses with these numbers, in their groups, with these log-probabilities."""
        responses: dict[int, list[ShownResponse]] = {}
        for number, known in sorted(logprobs.items()):
            group, _ = self.responses[number]
            responses.setdefault(group.draw_index, []).append(self._response(number, known))
        return [
            ShownGroup(
                draw,
                f"draw {draw}, {group.task} {group.prompt_id}: mean score {group.mean_reward:.3g}",
                self._tokenizer.decode(group.prompt_ids),
                responses[draw],
            )
            for group in self.groups
            if (draw := group.draw_index) in responses
        ]

    def _response(self, number: int, logprobs: Logprobs) -> ShownResponse:
        group, k = self.responses[number]
        response, verdict = group.responses[k], group.verdicts[k]
        heading = f"response {k}: score {verdict['score']}, advantage {float(self.advantage_B[number]):.4g}"
        if gap := gap_text(logprobs):
            heading += f", engine and trainer differ by {gap} nats per token"
        heading += "" if response.finished else ", cut off"
        tokens = [self._tokenizer.decode([token]) for token in response.token_ids]
        return ShownResponse(heading, verdict["detail"], tokens, logprobs)


def gap_text(logprobs: Logprobs) -> str:
    """Return the mean difference between engine and trainer per token; "" if the trainer's are unknown."""
    if "trainer" not in logprobs or not logprobs["engine"]:
        return ""
    pairs = zip(logprobs["engine"], logprobs["trainer"], strict=True)
    return f"{statistics.fmean(abs(a - b) for a, b in pairs):.3g}"


def _first(groups: Sequence[Group], most: int) -> set[int]:
    """Return the draws of the first groups that fit into a page, with at most `most` responses (-1: no limit)."""
    draws: set[int] = set()
    responses = tokens = 0
    for group in groups:
        responses += len(group.responses)
        tokens += sum(len(response.token_ids) for response in group.responses)
        if (draws and tokens > _PAGE_TOKENS) or 0 <= most < responses:
            break
        draws.add(group.draw_index)
    return draws


def _row(group: Group, logprobs: Sequence[Logprobs]) -> tuple[str, ...]:
    """Return a group's row of the page's table."""
    scores = ("-" if verdict["score"] is None else f"{verdict['score']:.3g}" for verdict in group.verdicts)
    gap = max((float(gap) for known in logprobs if (gap := gap_text(known))), default=None)
    return str(group.draw_index), group.task, group.prompt_id, ", ".join(scores), "-" if gap is None else f"{gap:.3g}"


def write_step(out: Path, run_dir: Path, step: int, draws: Sequence[int], most: int) -> None:
    """Write the page of a stored step's groups.

    Args:
        out: file to write.
        draws: numbers of the draws to show; empty: the first groups.
        most: maximum number of responses; -1: all that fit.

    Raises ConfigError: no run, or a draw that the step does not have; DataError: the batch was not kept.
    """
    stored = StoredStep(run_dir, step)
    there = [group.draw_index for group in stored.groups]
    if missing := sorted(set(draws) - set(there)):
        raise ConfigError(f"--draw {missing[0]}: expected draws of step {step}: {', '.join(map(str, there))}")
    chosen = set(draws) or _first(stored.groups, most)
    logprobs = stored.logprobs()
    of_group = {group.draw_index: list[Logprobs]() for group in stored.groups}
    for (group, _), known in zip(stored.responses, logprobs, strict=True):
        of_group[group.draw_index].append(known)
    above: list[tuple[str, ...]] = [("draw", "task", "prompt", "scores", "largest mean |engine - trainer|")]
    above += [_row(group, of_group[group.draw_index]) for group in stored.groups]
    wanted = {n: logprobs[n] for n, (group, _) in enumerate(stored.responses) if group.draw_index in chosen}
    shown = stored.shown(wanted)
    if left := len(there) - len(shown):
        text = "%d of %d groups are not on the page; show others with --draw D, from the page's table"
        _log.info(text, left, len(there))
    write_page(out, stored.title, shown, above)
