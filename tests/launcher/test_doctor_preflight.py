"""`prorl doctor --preflight`: the trial's configuration and folder, its assessment, and one real trial."""

import copy
import fcntl
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from nemo_prorl import cli, settings
from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher import one_node
from nemo_prorl.launcher.doctor import trial_step
from nemo_prorl.launcher.doctor.trial_step import TrialOutcome
from nemo_prorl.preflight import PreflightSizes
from nemo_prorl.rollout.weight_store import WeightStore, weights_folder
from nemo_prorl.sizing.memory import memory_of

LAPTOP = settings.load(["cluster=laptop"])
H100 = settings.load(["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "stage=run2"])
GB = 10**9
CUDA = "OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 79.11 GiB"


def sizes_of(cfg: DictConfig, rows: int | None = None) -> PreflightSizes:
    return PreflightSizes.of(cfg, rows)  # type: ignore[arg-type]


def begin(part: str) -> dict[str, Any]:
    return {"part": part, "event": "begin"}


def end(part: str, seconds: float = 1.0, **numbers: float) -> list[dict[str, Any]]:
    return [begin(part), {"part": part, "event": "end", "seconds": seconds, "host_peak": GB, **numbers}]


def error(part: str, what: str) -> list[dict[str, Any]]:
    return [begin(part), {"part": part, "event": "error", "what": what}]


# --- what is tried ---------------------------------------------------------------------------------------------------


def test_the_trial_is_the_run_on_one_node_begun_with_its_model(tmp_path: Path) -> None:
    cfg = copy.deepcopy(H100)
    cfg.run_dir, cfg.on_event = str(tmp_path / "run"), "true"
    trial = trial_step.trial_config(cfg, tmp_path / "trial")
    assert (trial.trainer.num_nodes, trial.trainer.devices, trial.rollout.engines) == (1, 8, 8)
    assert (trial.chain.after, trial.chain.start_from, trial.on_event, trial.rollout.max_restarts) == (None,) * 3 + (0,)
    assert trial.run_dir == str(tmp_path / "trial")
    assert trial.trainer.grpo == cfg.trainer.grpo
    assert cfg.trainer.num_nodes == 4  # as it was
    (tmp_path / "run" / "init").mkdir(parents=True)
    with pytest.raises(ConfigError, match="init"):  # the run's own model is taken; this one is empty
        trial_step.trial_config(cfg, tmp_path / "trial")


def test_a_layout_that_needs_several_nodes_is_refused(tmp_path: Path) -> None:
    cfg = copy.deepcopy(LAPTOP)
    cfg.trainer.num_nodes, cfg.rollout.engines, cfg.model.tensor_model_parallel_size = 2, 2, 2
    with pytest.raises(
        ConfigError, match=r"trainer.num_nodes=2: --preflight tries one node alone, .*does not divide the 1 ranks"
    ):
        trial_step.trial_config(cfg, tmp_path)


def test_the_folder_goes_and_so_does_a_killed_trials_but_not_one_in_use(tmp_path: Path) -> None:
    left, used, foreign = (tmp_path / name for name in (".prorl-preflight-a", ".prorl-preflight-b", "run"))
    for folder in (left, used, foreign):
        folder.mkdir()
        (folder / ".lock").touch()
    store = WeightStore(weights_folder(left))
    (store.folder / "weights-00000000.safetensors").touch()
    with (used / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with trial_step._trial_folder(tmp_path) as folder:
            assert sorted(tmp_path.iterdir()) == sorted([folder, used, foreign])
    assert sorted(tmp_path.iterdir()) == sorted([used, foreign])
    assert not store.folder.exists()


@pytest.mark.parametrize("words", [["--rows", "4"], ["--rows", "0", "--preflight"]])
def test_a_number_of_rows_stands_beside_preflight(words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert "--rows" in caplog.text


# --- assessment ------------------------------------------------------------------------------------------------------


def test_a_part_counts_when_all_ranks_ended_it_and_the_worst_of_them_is_told() -> None:
    ranks = [
        [*end("build", 2.0, gpu_peak=5 * GB, gpu_free=9 * GB), *end("update", 1.0), begin("checkpoint")],
        [*end("build", 3.0, gpu_peak=4 * GB, gpu_free=8 * GB), begin("update")],
    ]
    parts = trial_step.ended_parts(ranks)
    assert parts == {"build": {"seconds": 3.0, "host_peak": GB, "gpu_peak": 5 * GB, "gpu_free": 8 * GB}}
    assert (
        trial_step.describe_part("build", parts["build"])
        == "build: 3.0 s; peak memory of a rank 5.0 GB; 8.0 GB of the GPU free"
    )
    said = trial_step.describe_part("update", {"seconds": 2.0, "host_peak": GB, "rows": 3, "tokens": 300})
    assert said == "update: 2.0 s for 3 rows, 150 tokens/s; peak memory of a rank 1.0 GB"


@pytest.mark.parametrize(
    ("ranks", "said", "text", "fix"),
    [
        ([error("update", CUDA)], "trainer-0 ended with status 1", "in 'update': OutOfMemoryError", "micro_batch_size"),
        ([error("logprobs", CUDA)], "trainer-0 ended", "in 'logprobs'", "trainer.grpo.logprob_chunk_tokens"),
        ([error("build", CUDA)], "trainer-0 ended", "in 'build'", "model.tensor_model_parallel_size"),
        ([error("resume", CUDA)], "trainer-0 ended", "in 'resume'", "rollout.kv_cache_mb"),
        (  # a peer of the rank that ran out of memory fails, too
            [error("update", "RuntimeError: Connection closed by peer"), error("update", CUDA)],
            "trainer-0 ended with status 1",
            "CUDA out of memory",
            "model.micro_batch_size",
        ),
        (  # the kernel killed it: it says nothing, its peer does
            [error("checkpoint", "RuntimeError: Connection closed by peer [127.0.0.1]:1"), [begin("checkpoint")]],
            "trainer-1 ended with status -9; its log is l",
            "in 'checkpoint': trainer-1 ended with status -9",
            "trainer.devices",
        ),
        ([[begin("checkpoint")]], "trainer-0 ended with status -9; its log", "status -9", "--mem=0"),
        (
            [[begin("fill")]],
            "engine-0 ended with status 70, 1 times\nblah\ntorch.OutOfMemoryError: CUDA out of memory.\nbye",
            "in 'fill': engine-0 ended with status 70, 1 times: torch.OutOfMemoryError",
            "rollout.max_num_seqs",
        ),
        (
            [[begin("build")]],
            "127.0.0.1: engine-0 ended with status 1; its log is gone, and ends:\nValueError: 3 GiB KV cache is needed,"
            " which is larger than the available KV cache memory (2 GiB).\nTraceback",
            "in 'engines': 127.0.0.1: engine-0 ended with status 1: ValueError",
            "rollout.kv_cache_mb",
        ),
        ([error("update", "NonFiniteUpdate: loss nan")], "trainer-0 ended", "loss nan", "in the same way"),
        ([[begin("build")]], "rewards-0 ended\nKeyError: 'x'", "in 'build': rewards-0 ended: KeyError", "same way"),
    ],
)
def test_a_failure_is_quoted_and_the_keys_to_change_are_named(
    ranks: list[list[dict[str, Any]]], said: str, text: str, fix: str
) -> None:
    check = trial_step.assess_failure(TrialOutcome(ranks, [said], log=Path("/runs/preflight.log")), H100)
    assert check.state == "fail"
    assert text in check.text
    assert fix in check.fix
    assert "/runs/preflight.log" in check.text


def test_on_a_cpu_the_machines_memory_is_named_too() -> None:
    what = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    check = trial_step.assess_failure(TrialOutcome([error("update", what)], ["trainer-0 ended"]), LAPTOP)
    assert "model.micro_batch_size" in check.fix
    assert "--mem=0" in check.fix


def test_what_ended_before_a_failure_is_told_and_no_estimate_follows() -> None:
    outcome = TrialOutcome([[*end("build"), *error("engines", "DeadlineExceeded: waited")]], ["trainer-0 ended"])
    checks = list(trial_step.assess(outcome, sizes_of(LAPTOP), LAPTOP, memory_of(LAPTOP)))
    assert [check.state for check in checks] == ["pass", "fail"]


@pytest.mark.parametrize(
    ("peak_share", "free", "state"), [(0.9, 10 * GB, "pass"), (1.1, 10 * GB, "warn"), (0.9, 3 * GB, "warn")]
)
def test_a_gpus_peak_is_held_against_the_plan_and_what_was_left(peak_share: float, free: int, state: str) -> None:
    memory = memory_of(H100)
    peak = int(peak_share * memory.trainer_peak)
    parts = {
        "build": {"gpu_peak": GB, "gpu_free": 50 * GB, "gpu_total": 80 * GB},
        "update": {"gpu_peak": peak, "gpu_free": free, "gpu_total": 80 * GB},
    }
    check = trial_step.assess_device(parts, memory)
    assert check.state == state
    assert "in 'update'" in check.text
    assert bool(check.fix) == (state != "pass")


@pytest.mark.parametrize(("lowest", "state"), [(10 * GB, "pass"), (GB, "warn")])
def test_host_memory_that_is_nearly_gone_is_a_warning(lowest: int, state: str) -> None:
    outcome = TrialOutcome([], [], first_free=100 * GB, lowest_free=lowest)
    assert trial_step.assess_host_headroom(outcome, {"update": {"host_peak": 3 * GB}}, 8).state == state


def test_the_estimate_scales_what_was_tried_to_a_whole_step() -> None:
    tried = sizes_of(H100, rows=8)  # of 32
    parts = {
        "publish": {"seconds": 2.0},
        "generate": {"seconds": 10.0, "tokens": 100_000, "rows": 1},
        "batch": {"seconds": 3.0},
        "logprobs": {"seconds": 1.0, "rows": 8},
        "reference": {"seconds": 2.0, "rows": 8},
        "update": {"seconds": 4.0, "rows": 8},
    }
    text = trial_step.estimate(parts, tried)
    rollout = 256 * 16 * (H100.trainer.grpo.context_tokens - 1) / 4 / 10_000
    rest = 2.0 + 3.0 * 256 / (16 * 4)
    assert f"rollout {rollout:,.0f}, log-probabilities 48, updates 64, publication and batch {rest:.0f}" in text
    assert f"about {rollout + 48 + 64 + rest:,.0f} s" in text


# --- one real trial --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # NeMo and vLLM start
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_step_at_full_context_on_this_machine(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (root / ".venv" / "rollout").is_dir():
        pytest.skip("no rollout environment: make setup")
    made: list[Path] = []
    config = trial_step.trial_config

    def remembered(cfg: DictConfig, folder: Path) -> DictConfig:
        made.append(folder)
        return config(cfg, folder)

    monkeypatch.setattr(trial_step, "trial_config", remembered)
    monkeypatch.setenv("PYTHONPATH", str(root))
    sizes = [f"data.{part}.{k}.size=20" for part in ("train", "validation") for k in range(5)]
    cfg = settings.load(
        [
            f"run_dir={tmp_path / 'runs' / 'x'}",
            f"rollout.python={root / '.venv' / 'rollout' / 'bin' / 'python'}",
            "rollout.max_num_seqs=32",
            "rollout.kv_cache_mb=64",
            "trainer.grpo.prompts_per_step=8",
            *sizes,
        ]
    )
    checks = list(trial_step.check_step(cfg, one_node.preflight, rows=16))
    assert [check.state for check in checks] == ["pass"] * 14, [check.line() for check in checks]
    said = [check.text for check in checks]
    assert any(text.startswith("generate: ") and "for 32 rows" in text for text in said)
    assert any(text.startswith("update: ") and "for 16 rows" in text for text in said)
    assert "a step whose responses all fill the context takes at most about" in said[-1]
    assert list(tmp_path.iterdir()) == []  # neither the trial's folder nor a run directory
    assert made
    assert not weights_folder(made[0]).exists()
