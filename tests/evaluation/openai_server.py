"""A real HTTP server that speaks enough of OpenAI's form, answers by seed, and fails in ways that a test asks for."""

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from aiohttp import web


class Answers:
    """What the server says: the answer follows from prompt and seed; the first tries of some requests fail."""

    def __init__(self, delay_s: float = 0.0, failures: tuple[int | str, ...] = (), token: str | None = None) -> None:
        self.delay_s, self.failures, self.token = delay_s, failures, token
        self.tries: Counter[tuple[str, int]] = Counter()
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="who are you?")
        if body["model"] != "tiny":
            return web.Response(status=404, text=f"no model {body['model']}")
        chat = request.path.endswith("/chat/completions")
        key = json.dumps(body["messages"] if chat else body["prompt"]), body["seed"]
        self.tries[key] += 1
        self.bodies.append(body)
        failure = self.failures[self.tries[key] - 1] if self.tries[key] <= len(self.failures) else None
        if failure == "cut":
            assert request.transport is not None
            request.transport.close()
        elif failure is not None:
            return web.Response(status=int(failure), text="not now")
        await asyncio.sleep(self.delay_s)
        text = f"<answer>{body['seed'] % 3}</answer>"
        message: dict[str, Any] = {"message": {"role": "assistant", "content": text, "reasoning_content": "hm"}}
        choice = {"index": 0, "finish_reason": "stop" if body["seed"] % 5 else "length"}
        choice |= message if chat else {"text": text}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 5}})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post(f"/v1/{name}", self.answer) for name in ("completions", "chat/completions")])
        return app


async def serve(answers: Answers) -> tuple[web.AppRunner, str]:
    """(to clean up, address up to /v1)"""
    runner = web.AppRunner(answers.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}/v1"


async def _main(delay_s: float) -> None:
    answers = Answers(delay_s)
    _, url = await serve(answers)
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    while True:  # a line for each question: how many responses were asked for
        if not await asyncio.to_thread(sys.stdin.readline):
            return
        sys.stdout.write(f"{sum(answers.tries.values())}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(float(sys.argv[1])))
