"""`prorl plan`: the chain of stages, its tokens and hours with their sources, and what it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from nemo_prorl import __version__, cli, settings
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.launcher import prepare as prepare_module
from nemo_prorl.launcher.prepare import check_origin, prepare
from nemo_prorl.lifecycle.retention import FORMAT
from nemo_prorl.lifecycle.stages import origin
from nemo_prorl.planning import overview, timetable
from nemo_prorl.planning import plan as p
from tests.lines import write_lines

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("in_an_empty_folder")]

H100 = ["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null", "model.micro_batch_size=1"]


def chain_of(overrides: list[str], **rates: Any) -> p.Chain:
    cfg = settings.load_run(overrides, need_files=False)
    given: dict[str, Any] = {"mean_tokens": None, "tokens_per_s": None, "measured": None}
    return p.plan_chain(cfg, overrides, p.read_rates(cfg, **{**given, **rates}))


def write_run(folder: Path, overrides: list[str], lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(settings.resolved_yaml(settings.load(overrides)))
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def measured_line(step: int, generated: float, seconds: float, groups: float, length: float) -> dict[str, float]:
    return {
        "step": step,
        "rollout/generated_tokens": generated,
        "time/step": seconds,
        "rollout/groups": groups,
        "rollout/response_tokens": length,
    }


def test_the_chain_is_the_papers() -> None:
    chain = chain_of([*H100, "stage=run3"])
    assert [s.name for s in chain.stages] == [f"run{k}" for k in range(1, 9)]
    assert [s.name for s in chain.stages if s.chosen] == ["run3"]
    assert [s.steps for s in chain.stages] == [400, 300, 300, 200, 200, 300, 300, 200]
    assert [s.hard_reset for s in chain.stages] == [False, *[True] * 7]
    assert [s.responses for s in chain.stages] == [s.steps * 256 * n for s, n in zip(chain.stages, N, strict=True)]
    changes = [s.changes for s in chain.stages]
    tasks, n, context, factor = p.NAMES
    assert changes[0] == {tasks: ["math", "code", "stem", "puzzles"], n: 16, context: 8192, factor: 1.0}
    assert changes[1:] == [
        {},
        {tasks: ["math", "code", "stem", "puzzles", "instructions"]},
        {factor: 0.1},
        {},
        {n: 32},
        {},
        {n: 16, context: 16384},
    ]
    assert chain.totals["steps"] == 2200
    bound = sum(s.responses * (16384 if s.name == "run8" else 8192) for s in chain.stages)
    assert chain.totals["tokens_at_most"] == bound
    assert chain.totals["tokens_estimated"] == pytest.approx(
        0.41 * 1.8 * sum(s.responses * longest(s) for s in chain.stages)
    )
    rows = overview.plan(settings.load([*H100, "stage=run3"]), chain).splitlines()
    resets = [re.search(r"  (yes, \w+|no)  ", row) for row in rows if re.match(r"\W*run\d ", row)]
    of_paper = ["no", "yes, paper", *["yes, ours"] * 3, *["yes, paper"] * 2, "yes, ours"]
    assert [found[1] for found in resets if found] == of_paper


N = [16, 16, 16, 16, 16, 32, 32, 16]


def longest(stage: p.PlannedStage) -> int:
    return 16383 if stage.name == "run8" else 8191


def test_hours_are_estimated_on_gpus_until_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has the same work on one node of eight as on four; the paper's hours are seven times the estimate."""
    chain = chain_of([*H100, "stage=run1"])
    first = chain.stages[0]
    assert first.step is not None
    assert first.device_hours == pytest.approx(first.step.seconds * 400 * 32 / 3600)
    assert chain.totals["device_hours"] == pytest.approx(2302, abs=1)
    small = chain_of(["cluster=h100_1x8", *H100[1:]]).stages[0]
    assert small.step == first.step
    assert small.device_hours == pytest.approx((first.device_hours or 0) / 4)
    assert cli.main(["plan", *H100]) == 0
    printed = capsys.readouterr().out
    for words in ("GPU hours ~", "estimated, not measured", "3.35 TB/s at 80%", "989 TFLOP/s at 40%"):
        assert words in printed
    assert "assumed, not measured: 0.41 of the longest response" in printed
    per_gpu = (first.tokens_estimated or 0) / (first.device_hours or 0) / 3600
    assert f"; {per_gpu:,.0f} generated tokens/s per GPU" in printed
    assert cli.main(["plan", *H100, "--tokens-per-s", "50000"]) == 0
    printed = capsys.readouterr().out
    assert "GPU hours ~" not in printed
    assert "TB/s" not in printed
    fixed = chain_of([*H100, "trainer.grpo.dynamic_sampling.enabled=false"])
    assert fixed.rates.generated_per_trained == 1.0


