"""A node with GPUs is refused before any engine or rank starts, with the fix; and cores lie near the GPUs.

No GPU is here: `nvidia-smi` is a script that prints what a machine would, and sysfs a tree of files.  That shows what
is asked and how it is assessed, not what a real driver says.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.errors import UnfitMachine
from nemo_prorl.launcher import node as node_module
from nemo_prorl.launcher.doctor import devices, network
from nemo_prorl.launcher.doctor.check import Check
from nemo_prorl.launcher.prepare import check_node
from nemo_prorl.launcher.processes import MergedLog
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.sizing.cores import Cores
from tests.launcher.test_doctor import states
from tests.launcher.test_doctor_devices import H100

GPU = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "data=laptop", "trainer.num_nodes=1"]
GPU += ["rollout.engines=8", f"rollout.python={sys.executable}"]
LINE = "NVIDIA H100 80GB HBM3, 81559, 0, 9.0, {driver}, {mode}, 00000000:{bus:02X}:00.0, GPU-{bus}"
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Puts an `nvidia-smi` before all others that shows so many GPUs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_PYTORCH_VERSION", raising=False)

    def show(count: int, mode: str = "Default", driver: str = "580.65.06") -> None:
        lines = [LINE.format(mode=mode, bus=16 + k, driver=driver) for k in range(count)]
        program = tmp_path / "bin" / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)

    return show


def refusal(*overrides: str, trains: bool = True) -> str:
    with pytest.raises(UnfitMachine) as caught:
        check_node(settings.load([*GPU, *overrides]), trains)
    return str(caught.value)


def test_a_gpu_run_outside_the_container_is_refused_with_the_image(smi: Smi) -> None:
    smi(8)
    text = refusal()
    for part in ("no module apex", "no module transformer_engine", "no module fused_weight_gradient_mlp_cuda"):
        assert part in text
    for part in ("NVIDIA_PYTORCH_VERSION is not set", "--container-image=IMAGE", "docs/howto/container.md"):
        assert part in text
    plain = ["model.transformer_engine=false", "model.gradient_accumulation_fusion=false"]
    plain.append("model.activations_checkpoint_granularity=selective")  # else the scores of attention do not fit
    assert "no module apex, NVIDIA_PYTORCH_VERSION is not set" in refusal(*plain)
    assert "apex" not in refusal(trains=False)  # an evaluation has no trainer; there is no libcuda here


def test_the_command_ends_with_3_before_anything_starts(
    smi: Smi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    smi(8)
    assert cli.main(["train", *GPU, f"run_dir={tmp_path / 'run'}"]) == 3
    assert "--container-image=IMAGE" in caplog.text
    assert not (tmp_path / "run" / "endpoints").exists()


def test_too_few_or_closed_gpus_are_refused(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(7)
    assert "found 7 x NVIDIA H100 80GB HBM3; the run needs trainer.devices=8" in refusal()
    smi(8, "Exclusive_Process")
    text = refusal()
    assert "expected compute mode Default; got 0: Exclusive_Process" in text
    assert "nvidia-smi --compute-mode=0" in text
    smi(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert "found 4 x NVIDIA H100 80GB HBM3; the run needs trainer.devices=8" in refusal()


def test_a_node_without_nvidia_smi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nvidia-smi cannot be run" in refusal()


@pytest.mark.slow
@pytest.mark.starts
def test_the_doctor_prints_the_same_checks(smi: Smi) -> None:
    smi(8, "Prohibited")
    found = {check.name: check for check in devices.check_gpus(settings.load(GPU), Path(sys.executable))}
    assert (found["container"].state, found["compute mode"].state) == ("fail", "fail")
    assert found["container"].fix in refusal()


def test_what_cuda_shows_is_what_counts() -> None:
    gpus = [replace(H100, uuid=f"GPU-{k}f") for k in range(4)]
    shown = {
        None: [0, 1, 2, 3],
        "3,1": [3, 1],
        "GPU-2f,GPU-0": [2, 0],
        "": [],
        "-1": [],
        "1,9,0": [1],  # CUDA ignores what follows an unknown device
    }
    for given, expected in shown.items():
        environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
        assert devices.visible(gpus, environment) == [gpus[k] for k in expected]


def test_a_driver_must_run_the_cuda_of_both_environments(tmp_path: Path) -> None:
    rollout, training = devices.ROLLOUT, "the training environment"
    new, older, none = devices.Libcuda(13000), devices.Libcuda(12080), devices.Libcuda(0)
    good = devices.assess_driver({rollout: ("13.0", new), training: ("12.8", new)}, "580.65.06")
    old = devices.assess_driver({rollout: ("13.0", older)}, "570.86.15")
    cpu = devices.assess_driver({rollout: (None, older)}, "570.86.15")
    trainer = devices.assess_driver({rollout: ("13.0", new), training: ("13.0", older)}, "570.86.15")
    checks = [good, old, cpu, devices.assess_driver({rollout: ("13.0", none)}, "none"), trainer]
    assert states(checks) == ["pass", "fail", "pass", "fail", "fail"]
    assert (
        "torch of the rollout environment is built for CUDA 13.0; driver 570.86.15 runs at most CUDA 12.8" in old.text
    )
    assert "install driver 580 or later" in old.fix
    assert "cuda-compat-13-0" in old.fix
    assert "PRORL_CUDA_COMPAT" not in trainer.fix  # the trainer has its image's CUDA
    for line, expected in (("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None)):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\ndebug = False\n{line}\nhip = None\n")
        assert devices.cuda_of_torch([tmp_path]) == expected
    assert devices.cuda_of_torch([tmp_path / "nowhere"]) is None


def libcuda(folder: Path, driver: str, runs: int, status: int = 0) -> Path:
    """A folder with a libcuda.so.1 that answers as the driver's does."""
    folder.mkdir(exist_ok=True)
    source, library = folder / "cuda.c", folder / f"libcuda.so.{driver}"
    version = f"int cuDriverGetVersion(int *version) {{ *version = {runs}; return 0; }}"
    source.write_text(f"{version}\nint cuInit(unsigned flags) {{ return {status}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    (folder / "libcuda.so.1").unlink(missing_ok=True)
    (folder / "libcuda.so.1").symlink_to(library.name)
    return folder


@pytest.mark.starts
def test_on_an_older_driver_engines_alone_load_the_compatibility_libraries(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, compat = libcuda(tmp_path / "own", "550.54.15", 12040), libcuda(tmp_path / "compat", "580.95.05", 13000)
    torch = tmp_path / "venv" / "lib" / "python3.12" / "site-packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(own))
    monkeypatch.delenv("PRORL_CUDA_COMPAT", raising=False)
    cfg = settings.load([*GPU, f"run_dir={tmp_path}", "rollout.kv_cache_mb=1000"])

    def driver() -> Check:
        found = devices.check_node_gpus(cfg, os.environ, tmp_path / "venv" / "bin" / "python")
        return next(check for check in found if check.name == "driver")

    def paths() -> dict[str, str]:
        node = NodeSupervisor(cfg, tmp_path, ["chain_sum"], MergedLog(tmp_path / "all.log"))
        made = [*node.services(tmp_path), *node._ranks(None)]
        return {child.name: child.env["LD_LIBRARY_PATH"] for child in made}

    smi(8, driver="550.54.15")
    assert "is built for CUDA 13.0; driver 550.54.15 runs at most CUDA 12.4" in driver().text
    assert set(paths().values()) == {str(own)}
    monkeypatch.setenv("PRORL_CUDA_COMPAT", str(compat))
    good = driver()
    assert (good.state, good.text) == (
        "pass",
        f"550.54.15, CUDA 13.0 in the rollout environment with the libraries in {compat},"
        " CUDA 12.4 in the training environment",
    )
    engines = {name: path for name, path in paths().items() if path != str(own)}
    assert engines == {f"engine-{k}": f"{compat}{os.pathsep}{own}" for k in range(8)}
    libcuda(compat, "580.95.05", 13000, status=803)
    assert "error 803, the driver does not take the forward-compatibility libraries" in driver().text
    for newer in ("580.65.06", "595.58"):  # CUDA refuses older libraries there
        smi(8, driver=newer)
        assert "error" not in driver().text
        assert set(paths().values()) == {str(own)}


def test_a_name_that_only_this_machine_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"node0": "127.0.1.1", "node1": "10.0.0.5", "node2": "127.0.1.12"}
    monkeypatch.setattr("socket.gethostbyname", lambda name: addresses[name])
    fault = network.loopback_fault(["node1"], {}, "node0")
    assert fault is not None
    assert "this machine's name node0 resolves to 127.0.1.1, which node1 cannot reach" in fault
    assert "/etc/hosts" in fault
    assert network.loopback_fault(["node1"], {"GLOO_SOCKET_IFNAME": "ib0"}, "node0") is None
    assert network.loopback_fault(["node2"], {}, "node0") is None  # one machine that plays several
    assert network.loopback_fault(["node0"], {}, "node1") is None
    monkeypatch.setattr("socket.gethostname", lambda: "node0")
    with pytest.raises(UnfitMachine, match="127.0.1.1"):
        node_module._require_reachable(settings.load([]), ["node1"])


def machine(folder: Path) -> Path:
    """sysfs of two sockets with four GPUs each."""
    for numa, cores in enumerate(("0-51,104-155", "52-103,156-207")):
        (folder / "devices" / "system" / "node" / f"node{numa}").mkdir(parents=True)
        (folder / "devices" / "system" / "node" / f"node{numa}" / "cpulist").write_text(cores + "\n")
    for k in range(8):
        device = folder / "bus" / "pci" / "devices" / f"0000:{16 + k:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{k // 4}\n")
    return folder


