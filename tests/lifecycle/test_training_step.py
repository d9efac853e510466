"""A step trains on what it says: shaped rewards, weights, versions, temperature; a validation samples as validation."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl.batch import Batch
from nemo_prorl.config import CorrectionConfig, ShapingConfig
from nemo_prorl.leader import Leader
from nemo_prorl.metrics import Metrics
from nemo_prorl.rewards.second import SecondVerifiers
from nemo_prorl.rollout.endpoints import response_seed
from nemo_prorl.trainer import Trainer, update
from tests.lifecycle.small_run import EOS, LR, TASKS, Ranks, SmallPolicy, SmallRenderer, SmallRun, config

STEP = 3


class Stepped:
    """A run in which step 3 was just made, and the policy before that step."""

    def __init__(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch, prepare: Any = None) -> None:
        self.run, self.before = run, SmallPolicy(run.cfg.trainer.grpo.temperature)
        trainer = run.start(monkeypatch)
        step_of = trainer.train_step
        if prepare is not None:
            prepare(run)

        def train_step(step: int) -> Any:
            if step == STEP:
                self.before.load(run.policy.state())
                run.policy.updates.clear()
            return step_of(step)

        monkeypatch.setattr(trainer, "train_step", train_step)
        trainer.train()
        run.close()
        self.trainer: Trainer = trainer
        self.metrics = run.lines()[STEP - 1]
        self.responses = {tokens_of(run, line): line for line in run.rollouts(STEP)}
        self.batches = [batch for batch, _, _ in run.policy.updates]

    def rows(self) -> list[tuple[Batch, int, dict[str, Any]]]:
        """Return each trained response: its batch, its row, and its line of rollouts/."""
        found = []
        for batch in self.batches:
            for row, length in enumerate(batch.length_B.tolist()):
                found.append((batch, row, self.responses[tuple(batch.tokens_BT[row, :length].tolist())]))
        return found


def tokens_of(run: SmallRun, line: dict[str, Any]) -> tuple[int, ...]:
    return (*SmallRenderer().prompt_ids(line), *map(int, line["response"].split()))


def stepped(folder: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any = None, **grpo: Any) -> Stepped:
    return Stepped(SmallRun(config(folder, max_steps=STEP, **grpo)), monkeypatch, prepare)


def advantages_by_hand(lines: list[dict[str, Any]], reward: Any) -> dict[tuple[str, str], float]:
    """Return the advantages of paper eq. 2 by prompt and response."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["verdict"]["score"] is not None:
            groups.setdefault(line["id"], []).append(line)
    found: dict[tuple[str, str], float] = {}
    for prompt, group in groups.items():
        rewards = [reward(line) for line in group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        found |= {(prompt, line["response"]): (r - mean) / (std + 1e-6) for line, r in zip(group, rewards, strict=True)}
    return found


def shaped(line: dict[str, Any]) -> float:
    """Return the score less 0.3 without eos, and less 0.5 of DAPO's overlong penalty over the last 3 of 7 tokens."""
    length = len(line["response"].split())
    overlong = min(1.0, max(0.0, (length - 4) / 3))
    return float(line["verdict"]["score"] - 0.3 * (not line["finished"]) - 0.5 * overlong)


def raw(line: dict[str, Any]) -> float:
    return float(line["verdict"]["score"])


# --- rewards and advantages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [True, False])
def test_advantages_are_those_of_the_shaped_rewards(
    shapes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaping = ShapingConfig(overlong_tokens=3, overlong_penalty=0.5)
    keys: dict[str, Any] = {"unfinished_penalty": 0.3, "shaping": shaping} if shapes else {}
    found = stepped(tmp_path, monkeypatch, **keys)
    lines = found.run.rollouts(STEP)
    wanted = advantages_by_hand(lines, shaped if shapes else raw)
    assert wanted != advantages_by_hand(lines, raw if shapes else shaped)
    for batch, row, line in found.rows():
        assert float(batch.advantage_B[row]) == pytest.approx(wanted[line["id"], line["response"]], abs=1e-6)
    assert len(found.rows()) == len(lines) == 16
    assert found.metrics["reward/shaped"] == pytest.approx(sum(map(shaped if shapes else raw, lines)) / 16)


def test_a_rank_of_several_trains_on_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages of all responses, tokens of its own: the second of two ranks has half of each mini-batch."""
    monkeypatch.setattr(Leader, "share", lambda self, work: work()[-1])

    def prepare(run: SmallRun) -> None:
        run.policy.data_ranks = Ranks(1, 2)

    run = SmallRun(config(tmp_path, max_steps=STEP))
    run.cfg.seed = 7
    found = Stepped(run, monkeypatch, prepare)
    wanted = advantages_by_hand(found.run.rollouts(STEP), raw)
    rows = found.rows()
    assert [len(batch) for batch in found.batches] == [4, 4]
    for batch, row, line in rows:
        assert float(batch.advantage_B[row]) == pytest.approx(wanted[line["id"], line["response"]], abs=1e-6)
    fresh = sum(len(line["response"].split()) for _, _, line in rows if line["version"] == STEP - 1)
    assert 0 < fresh < sum(int(batch.mask_BT.sum()) for batch in found.batches)
    assert found.metrics["engine_gap/tokens"] == fresh
    for task in TASKS:
        entropies = [
            found.before.logprobs(batch)[1][row][batch.mask_BT[row]]
            for batch, row, line in rows
            if line["task"] == task
        ]
        assert found.metrics[f"entropy/{task}"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


def test_each_response_has_the_seed_of_run_prompt_visit_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=STEP), train_prompts=4)  # one epoch a step
    run.cfg.data.validation, run.cfg.seed = [], 6
    run.cfg.trainer.grpo.dynamic_sampling.enabled = False
    Stepped(run, monkeypatch)
    assert sorted(run.engines.seeds) == sorted(
        response_seed(6, f"train-{k}", visit, number) for k in range(4) for visit in range(STEP) for number in range(4)
    )


def test_a_schedule_of_shaping_follows_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stepped(tmp_path, monkeypatch, shaping=ShapingConfig(cosine=True, cosine_every=2, cosine_for=1))
    assert ["shaping/cosine" in line for line in found.run.lines()] == [False, True, False]


def test_every_response_is_trained_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stepped(tmp_path, monkeypatch)
    assert len(found.batches) == 2  # updates_per_step
    assert [len(batch) for batch in found.batches] == [8, 8]
    counted = Counter((line["id"], line["response"]) for _, _, line in found.rows())
    assert counted == Counter((line["id"], line["response"]) for line in found.run.rollouts(STEP))


def test_a_response_without_a_verdict_is_masked_and_changes_no_advantage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: SmallRun) -> None:
        run.verifier.broken = lambda request: "train" in request["id"] and request["response"][0] in "479"

    found = stepped(tmp_path, monkeypatch, prepare)
    lines = found.run.rollouts(STEP)
    broken = [line for line in lines if line["verdict"]["score"] is None]
    assert broken
    wanted = advantages_by_hand(lines, raw)
    for batch, row, line in found.rows():
        if line["verdict"]["score"] is None:
            assert not batch.mask_BT[row].any()
            assert float(batch.advantage_B[row]) == 0.0
        else:
            assert float(batch.advantage_B[row]) == pytest.approx(wanted[line["id"], line["response"]], abs=1e-6)
    tokens = sum(len(line["response"].split()) for line in lines if line["verdict"]["score"] is not None)
    assert sum(int(batch.mask_BT.sum()) for batch in found.batches) == tokens


# --- log-probabilities, weights, versions ----------------------------------------------------------------------------


def test_old_and_reference_log_probabilities_are_of_the_weights_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stepped(tmp_path, monkeypatch)
    for batch in found.batches:  # the second is trained on after an update, and keeps those of before
        assert torch.equal(batch.old_logp_BT, found.before.logprobs(batch)[0])
        assert torch.equal(batch.ref_logp_BT, found.before.reference_logprobs(batch))
        prompt_BT = torch.arange(batch.tokens_BT.shape[1]) < 3
        padding_BT = torch.arange(batch.tokens_BT.shape[1])[None] >= batch.length_B[:, None]
        assert torch.equal(batch.mask_BT, ~prompt_BT & ~padding_BT)


@pytest.mark.parametrize("kind", ["tis", "none"])
def test_weights_correct_what_the_engine_sampled_from(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log-probabilities are shifted by mistake, so that half of the ratios are above the cap."""

    def prepare(run: SmallRun) -> None:
        run.engines.noise, run.engines.noise_in = -0.9, 2  # a ratio of 2.46 for even seeds

    found = stepped(tmp_path, monkeypatch, prepare, correction=CorrectionConfig(kind=kind, cap=2.0))
    ratios = [(batch.old_logp_BT - batch.engine_logp_BT).exp()[batch.mask_BT] for batch in found.batches]
    weights = [batch.weight_BT[batch.mask_BT] for batch in found.batches]
    ratio_N, weight_N = torch.cat(ratios), torch.cat(weights)
    assert 0.2 < float((ratio_N > 2.0).float().mean()) < 0.8
    assert torch.allclose(weight_N, ratio_N.clamp(max=2.0) if kind == "tis" else torch.ones_like(ratio_N))
    assert found.metrics["correction/tokens"] == len(ratio_N)


def test_the_gap_to_the_engine_is_split_by_the_version_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stepped(tmp_path, monkeypatch)
    tokens: Counter[bool] = Counter()
    for line in found.run.rollouts(STEP):
        tokens[line["version"] == STEP - 1] += len(line["response"].split())
    assert tokens[False]  # groups left over from the step before
    assert found.metrics["engine_gap/tokens"] == tokens[True]
    assert found.metrics["stale_gap/tokens"] == tokens[False]
    assert found.metrics["stale_gap/share"] == pytest.approx(tokens[False] / tokens.total())
    assert found.metrics["engine_gap/mean_abs"] < 1e-6 < 1e-4 < found.metrics["stale_gap/mean_abs"]
    of_engine = {key: value for key, value in found.metrics.items() if key.startswith("engine_gap/")}
    assert of_engine.pop("engine_gap/mean_ratio") == pytest.approx(1.0, abs=1e-5)
    assert len(of_engine) > 2
    assert all(abs(v) < 1e-5 for key, v in of_engine.items() if key != "engine_gap/tokens")


def test_training_samples_as_training_and_validation_as_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stepped(tmp_path, monkeypatch, temperature=1.3, validate_every=1, max_response_tokens=5)
    requests = found.run.engines.sampled
    training = [request for request in requests if request[0].temperature == 1.3]
    validation = [request for request in requests if request[0].temperature != 1.3]
    assert {(s.top_p, s.max_tokens, s.stop_token_ids, n) for s, n, _ in training} == {(1.0, 5, (EOS,), 4)}
    assert {(s.temperature, s.top_p, s.max_tokens, n) for s, n, _ in validation} == {(0.6, 0.95, 5, 3)}
    assert Counter(version for _, _, version in validation) == dict.fromkeys(range(STEP + 1), 8)
    assert {version for _, _, version in training} == set(range(STEP))


def test_without_a_limit_a_response_may_fill_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stepped(tmp_path, monkeypatch)
    assert {sampling.max_tokens for sampling, _, _ in found.run.engines.sampled} == {10 - 3}


def test_what_a_second_verifier_judges_otherwise_is_counted_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_prorl.rewards.second.RESPONSES_PER_SECOND", 1)
    monkeypatch.setattr(SecondVerifiers, "task_for", lambda self, request: "other")

    def prepare(run: SmallRun) -> None:
        score = run.verifier.score

        async def judged(request: Any, deadline: Any) -> Any:
            verdict = await score(request, deadline)
            return verdict if request["task"] in TASKS else {**verdict, "score": float(verdict["score"] == 0.0)}

        monkeypatch.setattr(run.verifier, "score", judged)

    found = stepped(tmp_path, monkeypatch, prepare)
    for step, line in enumerate(found.run.lines(), 1):
        assert sum(line.get(f"second/judged/{task}", 0) for task in TASKS) >= 16
        assert all(line[key] == line[key.replace("judged", "disagreed")] for key in line if "second/judged" in key)
        written = (tmp_path / "disagreements" / f"step-{step}.jsonl").read_text().splitlines()
        assert {one["second_task"] for one in map(json.loads, written)} == {"other"}


def test_every_validation_has_the_same_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal weights score equally."""
    run = SmallRun(config(tmp_path, max_steps=4, validate_every=1))
    run.cfg.model["optim"]["lr"] = 0.0
    trainer = run.start(monkeypatch)
    trainer.train()
    run.close()
    scores = [trainer.validation.scores[step]["all"] for step in range(5)]
    assert scores == [scores[0]] * 5
    assert 0.0 < scores[0]["mean"] < 1.0
    assert run.lines()[2]["validation/all"] == run.lines()[2]["validation/held"] == scores[0]["mean"]


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.2])
def test_the_weights_after_a_step_are_those_of_the_formula(
    kl_coef: float, entropy_coef: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Adam steps on the loss of paper eq. 4, written down again, from the state before the step."""
    found = stepped(tmp_path, monkeypatch, kl_coef=kl_coef, entropy_coef=entropy_coef, unfinished_penalty=0.3)
    policy = found.before
    losses = []
    for batch in found.batches:
        policy.adam.zero_grad()
        logp_BT, entropy_BT = policy._logprobs(policy.weights, batch)
        ratio_BT, advantage_B1 = (logp_BT - batch.old_logp_BT).exp(), batch.advantage_B[:, None]
        clipped_BT = ratio_BT.clamp(0.8, 1.4)
        surrogate_BT = batch.weight_BT * torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
        away_BT = batch.ref_logp_BT - logp_BT
        term_BT = -surrogate_BT + kl_coef * (away_BT.exp() - away_BT - 1) - entropy_coef * entropy_BT
        loss = term_BT[batch.mask_BT].sum() / batch.mask_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.weights.values(), 1.0)
        policy.set_learning_rate(LR)
        policy.adam.step()
        losses.append(float(loss.detach()))
    for name, value in found.run.policy.weights.items():
        assert torch.allclose(value, policy.weights[name], atol=1e-6), name
    assert found.metrics["policy/loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert [asked for _, _, asked in found.run.policy.updates] == [entropy_coef > 0.0] * 2


def test_the_adaptive_bonus_is_in_the_loss_once_the_entropy_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cfg(folder: str, target: float) -> SmallRun:
        run = SmallRun(config(tmp_path / folder, max_steps=STEP))
        adaptive = run.cfg.trainer.grpo.adaptive_entropy
        adaptive.enabled, adaptive.target, adaptive.step, adaptive.maximum = True, target, 0.1, 0.15
        return run

    low, high = (Stepped(cfg(name, target), monkeypatch) for name, target in (("low", 9.0), ("high", 0.0)))
    assert [line["policy/entropy_coef"] for line in low.run.lines()] == pytest.approx([0.0, 0.1, 0.15])
    assert [line["policy/entropy_coef"] for line in high.run.lines()] == [0.0] * 3
    assert all(asked for _, _, asked in low.run.policy.updates)
    assert low.trainer.entropy.state_dict() == {"coefficient": 0.15}


@pytest.mark.parametrize("tokens", [0, 1])
def test_only_rows_with_a_token_to_train_on_make_an_update(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(config(tmp_path, max_steps=1))
    run.start(monkeypatch).train()
    run.close()
    batch, metrics = run.policy.updates[0][0], Metrics(1, "none")
    first_BT = batch.mask_BT & (batch.mask_BT.cumsum(-1) == 1) & (torch.arange(len(batch)) == 0)[:, None]
    before = len(run.policy.updates)
    update(run.policy, replace(batch, mask_BT=first_BT & bool(tokens)), run.cfg.trainer.grpo, metrics)
    assert len(run.policy.updates) - before == tokens


def test_the_metrics_of_an_update_are_means_over_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stepped(tmp_path, monkeypatch)
    tokens = torch.tensor([int(batch.mask_BT.sum()) for batch in found.batches])
    assert found.metrics["correction/tokens"] == int(tokens.sum())
    kl_BT = [batch.ref_logp_BT - batch.old_logp_BT for batch in found.batches]
    k3 = [float((d.exp() - d - 1)[batch.mask_BT].sum()) for d, batch in zip(kl_BT, found.batches, strict=True)]
    assert found.metrics["kl"] == pytest.approx(sum(k3) / int(tokens.sum()), rel=1e-4)
    entropy = [float(found.before.logprobs(batch)[1].sum()) for batch in found.batches]
    assert found.metrics["entropy"] == pytest.approx(sum(entropy) / int(tokens.sum()), rel=1e-5)
