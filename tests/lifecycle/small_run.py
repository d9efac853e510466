"""A whole run in one process, in a fraction of a second: `rank.build` wires its real parts around a tiny policy.

Only what needs NeMo, vLLM or HTTP is replaced, by something that does the same work: the policy is a bigram model with
torch's Adam, the engines sample from the weights that the run published, and the verifier is a function of the
response.  So the policy learns, and every number of the run follows from the seed.
"""

import asyncio
import functools
import json
import math
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nemo_prorl import rank
from nemo_prorl.algorithms.digests import digest
from nemo_prorl.batch import Batch
from nemo_prorl.config import Config, DataSource, GRPOConfig, ResetsConfig, TrainerConfig
from nemo_prorl.data.blend import LoadedData
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import NonFiniteUpdate
from nemo_prorl.leader import Leader
from nemo_prorl.lifecycle.checkpoints import Checkpoints
from nemo_prorl.lifecycle.stopping import FORWARDED_AS, Stopping
from nemo_prorl.rewards.discovery import Registry, discover
from nemo_prorl.rewards.interface import RewardResult, Verdict, failed_verdict, verdict_of
from nemo_prorl.rollout.checksums import from_metadata, published
from nemo_prorl.rollout.collector import Collector
from nemo_prorl.rollout.endpoints import Response, SamplingParams
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
from nemo_prorl.trainer import Trainer
from tests.lifecycle.small_store import SmallStore
from tests.lines import read_lines
from tests.rollout.simulated import Simulated

WORDS, WIDTH, EOS, LR = 12, 8, 2, 0.03
TASKS = ("puzzles", "stem")
# No run needs it but for its speed.
SHAPE = {
    **{"num_layers": 2, "hidden_size": WIDTH, "ffn_hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 1},
    **{"make_vocab_size_divisible_by": 4},
}


@dataclass
class Ranks:
    """The data ranks of a run as one of them sees them; sums are over its own rows."""

    rank: int = 0
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum(self, value: float) -> float:
        return value

    def reduce(self, diagnostics: Mapping[str, Tensor]) -> dict[str, float]:
        return {key: float(value) for key, value in diagnostics.items()}


class SmallPolicy:
    """A bigram model with torch's Adam: the methods of `policy.actor.Actor` that a run uses.

    `updates`: (mini-batch, learning rate, entropy asked for) of each update.
    """

    def __init__(self, temperature: float, seed: int = 3) -> None:
        random = torch.Generator().manual_seed(seed)
        self.weights = {
            "embed": torch.randn(WORDS, WIDTH, generator=random).requires_grad_(),
            "head": torch.randn(WORDS, WIDTH, generator=random).mul(0.3).requires_grad_(),
        }
        self.shape = SimpleNamespace(vocab=WORDS)
        self.temperature, self.data_ranks, self.version = temperature, Ranks(), 0
        self.updates: list[tuple[Batch, float, bool]] = []
        self.on_update: Callable[[], object] = lambda: None
        self.reloaded = 0
        self.reset_optimizer()
        self.set_reference()

    def reset_optimizer(self) -> None:
        self.adam = torch.optim.Adam(self.weights.values(), lr=LR)

    def moments(self) -> dict[int, Any]:
        """Return Adam's moments and step count by parameter; empty after a reset."""
        return dict(self.adam.state_dict()["state"])

    def reload_masters(self) -> None:
        """Do nothing: these weights are their masters."""
        self.reloaded += 1

    def set_reference(self) -> None:
        self.reference = {name: value.detach().clone() for name, value in self.weights.items()}

    def set_learning_rate(self, lr: float) -> None:
        self.adam.param_groups[0]["lr"] = lr

    def _logprobs(
        self, weights: Mapping[str, Tensor], batch: Batch, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        table_VV = torch.log_softmax(weights["embed"] @ weights["head"].T / (temperature or self.temperature), dim=-1)
        rows_BTV = table_VV[batch.tokens_BT[:, :-1]]
        logp_BT = rows_BTV.gather(-1, batch.tokens_BT[:, 1:, None])[..., 0]
        entropy_BT = -(rows_BTV.exp() * rows_BTV).sum(-1)
        shifted = (torch.nn.functional.pad(value, (1, 0)) for value in (logp_BT, entropy_BT))
        logp_BT, entropy_BT = (torch.where(batch.mask_BT, value, 0.0) for value in shifted)
        return logp_BT, entropy_BT

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._logprobs(self.weights, batch)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        return self._logprobs(self.reference, batch)[0]

    def update(
        self,
        batch: Batch,
        loss: Any,
        denominator: float,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        self.updates.append((batch, self.adam.param_groups[0]["lr"], with_entropy))
        self.on_update()
        self.adam.zero_grad()
        logp_BT, entropy_BT = self._logprobs(self.weights, batch, temperature)
        value, sums = loss(logp_BT, entropy_BT if with_entropy else None, batch, denominator)
        value.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0))
        if not math.isfinite(float(value.detach()) + norm):
            raise NonFiniteUpdate(f"expected finite values; got loss {float(value.detach())}")
        self.adam.step()
        self.version += 1
        numbers = {key: float(number) for key, number in sums.items()}
        return {
            **numbers,
            "loss": float(value.detach()),
            "grad_norm": norm,
            "positions": float(batch.tokens_BT.numel()),
            "padding": 0.0,
            "max_shapes": 1.0,
        }

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter([(name, value.detach()) for name, value in self.weights.items()])

    def weights_sha256(self) -> str:
        return sha256_of(self.weights)

    def reference_sha256(self) -> str:
        return sha256_of(self.reference)

    def digests(self, *objects: str) -> dict[str, dict[str, int]]:
        moments = zip(self.weights, self.moments().values(), strict=False)
        found = {
            "weights": {name: digest(value) for name, value in self.weights.items()},
            "gradient": {name: digest(value.grad) for name, value in self.weights.items() if value.grad is not None},
            "moments": {name: digest(state["exp_avg"]) for name, state in moments},
        }
        return {name: found["weights" if name == "masters" else name] for name in objects}

    def state(self) -> dict[str, Any]:
        """Return a copy of weights, reference, moments and step count."""
        state = {"weights": self.weights, "reference": self.reference, "adam": self.moments()}
        return dict(torch.utils._pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, state))

    def load(self, state: Mapping[str, Any], reference: bool = True) -> None:
        with torch.no_grad():
            for name, value in self.weights.items():
                value.copy_(state["weights"][name])
        if reference:
            self.reference = dict(state["reference"])
        self.adam.load_state_dict({**self.adam.state_dict(), "state": state["adam"]})
        self.version += 1


