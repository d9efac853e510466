"""Chunked, vocabulary-parallel log-probabilities against the naive formula in float64."""

import json
import math
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nemo_prorl.algorithms import logprobs
from nemo_prorl.algorithms.logprobs import chunked_logprobs

REPOSITORY = Path(__file__).parents[2]


def case(seed: int, tokens: int, rows: int, hidden: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and what the two results are multiplied with, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    target = torch.randint(0, vocab, (tokens,), generator=generator)
    if tokens > 1:
        target[0], target[1] = 0, vocab - 1
    return noise(tokens, hidden), noise(rows, hidden), target, noise(tokens), noise(tokens)


def naive(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    slopes: tuple[Tensor, Tensor],
    temperature: float,
    vocab: int,
    head: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> list[Tensor]:
    """(logp, entropy, gradient to hidden, gradient to weight) in float64, by autograd through full logits."""
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = head((hidden @ weight.T)[:, :vocab]) / temperature
    probability = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    logp = probability.log().gather(1, target[:, None])[:, 0]
    entropy = -(probability * probability.log()).sum(dim=1)
    (slopes[0] @ logp + slopes[1] @ entropy).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [logp.detach(), entropy.detach(), hidden.grad, weight.grad]


def ours(
    hidden: Tensor, weight: Tensor, target: Tensor, slopes: tuple[Tensor, Tensor], temperature: float, **kwargs: Any
) -> list[Tensor]:
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    logp, entropy = chunked_logprobs(hidden, weight, target, temperature, with_entropy=True, **kwargs)
    assert entropy is not None
    (slopes[0].to(logp.dtype) @ logp + slopes[1].to(logp.dtype) @ entropy).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [logp.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
@pytest.mark.parametrize("chunk", [1, 3, 10, 13, 4096])
@pytest.mark.parametrize("block", [1, 4, 20, 21, 8192])
def test_matches_naive_with_every_chunk_and_block_size(temperature: float, chunk: int, block: int) -> None:
    hidden, weight, target, *slopes = case(chunk, tokens=13, rows=24, hidden=8, vocab=21)
    sizes = {"vocab_size": 21, "chunk": chunk, "block": block}
    expected = naive(hidden, weight, target, (slopes[0], slopes[1]), temperature, 21)
    exact = ours(hidden, weight, target, (slopes[0], slopes[1]), temperature, **sizes)
    for got, right in zip(exact, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-11)
    single = ours(hidden.float(), weight.float(), target, (slopes[0], slopes[1]), temperature, **sizes)
    for got, right in zip(single, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_autograd_check(with_entropy: bool) -> None:
    hidden, weight, target, *_ = case(0, tokens=5, rows=9, hidden=4, vocab=7)

    def function(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        results = chunked_logprobs(h, w, target, 1.2, vocab_size=7, chunk=2, block=3, with_entropy=with_entropy)
        return tuple(r for r in results if r is not None)

    assert torch.autograd.gradcheck(function, (hidden.requires_grad_(), weight.requires_grad_()))


def test_log_probability_alone_is_the_same() -> None:
    hidden, weight, target, slope, _ = case(2, tokens=9, rows=16, hidden=5, vocab=16)
    expected = naive(hidden, weight, target, (slope, torch.zeros(9, dtype=torch.float64)), 1.2, 16)
    hidden.requires_grad_()
    weight.requires_grad_()
    logp, entropy = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=16, chunk=4)
    assert entropy is None
    (slope @ logp).backward()
    for got, right in zip((logp.detach(), hidden.grad, weight.grad), (expected[0], *expected[2:]), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-12)


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, target, _, slope = case(3, tokens=6, rows=8, hidden=4, vocab=8)
    expected = naive(hidden, weight, target, (torch.zeros(6, dtype=torch.float64), slope), 0.8, 8)
    hidden.requires_grad_()
    _, entropy = chunked_logprobs(hidden, weight, target, 0.8, vocab_size=8, chunk=4, with_entropy=True)
    assert entropy is not None
    (slope @ entropy).backward()
    torch.testing.assert_close(hidden.grad, expected[2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=hidden @ weight.T / 0.8).entropy(), rtol=1e-10, atol=1e-12
    )


def test_padding_rows_never_count() -> None:
    hidden, weight, target, *slopes = case(4, tokens=7, rows=12, hidden=4, vocab=10)
    clean = ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, vocab_size=10)
    weight[10:] = math.nan
    spoilt = ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, vocab_size=10)
    for a, b in zip(clean, spoilt, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(spoilt[3][10:], torch.zeros(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_huge_logits_do_not_overflow(block: int) -> None:
    weight = torch.tensor([[300.0], [-300.0], [299.0]], requires_grad=True)
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    targets = torch.tensor([0, 0])
    logp, entropy = chunked_logprobs(hidden, weight, targets, 1.0, vocab_size=3, block=block, with_entropy=True)
    assert entropy is not None
    (logp.sum() + entropy.sum()).backward()
    assert logp.tolist() == pytest.approx([-math.log1p(math.exp(-1)), -600.0], rel=1e-6)
    p = 1 / (1 + math.exp(-1))
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], rel=1e-5)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_tokens() -> None:
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.ones(6, 4, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64)
    logp, entropy = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=6, with_entropy=True)
    assert entropy is not None
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(6, 4))


def test_frozen_weight_and_no_grad() -> None:
    hidden, weight, target, *_ = case(6, tokens=5, rows=8, hidden=4, vocab=8)
    hidden.requires_grad_()
    logp, _ = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=8)
    logp.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        again, _ = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=8)
    assert not again.requires_grad
    assert torch.equal(again, logp.detach())


