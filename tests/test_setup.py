"""The set-up: lock files, what is told on an unfit machine, and that a half-made environment is never used."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "setup"))

import environments  # noqa: E402
from lock import normal_name, read_pins  # noqa: E402

pytestmark = pytest.mark.starts

LOCKS = [ROOT / "setup" / "train.lock", ROOT / "setup" / "rollout.lock"]
CUDA_LOCK = ROOT / "setup" / "rollout-cuda.lock"


def archive_kinds(lock: Path) -> dict[str, list[str]]:
    """Return {name: what the archives of its hashes fit}, as `setup/lock.py` writes it at the end of each line."""
    lines = [line.partition("  # ") for line in lock.read_text().splitlines() if "--hash=" in line]
    return {pin.split("==")[0]: kinds.split() for pin, _, kinds in lines}


@pytest.mark.parametrize("lock", [*LOCKS, CUDA_LOCK], ids=lambda path: path.name)
def test_every_line_of_a_lock_is_pinned_and_hashed(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    for line in lines:
        pin, kinds = r"[a-z0-9][a-z0-9-]*==[0-9][A-Za-z0-9.!+]*", r"(  # [a-z0-9]+( [a-z0-9]+)*)?"
        assert re.fullmatch(rf"{pin}( --hash=sha256:[0-9a-f]{{64}})+{kinds}", line), line
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))
    left_out = {"torch"} if lock == CUDA_LOCK else {"torch", "torchvision"}  # vLLM for CUDA requires torchvision
    assert not left_out & set(names)


def test_both_locks_name_one_python_and_one_torch() -> None:
    for key in ("python", "torch"):
        assert len({environments.directive(lock, key) for lock in LOCKS}) == 1


def test_the_cuda_lock_is_what_its_pins_ask_for() -> None:
    """Resolved from rollout-cuda.in as it is now; wheels alone, for a node compiles nothing; with what torch needs."""
    head, pins = read_pins(CUDA_LOCK.with_suffix(".in").read_text())
    locked_head, locked = read_pins(CUDA_LOCK.read_text())
    assert locked_head[:-1] == head
    assert pins.items() <= locked.items()
    assert {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "triton"} <= set(locked)
    assert environments.directive(CUDA_LOCK, "torch") == environments.directive(LOCKS[1], "torch")
    for name, [kind] in archive_kinds(CUDA_LOCK).items():
        assert kind in ("py3", "py37", "abi3", "cp312"), f"{name}: {kind}"


def test_what_a_container_may_lack_has_hashes_for_its_python() -> None:
    names = [line for line in environments.NEEDED.read_text().splitlines() if line and not line.startswith("#")]
    kinds = archive_kinds(LOCKS[0])
    assert not [name for name in names if not {"py3", "abi3", "cp312", "sdist"} & set(kinds[name])]


def tracked_files() -> list[Path]:
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip("not a git checkout")
    return [path for name in told.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_tracked_file_holds_the_address_of_a_package_index() -> None:
    """An index is the machine's business: pip's configuration, its variables, or TORCH_INDEX."""
    parts = ("pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org", "/simple" + "/", "index" + "_url =")
    found = []
    for path in tracked_files():
        text = path.read_bytes()
        found += [f"{path.relative_to(ROOT)}: {part}" for part in parts if part.encode() in text]
    assert not found


class TestPins:
    def test_reads_head_pins_and_hashes(self) -> None:
        head, pins = read_pins("# a\n# python: 3.11\nFoo_Bar.x==1.0 --hash=sha256:00\n\nb==2\n    --hash=sha256:11\n")
        assert head == ["# a", "# python: 3.11"]
        assert pins == {"foo-bar-x": "1.0", "b": "2"}

    @pytest.mark.parametrize("line", ["foo>=1", "foo", "-r other.txt", "--index-url x"])
    def test_refuses_what_is_no_pin(self, line: str) -> None:
        with pytest.raises(ValueError, match=re.escape(line)):
            read_pins(f"a==1\n{line}\n")

    def test_names_compare_as_pip_compares_them(self) -> None:
        assert normal_name("Foo__Bar.-baz") == "foo-bar-baz"


def set_up(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the set-up of a copy of this project in `tmp_path`, with a tiny lock file and no index to reach."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "setup", project / "setup", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", project)
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_TIMEOUT": "5", "PIP_FIND_LINKS": ""}
    pip["PIP_INDEX_URL"] = "http://127.0.0.1:9"  # nothing listens there
    command = [sys.executable, str(project / "setup" / "environments.py"), *arguments]
    env = {**os.environ, **pip, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)


def write_lock(tmp_path: Path, python: str, pins: str = "") -> Path:
    lock = tmp_path / "tiny.lock"
    lock.write_text(f"# tiny\n# python: {python}\n# torch: 2.13.0\nsetuptools==1.0 --hash=sha256:{'0' * 64}\n{pins}")
    return lock


HERE = "{}.{}".format(*sys.version_info)


def test_a_wrong_python_is_named_with_those_found(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, "3.5")
    told = set_up(tmp_path, "--train-lock", str(lock), "--rollout-lock", str(lock))
    assert told.returncode == 3
    assert f"made for Python 3.5; this is Python {HERE}" in told.stderr
    assert "On PATH: python3" in told.stderr
    assert "make PYTHON=" in told.stderr
    assert "Traceback" not in told.stderr


def test_no_network_names_the_step_and_the_way_out(tmp_path: Path) -> None:
    lock = write_lock(tmp_path, HERE)
    told = set_up(tmp_path, "--train-lock", str(lock), "--only", "train")
    assert told.returncode == 3
    assert "this step failed: build tools" in told.stderr
    for way in ("could not be reached", "HTTPS_PROXY", "PIP_INDEX_URL"):
        assert way in told.stderr
    assert "Traceback" not in told.stderr
    folder = tmp_path / "project" / ".venv" / "train"
    assert folder.exists()
    assert not (folder / environments.STAMP).exists()  # begun, and not taken for whole


def test_too_little_room_is_said_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = environments.Environment("train", LOCKS[0], (), gigabytes=1e9, minutes=1)
    monkeypatch.setattr(environments, "VENVS", tmp_path)
    with pytest.raises(environments.Unfit, match=r"needs about 1000000\d+\.\d GB on the disk of .* GB free"):
        environments.check_room([env])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pip_says", "advice"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "another file"),
        ("error: command 'gcc' failed: No such file or directory", "C compiler"),
        ("fatal error: Python.h: No such file or directory", "python3.11-dev"),
        ("ERROR: No matching distribution found for torch==2.13.0", "PIP_INDEX_URL"),
        ("WARNING: Retrying ... Temporary failure in name resolution", "HTTPS_PROXY"),
    ],
)
def test_advice_fits_what_pip_says(pip_says: str, advice: str) -> None:
    env = environments.Environment("train", LOCKS[0], (), gigabytes=1, minutes=1)
    told = environments.failure(env, "a step", f"Collecting x\n{pip_says}\n")
    assert advice in told
    assert "a step" in told
    assert pip_says.split(":")[-1].strip() in told


class TestStamp:
    @pytest.fixture
    def env(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> environments.Environment:
        """An environment without packages, as `make` would stamp it."""
        monkeypatch.setattr(environments, "VENVS", tmp_path / "venvs")
        (tmp_path / "venvs").mkdir()
        (tmp_path / "project").mkdir()
        (tmp_path / "project" / "pyproject.toml").write_text("a")
        lock = write_lock(tmp_path, HERE)
        env = environments.Environment("train", lock, (tmp_path / "project",), gigabytes=1, minutes=1)
        (env.folder / "bin").mkdir(parents=True)
        env.python.symlink_to(sys.executable)
        (env.folder / environments.STAMP).write_text(json.dumps(env.stamp("")))
        return env

    def test_what_stands_is_kept(self, env: environments.Environment) -> None:
        assert env.stamped() == env.stamp("")
        environments.make(env, "")  # runs no pip: there is none in it

    @pytest.mark.parametrize("change", ["lock", "project", "index", "place", "python"])
    def test_what_changed_is_noticed(self, env: environments.Environment, change: str) -> None:
        index = "other" if change == "index" else ""
        if change == "lock":
            env.lock.write_text(env.lock.read_text() + "# more\n")
        elif change == "project":
            (env.projects[0] / "pyproject.toml").write_text("b")
        elif change == "place":
            other = env.folder.with_name("moved")
            env.folder.rename(other)
            env = environments.Environment("moved", env.lock, env.projects, gigabytes=1, minutes=1)
        elif change == "python":
            env.python.unlink()
        assert env.stamped() != env.stamp(index)

    def test_what_was_begun_is_made_anew(self, env: environments.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only other projects are installed into what is there."""
        done: list[str] = []
        monkeypatch.setattr(environments, "install_locked", lambda *_: done.append("lock"))
        monkeypatch.setattr(environments, "install_projects", lambda *_: done.append("projects"))
        (env.projects[0] / "pyproject.toml").write_text("b")
        environments.make(env, "")
        assert done == ["projects"]
        (env.folder / environments.STAMP).unlink()
        (env.folder / "half").touch()
        environments.make(env, "")
        assert done == ["projects", "lock", "projects"]
        assert not (env.folder / "half").exists()
        assert env.stamped() == env.stamp("")

    def test_the_rollout_environment_has_no_command(
        self, env: environments.Environment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`prorl` there would end in a traceback: it needs packages of the train environment."""
        monkeypatch.setattr(environments, "run_pip", lambda env, *_: (env.folder / "bin" / "prorl").touch())
        for name, there in (("train", True), ("rollout", False)):
            other = environments.Environment(name, env.lock, env.projects, gigabytes=1, minutes=1)
            (other.folder / "bin").mkdir(parents=True, exist_ok=True)
            environments.install_projects(other)
            assert (other.folder / "bin" / "prorl").exists() == there


def test_the_train_environment_has_every_project_of_this_repository() -> None:
    locks = argparse.Namespace(train_lock=LOCKS[0], rollout_lock=LOCKS[1])
    train, rollout = environments.environments(locks)
    everywhere = {path.parent for path in ROOT.glob("*/*/pyproject.toml")} | {ROOT}
    assert set(train.projects) == everywhere
    assert ROOT / "packages" / "prorl-sandbox" in train.projects
    assert rollout.projects == (ROOT,)


def test_make_names_a_missing_python(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    told = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "setup", "PYTHON=python9.9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 2  # make's own code for any failure
    assert "'python9.9' is not a Python 3.11 that runs here" in told.stderr
    assert "make PYTHON=" in told.stderr
