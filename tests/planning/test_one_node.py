"""One node: its clusters fit, and what a refusal of a layout ends with leads to a plan."""

import json
import re
from pathlib import Path

import pytest

from nemo_prorl import cli, settings
from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing import roofline
from nemo_prorl.sizing.memory import memory_of
from tests.planning.memory_cases import QWEN_7B

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("in_an_empty_folder")]

BASE = "pretrained_checkpoint.restore_from_path=null"


@pytest.mark.parametrize(("cluster", "gpus", "prompts"), [("h100_1x8", 8, 64), ("gpu_1", 1, 16)])
def test_every_stage_fits_one_node(cluster: str, gpus: int, prompts: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"cluster={cluster}", "stage=run1", BASE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["devices"], told["accelerator"]) == (gpus, "gpu")
    assert len(told["stages"]) == 8
    for stage in told["stages"]:
        assert stage["memory_needed"] < 0.96 * told["memory"]["device_bytes"]
        assert stage["device_hours"] > 0
    assert told["stages"][0]["responses"] == 400 * prompts * 16
    cfg = settings.load([f"cluster={cluster}", "stage=run1", BASE])
    assert (cfg.trainer.num_nodes, cfg.trainer.devices, cfg.rollout.engines) == (1, gpus, gpus)
    assert (cfg.trainer.grpo.context_tokens, cfg.trainer.grpo.samples_per_prompt) == (8192, 16)


def test_without_recomputation_the_last_stage_would_not_fit_one_gpu(caplog: pytest.LogCaptureFixture) -> None:
    given = ["plan", "cluster=gpu_1", BASE, "model.activations_checkpoint_granularity=null"]
    assert cli.main([*given, "stage=run1"]) == 0
    assert "stage run8 of the same chain would be refused: " in caplog.text
    assert cli.main([*given, "stage=run8"]) == 2