def test_bfloat16_inputs_are_reduced_in_float32() -> None:
    hidden, weight, target, *slopes = case(5, tokens=40, rows=64, hidden=32, vocab=60)
    hidden, weight = (hidden / 4).bfloat16(), weight.bfloat16()
    expected = naive(hidden, weight, target, (slopes[0], slopes[1]), 1.2, 60)
    logp, entropy, grad_hidden, grad_weight = ours(
        hidden, weight, target, (slopes[0], slopes[1]), 1.2, vocab_size=60, chunk=7, block=9
    )
    assert logp.dtype == entropy.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    torch.testing.assert_close(logp.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=1e-5)
    # One rounding to bfloat16 (8 bits) and no more: six chunks or seven blocks added up in bfloat16 would miss this.
    torch.testing.assert_close(grad_hidden.double(), expected[2], rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(grad_weight.double(), expected[3], rtol=2**-8, atol=1e-5)


def test_without_a_float32_head_logits_are_rounded_as_an_engine_rounds_them() -> None:
    """Large logits, so that rounding shows.  The gradient is that of the rounded logits; rounding has slope 1."""
    hidden, weight, target, *slopes = case(11, tokens=40, rows=64, hidden=32, vocab=60)
    hidden, weight = hidden.bfloat16(), (2 * weight).bfloat16()

    def rounded(logits: Tensor) -> Tensor:
        return logits + (logits.float().bfloat16().double() - logits).detach()

    wanted, expected = naive(hidden, weight, target, (slopes[0], slopes[1]), 1.2, 60, rounded), []
    for float32_head in (False, True):
        expected.append(
            ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, vocab_size=60, chunk=7, float32_head=float32_head)
        )
    found, exact = expected
    for got, right in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    for got, right in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2**-8, atol=1e-5)
    assert float((found[0] - exact[0]).abs().mean()) > 1e-2


