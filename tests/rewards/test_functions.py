"""Reward functions in a file of the user's."""

import asyncio
import json
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy  # noqa: F401 - in the values
import pytest
import torch  # noqa: F401

from nemo_prorl import cli, settings
from nemo_prorl.config import Config, RewardsConfig
from nemo_prorl.errors import ConfigError
from nemo_prorl.lifecycle.checkpoints import Checkpoints
from nemo_prorl.lifecycle.run_records import code_sha256
from nemo_prorl.planning.overview import run_rows
from nemo_prorl.rewards.discovery import discover, make_plugin
from nemo_prorl.rewards.functions import identity, is_function, places, settings_of, with_absolute_paths
from nemo_prorl.rewards.interface import RewardPlugin, RewardRequest, Verdict, judge
from nemo_prorl.rewards.judging import RewardService, pool_specs
from tests.lifecycle.parts import leader
from tests.lines import write_lines
from tests.whole_runs import Job, metrics_of

pytestmark = pytest.mark.starts

SCORE = """
from neighbour import ANSWER

def broken():
    return 1 / 0

def score(prompt, response, truth):
    if response == "break":
        return broken()
    return 1.0 if response.strip() == truth[ANSWER] else 0.25
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "units.py").write_text(SCORE)
    (tmp_path / "neighbour.py").write_text("ANSWER = 'answer'\n")
    return f"{tmp_path / 'units.py'}:score"


def request(response: str) -> RewardRequest:
    return RewardRequest("a", "units", "1 m in cm?", {"answer": "100"}, response)


@pytest.mark.parametrize(
    ("response", "score", "correct"),
    [("<think>hm</think> 100 ", 1.0, True), ("10", 0.25, False), ("<think>100", 0.0, False)],
)
def test_a_function_is_a_plugin(place: str, response: str, score: float, correct: bool) -> None:
    registry = discover((), {"units": place})
    assert registry.tasks() == {"units": f"units={place}"}
    verdict = judge(make_plugin(registry.plugin_of_task("units")), request(response))
    assert (verdict["score"], verdict["correct"], verdict["failure"]) == (score, correct, None)


def test_the_file_of_each_of_several_functions_is_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    both = with_absolute_paths("~/a.py:score*0.9 + b.py:score*0.1")
    assert both == f"/home/ann/a.py:score*0.9 + {Path.cwd()}/b.py:score*0.1"


def test_an_exception_is_located_in_the_users_file(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback begins there, too."""
    verdict = judge(make_plugin(discover((), {"units": place}).plugin_of_task("units")), request("break"))
    assert verdict["failure"] == "infrastructure"
    assert verdict["detail"].startswith(f"your reward function 'units={place}' raised ZeroDivisionError")
    assert f"raised ZeroDivisionError ({place.split(':')[0]}:5): division by zero" in verdict["detail"]
    [record] = caplog.records
    assert record.exc_info is not None
    assert [frame.name for frame in traceback.extract_tb(record.exc_info[2])] == ["score", "broken"]


def test_an_exit_is_named_with_its_code_and_place_and_ends_no_worker(tmp_path: Path) -> None:
    detail = judge(returning("__import__('sys').exit(3)", tmp_path), request("100"))["detail"]
    assert detail.endswith(f"raised SystemExit ({tmp_path / 'own.py'}:3): 3")


WRONG = ["None", "1.5", "-0.1", "'good'", "'1.0'", "b'1'", "float('nan')", "[1.0]", "{'score': 1.0}"]
WRONG += ["numpy.float64(2)", "numpy.ones(2)", "torch.ones(2)", "torch.tensor(float('nan'))"]


