"""What is drawn, what is not drawn again, and how failures of the infrastructure end."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl.errors import ConfigError, DataError, DeadlineExceeded, EngineRefused
from nemo_prorl.evaluation.catalogue import Benchmark, Sampling, catalogue
from nemo_prorl.evaluation.sampling import BenchmarkWork, Work, missing_work, seed_of
from nemo_prorl.evaluation.sources import OnReply, Reply, ServedModel
from nemo_prorl.evaluation.store import Store
from nemo_prorl.rewards.interface import Verdict, failed_verdict
from tests.evaluation.openai_server import Answers, serve

GCD = catalogue()["laptop_gcd"].changed({"samples": 4})
RECORDS: list[dict[str, Any]] = [  # as the benchmark makes them, without the second that reasoning-gym takes to import
    {
        "id": f"laptop_gcd-{number}",
        "source": "laptop_gcd",
        "meta": {},
        "task": "puzzles",
        "prompt": f"Find the Greatest Common Divisor (GCD) of these numbers: {4 + number}, 24.",
        "truth": {"dataset": "gcd", "entry": {"answer": str(math.gcd(4 + number, 24))}},
    }
    for number in range(6)
]


class Drawn:
    """A source whose responses follow from the seed; breaks off after so many."""

    def __init__(self, most: int = 10**9) -> None:
        self.max_concurrent, self.most = 8, most
        self.seeds: list[int] = []

    def check(self, record: Mapping[str, Any], sampling: Sampling) -> int | None:
        return None

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        for index, seed in enumerate(seeds):
            await asyncio.sleep(0)
            if len(self.seeds) == self.most:
                raise ConnectionError("the engine is gone")
            self.seeds.append(seed)
            on_reply(index, Reply(f"answer {seed % 3}", True, 2))

    async def close(self) -> None:
        pass


class Judged:
    """Verdicts by the response; `broken` ones are the infrastructure's."""

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.requests = broken, list[dict[str, Any]]()

    async def __call__(self, request: dict[str, Any]) -> Verdict:
        self.requests.append(request)
        number = len(self.requests)
        await asyncio.sleep(0)
        if number <= self.broken:
            return failed_verdict(request["id"], "infrastructure", "the server is gone")
        right = request["response"] == "answer 1"
        return {
            "id": request["id"],
            "score": float(right),
            "correct": right,
            "parts": {},
            "detail": "",
            "failure": None,
        }


def evaluate(folder: Path, source: Any, judge: Judged, benchmark: Benchmark = GCD, seed: int = 1) -> tuple[Store, Work]:
    store = Store(folder, benchmark.name)
    work = Work(source, judge, seed)
    try:
        asyncio.run(work.run(missing_work([BenchmarkWork(benchmark, store, RECORDS)], source)))
    finally:
        store.close()
    return store, work


def kept(folder: Path) -> dict[str, dict[Any, Any]]:
    store = Store(folder, GCD.name, writable=False)
    return {"lines": store.lines, "verdicts": store.verdicts}


def test_broken_off_and_gone_on_it_is_the_same_and_draws_nothing_twice(tmp_path: Path) -> None:
    whole = Drawn()
    evaluate(tmp_path / "whole", whole, Judged())
    first, second = Drawn(most=9), Drawn()
    with pytest.raises(ConnectionError):
        evaluate(tmp_path / "broken", first, Judged())
    assert len(kept(tmp_path / "broken")["lines"]) == 9
    evaluate(tmp_path / "broken", second, Judged())
    assert not set(first.seeds) & set(second.seeds)
    assert sorted(first.seeds + second.seeds) == sorted(whole.seeds)
    assert len(whole.seeds) == 24
    assert kept(tmp_path / "broken") == kept(tmp_path / "whole")
    third = Drawn()
    judge = Judged()
    evaluate(tmp_path / "broken", third, judge)
    assert third.seeds == []
    assert judge.requests == []


