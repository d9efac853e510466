"""A chat template that opens the thought: a response that never closes it is not an answer, wherever it is judged.

The reward server, its five plugins, the tokenizer and the reward client are real; the engines answer from a script.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_prorl import cli, rank, settings
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.render import PromptRenderer
from nemo_prorl.deadlines import Deadline
from nemo_prorl.evaluation.catalogue import Sampling, catalogue
from nemo_prorl.evaluation.sampling import BenchmarkWork, Work, missing_work
from nemo_prorl.evaluation.sources import LocalEngines, ServedModel
from nemo_prorl.evaluation.store import Store
from nemo_prorl.lifecycle.run_records import write_rollouts
from nemo_prorl.rewards.client import RewardClient
from nemo_prorl.rewards.interface import Verdict
from nemo_prorl.rollout.endpoints import Response
from nemo_prorl.rollout.groups import PromptDraw
from nemo_prorl.rollout.open_responses import OpenResponses
from tests.rewards.conftest import RunningServer, servers

pytestmark = pytest.mark.starts

# As DeepSeek-R1-Distill's since February 2025: earlier thoughts are cut away, and the prompt ends in an open one.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'].split('</think>')[-1] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
F = "`" * 3
SUM = {"dataset": "chain_sum", "entry": {"question": "2 + 3 =", "answer": "5", "metadata": {}}}
DOMAINS: dict[str, tuple[dict[str, Any], str]] = {  # task -> truth, a right answer
    "math": ({"answer": "7"}, "So \\boxed{7}"),
    "stem": ({"answer": "7", "unit": "m"}, "So \\boxed{7\\,\\text{m}}"),
    "code": ({"tests": [{"input": "", "output": "7"}]}, f"{F}python\nprint(7)\n{F}"),
    "puzzles": (SUM, "<answer>5</answer>"),
    "instructions": ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "No comma"),
}
RECORDS: list[dict[str, Any]] = [
    {"id": task, "task": task, "prompt": [{"role": "user", "content": f"{task}: go"}], "truth": truth}
    for task, (truth, _) in DOMAINS.items()
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> PromptRenderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer(["so"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return PromptRenderer(folder, 256)


class Scripted:
    """Engines that answer every prompt twice: with the answer in a thought that is cut off, then behind it."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self.open_responses = OpenResponses(1)
        prompts = {tuple(renderer.prompt_ids(record)): record["task"] for record in RECORDS}
        self.answer_of = {ids: DOMAINS[task][1] for ids, task in prompts.items()}
        self.renderer = renderer

    async def generate(
        self,
        prompt_ids: Sequence[int],
        seeds: Sequence[int],
        sampling: Any,
        deadline: Deadline,
        on_response: Callable[[Response], None] | None = None,
        version: int | None = None,
    ) -> list[Response]:
        answer = self.answer_of[tuple(prompt_ids)]
        found = []
        for index in range(len(seeds)):
            whole = bool(index % 2)
            ids = self.renderer.encode(f"Hm.</think>{answer}" if whole else f"Hm. {answer}")
            ids += [self.renderer.eos_id] if whole else []
            found.append(Response(index, ids, [-1.0] * len(ids), "stop" if whole else "length", version or 0))
            if on_response is not None:
                on_response(found[-1])
        return found

    async def close(self) -> None:
        pass


class InTurn:
    """The prompts of all domains, one after the other."""

    drawn = 0

    def next(self) -> tuple[dict[str, Any], int]:
        record = RECORDS[self.drawn % len(RECORDS)]
        self.drawn += 1
        return record, 0

    def position(self) -> int:
        return self.drawn

    def return_to(self, position: int) -> None:
        self.drawn = position


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with servers(tmp_path_factory.mktemp("server")) as start:
        yield start(",".join(DOMAINS), name="rewards-0")


