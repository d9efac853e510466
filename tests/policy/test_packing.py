"""Sequences one after another: attention, rotary positions and what is predicted are those of each alone.

Whole models at several layouts are in test_layouts.py.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nemo_prorl.batch import Batch

pytestmark = pytest.mark.nemo
LENGTHS = [1, 3, 3, 3, 4, 9, 10, 2]  # as micro-batches have them: ascending, but for what fills up to a multiple


def sequences(x: Tensor) -> list[Tensor]:
    return list(x.split(LENGTHS))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_attention_and_its_gradient_are_those_of_each_sequence_alone() -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_prorl.policy.cpu_layers import CausalAttention
    from nemo_prorl.policy.packing import Packed

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = CausalAttention(config, 1, AttnMaskType.causal, "self")
    inputs = [random(sum(LENGTHS), heads, 8).requires_grad_() for heads in (4, 2, 2)]
    packed = Packed(LENGTHS, torch.device("cpu"))
    together = attention(*inputs, packed_seq_params=packed)
    alone = torch.cat(
        [
            attention(*(part[:, None] for part in parts)).squeeze(1)
            for parts in zip(*map(sequences, inputs), strict=True)
        ]
    )
    torch.testing.assert_close(together, alone)
    weight = random(*together.shape)
    for ours, theirs in zip(
        torch.autograd.grad((together * weight).sum(), inputs),
        torch.autograd.grad((alone * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_groups_are_neighbours_of_similar_lengths() -> None:
    from nemo_prorl.policy.packing import Packed

    groups = Packed(LENGTHS, torch.device("cpu")).groups
    assert [(group.rows, group.width) for group in groups] == [(1, 1), (3, 3), (1, 4), (2, 10), (1, 2)]
    assert [(group.start, group.stop) for group in groups] == list(pairwise([0, 1, 10, 14, 33, 35]))
    (padded,) = [group.places for group in groups if group.places is not None]
    assert padded.tolist() == [*range(9), *range(10, 20)]


def test_rotary_positions_begin_anew_with_each_sequence() -> None:
    from nemo_prorl.policy.cpu_kernels import rotary, rotary_of_packed

    t, half = random(sum(LENGTHS), 2, 8).requires_grad_(), random(max(LENGTHS), 1, 1, 4)
    angle = torch.cat((half, half), -1)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    alone = torch.cat([rotary(part[:, None], angle[: len(part)]).squeeze(1) for part in sequences(t)])
    torch.testing.assert_close(rotary_of_packed(t, ends, angle), alone)
    with pytest.raises(NotImplementedError, match="apply_rope_fusion=false"):
        rotary_of_packed(t, ends, angle[..., :4])


@pytest.mark.parametrize(("multiple_of", "lengths"), [(1, [2, 4]), (4, [2, 4, 2])])
def test_a_packed_micro_batch_has_its_tokens_and_what_predicts(multiple_of: int, lengths: list[int]) -> None:
    from nemo_prorl.policy.packing import PackedBatch

    batch = Batch.from_sequences([[7], [7, 8]], [[1], [2, 3]], [[-1.0], [-1.0, -1.0]])
    packed, extra = PackedBatch.of(batch, multiple_of), sum(lengths) - 6
    assert packed.tokens_1N.tolist() == [[7, 1, 7, 8, 2, 3] + [0] * extra]
    assert packed.position_1N.tolist() == [[0, 1, 0, 1, 2, 3, *range(extra)]]
    assert packed.predicts_N.tolist() == [True, False, False, True, True, False] + [False] * extra
    assert packed.params.lengths == lengths
    assert packed.params.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert packed.params.max_seqlen_q == 4