class Slow(Drawn):
    """One response of each prompt ends late, the others at once; counts those under way."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = 0, list[int]()

    async def generate(
        self, record: Mapping[str, Any], sampling: Sampling, seeds: Sequence[int], on_reply: OnReply
    ) -> None:
        self.open += len(seeds)
        self.seen.append(self.open)
        for index, seed in enumerate(seeds):
            await asyncio.sleep(0.5 if index == len(seeds) - 1 else 0)
            self.open -= 1
            self.seeds.append(seed)
            on_reply(index, Reply("answer", True, 2))


def test_the_room_of_a_response_that_ended_is_taken_before_its_prompt_is_done(tmp_path: Path) -> None:
    source = Slow()
    evaluate(tmp_path, source, Judged())
    assert len(source.seeds) == 24
    assert max(source.seen) <= source.max_concurrent
    late = [count for count in source.seen[2:] if count > GCD.sampling.samples]  # beside others' late ones
    assert len(late) >= 3


def test_a_torn_line_is_cut_off_and_drawn_again(tmp_path: Path) -> None:
    evaluate(tmp_path, Drawn(), Judged())
    before = kept(tmp_path)
    file = tmp_path / "samples" / "laptop_gcd.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    source = Drawn()
    evaluate(tmp_path, source, Judged())
    assert len(source.seeds) == 1
    assert kept(tmp_path) == before


def test_a_line_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "laptop_gcd.jsonl").write_text('{"id": "a", "sample": 0}\nnonsense\n')
    with pytest.raises(DataError, match=r"samples/laptop_gcd.jsonl:2: "):
        Store(tmp_path, "laptop_gcd")


def test_more_samples_add_to_those_that_are_there(tmp_path: Path) -> None:
    evaluate(tmp_path, Drawn(), Judged())
    source = Drawn()
    store, _ = evaluate(tmp_path, source, Judged(), GCD.changed({"samples": 6}))
    assert len(source.seeds) == 2 * len(RECORDS)
    assert {sample for _, sample in store.lines} == set(range(6))


def test_what_the_reward_service_fails_to_judge_is_no_zero_and_judged_again(tmp_path: Path) -> None:
    store, _ = evaluate(tmp_path, Drawn(), Judged(broken=3))
    lacking = [key for key, verdict in store.verdicts.items() if verdict["score"] is None]
    assert len(lacking) >= 3
    source, judge = Drawn(), Judged()
    store, _ = evaluate(tmp_path, source, judge)
    assert source.seeds == []
    assert {request["id"] for request in judge.requests} == {key[0] for key in lacking}
    assert all(verdict["score"] is not None for verdict in store.verdicts.values())


def test_seeds_differ_by_prompt_sample_and_run() -> None:
    seeds = {seed_of(run, record, k) for run in (1, 2) for record in RECORDS for k in range(4)}
    assert len(seeds) == 2 * 6 * 4


# --- an address ------------------------------------------------------------------------------------------------------


def ask(answers: Answers, record: dict[str, Any], seeds: Sequence[int] = (0, 1, 2), **more: Any) -> dict[int, Reply]:
    options = {"name": "tiny", "token": None, "seconds": 20.0, **more}

    async def go() -> dict[int, Reply]:
        runner, url = await serve(answers)
        source = ServedModel(url, options["name"], options["token"], 4, options["seconds"])
        found: dict[int, Reply] = {}
        try:
            await source.generate(record, Sampling(max_response=16), seeds, found.__setitem__)
        finally:
            await source.close()
            await runner.cleanup()
        return found

    return asyncio.run(go())


MESSAGES = {**RECORDS[0], "prompt": [{"role": "user", "content": "hi"}]}


def test_an_address_is_asked_in_its_two_forms() -> None:
    answers = Answers()
    found = ask(answers, RECORDS[0])
    assert {i: reply.text for i, reply in found.items()} == {i: f"<answer>{i}</answer>" for i in range(3)}
    assert [found[i].finished for i in range(3)] == [False, True, True]
    assert found[0].tokens == 5
    assert answers.bodies[0]["prompt"] == RECORDS[0]["prompt"]
    wanted = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 16, "n": 1, "model": "tiny"}
    assert wanted.items() <= answers.bodies[0].items()
    assert ask(answers, MESSAGES)[1].text == "<think>hm</think><answer>1</answer>"
    assert answers.bodies[-1]["messages"] == MESSAGES["prompt"]


@pytest.mark.starts
def test_what_passes_is_tried_again() -> None:
    answers = Answers(failures=(503, "cut", 429))
    assert len(ask(answers, RECORDS[0], [7])) == 1
    assert sum(answers.tries.values()) == 4


def test_what_does_not_pass_ends_at_the_deadline_and_is_no_response() -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 1.5 s for http.*HTTP 503: not now"):
        ask(Answers(failures=(503,) * 99), RECORDS[0], [7], seconds=1.5)


def test_a_request_that_is_wrong_is_not_tried_again() -> None:
    answers = Answers(failures=(400,))
    with pytest.raises(EngineRefused, match="HTTP 400: not now"):
        ask(answers, RECORDS[0], [7])
    assert sum(answers.tries.values()) == 1


def test_a_wrong_token_or_name_is_wrong_use() -> None:
    with pytest.raises(ConfigError, match="--token-env"):
        ask(Answers(token="good"), RECORDS[0], [7], token="bad")
    assert len(ask(Answers(token="good"), RECORDS[0], [7], token="good")) == 1
    with pytest.raises(ConfigError, match="no model other"):
        ask(Answers(), RECORDS[0], [7], name="other")


def test_prompts_that_fill_the_context_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Rooms(Drawn):
        def check(self, record: Mapping[str, Any], sampling: Sampling) -> int | None:
            return {"a": 7, "b": 8, "c": 16, "d": None}[record["id"]]

    def told(**sampling: int) -> list[str]:
        caplog.clear()
        benchmark = replace(GCD, sampling=Sampling(samples=1, **sampling))
        records = [{"id": name} for name in "abcd"]
        source: Any = Rooms()
        missing_work([BenchmarkWork(benchmark, Store(Path("nowhere"), "none", writable=False), records)], source)
        return caplog.messages

    [text] = told(context=32)
    assert text.startswith(
        f"{GCD.name}: 2 of 4 prompts leave fewer than 16 tokens to a response, the longest 7, with --c"
    )
    assert "Fix: a larger --context, at most the model's" in text
    assert "1 of 4 prompts leave fewer than 8 tokens" in told(context=32, max_response=8)[0]
    assert told(context=32, max_response=7) == []


def test_a_text_prompt_that_may_fill_the_context_is_refused() -> None:
    source = ServedModel("http://x/v1", "tiny", None, 1, 1.0)
    with pytest.raises(DataError, match=rf"{RECORDS[0]['id']}.*a larger --context N, or --max-response N"):
        source.check(RECORDS[0], Sampling(context=20))
    source.check(MESSAGES, Sampling(context=20))