@pytest.mark.slow
def test_training_validation_and_stored_rollouts(
    renderer: PromptRenderer,
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoints, run = server.endpoint_file.parent, server.endpoint_file.parent.parent
    (endpoints / "engine-0.json").write_text("{}")  # counted only: the scripted engines stand in for it
    shutil.copy(run / "token", endpoints / "token")
    monkeypatch.setattr(rank, "EnginePool", lambda *_: Scripted(renderer))
    sizes = ["prompts_per_step=5", "samples_per_prompt=2", "context_tokens=256", "max_response_tokens=100"]
    cfg = settings.load(["trainer.grpo.updates_per_step=1", *(f"trainer.grpo.{size}" for size in sizes)])
    prompts = InTurn()
    collector = rank.connect(cfg, run, prompts, renderer)  # type: ignore[arg-type]
    try:
        groups = collector.take(1, 0).groups
        held_out = collector.sample(
            [PromptDraw(record, renderer.prompt_ids(record), 0) for record in RECORDS], 2, 1.0, 1.0, step=0
        )
    finally:
        collector.close()
    scores = {group.task: group.scores for group in groups}
    assert scores == {task: [0.0, 1.0] for task in DOMAINS}
    assert {group.task: group.scores for group in held_out} == scores
    assert all("never closed" in group.verdicts[0]["detail"] for group in groups)

    texts = [[renderer.judged_text(group.prompt_ids, r.token_ids) for r in group.responses] for group in groups]
    assert texts[0] == ["<think>\nHm. So \\boxed{7}", "<think>\nHm.</think>So \\boxed{7}"]
    write_rollouts(run, 1, groups, (), collector.renderer.judged_text)
    capsys.readouterr()
    assert cli.main(["reverify", str(run), "--settings", "{}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:4] for row in rows] == [[task, "2", "0", "0"] for task in sorted(DOMAINS)]  # same, reworded, changed


def test_evaluation(renderer: PromptRenderer, server: RunningServer, tmp_path: Path) -> None:
    benchmark = catalogue()["laptop_gcd"].changed({"samples": 2, "context": 256, "max_response": None})
    source = LocalEngines(renderer, [renderer.eos_id], 4, 1, 60.0)
    source._pool = Scripted(renderer)  # type: ignore[assignment]
    store = Store(tmp_path, benchmark.name)

    async def evaluate() -> None:
        async with RewardClient(server.endpoint_file.parent, server.endpoint_file.parent.parent / "token") as rewards:

            async def judge(request: dict[str, Any]) -> Verdict:
                return await rewards.score(request, Deadline(60, "a verdict"))

            await Work(source, judge, 1).run(missing_work([BenchmarkWork(benchmark, store, RECORDS)], source))

    try:
        asyncio.run(evaluate())
    finally:
        store.close()
    assert {key: verdict["score"] for key, verdict in store.verdicts.items()} == {
        (task, sample): float(sample) for task in DOMAINS for sample in (0, 1)
    }
    assert store.lines["math", 0]["response"].startswith("<think>")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("2 + 3 = <think>", "<think>"),
        ("2 + 3 = <think>\n", "<think>\n"),
        ("2 + 3 = <think>\n\n</think>\n\n", ""),  # a template that switches thinking off
        ("Write your thoughts into <think> tags.", ""),
        ("Think.", ""),
        (" \n", ""),
    ],
)
def test_only_a_prompt_that_ends_in_an_open_thought_opens_it(
    renderer: PromptRenderer, prompt: str, opened: str
) -> None:
    prompt_ids = renderer.encode(prompt)
    assert renderer.judged_text(prompt_ids, renderer.encode("so 5")) == opened + "so 5"
    assert renderer.judged_text(prompt_ids, []) == opened


def test_tags_that_a_tokenizer_marks_as_special_stay(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["so"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|tool|>"]})
    tokenizer.save_pretrained(tmp_path)
    renderer = PromptRenderer(tmp_path, 64)
    ids = renderer.encode("<think>hm</think>so <|tool|>5")
    assert renderer.decode([*ids, renderer.eos_id]) == "<think>hm</think>so 5"


def test_a_warm_up_teaches_what_verifiers_accept(renderer: PromptRenderer) -> None:
    opened = renderer.prompt_ids(RECORDS[0])
    assert renderer.decode(renderer.target_ids(opened, "\\boxed{7}")) == "</think>\\boxed{7}"
    assert renderer.decode(renderer.target_ids(renderer.encode("2 + 5 ="), "\\boxed{7}")) == "\\boxed{7}"


# --- an address ------------------------------------------------------------------------------------------------------


def replies(prompt: Any, choice: Mapping[str, Any], **options: bool) -> str:
    """The text that is judged, of a server's answer to a prompt."""
    endpoint = ServedModel("http://x/v1", "tiny", None, 1, 1.0, **options)

    async def post(path: str, body: Mapping[str, Any], deadline: Deadline, read: Callable[[Any], Any]) -> Any:
        return read({"choices": [choice]})

    endpoint._server.post = post  # type: ignore[method-assign]
    texts: list[str] = []
    record = {"id": "a", "prompt": prompt}
    asyncio.run(endpoint.generate(record, Sampling(max_response=8), [1], lambda _, reply: texts.append(reply.text)))
    return texts[0]


def chat(content: str | None, reason: str = "stop", **message: str) -> dict[str, Any]:
    return {"message": {"content": content, **message}, "finish_reason": reason}


def test_an_address_whose_prompt_opens_the_thought(caplog: pytest.LogCaptureFixture) -> None:
    said = {"text": "hm 7", "finish_reason": "length"}
    assert replies("2 + 5 = <think>\n", said) == "<think>\nhm 7"
    assert replies("2 + 5 =", said) == "hm 7"
    messages = RECORDS[0]["prompt"]
    assert replies(messages, chat("hm 7", "length"), opens_thought=True) == "<think>hm 7"
    assert replies(messages, chat("<think>hm</think>7"), opens_thought=True) == "<think>hm</think>7"
    assert "--opens-thought" not in caplog.text
    assert replies(messages, chat("hm</think>7")) == "hm</think>7"
    assert "--opens-thought" in caplog.text
    assert replies(messages, chat("7", reasoning_content="hm")) == "<think>hm</think>7"
    assert replies(messages, chat(None, "length", reasoning_content="hm")) == "<think>hm"


def test_what_was_said_of_an_address_is_in_its_manifest() -> None:
    from nemo_prorl.evaluation.models import on_server

    opens, plain = (on_server("http://x/v1", "tiny", opens) for opens in (True, False))
    assert json.loads(json.dumps(opens.about))["opens_thought"] is True
    assert "opens_thought" not in plain.about
    assert opens.about["sha256"] != plain.about["sha256"]
