"""Memory of the processes of a run: what a node's sample has, and which growth is found."""

import json
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_prorl.config import Config
from nemo_prorl.deadlines import Deadline
from nemo_prorl.files import write_json
from nemo_prorl.launcher.peers import NodeAddress
from nemo_prorl.launcher.processes import Child, MergedLog, stop_all
from nemo_prorl.launcher.usage_sampler import UsageSampler
from nemo_prorl.lifecycle.run_records import Records
from nemo_prorl.metrics import Metrics
from nemo_prorl.rollout.rollouts import Rollouts
from nemo_prorl.usage import GrowthWatch, growth, newest, request_restart, totals

MB, GB = 10**6, 10**9

ENGINE = {"kind": "engine", "url": "http://x", "state": "ready"}


def node(sizes: dict[str, float], free: float = 100 * GB, host: str = "n0", pid: int = 7) -> Any:
    processes = {
        name: {
            "pid": pid,
            "resident_bytes": int(2 * size),
            "proportional_bytes": int(size),
            "open_files": 10,
            "threads": 3,
        }
        for name, size in sizes.items()
    }
    return {
        "host": host,
        "time": 1.0,
        "free_bytes": int(free),
        "shm_bytes": 5 * GB,
        "run_dir_bytes": 2 * GB if host == "n0" else None,
        "processes": processes,
    }


def findings(sizes: Sequence[float], free: float, max_steps: int, seconds: float = 36.0) -> list[str]:
    watch, found = GrowthWatch(), []
    for step, size in enumerate(sizes, 1):
        sample = node({"engine-0": size, "trainer-0": 3 * GB}, free)
        found += list(watch.observe(step, seconds, [sample], max_steps))
    return found


def series(noise: random.Random, steps: int, persistence: float, slope: float = 0.0) -> list[tuple[float, float]]:
    """Return points with slope and noise that has this correlation from step to step; 1: a random walk."""
    y = noise.gauss(0, 1) / math.sqrt(1 - persistence**2) if persistence < 1 else 0.0
    points = []
    for x in range(steps):
        points.append((float(x), slope * x + y))
        y = persistence * y + noise.gauss(0, 1)
    return points


class TestGrowth:
    def test_a_line_has_its_slope_in_spite_of_outliers(self) -> None:
        points = [(float(x), 3.0 * x) for x in range(60)]
        points[10], points[50] = (10.0, 1e9), (50.0, -1e9)
        assert growth(points) == pytest.approx((3.0, 3.0, 3.0))

    @pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9, 1.0])
    @pytest.mark.parametrize("steps", [30, 60, 200])
    def test_an_interval_without_growth_rarely_excludes_0(self, persistence: float, steps: int) -> None:
        """Two standard errors of the share are 0.035 in 150 runs."""
        noise, runs = random.Random(steps), 150
        found = [growth(series(noise, steps, persistence)) for _ in range(runs)]
        assert sum(least > 0 or most < 0 for _, least, most in found) / runs < 0.10
        assert all(least <= slope <= most for slope, least, most in found)
        above = sum(least > 0 for _, least, _ in found)
        assert above <= 0.08 * runs

    @pytest.mark.parametrize("persistence", [0.0, 0.5, 0.9])
    def test_an_interval_covers_a_growth_and_shows_it_once_it_exceeds_the_noise(self, persistence: float) -> None:
        noise, runs = random.Random(7), 100
        found = [growth(series(noise, 200, persistence, slope=0.3)) for _ in range(runs)]
        assert sum(least <= 0.3 <= most for _, least, most in found) / runs > 0.90
        assert sum(least > 0 for _, least, _ in found) / runs > 0.95

    def test_more_confidence_is_a_wider_interval_by_student_s_t(self) -> None:
        points = series(random.Random(1), 60, 0.5)
        widths = [most - least for _, least, most in (growth(points, c) for c in (0.9, 0.95, 0.99))]
        assert widths[1] / widths[0] == pytest.approx(2.77645 / 2.13185, rel=1e-5)
        assert widths[2] / widths[0] == pytest.approx(4.60409 / 2.13185, rel=1e-5)

    @pytest.mark.parametrize(
        "points", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)], [(float(x), 5.0 * x) for x in range(9)]]
    )
    def test_few_points_have_no_bound(self, points: list[tuple[float, float]]) -> None:
        assert growth(points)[1:] == (-math.inf, math.inf)


