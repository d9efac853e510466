"""`prorl evaluate` in one process: a real HTTP server answers, and a function judges in place of the reward server."""

import asyncio
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_prorl.cli import main
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.evaluation.catalogue import Sampling
from nemo_prorl.evaluation.manifest import manifest_of
from nemo_prorl.evaluation.models import Model, draft
from nemo_prorl.evaluation.run import EvaluationOptions, _tell_other_eos, configuration
from nemo_prorl.evaluation.sampling import seed_of
from nemo_prorl.evaluation.sources import OnReply
from nemo_prorl.rewards.interface import RewardResult, Verdict, failed_verdict, verdict_of
from nemo_prorl.settings import load
from tests import paper_model
from tests.evaluation.openai_server import Answers, serve
from tests.evaluation.test_sampling import Drawn
from tests.policy.models import QWEN2
from tests.policy.models import write_model as write_complete
from tests.policy.test_model_folders import CHATML, change_config, with_template
from tests.rollout.engines import write_model
from tests.test_formats import against

RECORDS: list[dict[str, Any]] = [
    {"id": f"m-{k}", "task": "math", "prompt": f"{k} + 1?", "truth": {"answer": "1"}} for k in range(5)
]


class Judge:
    """In place of the services of an evaluation: judges by the response, and notes what it was started with."""

    started: list[tuple[list[str], int]]
    seconds: list[float]  # rewards.functions_time_s
    requests: list[dict[str, Any]]
    broken: bool
    fails_after: int | None  # verdicts after which it fails

    def __init__(self, cfg: Any, out: Path, tasks: list[str], engines: int) -> None:
        self.started.append((list(tasks), engines))
        self.seconds.append(cfg.rewards.functions_time_s)

    async def __aenter__(self) -> "Judge":
        return self

    async def __aexit__(self, *_: object) -> None: ...
    async def ready(self) -> None: ...

    def reward_client(self) -> "Judge":
        return self

    async def watching(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    async def score(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        self.requests.append(request)
        if self.broken or (self.fails_after is not None and len(self.requests) > self.fails_after):
            return failed_verdict(request["id"], "infrastructure", "the judge is out")
        return verdict_of(request["id"], RewardResult(float("1" in request["response"])))

    async def corrected(self, request: dict[str, Any], deadline: Deadline) -> Verdict:
        return verdict_of(request["id"], RewardResult(1.0))


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> type[Judge]:
    monkeypatch.setattr("nemo_prorl.evaluation.sampling.Services", Judge)
    Judge.started, Judge.seconds, Judge.requests, Judge.broken, Judge.fails_after = [], [], [], False, None
    monkeypatch.setattr(Judge, "score", Judge.score)  # a test may replace it
    return Judge


@pytest.fixture
def address() -> Iterator[tuple[str, Answers]]:
    """The server of `openai_server` on a thread of its own."""
    answers, loop = Answers(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner, url = asyncio.run_coroutine_threadsafe(serve(answers), loop).result(20)
    yield url, answers
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)


Evaluate = Callable[..., int]


@pytest.fixture
def evaluate(tmp_path: Path, address: tuple[str, Answers], judge: type[Judge]) -> Evaluate:
    """Runs the command on the first 3 records of a file, with 2 samples each, in a folder of this name."""

    def run(folder: str, *words: str, records: str = "mine", samples: int = 2) -> int:
        file = tmp_path / f"{records}.jsonl"
        if not file.exists():
            file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        chosen = ["--model", "tiny", "--benchmarks", str(file), "--limit", "3", "--seed", "7"]
        return main(
            ["evaluate", address[0], *chosen, "--samples", str(samples), "--out", str(tmp_path / folder), *words]
        )

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_is_asked_judged_and_stored(
    tmp_path: Path, address: tuple[str, Answers], judge: type[Judge], evaluate: Evaluate
) -> None:
    assert evaluate("out") == 0
    samples = lines(tmp_path / "out" / "samples" / "mine.jsonl")
    wanted = {(r["id"], k): seed_of(7, r, k) for r in RECORDS[:3] for k in range(2)}
    assert {(line["id"], line["sample"]): line["seed"] for line in samples} == wanted
    assert sorted(body["seed"] for body in address[1].bodies) == sorted(wanted.values())
    assert {(r["id"], r["response"], r["finished"]) for r in judge.requests} == {
        (identity, f"<answer>{seed % 3}</answer>", seed % 5 > 0) for (identity, _), seed in wanted.items()
    }
    assert judge.started == [(["math"], 0)]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (found["seed"], found["complete"], found["time"]["generated_tokens"]) == (7, True, 6 * 5)
    entry = found["benchmarks"]["mine"]
    assert (entry["prompts"], entry["samples"]) == (3, 2)
    assert entry["reward"]["mean"] == pytest.approx(sum(seed % 3 == 1 for seed in wanted.values()) / 6)


def test_the_same_command_again_asks_for_nothing_and_keeps_the_time(
    tmp_path: Path, address: tuple[str, Answers], judge: type[Judge], evaluate: Evaluate
) -> None:
    assert evaluate("out") == 0
    before = (tmp_path / "out" / "results.json").read_text()
    assert evaluate("out") == 0
    assert (tmp_path / "out" / "results.json").read_text() == before
    assert (len(address[1].bodies), len(judge.started)) == (6, 1)
    assert evaluate("out", samples=3) == 0
    assert len(address[1].bodies) == 9
    assert evaluate("out", records="other") == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: entry["samples"] for name, entry in found["benchmarks"].items()} == {"mine": 3, "other": 2}


def test_what_was_not_judged_is_an_error_and_judged_again(
    tmp_path: Path,
    judge: type[Judge],
    evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def raises(self: Judge, request: dict[str, Any], deadline: Deadline) -> Verdict:
        return failed_verdict(request["id"], "infrastructure", "score raised ValueError (own.py:3)")

    with monkeypatch.context() as patch:
        patch.setattr(judge, "score", raises)
        assert evaluate("raises") == 1
    assert (
        f"raised ValueError (own.py:3). Fix: correct it, and `prorl evaluate --judge-again --out {tmp_path}"
        in caplog.text
    )
    judge.broken = True
    assert evaluate("out") == 1
    assert "the judge is out. Fix: run the same command again" in caplog.text
    assert json.loads((tmp_path / "out" / "results.json").read_text())["complete"] is False
    judge.broken = False
    assert evaluate("out") == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["complete"] is True


def test_a_manifest_repeats_its_evaluation_or_says_what_has_changed(
    tmp_path: Path, address: tuple[str, Answers], evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("out") == 0
    again = ["evaluate", "--manifest", str(tmp_path / "out" / "manifest.json"), "--out"]
    assert main([*again, str(tmp_path / "again")]) == 0
    assert f"equal to {tmp_path}/out/results.json" in capsys.readouterr().out
    assert len(address[1].bodies) == 12
    assert sorted(body["seed"] for body in address[1].bodies[6:]) == sorted(b["seed"] for b in address[1].bodies[:6])
    file = tmp_path / "mine.jsonl"
    file.write_text(file.read_text().replace("0 + 1?", "1 + 0?"))
    assert main([*again, str(tmp_path / "other")]) == DataError.exit_code
    assert len(address[1].bodies) == 12


def test_another_reward_function_is_another_evaluation(
    tmp_path: Path, judge: type[Judge], evaluate: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    """The content of its files and the function's name decide, not its path; --manifest says what has changed."""
    records = [{**record, "task": "own"} for record in RECORDS]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    own = tmp_path / "own.py"
    own.write_text("def score(prompt, response, truth):\n    return 1.0\n")
    function = f"rewards.functions.own={own}:score"
    assert evaluate("out", function, records="own") == 0
    entry = json.loads((tmp_path / "out" / "manifest.json").read_text())["benchmarks"]["own"]
    assert entry["scorer"] == hashlib.sha256(own.read_bytes()).hexdigest() + ":score"
    own.rename(own := tmp_path / "moved.py")
    moved = f"rewards.functions.own={own}:score"
    assert evaluate("out", moved, records="own") == 0
    own.write_text("import beside_own\ndef score(prompt, response, truth):\n    return 0.0\n")
    (tmp_path / "beside_own.py").write_text("")
    assert evaluate("out", moved, records="own") == ConfigError.exit_code
    assert "differs in: own: another reward function" in caplog.text
    again = ["evaluate", "--manifest", str(tmp_path / "out" / "manifest.json"), "--out", str(tmp_path / "again"), moved]
    assert main(again) == DataError.exit_code
    assert "own: the reward function changed" in caplog.text
    assert evaluate("other", moved, records="own") == 0
    (tmp_path / "beside_own.py").write_text("# another\n")
    assert evaluate("other", moved, records="own") == ConfigError.exit_code
    own.write_text("def score(prompt, response): ...\n")
    assert evaluate("third", moved, records="own") == ConfigError.exit_code
    assert "expected a function of (prompt, response, truth)" in caplog.text
    assert not (tmp_path / "third").exists()


def own_benchmark(folder: Path, score: str = "0.0") -> str:
    """Write records of an own task, and a function of it in a file with a module beside it; return its override."""
    records = [{**record, "task": "own"} for record in RECORDS]
    (folder / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "helping.py").write_text(f"def value(response):\n    return {score}\n")
    text = "import helping\n\n\ndef score(prompt, response, truth):\n    return helping.value(response)\n"
    (folder / "own.py").write_text(text)
    return f"rewards.functions.own={folder}/own.py:score"


def result_of(folder: Path) -> tuple[float, str, str]:
    """The reward, the scorer and the folder of the verdicts in results.json."""
    found = json.loads((folder / "results.json").read_text())
    assert against("evaluation-results", found) == []
    assert against("evaluation-manifest", json.loads((folder / "manifest.json").read_text())) == []
    entry = found["benchmarks"]["own"]
    return entry["reward"]["mean"], entry["scorer"], found["verdicts"]


def test_a_corrected_scorer_judges_the_stored_responses_again(
    tmp_path: Path,
    address: tuple[str, Answers],
    judge: type[Judge],
    evaluate: Evaluate,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The module beside the function is corrected; the refusal of the same command names the one that judges again."""
    function, out = own_benchmark(tmp_path), tmp_path / "out"
    assert evaluate("out", function, records="own") == 0
    before, samples = result_of(out), (out / "samples" / "own.jsonl").read_bytes()
    own_benchmark(tmp_path, "1.0")
    assert evaluate("out", records="own") == ConfigError.exit_code
    again = f"prorl evaluate --judge-again --out {out} {function}"
    assert f"Fix: `{again}` judges the stored responses" in caplog.text
    judge.score = judge.corrected  # type: ignore[method-assign]
    assert main(again.split()[1:]) == 0
    assert judge.started == [(["own"], 0)] * 2
    assert (out / "samples" / "own.jsonl").read_bytes() == samples
    assert len(address[1].bodies) == 6
    now = result_of(out)
    assert before[0] < now[0] == 1.0
    assert now[1] != before[1]
    assert (before[2], now[2]) == ("verdicts", "verdicts-2")
    assert {line["score"] for line in lines(out / "verdicts-2" / "own.jsonl")} == {1.0}
    printed = capsys.readouterr().out
    assert f"own: judged by {now[1]} at 20" in printed
    row = printed.partition("task ")[2].splitlines()[1].split()
    assert row[:6] == ["own", "3", "0", "3", "3", "0"], "same, reworded, changed, up, down"
    assert evaluate("out", records="own", samples=3) == 0, "it goes on with the scorer of the manifest"
    assert len(address[1].bodies) == 9
    assert len(lines(out / "verdicts-2" / "own.jsonl")) == 9


def test_judging_again_that_was_stopped_continues_and_never_mixes_two_scorers(
    tmp_path: Path, judge: type[Judge], evaluate: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    function, out = own_benchmark(tmp_path), tmp_path / "out"
    assert evaluate("out", function, records="own") == 0
    before = [(out / name).read_text() for name in ("results.json", "manifest.json")]
    own_benchmark(tmp_path, "1.0")
    judge.requests.clear()
    judge.fails_after = 2
    again = ["evaluate", "--judge-again", "--out", str(out)]
    assert main(again) == 1
    assert "4 responses have no new verdict, so the earlier verdicts and results stay; the first:" in caplog.text
    assert [(out / name).read_text() for name in ("results.json", "manifest.json")] == before
    judge.requests.clear()
    judge.fails_after = 3
    assert main(again) == 1
    assert len(judge.requests) == 4, "the two new verdicts stay"
    own_benchmark(tmp_path, "0.5")
    judge.requests.clear()
    judge.fails_after = None
    assert main(again) == 0
    assert len(judge.requests) == 6, "those of another scorer are judged again"
    assert result_of(out)[2] == "verdicts-2"
    (out / "results.json").write_text(before[0])  # as if killed before the last file was written
    judge.requests.clear()
    assert main(again) == 0
    assert (len(judge.requests), result_of(out)[2]) == (0, "verdicts-2")
    assert main(again) == 0
    assert (len(judge.requests), result_of(out)[2]) == (6, "verdicts-3"), "asked once more, it judges once more"


def test_judging_again_takes_no_other_option(tmp_path: Path, evaluate: Evaluate, caplog: Any) -> None:
    assert main(["evaluate", "--judge-again", "--out", str(tmp_path / "none")]) == ConfigError.exit_code
    assert not (tmp_path / "none").exists()
    assert evaluate("out", own_benchmark(tmp_path), "--judge-again", records="own") == ConfigError.exit_code
    assert "cannot be combined with --judge-again" in caplog.text


def test_a_manifest_names_the_reward_function_that_judged(
    tmp_path: Path, evaluate: Evaluate, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """So --manifest needs no override; if the file has another place now, the message says which one to give."""
    function, again = own_benchmark(tmp_path), ["evaluate", "--manifest", str(tmp_path / "out" / "manifest.json")]
    assert evaluate("out", function, records="own") == 0
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert f"equal to {tmp_path}/out/results.json" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    del manifest["benchmarks"]["own"]["function"]
    older = tmp_path / "older" / "manifest.json"
    older.parent.mkdir()
    older.write_text(json.dumps(manifest))
    assert main([*again[:2], str(older), "--out", str(tmp_path / "of_older")]) == ConfigError.exit_code
    assert "an older version did not record which. Fix: add rewards.functions.own=FILE.py:FUNCTION" in caplog.text
    (tmp_path / "own.py").rename(tmp_path / "moved.py")
    assert main([*again, "--out", str(tmp_path / "moved")]) == ConfigError.exit_code
    assert "own.py. Fix: add rewards.functions.own=FILE.py:FUNCTION to the command" in caplog.text
    moved = f"rewards.functions.own={tmp_path}/moved.py:score"
    assert main([*again, "--out", str(tmp_path / "moved"), moved]) == 0


def test_a_repeated_evaluation_has_the_settings_of_its_manifest(tmp_path: Path) -> None:
    """Those of the command come before them; the function of the run comes after that of the manifest."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(OmegaConf.to_yaml(load(["rewards.functions.own=/old.py:score"])))
    function = own_benchmark(tmp_path).partition("=")[2]
    engine = {"dtype": "bfloat16", "tensor_parallel_size": 1, "eager": True, "prompt": "chat", "system": "Be brief"}
    entry = {"file": str(tmp_path / "own.jsonl"), "function": function, "scorer": "x"}
    manifest: Any = {"benchmarks": {"own": entry}, "engine": engine, "rewards": {"math": {"time_budget_s": 7.0}}}
    run = EvaluationOptions(str(tmp_path / "run"), [], tmp_path / "out", expected=manifest)
    cfg = configuration(run, None)
    assert (cfg.data.prompt, cfg.data.system, cfg.rollout.dtype) == ("chat", "Be brief", "bfloat16")
    assert (cfg.rewards.plugins, cfg.rewards.functions) == (manifest["rewards"], {"own": function})
    cfg = configuration(replace(run, overrides=("data.system=Think", "rewards.functions.own=/new.py:score")), None)
    assert (cfg.data.prompt, cfg.data.system, cfg.rewards.functions) == ("chat", "Think", {"own": "/new.py:score"})
    del entry["function"]  # an older version did not record it
    assert configuration(run, None).rewards.functions == {"own": "/old.py:score"}


def test_the_seconds_of_a_reward_function_belong_to_an_evaluation(
    tmp_path: Path, judge: type[Judge], evaluate: Evaluate, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever continues, repeats or judges it again uses those with which it was judged."""
    function, seconds = own_benchmark(tmp_path), "rewards.functions_time_s="
    assert evaluate("out", function, f"{seconds}15", records="own") == 0
    assert evaluate("out", records="own", samples=3) == 0
    again = ["evaluate", "--manifest", str(tmp_path / "out" / "manifest.json"), "--out", str(tmp_path / "repeated")]
    assert main(again) == 0
    assert evaluate("out", f"{seconds}20", records="own") == ConfigError.exit_code
    judged = f"evaluate --judge-again --out {tmp_path / 'out'} {function} {seconds}20"
    assert f"differs in: rewards.functions_time_s (there: 15.0). Fix: `prorl {judged}`" in caplog.text
    assert judge.seconds == [15.0, 15.0, 15.0]
    assert main(judged.split()) == 0
    assert main(judged.split()[:4]) == 0
    assert judge.seconds[3:] == [20.0, 20.0]
    for folder, recorded in (("out", 20.0), ("repeated", 15.0)):
        assert json.loads((tmp_path / folder / "manifest.json").read_text())["functions_time_s"] == recorded


def test_a_changed_plugin_is_another_scorer(
    tmp_path: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate("out") == 0
    scorer = json.loads((tmp_path / "out" / "manifest.json").read_text())["benchmarks"]["mine"]["scorer"]
    assert scorer.startswith("plugin math ")
    monkeypatch.setattr("nemo_prorl.evaluation.manifest.scorer_of", lambda plugin: "plugin math 1")
    assert evaluate("out") == ConfigError.exit_code
    assert "mine: another reward function. Fix: `prorl evaluate --judge-again" in caplog.text
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace(json.dumps(scorer), "null"))  # of a version that recorded no plugin
    assert evaluate("out") == 0


def test_engines_have_the_context_of_the_longest_benchmark_and_at_most_the_model_s(
    tmp_path: Path, judge: type[Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", tied=True, seed=0)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 64}))
    (tmp_path / "mine.jsonl").write_text(json.dumps(RECORDS[0]) + "\n")
    (tmp_path / "short.yaml").write_text("{task: math, prompts: mine.jsonl, sampling: {samples: 2, context: 32}}")
    contexts: list[int] = []
    asked: list[tuple[int, int | None]] = []

    class Source(Drawn):
        async def generate(self, record: Any, sampling: Sampling, seeds: Sequence[int], on_reply: OnReply) -> None:
            asked.append((sampling.context, sampling.max_response))
            await super().generate(record, sampling, seeds, on_reply)

    def local_engines(cfg: Any, model: Any) -> Source:
        contexts.append(cfg.trainer.grpo.context_tokens)
        return Source()

    monkeypatch.setattr("nemo_prorl.evaluation.run.local_engines", local_engines)
    monkeypatch.setattr("nemo_prorl.launcher.prepare.check_node", lambda *_, **__: None)
    benchmarks = f"{tmp_path / 'short.yaml'},{tmp_path / 'mine.jsonl'}"
    command = ["evaluate", str(model), "--benchmarks", benchmarks, "--engines", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert contexts == [64]
    assert sorted(context for context, _ in asked) == [32, 64]
    assert all(response is None or response < context for context, response in asked)
    assert judge.started == [(["math"], 2)]


def test_a_refused_folder_of_another_evaluation_stays_as_it_was(
    tmp_path: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate("out") == 0
    made = write_model(tmp_path / "made", tied=True, seed=0)

    exports: list[Path] = []

    def exported(checkpoint: Path, into: Path) -> Path:
        exports.append(checkpoint)
        return Path(shutil.copytree(made, into / "step-000002"))

    manifests: list[Any] = []

    def noted(*given: Any, **named: Any) -> Any:
        manifests.append(manifest_of(*given, **named))
        return manifests[-1]

    monkeypatch.setattr("nemo_prorl.evaluation.run.manifest_of", noted)
    monkeypatch.setattr("nemo_prorl.evaluation.run.local_engines", lambda *_: Drawn())
    monkeypatch.setattr("nemo_prorl.evaluation.models.exported", exported)
    monkeypatch.setattr("nemo_prorl.launcher.prepare.check_node", lambda *_, **__: None)
    shutil.copytree(made, (checkpoint := tmp_path / "checkpoint") / "hf")
    (checkpoint / "state.json").write_text('{"format": 5, "step": 2, "weights_sha256": "a"}')
    words = f"--benchmarks {tmp_path / 'mine.jsonl'} --out {tmp_path / 'out'} --limit 3".split()
    before = sorted((tmp_path / "out").rglob("*"))
    # The server's model, another step, another seed: told without an export.  Other weights of the same step: after it.
    for step, seed, told, count in (
        (None, 7, "model checkpoint (there: tiny)", 0),
        (4, 7, "model checkpoint (there: run)", 0),
        (2, 8, "seed (there: 7). Give another folder", 0),
        (2, 7, "model checkpoint (there: run). Give another folder", 1),
    ):
        if step is not None:
            about = {"name": "run", "kind": "run", "sha256": "a", "step": step}
            (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifests[0] | {"model": about}))
        caplog.clear()
        assert main(["evaluate", str(checkpoint), *words, "--seed", str(seed)]) == 2
        assert f"has another evaluation, which differs in: {told}" in caplog.text
        assert len(exports) == count
        assert sorted((tmp_path / "out").rglob("*")) == before


@pytest.mark.parametrize(("form", "told"), [("chat", True), ("as_written", True), ("text", False)])
def test_an_end_of_replies_that_is_not_eos_is_told(
    form: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_template(write_complete(tmp_path / "model", QWEN2), CHATML)
    records = [{"prompt": [{"role": "user", "content": "1?"}]}]
    _tell_other_eos(load([f"data.prompt={form}"]), Model({"name": "m"}, folder), records)  # type: ignore[typeddict-item]
    assert ("ends a reply with '<|im_end|>', but the tokenizer's eos" in caplog.text) == told


def test_a_refused_evaluation_neither_exports_nor_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nemo_prorl.launcher.prepare.check_node", lambda *_, **__: None)
    monkeypatch.setattr("nemo_prorl.evaluation.models.exported", None)  # would end with a TypeError
    write_complete(tmp_path / "checkpoint" / "hf", QWEN2 | {"num_attention_heads": 2, "num_key_value_heads": 1})
    checkpoint = tmp_path / "checkpoint"
    change_config(checkpoint / "hf", eos_token_id=5)
    (checkpoint / "state.json").write_text('{"format": 5, "step": 2, "weights_sha256": "a"}')
    (tmp_path / "mine.jsonl").write_text(json.dumps(RECORDS[0] | {"prompt": "one two " * 99}) + "\n")
    words = ["evaluate", str(checkpoint), "--benchmarks", str(tmp_path / "mine.jsonl"), "--context", "64"]
    assert main([*words, "--out", str(tmp_path / "new")]) == 4
    assert "config.json has eos_token_id=5. A run ends a response only at the tokenizer's" in caplog.text
    assert "leaves no room for a response in the context of 64. Fix: --context N" in caplog.text
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    assert main([*words, "--out", str(tmp_path / "mine")]) == 4
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".lock"]


@pytest.mark.parametrize(("dtype", "told_before"), [("float32", True), ("bfloat16", False)])
def test_other_weights_in_float32_are_told_without_an_export(dtype: str, told_before: bool, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    checkpoint = run / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    out.mkdir()
    (checkpoint / "state.json").write_text('{"format": 5, "step": 2, "weights_sha256": "a"}')
    write_model(run / "init", tied=True, seed=0)
    (run / "config.yaml").write_text(OmegaConf.to_yaml(load([f"rollout.dtype={dtype}"])))
    for sha256, known in (("a", True), ("b", not told_before)):
        about = {"name": "other", "kind": "run", "step": 2, "sha256": "c", "weights_sha256": sha256}
        (out / "manifest.json").write_text(json.dumps({"model": about}))
        assert (draft(checkpoint, out, "newest").about["sha256"] == "c") == known


def test_a_model_that_the_engines_cannot_compute_is_refused(tmp_path: Path) -> None:
    folder = paper_model.write(tmp_path / "model", num_attention_heads=64)
    options = EvaluationOptions(model=str(folder), benchmarks=[], out=tmp_path / "out")
    with pytest.raises(ConfigError, match="model.hidden_size=1536: expected attention heads of 32, 48"):
        configuration(options, folder)


def test_an_evaluation_knows_the_reward_functions_of_its_run(tmp_path: Path) -> None:
    """Those of the command come before them; another model has none."""
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    words = ["rewards.functions.share=/r.py:share", "rewards.functions.other=/r.py:other"]
    saved = load([*words, "rewards.functions_time_s=60"])
    (run / "config.yaml").write_text(OmegaConf.to_yaml(saved))
    for model, overrides, known, seconds in (
        (run, (), {"share": "/r.py:share", "other": "/r.py:other"}, 60),
        (folder, ("rewards.functions.share=/mine.py:share",), {"share": "/mine.py:share", "other": "/r.py:other"}, 60),
        (run, ("rewards.functions_time_s=5",), {"share": "/r.py:share", "other": "/r.py:other"}, 5),
        (tmp_path, (), {}, 10),
        ("http://127.0.0.1:1/v1", (), {}, 10),
    ):
        options = EvaluationOptions(model=str(model), benchmarks=[], out=tmp_path / "out", overrides=overrides)
        rewards = configuration(options, None).rewards
        assert (rewards.functions, rewards.functions_time_s) == (known, seconds)
