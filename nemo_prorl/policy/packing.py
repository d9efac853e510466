"""Sequences of a micro-batch one after another instead of side by side: no position is padding.

Megatron's "thd" layout: attention is told where sequences begin, all other layers work on tokens alone.  Where
attention is ours, on CPUs, a prompt stands once, before the first of its responses, and attention alone puts it before
the others, too.  A token's hidden state depends on what is before it alone, so that nothing changes but the order of
sums.

Suffixes: B sequences, T positions of a padded one, N tokens that stand there, with what makes their number a multiple;
R those that our attention works on, P those whose next one is a response's.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from nemo_prorl.batch import Batch

_SIMILAR = 1.25  # the longest sequence of a group by its shortest, at most


class Packed(PackedSeqParams):
    """Where sequences of the given lengths begin, for Megatron and Transformer Engine."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        super().__init__("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


class SharedPrompts(PackedSeqParams):
    """For our attention and our rotary positions, to which Megatron hands `cu_seqlens_q`: here each token's position.

    groups: (rows, width) of neighbours of similar lengths, which attention takes together, padded.
    spread_R: int64, the token at each position of all groups.  keep_N: int64, for each token one of those positions.
    """

    def __init__(
        self, source_BT: Tensor, own_B: Tensor, length_B: Tensor, position_N: Tensor, device: torch.device
    ) -> None:
        """source_BT: where each token of a sequence stands.  own_B: from which position on it stands there itself."""
        lengths = length_B.tolist()
        longest = max(lengths)
        position_N = position_N.to(device)
        super().__init__("thd", position_N, position_N, max_seqlen_q=longest, max_seqlen_kv=longest)
        cuts = [0]
        for row, length in enumerate(lengths):
            if not lengths[cuts[-1]] <= length <= _SIMILAR * lengths[cuts[-1]]:
                cuts.append(row)
        self.groups, spread, keep = [], [], []
        for first, end in pairwise([*cuts, len(lengths)]):
            width = max(lengths[first:end])
            position_T = torch.arange(width)
            is_token = position_T < length_B[first:end, None]
            self.groups.append((end - first, width))
            spread.append(source_BT[first:end, :width].masked_fill(~is_token, 0).flatten())
            keep.append((is_token & (position_T >= own_B[first:end, None])).flatten())
        self.spread_R, keep_N = torch.cat(spread).to(device), torch.cat(keep).nonzero().squeeze(1)
        self.keep_N = pad(keep_N, (0, len(position_N) - len(keep_N))).to(device)  # what fills up gets any token's


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch whose sequences stand one after another, and what Megatron wants to know of them."""

    tokens_1N: Tensor
    position_1N: Tensor
    predicts_P: Tensor  # int64, where the token before each token of a response stands
    params: PackedSeqParams
    filling: int  # tokens at the end that make their number a multiple

    @classmethod
    def of(cls, micro: Batch, multiple_of: int, share_prompts: bool) -> "PackedBatch":
        """Zeros at the end make the number of tokens a multiple of `multiple_of`."""
        device, length_B = micro.tokens_BT.device, micro.length_B.clamp(min=1).cpu()
        source_BT, own_B = _standing(micro, share_prompts)
        position_T = torch.arange(source_BT.shape[1])
        is_token_BT = position_T < length_B[:, None]
        end = int((length_B - own_B).sum())
        filling = -end % multiple_of
        tokens_N, position_N = torch.zeros(2, end + filling, dtype=torch.int64).unbind()
        tokens_N[source_BT[is_token_BT]] = micro.tokens_BT.cpu()[is_token_BT]
        position_N[source_BT[is_token_BT]] = position_T.expand_as(is_token_BT)[is_token_BT]
        params: PackedSeqParams
        if share_prompts:
            params = SharedPrompts(source_BT, own_B, length_B, position_N, device)
        else:
            params = Packed([length for length in (*length_B.tolist(), filling) if length], device)
        predicts_P = source_BT[:, :-1][micro.mask_BT[:, 1:].cpu()]
        return cls(tokens_N[None].to(device), position_N[None].to(device), predicts_P.to(device), params, filling)


def _standing(micro: Batch, share_prompts: bool) -> tuple[Tensor, Tensor]:
    """Where each token of a sequence stands [B, T], and from which position on it stands there itself [B]; int64."""
    own_B, begin_B, prompt_at_B = torch.zeros(3, len(micro), dtype=torch.int64).unbind()
    prompt_B = micro.mask_BT.int().argmax(dim=1).tolist()
    seen: dict[tuple[int, ...], int] = {}
    end = 0
    for b, (tokens, length) in enumerate(zip(micro.tokens_BT.tolist(), micro.length_B.tolist(), strict=True)):
        prompt = tuple(tokens[: prompt_B[b]])
        if share_prompts and prompt in seen:
            own_B[b] = len(prompt)
        begin_B[b] = end - own_B[b]  # where its first token would stand
        prompt_at_B[b] = seen.setdefault(prompt, end)
        end += max(1, length) - int(own_B[b])
    position_T = torch.arange(micro.tokens_BT.shape[1])
    return torch.where(position_T < own_B[:, None], prompt_at_B[:, None], begin_B[:, None]) + position_T, own_B
