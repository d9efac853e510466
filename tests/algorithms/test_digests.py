"""Digests: each bit and each position counts, and what is not there does not."""

from collections.abc import Iterator

import pytest
import torch

from nemo_prorl.algorithms import digests
from nemo_prorl.algorithms.digests import digest, named, ragged_digests, row_digests


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(digests, "_BLOCK", 8)
    digests._factors.cache_clear()
    yield
    digests._factors.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool])
def test_each_bit_and_each_position_counts(dtype: torch.dtype, small_blocks: None) -> None:
    value = torch.arange(1, 31).to(dtype) if dtype != torch.bool else torch.arange(30) % 3 == 0
    found = {digest(value)}
    for k in range(len(value)):
        changed = value.clone()
        changed[k] = 0 if dtype != torch.bool else not value[k]
        found.add(digest(changed))
    assert len(found) == 31
    if dtype != torch.bool:
        for k in range(1, len(value)):
            swapped = value.clone()
            swapped[[0, k]] = value[[k, 0]]
            found.add(digest(swapped))
        assert len(found) == 60


def test_a_digest_is_a_number_of_64_bits_that_does_not_depend_on_the_shape() -> None:
    value = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    assert 0 <= digest(value) < 1 << 64
    assert digest(value) == digest(value.flatten()) == digest(value.T.contiguous().T)
    assert digest(value) != digest(value.T)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.zeros(0)) == 0


def test_rows_with_and_without_padding_have_equal_digests(small_blocks: None) -> None:
    lengths = [3, 0, 7, 20]
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in lengths]
    padded = torch.stack([torch.nn.functional.pad(row, (0, 23 - len(row))) for row in rows])
    found = ragged_digests(torch.cat(rows), torch.tensor(lengths))
    assert found.tolist() == row_digests(padded).tolist()
    assert found[1] == 0
    assert found.max() < 1 << 32
    padded[3, 19] += 1e-6
    assert (found != row_digests(padded)).tolist() == [False, False, False, True]


def test_digests_of_tensors_with_other_names_differ() -> None:
    assert named("a", 5) != named("b", 5)
    assert named("a", 5) == named("a", 5)
