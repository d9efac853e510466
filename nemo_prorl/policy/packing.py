"""Sequences of a micro-batch one after another instead of side by side: no position is padding.

Megatron's "thd" layout: attention is told where sequences begin, all other layers work on tokens alone.  Suffixes: B
sequences, T positions of a padded one, N tokens of all, with what makes their number a multiple.
"""

import functools
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_prorl.batch import Batch

_SIMILAR = 1.25  # the longest sequence of a group by its shortest, at most


@dataclass(frozen=True)
class Group:
    """Neighbours of similar lengths, which attention on a CPU takes together: tokens start to stop."""

    start: int
    stop: int
    rows: int
    width: int
    places: Tensor | None  # int64, of each token among the rows * width padded ones; None: there is no padding


class Packed(PackedSeqParams):
    """Where sequences of the given lengths begin, for Megatron, Transformer Engine and our attention on CPUs."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        longest = max(lengths)
        super().__init__("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        self.lengths = lengths

    @functools.cached_property
    def groups(self) -> list[Group]:
        """In the order of tokens."""
        cuts = [0]
        for row, length in enumerate(self.lengths):
            if not self.lengths[cuts[-1]] <= length <= _SIMILAR * self.lengths[cuts[-1]]:
                cuts.append(row)
        groups, start = [], 0
        for first, end in zip(cuts, [*cuts[1:], len(self.lengths)], strict=True):
            own = self.lengths[first:end]
            groups.append(Group(start, start + sum(own), len(own), max(own), _places(own)))
            start += sum(own)
        return groups


def _places(lengths: list[int]) -> Tensor | None:
    width = max(lengths)
    if min(lengths) == width:
        return None
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).flatten().nonzero().squeeze(1)


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch whose sequences stand one after another, and what Megatron wants to know of them."""

    tokens_1N: Tensor
    position_1N: Tensor
    predicts_N: Tensor  # bool, true where the next token is a response's
    params: Packed

    @classmethod
    def of(cls, micro: Batch, multiple_of: int) -> "PackedBatch":
        """A last sequence of zeros makes the number of tokens a multiple of `multiple_of`."""
        length_B = micro.length_B.clamp(min=1)
        position_T = torch.arange(micro.tokens_BT.shape[1], device=micro.tokens_BT.device)
        is_token_BT = position_T < length_B[:, None]
        lengths = length_B.tolist()
        extra = -sum(lengths) % multiple_of
        predicts_BT = torch.nn.functional.pad(micro.mask_BT[:, 1:], (0, 1))
        tokens_N, predicts_N = micro.tokens_BT[is_token_BT], predicts_BT[is_token_BT]
        position_N = position_T.expand_as(is_token_BT)[is_token_BT]
        if extra:
            lengths.append(extra)
            tokens_N, predicts_N = (torch.nn.functional.pad(values, (0, extra)) for values in (tokens_N, predicts_N))
            position_N = torch.cat([position_N, torch.arange(extra, device=position_N.device)])
        return cls(tokens_N[None], position_N[None], predicts_N, Packed(lengths, micro.tokens_BT.device))
