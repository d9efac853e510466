"""`prorl doctor` on GPUs: each check by a made-up fact that it must not pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.launcher.doctor import devices
from nemo_prorl.launcher.doctor.check import NoAnswer
from tests.launcher.test_doctor import LAPTOP, laptop, states

H100 = devices.Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 0, (9, 0), "550.54.15", "Default", "00000000:1B:00.0", "GPU-a")
TORCH = devices.TorchFacts("2.7.0", "12.8", 8)


def test_lines_of_nvidia_smi() -> None:
    line = "NVIDIA H100 80GB HBM3, 81559, 0, 9.0, 550.54.15, Default, 00000000:1B:00.0, GPU-a\n"
    assert devices.parse_smi(2 * line) == [H100, H100]
    assert devices.parse_smi("") == []
    with pytest.raises(ValueError, match="No devices"):
        devices.parse_smi("No devices were found")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([H100] * 8, ["pass"]),
        ([H100] * 7, ["fail"]),
        ([], ["fail"]),
        ([H100] * 7 + [replace(H100, name="NVIDIA A100")], ["pass", "warn"]),
        ([H100] * 7 + [replace(H100, memory=40 << 30)], ["pass", "fail"]),
        ([H100] * 7 + [replace(H100, used=5 << 30)], ["pass", "warn"]),
        ([replace(H100, memory=143_771 << 20)] * 8, ["pass", "warn"]),  # an H200: much of it is not planned with
    ],
)
def test_gpus(gpus: list[devices.Gpu], expected: list[str]) -> None:
    assert states(devices.assess_gpus(gpus, 8, 85e9, "trainer.devices=8")) == expected


def test_precision_needs_its_capability() -> None:
    def state(capability: tuple[int, int], fp8: str | None, bf16: bool) -> str:
        return states([devices.assess_capability([H100, replace(H100, capability=capability)], fp8, bf16)])[0]

    assert [state(c, "hybrid", True) for c in ((8, 6), (8, 9), (9, 0))] == ["fail", "pass", "pass"]
    assert [state(c, None, True) for c in ((7, 5), (8, 0))] == ["fail", "pass"]
    assert state((7, 5), None, False) == "pass"


def test_transformer_engine_needs_its_version() -> None:
    found = [
        ("2.1.0", True),
        ("2.2.0+c55e425", True),
        ("1.13", False),
        ("2.2.0.dev0+bee4649c", True),  # what NeMo 2.3 names
        ("2.2.0.dev0+bee4649c", False),
        ("2.3.0.dev0+5fdd7bb", True),
        ("2.10.0", True),
    ]
    expected = ["fail", "pass", "pass", "warn", "pass", "pass", "pass"]
    assert states([devices.assess_layers(*one) for one in found]) == expected


@pytest.mark.parametrize(
    ("change", "state"),
    [({}, "pass"), ({"cuda": None}, "fail"), ({"gpus": 4}, "fail")],
)
def test_torch_on_gpus(change: dict[str, Any], state: str) -> None:
    assert states([devices.assess_torch("torch", replace(TORCH, **change), 8, "trainer.devices=8")]) == [state]


def test_a_cpu_configuration_is_asked_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> str:
        raise NoAnswer("nvidia-smi cannot be run")

    monkeypatch.setattr(devices, "output_of", refused)
    monkeypatch.setattr(devices, "ask", refused)
    assert list(devices.check_gpus(LAPTOP, Path("python"))) == []
    assert states(devices.check_gpus(laptop(trainer__accelerator="gpu"), Path("python"))) == ["fail"] * 4
