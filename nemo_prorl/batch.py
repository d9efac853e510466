"""Batches of responses for the trainer: right-padded tokens, and per-token values aligned with them.

Shape suffixes: B responses, T token positions of the padded sequence (prompt first, then response, then padding),
G groups, N responses per group.  A per-token value at position t belongs to the token at t, and is 0 outside the
response.
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
    """Responses without padding, in the form in which rank 0 sends them to the other ranks.

    Suffixes here: B rows (a row is a prompt and its response), N tokens of all rows, M response tokens of all rows.
    """

    token_N: NDArray[np.int32]  # prompt and response of each row, row after row
    logp_M: NDArray[np.float32]  # the engine's log-probabilities of the response tokens, row after row
    prompt_B: NDArray[np.int64]  # number of tokens of each prompt
    response_B: NDArray[np.int64]  # number of tokens of each response
    valid_B: NDArray[np.bool_]  # false for a response that is not trained on

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
        """Return the number of tokens of prompt and response together."""
        length_B: NDArray[np.int64] = self.prompt_B + self.response_B
        return length_B

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, in this order."""
        tokens = np.split(self.token_N, np.cumsum(self.length_B))
        logps = np.split(self.logp_M, np.cumsum(self.response_B))
        return Rows(
            np.concatenate([self.token_N[:0], *(tokens[b] for b in numbers)]),
            np.concatenate([self.logp_M[:0], *(logps[b] for b in numbers)]),
            self.prompt_B[list(numbers)],
            self.response_B[list(numbers)],
            self.valid_B[list(numbers)],
        )

    def of_responses(self, value_BT: Tensor) -> list[Tensor]:
        """Return the values of each row's response tokens, from values [B, T] of the padded rows."""
        bounds = zip(value_BT, self.prompt_B.tolist(), self.length_B.tolist(), strict=True)
        return [value_T[begin:end].clone() for value_T, begin, end in bounds]

    def batch(self, width: int) -> "Batch":
        """Return the rows padded to `width` positions, which must be at least the longest row's length.

        Advantages, old and reference log-probabilities are 0, and each row is a group of its own, until
        `Batch.with_targets` sets them.
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
            group_tokens_B=mask_BT.sum(dim=1),
        )


@dataclass(frozen=True)
class Batch:
    """Responses to train on.  Log-probabilities are float32, and 0 where the mask is false."""

    tokens_BT: Tensor  # int64
    mask_BT: Tensor  # bool, true at response tokens to train on
    length_B: Tensor  # int64, number of tokens of prompt and response together
    engine_logp_BT: Tensor  # the engine's log-probabilities of the response tokens
    old_logp_BT: Tensor  # the trainer's log-probabilities with the weights before the step's updates
    ref_logp_BT: Tensor  # the reference policy's log-probabilities
    weight_BT: Tensor  # float32, weight of each token in the loss, from `algorithms.correction`
    advantage_B: Tensor  # float32
    group_tokens_B: Tensor  # int64, response tokens to train on in the whole group of each response

    @classmethod
    def from_sequences(
        cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]
    ) -> "Batch":
        """Return a batch of token lists, padded to the longest row."""
        rows = Rows.of(prompts, responses, logps, [True] * len(prompts))
        return rows.batch(max(rows.length_B.tolist(), default=1))

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def num_response_tokens(self) -> int:
        return int(self.mask_BT.sum())

    def with_targets(self, **values: Tensor) -> "Batch":
        """Return a copy with some tensors replaced, for example `advantage_B`."""
        return replace(self, **values)

    def rows(self, index: Tensor | slice) -> "Batch":
        """Return the responses at `index`, in that order, with the same padded width."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def padded_to(self, rows: int, length: int) -> "Batch":
        """Return a batch of at least `rows` rows and exactly `length` positions.

        Added rows are masked everywhere and have length 1, so they do not change loss or metrics.
        """
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
        """Return pairs of row numbers and micro-batch, split by `split_rows`, each padded to its longest sequence.

        An empty micro-batch contains one row that is masked everywhere.
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
    """The groups of a step: rewards and lengths of all responses, but tokens only of this data rank's responses.

    B counts the responses of all groups, group after group: B = G * N.
    """

    rows: Rows  # tokens of this data rank's responses (`dealt`); on rank 0, before that, of all responses
    length_B: Tensor  # int64, number of tokens of prompt and response together
    reward_GN: Tensor  # float64, raw rewards
    valid_GN: Tensor  # bool, false where an infrastructure failure left a response without a verdict
    ended_GN: Tensor  # bool, true where the response ended with eos
    length_GN: Tensor  # int64, number of tokens of the response
    version_B: Tensor  # int64, version of the weights that made the response
    tasks: tuple[str, ...]  # sorted names
    task_B: Tensor  # int64, index into `tasks`
    draws: tuple[int, ...]  # draw number of each group

    @classmethod
    def of(cls, groups: Sequence[Any]) -> "JudgedGroups":
        """Build from `rollout.groups.Group` objects, which all have the same number of responses."""
        responses = [r for g in groups for r in g.responses]
        prompts = [g.prompt_ids for g in groups for _ in g.responses]
        valid = [valid for g in groups for valid in g.valid]
        rows = Rows.of(prompts, [r.token_ids for r in responses], [r.logprobs for r in responses], valid)
        shape = (len(groups), len(groups[0].responses) if groups else 0)
        tasks = tuple(sorted({g.task for g in groups}))
        return cls(
            rows=rows,
            length_B=torch.from_numpy(rows.length_B),
            reward_GN=torch.tensor([g.scores for g in groups], dtype=torch.float64).reshape(shape),
            valid_GN=torch.tensor(valid, dtype=torch.bool).reshape(shape),
            ended_GN=torch.tensor([g.finished for g in groups], dtype=torch.bool).reshape(shape),
            length_GN=torch.from_numpy(rows.response_B).reshape(shape),
            version_B=torch.tensor([g.version for g in groups for _ in g.responses], dtype=torch.int64),
            tasks=tasks,
            task_B=torch.tensor([tasks.index(g.task) for g in groups for _ in g.responses], dtype=torch.int64),
            draws=tuple(g.draw_index for g in groups),
        )

    def dealt(self, parts: Sequence[Sequence[int]]) -> "list[JudgedGroups]":
        """Return one copy per data rank, with the tokens of that rank's rows only.

        Args:
            parts: row numbers of each data rank.
        """
        return [replace(self, rows=self.rows.take(part)) for part in parts]

    def for_ranks(self, updates: int, size: int) -> "list[JudgedGroups]":
        """Return one copy per data rank, with the tokens that it trains on (`rows_of_updates`, with its arguments)."""
        return self.dealt([torch.cat(rows).tolist() for rows in self.rows_of_updates(updates, size)])

    def batch(self) -> Batch:
        """Return the rows whose tokens are present, padded to the longest row of all groups."""
        return self.rows.batch(int(self.length_B.max()) if len(self.length_B) else 1)

    def valid_by_task(self) -> dict[str, Tensor]:
        """Return for each task a bool [G, N] mask of its responses that have a reward."""
        task_GN = self.task_B.reshape(self.valid_GN.shape)
        return {task: self.valid_GN & (task_GN == index) for index, task in enumerate(self.tasks)}

    def group_tokens_B(self) -> Tensor:
        """Return for each response the number of tokens to train on in its group: int64."""
        tokens_G = (self.length_GN * self.valid_GN).sum(dim=1)
        return tokens_G[:, None].expand_as(self.length_GN).reshape(-1)

    def longest_GN(self, context_tokens: int, max_response_tokens: int | None) -> Tensor:
        """Return the maximum number of tokens of each response: int64 [G, N], at least 1."""
        prompt_GN = self.length_B.reshape(self.length_GN.shape) - self.length_GN
        return (context_tokens - prompt_GN).clamp(1, max_response_tokens)

    def rows_of_updates(self, updates: int, size: int) -> list[list[Tensor]]:
        """Return the row numbers of each data rank in each mini-batch, as result[data rank][mini-batch].

        A mini-batch is an equal share of the groups, in draw order.  Its rows are distributed so that all data ranks
        have about the same number of tokens.

        Args:
            updates: mini-batches of the step; fewer if the step has fewer groups.
            size: number of data ranks.
        """
        groups, samples = self.valid_GN.shape
        updates = max(1, min(updates, groups))
        bounds = [groups * k // updates * samples for k in range(updates + 1)]
        length_B = self.length_B.tolist()
        dealt = [(low, deal(length_B[low:high], size)) for low, high in pairwise(bounds)]
        return [[low + torch.tensor(parts[rank], dtype=torch.int64) for low, parts in dealt] for rank in range(size)]