def test_the_page_shows_what_the_plan_prints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (root / "docs" / "howto" / "one_node.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert cli.main(["plan", "cluster=h100_1x8", "stage=run1", BASE]) == 0
    printed = capsys.readouterr().out
    assert len(shown[1].splitlines()) >= 4
    assert [line for line in shown[1].splitlines() if line.removesuffix(" ...") not in printed] == []
    rows = re.findall(r"^\| `(\w+)` .*\| ([\d,]+) \|$", page, re.MULTILINE)
    hours, memory = {}, list[str]()
    for cluster, _ in rows:
        assert cli.main(["plan", f"cluster={cluster}", "stage=run1", BASE, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        hours[cluster] = f"{told['totals']['device_hours']:,.0f}"
        memory.append(f"{told['stages'][0]['memory_needed'] / 1e9:.1f} GB")
    assert hours == dict(rows)
    assert f"| {' | '.join(memory)} |" in page
    assert hours.keys() == {"h100_4x8", "h100_1x8", "gpu_1"}
    assert cli.main(["plan", "cluster=h100_4x8", "stage=run1", BASE, "--mean-tokens", "8191", "--json"]) == 0
    assert f"{json.loads(capsys.readouterr().out)['totals']['device_hours']:,.0f} GPU hours" in page


# overrides, and the override with which the first refusal ends
WRONG = [
    (["cluster=h100_4x8", "trainer.num_nodes=1"], "rollout.engines=8"),
    (["cluster=h100_4x8", "trainer.num_nodes=3"], "rollout.engines=30"),
    (["cluster=gpu_1", "trainer.num_nodes=2"], "rollout.engines=2"),
    (["cluster=h100_1x8", "stage=run1", "trainer.devices=1"], "rollout.engines=1"),  # then the memory of run8
    (["cluster=h100_1x8", "model.pipeline_model_parallel_size=7"], "trainer.devices=7"),
    (
        ["cluster=gpu_1", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        "model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1 model.sequence_parallel=false",
    ),
    (
        ["cluster=gpu_1", "model.pipeline_model_parallel_size=2"],
        "model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1",
    ),
    (["cluster=h100_1x8", "model.tensor_model_parallel_size=3"], "model.tensor_model_parallel_size=2"),
    (["cluster=gpu_1", "rollout.tensor_parallel_size=4"], "rollout.tensor_parallel_size=1"),
    (
        ["cluster=h100_1x8", "rollout.tensor_parallel_size=5", "trainer.devices=3"],
        "rollout.tensor_parallel_size=4",
    ),
    (["cluster=h100_4x8", "trainer.grpo.prompts_per_step=4"], "trainer.grpo.prompts_per_step=8"),
    (["cluster=h100_4x8_split", "trainer.num_nodes=5"], "rollout.engines=20"),
    (["cluster=h100_4x8_split", "trainer.num_nodes=1"], "rollout.engines=6"),
    (
        ["cluster=h100_4x8_split", "trainer.devices=5", "rollout.tensor_parallel_size=4"],
        "rollout.own_devices=false trainer.devices=8",
    ),
    (["cluster=h100_1x8", "trainer.devices=16"], "trainer.devices=8"),
]


@pytest.mark.parametrize(("given", "first"), WRONG, ids=[" ".join(given) for given, _ in WRONG])
def test_following_each_fix_leads_to_a_plan(given: list[str], first: str, caplog: pytest.LogCaptureFixture) -> None:
    """Mechanically: what stands behind `Fix:` is added to the command until the plan is printed."""
    words, fixes = ["plan", BASE, *given], list[str]()
    while cli.main(words) == 2:
        refusal = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"][-1]
        fix = re.search(r"Fix: (?:it fits with )?([\w.]+=\w+(?: [\w.]+=\w+)*)", refusal)
        assert fix is not None, refusal
        assert "it fits with" in refusal or refusal.endswith(f"Fix: {fix[1]}")
        fixes.append(fix[1])
        words += fix[1].split()
        assert len(fixes) <= 6, fixes
    assert fixes[0] == first


def write_model(folder: Path) -> None:
    """Write what a plan reads of a 7B model."""
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("given", "possible"),
    [
        ("model.tensor_model_parallel_size=8", "1, 2, 4"),
        ("model.tensor_model_parallel_size=7", "1, 2, 4"),
        ("rollout.tensor_parallel_size=8", "1, 2, 4"),
        ("rollout.tensor_parallel_size=14", None),
        ("rollout.tensor_parallel_size=7", None),
        ("rollout.tensor_parallel_size=28", None),
    ],
)
def test_a_proposed_split_of_a_model_divides_the_gpus(given: str, possible: str | None, tmp_path: Path) -> None:
    """7B has 28 heads and 4 groups of them: vLLM refuses 7 and 14, and 28 are more than a node has."""
    write_model(tmp_path)
    words = ["cluster=h100_1x8", f"pretrained_checkpoint.restore_from_path={tmp_path}", "rollout.engines=1"]
    with pytest.raises(ConfigError) as caught:
        settings.load([*words, given])
    said = str(caught.value)
    assert said.endswith(f"Fix: {given.partition('=')[0]}=4")
    assert possible is None or f"; possible here: {possible}. Fix" in said


def fixes_of(words: list[str], caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Return the alternatives that the refusal of a plan offers."""
    caplog.clear()
    assert cli.main(["plan", *words]) == 2
    return [fix.split() for fix in re.findall(r"((?:[\w.]+=\w+ )+)\(needs", caplog.text)]


def test_a_fix_makes_every_stage_of_the_plan_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """7B on one node: recomputing all layers would be enough for run1, and not for run8."""
    write_model(tmp_path)
    words = ["cluster=h100_1x8", f"pretrained_checkpoint.restore_from_path={tmp_path}", "stage=run1"]
    fixes = fixes_of(words, caplog)
    assert [[word for word in fix if "activations" not in word] for fix in fixes] == [
        [f"model.tensor_model_parallel_size={size}", "model.sequence_parallel=True"] for size in (4, 2)
    ]
    assert "model.activations_checkpoint_granularity=full" in fixes[1]
    assert ": a GPU needs in run1 161," in caplog.text
    assert "(needs 55.4 GB, room for 36 full sequences of 16,384 tokens in run8)" in caplog.text
    for fix in fixes:
        assert cli.main(["plan", *words, *fix]) == 0
    small = [*words[:2], "rollout.device_memory_gb=50"]  # no single change helps
    pairs = fixes_of(small, caplog)
    assert len(pairs) == 3
    for pair in pairs:
        assert cli.main(["plan", *small, *pair]) == 0
    assert "run1" not in caplog.text
    assert fixes_of([*small, "stage=run1"], caplog) == pairs
    assert "Fix: this stage fits, but not the whole chain, with" in caplog.text


def test_a_fix_leaves_room_for_sequences_and_the_fastest_comes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """7B on one node: recomputing all layers fits to the last GB, with the KV cache of a single sequence."""
    write_model(tmp_path)
    words = ["cluster=h100_1x8", f"pretrained_checkpoint.restore_from_path={tmp_path}"]
    recompute = "model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform"
    recomputing = [*words, *recompute.split(), "model.activations_checkpoint_num_layers=1"]
    assert memory_of(settings.load(recomputing)).sequences(84e9) == 1
    assert fixes_of(words, caplog)[0][0] == "model.tensor_model_parallel_size=4"
    assert "(needs 55.4 GB, room for 73 full sequences of 8,192 tokens)" in caplog.text
    # On one GPU nothing else is left, so what barely fits is named, with its single sequence.
    barely = fixes_of([*words, "trainer.devices=1", "rollout.engines=1", "rollout.device_memory_gb=175"], caplog)
    assert barely
    # On a GPU of 95 GB both leave room; a cache of few sequences makes steps longer.
    keys = [fix[0].split("=")[0] for fix in fixes_of([*words, "rollout.device_memory_gb=95"], caplog)]
    assert keys == ["model.tensor_model_parallel_size", "model.activations_checkpoint_granularity"]
    # Both leave enough room: a smaller micro-batch comes before the split of the model, which is slower or equal.
    two = [BASE, "cluster=h100_1x8", "model.micro_batch_tokens=null", "model.micro_batch_size=8"]
    keys = [fix[0].split("=")[0] for fix in fixes_of(two, caplog)]
    assert keys[0] == "model.micro_batch_size"


def test_recomputation_costs_a_forward_pass() -> None:
    """Two passes before the update and three in it become six; a step of generation is as before."""
    few = ["cluster=h100_1x8", "pretrained_checkpoint.restore_from_path=null"]
    stored, again = (settings.load([*few, *more]) for more in ((), ("+model.activations_checkpoint_granularity=full",)))
    times = [roofline.step_time(cfg, memory_of(cfg), None, 2000.0, 1.0) for cfg in (stored, again)]
    assert times[1].training_s == pytest.approx(6 / 5 * times[0].training_s)
    assert times[1].rollout_s == times[0].rollout_s