BUSES = [f"00000000:{16 + k:02X}:00.0" for k in range(8)]


def cores(sysfs: Path, *overrides: str, there: range = range(208), buses: list[str] = BUSES) -> Cores:
    chosen = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", *overrides]
    return Cores.near_gpus(settings.load(chosen), there, buses, sysfs)


def test_ranks_and_engines_run_near_their_gpus(tmp_path: Path) -> None:
    sysfs = machine(tmp_path)
    first, second = [*range(52), *range(104, 156)], [*range(52, 104), *range(156, 208)]
    assert cores(sysfs) == Cores([first] * 4 + [second] * 4, [first] * 4 + [second] * 4)
    assert cores(sysfs, there=range(100)).ranks == [[*range(52)]] * 4 + [[*range(52, 100)]] * 4
    pairs = cores(sysfs, "rollout.tensor_parallel_size=2", "rollout.engines=16").engines
    assert pairs == [first, first, second, second]
    apart = ["cluster=h100_4x8_split", "rollout.tensor_parallel_size=2", "rollout.engines=12"]
    assert cores(sysfs, *apart) == Cores([first] * 2, [first, second, second])
    assert cores(sysfs, there=range(10)).ranks == [[*range(10)]] * 4 + [[]] * 4  # a process without: all cores
    assert cores(sysfs, buses=BUSES[:2]).ranks == [first] * 2 + [[]] * 6
    (sysfs / "bus" / "pci" / "devices" / "0000:10:00.0" / "numa_node").write_text("-1\n")
    assert cores(sysfs).ranks[:2] == [[], first]
    assert cores(tmp_path / "nowhere") == Cores([[]] * 8, [[]] * 8)


def test_a_supervisor_takes_them_from_the_machine(smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_prorl.launcher.supervisor import NodeSupervisor
    from nemo_prorl.sizing import cores as cores_module

    smi(8)
    mine, sysfs = sorted(os.sched_getaffinity(0)), machine(tmp_path / "sys")
    (sysfs / "devices" / "system" / "node" / "node1" / "cpulist").write_text(f"{mine[-1]}\n")
    real = cores_module._near
    monkeypatch.setattr(cores_module, "_near", lambda bus, there, _: real(bus, there, sysfs))
    node = NodeSupervisor(
        settings.load([*GPU, f"run_dir={tmp_path}"]), tmp_path, ["math"], MergedLog(tmp_path / "all.log")
    )
    engines = node.services(tmp_path / "weights")[1:]
    assert engines[7].cores == [mine[-1]]
    assert node._ranks(None)[7].cores == [mine[-1]]
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi: as before, all cores
    again = NodeSupervisor(
        settings.load([*GPU, f"run_dir={tmp_path}"]), tmp_path, ["math"], MergedLog(tmp_path / "all.log")
    )
    assert again.services(tmp_path / "weights")[1].cores is None
