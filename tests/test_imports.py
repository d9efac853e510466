"""The directions in which imports point, read from the sources, and what a start of `prorl` must not load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = {"torch", "nemo", "nemo_aligner", "megatron", "vllm", "transformers", "lightning", "numpy"}
NEMO = {"nemo", "nemo_aligner", "megatron", "lightning", "pytorch_lightning", "transformer_engine", "apex"}
PACKAGE = Path(__file__).resolve().parent.parent / "nemo_prorl"
FILES = sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "launcher").rglob("*.py")])


def imports(path: Path, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """Full names of the modules that a file imports, with their lines; those for type checkers only are left out."""
    tree = ast.parse(path.read_text(), str(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inside = top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if guarded or inside:
            skipped.update(ast.walk(node))
    package = ("nemo_prorl", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def offences(files: list[Path], allowed: set[str], top_level_only: bool = False) -> list[str]:
    """Imports of `files` that are neither of the standard library nor begin with one of the allowed names."""
    found = []
    for path in files:
        for name, line in imports(path, top_level_only):
            known = any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
            if not known and name.split(".")[0] not in sys.stdlib_module_names:
                found.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}")
    return found


def users_of(packages: set[str]) -> set[str]:
    """Files of ours that import one of these packages, anywhere in them."""
    return {
        str(path.relative_to(PACKAGE)) for path in FILES for name, _ in imports(path) if name.split(".")[0] in packages
    }


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path) -> None:
    source = PACKAGE / "policy" / "imaginary.py"
    text = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import i\n"
    real = Path.read_text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self: text if self == source else real(self))
        assert [name for name, _ in imports(source)] == ["a.b", "c.d", "nemo_prorl.policy.e", "nemo_prorl.f.g", "i"]
        assert "i" not in [name for name, _ in imports(source, top_level_only=True)]


def test_algorithms_import_torch_only() -> None:
    files = sorted((PACKAGE / "algorithms").glob("*.py"))
    assert files
    assert not offences(files, {"torch", "nemo_prorl.algorithms", "nemo_prorl.config"})


def test_outside_the_policy_ranks_meet_in_one_place() -> None:
    """Which waits without a GPU and long enough (leader.py); a collective elsewhere would wait in NCCL."""
    users = {str(path.relative_to(PACKAGE)) for path in FILES for name, _ in imports(path) if "distributed" in name}
    assert {user for user in users if not user.startswith(("policy/", "algorithms/"))} == {"leader.py"}


def test_the_reward_interface_imports_the_standard_library_only() -> None:
    assert not offences([PACKAGE / "rewards" / "interface.py"], set())


@pytest.mark.parametrize(
    "name",
    ["errors.py", "launcher/events.py", "deadlines.py", "config.py", "settings.py", "checks.py", "data/prepared.py"],
)
def test_configuration_and_errors_are_light(name: str) -> None:
    light = {"omegaconf", "hydra", "yaml"}
    light |= {
        f"nemo_prorl.{module}"
        for module in (
            "config",
            "errors",
            "launcher.events",
            "checks",
            "data.prepared",
            "data.hf_config",
            "deadlines",
            "planning.memory",
            "planning.memory_check",
            "lifecycle.records",
        )
    }
    assert not offences([PACKAGE / name], light)


def test_nemo_is_imported_in_policy_only() -> None:
    assert not {path for path in users_of(NEMO) if not path.startswith("policy/")}


def test_vllm_is_imported_by_the_engine_only() -> None:
    """Only rollout/engine/ runs in its environment."""
    assert not {path for path in users_of({"vllm"}) if not path.startswith("rollout/engine/")}


def test_the_trainer_knows_neither_nemo_nor_vllm_nor_http() -> None:
    """`trainer.py` gets its policy, rollouts and rewards handed to it."""
    path = PACKAGE / "trainer.py"
    if not path.exists():
        pytest.skip("trainer.py is not there yet")
    forbidden = NEMO | {"vllm", "http", "urllib", "requests", "aiohttp", "httpx"}
    forbidden |= {f"nemo_prorl.{part}" for part in ("policy", "rollout", "rewards", "launcher", "rank")}
    found = [name for name, _ in imports(path)]
    assert not [name for name in found if any(name == f or name.startswith(f + ".") for f in forbidden)]


def test_the_launcher_never_imports_policy() -> None:
    files = sorted((PACKAGE / "launcher").rglob("*.py"))
    found = [f"{path.name}:{line} {name}" for path in files for name, line in imports(path)]
    assert not [text for text in found if "nemo_prorl.policy" in text]


def test_lower_layers_do_not_import_upper_ones() -> None:
    upper = {f"nemo_prorl.{part}" for part in ("trainer", "rank", "launcher", "cli")}
    lower = ("algorithms", "policy", "rollout", "rewards", "data", "lifecycle", "planning")
    found = []
    for layer in lower:
        for path in sorted((PACKAGE / layer).rglob("*.py")):
            found += [
                f"{path.relative_to(PACKAGE)}:{line} imports {name}"
                for name, line in imports(path)
                if any(name == u or name.startswith(u + ".") for u in upper)
            ]
    assert not found


def test_plugins_import_the_interface_only() -> None:
    """Of ours a reward plugin imports `rewards.interface` and, where it builds on one, another plugin."""
    found = []
    for path in sorted((PACKAGE.parent / "reward_plugins").rglob("*.py")):
        if "tests" in path.parts or path.name.startswith("test_"):
            continue
        tree = ast.parse(path.read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        found += [
            f"{path.name}: {n}" for n in names if n.startswith("nemo_prorl") and n != "nemo_prorl.rewards.interface"
        ]
    assert not found


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "trainer.grpo.nope=1"],
        ["train", "--dry-run"],
        ["plan"],
        ["report", "nowhere"],
    ],
    ids=" ".join,
)
def test_a_start_of_prorl_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    runner = (
        "import sys\n"
        "from nemo_prorl.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write('\\nLOADED ' + ' '.join(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    command = [sys.executable, "-c", runner, *arguments]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    loaded = set(told.stderr.rsplit("LOADED ", 1)[1].split())
    assert "nemo_prorl" in loaded
    assert not loaded & HEAVY