def test_a_float32_model_has_one_kind_of_head() -> None:
    hidden, weight, target, *slopes = case(12, tokens=9, rows=16, hidden=8, vocab=16)
    one, other = (
        ours(hidden.float(), weight.float(), target, (slopes[0], slopes[1]), 1.2, vocab_size=16, float32_head=head)
        for head in (True, False)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_numbers_are_numbers_of_tf32(dtype: torch.dtype) -> None:
    """All of them: a GPU that multiplies float32 copies in TF32 (10 bits behind the point) rounds nothing away."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = every[torch.isfinite(every)].float().view(torch.int32)
    assert len(bits) > 60_000
    assert not (bits & (2**13 - 1)).any()
    significant = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    assert 2 * significant <= 24  # a product is a float32 number


def test_tf32_is_allowed_for_these_products_only() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(KeyError), logprobs._tf32():
        assert torch.backends.cuda.matmul.allow_tf32
        raise KeyError
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_autocast_does_not_lower_the_precision() -> None:
    hidden, weight, target, *_ = case(7, tokens=9, rows=16, hidden=8, vocab=16)
    hidden, weight = hidden.float().requires_grad_(), weight.float()
    plain, _ = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=16)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_block_changes_its_logits_only_if_it_may(with_entropy: bool) -> None:
    product, _, target, ones, _ = case(9, tokens=4, rows=1, hidden=7, vocab=7)
    entropy = ones if with_entropy else None
    nothing = logprobs._nothing_seen(target, torch.float64, with_entropy)
    found: dict[bool, list[Tensor | None]] = {}
    for reuse in (False, True):
        given, other = product.clone(), product.clone()
        found[reuse] = [
            *logprobs._seen(given, 1.2, target, nothing, reuse),
            logprobs._logit_gradient(other, 1.2, target, ones, ones, entropy, entropy, reuse),
        ]
        assert torch.equal(given, product) == torch.equal(other, product) == (not reuse)
    for one, two in zip(found[False], found[True], strict=True):
        assert (one is None) == (two is None)
        assert one is None or two is None or torch.equal(one, two)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Says whether blocks are compiled, here on a CPU; needs a C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")

    def choose(wanted: bool) -> None:
        monkeypatch.setattr(logprobs, "_is_compiled", lambda tensor: wanted)

    yield choose
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_blocks_give_the_same_results(compiled: Callable[[bool], None]) -> None:
    """For chunks and blocks of all sizes, the last ones shorter, with four compiled functions in all."""
    from torch._dynamo.utils import counters  # an import of two seconds

    counters.clear()
    slopes: dict[str, Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]] = {
        "no entropy": lambda ab: (ab[0], torch.zeros_like(ab[1])),
        "entropy": lambda ab: ab,
    }
    for index, (tokens, rows, vocab) in enumerate([(50, 100, 90), (37, 64, 64), (1, 30, 29), (130, 500, 490)]):
        hidden, weight, target, *both = case(index, tokens, rows, 16, vocab)
        for chunk, block, temperature in ((16, 9, 1.2), (64, 256, 1.0), (4096, 32, 0.6)):
            for name, of in slopes.items():
                found = []
                for wanted in (False, True):
                    compiled(wanted)
                    head, leaf = hidden.float().requires_grad_(), weight.float().requires_grad_()
                    logp, entropy = chunked_logprobs(
                        head, leaf, target, temperature, vocab_size=vocab, chunk=chunk, block=block,
                        with_entropy=name == "entropy",
                    )  # fmt: skip
                    parts = of((both[0].float(), both[1].float()))
                    (parts[0] @ logp + (0.0 if entropy is None else parts[1] @ entropy)).backward()
                    found.append(
                        [logp.detach(), head.grad, leaf.grad, *([] if entropy is None else [entropy.detach()])]
                    )
                for eager, other in zip(*found, strict=True):
                    torch.testing.assert_close(other, eager, rtol=1e-5, atol=2e-5)
    assert not logprobs._seen_block._broken
    assert not logprobs._gradient_block._broken
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.starts
def test_without_a_compiler_blocks_are_eager_and_a_line_says_so(
    compiled: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no working compiler was found\nand more")

    hidden, weight, target, *slopes = case(2, tokens=30, rows=24, hidden=8, vocab=21)
    hidden, weight = hidden.float(), weight.float()
    kwargs: dict[str, Any] = {"vocab_size": 21, "chunk": 7, "block": 5}
    eager = ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, **kwargs)
    compiled(True)
    for name in ("_seen_block", "_gradient_block"):
        block = logprobs._Block("a pass", getattr(logprobs, name)._body)
        monkeypatch.setattr(block, "_compiled", torch.compile(block._body, dynamic=True, backend=fails))
        monkeypatch.setattr(logprobs, name, block)
    with caplog.at_level("WARNING"):
        found = ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    said = [record.message for record in caplog.records if record.name == logprobs.__name__]
    assert len(said) == 2  # one for each of the two functions
    assert said[0].endswith("is not compiled, which is slower: RuntimeError: no working compiler was found")


def test_what_is_compiled_and_what_a_failure_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []
    errors: list[Exception] = [torch.OutOfMemoryError("full"), RuntimeError()]

    def body(product: Tensor, reuse: bool) -> Tensor:
        calls.append(reuse)
        return product

    def compiled_body(product: Tensor, reuse: bool) -> Tensor:
        assert not reuse
        raise errors.pop(0)

    block = logprobs._Block("a pass", body)
    monkeypatch.setattr(block, "_compiled", compiled_body)
    with caplog.at_level("WARNING"):
        block(torch.zeros(2, 5))  # on a CPU
        monkeypatch.setattr(logprobs, "_is_compiled", lambda tensor: True)
        for shape in ((1, 5), (5, 1)):
            block(torch.zeros(shape))
        with pytest.raises(torch.OutOfMemoryError):
            block(torch.zeros(2, 5))
        assert (calls, caplog.messages) == ([True] * 3, [])
        for _ in range(2):
            block(torch.zeros(2, 5))
    assert (calls, errors) == ([True] * 5, [])
    assert caplog.messages == ["a pass of log-probabilities is not compiled, which is slower: RuntimeError: "]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations make, alive at a time, at most; views count once, with their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
        for leaf in tree_flatten(result)[0]:
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_is_an_eighth_of_the_naive_form_at_the_vocabulary_of_qwen(with_entropy: bool) -> None:
    """Beside inputs and their gradients, which both forms hold.  The naive form: float32 logits and their log-softmax,
    and the gradient of one; what is compared is what both do, so its entropies are left out.
    """
    vocab, tokens, width = 151_936, 96, 8
    hidden, weight, target, slope, _ = case(8, tokens, vocab, width, vocab)
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    gradients = 4 * (hidden.numel() + weight.numel())

    with LiveBytes() as full:
        logp = torch.log_softmax(hidden @ weight.T / 1.2, dim=1).gather(1, target[:, None])[:, 0]
        (slope.float() @ logp).backward()
    wanted, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    del logp
    with LiveBytes() as chunked:
        logp, entropy = chunked_logprobs(hidden, weight, target, 1.2, vocab_size=vocab, with_entropy=with_entropy)
        (slope.float() @ logp + (0.0 if entropy is None else 0.0 * entropy.sum())).backward()
    assert full.peak >= 3 * 4 * tokens * vocab  # the instrument sees what it should
    assert 8 * (chunked.peak - gradients) <= full.peak - gradients, (chunked.peak, full.peak, gradients)
    for found, right in zip((hidden.grad, weight.grad), wanted, strict=True):
        assert found is not None
        assert right is not None
        assert float((found - right).norm()) <= 1e-5 * float(right.norm())


def test_an_entropy_without_a_gradient_takes_no_memory_in_the_backward_pass() -> None:
    hidden, weight, target, *_ = case(10, tokens=9, rows=50, hidden=2, vocab=50)
    peaks = []
    for with_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        logp, _ = chunked_logprobs(leaf, weight, target, 1.2, vocab_size=50, with_entropy=with_entropy)
        with LiveBytes() as backward:
            logp.sum().backward()
        peaks.append(backward.peak)
    assert peaks[0] == peaks[1] > 0


@pytest.mark.starts
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Real gloo processes.  In one case the second shard ends in padding, in the other it is nothing else."""
    vocabularies = (19, 11)
    settings = {"temperature": 1.2, "vocab_sizes": vocabularies, "chunk": 4, "block": 5, "world": 2}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    cases = [case(vocab, tokens=11, rows=24, hidden=6, vocab=vocab) for vocab in vocabularies]
    torch.save(cases, tmp_path / "cases.pt")
    script = Path(__file__).with_name("vocab_parallel_rank.py")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, tmp_path, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=250)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for i, (hidden, weight, target, *slopes) in enumerate(cases):
        one = ours(hidden, weight, target, (slopes[0], slopes[1]), 1.2, vocab_size=vocabularies[i], chunk=4)
        for shard in (first[i], second[i]):
            torch.testing.assert_close(shard[0], one[0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(shard[1], one[1], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(first[i][2] + second[i][2], one[2], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(torch.cat([first[i][3], second[i][3]]), one[3], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(first[0][2], first[0][2] + second[0][2])  # partial sums, as promised
    assert torch.equal(second[1][2], torch.zeros(11, 6, dtype=torch.float64))  # a share of no words


@pytest.mark.parametrize("targets", [[0, 8, 1], [0, 1, -100]])
def test_a_target_outside_of_the_vocabulary_is_named(targets: list[int]) -> None:
    place = next(i for i, target in enumerate(targets) if not 0 <= target < 8)
    with pytest.raises(ValueError, match=rf"target_N\[{place}\] is {targets[place]}, outside the vocabulary of 8"):
        chunked_logprobs(torch.zeros(3, 4), torch.zeros(9, 4), torch.tensor(targets), 1.0, vocab_size=8)
