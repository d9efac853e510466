"""The documented formats: schemas in docs/schemas against the code that reads and writes each of them."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from nemo_prorl.data.records import validate_record
from nemo_prorl.errors import DataError, ProrlError
from nemo_prorl.rewards.interface import RewardRequest, RewardResult, failed_verdict, verdict_of
from nemo_prorl.rollout.open_responses import OpenResponses
from nemo_prorl.sizing.flops import UpdateSpeed
from nemo_prorl.sizing.memory import ModelShape
from tests.test_docs import ROOT, blocks, inline_code, prose

SCHEMAS = {p.name.removesuffix(".schema.json"): p for p in sorted((ROOT / "docs" / "schemas").glob("*.schema.json"))}
SHA = "0123456789abcdef" * 4
REFERENCE = ROOT / "docs" / "reference"
FORMAT_PAGES = sorted(set(REFERENCE.glob("*.md")) - {REFERENCE / "schemas.md"})  # schemas.md lists all of them

# --- schemas ---------------------------------------------------------------------------------------------------------


def against(name: str, value: Any) -> list[str]:
    """Return the faults of a value as it stands in a file: through JSON and back."""
    schema = Draft202012Validator(json.loads(SCHEMAS[name].read_text()))
    return [f"{fault.json_path}: {fault.message}" for fault in schema.iter_errors(json.loads(json.dumps(value)))]


def test_every_format_has_a_schema_that_says_what_it_is() -> None:
    wanted = (
        "prompt-record reward-request verdict metrics journal-event summary endpoint state control-request hook-event"
        " chain fork launch data-manifest evaluation-results evaluation-comparison evaluation-manifest"
        " evaluation-sample evaluation-published trace node usage"
    )
    assert set(SCHEMAS) == set(wanted.split())
    for name, path in SCHEMAS.items():
        schema = json.loads(path.read_text())
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        Draft202012Validator.check_schema(schema)
        assert schema["title"], name
        assert schema["description"], name
        assert any(f"schemas/{path.name}" in page.read_text() for page in FORMAT_PAGES), name


def fields_of(schema: Any) -> set[str]:
    """Names of the fields of all objects in a schema."""
    if isinstance(schema, list):
        return set().union(*map(fields_of, schema))
    if not isinstance(schema, dict):
        return set()
    own = schema.get("properties", {})
    return {*(own if isinstance(own, dict) else ()), *set().union(*map(fields_of, schema.values()))}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_is_documented(name: str) -> None:
    """Each field of a schema is in inline code on one page that links to the schema."""
    pages = [page for page in FORMAT_PAGES if f"schemas/{name}.schema.json" in page.read_text()]
    named = [set(re.findall(r"[\w@]+", " ".join(inline_code(page)))) for page in pages]
    assert min((sorted(fields_of(json.loads(SCHEMAS[name].read_text())) - words) for words in named), key=len) == []


@pytest.mark.starts
def test_the_schemas_are_those_of_the_types() -> None:
    """`python setup/schemas.py` makes them again."""
    command = [sys.executable, str(ROOT / "setup" / "schemas.py"), "--check"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr


RECORD: dict[str, Any] = {"id": "a-1", "task": "math", "prompt": "1 + 1 =", "truth": {"answer": "2"}}
ENTRY = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
TRUTHS: list[tuple[str, dict[str, Any], bool]] = [
    ("math", {"answer": "2"}, True),
    ("math", {"answer": ["2", "two"], "tolerance": 0.01, "unit": "m"}, True),
    ("math", {"all_of": ["2", "-2"]}, True),
    ("stem", {"answer": "C", "options": ["a", "b", "c"]}, True),
    ("math", {}, False),
    ("math", {"answer": " "}, False),
    ("math", {"answer": 2}, False),
    ("math", {"answer": []}, False),
    ("math", {"answer": "2", "all_of": ["2"]}, False),
    ("math", {"answer": "2", "tolerance": -1}, False),
    ("math", {"answer": "2", "unit": 1}, False),
    ("stem", {"answer": "C", "options": ["only"]}, False),
    ("code", {"tests": [{"input": "1", "output": "2"}], "time_limit_s": 2.5, "setup": "import math"}, True),
    ("code", {"fn_name": "f", "tests": [{"args": [1], "expected": None}]}, True),
    ("code", {"asserts": ["assert f(1) == 2"]}, True),
    ("code", {}, False),
    ("code", {"tests": []}, False),
    ("code", {"tests": [{"input": "1"}]}, False),
    ("code", {"fn_name": "f", "tests": [{"input": "1", "output": "2"}]}, False),
    ("code", {"asserts": []}, False),
    ("code", {"asserts": ["assert f()"], "time_limit_s": 0}, False),
    ("puzzles", {"dataset": "chain_sum", "entry": ENTRY}, True),
    ("puzzles", {"dataset": "", "entry": ENTRY}, False),
    ("puzzles", {"dataset": "chain_sum", "entry": {"question": "?", "answer": "!"}}, False),
    ("puzzles", {"dataset": "chain_sum", "entry": {**ENTRY, "metadata": []}}, False),
    ("instructions", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, True),
    ("instructions", {"instruction_id_list": []}, False),
    ("palindromes", {"anything": 1}, True),
]
OTHERS: list[tuple[dict[str, Any], bool]] = [
    ({"prompt": [{"role": "user", "content": "hi"}], "source": "s", "meta": {"k": 1}}, True),
    ({"prompt": ""}, False),
    ({"prompt": []}, False),
    ({"prompt": [{"role": "robot", "content": "hi"}]}, False),
    ({"prompt": [{"role": "user"}]}, False),
    ({"id": ""}, False),
    ({"id": 1}, False),
    ({"task": " "}, False),
    ({"truth": "2"}, False),
    ({"source": None}, False),
    ({"meta": []}, False),
]


@pytest.mark.parametrize(
    ("record", "good"),
    [({**RECORD, "task": task, "truth": truth}, good) for task, truth, good in TRUTHS]
    + [({**RECORD, **change}, good) for change, good in OTHERS],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_the_schema_of_prompt_records_is_the_code(record: dict[str, Any], good: bool) -> None:
    try:
        validate_record(record, "here")
        accepted = True
    except DataError:
        accepted = False
    assert accepted == good
    assert (against("prompt-record", record) == []) == good


def test_documented_truths_are_accepted() -> None:
    """Each JSON object in the table of truths in docs/reference/records.md."""
    rows = re.findall(r"^\| (`[a-z`, ]+`) \| (.*) \|$", prose(REFERENCE / "records.md"), re.M)
    tried = 0
    for names, text in rows:
        for task in re.findall(r"`(math|stem|code|puzzles|instructions)`", names):
            for truth in re.findall(r"`(\{.*?\})`", text):
                validate_record({**RECORD, "task": task, "truth": json.loads(truth)}, "records.md")
                tried += 1
    assert tried == 3 + 3 + 3 + 1 + 1


def test_documented_json_blocks_fit_their_schemas() -> None:
    examples = {"records.md": "prompt-record", "rewards_service.md": "verdict"}
    assert {page.name for page in REFERENCE.glob("*.md") if blocks(page, "json")} == set(examples)
    for page, name in examples.items():
        [block] = blocks(REFERENCE / page, "json")
        assert against(name, json.loads(block)) == []


def test_requests_and_verdicts_fit() -> None:
    request = RewardRequest("a-1", "math", "1 + 1 =", {"answer": "2"}, "\\boxed{2}")
    assert against("reward-request", request.to_json()) == []
    assert against("reward-request", {**request.to_json(), "finished": "yes"})
    assert against("reward-request", RECORD)
    assert against("verdict", verdict_of("a-1", RewardResult(0.5, None, {"half": 0.5}))) == []
    for failure, score in (("timeout", 0.0), ("invalid", 0.0), ("infrastructure", None)):
        verdict = failed_verdict("a-1", failure, "why")
        assert verdict["score"] == score
        assert against("verdict", verdict) == []
        assert against("verdict", {**verdict, "score": 0.0 if score is None else None}), "the other score must not fit"
    assert against("verdict", {**verdict_of("a-1", RewardResult(1.0)), "score": 1.5})


def test_what_the_nodes_of_a_run_write_fits(tmp_path: Path) -> None:
    from nemo_prorl.files import write_json
    from nemo_prorl.launcher.peers import Launch, NodeAddress, Peers, StepOutcome

    peers = Peers(tmp_path, NodeAddress(host="a"), "17.0.1")
    for end in (None, StepOutcome(1, "trainer-0 ended with status -9", "a", "trainer-0", -9, ["a line"])):
        peers.write_end(end)
        assert against("node", json.loads(peers.files[0].read_text())) == []
    write_json(peers.launch, Launch(tasks=["math"], master="a", port=4711))
    assert against("node", json.loads(peers.launch.read_text())) == []
    assert against("node", {"host": "a", "ended": None})


# --- what a run writes, through the code that writes it --------------------------------------------------------------

NOTING = ("checkpoints", "control", "run_records", "resets", "trials", "validation")  # in the journal
SCORES: Any = {
    "all": {"mean": 0.25, "se": 0.1, "prompts": 4},
    "tasks": {"sums": {"mean": 0.25, "se": 0.1, "prompts": 4}},
}


METRIC_PAGES = (REFERENCE / "metrics.md", REFERENCE / "metrics_time.md")


@pytest.fixture(scope="module")
def metrics_line() -> dict[str, Any]:
    """A step's line: each number through the function that reports it in a run."""
    from nemo_prorl.algorithms.correction import rollout_correction
    from nemo_prorl.algorithms.diagnostics import gap_numbers, gap_profile, means_by_task, reference_gap, sums_by_task
    from nemo_prorl.batch import Batch, JudgedGroups
    from nemo_prorl.config import GRPOConfig, ShapingConfig
    from nemo_prorl.metrics import Metrics
    from nemo_prorl.rollout.groups import CollectedBatch, TaskTally
    from nemo_prorl.rollout.report import report_rollout
    from nemo_prorl.trainer import advantages, policy_loss, report_update
    from nemo_prorl.usage import totals
    from tests.test_usage import GB, node

    metrics = Metrics(3, "none")
    response = SimpleNamespace(token_ids=[3, 4], logprobs=[-1.0, -1.0])
    group = SimpleNamespace(task="math", prompt_ids=[1, 2], responses=[response] * 2, version=2, draw_index=0)
    group.scores, group.valid, group.finished = [1.0, 0.0], [True, True], [True, False]
    shaping = ShapingConfig(overlong_tokens=1, cosine=True)
    advantages(JudgedGroups.of([group]), GRPOConfig(unfinished_penalty=0.5, shaping=shaping), metrics)
    tally = TaskTally(decided=4, kept=2, judged=8, score_sum=3.0, finished=7, tokens=40)
    canaries = {"right/math": 2, "false_rejects/math": 0, "wrong/math": 2, "false_accepts/math": 1}
    collected = CollectedBatch(3, 2, 2, tasks={"math": tally}, drawn=4, generated_tokens=40, wall_s=1.0)
    second = {"judged/math": 3, "disagreed/math": 1}
    report_rollout(metrics, replace(collected, canaries=canaries, second=second, kv_cache_peak=0.5))
    batch = Batch.from_sequences([[1, 2]] * 2, [[3, 4]] * 2, [[-1.0, -1.0]] * 2)
    logp_BT = torch.where(batch.mask_BT, -1.0, 0.0)
    batch = batch.with_targets(
        old_logp_BT=logp_BT,
        ref_logp_BT=logp_BT,
        advantage_B=torch.tensor([1.0, -1.0]),
        weight_BT=torch.ones_like(logp_BT),
    )
    gap = {key: float(v) for key, v in reference_gap(logp_BT, logp_BT, batch.mask_BT).items()}
    _, corrected = rollout_correction(logp_BT, batch.engine_logp_BT, batch.mask_BT, GRPOConfig().correction)
    _, sums = policy_loss(logp_BT, None, batch, 4.0, GRPOConfig())
    whole = {"grad_norm": 1.0, "positions": 8.0, "padding": 0.0, "max_shapes": 2.0}
    report_update(metrics, {**{k: float(v) for k, v in sums.items()}, **whole})
    by_task = sums_by_task(logp_BT, logp_BT, -logp_BT, batch.mask_BT, torch.tensor([0, 0]), ["math"])
    for key, value in means_by_task({k: float(v) for k, v in by_task.items()}, ["math"]).items():
        metrics.put(key, value)
    metrics.add(
        "engine_gap",
        gap | gap_numbers(gap_profile(torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool))),
    )
    metrics.add("stale_gap", gap)
    metrics.add("correction", {key: float(v) for key, v in corrected.items()})
    metrics.add("system", totals([node({f"{kind}-0": GB for kind in ("trainer", "engine", "rewards", "supervisor")})]))
    writers = ("trainer.py", "rollout/rollouts.py", "lifecycle/validation.py", "lifecycle/run_records.py")
    for key in set().union(*map(literal_keys, writers)):
        if key not in metrics.as_json():
            metrics.put(key, 0.5)
    load = OpenResponses(1)
    load.begin()
    load.kv_cache_used(0.5, 1)
    metrics.add("time/rollout", load.end())
    shape = ModelShape(1, 2, 3, 1, 1, 2, 5, 5, tied=False, qkv_bias=False)
    metrics.add("time/updates", UpdateSpeed(shape, 1, "NVIDIA H200").metrics(7.0, 49.0, 0.5))
    for phase in set(re.findall(r'phase\("(\w+)"', "".join(map(source, writers)))):
        metrics.put(f"time/{phase}", 0.5)
    metrics.put("validation/sums", 0.5)
    metrics.put("time/ledger/seconds", 0.5)
    return metrics.as_json()