class TestWatch:
    def test_a_node_that_will_be_full_is_reported_once_with_process_and_hours(self) -> None:
        found = findings([GB + 3.1 * MB * step for step in range(900)], 12.4 * GB, 10_000)
        assert len(found) == 1
        # 12.4 GB at 3.1 MB a step of 36 s
        assert "n0 uses 3.1 MB more with each step, most of it in engine-0 (3.1 MB)" in found[0]
        assert "the 12.4 GB left are used in 40 h. Fix: " in found[0]
        assert "rollout.recycle_gb" in found[0]

    def test_growth_that_fits_until_the_last_step_is_no_alarm(self) -> None:
        sizes = [GB + 3.1 * MB * step for step in range(400)]
        assert findings(sizes, 12.4 * GB, 4_000) == []
        assert findings(sizes, 12.4 * GB, 5_000) == []  # 400 steps foresee 2,000
        assert findings([*sizes, *(GB + 3.1 * MB * step for step in range(400, 900))], 12.4 * GB, 5_000) != []

    def test_memory_that_grew_at_the_start_only_is_no_alarm(self) -> None:
        sizes = [GB * (4 - 3 * math.exp(-step / 20)) for step in range(600)]
        assert findings(sizes, 8 * GB, 10_000) == []

    def test_a_restarted_process_begins_anew_and_recycled_engines_do_not_count(self) -> None:
        def found(recycles: bool, trainer_grows: bool) -> list[str]:
            watch, texts = GrowthWatch(recycles), list[str]()
            for step in range(1, 1500):
                sizes: dict[str, float] = {
                    "engine-0": GB + 5 * MB * (step % 300),
                    "trainer-0": GB + 9 * MB * step * trainer_grows,
                }
                sample = node(sizes, 8 * GB)
                sample["processes"]["engine-0"]["pid"] = 100 + step // 300
                texts += list(watch.observe(step, 1.0, [sample], 10_000))
            return texts

        assert found(recycles=True, trainer_grows=False) == []
        [text] = found(recycles=True, trainer_grows=True)
        assert "most of it in trainer-0 (9 MB)" in text

    @pytest.mark.parametrize("persistence", [0.0, 0.9, 1.0])
    def test_noise_is_no_alarm(self, persistence: float) -> None:
        for seed in range(5):
            sizes = [GB + 50 * MB * y for _, y in series(random.Random(seed), 600, persistence)]
            assert findings(sizes, 4 * GB, 100_000) == []

    @pytest.mark.parametrize("persistence", [0.0, 0.9])
    def test_growth_in_noise_is_found(self, persistence: float) -> None:
        """5 MB a step in noise of 50 MB; without noise the alarm comes at step 320, which foresees 1,600 more."""
        scale = 50 * MB * math.sqrt(1 - persistence**2)
        for seed in range(3):
            noise = series(random.Random(seed), 800, persistence)
            assert len(findings([GB + 5 * MB * x + scale * y for x, y in noise], 8 * GB, 10_000)) == 1


class TestSamples:
    def test_metrics_are_those_of_the_largest_process_and_the_fullest_node(self) -> None:
        nodes = [
            node({"trainer-0": GB, "engine-0": 3 * GB, "rewards-0": GB / 2, "supervisor-0": GB / 10}),
            node({"trainer-1": 2 * GB, "engine-1": GB}, free=4 * GB, host="n1"),
        ]
        assert totals(nodes) == {
            "free_gb": 4.0,
            "shm_gb": 5.0,
            "run_dir_gb": 2.0,
            "rank_gb": 2.0,
            "engine_gb": 3.0,
            "rewards_gb": 0.5,
            "supervisor_gb": 0.1,
            "open_files": 10.0,
            "threads": 3.0,
        }
        assert totals([]) == {}

    def test_a_half_written_sample_is_left_out(self, tmp_path: Path) -> None:
        (tmp_path / "usage-0.json").write_text(json.dumps(node({"engine-0": GB})))
        (tmp_path / "usage-1.json").write_text('{"host": "n1"')
        assert [sample["host"] for sample in newest(tmp_path)] == ["n0"]

    def test_the_largest_engine_is_restarted_one_at_a_time(self, tmp_path: Path) -> None:
        for k, pid in enumerate((7, 8, 7, 7)):  # the sample of engine-1 is of an earlier process
            write_json(tmp_path / f"engine-{k}.json", ENGINE | {"pid": pid})
        sizes: dict[str, float] = {
            "engine-0": 6 * GB,
            "engine-1": 9 * GB,
            "engine-2": GB,
            "engine-3": 7 * GB,
            "trainer-0": 20 * GB,
        }
        (tmp_path / "usage-0.json").write_text(json.dumps(node(sizes)))
        assert request_restart(tmp_path, 5 * GB) == "engine-3"
        assert [file.name for file in tmp_path.glob("*.restart")] == ["engine-3.restart"]
        assert request_restart(tmp_path, 5 * GB) is None  # until the supervisor has done it
        (tmp_path / "engine-3.restart").unlink()
        write_json(tmp_path / "engine-3.json", ENGINE | {"pid": 9})
        assert request_restart(tmp_path, 5 * GB) == "engine-0"
        (tmp_path / "engine-0.restart").unlink()
        assert request_restart(tmp_path, 8 * GB) is None