def test_a_time_limit_is_suggested_for_jobs_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the estimate, or 1.25 times what was given or measured; 30 minutes per start; at most 24 hours."""
    assert cli.main(["plan", *H100, "stage=run1"]) == 0
    printed = capsys.readouterr().out
    assert "sbatch --time=21:00:00, 1 start: 10.2 h x 2 as margin, and per start 30 min" in printed
    assert "12:00:00 2 starts, 04:00:00 6 starts" in printed
    assert "  2 x 24:00:00  " in next(line for line in printed.splitlines() if line.startswith("   run6 "))
    given = chain_of(H100, mean_tokens=4000.0, tokens_per_s=250_000.0).stages[0]
    hours = 400 * 4096 * 4000 * 1.8 / 250_000 / 3600
    assert (given.sbatch_time, given.starts) == ("17:00:00", 1)
    assert 16.5 < 1.25 * hours + 0.5 < 17.0
    assert chain_of([], tokens_per_s=100.0).stages[0].sbatch_time is None
    assert cli.main(["plan", "--tokens-per-s", "100"]) == 0
    assert "--time" not in capsys.readouterr().out


def test_overrides_reach_every_stage_and_an_unnamed_change_is_shown() -> None:
    chain = chain_of([*H100, "+stage=run2", "trainer.grpo.prompts_per_step=128", "chain.step_scale=0.1"])
    assert [s.steps for s in chain.stages] == [40, 30, 30, 20, 20, 30, 30, 20]
    assert chain.stages[0].responses == 40 * 128 * 16
    assert [s.name for s in chain.stages if s.chosen] == ["run2"]
    first, second = (settings.load([*H100, f"model.optim.lr={lr}"]) for lr in (1e-6, 2e-6))
    assert p._changes(first, second) == {"model.optim.lr": 2e-6}


def test_given_lengths_and_throughput_make_tokens_and_hours() -> None:
    chain = chain_of([*H100, "stage=run1"], mean_tokens=4000.0, tokens_per_s=50_000.0)
    first = chain.stages[0]
    assert first.tokens_estimated == 400 * 4096 * 4000 * 1.8
    assert first.device_hours == pytest.approx(400 * 4096 * 4000 * 1.8 / 50_000 / 3600 * 32)
    text = overview.plan(settings.load([*H100, "stage=run1"]), chain)
    assert "given: --mean-tokens" in text
    assert "given: --tokens-per-s, 50000 generated tokens/s by 32 devices together" in text
    # On a CPU, without a length, the hours are those of responses that fill the context.
    bound = chain_of(["stage=run1"], tokens_per_s=50.0)
    assert bound.stages[0].device_hours == pytest.approx(bound.stages[0].tokens_at_most / 50 / 3600)
    assert "tokens <= (no mean length is known)" in overview.plan(settings.load(["stage=run1"]), bound)
    # No response is longer than its context, whatever the mean.
    long = chain_of([*H100, "stage=run1"], mean_tokens=12_000.0)
    assert [s.tokens_estimated for s in long.stages[::7]] == [400 * 4096 * 8191 * 1.8, 200 * 4096 * 12_000 * 1.8]


def test_a_measured_run_gives_lengths_drops_and_throughput(tmp_path: Path) -> None:
    lines = [measured_line(1, 15_000, 5.0, 48, 10.0), measured_line(2, 5_000, 3.0, 16, 15.0)]
    run = write_run(tmp_path / "run", ["trainer.devices=2"], lines)
    chain = chain_of(["stage=run1", "trainer.devices=4"], measured=run)
    rates = chain.rates
    mean = (48 * 10 + 16 * 15) / 64
    assert rates.mean_tokens == pytest.approx(mean)
    assert rates.generated_per_trained == pytest.approx(20_000 / ((48 * 10 + 16 * 15) * 16))
    assert rates.device_seconds_per_token == pytest.approx(8.0 * 2 / 20_000)
    assert "steps 1 to 2, 2,500 tokens/s on 2 cpu, scaled to 4" in rates.speed_source
    first = chain.stages[0]
    generated = first.responses / (64 * 16) * 20_000  # as many tokens for a response trained on as there were
    assert first.tokens_estimated == pytest.approx(generated)
    assert first.device_hours == pytest.approx(generated * 8.0 * 2 / 20_000 / 3600)
    given = chain_of(["stage=run1"], measured=run, mean_tokens=5.0, tokens_per_s=100.0)
    assert given.stages[0].tokens_estimated == pytest.approx(generated * 5.0 / mean)
    assert given.rates.device_seconds_per_token == 0.01


def test_a_throughput_of_another_model_or_machine_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], [measured_line(1, 15_000, 5.0, 48, 10.0)])
    with pytest.raises(
        ConfigError, match=r"expected trainer.accelerator=gpu, .*got trainer.accelerator=cpu.*--tokens-per-s"
    ):
        chain_of([*H100, "stage=run1"], measured=run)
    chain = chain_of([*H100, "stage=run1"], measured=run, tokens_per_s=50_000.0)  # lengths alone may be taken
    assert chain.rates.mean_tokens == 10.0
    assert chain.rates.speed_source.startswith("given")
    with pytest.raises(ConfigError, match=r"expected model.num_layers=2, .*got model.num_layers=4"):
        chain_of(["model.num_layers=2"], measured=run)


@pytest.mark.parametrize(
    ("rates", "kind", "said"),
    [
        ({"mean_tokens": 0.0}, ConfigError, "--mean-tokens=0"),
        ({"tokens_per_s": float("nan")}, ConfigError, "--tokens-per-s=nan"),
        ({"measured": Path("gone")}, ConfigError, "--measured gone: expected a run directory"),
        (
            {"measured": Path("idle")},
            DataError,
            "expected steps with more than 0 tokens, seconds and groups; got 0 tokens",
        ),
        ({"measured": Path("short")}, DataError, "step 1: time/step: expected a number; got None"),
        ({"measured": Path("empty")}, ConfigError, "empty/config.yaml: expected a configuration"),
        ({"measured": Path("text")}, ConfigError, "text/config.yaml: expected a configuration"),
    ],
)
def test_what_is_wrong_is_said(rates: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path) -> None:
    write_run(tmp_path / "idle", [], [measured_line(1, 0, 5.0, 0, 0.0)])
    write_run(tmp_path / "short", [], [{k: v for k, v in measured_line(1, 9, 5, 1, 1).items() if k != "time/step"}])
    for name, config in (("empty", ""), ("text", "[1, 2]")):
        (write_run(tmp_path / name, [], [measured_line(1, 9, 5, 1, 1)]) / "config.yaml").write_text(config)
    with pytest.raises(kind, match=said):
        chain_of([], **rates)


def test_another_stage_that_would_be_refused_is_a_remark(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 250 is inside runs 1 to 3, 6 and 7 only.  Like the run, the plan judges the chosen stage."""
    overrides = ["trainer.resets.at_steps=[250]", "chain.step_scale=1", "data=domains"]
    assert cli.main(["plan", *overrides, "stage=run1"]) == 0
    assert "stage run4 of the same chain would be refused: trainer.resets.at_steps=[250]" in caplog.text
    table = capsys.readouterr().out.splitlines()
    refused = [line.split()[0] for line in table if "  refused: trainer.resets.at_steps=[250]" in line]
    assert refused == ["run4", "run5", "run8"]
    assert next(line for line in table if line.lstrip().startswith("in all")).split()[2:] == ["-"] * 5
    with pytest.raises(ConfigError, match=r"^trainer.resets.at_steps=\[250\]"):
        chain_of([*overrides, "stage=run4"])
    settings.load([*overrides, "stage=run1"])
    chain = chain_of([*overrides, "trainer.grpo.max_steps=300"])
    assert [(stage.name, stage.steps) for stage in chain.stages] == [("none", 300)]