def sha256_of(weights: Mapping[str, Tensor]) -> str:
    import hashlib

    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in weights.values())).hexdigest()


class SmallEngines(Simulated):
    """Engines that sample from the weights that were published last.

    `sampled`: sampling parameters, number of responses and version of each request.  `seeds`: of all responses.
    `published`: hash of the weights by version.  `loads`: versions in the order in which they came.  `waits`: the
    deadlines of publications and sleeps, in seconds.
    """

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.sampled: list[tuple[SamplingParams, int, int | None]] = []
        self.seeds: list[int] = []
        self.loads: list[int] = []
        self.naps: list[int] = []  # levels
        self.waits: list[float] = []
        self.asleep = False
        self.warmth = 1.0  # factor on the temperature, by mistake
        self.noise = 0.0  # added to the log-probabilities of one response in `noise_in`, by mistake
        self.noise_in = 1
        self.published: dict[int, str] = {}

    async def publish(self, path: str, version: int, deadline: Deadline) -> None:
        self.waits.append(deadline.seconds)
        await self.announce(path, version)
        self.asleep = False

    async def announce(self, path: str, version: int) -> None:
        weights = load_file(path)
        with safe_open(path, framework="np") as file:
            written, told = from_metadata(file.metadata())
        exact = {name: published(name, value, version, self.dtype)[:2] for name, value in weights.items()}
        assert (written, {name: checksum[:2] for name, checksum in told.items()}) == (version, exact)
        self.published[version] = sha256_of(weights)
        self.loads.append(version)
        self.logits_VV, self.version = weights["embed"] @ weights["head"].T, version

    async def sleep(self, level: int, deadline: Deadline) -> int:
        self.naps.append(level)
        self.waits.append(deadline.seconds)
        self.asleep = True
        return 0

    def waiting(self) -> str:
        return ""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: SamplingParams,
        deadline: Deadline,
        on_response: Callable[[Response], None] | None = None,
        version: int | None = None,
    ) -> list[Response]:
        self.sampled.append((sampling, len(seeds), version))
        self.seeds += seeds
        assert not self.asleep
        assert version == self.version, "the engines have other weights than the request expects"
        table_VV = torch.log_softmax(self.logits_VV / (sampling.temperature * self.warmth), dim=-1)
        responses = []
        for index, seed in enumerate(seeds):
            await asyncio.sleep(0)
            ids: list[int] = []
            logps: list[float] = []
            last, chance = prompt_ids[-1], random.Random(seed)
            while len(ids) < sampling.max_tokens and last != EOS:
                (last,) = chance.choices(range(WORDS), table_VV[last].exp().tolist())
                logps.append(float(table_VV[ids[-1] if ids else prompt_ids[-1], last]))
                ids.append(last)
            if seed % self.noise_in == 0:
                logps = [logp + self.noise for logp in logps]
            response = Response(index, ids, logps, "stop" if last == EOS else "length", version)
            responses.append(response)
            if on_response is not None:
                on_response(response)
        return responses


