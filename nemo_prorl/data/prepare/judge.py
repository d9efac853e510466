"""A language model as judge of whether two solutions agree, through any OpenAI-compatible endpoint.

Each verdict is appended to a cache file at once, under a hash of the whole request.  After a kill, only the missing
verdicts are requested.  A changed model or prompt changes all hashes, so all verdicts are requested again.
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
_JUDGE_PROMPT = """\
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
_LOG_EVERY_S = 30.0
_BACKOFF_S = (0.5, 20.0)  # seconds: first and longest wait before a retry


@dataclass(frozen=True)
class JudgeOptions:
    """Settings of the judge.  `url`: base of the API.  `deadline_s`: seconds for one verdict, with retries."""

    url: str
    model: str
    workers: int = 16
    deadline_s: float = 300.0
    max_tokens: int = 2048


def verdict_in(text: str) -> JudgeVerdict:
    """Return the last verdict in the text that follows the judge's thinking; `unclear` if the text has no verdict."""
    found = _WORD.findall(text.rpartition("</think>")[2])
    return "unclear" if not found else "agree" if found[-1] == "AGREE" else "disagree"


class Cache:
    """A file of verdicts by key, one JSON object per line.  Opening it removes a last line cut off by a kill."""

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
                raise DataError(
                    f"{self.path}:{number}: not a verdict ({error}).  Fix: remove the line or the file"
                ) from None
            if verdict not in VERDICTS:
                raise DataError(f"{self.path}:{number}: field 'verdict' is {verdict!r}; expected {', '.join(VERDICTS)}")
            self.verdicts[key] = verdict
        self._file.truncate(whole)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, verdict: JudgeVerdict, reply: str) -> None:
        assert self._file is not None
        self.verdicts[key] = verdict
        self._file.write(json.dumps({"key": key, "verdict": verdict, "said": reply[-200:]}).encode() + b"\n")
        self._file.flush()


def request_of(draft: Draft, options: JudgeOptions) -> dict[str, Any]:
    """Return the body of the request for a draft's two solutions."""
    content = _JUDGE_PROMPT.format(problem=draft.question, reference=draft.reference, candidate=draft.candidate)
    return {
        "model": options.model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": options.max_tokens,
    }


def key_of(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def verdicts(drafts: Sequence[Draft], options: JudgeOptions, path: Path) -> tuple[list[JudgeVerdict], int]:
    """Return a verdict for each draft, and the number of requests that the cache did not answer.

    Raises ConfigError if the endpoint refuses a request, DeadlineExceeded if it does not answer in time.  The cache
    keeps the verdicts received before the error.
    """
    requests = [request_of(draft, options) for draft in drafts]
    keys = [key_of(request) for request in requests]
    with Cache(path) as cache:
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in cache.verdicts}
        _log.info(
            "%d pairs of solutions to compare; verdicts on %d of them are in %s",
            len(drafts),
            len(drafts) - len(missing),
            path,
        )
        if missing:
            asyncio.run(_ask_all(missing, options, cache))
        return [cache.verdicts[key] for key in keys], len(missing)


async def _ask_all(missing: dict[str, dict[str, Any]], options: JudgeOptions, cache: Cache) -> None:
    import aiohttp

    todo, done, logged_at = list(missing.items())[::-1], 0, time.monotonic()
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal done, logged_at
        while todo:
            key, request = todo.pop()
            reply = await _ask(session, request, options)
            cache.add(key, verdict_in(reply), reply)
            done += 1
            if time.monotonic() - logged_at >= _LOG_EVERY_S:
                logged_at = time.monotonic()
                _log.info("received %d of %d verdicts", done, len(missing))

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
    """Return the text of one reply; retry a busy server, a broken connection or an invalid reply until the deadline."""
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
                        f"--judge-url {options.url}: the server refused --judge-model {options.model!r} with {fault}.  "
                        f"Fix: check --judge-url and --judge-model; put an API key into {KEY_VARIABLE}"
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            fault = f"its reply is not a chat completion ({type(error).__name__}: {error})"
        await asyncio.sleep(min(wait, max(0.0, until - time.monotonic())))
        wait = min(2 * wait, _BACKOFF_S[1])
    raise DeadlineExceeded(
        f"the judge at {options.url} gave no verdict in {options.deadline_s:g} s (--judge-deadline-s), last: {fault}.  "
        "Its verdicts so far are kept.  Fix: run the same command again to continue"
    )
