"""What rank 0 does for all ranks, in two real processes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.leader import longest_wait

ROOT = Path(__file__).parent.parent
RANK = """
import json, sys, time
import torch.distributed as dist
from nemo_prorl.config import DeadlinesConfig
from nemo_prorl.errors import EngineFailure
from nemo_prorl.leader import Leader

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
groups = []
for name in ("broadcast_object_list", "scatter_object_list", "barrier"):
    def noted(*values, real=getattr(dist, name), group=None):
        groups.append(group)
        return real(*values, group=group)
    setattr(dist, name, noted)
leader = Leader(DeadlinesConfig(), data_rank=1 - rank)

def slowly(part):
    assert rank == 0
    time.sleep(2)
    return {"groups": list(range(part))}

leader.barrier()
only = leader.only(lambda: 5)
told = []
only.run_on_leader(told.append)  # no collective
assert (told, len(groups)) == ([5] if rank == 0 else [], 2)
began, spent = time.monotonic(), time.process_time()
found = only.call(slowly)
waited, spent = time.monotonic() - began, time.process_time() - spent

def fails(part=None):
    raise EngineFailure("no engine left")

try:
    failure = only.call(fails)
except EngineFailure as error:
    failure = str(error)
own = only.share(lambda part: ["of data rank 0", "of data rank 1"])
try:
    only.share(fails)
except EngineFailure as error:
    failure += " for anyone: " + str(error)
try:
    leader.only(fails)
except EngineFailure as error:
    failure += " in making: " + str(error)
assert leader.call(lambda: rank) == 0
assert only.only(lambda part: part + 1).call(lambda part: part) == 6
leader.barrier()
assert own == f"of data rank {1 - rank}"
own = len(groups) == 11 and all(group is leader._group is not dist.group.WORLD for group in groups)
print(json.dumps([found, failure, waited, spent, dist.get_backend(leader._group), own]))
"""


@pytest.mark.starts
def test_all_ranks_have_what_rank_0_finds_or_fails_at_and_wait_for_it_idle(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    for text in texts:
        found, failure, waited, spent, backend, own_group = json.loads(text)
        assert found == {"groups": [0, 1, 2, 3, 4]}
        assert failure == "no engine left for anyone: no engine left in making: no engine left"
        assert (backend, own_group) == ("gloo", True)  # not NCCL, whatever the default group is
        assert waited > 1.5
        assert spent < 0.25 * waited, "a rank that waits takes no core"


@pytest.mark.parametrize("key", ["startup_s", "rollout_s", "reward_s", "publish_s", "collective_s"])
def test_ranks_wait_longer_than_rank_0(key: str) -> None:
    deadlines = dataclasses.replace(DeadlinesConfig(), **{key: 1e5})
    assert longest_wait(deadlines).total_seconds() > 1e5