class Verifier:
    """Scores responses by `judge`, which is `score_of`.

    `broken`: prompts (by id, or all) on which the infrastructure fails.  `hopeless`: every score is 0.  `delay`:
    seconds until a verdict.
    """

    def __init__(self) -> None:
        self.delay = 0.0
        self.judge: Callable[[Mapping[str, Any]], RewardResult] = lambda request: RewardResult(score_of(request))
        self.broken: Callable[[Mapping[str, Any]], bool] = lambda request: False
        self.hopeless = self.canaries_lie = False
        self.known: dict[str, bool] = {}  # by id of a canary: whether it is right

    def waiting(self) -> str:
        return ""

    async def close(self) -> None: ...

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        await asyncio.sleep(self.delay)
        if request["id"] in self.known:
            return verdict_of(request["id"], RewardResult(float(self.known[request["id"]] != self.canaries_lie)))
        if self.broken(request):
            return failed_verdict(request["id"], "infrastructure", "the scorer broke")
        return verdict_of(request["id"], RewardResult(0.0) if self.hopeless else self.judge(request))


def score_of(request: Mapping[str, Any]) -> float:
    """Return 1 if at least half of the tokens of a response have the parity that its record wants, otherwise 0."""
    ids = [int(word) for word in request["response"].split()]
    return float(sum(token % 2 == request["truth"]["parity"] for token in ids) >= len(ids) / 2)


class SmallRenderer:
    """Renders a prompt as three tokens, the last of which says what is wanted."""

    eos_id = EOS

    def prompt_ids(self, record: Mapping[str, Any]) -> list[int]:
        return [3, 3 + record["truth"]["number"] % 5, 8 + record["truth"]["parity"]]

    def judged_text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class ThreeTokens:
    """Counts the tokens of prompts without a tokenizer."""

    def of(self, source: DataSource, records: Sequence[Any]) -> list[int]:
        return [3] * len(records)


def records(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}-{k}", "task": TASKS[k % 2], "prompt": "?", "truth": {"number": k, "parity": k // 2 % 2}}
        for k in range(count)
    ]


