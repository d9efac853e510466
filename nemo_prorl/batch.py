"""A batch of responses as the trainer holds it: right-padded tokens, and per-token values aligned with them.

Shape suffixes: B responses, T token positions of the padded sequence (prompt first, then response, then padding).
A per-token value at position t belongs to the token at t; it is 0 outside the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nemo_prorl.micro_batches import Limits, deal, split_rows


@dataclass(frozen=True)
class Batch:
    """Responses to train on.

    tokens_BT: int64.  mask_BT: bool, true at response tokens.  Log-probabilities and weights: float32, 0 where masked.
    advantage_B: float32.  length_B: int64, tokens of prompt and response.
    """

    tokens_BT: Tensor
    mask_BT: Tensor
    length_B: Tensor
    engine_logp_BT: Tensor
    old_logp_BT: Tensor
    ref_logp_BT: Tensor
    weight_BT: Tensor
    advantage_B: Tensor

    @classmethod
    def from_sequences(
        cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]
    ) -> "Batch":
        """Pads token lists; the targets (advantages, old and reference log-probabilities) are zeros until set."""
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        shape = (len(lengths), max(lengths, default=1))
        tokens_BT, mask_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        engine_logp_BT = torch.zeros(shape)
        for b, (prompt, response, logp) in enumerate(zip(prompts, responses, logps, strict=True)):
            tokens_BT[b, : lengths[b]] = torch.tensor([*prompt, *response], dtype=torch.int64)
            mask_BT[b, len(prompt) : lengths[b]] = True
            engine_logp_BT[b, len(prompt) : lengths[b]] = torch.tensor(logp, dtype=torch.float32)
        zeros_BT = torch.zeros(shape)
        return cls(
            tokens_BT,
            mask_BT,
            torch.tensor(lengths, dtype=torch.int64),
            engine_logp_BT,
            old_logp_BT=zeros_BT,
            ref_logp_BT=zeros_BT,
            weight_BT=torch.ones(shape),
            advantage_B=torch.zeros(shape[0]),
        )

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def num_response_tokens(self) -> int:
        return int(self.mask_BT.sum())

    def with_targets(self, **values: Tensor) -> "Batch":
        """The same responses with some of their values set."""
        return replace(self, **values)

    def rows(self, index: Tensor | slice) -> "Batch":
        """Some of the responses, in the order of `index`, with the padding as it is."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def padded_to(self, rows: int, length: int) -> "Batch":
        """At least `rows` rows and exactly `length` positions; rows added count nowhere (all masked, length 1)."""
        missing = max(0, rows - len(self))
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value.ndim == 2:
                value = torch.nn.functional.pad(value[:, :length], (0, max(0, length - value.shape[1]), 0, missing))
            else:
                value = torch.nn.functional.pad(value, (0, missing), value=1 if f.name == "length_B" else 0)
            values[f.name] = value
        return Batch(**values)

    def micro_batches(self, limits: Limits, at_least: int = 1) -> "list[tuple[Tensor, Batch]]":
        """(row numbers, micro-batch) pairs as `split_rows` says it, each padded to its longest sequence.

        One without rows holds a row that counts nowhere.
        """
        parts = split_rows(self.length_B.tolist(), limits, at_least)
        numbers = [torch.tensor(rows, dtype=torch.int64) for rows in parts]
        longest = [int(self.length_B[rows].max()) if len(rows) else 1 for rows in numbers]
        return [
            (rows, self.rows(rows).padded_to(1, limits.padded(length)))
            for rows, length in zip(numbers, longest, strict=True)
        ]


@dataclass(frozen=True)
class JudgedGroups:
    """All groups of a step, the same on every rank: the rows of their responses, group after group.

    reward_GN: float64, raw rewards.  valid_GN: bool, false where infrastructure failed to judge.  ended_GN: bool,
    the response ended with eos.  length_GN: int64, its tokens.  version_B: int64, of the weights that made each row.
    tasks: names, sorted.  task_B: int64, each row's place in them.
    """

    batch: Batch
    reward_GN: Tensor
    valid_GN: Tensor
    ended_GN: Tensor
    length_GN: Tensor
    version_B: Tensor
    tasks: tuple[str, ...]
    task_B: Tensor

    @classmethod
    def of(cls, groups: Sequence[Any]) -> "JudgedGroups":
        """From groups with task, prompt_ids, responses (token_ids, logprobs), scores, valid, finished and version."""
        rows = [(g.prompt_ids, r.token_ids, r.logprobs) for g in groups for r in g.responses]
        batch = Batch.from_sequences([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
        shape = (len(groups), len(groups[0].responses) if groups else 0)
        valid_GN = torch.tensor([g.valid for g in groups], dtype=torch.bool).reshape(shape)
        tasks = tuple(sorted({g.task for g in groups}))
        return cls(
            batch.with_targets(mask_BT=batch.mask_BT & valid_GN.reshape(-1, 1)),
            torch.tensor([g.scores for g in groups], dtype=torch.float64).reshape(shape),
            valid_GN,
            torch.tensor([g.finished for g in groups], dtype=torch.bool).reshape(shape),
            batch.mask_BT.sum(dim=1).reshape(shape),
            torch.tensor([g.version for g in groups for _ in g.responses], dtype=torch.int64),
            tasks,
            torch.tensor([tasks.index(g.task) for g in groups for _ in g.responses], dtype=torch.int64),
        )

    def valid_by_task(self) -> dict[str, Tensor]:
        """Which responses of each task have a reward, bool [G, N]."""
        task_GN = self.task_B.reshape(self.valid_GN.shape)
        return {task: self.valid_GN & (task_GN == index) for index, task in enumerate(self.tasks)}

    def longest_GN(self, context_tokens: int, max_response_tokens: int | None) -> Tensor:
        """How many tokens each response might have had, int64, at least 1."""
        prompt_GN = self.batch.length_B.reshape(self.length_GN.shape) - self.length_GN
        return (context_tokens - prompt_GN).clamp(1, max_response_tokens)

    def rows_of_updates(self, updates: int, rank: int, size: int) -> list[Tensor]:
        """Row numbers of data rank `rank` of `size` in each mini-batch.

        A mini-batch is an equal share of the groups, in draw order; its rows are dealt out so that ranks have about
        equally many tokens.
        """
        groups, samples = self.valid_GN.shape
        updates = max(1, min(updates, groups))
        bounds = [groups * k // updates * samples for k in range(updates + 1)]
        length_B = self.batch.length_B.tolist()
        return [
            low + torch.tensor(deal(length_B[low:high], size)[rank], dtype=torch.int64)
            for low, high in pairwise(bounds)
        ]