def source(name: str) -> str:
    return (ROOT / "nemo_prorl" / name).read_text()


def literal_keys(name: str) -> set[str]:
    """Metric names that stand as plain text in a source file."""
    return set(re.findall(r'metrics\.put\(\s*"([\w/]+)"', source(name)))


def as_documented(key: str) -> str:
    return {"validation/sums": "validation/NAME"}.get(key, re.sub("/math$", "/TASK", key))


def test_metrics_fit_and_each_key_is_documented(metrics_line: dict[str, Any]) -> None:
    assert against("metrics", metrics_line) == []
    assert against("metrics", {**metrics_line, "reward/all": None}) == []
    assert against("metrics", {**metrics_line, "policy/new": 1.0})
    assert against("metrics", {**metrics_line, "kl": "0"})
    documented = {code for page in METRIC_PAGES for code in inline_code(page)}
    assert len(metrics_line) > 60
    assert sorted(key for key in metrics_line if as_documented(key) not in documented) == []


def test_documented_metrics_are_written(metrics_line: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", "\n".join(map(prose, METRIC_PAGES)), re.M)
    named = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    assert sorted(named - {as_documented(key) for key in metrics_line}) == []


def test_every_event_is_documented() -> None:
    """The first cells of the tables of docs/reference/journal.md name all events of the journal and of the hook."""
    from nemo_prorl.launcher.formats import HookName
    from nemo_prorl.lifecycle.journal_events import JournalEvent

    page = prose(REFERENCE / "journal.md")
    events = {name for kind in get_args(JournalEvent) for name in get_args(kind.__annotations__["event"])}
    for heading, names in (("journal.jsonl", events), ("on_event", set(get_args(HookName)))):
        section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
        table = section.split("| `event` |" if heading == "on_event" else "| event |")[1].split("\n\n")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == names


def test_the_entry_page_leads_to_every_format() -> None:
    """docs/reference/formats.md links to each page that names a schema."""
    linked = set(re.findall(r"\]\((\w+\.md)", (REFERENCE / "formats.md").read_text()))
    assert {page.name for page in FORMAT_PAGES if "../schemas/" in page.read_text()} <= linked


def test_journal_and_rollouts_fit(tmp_path: Path) -> None:
    from nemo_prorl.lifecycle.journal_events import JournalEvent
    from nemo_prorl.lifecycle.run_records import Journal, write_rollouts
    from nemo_prorl.rollout.endpoints import Response
    from nemo_prorl.rollout.groups import Group

    journal = Journal(tmp_path)
    journal.append("start", 0, stage="none", version="0.1.0")
    journal.append("validation", 0, **SCORES)
    journal.append("reset_intent", 2, reason="at_steps")
    journal.append("reset_commit", 2, reason="at_steps", reference_sha256=SHA)
    journal.append("stop", 3, reason="stopped after step 3")
    journal.append("failure", 3, reason="RewardFailure: no verdict (trainer-0 ended with status 1)")
    journal.append("change", 3, what="trainer.resets.mode=auto (was advise)")
    journal.append("resume", 3, stage="none", version="0.1.0")
    answer: Any = {
        "request": "a-1",
        "what": "reset",
        "status": "done",
        "detail": "hard reset",
        "user": "ann",
        "host": "n",
    }
    journal.append("control", 3, **answer)
    journal.append("trial", 3, arm="reset", reason="every")
    result: Any = {"winner": "none", "difference": -0.01, "se": 0.01, "looks": 4, "because": "no difference is shown"}
    journal.append("trial_end", 9, trial=3, tokens=100, **result)
    journal.append("finish", 4)
    assert [f for event in journal.events() for f in against("journal-event", event)] == []
    assert against("journal-event", {"event": "party", "step": 1, "time": 0.0})
    assert against("journal-event", {"event": "reset_commit", "step": 1, "time": 0.0, "reason": "r"})
    files = (
        "rank.py",
        "trainer.py",
        "launcher/events.py",
        "launcher/prepare.py",
        *(f"lifecycle/{name}.py" for name in NOTING),
    )
    writing = r'(?:journal\.append|Journal\(run_dir\)\.append|\.event|\._record)\(\s*"(\w+)"'
    written = set(re.findall(writing, "".join(map(source, files))))
    assert written == {name for kind in get_args(JournalEvent) for name in get_args(kind.__annotations__["event"])}

    response = Response(0, [3, 4], [-1.0, -1.0], "stop", 2)
    group = Group("a-1", "math", RECORD, [1, 2], 0, [response], [verdict_of("a-1", RewardResult(1.0))], 3, 2, 7)
    write_rollouts(tmp_path, 3, [group, replace(group, draw_index=8)], {7}, lambda prompt_ids, response_ids: "2")
    lines = (tmp_path / "rollouts" / "step-3.jsonl").read_text().splitlines()
    rollout, other = map(json.loads, lines)
    assert (rollout["trained"], other["trained"]) == (True, False)
    assert against("reward-request", rollout) == []
    assert against("verdict", rollout["verdict"]) == []
    assert rollout["version"] == 2


def test_summary_fits(tmp_path: Path) -> None:
    from nemo_prorl.files import write_json
    from nemo_prorl.lifecycle.summary import summary

    line = {"time/rollout": 2.0, "time/step": 3.0, "time/rollout/reward_open_s": 1.0, "time/rollout/reward_wait_s": 0.5}
    some: dict[str, Any] = {
        "step": 4,
        "stage": "none",
        "seed": 1,
        "scores": {0: SCORES, 4: SCORES},
        "resets": [{"step": 2, "reason": "at_steps", "reference_sha256": SHA}],
        "lines": [{**line, "rollout/generated_tokens": 40}] * 2,
        "checkpoint_s": 0.5,
        "hashes": {"weights_sha256": SHA, "reference_sha256": SHA},
    }
    bare = {**some, "scores": {}, "resets": [], "hashes": None, "lines": [], "checkpoint_s": 0.0}
    for values in (some, bare):
        write_json(tmp_path / "summary.json", summary(**values))
        assert against("summary", json.loads((tmp_path / "summary.json").read_text())) == []
    times = summary(**some)["time"]
    assert times["phase_s"] == {"checkpoint": 0.5, "rollout": 4.0}
    assert (times["tokens_per_s"], times["reward_hidden_share"]) == (20.0, 0.5)
    ahead = {**line, "time/updates": 1.5, "time/ahead": 0.5, "rollout/generated_tokens": 40}
    assert summary(**{**some, "lines": [ahead]})["time"]["tokens_per_s"] == 10.0  # engines generate in updates, too
    assert against("summary", {**summary(**some), "weights_sha256": "short"})
    assert against("summary", {**summary(**some), "heldout": {"before": 0.5}})


def test_endpoints_fit(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from nemo_prorl.rewards.server import announce
    from nemo_prorl.rollout.engine import endpoint

    for state in ("ready", "stopped"):
        announce(tmp_path / "rewards-0.json", "http://127.0.0.1:1234", state)
        assert against("endpoint", json.loads((tmp_path / "rewards-0.json").read_text())) == []
    file = str(tmp_path / "engine-0.json")
    shown = {"host": "0.0.0.0", "public_host": "node3", "index": 0, "weights_dir": "/dev/shm/w"}
    options: Any = SimpleNamespace(**shown, endpoint_file=file)
    endpoint.announce(options, 1234)
    engine = json.loads((tmp_path / "engine-0.json").read_text())
    assert against("endpoint", engine) == []
    assert against("endpoint", {**engine, "kind": "party"})


def test_requests_to_a_run_and_what_its_hook_is_given_fit(tmp_path: Path) -> None:
    from nemo_prorl.launcher.events import Events
    from nemo_prorl.lifecycle.control import REQUESTS, place
    from nemo_prorl.lifecycle.run_records import Journal

    request = json.loads(place(tmp_path, "reset")[1].read_text())
    assert against("control-request", request) == []
    assert against("control-request", {**request, "what": "explode"})
    schema = json.loads(SCHEMAS["control-request"].read_text())
    assert schema["properties"]["what"]["enum"] == list(REQUESTS)
    given: list[dict[str, Any]] = []
    events = Events("cat", tmp_path)
    events._start = given.append  # type: ignore[method-assign, assignment]
    Journal(tmp_path).append("reset_commit", 2, reason="at_steps", reference_sha256=SHA)
    events.failure("trainer-0 ended with status -9", process="trainer-0", status=-9, log=["its last words"])
    assert [event["event"] for event in given] == ["reset", "failure"]
    assert [f for event in given for f in against("hook-event", event)] == []
    assert against("hook-event", {**given[0], "event": "party"})


def test_state_fits(tmp_path: Path) -> None:
    """The parts of state.json from the objects whose state they are; whole runs' checkpoints are held to it, too."""
    from nemo_prorl.algorithms.dynamic_sampling import KeepRates
    from nemo_prorl.algorithms.entropy import AdaptiveEntropy
    from nemo_prorl.config import DataSource, GRPOConfig
    from nemo_prorl.data.blend import Blend
    from nemo_prorl.lifecycle.checkpoints import GROUPS
    from nemo_prorl.lifecycle.run_records import code_sha256
    from nemo_prorl.metrics import Metrics
    from nemo_prorl.trainer import RunProgress
    from tests.lifecycle.parts import NoCheckpoints, Parts

    blend = Blend([(DataSource(name="sums"), [RECORD, {**RECORD, "id": "a-2"}])], seed=1, retire_after=1)
    blend.next()
    blend.observe([("a-1", "solved")])
    parts, rates = Parts(tmp_path), KeepRates()
    parts.resets.perform(2, "at_steps", NoCheckpoints())
    parts.validation.scores[0] = SCORES
    rates.update("math", True)
    state = {
        **{"format": 5, "weights_sha256": SHA, "reference_sha256": SHA, "step": 2, "stage": "none", "version": "0.1.0"},
        "code": code_sha256(),
        "functions": {},
        "files": {GROUPS: SHA},
        "trainer": RunProgress(2).state_dict(),
        **{name: getattr(parts, name).state_dict() for name in ("records", "validation", "resets")},
        "prompts": blend.state_dict(),
        "rollouts": {"surplus": [3], "draws": 4, "keep_rates": rates.state_dict()},
        "entropy": AdaptiveEntropy(GRPOConfig().adaptive_entropy).state_dict(),
    }
    assert against("state", {**state, "trainer": RunProgress(3, Metrics(3, "none")).state_dict()}) == []
    assert against("state", state) == []
    assert against("state", {**state, "format": 3})
    assert against("state", {k: v for k, v in state.items() if k != "rollouts"})
    imported = {"format": 5, "weights_sha256": SHA, "reference_sha256": SHA, "step": 0, "imported_from": "/models/x"}
    assert against("state", imported) == []


def test_state_has_the_parts_that_a_run_saves() -> None:
    """The names of the parts, read from where they are wired, against the schema of a trained checkpoint."""
    trained = json.loads(SCHEMAS["state"].read_text())["$defs"]["RunState"]
    parts = re.search(r"parts: dict\[str, Stateful\] = \{(.*?)\n    \}", source("rank.py"), re.S)
    assert parts is not None
    about = {"format", "weights_sha256", "reference_sha256", "step", "stage", "version", "code", "functions", "files"}
    assert (
        set(re.findall(r'"(\w+)":', parts.group(1))) | about == set(trained["required"]) == set(trained["properties"])
    )


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", prose(REFERENCE / "overview.md"), re.M))
    classes = [ProrlError]
    for kind in classes:
        classes += kind.__subclasses__()
    assert {str(kind.exit_code) for kind in classes} | {"0"} == set(rows)


def test_every_error_class_has_a_fix() -> None:
    tree = ast.parse(source("errors.py"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)} - {"ProrlError"}
    told = set(inline_code(ROOT / "docs" / "howto" / "errors.md"))
    assert sorted(names - told) == []
