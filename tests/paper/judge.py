"""A stand-in of a judge: a real HTTP server that speaks the protocol of chat completions, and always agrees.

It reads the second solution's box, and the last number of the problem where there is no box.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Agrees(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        answer = (re.findall(r"boxed\{([^{}]*)\}", asked) or re.findall(r"\d+", asked) or ["NONE"])[-1]
        reply = {
            "choices": [{"message": {"content": f"FIRST: {answer}\nSECOND: {answer}\nVERDICT: AGREE"}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 2},
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judge() -> Iterator[str]:
    """Yield the address of a judge that serves until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Agrees)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
