"""A batch of responses as the trainer holds it: right-padded tokens, and per-token values aligned with them.

Shape suffixes: B responses, T token positions of the padded sequence (prompt first, then response, then padding).
A per-token value at position t belongs to the token at t; it is 0 outside the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_prorl.micro_batches import Limits, deal, split_rows


@dataclass(frozen=True)
class Rows:
    """Responses as they travel between ranks: their tokens one after another, without padding.

    token_N: int32, prompt and response of each row in turn.  logp_M: float32, the engine's log-probabilities of the
    response tokens.  prompt_B, response_B: int64, tokens of each.  valid_B: bool, false where no token is trained on.
    """

    token_N: NDArray[np.int32]
    logp_M: NDArray[np.float32]
    prompt_B: NDArray[np.int64]
    response_B: NDArray[np.int64]
    valid_B: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float]],
        valid: Sequence[bool],
    ) -> "Rows":
        tokens = chain.from_iterable(chain(*pair) for pair in zip(prompts, responses, strict=True))
        return cls(
            np.fromiter(tokens, np.int32),
            np.fromiter(chain.from_iterable(logps), np.float32),
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.array([len(response) for response in responses], np.int64),
            np.array(valid, bool),
        )

    @property
    def length_B(self) -> NDArray[np.int64]:
        """Tokens of prompt and response."""
        length_B: NDArray[np.int64] = self.prompt_B + self.response_B
        return length_B

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Return some of the rows, in this order."""
        tokens = np.split(self.token_N, np.cumsum(self.length_B))
        logps = np.split(self.logp_M, np.cumsum(self.response_B))
        return Rows(
            np.concatenate([self.token_N[:0], *(tokens[b] for b in numbers)]),
            np.concatenate([self.logp_M[:0], *(logps[b] for b in numbers)]),
            self.prompt_B[list(numbers)],
            self.response_B[list(numbers)],
            self.valid_B[list(numbers)],
        )

    def batch(self, width: int) -> "Batch":
        """Return the rows padded to `width` positions, which is at least the longest row's length.

        The targets (advantages, old and reference log-probabilities) are zeros until set.
        """
        shape = (len(self.valid_B), width)
        tokens_BT, mask_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        engine_logp_BT = torch.zeros(shape)
        token_N, logp_M, length_B = (torch.from_numpy(v) for v in (self.token_N, self.logp_M, self.length_B))
        tokens, logps = torch.split(token_N, length_B.tolist()), torch.split(logp_M, self.response_B.tolist())
        for b, (prompt, length) in enumerate(zip(self.prompt_B.tolist(), length_B.tolist(), strict=True)):
            tokens_BT[b, :length] = tokens[b]
            mask_BT[b, prompt:length] = bool(self.valid_B[b])
            engine_logp_BT[b, prompt:length] = logps[b]
        zeros_BT = torch.zeros(shape)
        return Batch(
            tokens_BT,
            mask_BT,
            length_B,
            engine_logp_BT,
            old_logp_BT=zeros_BT,
            ref_logp_BT=zeros_BT,
            weight_BT=torch.ones(shape),
            advantage_B=torch.zeros(shape[0]),
        )


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
        """Pad token lists to the longest; the targets are zeros until set."""
        rows = Rows.of(prompts, responses, logps, [True] * len(prompts))
        return rows.batch(max(rows.length_B.tolist(), default=1))

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
    """Groups of a step: numbers of all their responses, group after group, and the tokens of some.

    rows: tokens of all responses where the groups were collected; elsewhere of those `dealt` to this data rank.
    length_B: int64, tokens of prompt and response.  reward_GN: float64, raw rewards.  valid_GN: bool, false where
    infrastructure failed to judge.  ended_GN: bool, the response ended with eos.  length_GN: int64, its tokens.
    version_B: int64, of the weights that made each response.  tasks: names, sorted.  task_B: int64, each response's
    place in them.  draws: of each group.
    """

    rows: Rows
    length_B: Tensor
    reward_GN: Tensor
    valid_GN: Tensor
    ended_GN: Tensor
    length_GN: Tensor
    version_B: Tensor
    tasks: tuple[str, ...]
    task_B: Tensor
    draws: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Any]) -> "JudgedGroups":
        """Build from groups.

        A group has task, prompt_ids, responses (token_ids, logprobs), scores, valid, finished, version and draw_index.
        """
        responses = [r for g in groups for r in g.responses]
        prompts = [g.prompt_ids for g in groups for _ in g.responses]
        valid = [valid for g in groups for valid in g.valid]
        rows = Rows.of(prompts, [r.token_ids for r in responses], [r.logprobs for r in responses], valid)
        shape = (len(groups), len(groups[0].responses) if groups else 0)
        tasks = tuple(sorted({g.task for g in groups}))
        return cls(
            rows,
            torch.from_numpy(rows.length_B),
            torch.tensor([g.scores for g in groups], dtype=torch.float64).reshape(shape),
            torch.tensor(valid, dtype=torch.bool).reshape(shape),
            torch.tensor([g.finished for g in groups], dtype=torch.bool).reshape(shape),
            torch.from_numpy(rows.response_B).reshape(shape),
            torch.tensor([g.version for g in groups for _ in g.responses], dtype=torch.int64),
            tasks,
            torch.tensor([tasks.index(g.task) for g in groups for _ in g.responses], dtype=torch.int64),
            tuple(g.draw_index for g in groups),
        )

    def dealt(self, parts: Sequence[Sequence[int]]) -> "list[JudgedGroups]":
        """Return one for each part, with the tokens of these rows alone."""
        return [replace(self, rows=self.rows.take(part)) for part in parts]

    def batch(self) -> Batch:
        """Return the rows that are here, padded to the longest response of all groups."""
        return self.rows.batch(int(self.length_B.max()) if len(self.length_B) else 1)

    def valid_by_task(self) -> dict[str, Tensor]:
        """Which responses of each task have a reward, bool [G, N]."""
        task_GN = self.task_B.reshape(self.valid_GN.shape)
        return {task: self.valid_GN & (task_GN == index) for index, task in enumerate(self.tasks)}

    def longest_GN(self, context_tokens: int, max_response_tokens: int | None) -> Tensor:
        """How many tokens each response might have had, int64, at least 1."""
        prompt_GN = self.length_B.reshape(self.length_GN.shape) - self.length_GN
        return (context_tokens - prompt_GN).clamp(1, max_response_tokens)

    def rows_of_updates(self, updates: int, size: int) -> list[list[Tensor]]:
        """Return for each of `size` data ranks the row numbers that it has in each mini-batch.

        A mini-batch is an equal share of the groups, in draw order; its rows are dealt out so that ranks have about
        equally many tokens.
        """
        groups, samples = self.valid_GN.shape
        updates = max(1, min(updates, groups))
        bounds = [groups * k // updates * samples for k in range(updates + 1)]
        length_B = self.length_B.tolist()
        dealt = [(low, deal(length_B[low:high], size)) for low, high in pairwise(bounds)]
        return [[low + torch.tensor(parts[rank], dtype=torch.int64) for low, parts in dealt] for rank in range(size)]
