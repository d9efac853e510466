"""The step at full context that `prorl doctor --preflight` tries: how much, in which order, what is recorded."""

import mmap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import OmegaConf

from nemo_prorl import preflight, rank, settings
from nemo_prorl.algorithms.entropy import AdaptiveEntropy
from nemo_prorl.batch import Batch, JudgedGroups
from nemo_prorl.errors import EngineFailure
from nemo_prorl.micro_batches import Limits
from nemo_prorl.preflight import PreflightSizes, TrialRecorder, check_full, measure, random_groups, tried_rows
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.trainer import RunProgress, Trainer, policy_loss
from tests.lifecycle.parts import leader
from tests.lines import read_lines

SMALL = ["trainer.grpo.prompts_per_step=8", "trainer.grpo.samples_per_prompt=4", "rollout.max_num_seqs=6"]
FOLDER = "pretrained_checkpoint.restore_from_path=null"


def sizes_of(*overrides: str, rows: int | None = None) -> PreflightSizes:
    cfg: Any = settings.load([*overrides])
    return PreflightSizes.of(cfg, rows)


def records(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return read_lines(folder / f"preflight-{rank}.jsonl")


def test_the_sizes_are_those_of_the_whole_run_and_of_one_of_its_nodes() -> None:
    sizes = sizes_of("cluster=h100_4x8", FOLDER)
    assert (sizes.data_ranks, sizes.rows, sizes.tried_rows) == (32, 256 // 4 * 16 // 32, 32)
    assert (sizes.engines, sizes.all_engines, sizes.sequences) == (8, 32, 256 * 16 // 32)
    assert (sizes.context, sizes.response, sizes.generated) == (8192, 8191, 64)
    assert sizes.tried_prompts == 256


def test_fewer_rows_need_fewer_prompts_which_still_make_them() -> None:
    sizes = sizes_of("cluster=h100_4x8", FOLDER, rows=3)
    assert (sizes.rows, sizes.tried_rows) == (32, 3)
    assert sizes.tried_prompts == 6 * 4  # 3 rows of 32 ranks are 6 prompts' responses, in each of 4 updates
    small = sizes_of(*SMALL, rows=3)
    assert [len(rows.batch()) for rows in tried_rows(small, random_groups(small, 50, 1))] == [3] * small.data_ranks
    assert sizes_of(*SMALL, rows=10**6).tried_rows == sizes_of(*SMALL).rows


def test_the_sizes_pass_through_their_file(tmp_path: Path) -> None:
    sizes = sizes_of(*SMALL)
    sizes.write(tmp_path)
    assert PreflightSizes.read(tmp_path) == sizes


def test_every_made_up_response_fills_the_context() -> None:
    sizes = sizes_of(*SMALL)
    groups = random_groups(sizes, 50, 1)
    batch = JudgedGroups.of(groups).batch()
    assert batch.tokens_BT.shape == (8 * 4, sizes.context)
    assert batch.length_B.tolist() == [sizes.context] * 32
    assert batch.mask_BT.sum(dim=1).tolist() == [16] * 32  # trainer.grpo.max_response_tokens of the laptop
    assert 0 <= int(batch.tokens_BT.min()) <= int(batch.tokens_BT.max()) < 50
    assert not any(ended for group in groups for ended in group.finished)


def test_a_response_that_ended_early_did_not_fill_the_engine() -> None:
    full, short = (Response(0, [1] * n, [0.0] * n, "length", 0) for n in (4, 2))
    check_full([full, full], 4)
    with pytest.raises(EngineFailure, match="1 of 2 responses have 2 to 2 tokens; expected 4"):
        check_full([full, short], 4)


def test_a_part_is_on_record_before_it_runs_and_after(tmp_path: Path) -> None:
    recorder = TrialRecorder(tmp_path, 3)
    with recorder.part("logprobs", rows=2):
        assert records(tmp_path, 3) == [{"part": "logprobs", "event": "begin"}]
        held = mmap.mmap(-1, 80_000_000)  # goes back to the system at once, as memory of malloc might not
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        held.close()
    ended = records(tmp_path, 3)[-1]
    assert (ended["part"], ended["event"], ended["rows"]) == ("logprobs", "end", 2)
    with recorder.part("next"):
        pass
    assert ended["host_peak"] - records(tmp_path, 3)[-1]["host_peak"] > 60e6  # each part has a peak of its own
    with pytest.raises(MemoryError), recorder.part("update"):
        raise MemoryError("no room\nfor this")
    assert records(tmp_path, 3)[-1] == {"part": "update", "event": "error", "what": "MemoryError: no room"}


class Policy:
    """Knows what it was asked."""

    shape = SimpleNamespace(vocab=50)
    data_ranks, limits = SimpleNamespace(rank=0, size=1, sum=float), Limits(rows=3)

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(("logprobs", len(batch)))
        return -torch.ones_like(batch.weight_BT), batch.weight_BT

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        self.calls.append(("reference", len(batch)))
        return -torch.ones_like(batch.weight_BT)

    def set_learning_rate(self, rate: float) -> None: ...

    def update(self, batch: Batch, loss: Any, denominator: float, with_entropy: bool) -> dict[str, float]:
        assert denominator == float(batch.mask_BT.sum()) > 0
        assert bool((batch.old_logp_BT == -1).all())  # the policy's own: a ratio of 1, whatever the tokens
        self.calls.append(("update", len(batch), with_entropy, loss.func))
        return defaultdict(lambda: 1.0)


class Parts:
    """Stands in for `rank`: parts that note what they were asked, around the real leader and the trainer's maths."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.cfg = cast(Any, OmegaConf.to_object(settings.load([*SMALL, *overrides])))
        self.calls: list[Any] = []
        (folder / "endpoints").mkdir()
        (folder / "endpoints" / "token").touch(0o600)
        (folder / "endpoints" / "token").write_text("t" * 16)
        PreflightSizes.of(self.cfg).write(folder)

    def note(self, name: str) -> Any:
        return lambda *arguments, **named: self.calls.append((name, *arguments, *named.values()))

    def build(self, cfg: Any, *_: Any) -> Trainer:
        self.calls.append(("build",))
        alone, none = leader(), cast(Any, None)
        store = SimpleNamespace(load=self.note("load"))
        checkpoints = SimpleNamespace(save=self.note("save"), files=store, newest=lambda: Path("newest"))
        rollouts = SimpleNamespace(
            publish=self.note("publish"), sleep=self.note("sleep"), collector=alone.only(lambda: "a collector")
        )
        resets, entropy = SimpleNamespace(steps=[], of_optimizer=[]), AdaptiveEntropy(cfg.trainer.grpo.adaptive_entropy)
        parts: list[Any] = [
            rollouts,
            none,
            resets,
            none,
            checkpoints,
            none,
            none,
            none,
            entropy,
            none,
            none,
            none,
            alone,
            none,
        ]
        return Trainer(cfg, Policy(self.calls), RunProgress(), *parts)


class Pool:
    """Engines that answer in full, and remember what they were asked."""

    asked: list[tuple[int, SamplingParams]]

    def __init__(self, endpoints: Path, token: str, engines: int) -> None:
        assert engines == 1

    async def generate(self, prompt: list[int], seeds: list[int], sampling: SamplingParams, _: Any) -> list[Response]:
        Pool.asked.append((len(prompt), sampling))
        count = sampling.max_tokens
        return [Response(0, [1] * count, [0.0] * count, "length", 0)]

    async def close(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Pool]:
    Pool.asked = []
    monkeypatch.setattr(preflight, "EnginePool", Pool)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return Pool


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[Any]:
    """What `measure` asked of the parts."""
    parts = Parts(folder, *overrides)
    monkeypatch.setattr(rank, "Policy", lambda *_: parts.calls.append(("policy",)))
    monkeypatch.setattr(rank, "build", parts.build)
    monkeypatch.setattr(rank, "begin", lambda *_: parts.calls.append(("begin",)))
    measure(parts.cfg, folder)
    return parts.calls


def test_all_parts_of_a_step_run_in_order_and_are_on_record(
    tmp_path: Path, engines: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(tmp_path, monkeypatch)
    rows = 8 * 4 // 4
    assert calls == [
        ("policy",),
        ("build",),
        ("begin",),
        ("publish", 0),
        ("logprobs", 3),
        ("update", 3, False, policy_loss),  # makes the moments, before anything is measured
        ("logprobs", rows),
        ("reference", rows),
        ("update", rows, False, policy_loss),
        ("save", 1, True),
        ("load", Path("newest")),
    ]
    lengths = [(length, sampling.max_tokens) for length, sampling in engines.asked]
    assert lengths == [(48, 1)] * 6 + [(48, 16)] * 6  # rollout.max_num_seqs at once; with 16 more the context is full
    assert all(sampling.stop_token_ids == () for _, sampling in engines.asked)
    found = [record for record in records(tmp_path) if record["event"] == "end"]
    assert [record["part"] for record in found] == [
        *("build", "engines", "publish", "fill", "generate", "batch"),
        *("first update", "logprobs", "reference", "update", "checkpoint", "resume"),
    ]
    assert {record["tokens"] for record in found[7:10]} == {rows * 64}


def test_an_adaptive_entropy_bonus_is_tried_as_if_it_were_on(
    tmp_path: Path, engines: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(tmp_path, monkeypatch, "trainer.grpo.adaptive_entropy.enabled=true")
    assert [call[2] for call in calls if call[0] == "update"] == [True, True]
