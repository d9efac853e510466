"""Asks a language model whether two solutions agree, through any OpenAI-compatible endpoint.

Each verdict is appended to a cache file the moment it is known, under a hash of all that was asked: a preparation that
was killed asks only for what is missing, and another model, or other words, are asked anew.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from nemo_prorl.data.prepare.drafts import Draft
from nemo_prorl.errors import ConfigError, DataError, DeadlineExceeded

_log = logging.getLogger(__name__)

JudgeVerdict = Literal["agree", "disagree", "unclear"]
VERDICTS: tuple[JudgeVerdict, ...] = get_args(JudgeVerdict)
KEY_VARIABLE = "PRORL_JUDGE_KEY"
_ASKED = """\
Two answers to one problem of science follow. Do they agree? They agree if their final results mean the same: the same \
value (other units, notation or rounding are no difference), the same formula, the same choice, the same statement. \
Judge only whether they agree, not whether they are right.

Problem:
{problem}

First answer, with its solution:
{reference}

Second answer:
{candidate}

Reason briefly if you need to. Then end with one word on a line of its own: AGREE or DISAGREE."""
_WORD = re.compile(r"\b(DISAGREE|AGREE)\b")
_TELL_EVERY_S = 30.0
_BACKOFF_S = (0.5, 20.0)  # first and longest wait before another try


@dataclass(frozen=True)
class JudgeOptions:
    """`url`: the base of the API, such as http://host:8000/v1.  `deadline_s`: of one verdict, all tries together."""

    url: str
    model: str
    workers: int = 16
    deadline_s: float = 300.0
    max_tokens: int = 2048


def verdict_in(text: str) -> JudgeVerdict:
    """Return the last verdict in a judge's answer, after its thinking; `unclear` without one."""
    found = _WORD.findall(text.rpartition("</think>")[2])
    return "unclear" if not found else "agree" if found[-1] == "AGREE" else "disagree"


class Cache:
    """Verdicts by key, one JSON object a line; a line that a kill cut off is taken away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: dict[str, JudgeVerdict] = {}
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
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self.path}:{number}: no verdict ({error}); remove the line, or the file") from None
            if verdict not in VERDICTS:
                raise DataError(f"{self.path}:{number}: field 'verdict' is {verdict!r}; right: {', '.join(VERDICTS)}")
            self.verdicts[key] = verdict
        self._file.truncate(whole)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, verdict: JudgeVerdict, said: str) -> None:
        assert self._file is not None
        self.verdicts[key] = verdict
        self._file.write(json.dumps({"key": key, "verdict": verdict, "said": said[-200:]}).encode() + b"\n")
        self._file.flush()


def request_of(draft: Draft, options: JudgeOptions) -> dict[str, Any]:
    """What is asked, as the endpoint gets it."""
    asked = _ASKED.format(problem=draft.question, reference=draft.reference, candidate=draft.candidate)
    return {
        "model": options.model,
        "messages": [{"role": "user", "content": asked}],
        "temperature": 0.0,
        "max_tokens": options.max_tokens,
    }


def key_of(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def verdicts(drafts: Sequence[Draft], options: JudgeOptions, path: Path) -> tuple[list[JudgeVerdict], int]:
    """(a verdict for each draft, how many were asked for now).

    Raises ConfigError for a request that the endpoint refuses, DeadlineExceeded where it does not answer; what is
    known by then is in the cache.
    """
    requests = [request_of(draft, options) for draft in drafts]
    keys = [key_of(request) for request in requests]
    with Cache(path) as cache:
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in cache.verdicts}
        _log.info("%d solutions to compare, %d of them in %s", len(drafts), len(drafts) - len(missing), path)
        if missing:
            asyncio.run(_ask_all(missing, options, cache))
        return [cache.verdicts[key] for key in keys], len(missing)


async def _ask_all(missing: dict[str, dict[str, Any]], options: JudgeOptions, cache: Cache) -> None:
    import aiohttp

    todo, done, told = list(missing.items())[::-1], 0, time.monotonic()
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal done, told
        while todo:
            key, request = todo.pop()
            said = await _ask(session, request, options)
            cache.add(key, verdict_in(said), said)
            done += 1
            if time.monotonic() - told >= _TELL_EVERY_S:
                told = time.monotonic()
                _log.info("%d of %d verdicts", done, len(missing))

    timeout = aiohttp.ClientTimeout(total=options.deadline_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        tasks = [asyncio.create_task(work(session)) for _ in range(min(options.workers, len(missing)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(session: Any, request: dict[str, Any], options: JudgeOptions) -> str:
    """The text of one answer.  A busy server, a broken connection or nonsense are tried again until the deadline."""
    import aiohttp

    url = f"{options.url.rstrip('/')}/chat/completions"
    until, wait, fault = time.monotonic() + options.deadline_s, _BACKOFF_S[0], "no answer"
    while (left := until - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left), session.post(url, json=request) as response:
                body = await response.text()
                if response.status == 200:
                    return str(json.loads(body)["choices"][0]["message"]["content"] or "")
                fault = f"status {response.status}: {' '.join(body.split())[:200]}"
                if 400 <= response.status < 500 and response.status not in (408, 409, 425, 429):
                    raise ConfigError(
                        f"--judge-url {options.url}: it refuses {options.model!r} with {fault}; "
                        f"check address and model; a key goes into {KEY_VARIABLE}"
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            fault = f"its answer is no chat completion ({type(error).__name__}: {error})"
        await asyncio.sleep(min(wait, max(0.0, until - time.monotonic())))
        wait = min(2 * wait, _BACKOFF_S[1])
    raise DeadlineExceeded(
        f"the judge at {options.url} gave no verdict in {options.deadline_s:g} s (--judge-deadline-s), last: {fault}; "
        "what it judged is kept, the same command goes on"
    )