@pytest.mark.parametrize("value", WRONG)
def test_a_value_that_is_no_score_is_located_in_the_users_file(
    value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The function raised nothing, so nothing says that it did."""
    plugin = returning(value, tmp_path)
    verdict = judge(plugin, request("100"))
    assert verdict["failure"] == "infrastructure"
    name, place = f"your reward function 'units={tmp_path / 'own.py'}:score'", f"{tmp_path / 'own.py'}:2"
    got = f"{eval(value)!r} ({type(eval(value)).__name__})"
    assert verdict["detail"] == f"{name}: score returned {got}: expected a number from 0 to 1 ({place})"
    assert judge(plugin, request("99")) == verdict
    [record] = caplog.records
    assert record.getMessage() == f"{verdict['detail']}; shown only once for this place"
    assert record.exc_info is None


def test_long_text_does_not_hide_what_is_expected(tmp_path: Path) -> None:
    detail = judge(returning("'1.0 because ' * 99", tmp_path), request("100"))["detail"]
    assert f"(str): expected a number from 0 to 1 ({tmp_path / 'own.py'}:2)" in detail


RIGHT = ["True", "1", "numpy.bool_(True)", "numpy.float32(1)", "numpy.int64(1)", "torch.tensor(1.0)", "torch.ones(1)"]


@pytest.mark.parametrize("value", RIGHT)
def test_a_scalar_of_any_kind_is_a_score(value: str, tmp_path: Path) -> None:
    verdict = judge(returning(value, tmp_path), request("100"))
    assert (verdict["score"], verdict["correct"], verdict["failure"]) == (1.0, True, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("judge", "import functools\ndef judge(a, b, c, x): return x\nscore = functools.partial(judge, x=VALUE)"),
        ("Score", "class Score:\n    def __call__(self, a, b, c): return VALUE\nscore = Score()"),
    ],
)
def test_a_partial_and_an_object_are_functions(name: str, text: str, tmp_path: Path) -> None:
    for value, score in (("1", 1.0), ("'1'", None)):
        (tmp_path / "own.py").write_text(text.replace("VALUE", value))
        place = f"{tmp_path}/own.py:score"
        for named in (place, f"{place} + {place}*0.5"):
            plugin = make_plugin(discover((), {"units": named}).plugin_of_task("units"))
            verdict = judge(plugin, request("100"))
            assert verdict["score"] == score
            assert name in (verdict["detail"] if score is None else {name, *verdict["parts"]})
            assert set(verdict["parts"]) in (set(), {name, f"{name}_2"})


def returning(value: str, folder: Path) -> RewardPlugin:
    """Return the plugin of a function that returns a value for each response; it begins in line 2."""
    text = f"import numpy, torch\ndef score(prompt, response, truth):\n    return {value}\n"
    (folder / "own.py").write_text(text)
    return make_plugin(discover((), {"units": f"{folder / 'own.py'}:score"}).plugin_of_task("units"))


def test_a_worker_judges_by_it(place: str) -> None:
    async def judged() -> Verdict:
        registry = discover((), {"units": place})
        service = RewardService(pool_specs(registry, ["units"], 1), registry)
        await service.start()
        try:
            return await service.judge(request("100"))
        finally:
            await service.close()

    verdict = asyncio.run(judged())
    assert (verdict["score"], verdict["failure"]) == (1.0, None)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("def score(prompt, response): ...", "f.py:score", "expected a function of .prompt, response, truth."),
        ("async def score(a, b, c): ...", "f.py:score", "`async def score` returns no number. Fix: def score"),
        (
            "class Score:\n    async def __call__(self, a, b, c): ...\nscore = Score()",
            "f.py:score",
            "`async def score` returns no number",
        ),
        ("def score(completions, **kwargs): ...", "f.py:score", "Fix: docs/.*md#a-reward-function-of-trl$"),
        ("def score(prompts, completions, answer): ...", "f.py:score", "Fix: docs/.*md#a-reward-function-of-trl$"),
        ("score = 3", "f.py:score", "has no function score; expected one of: none is there"),
        ("def score(a, b, c): ...", "f.py:scor", "has no function scor. Did you mean score.$"),
        ("def right(a, b, c): ...\ndef _own(): ...", "f.py:own", "has no function own; expected one of: right$"),
        ("import nothing_of_that_name", "f.py:score", "cannot be imported: ModuleNotFoundError"),
        ("", "g.py:score", "there is no file"),
        ("", "f.py", "expected FILE.py:FUNCTION"),
    ],
)
def test_what_is_no_function_is_refused(text: str, place: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(ConfigError, match=f"rewards.functions.*{says}"):
        discover((), {"units": str(tmp_path / place)})


def test_a_changed_file_is_known_by_its_hash(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def right(prompt, response, truth):\n    return 1.0\n")
    functions = {"units": f"{tmp_path}/f.py:right*2 + {tmp_path}/g.py:none", "other": f"{tmp_path}/f.py:right"}
    assert places(functions) == [f"{tmp_path}/{name}" for name in ("f.py:right", "g.py:none", "f.py:right")]
    before = identity(functions["other"])
    assert before.endswith(":right")
    (tmp_path / "f.py").write_text("def right(prompt, response, truth):\n    return 0.0\n")
    assert identity(functions["other"]) != before


def test_several_functions_have_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.py").write_text(
        "def right(prompt, response, truth):\n    return response == 'yes'\n\n\n"
        "def short(prompt, response, truth):\n    return 2.0 if response == 'two' else len(response) < 5\n"
    )
    monkeypatch.chdir(tmp_path)
    place = settings.load(["rewards.functions.units=f.py:right*3 + f.py:short"]).rewards.functions.units
    assert place == f"{tmp_path}/f.py:right*3 + {tmp_path}/f.py:short"
    plugin = make_plugin(discover((), {"units": place}).plugin_of_task("units"))
    for response, score, correct in (("yes", 1.0, True), ("no", 0.25, False), ("not at all", 0.0, False)):
        verdict = judge(plugin, request(response))
        assert (verdict["score"], verdict["correct"]) == (score, correct)
    assert judge(plugin, request("no"))["parts"] == {"right": 0.0, "short": 1.0}
    assert "short returned 2.0 (float): expected a number from 0 to 1" in judge(plugin, request("two"))["detail"]
    (tmp_path / "g.py").write_text(
        "def right(prompt, response, truth):\n    return 2.0 if response == 'yes' else 1.0\n"
    )
    same = make_plugin(
        discover((), {"units": f"{tmp_path}/g.py:right + {tmp_path}/f.py:right"}).plugin_of_task("units")
    )
    assert judge(same, request("no"))["parts"] == {"right": 1.0, "right_2": 0.0}
    assert "right returned 2.0 (float): expected a number from 0 to 1" in judge(same, request("yes"))["detail"]
    with pytest.raises(ConfigError, match="expected a weight above 0"):
        discover((), {"units": f"{tmp_path}/f.py:right*0"})
    with pytest.raises(ConfigError, match="expected a number as weight"):
        discover((), {"units": f"{tmp_path}/f.py:right*1.2.3"})


def test_a_task_has_one_judge(place: str) -> None:
    with pytest.raises(ConfigError, match=r"rewards.functions.math=.*task 'math' is judged by plugin 'math'"):
        discover(functions={"math": place})


def test_the_path_of_an_override_counts_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = settings.load(["rewards.functions.units=units.py:score"])
    assert cfg.rewards.functions.units == f"{tmp_path}/units.py:score"
    assert run_rows(cfg)["reward functions"] == f"units by {tmp_path}/units.py:score"
    assert is_function(f"units={cfg.rewards.functions.units}")


def test_the_page_wraps_a_function_of_trl(root: Path, tmp_path: Path) -> None:
    page = (root / "docs" / "howto" / "reward_function.md").read_text()
    [code] = [block.split("```")[0] for block in page.split("```python\n") if block.startswith("# wrapped.py")]
    (tmp_path / "wrapped.py").write_text(code)
    (tmp_path / "my_rewards.py").write_text(
        "def accuracy(prompts, completions, answer, **kwargs):\n"
        "    return [float(text == right) for text, right in zip(completions, answer, strict=True)]\n"
    )
    plugin = make_plugin(discover((), {"units": f"{tmp_path}/wrapped.py:score"}).plugin_of_task("units"))
    assert [judge(plugin, request(text))["score"] for text in ("100", "10")] == [1.0, 0.0]


class Judge(BaseHTTPRequestHandler):
    """Answers after 1.5 s with the share of the truth's length that a response has."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(1.5)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(asked["response"]) / len(asked["truth"]["answer"])}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("seconds", "score"), [(30.0, 2 / 3), (0.05, None)])
def test_the_function_of_the_page_asks_a_server_and_may_wait_four_times_its_time(
    seconds: float, score: float | None, root: Path, tmp_path: Path
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = (root / "docs" / "howto" / "reward_server.md").read_text()
    [code] = [block.split("```")[0] for block in page.split("```python\n") if block.startswith("# judge.py")]
    (tmp_path / "judge.py").write_text(code.replace("judge:8000", f"127.0.0.1:{server.server_port}"))
    functions = {"units": f"{tmp_path}/judge.py:score"}

    async def judged() -> Verdict:
        registry = discover((), functions)
        settings = settings_of({"plugins": {}, "functions": functions, "functions_time_s": seconds})
        service = RewardService(pool_specs(registry, ["units"], 1, settings), registry)
        await service.start()
        try:
            return await service.judge(request("10"))
        finally:
            await service.close()

    verdict = asyncio.run(judged())
    server.shutdown()
    server.server_close()
    assert verdict["score"] == (None if score is None else pytest.approx(score))
    assert verdict["failure"] == (None if score is not None else "infrastructure")
    fix = "raise rewards.functions_time_s (docs/howto/reward_server.md)"
    assert verdict["detail"].endswith(fix) == (score is None)


def test_the_command_scores_by_it(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps(request(text).to_json()) for text in ("100", "break")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = ["rewards", "score", "--in", str(tmp_path / "in.jsonl")]
    assert cli.main([*words, f"rewards.functions.units={place}"]) == 0
    right, broken = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (right["score"], right["correct"]) == (1.0, True)
    assert "your reward function 'units=" in broken["detail"]
    assert cli.main([*words, "rewards.workers=2"]) == 2
    assert "rewards.workers=2: expected rewards.functions.TASK=FILE.py:FUNCTION" in caplog.text


@pytest.mark.slow
@pytest.mark.nemo
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_run_trains_on_it(root: Path, tmp_path: Path) -> None:
    """The share of even letters: the laptop's random model gets different rewards in nearly every group."""
    text = "def score(prompt, response, truth):\n    return sum(ord(c) % 2 for c in response) / max(1, len(response))\n"
    (tmp_path / "letters.py").write_text(text)
    records = [{"id": str(n), "task": "letters", "prompt": f"Say {n}.", "truth": {}} for n in range(64)]
    write_lines(tmp_path / "letters.jsonl", records)
    job = Job(
        root,
        tmp_path / "run",
        f"rewards.functions.letters={tmp_path / 'letters.py'}:score",
        f"data.train=[{{name: letters, path: {tmp_path / 'letters.jsonl'}}}]",
        "data.validation=[]",
        "trainer.warmup.steps=0",
        "trainer.grpo.max_steps=2",
        "trainer.trace_steps=[]",
        "trainer.resets.at_steps=[]",
    )
    assert job.wait() == 0, job.text()
    for metrics in metrics_of(job.run_dir):
        assert 0 < metrics["reward/letters"] < 1
        assert metrics["policy/grad_norm"] > 0


def test_a_resume_with_another_function_is_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.lifecycle.retention.check_continuable", lambda folder: None)
    monkeypatch.setattr("nemo_prorl.lifecycle.retention.read_file", lambda folder, name, state: b"")
    (tmp_path / "f.py").write_text("import beside_f\ndef right(prompt, response, truth):\n    return 1.0\n")
    (tmp_path / "beside_f.py").write_text("")
    (tmp_path / "loss.py").write_text("def own(logp_BT, old_logp_BT, advantage_BT, mask_BT, config): ...\n")
    (tmp_path / "advantage.py").write_text("import yaml\n")
    cfg = Config(rewards=RewardsConfig(functions={"units": f"{tmp_path}/f.py:right"}))
    cfg.trainer.grpo.loss = f"{tmp_path}/loss.py:own"
    cfg.trainer.grpo.advantage = f"{tmp_path}/advantage.py:own"
    alarms: list[str] = []
    records: Any = SimpleNamespace(event=lambda *_, **__: None, alarm=lambda step, what: alarms.append(what))
    progress: Any = SimpleNamespace(state_dict=lambda: {"unfinished": None}, load_state_dict=lambda state: None)
    saved: dict[str, Any] = {"step": 3, "code": code_sha256(), "trainer": {}, "rollouts": {}}
    policy: Any = SimpleNamespace(load=lambda folder: saved)
    resets: Any = SimpleNamespace(done=[], trial=None)

    def started() -> Checkpoints:
        return Checkpoints(cfg, tmp_path, policy, {"trainer": progress}, resets, resets, records, leader())

    def resume() -> None:
        alarms.clear()
        started().resume(tmp_path)

    saved["functions"] = started().functions
    resume()
    assert alarms == []
    (tmp_path / "f.py").write_text("def right(prompt, response, truth):\n    return 0.0\n")
    resume()
    told = "was changed after the checkpoint: later steps follow another rule"
    assert alarms == [f"{tmp_path}/f.py {told}"]
    (tmp_path / "f.py").write_text("import beside_f\ndef right(prompt, response, truth):\n    return 1.0\n")
    (tmp_path / "beside_f.py").write_text("# another\n")
    resume()
    assert alarms == [f"{tmp_path}/beside_f.py {told}"]
    for name in ("loss.py", "advantage.py"):
        (tmp_path / name).write_text("import yaml\n# another\n")
    saved["functions"]["PyYAML"] = "0.1"
    resume()
    assert alarms == [
        f"{name} {told}"
        for name in (f"{tmp_path}/beside_f.py", f"{tmp_path}/loss.py", f"{tmp_path}/advantage.py", "PyYAML")
    ]
