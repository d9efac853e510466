"""Log-probabilities block by block: they find their rows on any number of data ranks, and depend on nothing else."""

import pickle

import pytest
import torch

from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.rollout.collected import Group
from nemo_prorl.rollout.one_engine import Response
from nemo_prorl.rollout.scores import GroupScores, in_blocks


class Summed:
    """A policy on one of several data ranks whose numbers follow from the tokens of a row up to their place."""

    def __init__(self, rank: int, size: int) -> None:
        self.data_rank, self.data_size = rank, size
        self.calls: list[int] = []
        self.others: list[GroupScores] = []
        self.asked: list[tuple[int, ...]] = []
        self.gathered = 0

    def logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(len(batch))
        sums_BT = batch.tokens_BT.cumsum(1) * 1.0
        return torch.where(batch.mask_BT, sums_BT, 0.0), torch.where(batch.mask_BT, -sums_BT, 0.0)

    def reference_logprobs(self, *batches: Batch) -> list[torch.Tensor]:
        return [2.0 * self.logprobs(batch)[0] for batch in batches]

    def gather_values(self, mine_N: torch.Tensor) -> list[torch.Tensor]:
        """The others' parts of the same block, which is the next in the order of the call; zeros follow some."""
        key = self.asked[self.gathered]
        self.gathered += 1
        parts = [one._found[key].flat(rank) for rank, one in enumerate(self.others)]
        assert torch.equal(parts[self.data_rank], mine_N)
        return [torch.nn.functional.pad(part, (0, 3 * rank)) for rank, part in enumerate(parts)]


def groups_of(count: int, samples: int) -> list[Group]:
    generator = torch.Generator().manual_seed(1)

    def some(most: int) -> list[int]:
        length = int(torch.randint(1, most, (1,), generator=generator))
        return torch.randint(1, 50, (length,), generator=generator).tolist()

    groups = []
    for k in range(count):
        answers = [
            Response(i, ids, [0.0] * len(ids), "stop", 0) for i, ids in enumerate(some(12) for _ in range(samples))
        ]
        scores: list[float | None] = [float(i % 2) for i in range(samples)]
        scores[-1] = None if k == 1 else scores[-1]  # one that nobody could judge
        verdicts = [{"score": score, "detail": ""} for score in scores]
        groups.append(Group(f"p{k}", "ab"[k % 2], {}, some(9), 0, answers, verdicts, 1, 0, 7 * k + 3))
    return groups


@pytest.mark.parametrize(("size", "samples"), [(1, 4), (2, 4), (3, 4), (6, 4)])
def test_each_row_gets_its_own_numbers_whatever_was_ready_when(size: int, samples: int) -> None:
    groups = groups_of(5, samples)
    judged = JudgedGroups.of(groups)
    wanted = Summed(0, 1)
    all_BT = (*wanted.logprobs(judged.batch()), *wanted.reference_logprobs(judged.batch()))
    single = [[group] for group in groups_of(6, samples)]  # the last is surplus
    first, second = groups[:2], groups[2:]
    for blocks, ready in (
        (single[:5], []),
        (single[:5], [single[3:4], single[:2]]),
        (single[:5], [single]),
        ([first, second], [[second]]),
        ([groups], []),
    ):
        policies = [Summed(rank, size) for rank in range(size)]
        scores = [GroupScores(policy) for policy in policies]  # type: ignore[arg-type]
        for part in [*ready, blocks]:
            dealt = scores[0].deal([JudgedGroups.of(block) for block in part])  # as rank 0 does, for all
            for policy, one, mine in zip(policies, scores, dealt, strict=True):
                policy.others, policy.asked = scores, [tuple(group.draw_index for group in block) for block in blocks]
                one.add(mine)
        for rank, one in enumerate(scores):
            rows_B = torch.cat(judged.rows_of_updates(2, size)[rank])
            found = one.of_rows(dealt[rank], rows_B, judged.batch().tokens_BT.shape[1])
            for value_BT, whole_BT in zip(found, all_BT, strict=True):
                torch.testing.assert_close(value_BT, whole_BT[rows_B].float(), rtol=0, atol=0)
        computed = {group.draw_index for part in [*ready, blocks] for block in part for group in block}
        assert sum(sum(policy.calls) for policy in policies) == 2 * samples * len(
            computed
        )  # once, and by the reference