def test_a_plan_lists_only_the_sources_of_the_tasks(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"id": str(n), "task": "code" if n < 3 else "math", "prompt": "", "truth": {}} for n in range(8)
    ]
    write_lines(tmp_path / "own.jsonl", lines)
    generated = "{name: sums, generator: arithmetic, size: 5}, {name: stem, generator: stem, size: 6}"
    words = [f"data.train=[{generated}, {{name: own, path: {tmp_path / 'own.jsonl'}}}]", "data.validation=[]"]
    words.append("trainer.grpo.prompts_per_step=16")
    assert overview.run_rows(settings.load([*words, "data.tasks=[code]"]))["data"] == (
        "own (3 records); without sums, stem, which data.tasks leaves out;"
        " each record comes about 5 times in a step, which takes 16 prompts"
    )
    assert overview.run_rows(settings.load(words))["data"].startswith("sums (5 records, weight 1), stem (6 records")


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        ([], "none at a fixed step; mode advise, rules only alarm; of reference and optimizer"),
        (["every=40"], "2 at fixed steps: every 40 steps, after 40, 80; one after the last step, 120, without effect"),
        (["every=50", "at_steps=[100,7]"], "3 at fixed steps: every 50 steps, after 7, 50, 100; mode advise"),
        (["every=10"], "11 at fixed steps: every 10 steps, after 10, 20, 30, 40, 50, ... 110; one after the last"),
        (
            ["at_steps=[9]", "parts=reference", "roll_back=true"],
            "1 at a fixed step: after 9; mode advise, rules only alarm; of reference; back to the best weights, then of"
            " the optimizer, too",
        ),
        (
            ["at_steps=[9]", "parts=reference"],
            "1 at a fixed step: after 9; mode advise, rules only alarm; of reference",
        ),
        (
            ["mode=trial", "at_steps=[9]"],
            "1 at a fixed step: after 9; mode trial, each of these, and each that rules ask for, is kept only if it"
            " wins its trial (validation_drop, kl_spike); of reference and optimizer",
        ),
        (
            ["mode=auto", "roll_back=true", "lr_factor=0.5"],
            "none at a fixed step; mode auto, rules may make more (validation_drop, kl_spike); of"
            " reference and optimizer; back to the best"
            " weights; learning rate x 0.5 each",
        ),
        (
            ["at_steps=[9]", "parts=none", "lr_factor=0.5", "lr_factor_steps=20"],
            "1 at a fixed step: after 9; mode advise, rules only alarm; of neither reference nor optimizer; learning"
            " rate x 0.5 for 20 steps each",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_plan_says_when_resets_come_and_what_they_do(overrides: list[str], row: str) -> None:
    """The laptop's run has 120 steps, and a reset that is due after the last one is made too."""
    told = overview.run_rows(settings.load([f"trainer.resets.{override}" for override in overrides]))["hard resets"]
    assert told.startswith(row)
    assert ("best" in told, "rate" in told) == ("best" in row, "rate" in row)


def test_a_plan_of_a_continued_run_counts_only_the_resets_to_come(tmp_path: Path) -> None:
    made = {"format": FORMAT, "version": __version__, "step": 60, "resets": {"done": [{"step": 0}, {"step": 40}]}}
    folder = write_run(tmp_path / "old", ["run_dir=old"], []) / "checkpoints" / "step-000060"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(made))
    of_run = [
        "run_dir=old",
        "trainer.resets.every=40",
        "trainer.resets.at_steps=[5,40]",
        "trainer.resets.lr_factor=0.5",
    ]
    rows = overview.run_rows(settings.load(of_run))
    assert rows["hard resets"].startswith("1 at a fixed step: every 40 steps, after 80; one after the last step, 120,")
    assert "; 1 made so far, after 40; mode advise" in rows["hard resets"]
    assert rows["learning rate"] == "step 61 0.0001, step 80 0.0001, step 81 5e-05, step 120 5e-05"
    only = overview.run_rows(settings.load(["run_dir=old", "trainer.resets.lr_factor=0.5"]))
    assert only["learning rate"] == "step 61 0.0001, step 120 0.0001"
    begins = overview.run_rows(settings.load(["run_dir=runs/x/run2", "stage=run2", "data=domains"]))["hard resets"]
    assert begins.startswith("one at the start of the stage; none at a fixed step; ")


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        ([], None),
        (["name=linear", "warmup_steps=10"], "step 1 2e-05, step 10 0.0002, step 120 1.82e-06"),
        (
            ["warmup_steps=10", "trainer.resets.at_steps=[60]", "trainer.resets.lr_warmup_steps=4"],
            "step 1 2e-05, step 10 0.0002, step 60 0.0002, step 61 5e-05, step 64 0.0002, step 120 0.0002",
        ),
        (
            ["warmup_steps=10", "trainer.resets.at_steps=[60]", "trainer.resets.parts=reference"],
            "step 1 2e-05, step 10 0.0002, step 60 0.0002, step 61 0.0002, step 120 0.0002",
        ),
        (
            ["trainer.resets.every=10", "trainer.resets.lr_factor=0.9"],
            "step 1 0.0002, step 10 0.0002, step 11 0.00018, step 20 0.00018, step 21 0.000162, step 30 0.000162, ...,"
            " step 120 6.28e-05",
        ),
        (
            [
                f"trainer.resets.{word}"
                for word in ("at_steps=[60]", "parts=none", "lr_factor=0.5", "lr_factor_steps=9")
            ],
            "step 1 0.0002, step 60 0.0002, step 61 0.0001, step 70 0.0002, step 120 0.0002",
        ),
        (
            ["name=constant", "trainer.resets.lr_warmup_steps=4", "chain.start_from=runs/x"],
            "step 1 5e-05, step 4 0.0002, step 120 0.0002",
        ),
    ],
)
def test_a_plan_says_which_learning_rate_the_steps_have(overrides: list[str], row: str | None) -> None:
    words = [word if word.startswith(("trainer.", "chain.")) else f"model.optim.sched.{word}" for word in overrides]
    assert timetable.rows(settings.load(words)).get("learning rate") == row


