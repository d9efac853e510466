"""What the import contracts of pyproject.toml cannot say, and what a start of `prorl` must not load.

`lint-imports` checks the contracts: layers, cycles, and who imports NeMo, vLLM and the reward interface.
"""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

HEAVY = {"torch", "nemo", "nemo_aligner", "megatron", "vllm", "transformers", "lightning", "numpy"}
PACKAGE = Path(__file__).resolve().parent.parent / "nemo_prorl"


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        (
            "nemo_prorl.algorithms",
            {"torch", *(f"nemo_prorl.{name}" for name in ("config", "errors", "own_functions", "schema"))},
        ),
        ("nemo_prorl.rewards.interface", {"prorl_sandbox"}),
    ],
)
def test_outside_the_standard_library_it_imports_this_only(module: str, allowed: set[str]) -> None:
    graph = grimp.build_graph("nemo_prorl", include_external_packages=True, exclude_type_checking_imports=True)
    own = {module, *graph.find_descendants(module)}
    imported = {name for one in own for name in graph.find_modules_directly_imported_by(one)} - own
    assert {name for name in imported if name not in sys.stdlib_module_names} == allowed


def test_outside_the_policy_ranks_meet_in_one_place() -> None:
    """leader.py waits without a GPU and long enough; a collective elsewhere would wait in NCCL."""
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "torch.distributed" in path.read_text()
    }
    assert {user for user in users if not user.startswith(("policy/", "algorithms/"))} == {"leader.py"}


@pytest.mark.starts
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
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    loaded = set(result.stderr.rsplit("LOADED ", 1)[1].split())
    assert "nemo_prorl" in loaded
    assert not loaded & HEAVY
