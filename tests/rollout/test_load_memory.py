"""A load of weights needs little beside them, so that the plan's phase `loading` has room for it."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_prorl.rollout.weight_store import WeightStore
from nemo_prorl.settings import load
from nemo_prorl.sizing.memory import memory_of
from tests.policy.models import QWEN2, shapes_of, write_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODEL = QWEN2 | {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "vocab_size": 4096,
    "torch_dtype": "bfloat16",
}
TIMES = 3  # as many bytes as the largest tensor


def test_a_running_engine_takes_a_few_tensors_beside_its_weights_to_load_others(
    vllm_python: str, tmp_path: Path, root: Path
) -> None:
    folder = write_model(tmp_path / "model", MODEL, torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    file = WeightStore(tmp_path / "weights", "bfloat16").write(weights.items(), 1)
    script = Path(__file__).with_name("load_memory.py")
    command, env = [vllm_python, *map(str, (script, folder, file))], {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    largest = 2 * max(math.prod(shape) for shape in shapes_of(MODEL).values())
    assert sum(t.nbytes for t in weights.values()) > 2 * TIMES * largest
    assert 0 < found["peak"] <= TIMES * largest
    assert found["left"] < largest / 10


@pytest.mark.parametrize("stage", ["run1", "run8"])
def test_the_plan_has_room_for_it(stage: str) -> None:
    memory = memory_of(load(["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", f"stage={stage}"]))
    assert memory.engine_work >= TIMES * 2 * 151_936 * 1536
