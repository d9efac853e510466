"""Sequences one after another: attention, rotary positions and what is predicted are those of each alone.

Whole models at several layouts are in test_layouts.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_prorl.batch import Batch

pytestmark = pytest.mark.nemo
A, B = [7], [7, 8, 9]  # prompts
# Ascending, as micro-batches have them.
ROWS = [(A, 1), (B, 1), (B, 1), (A, 3), (B, 2), (B, 8), (A, 11)]


def batch_of(rows: list[tuple[list[int], int]] = ROWS) -> Batch:
    """Responses count up from 10."""
    responses = [list(range(10, 10 + length)) for _, length in rows]
    return Batch.from_sequences([prompt for prompt, _ in rows], responses, [[-1.0] * len(r) for r in responses])


def packed_of(batch: Batch, multiple_of: int = 1, share_prompts: bool = True) -> Any:
    from nemo_prorl.policy.packing import PackedBatch

    return PackedBatch.of(batch, multiple_of, share_prompts)


def standing(x: Tensor) -> list[Tensor]:
    """Of values by token, those of each of ROWS: its prompt, which stands before the first of its kind, and its own."""
    first: dict[str, Tensor] = {}
    found, at = [], 0
    for prompt, length in ROWS:
        if str(prompt) not in first:
            first[str(prompt)] = x[at : at + len(prompt)]
            at += len(prompt)
        found.append(torch.cat([first[str(prompt)], x[at : at + length]]))
        at += length
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_attention_and_its_gradient_are_those_of_each_sequence_alone() -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_prorl.policy.cpu.layers import CausalAttention

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    attention = CausalAttention(config, 1, AttnMaskType.causal, "self")
    packed = packed_of(batch_of(), 8)
    tokens = packed.tokens_1N.numel()
    inputs = [random(tokens, heads, 8).requires_grad_() for heads in (4, 2, 2)]
    together = attention(*inputs, packed_seq_params=packed.params)
    assert together.shape == (tokens, 32)
    alone = [
        attention(*(part[:, None] for part in parts)).squeeze(1) for parts in zip(*map(standing, inputs), strict=True)
    ]
    for ours, theirs in zip(standing(together), alone, strict=True):
        torch.testing.assert_close(ours, theirs)
    sums = [
        torch.stack([(part * random(*part.shape)).sum() for part in parts]).sum()
        for parts in (standing(together), alone)
    ]
    gradients = [torch.autograd.grad(total, inputs) for total in sums]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_groups_are_neighbours_of_similar_lengths() -> None:
    assert packed_of(batch_of(), 8).params.groups == [(1, 2), (4, 5), (2, 12)]


def test_a_rotation_is_that_of_the_position_in_the_sequence() -> None:
    from nemo_prorl.policy.cpu.kernels import rotary, rotary_of_packed

    packed = packed_of(batch_of())
    t, half = random(packed.tokens_1N.numel(), 2, 8), random(12, 1, 1, 4)
    angle = torch.cat((half, half), -1)
    together = rotary_of_packed(t, packed.params.cu_seqlens_q, angle)
    for ours, part in zip(standing(together), standing(t), strict=True):
        torch.testing.assert_close(ours, rotary(part[:, None], angle[: len(part)]).squeeze(1))
    with pytest.raises(NotImplementedError, match="packed_sequences=false"):
        rotary_of_packed(t, packed.params.cu_seqlens_q, angle[..., :4])


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_a_prompt_stands_before_the_first_of_its_responses_alone(multiple_of: int) -> None:
    packed = packed_of(batch_of(), multiple_of)
    tokens, filling = packed.tokens_1N[0].tolist(), -31 % multiple_of
    assert tokens[:11] == [7, 10, 7, 8, 9, 10, 10, 10, 11, 12, 10]
    assert (len(tokens), packed.filling, tokens[31:]) == (31 + filling, filling, [0] * filling)
    assert packed.position_1N[0, :11].tolist() == [0, 1, 0, 1, 2, 3, 3, 1, 2, 3, 3]
    assert packed.predicts_P[:7].tolist() == [0, 4, 4, 0, 7, 8, 4]
    assert packed.params.max_seqlen_q == 12


@pytest.mark.parametrize(("multiple_of", "lengths"), [(1, [2, 4]), (4, [2, 4, 2])])
def test_for_other_attention_each_sequence_stands_whole(multiple_of: int, lengths: list[int]) -> None:
    batch, extra = batch_of([(A, 1), ([7, 8], 2)]), sum(lengths) - 6
    packed = packed_of(batch, multiple_of, share_prompts=False)
    assert packed.tokens_1N.tolist() == [[7, 10, 7, 8, 10, 11] + [0] * extra]
    assert packed.position_1N.tolist() == [[0, 1, 0, 1, 2, 3] + [0] * extra]
    assert packed.predicts_P.tolist() == [0, 3, 4]
    assert packed.params.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert packed.params.max_seqlen_q == 4


def test_rows_that_count_nowhere_predict_nothing() -> None:
    """An unjudged response, and the row of a micro-batch that has none."""
    batch = batch_of([(A, 2), (B, 2)])
    batch = batch.with_targets(mask_BT=batch.mask_BT & torch.tensor([[False], [True]])).padded_to(3, 5)
    packed = packed_of(batch)
    assert packed.tokens_1N.tolist() == [[7, 10, 11, 7, 8, 9, 10, 11, 0]]
    assert packed.predicts_P.tolist() == [5, 6]