def test_a_plan_of_a_finished_run_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", ["run_dir=old"], []) / "checkpoints" / "step-000120"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"format": FORMAT, "version": __version__, "step": 120}))
    first = [
        overview.run_rows(settings.load(["run_dir=old", *more]))["first weights"]
        for more in ([], ["trainer.grpo.max_steps=121"])
    ]
    assert first[0].startswith("none: the run is finished at step 120. To go on: trainer.grpo.max_steps=N above 120")
    assert first[0].endswith("run_dir=NEW chain.start_from=old")
    assert first[1] == "this run's own: it continues after step 120"


def test_a_plan_says_what_a_fork_starts_from_and_refuses_it_like_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_run(tmp_path / "old", ["run_dir=old"], []) / "checkpoints" / "step-000030"
    fork = ["run_dir=new", f"chain.start_from={checkpoint}"]
    assert cli.main(["plan", *fork]) == 2
    with pytest.raises(ConfigError) as of_the_run:
        origin(settings.load_run(fork), Path("new"))  # type: ignore[arg-type]
    assert str(of_the_run.value) in caplog.text
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "version": __version__, "step": 30}))
    caplog.clear()
    assert cli.main(["plan", *fork]) == 2
    with pytest.raises(ConfigError, match="expected a model folder, hf/ in it or init/ in its run") as of_the_run:
        prepare(settings.load_run(fork), Path("new"), "")
    with pytest.raises(ConfigError, match="expected a model folder, hf/ in it or init/ in its run"):
        check_origin(settings.load_run(fork))
    assert str(of_the_run.value) in caplog.text
    (tmp_path / "old" / "init").mkdir()
    for more, said in ((), "with a hard reset at step 0"), (("chain.hard_reset=false",), "with its reference and opt"):
        assert cli.main(["plan", *fork, *more]) == 0
        told = capsys.readouterr().out
        assert f"first weights    starts from {tmp_path / 'old'}, step 30, {said}" in told
        assert "unlike that run  nothing\n" in told
        assert "warm-up          none" in told
        assert re.search(rf"^>  none   {'no' if more else 'yes'}  ", told, re.MULTILINE)
    no_difference = ["trainer.warmup.steps=0", "rollout.python=/usr/bin/python3"]
    assert cli.main(["plan", *fork, "trainer.grpo.kl_coef=0", "seed=7", *no_difference]) == 0
    assert "unlike that run  seed=7 (was 1), trainer.grpo.kl_coef=0.0 (was 0.0001)\n" in capsys.readouterr().out
    assert cli.main(["plan", "run_dir=old"]) == 0
    assert "this run's own: it continues after step 30" in capsys.readouterr().out
    later = overview.run_rows(settings.load(["run_dir=runs/x/run2", "stage=run2"]))["first weights"]
    assert later == "starts from the last checkpoint of runs/x/run1, with a hard reset at step 0"  # not trained yet