def config(folder: Path, resets: ResetsConfig | None = None, **grpo: Any) -> Config:
    """Return the configuration of a run; `grpo`: keys of `trainer.grpo` that differ from these."""
    few: dict[str, Any] = {
        **{"max_steps": 6, "prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2},
        **{"context_tokens": 10, "validate_every": 2, "checkpoint_every": 2, "keep_checkpoints": 9},
        **{"validation_samples": 3, "async_checkpoints": True, "save_rollout_groups": -1},
    }
    trainer = TrainerConfig(grpo=GRPOConfig(**{**few, **grpo}), resets=resets or ResetsConfig())
    cfg = Config(run_dir=str(folder), seed=3, trainer=trainer, model={"optim": {"lr": LR}, **SHAPE})
    cfg.data.validation = [DataSource(name="held")]
    cfg.trainer.precision, cfg.rollout.dtype = "32", "float32"
    return cfg


@functools.cache
def installed() -> Registry:
    return discover()


def plugins(functions: Mapping[str, str]) -> Registry:
    """As `discover`, whose search through all installed packages takes as long as two steps."""
    return discover(functions=functions) if functions else installed()


@dataclass
class SmallRun:
    """A run of `config` in its folder; each `start` is a new process of it."""

    cfg: Config
    folder: Path = field(init=False)
    policy: SmallPolicy = field(init=False)
    engines: SmallEngines = field(init=False)
    verifier: Verifier = field(init=False)
    collector: Collector = field(init=False)
    stopping: Stopping = field(init=False)
    train_prompts: int = 40

    def __post_init__(self) -> None:
        self.folder = Path(self.cfg.run_dir)
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, monkeypatch: Any) -> Trainer:
        """Return the trainer of a new process, which has begun or resumed the run."""
        policy = self._policy(monkeypatch)
        self.stopping = Stopping(self.cfg.trainer.deadlines)
        trainer = rank.build(self.cfg, self.folder, policy, self.stopping)
        self._built(trainer)
        rank.begin(trainer, self.folder)
        return trainer

    def process(self, monkeypatch: Any, prepare: Callable[[Trainer], object]) -> None:
        """Run a process from its start to its end, with its signal handlers.  Raises what ends it."""
        policy, build = self._policy(monkeypatch), rank.build

        def built(*arguments: Any) -> Trainer:
            trainer = build(*arguments)
            self._built(trainer)
            prepare(trainer)
            return trainer

        monkeypatch.setattr(rank, "Policy", lambda cfg, run_dir: policy)
        handlers = {number: signal.getsignal(number) for number in FORWARDED_AS.values()}
        try:
            with monkeypatch.context() as patch:
                patch.setattr(rank, "build", built)
                patch.setattr(rank, "gc", Mock())  # a look through all objects of the tests takes as long as the run
                rank.train(self.cfg, self.folder, only_warmup=False)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.close()

    def _policy(self, monkeypatch: Any) -> Any:
        """Return what `rank.Policy` is to a run; let `rank.connect` find engines and verifier."""
        cfg = self.cfg
        self.policy, self.engines, self.verifier = (
            SmallPolicy(cfg.trainer.grpo.temperature),
            SmallEngines(str(cfg.rollout.dtype)),
            Verifier(),
        )
        leader = Leader(cfg.trainer.deadlines, data_rank=0)
        data = LoadedData(
            [(DataSource(name="train"), records("train", self.train_prompts))],
            [(DataSource(name="held"), records("held", 8))],
        )
        endpoints = self.folder / "endpoints"
        endpoints.mkdir(exist_ok=True)
        (endpoints / "token").write_text("secret\n")
        (endpoints / "token").chmod(0o600)
        for name in ("rewards-0", *(f"engine-{k}" for k in range(cfg.rollout.engines))):
            (endpoints / f"{name}.json").write_text("{}")

        def pool(folder: Path, token: str, engines: int = 1) -> SmallEngines:
            assert (folder, token, engines) == (endpoints, "secret", cfg.rollout.engines)
            return self.engines

        monkeypatch.setattr(rank, "EnginePool", pool)
        monkeypatch.setattr(rank, "RewardClient", lambda folder, token: self.verifier)
        monkeypatch.setattr(rank, "discover", plugins)
        monkeypatch.setattr(rank, "PromptLengths", lambda folder, data: ThreeTokens())
        return SimpleNamespace(
            actor=self.policy,
            leader=leader,
            renderer=SmallRenderer(),
            folder=self.folder,
            data=leader.only(lambda: data),
            loggers=[],
            checkpoint_files=lambda cfg: SmallStore(self.policy, cfg.trainer.grpo.async_checkpoints),
        )

    def _built(self, trainer: Trainer) -> None:
        collector = trainer.rollouts.collector._made[0]
        assert collector is not None
        self.collector = collector
        for group in collector._canaries._of_task if collector._canaries else []:
            self.verifier.known |= {one.request["id"]: one.right for one in group}

    def close(self) -> None:
        """End the process: its thread, and the weights in shared memory."""
        self.collector.close()
        WeightStore(weights_folder(self.folder)).remove()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = read_lines(self.folder / "journal.jsonl")
        return [line for line in lines if line["event"] in kinds or not kinds]

    def alarms(self) -> list[str]:
        return [f"{event['step']}: {event['what']}" for event in self.events("alarm")]

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl without times."""
        lines = read_lines(self.folder / "metrics.jsonl")
        return [{k: v for k, v in line.items() if not k.startswith(("time", "system"))} for line in lines]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the responses of a step that are trained on."""
        lines = read_lines(self.folder / "rollouts" / f"step-{step}.jsonl")
        return [line for line in lines if line["trained"]]


def parts_of(checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the state of every part that a checkpoint stores, as JSON."""
    return {name: json.loads(json.dumps(part.state_dict())) for name, part in checkpoints.parts.items()}
