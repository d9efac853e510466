"""A headless Chromium, driven over its DevTools protocol: what a page does, asks for and looks like."""

import asyncio
import base64
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--remote-debugging-port=0",
)
START_S, CALL_S = 60.0, 60.0


class NoBrowser(RuntimeError):
    """No Chromium can be had on this machine; says why and what would help."""


def provide() -> str:
    """The program; installs Debian's package where it is missing and can be had.  Raises NoBrowser where not."""
    with (Path(tempfile.gettempdir()) / f"prorl-chromium-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session may want it, too
        if (program := find()) is not None:
            return program
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NoBrowser(f"none of {', '.join(NAMES)} found: install Debian's package chromium")
        command = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoBrowser(f"'{' '.join(command)}' did not end in {error.timeout:g} s") from error
        if (program := find()) is None:
            raise NoBrowser(f"'{' '.join(command)}' ended with {told.returncode}: {told.stderr.strip()[-300:]}")
        return program


def find() -> str | None:
    return next((program for name in NAMES if (program := shutil.which(name))), None)


@dataclass
class Page:
    """One page that was opened.  `errors` are its console's and exceptions, `requests` all addresses it asked for."""

    call: Callable[..., Awaitable[dict[str, Any]]]
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    first_s: float = 0.0  # from navigation until what is in view is drawn, as the page says
    load_s: float = 0.0  # until all is drawn, and painted
    cpu_s: float = 0.0  # of all processes of the browser until then

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for.  Raises RuntimeError with its error."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, expression: str, seconds: float = 20.0) -> None:
        """Waits until an expression is true; raises AssertionError naming it."""
        end = time.monotonic() + seconds
        while not await self.evaluate(expression):
            if time.monotonic() > end:
                raise AssertionError(f"not true after {seconds:g} s: {expression}; the page said {self.errors}")
            await asyncio.sleep(0.02)

    async def screenshot(self, path: Path, selector: str | None = None, whole: bool = False) -> None:
        """A PNG of what is in view, of an element, or of the whole page."""
        options: dict[str, Any] = {}
        if selector is not None or whole:
            box = await self.evaluate(
                f"(() => {{ const b = document.querySelector({selector or 'html'!r}).getBoundingClientRect();"
                " return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()"
            )
            clip = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
            options = {"clip": clip, "captureBeyondViewport": True}
        told = await self.call("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(told["data"]))

    async def pdf(self, path: Path) -> None:
        told = await self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(told["data"]))


class Browser:
    """A running Chromium with a profile of its own.  Made by `browser`."""

    def __init__(self, port: int, pid: int) -> None:
        self._port, self._pid = port, pid

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        total = 0.0
        for process in [root := psutil.Process(self._pid), *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    def visit(
        self, url: str, look: Callable[[Page], Awaitable[T]], width: int = 1280, height: int = 900, dark: bool = False
    ) -> T:
        """Opens a page, waits until it says that it is drawn, and gives what `look` makes of it."""
        return asyncio.run(self._visit(url, look, width, height, dark))

    async def _visit(self, url: str, look: Callable[[Page], Awaitable[T]], width: int, height: int, dark: bool) -> T:
        base = f"http://127.0.0.1:{self._port}/json"
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{base}/new?about:blank") as answer:
                target = await answer.json(content_type=None)
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page, reader = await _attached(socket)
                try:
                    await _prepare(page, width, height, dark)
                    before = self.cpu_s()
                    await _open(page, url)
                    page.cpu_s = self.cpu_s() - before
                    return await look(page)
                finally:
                    reader.cancel()
            async with session.get(f"{base}/close/{target['id']}"):
                pass


async def _attached(socket: aiohttp.ClientWebSocketResponse) -> tuple[Page, "asyncio.Task[None]"]:
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def call(method: str, **params: Any) -> dict[str, Any]:
        number = len(waiting) + 1
        waiting[number] = asyncio.get_running_loop().create_future()
        await socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(waiting[number], CALL_S)

    page = Page(call)

    async def read() -> None:
        async for message in socket:
            value = message.json()
            if "id" in value:
                if "error" in value:
                    waiting[value["id"]].set_exception(RuntimeError(str(value["error"])))
                else:
                    waiting[value["id"]].set_result(value["result"])
            else:
                _note(page, value["method"], value["params"])

    return page, asyncio.create_task(read())


def _note(page: Page, method: str, params: dict[str, Any]) -> None:
    if method == "Network.requestWillBeSent":
        page.requests.append(params["request"]["url"])
    elif method == "Runtime.exceptionThrown":
        page.errors.append(str(params["exceptionDetails"]))
    elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        page.errors.append(str(params["args"]))
    elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        page.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


async def _prepare(page: Page, width: int, height: int, dark: bool) -> None:
    for domain in ("Page", "Network", "Runtime", "Log"):
        await page.call(f"{domain}.enable")
    await page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=2 if width < 600 else 1,
        mobile=width < 600,
    )
    await page.call("Emulation.setScrollbarsHidden", hidden=True)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    await page.call("Emulation.setEmulatedMedia", features=features)


async def _open(page: Page, url: str) -> None:
    begun = time.monotonic()
    await page.call("Page.navigate", url=url)
    await page.until("document.documentElement?.dataset.ready", CALL_S)
    page.first_s = time.monotonic() - begun
    await page.until("document.documentElement.dataset.ready === 'yes'", CALL_S)
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # painted
    page.load_s = time.monotonic() - begun


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium that ends with the block; raises NoBrowser where there is none."""
    program = provide()
    profile = Path(tempfile.mkdtemp(prefix="prorl-chromium-"))
    command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    log = (profile / "stderr").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Browser(_port(process, profile), process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children are of its session
        process.wait(10)
        log.close()
        shutil.rmtree(profile, ignore_errors=True)


def _port(process: "subprocess.Popen[bytes]", profile: Path) -> int:
    end = time.monotonic() + START_S
    told = profile / "DevToolsActivePort"
    while time.monotonic() < end and process.poll() is None:
        if told.is_file() and (lines := told.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise NoBrowser(f"Chromium did not start: {(profile / 'stderr').read_text(errors='replace')[-500:]}")
