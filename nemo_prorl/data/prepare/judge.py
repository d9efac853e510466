"""A language model that reads the answers of two solutions and judges whether they agree, by OpenAI's protocol.

Each judgement is appended to a cache file immediately, under a hash of the whole request.  After a kill, only the
missing ones are requested.  A changed model or prompt changes all hashes, so all judgements are requested again.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, get_args

from nemo_prorl.data.prepare.drafts import Draft
from nemo_prorl.deadlines import Deadline
from nemo_prorl.errors import ConfigError, DataError, DeadlineExceeded

_log = logging.getLogger(__name__)

JudgeVerdict = Literal["agree", "disagree", "unclear", "no answer"]
VERDICTS: tuple[JudgeVerdict, ...] = get_args(JudgeVerdict)
KEY_VARIABLE = "PRORL_JUDGE_KEY"
_JUDGE_PROMPT = """\
Two solutions of one problem of science follow. Read the final answer out of each, as short as it can be written: a \
number with its unit, a formula, a name, the letter of a choice. Use LaTeX for formulas, without dollar signs. If a \
solution has no short final answer (it is a proof, an essay or a drawing, or it is cut off), its answer is NONE.

Then judge whether the two answers mean the same: the same value (other units, notation or rounding are no \
difference), the same formula, the same choice, the same statement. Judge only whether they agree, not whether they \
are right.

Problem:
{problem}

First solution:
{reference}

Second solution:
{candidate}

Reason briefly if you need to. Then end with these three lines:
FIRST: the answer of the first solution, or NONE
SECOND: the answer of the second solution, or NONE
VERDICT: AGREE or DISAGREE"""
_MOST_CHARS = 8000  # of each text: the end, where the answer is.  A longer one may exceed the context of the judge
_LINE = re.compile(r"^[\s*]*(FIRST|SECOND|VERDICT)[\s*]*:[ \t*]*(.*?)[\s*]*$", re.MULTILINE)
_WRAPPED = re.compile(r"\$+([^$]+)\$+\.?|\\\((.*?)\\\)|\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", re.DOTALL)
_LOG_EVERY_S = 30.0


@dataclass(frozen=True)
class JudgeOptions:
    """Settings of the judge.  `url`: base of the API.  `deadline_s`: seconds for one verdict, with retries."""

    url: str
    model: str
    workers: int = 16
    deadline_s: float = 300.0
    max_tokens: int = 2048


@dataclass(frozen=True)
class Judgement:
    """A verdict with the short answers of both solutions, and the tokens that the server counted (0: unknown)."""

    verdict: JudgeVerdict
    first: str = ""
    second: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def judgement_in(text: str) -> Judgement:
    """Return the judgement in the text that follows the judge's thinking; `unclear` if a line is missing."""
    lines = dict(_LINE.findall(text.rpartition("</think>")[2]))  # the last of equal names counts
    first, second = (_unwrapped(lines.get(name, "")) for name in ("FIRST", "SECOND"))
    if not (first and second) or lines.get("VERDICT", "") not in ("AGREE", "DISAGREE"):
        return Judgement("unclear", first, second)
    if "NONE" in (first, second):
        return Judgement("no answer", first, second)
    return Judgement("agree" if lines["VERDICT"] == "AGREE" else "disagree", first, second)


def _unwrapped(answer: str) -> str:
    """Return an answer without the dollar signs or the box around all of it."""
    answer = answer.strip()
    while (match := _WRAPPED.fullmatch(answer)) is not None and (inner := next(filter(None, match.groups()), "")):
        answer = inner.strip()
    return answer


class Cache:
    """A file of judgements by key, one JSON object per line.  Opening it removes a last line cut off by a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.judgements: dict[str, Judgement] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> "Cache":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            try:
                entry = json.loads(line)
                key, verdict = entry["key"], entry["verdict"]
                kept = {name: entry[name] for name in _KEPT if name in entry}
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{self.path}:{number}: not a verdict ({error}).  Fix: remove the line or the file"
                ) from None
            if verdict not in VERDICTS:
                raise DataError(f"{self.path}:{number}: field 'verdict' is {verdict!r}; expected {', '.join(VERDICTS)}")
            self.judgements[key] = Judgement(verdict, **kept)
        self._file.truncate(whole)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, judgement: Judgement, reply: str) -> None:
        assert self._file is not None
        self.judgements[key] = judgement
        line = {"key": key, **asdict(judgement), "said": reply[-200:]}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


_KEPT = ("first", "second", "prompt_tokens", "completion_tokens")


def read_cache(path: Path) -> dict[str, Judgement]:
    """Return the judgements of a cache file by key; none if there is no file."""
    if not path.is_file():
        return {}
    with Cache(path) as cache:
        return cache.judgements


def request_of(draft: Draft, options: JudgeOptions) -> dict[str, Any]:
    """Return the body of the request for a draft's two solutions."""
    texts = {"problem": draft.question, "reference": draft.reference, "candidate": draft.candidate}
    ends = {name: text if len(text) <= _MOST_CHARS else f"[...]{text[-_MOST_CHARS:]}" for name, text in texts.items()}
    content = _JUDGE_PROMPT.format(**ends)
    return {
        "model": options.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": options.max_tokens,
    }


def key_of(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def request_judgements(missing: Mapping[str, dict[str, Any]], options: JudgeOptions, cache: Cache) -> None:
    """Request the missing judgements, by key, and add them to the open cache.

    Raises ConfigError if the server refuses a request, DeadlineExceeded if it does not answer in time.  The cache keeps
    the judgements received before the error.
    """
    if missing:
        asyncio.run(_ask_all(missing, options, cache))


async def _ask_all(missing: Mapping[str, dict[str, Any]], options: JudgeOptions, cache: Cache) -> None:
    from nemo_prorl.openai_client import OpenAIClient

    todo, done, logged_at = list(missing.items())[::-1], 0, time.monotonic()
    server = OpenAIClient(options.url, os.environ.get(KEY_VARIABLE))

    async def work() -> None:
        nonlocal done, logged_at
        while todo:
            key, request = todo.pop()
            reply, usage = await _ask(server, request, options)
            cache.add(key, replace(judgement_in(reply), **usage), reply)
            done += 1
            if time.monotonic() - logged_at >= _LOG_EVERY_S:
                logged_at = time.monotonic()
                _log.info("received %d of %d verdicts", done, len(missing))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(options.workers, len(missing))):
                workers.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await server.close()


async def _ask(server: Any, request: dict[str, Any], options: JudgeOptions) -> tuple[str, dict[str, Any]]:
    """Return the text of one reply and the tokens that the server counted."""
    from nemo_prorl.openai_client import RequestRefused

    def read(reply: Any) -> tuple[str, dict[str, Any]]:
        return str(reply["choices"][0]["message"]["content"] or ""), _usage(reply)

    deadline = Deadline(options.deadline_s, f"a verdict of the judge at {options.url} (--judge-deadline-s)")
    try:
        return await server.post("/chat/completions", request, deadline, read)
    except RequestRefused as error:
        raise ConfigError(
            f"--judge-url {options.url}: the server refused --judge-model {options.model!r}: {error}.  "
            f"Fix: check --judge-url and --judge-model; put an API key into {KEY_VARIABLE}"
        ) from None
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{error}.  The verdicts so far are kept.  Fix: run the same command again to continue"
        ) from None


def _usage(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the token counts of a reply, as far as the server gives them."""
    usage = reply.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {name: counts[name] for name in ("prompt_tokens", "completion_tokens") if isinstance(counts.get(name), int)}
