"""Packed micro-batches: sequences one after another instead of rows with padding (Megatron's "thd" layout).

Only attention needs to know where sequences begin; all other layers work on single tokens.  `CausalAttention`, which
replaces Transformer Engine's attention on CPUs, also shares prompts: a prompt is stored once, before its first
response, and attention copies it before the other responses.  The hidden state of a token depends only on the tokens
before it, so packing and sharing change results only by the order of sums.

Shape suffixes: B sequences, T positions of the longest sequence, N stored tokens with filling, R positions that
`CausalAttention` works on, P tokens that predict a response token.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from nemo_prorl.batch import Batch

_SIMILAR = 1.25  # largest ratio of longest to shortest sequence in an attention group


class Packed(PackedSeqParams):
    """Start offsets of packed sequences, in the form that Megatron and Transformer Engine expect."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        super().__init__("thd", ends, ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


class SharedPrompts(PackedSeqParams):
    """Layout of packed sequences with shared prompts, for `CausalAttention` and `kernels.rotary_of_packed`.

    Here `cu_seqlens_q`, which Megatron passes to the rotary function, has each token's position in its sequence.

    Attributes:
        groups: (rows, width) of neighbouring sequences of similar length; attention computes each group as one padded
            batch.
        spread_R: int64, index of the stored token for each position of all groups.
        keep_N: int64, for each stored token, the index of its attention output among the R positions.
    """

    def __init__(
        self, source_BT: Tensor, own_B: Tensor, length_B: Tensor, position_N: Tensor, device: torch.device
    ) -> None:
        """Derive the groups from the sequences.

        Args:
            source_BT: int64, index of the stored token for each position of a sequence.
            own_B: int64, first position that a sequence stores itself; earlier positions point at the shared prompt.
            length_B: int64, tokens of each sequence.
            position_N: int64, each stored token's position in its sequence.
            device: device of the resulting tensors.
        """
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
        self.keep_N = pad(keep_N, (0, len(position_N) - len(keep_N))).to(device)  # filling may get any result


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch whose sequences are stored one after another, and the layout of the sequences for Megatron."""

    tokens_1N: Tensor
    position_1N: Tensor
    predicts_P: Tensor  # int64, for each response token the index of the stored token before it
    params: PackedSeqParams
    filling: int  # number of zeros at the end of `tokens_1N`

    @classmethod
    def of(cls, micro: Batch, multiple_of: int, share_prompts: bool) -> "PackedBatch":
        """Pack a micro-batch; zeros at the end make the number of tokens a multiple of `multiple_of`."""
        device, length_B = micro.tokens_BT.device, micro.length_B.clamp(min=1).cpu()
        source_BT, own_B = _stored_at(micro, share_prompts)
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


def _stored_at(micro: Batch, share_prompts: bool) -> tuple[Tensor, Tensor]:
    """Return `source_BT` and `own_B` of `SharedPrompts`: where the tokens of each sequence are stored."""
    own_B, begin_B, prompt_at_B = torch.zeros(3, len(micro), dtype=torch.int64).unbind()
    prompt_B = micro.mask_BT.int().argmax(dim=1).tolist()
    seen: dict[tuple[int, ...], int] = {}
    end = 0
    for b, (tokens, length) in enumerate(zip(micro.tokens_BT.tolist(), micro.length_B.tolist(), strict=True)):
        prompt = tuple(tokens[: prompt_B[b]])
        if share_prompts and prompt in seen:
            own_B[b] = len(prompt)
        begin_B[b] = end - own_B[b]  # position t >= own_B[b] is stored at begin_B[b] + t
        prompt_at_B[b] = seen.setdefault(prompt, end)
        end += max(1, length) - int(own_B[b])
    position_T = torch.arange(micro.tokens_BT.shape[1])
    return torch.where(position_T < own_B[:, None], prompt_at_B[:, None], begin_B[:, None]) + position_T, own_B
