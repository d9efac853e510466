"""The timeline of a step: spans, clocks and tracks; and what a step's bottleneck is called."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nemo_prorl.lifecycle.bottleneck import bottleneck
from nemo_prorl.lifecycle.step_traces import StepTraces
from nemo_prorl.rollout.open_responses import OpenResponses
from nemo_prorl.tracing import RECORDER, Recorder, answer, lanes, timeline
from tests.test_formats import against

READY = {"pid": 1, "state": "ready"}


def part(process: str, *spans: tuple[str, float, float], pid: int = 1, **changed: Any) -> dict[str, Any]:
    found = [{"name": n, "cat": "phase", "begin": b, "end": e, "args": {}} for n, b, e in spans]
    whole = {"process": process, "pid": pid, "host": "here", "boot": "a", "clock": 100.0, "wall": 1000.0, "dropped": 0}
    return {**whole, "spans": found, **changed}


def spans_of(trace: Any) -> dict[str, tuple[float, float]]:
    return {e["name"]: (e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}


def test_nothing_is_kept_while_nothing_is_traced() -> None:
    recorder = Recorder()
    with recorder.span("a", "phase"):
        pass
    recorder.start("one")
    with pytest.raises(KeyError), recorder.span("b", "phase", n=1):
        raise KeyError
    recorder.add("c", "phase", 5.0, 4.0)  # a clock that went back is no negative duration
    told = recorder.stop()
    assert [(s["name"], s["args"]) for s in told["spans"]] == [("b", {"n": 1}), ("c", {})]
    assert told["spans"][1]["end"] == 5.0
    recorder.start("again")
    assert recorder.stop()["spans"] == []


def test_what_overlaps_stands_in_lanes_of_its_own() -> None:
    assert lanes([(0, 4), (1, 2), (2, 3), (2.5, 9), (4, 5)]) == [0, 1, 1, 2, 0]


def test_a_timeline_has_one_clock() -> None:
    """Of another boot: its wall clock is 2 s ahead, its monotonic clock began elsewhere; the same moment is 105."""
    other = part("engine-0", ("r", 7.0, 8.0), pid=1, host="far", boot="b", clock=2.0, wall=1002.0, wall_offset=2.0)
    trace = timeline(5, (104.0, 106.5), [part("trainer-0", ("updates", 104.5, 105.0), ("before", 1.0, 2.0)), other], {})
    assert not against("trace", trace)
    assert spans_of(trace) == {"updates": (500_000.0, 500_000.0), "r": (1_000_000.0, 1_000_000.0)}
    assert trace["otherData"]["clock_offset_s"] == {"far": 2.0}
    assert trace["otherData"]["processes"] == ["engine-0", "trainer-0"]
    assert len({e["pid"] for e in trace["traceEvents"]}) == 2  # the same process number on two machines


def test_a_service_says_what_a_wrong_request_should_be() -> None:
    wrong: list[Any] = [None, {}, {"record": 1}, []]
    for body in wrong:
        with pytest.raises(ValueError, match='"record": true'):
            answer(body, "engine-0")


def test_what_is_missing_is_named_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_prorl.lifecycle.step_traces._END_S", 1.0)
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "token").write_text("t" * 16)
    (tmp_path / "endpoints" / "token").chmod(0o600)
    traces = StepTraces(tmp_path, [2], rank=0, ranks=2, services={"engine": 1})
    for step in (1, 2):
        with traces.step(step):
            time.sleep(0.01)
    traces.close()
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "step-2.json"
    told = json.loads(path.read_text())
    assert not against("trace", told)
    assert set(told["otherData"]["missing"]) == {"engine-0", "trainer-1"}
    assert "step 2" in spans_of(told)


class Service(BaseHTTPRequestHandler):
    """A service whose wall clock is 100 s ahead: it records a span, and refuses whoever does not know the token."""

    asked: ClassVar[list[bool]] = []

    def do_POST(self) -> None:
        record = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["record"]
        good = (self.path, self.headers["Authorization"]) == ("/trace", "Bearer " + "t" * 16)
        self.asked.append(record)
        time.sleep(0.0 if record else 0.2)
        clock: dict[str, Any] = {"clock": time.monotonic(), "wall": time.time() + 100.0, "boot": "far", "host": "far"}
        told = part("engine-0", ("generate", clock["clock"] - 5.0, clock["clock"]), **clock)
        self.send_response(200 if good else 403)
        self.end_headers()
        self.wfile.write(json.dumps({"process": "engine-0"} if record else told).encode())

    def log_message(self, *_: Any) -> None: ...


def test_a_step_s_trace_has_the_spans_of_services_and_of_all_ranks(tmp_path: Path) -> None:
    """Also of a step that fails: its rank 0 waits for the trace."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "token").write_text("t" * 16 + "\n")
    (tmp_path / "endpoints" / "token").chmod(0o600)
    url = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "endpoints" / "engine-0.json").write_text(json.dumps({**READY, "url": url, "kind": "engine"}))
    (tmp_path / "endpoints" / "rewards-0.json").write_text(json.dumps({**READY, "url": url, "kind": "rewards"}))
    services = {"engine": 1, "rewards": 1}
    Service.asked.clear()
    left = tmp_path / "traces" / "step-2.parts"
    left.mkdir(parents=True)
    (left / "trainer-1.json").write_text("left by a killed start")
    first, second = (StepTraces(tmp_path, [2], rank, 2, services) for rank in (0, 1))
    with pytest.raises(KeyError), first.step(2):
        with second.step(2), RECORDER.span("updates", "phase"):
            time.sleep(0.01)
        mine = json.loads((left / "trainer-1.json").read_text())
        (left / "trainer-1.json").unlink()
        late = threading.Timer(0.5, (left / "trainer-1.json").write_text, [json.dumps({**mine, "pid": 1})])
        late.start()  # rank 0 waits for it
        RECORDER.start("trainer-0")  # both ranks are in this process, which has one recorder
        with RECORDER.span("rollout", "phase"):
            raise KeyError
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step-2.json"]
    server.shutdown()
    server.server_close()
    told = json.loads((tmp_path / "traces" / "step-2.json").read_text())
    assert not against("trace", told)
    assert told["otherData"]["processes"] == ["engine-0", "trainer-0", "trainer-1"]
    assert list(told["otherData"]["missing"]) == ["rewards-0"]
    assert told["otherData"]["missing"]["rewards-0"].startswith("ConnectionError: HTTP 403: ")
    assert told["otherData"]["clock_offset_s"]["far"] == pytest.approx(100.0, abs=5.0)
    assert {"updates", "rollout", "generate"} < spans_of(told).keys()
    assert Service.asked == [True, True, False, False]