def test_a_plan_is_a_what_if_beside_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path / "run", ["run_dir=run", "seed=3"], [])
    words = ["run_dir=run", "model.optim.lr=1e-5"]
    with pytest.raises(ConfigError, match=r"model.optim.lr=1e-05 \(the run has 0.0002\)"):
        settings.load_run(words)
    assert cli.main(["plan", *words]) == 2
    assert "what if: run holds a run with another configuration: model.optim.lr=1e-05" in caplog.text
    assert "`prorl train` would refuse it" in caplog.text
    with pytest.raises(
        ConfigError, match=r"max_steps=60: expected at least 120.*\nFix: leave it out; `prorl control run"
    ):
        settings.load_run(["run_dir=run", "trainer.grpo.max_steps=60"])
    with pytest.raises(ConfigError, match=r"model.optim.lr=1e-05 \(the run has 0.0002\)"):
        settings.load_run(["model.optim.lr=1e-5"], tmp_path / "run" / "config.yaml")


def test_a_plan_is_printed_and_ends_like_train_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What this machine alone may lack is a warning."""
    (tmp_path / "file").touch()
    refused = "prorl: `prorl train` would refuse this run: "
    for words, code, said in (
        ("data.train=[{name: x, path: gone.jsonl}]", 2, f"{refused}data: 1 file is missing"),
        ("data.train=[{name: x, path: /no/gone.jsonl}]", 0, "if it started on this machine, `prorl train` would"),
        ("run_dir=file/x", 2, f"{refused}run_dir=file/x: expected a folder"),
        ("stage=run2", 2, f"{refused}data.tasks="),
        ("stage=run2 data=domains", 0, "this stage cannot begin yet: stage=run2: follows run1"),
    ):
        caplog.clear()
        assert cli.main(["plan", *([words] if words.startswith("data") else words.split())]) == code
        assert said in caplog.text
        assert "run directory " in capsys.readouterr().out
        dry = cli.main(["train", "--dry-run", *([words] if words.startswith("data") else words.split())])
        assert dry == (2 if code or "/no/" in words else 0)
        capsys.readouterr()


def test_a_run_directory_below_a_folder_that_is_missing_may_be_of_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare_module, "run_dir_fault", lambda folder: f"{folder} cannot be written")
    for run_dir, elsewhere in (("/no_such_mount/runs/x", True), ("runs/x", False)):
        assert [only for _, only in prepare_module.start_faults(settings.load([f"run_dir={run_dir}"]))] == [elsewhere]


def test_a_stage_that_does_not_fit_the_device_is_refused() -> None:
    two_rows = [*H100, "model.micro_batch_size=2", "model.micro_batch_tokens=null"]
    with pytest.raises(ConfigError, match=r"^model.micro_batch_size=2 .* 84,000,000,000"):
        chain_of([*two_rows, "stage=run8"])
    assert "model.micro_batch_size=2" in str(chain_of([*two_rows, "stage=run1"]).stages[7].refused)
    chain = chain_of([*H100, "stage=run1"])
    assert chain.stages[7].memory_needed > chain.stages[0].memory_needed
    text = overview.plan(settings.load([*H100, "stage=run1"]), chain)
    assert "of 84.0 GB (rollout.device_memory_gb=84)" in text
    assert "padded to a multiple of 256: at most " in text
    assert "sequences of 8192 tokens for each engine (what is left)" in text
    assert "1310.3 million parameters without the vocabulary" in text  # of 1,777,088,000


def test_a_saved_configuration_is_one_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ["seed=3", "trainer.grpo.max_steps=30", "run_dir=run"], [])
    cfg = settings.load_run(["run_dir=run"])
    chain = p.plan_chain(cfg, ["run_dir=run"], p.Rates())
    assert [(s.name, s.steps, s.chosen) for s in chain.stages] == [("none", 30, True)]
    assert chain.note is not None
    assert chain.note in overview.plan(cfg, chain)
    file = tmp_path / "run" / "config.yaml"
    from_file = p.plan_chain(settings.load([], file), [], p.Rates(), file)
    assert [s.steps for s in from_file.stages] == [30]


def test_the_table_marks_the_stage_and_names_the_papers_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *H100, "stage=run6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("> ")] == ["run6"]
    assert [line for line in lines if "16,000 GPU hours" in line and line.startswith("the paper's")]
    assert "2,302" in next(line for line in lines if line.lstrip().startswith("in all")).split()


def test_the_page_on_gpus_shows_what_it_prints(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    page = (root / "docs" / "howto" / "gpu.md").read_text()
    command = re.search(r"^prorl (plan cluster=h100_4x8 .*)$", page, re.MULTILINE)
    assert command is not None
    shown = [
        line
        for line in page.splitlines()
        if line.startswith(("  trainer at most", "  KV cache", "  engine's sleep", "  by phase"))
    ]
    assert cli.main(command.group(1).split()) == 0
    printed = capsys.readouterr().out
    assert len(shown) == 4
    assert not [line for line in shown if line.removesuffix(", ...") not in printed]
    assert cli.main([*command.group(1).split(), "rollout.sleep=null"]) == 0
    sequences = re.search(r"KV cache .*: (\d+) sequences", capsys.readouterr().out)
    assert sequences is not None
    assert f"has room for {sequences.group(1)} sequences" in page


def test_json_is_the_same_as_one_object_and_documented(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    arguments = ["plan", *H100, "stage=run6", "--mean-tokens", "4000", "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    chain = chain_of([*H100, "stage=run6"], mean_tokens=4000.0)
    assert told["stages"] == json.loads(json.dumps(chain.as_json()))["stages"]
    assert told["totals"]["steps"] == 2200
    assert told["memory"]["weights"] == 2 * 1_777_088_000
    assert max(told["memory"]["phases"].values()) == told["memory"]["needed"]
    assert told["paper"]["gpu_hours"] == 16_000
    assert told["run"]["stage"] == "run6"
    assert told["rates"]["device_seconds_per_token"] is None
    section = (root / "docs" / "reference" / "plan.md").read_text().split("## Plan\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(told)
    assert told["stages"][0].keys() | told["rates"].keys() <= set(re.findall(r"`(\w+)`", section))


@pytest.mark.slow
def test_no_stage_is_composed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composing is what a plan's time goes into; the whole command stays within a few seconds of computing."""
    composed: list[list[str]] = []

    def compose(name: str, overrides: list[str]) -> Any:
        composed.append(overrides)
        return hydra.compose(name, overrides=overrides)

    monkeypatch.setattr(settings, "compose", compose)
    chain_of(["cluster=slurm_dev", "algorithm=static_sampling", "stage=run4"])  # nobody else has composed these
    assert len(composed) == 8


def test_the_command_exits_2_where_it_is_wrong() -> None:
    assert cli.main(["plan", "--measured", "gone"]) == 2


def test_changes_that_are_not_a_value_of_their_own_are_left_out() -> None:
    first, second = (settings.load([f"trainer.grpo.context_tokens={context}"]) for context in (64, 96))
    assert p._changes(first, second) == {"trainer.grpo.context_tokens": 96}
    assert OmegaConf.select(second, "model.encoder_seq_length") == 96


def test_the_plan_counts_records_and_says_how_often_a_step_repeats_them(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n" * 12)
    own = f"data.train=[{{name: mine, path: {tmp_path / 'mine.jsonl'}}}]"
    assert overview.run_rows(settings.load([own]))["data"] == (
        "mine (12 records); each record comes about 4 times in a step, which takes 48 prompts"
    )
    assert overview.run_rows(settings.load([own, "trainer.grpo.prompts_per_step=8"]))["data"] == "mine (12 records)"
    assert "chain_sum (4,000 records, weight 1), " in overview.run_rows(settings.load([]))["data"]
