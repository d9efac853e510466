"""The environment of a run's processes: caches, users without a name or a home, variables kept from engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_prorl.caches import cache_folder
from nemo_prorl.errors import UnfitMachine
from nemo_prorl.launcher import environment
from nemo_prorl.launcher.processes import Child, MergedLog
from nemo_prorl.launcher.supervisor import NodeSupervisor
from nemo_prorl.settings import load
from tests.launcher.test_gpu_node import GPU

pytestmark = pytest.mark.starts

ROOT = Path(__file__).resolve().parent.parent.parent
USER = 12345  # has no passwd entry


def children(folder: Path, *overrides: str) -> dict[str, Child]:
    node = NodeSupervisor(load([f"run_dir={folder}", *overrides]), folder, ["chain_sum"], MergedLog(folder / "all.log"))
    return {child.name: child for child in [*node.services(folder), *node._ranks(None)]}


def test_all_processes_keep_their_caches_below_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment._CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    for name, child in children(tmp_path, "+launch.env.CUDA_CACHE_PATH=/ours").items():
        assert child.env["VLLM_CACHE_ROOT"] == str(tmp_path / "cache" / "vllm"), name
        assert child.env["XDG_CACHE_HOME"] == str(tmp_path / "cache"), name
        assert (child.env["TRITON_CACHE_DIR"], child.env["CUDA_CACHE_PATH"]) == ("/mine", "/ours"), name


def test_an_engine_gets_nothing_that_is_the_trainer_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the image's torch and of enroot's hooks are dropped; launch.env is for all processes."""
    foreign = [
        "NCCL_IB_HCA",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]
    foreign += ["TRITON_PTXAS_PATH", "CUDA_HOME"]
    foreign += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH"]
    for name in [*foreign, "CUDA_MODULE_LOADING"]:
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/python3.12/dist-packages/torch/lib:/usr/local/nvidia/lib64")
    made = children(tmp_path, "+launch.env.NCCL_DEBUG=WARN", "+launch.env.VLLM_USE_V2_MODEL_RUNNER=0")
    engine, rank = made["engine-0"].env, made["trainer-0"].env
    assert not [name for name in foreign if name in engine]
    assert (engine["NCCL_DEBUG"], engine["CUDA_MODULE_LOADING"]) == ("WARN", "theirs")
    assert engine["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # the way back in docs/howto/troubleshooting.md
    assert engine["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert rank["LD_LIBRARY_PATH"] == os.environ["LD_LIBRARY_PATH"]
    assert (rank["NCCL_IB_HCA"], rank["PYTHONPATH"], rank["RANK"]) == ("theirs", "theirs", "0")


@pytest.mark.parametrize(("tensor_parallel", "given", "expected"), [(1, None, None), (2, None, "1"), (1, "8", "8")])
def test_only_ranks_order_their_kernels_and_only_if_tensor_parallel(
    tensor_parallel: int, given: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    layout = [f"model.tensor_model_parallel_size={tensor_parallel}", "rollout.kv_cache_mb=1000"]
    made = children(tmp_path, *GPU, *layout)
    assert made["trainer-0"].env.get(name) == expected
    assert name not in made["engine-0"].env


def test_a_user_without_a_passwd_entry_gets_a_name_and_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getuid", lambda: USER)
    cache = {"PRORL_CACHE": str(tmp_path)}
    found = environment.with_caches(cache)
    assert (found["USER"], found["LOGNAME"], found["HOME"]) == ("uid12345", "uid12345", str(tmp_path))
    assert environment.with_caches({**cache, "HOME": "/x"})["HOME"] == "/x"
    assert environment.with_caches({**cache, "HOME": "/"})["HOME"] == str(tmp_path)


@pytest.mark.starts
def test_only_the_named_warnings_of_libraries_are_filtered(tmp_path: Path) -> None:
    """torch warns of NeMo's pynvml when it is imported, unless the variables are there."""
    code = """
import warnings, torch
for text in ("`torch.distributed.reduce_op` is deprecated, use", "ours is deprecated", "theirs is deprecated"):
    warnings.warn(text, FutureWarning)
"""
    given = {**os.environ, "PRORL_CACHE": str(tmp_path), "PYTHONWARNINGS": "ignore:theirs"}
    quiet = environment.with_caches(given)
    loud, told = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stderr
        for env in (given, quiet)
    )
    assert "pynvml package is deprecated" in loud
    assert "reduce_op" in loud
    assert [line.split(": ", 1)[1] for line in told.splitlines() if "Warning" in line] == [
        "FutureWarning: ours is deprecated"
    ]


def test_a_cache_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnfitMachine, match="PRORL_CACHE=.*/file/sub: expected a folder .*Fix: set PRORL_CACHE"):
        cache_folder({"PRORL_CACHE": str(tmp_path / "file" / "sub")})
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    foreign = Path("/tmp/prorl-987654")  # made by somebody else, as a name that can be guessed may be
    foreign.mkdir(exist_ok=True)
    try:
        with pytest.raises(UnfitMachine, match="/tmp/prorl-987654: expected a folder that only user 987654 can write"):
            cache_folder({})
    finally:
        foreign.rmdir()


@pytest.mark.slow  # a run of one step: NeMo's import, an engine that compiles
@pytest.mark.vllm
@pytest.mark.nemo
def test_a_run_needs_no_home_no_name_and_no_working_folder_of_its_own(tmp_path: Path) -> None:
    """The run is made as in enroot: the home is read-only, the user has no passwd entry, the folder is another."""
    if not (ROOT / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(mode=0o555)
    here.mkdir()
    prefix = ["unshare", "--user", f"--map-user={USER}", f"--map-group={USER}"]
    trial = subprocess.run([*prefix, "touch", str(home / "x")], capture_output=True, text=True, check=False)
    if "Permission denied" not in trial.stderr:
        pytest.skip(f"no user namespace for a user without a name: {trial.stderr.strip()}")
    command = [sys.executable, "-m", "nemo_prorl.cli", "train", "run_dir=run", "trainer.grpo.max_steps=1"]
    command += ["trainer.grpo.prompts_per_step=4", "trainer.grpo.samples_per_prompt=4", "trainer.warmup.steps=2"]
    command += [f"rollout.python={ROOT}/.venv/rollout/bin/python", "rollout.kv_cache_mb=128", "rollout.max_num_seqs=16"]
    command += ["rollout.eager=false", "data.train.0.size=50", "data.validation.0.size=4"]
    names = ("USER", "LOGNAME", "LNAME", "USERNAME", *environment._CACHES)
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PRORL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*prefix, *command], cwd=here, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (here / "run" / "summary.json").is_file()
    assert [path.name for path in here.iterdir()] == ["run"]
    assert list(home.iterdir()) == []
    assert any((tmp_path / "cache" / "vllm").rglob("*.so"))