def test_the_trace_of_a_step_is_written_before_the_next_one_is_recorded(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "token").write_text("t" * 16 + "\n")
    (tmp_path / "endpoints" / "token").chmod(0o600)
    url = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "endpoints" / "engine-0.json").write_text(json.dumps({**READY, "url": url, "kind": "engine"}))
    traces = StepTraces(tmp_path, [1, 2], rank=0, ranks=1, services={"engine": 1})
    with traces.step(1):
        pass
    with traces.step(2):
        assert (tmp_path / "traces" / "step-1.json").exists()
    traces.close()
    server.shutdown()
    server.server_close()
    assert (tmp_path / "traces" / "step-2.json").exists()


def test_the_tail_of_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines with 50 responses each for 6 s; the last 2 of 100 take 4 s more, on one of them."""
    now = [0.0]
    monkeypatch.setattr("nemo_prorl.rollout.open_responses.time.monotonic", lambda: now[0])
    load = OpenResponses(2)
    load.begin()
    for engine in ("engine-0", "engine-1"):
        load.changed(engine, 50)
    now[0] = 6.0
    for _ in range(50):
        load.changed("engine-1", -1)
    for _ in range(48):
        load.changed("engine-0", -1)
    now[0] = 10.0
    load.changed("engine-0", -2)
    now[0] = 11.0  # verdicts
    told = load.end()
    assert (told["responses"], told["tail_s"], told["tail_responses"]) == (100.0, 4.0, 5.0)
    assert told["idle_s"] == pytest.approx(4 * 0.98 + 1)
    assert told["lost_s"] == 0.0


def test_a_single_response_has_no_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("nemo_prorl.rollout.open_responses.time.monotonic", lambda: now[0])
    load = OpenResponses(2)
    load.begin()
    for seconds, by in ((1.0, 1), (5.0, -1)):
        now[0] = seconds
        load.changed("engine-1", by)
    now[0] = 6.0
    wanted = {"responses": 1.0, "tail_s": 0.0, "tail_responses": 0.0, "idle_s": 1 + 4 / 2 + 1, "lost_s": 0.0}
    assert load.end() == wanted


def test_the_time_without_an_engine_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four is gone for 5 s of this rollout, and told twice; another fails and is gone at its end."""
    now = [0.0]
    monkeypatch.setattr("nemo_prorl.rollout.open_responses.time.monotonic", lambda: now[0])
    load = OpenResponses(4)
    load.lost("engine-2")
    now[0] = 10.0
    load.begin()
    for seconds, event in ((2, load.lost), (3, load.answered), (1, load.answered)):
        now[0] += seconds
        event("engine-2")
    now[0] += 4
    load.lost("engine-3")
    now[0] += 2
    assert load.end()["lost_s"] == pytest.approx((5 + 2) / 4)
    load.begin()
    now[0] += 1
    assert load.end()["lost_s"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "engines busy 90 %: generation sets the pace"),
        ({"time/updates": 11.0}, "engines idle 55 %: the trainer makes its updates (55 % of the step)"),
        (
            {"time/rollout/idle_s": 3.0, "time/rollout/tail_s": 3.5},
            "engines idle 40 %: waiting for the last 3 of 768 responses (35 % of the step)",
        ),
        ({"time/rollout/idle_s": 3.0, "time/rollout/reward_wait_s": 2.5}, "waiting for rewards (25 % of the step)"),
        (
            {"time/rollout/idle_s": 8.0, "time/rollout/lost_s": 7.0},
            "waiting for engines that failed (70 % of the step)",
        ),
        ({"time/rollout/idle_s": None}, None),
        (
            {"time/rollout": 0.0, "time/updates": 10.0, "time/ahead": 0.0, "time/ahead/engines_wait_s": 6.0},
            "engines idle 60 %: the trainer makes its updates (60 % of the step)",
        ),
        (
            {
                **{"time/rollout": 0.0, "time/updates": 8.0, "time/logprobs": 2.0},
                **{"time/ahead": 0.0, "time/ahead/engines_wait_s": 2.0},
                **{"time/rollout/idle_s": 3.0, "time/rollout/tail_s": 3.0},
            },
            "engines idle 50 %: waiting for the last 3 of 768 responses (30 % of the step)",
        ),
        (  # verdicts that the updates hide
            {
                **{"time/rollout": 0.0, "time/updates": 10.0, "time/ahead": 0.0, "time/ahead/engines_wait_s": 1.0},
                **{"time/rollout/idle_s": 5.0, "time/rollout/tail_s": 1.5},
            },
            "engines idle 60 %: the trainer makes its updates (45 % of the step)",
        ),
        ({"time/rollout": 0.0, "time/ahead": 0.0}, "engines busy 100 %: generation sets the pace"),
    ],
)
def test_the_bottleneck_as_text(changed: dict[str, Any], said: str | None) -> None:
    usual = {"time/rollout": 9.0, "time/updates": 1.0, "time/rollout/idle_s": 0.0, "time/rollout/tail_s": 0.0}
    usual |= {"time/rollout/tail_responses": 3.0, "time/rollout/responses": 768.0}
    m = usual | changed
    seconds = m["time/rollout"] + m["time/updates"] + m.get("time/logprobs", 0.0) + 5.0
    told = bottleneck([m | {"time/step": seconds, "time/validate": 5.0}])
    assert told is None if said is None else told is not None and told.endswith(said)