def test_what_was_computed_in_time_and_in_vain_is_counted() -> None:
    groups, policy = groups_of(5, 4), Summed(0, 1)
    scores, draws = GroupScores(policy), [group.draw_index for group in groups]  # type: ignore[arg-type]
    assert scores.shares(draws) == {"ahead_share": 0.0, "wasted_share": 0.0}
    scores.add([JudgedGroups.of(groups[1:3]), JudgedGroups.of(groups[3:5])])
    assert scores.shares(draws[:4]) == {"ahead_share": 0.75, "wasted_share": 0.25}


def test_a_batch_in_blocks_by_hand() -> None:
    groups = groups_of(5, 2)
    assert in_blocks(groups, [1, 3, 1]) == [groups[:1], groups[1:4], groups[4:]]
    assert in_blocks([], []) == []
    with pytest.raises(ValueError, match=r"blocks of \[1, 3\] groups for 5 groups"):
        in_blocks(groups, [1, 3])


def padded(groups: list[Group]) -> Batch:
    """All rows of these groups, made one by one from lists."""
    rows = [(group, r, valid) for group in groups for r, valid in zip(group.responses, group.valid, strict=True)]
    lengths = [len(group.prompt_ids) + len(r.token_ids) for group, r, _ in rows]
    tokens_BT, zeros_BT = torch.zeros(len(rows), max(lengths), dtype=torch.int64), torch.zeros(len(rows), max(lengths))
    mask_BT, logp_BT = zeros_BT.bool(), zeros_BT.clone()
    for b, (group, r, valid) in enumerate(rows):
        begin = len(group.prompt_ids)
        tokens_BT[b, : lengths[b]] = torch.tensor([*group.prompt_ids, *r.token_ids])
        mask_BT[b, begin : lengths[b]] = valid
        logp_BT[b, begin : lengths[b]] = torch.tensor(r.logprobs, dtype=torch.float32)
    return Batch(
        tokens_BT, mask_BT, torch.tensor(lengths), logp_BT, zeros_BT, zeros_BT, zeros_BT + 1, torch.zeros(len(rows))
    )


@pytest.mark.parametrize(("count", "size"), [(7, 1), (7, 3), (1, 5)])
def test_what_travels_to_a_data_rank_is_its_rows_of_the_whole_batch(count: int, size: int) -> None:
    """To the bit, at the width of the whole batch, and with none of the other ranks' tokens."""
    groups = groups_of(count, 4)
    draw = torch.Generator().manual_seed(2)
    for response in (response for group in groups for response in group.responses):
        response.logprobs[:] = torch.randn(len(response.token_ids), dtype=torch.float64, generator=draw).tolist()
    judged, whole = JudgedGroups.of(groups), padded(groups)
    parts = [torch.cat(rows) for rows in judged.rows_of_updates(2, size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(4 * count))
    dealt = pickle.loads(pickle.dumps(judged.dealt([part.tolist() for part in parts])))
    for part, mine in zip(parts, dealt, strict=True):
        wanted, found = whole.rows(part), mine.batch()
        for name in Batch.__dataclass_fields__:
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
            assert getattr(found, name).dtype == getattr(wanted, name).dtype
        assert mine.rows.token_N.nbytes == 4 * int(wanted.length_B.sum())
        assert torch.equal(mine.length_B, whole.length_B)
    assert len(JudgedGroups.of([]).dealt([[]] * size)[0].batch()) == 0
