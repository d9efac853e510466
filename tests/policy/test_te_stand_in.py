"""The stand-in for Transformer Engine is what its sources say: signatures, FP8's rounding, and the pinned fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.policy.started import TE_STAND_IN
from tests.policy.te_signatures import of_folder, of_repository

pytestmark = pytest.mark.starts

RECORDED = json.loads(Path(__file__).with_name("te_signatures.json").read_text())
PIN = next(iter(RECORDED))


def test_its_signatures_are_those_of_the_pinned_commit() -> None:
    found, wanted = of_folder(TE_STAND_IN / "transformer_engine"), RECORDED[PIN]["signatures"]
    assert found.keys() == wanted.keys()
    for name, parameters in wanted.items():
        assert [_plain(p) for p in found[name]] == [_plain(p) for p in parameters], name


def _plain(parameter: list[str]) -> tuple[str, object]:
    """A name and a default; 1e-3 and 0.001 are the same number."""
    name, default = parameter
    try:
        return name, float(default)
    except ValueError:
        return name, default


def test_later_versions_only_add_to_them() -> None:
    """Two fields that Megatron does not give, or that pydantic ignores, are gone."""
    for commit, recorded in RECORDED.items():
        for name, parameters in RECORDED[PIN]["signatures"].items():
            gone = [p for p in parameters if p not in recorded["signatures"][name]]
            assert gone == ([["interval", "-1"]] if name == "DelayedScaling" and commit != PIN else []), (commit, name)


@pytest.mark.skipif("TRANSFORMER_ENGINE_GIT" not in os.environ, reason="needs a clone: TRANSFORMER_ENGINE_GIT=FOLDER")
def test_the_recorded_signatures_are_those_of_the_sources() -> None:
    assert of_repository(Path(os.environ["TRANSFORMER_ENGINE_GIT"])) == RECORDED


USES = """
import torch, transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.fp8 import Scales
torch.manual_seed(0)
x = torch.randn(32, 16)
for forward, parts in ((True, 16), (False, 8)):  # e4m3 has 3 bits of mantissa, e5m2 has 2
    rounded = Scales(Float8CurrentScaling(), forward, 3).rounded(x, 0).value
    normal = x.abs() > x.abs().max() / 1000
    assert ((rounded - x).abs() / x.abs())[normal].max() <= 1 / parts, forward
    assert not torch.equal(rounded, x)
    assert rounded.abs().max() == x.abs().max()
layer = te.Linear(16, 32, device="cpu")
def product(inp, **options):
    with te.fp8_autocast(fp8_recipe=options.pop("recipe", Float8CurrentScaling())):
        return layer(inp, **options)
try:
    product(x[:5])
except AssertionError as error:
    assert "divisible by 8" in str(error)
else:
    raise SystemExit("5 rows were taken")
with torch.no_grad():
    product(x, is_first_microbatch=True)
out = product(x.requires_grad_(), is_first_microbatch=True)
try:
    out.sum().backward()
    print("kept weights serve gradients")
except RuntimeError as error:
    print(error)
layer._fp8_workspaces.clear()
product(x, is_first_microbatch=True).sum().backward()  # the fix
layer = te.Linear(16, 32, device="cpu")
for step in range(2):
    product(x, recipe=DelayedScaling(amax_history_len=4)).sum().backward()
    assert (layer.fp8_meta["scaling_fwd"].scale[0] == 448 / x.abs().max())
other = te.Linear(16, 32, device="cpu")
other.set_extra_state(layer.get_extra_state())
assert torch.equal(other.fp8_meta["scaling_bwd"].amax_history, layer.fp8_meta["scaling_bwd"].amax_history)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("2.2.0.dev0+bee4649", "Input A is not suitable for columnwise usage!"),
        ("2.3.0", "kept weights serve gradients"),
    ],
)
def test_fp8_rounds_as_its_formats_do_and_weights_kept_without_gradients_fail_before_2_2(
    version: str, says: str
) -> None:
    env = {**os.environ, "PYTHONPATH": str(TE_STAND_IN), "TE_STAND_IN_VERSION": version}
    done = subprocess.run([sys.executable, "-c", USES], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout
