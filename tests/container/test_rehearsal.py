"""The container's set-up on Python 3.12 with the image's versions.  See rehearse.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.container import rehearse

ROOT = Path(__file__).resolve().parents[2]


def test_the_stand_in_has_the_versions_of_the_image() -> None:
    """NeMo's requirements/manifest.json at v2.3.1, and no package that the image is not known to have."""
    lines = rehearse.image_lines()
    versions = dict(line.split()[0].split("==") for line in lines)
    for name, series in (("torch", "2.6.0"), ("nemo-toolkit", "2.3.1"), ("megatron-core", "0.12"), ("numpy", "1.26")):
        assert versions[name].startswith(series), name
    assert len(versions) == len(lines)
    assert not versions.keys() & {*rehearse.NOT_IN_IMAGE.split()}
    assert {*rehearse.NOT_IN_IMAGE.split()} <= {line.split("==")[0] for line in rehearse.TRAIN_LOCK.read_text().split()}


@pytest.mark.slow  # two minutes; six more and 3.5 GB where .venv/rehearsal is not made yet
@pytest.mark.nemo
@pytest.mark.timeout(2700)
def test_the_container_s_steps_on_python_3_12() -> None:
    try:
        rehearse.find_python(None)
    except rehearse.Failed as error:
        pytest.skip(str(error))
    command = [sys.executable, str(ROOT / "tests" / "container" / "rehearse.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for part in ("too old: reasoning-gym needs pytz", "checked: torch 2.6.0", "weights torch.bfloat16"):
        assert part in done.stderr
    assert re.search(r"\d+ passed", done.stderr)