def test_an_engine_that_is_large_from_its_start_is_an_alarm(tmp_path: Path) -> None:
    alarms: list[str] = []
    rollouts = object.__new__(Rollouts)
    rollouts._endpoints, rollouts._recycled = tmp_path, {}
    rollouts._records = SimpleNamespace(alarm=lambda step, what: alarms.append(f"{step}: {what}"))  # type: ignore[assignment]
    for step in (5, 40, 44):
        write_json(tmp_path / "engine-0.json", ENGINE | {"pid": step})
        (tmp_path / "usage-0.json").write_text(json.dumps(node({"engine-0": 3 * GB}, pid=step)))
        rollouts._recycle(step, 2.5)
        (tmp_path / "engine-0.restart").unlink()
    assert alarms == [
        "44: engine-0 is restarted again after a few steps: rollout.recycle_gb=2.5 is less than a new engine needs"
        " (system/engine_gb)"
    ]


@pytest.mark.starts
def test_a_sample_counts_a_process_with_those_it_started(tmp_path: Path) -> None:
    """The child keeps 8 MB and 5 files open; the process that it starts keeps 64 MB."""
    grandchild = "kept = bytearray(64 << 20); print('up'); import time; time.sleep(60)"
    code = (
        "import subprocess, sys, os; kept = bytearray(8 << 20); files = [open(os.devnull) for _ in range(5)];"
        f"below = subprocess.Popen([sys.executable, '-u', '-c', {grandchild!r}]); below.wait()"
    )
    child = Child(
        "engine-0",
        [sys.executable, "-u", "-c", code],
        dict(os.environ),
        tmp_path / "log",
        MergedLog(tmp_path / "all"),
    )
    run = tmp_path / "run"
    (run / "endpoints").mkdir(parents=True)
    (run / "kept").write_bytes(b"x" * 12345)
    child.start()
    sampler = UsageSampler([child], run, NodeAddress())
    try:
        Deadline(20, "the grandchild").wait_until(lambda: "up" in child.tail)
        sample = sampler.sample()
        engine, supervisor = sample["processes"]["engine-0"], sample["processes"]["supervisor-0"]
        assert child.process is not None
        assert engine["pid"] == child.process.pid
        assert 72 << 20 < engine["proportional_bytes"] <= engine["resident_bytes"] < 200 << 20
        assert engine["threads"] == 2
        assert engine["open_files"] >= 2 * 3 + 5
        assert supervisor["pid"] == os.getpid()
        assert sample["run_dir_bytes"] == 12345
        assert sample["free_bytes"] > 0
        Deadline(20, "a sample in the file").wait_until(lambda: bool(newest(run / "endpoints")))
    finally:
        sampler.close()
        stop_all([child], 0.0, quiet=True)
    assert "engine-0" not in sampler.sample()["processes"]


def test_a_step_s_line_has_the_sample_and_the_journal_the_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrowthWatch, "observe", lambda *_: iter(["n0 uses more"]))
    records = Records(Config(), tmp_path, writes=True)
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "usage-0.json").write_text(json.dumps(node({"engine-0": 3 * GB})))
    records.log(Metrics(1, "none"))
    assert records.lines()[0]["system/engine_gb"] == 3.0
    assert [event["what"] for event in records.events()] == [
        "memory will be full before the last step: n0 uses more",
    ]
