"""The seam to GPUs: which state of which generator a resume takes, what is exchanged where, and who may ask CUDA."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_prorl import device
from tests.policy.fake_gpu import fake_gpu

SEES_CUDA = {  # and why
    "device.py": "the seam",
    "algorithms/logprobs.py": "kernels: which product of 16-bit matrices there is",
    "policy/cpu/shims.py": "replaces CUDA",
    "rollout/engine/weight_load.py": "runs in vLLM's worker",
}


def test_one_module_of_the_trainer_asks_cuda(root: Path) -> None:
    package = root / "nemo_prorl"
    files = {str(f.relative_to(package)): f.read_text() for f in package.rglob("*.py") if "launcher" not in f.parts}
    asks = {name for name, text in files.items() if re.search(r"torch\.cuda|\.is_cuda", text)}
    assert asks == SEES_CUDA.keys()


Visible = Callable[[int, int], None]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Visible:
    """Lets torch's own functions see so many GPUs, of which this rank uses one; their generators are of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.random, "_lazy_call", lambda work, **_: work())

    def see(count: int, own: int) -> None:
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(torch.Generator() for _ in range(count)))
        for module in (torch.cuda, torch.cuda.random):
            monkeypatch.setattr(module, "current_device", lambda: own)
            monkeypatch.setattr(module, "device_count", lambda: count)

    return see


def generator(own: int) -> torch.Generator:
    every: Any = torch.cuda.default_generators  # by its type an empty tuple
    one: torch.Generator = every[own]
    return one


def drawn(own: int) -> list[float]:
    numbers: list[float] = torch.rand(4, generator=generator(own)).tolist()
    return numbers


def test_a_resume_where_fewer_gpus_are_visible_goes_on(visible: Visible) -> None:
    visible(8, 5)
    generator(5).manual_seed(3)
    drawn(5)
    states = device.random_states()
    assert len(states) == 1
    wanted = drawn(5)
    for count, own in ((4, 1), (1, 0), (8, 5), (8, 2)):
        visible(count, own)
        device.set_random_states(states, rank=13)
        assert drawn(own) == wanted


def test_an_older_checkpoint_s_states_of_all_gpus_of_a_node_are_read(visible: Visible) -> None:
    states = [torch.Generator().manual_seed(k).get_state() for k in range(8)]
    visible(2, 1)
    device.set_random_states(states, rank=8 + 5)  # the sixth GPU of the second node
    assert drawn(1) == torch.rand(4, generator=torch.Generator().manual_seed(5)).tolist()


def test_without_a_gpu_there_is_no_state_and_a_gpu_s_is_left_out() -> None:
    assert device.random_states() == []
    device.set_random_states([torch.Generator().get_state()], rank=0)
    assert device.memory() == {}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_gpu_s_parameters_stay_where_they_are_while_they_have_other_values(gpu: bool, fails: bool) -> None:
    layer = torch.nn.Linear(3, 2)
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    places = [p.data_ptr() for p in layer.parameters()]

    def check() -> None:
        assert torch.equal(layer.weight, values["weight"])
        assert torch.equal(layer.bias, values["bias"])
        assert ([p.data_ptr() for p in layer.parameters()] == places) == gpu
        if fails:
            raise RuntimeError

    def exchange() -> Any:
        with device.exchanged(dict(layer.named_parameters()), values):
            check()

    values = {name: 2 * value for name, value in own.items()}
    if gpu:
        with fake_gpu():
            _run(exchange, fails)
    else:
        _run(exchange, fails)
    assert [p.data_ptr() for p in layer.parameters()] == places
    assert all(torch.equal(p, own[name]) for name, p in layer.named_parameters())


def _run(work: Callable[[], Any], fails: bool) -> None:
    if fails:
        with pytest.raises(RuntimeError):
            work()
    else:
        work()


def test_a_copy_on_the_host_uses_the_memory_of_an_earlier_one() -> None:
    first = device.to_host(torch.arange(4.0))
    second = device.to_host(torch.ones(4), into=first)
    assert second.data_ptr() == first.data_ptr()
    assert first.tolist() == [1.0] * 4
