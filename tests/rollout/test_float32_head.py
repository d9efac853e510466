"""The engine's output head: in float32, or rounded to bfloat16, with the trainer's formula beside it.

The models' layers add nothing to their input, so that hidden states are the same on both sides to the bit but for a
norm's rounding: what is left of the gap is the head's.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_prorl.algorithms.logprobs import chunked_logprobs
from nemo_prorl.rollout.endpoints import EngineClient, Response, SamplingParams
from tests.rollout.engines import CONFIG, EngineProcess, random_weights
from tests.rollout.test_engine import SHORT, ask, load, published, with_client

pytestmark = pytest.mark.vllm

TEMPERATURE = 1.2
ROUNDED = (3e-3, 5e-2)  # bfloat16 has a spacing of 0.06 from 8 on and 0.125 from 16 on; a mean error is a quarter of it
EXACT = 1e-4


def write_headed(folder: Path, tied: bool, seed: int) -> Path:
    """A bfloat16 model with logits of 10 to 30 whose attention and MLP give 0.

    The last norm's weight has both signs: with a tied head each token would repeat itself otherwise.
    """
    weights = random_weights(tied, seed)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    weights[head] *= 10
    weights["model.norm.weight"] = torch.randn(CONFIG["hidden_size"], generator=torch.Generator().manual_seed(seed))
    folder.mkdir(parents=True)
    config = {**CONFIG, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: t.bfloat16() for name, t in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trainers_logprobs(model: Path, responses: list[Response], float32_head: bool) -> Tensor:
    """Return the log-probabilities of all tokens of the responses to SHORT, in one list."""
    weights = load_file(model / "model.safetensors")
    rows = [prompt + response.token_ids for prompt, response in zip(SHORT, responses, strict=True)]
    before = torch.tensor([token for row in rows for token in row[len(SHORT[0]) - 1 : -1]])
    targets = torch.tensor([token for row in rows for token in row[len(SHORT[0]) :]])
    embedded = weights["model.embed_tokens.weight"][before].float()
    scale = torch.rsqrt(embedded.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
    hidden = (embedded * scale * weights["model.norm.weight"].float()).bfloat16()
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logp, _ = chunked_logprobs(
        hidden, head, targets, TEMPERATURE, vocab_size=CONFIG["vocab_size"], float32_head=float32_head
    )
    return logp


def gaps(engine: EngineProcess, model: Path) -> dict[bool, float]:
    """Mean absolute difference of log-probabilities, by whether the trainer's head is in float32."""

    async def work(client: EngineClient) -> list[Response]:
        sampling = SamplingParams(TEMPERATURE, max_tokens=32, stop_token_ids=())
        return [(await ask(client, prompt, [k], sampling))[0] for k, prompt in enumerate(SHORT)]

    responses: list[Response] = asyncio.run(with_client(engine, work))
    engines = torch.tensor([value for response in responses for value in response.logprobs])
    return {one: float((engines - trainers_logprobs(model, responses, one)).abs().mean()) for one in (True, False)}


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("headed")
    return {
        f"{kind}{seed}": write_headed(base / f"{kind}{seed}", kind == "tied", seed)
        for kind in ("tied", "untied")
        for seed in (0, 1)
    }


@pytest.fixture
def start(vllm_python: str, headed: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts a bfloat16 engine on a model, with options."""
    started: list[EngineProcess] = []

    def one(model: str, *options: str) -> EngineProcess:
        options = ("--dtype=bfloat16", "--kv-mb=32", *options)
        started.append(EngineProcess(vllm_python, headed[model], tmp_path, 0, *options).start())
        return started[0].wait_ready()

    yield one
    for engine in started:
        engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_float32_head_on_both_sides_gives_the_same_log_probabilities(
    start: Callable[..., EngineProcess], headed: dict[str, Path], kind: str
) -> None:
    """The engine is compared at its start and after it has loaded other weights."""
    engine = start(f"{kind}0", "--float32-head")
    for version in (0, 1):
        model = headed[f"{kind}{version}"]
        if version:
            load(engine, published(engine, model, version), version)
        found = gaps(engine, model)
        assert found[True] < EXACT
        assert ROUNDED[0] < found[False] < ROUNDED[1]


@pytest.mark.slow
def test_a_rounded_head_on_both_sides_differs_less_than_on_one(
    start: Callable[..., EngineProcess], headed: dict[str, Path]
) -> None:
    found = gaps(start("tied0"), headed["tied0"])
    assert ROUNDED[0] < found[True] < ROUNDED[1]
    assert found[False] < found[True] / 4
