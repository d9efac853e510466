"""A headless Chromium, driven by selenium: what a page does, asks for and looks like."""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

PACKAGES = ("chromium", "chromium-driver")
FLAGS = (  # besides those that the driver gives
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-component-update",
    "--disable-extensions",  # Debian's start script loads those of the machine
)
READY_S = 60.0


class NoBrowser(RuntimeError):
    """No Chromium can be had on this machine; says why and what would help."""


def provide() -> tuple[str, str]:
    """Chromium and its driver; installs Debian's packages where they are missing.  Raises NoBrowser where it cannot."""
    with (Path(tempfile.gettempdir()) / f"prorl-chromium-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another session may want them, too
        if (programs := find()) is not None:
            return programs
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise NoBrowser(f"no chromium with a chromedriver: install Debian's packages {' and '.join(PACKAGES)}")
        command = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoBrowser(f"'{' '.join(command)}' did not end in {error.timeout:g} s") from error
        if (programs := find()) is None:
            raise NoBrowser(f"'{' '.join(command)}' ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
        return programs


def find() -> tuple[str, str] | None:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Page:
    """A page in a tab of its own.  Made by `Browser.visit`."""

    first_s = 0.0  # from navigation until what is in view is drawn, as the page says
    load_s = 0.0  # until all is drawn, and painted
    cpu_s = 0.0  # of all processes of the browser until then

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver
        self._errors: list[str] = []
        self._requests: list[str] = []

    @property
    def errors(self) -> list[str]:
        """Return the errors and warnings on its console, and its exceptions, so far."""
        self._errors += [entry["message"] for entry in self._driver.get_log("browser")]
        return self._errors

    @property
    def requests(self) -> list[str]:
        """Return all addresses that it has asked for so far."""
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        self._requests += [params["request"]["url"] for params in sent]
        return self._requests

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command of the DevTools protocol."""
        return self._driver.execute_cdp_cmd(method, params)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; wait for a promise.  Raises JavascriptException."""
        as_json = f"JSON.stringify(await ({expression}) ?? null)"  # the driver fails on half a surrogate pair
        return json.loads(self._driver.execute_script(f"return (async () => {as_json})();"))

    def until(self, expression: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true; raise AssertionError naming it if it is not in time."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"not true after {seconds:g} s: {expression}; errors: {self.errors}"
            time.sleep(0.02)

    def screenshot(self, path: Path, selector: str | None = None, whole: bool = False) -> None:
        """Write a PNG of what is in view, of an element, or of the whole page."""
        options: dict[str, Any] = {}
        if selector is not None or whole:
            box = self.evaluate(
                f"(() => {{ const b = document.querySelector({selector or 'html'!r}).getBoundingClientRect();"
                " return { x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height, scale: 1 }; })()"
            )
            options = {"clip": box, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"]))

    def pdf(self, path: Path) -> None:
        printed = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(printed["data"]))


class Browser:
    """A running Chromium.  Made by `browser`."""

    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes so far."""
        total = 0.0
        for process in psutil.Process(self._driver.service.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total

    @contextlib.contextmanager
    def visit(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Open a page in a new tab, and wait until it says that it is drawn."""
        self._driver.switch_to.new_window("tab")
        for log in ("browser", "performance"):
            self._driver.get_log(log)  # forgets what other pages said
        page = Page(self._driver)
        try:
            _prepare(page, width, height, dark)
            before, begun = self.cpu_s(), time.monotonic()
            page.call("Page.navigate", url=url)
            page.until("document.documentElement?.dataset.ready", READY_S)
            page.first_s = time.monotonic() - begun
            page.until("document.documentElement.dataset.ready === 'yes'", READY_S)
            page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # painted
            page.load_s = time.monotonic() - begun
            page.cpu_s = self.cpu_s() - before
            yield page
        finally:
            self._driver.close()
            self._driver.switch_to.window(self._driver.window_handles[0])


def _prepare(page: Page, width: int, height: int, dark: bool) -> None:
    phone = width < 600
    scale = 2 if phone else 1
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    page.call("Emulation.setEmulatedMedia", features=features)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run a Chromium that ends with the block; raise NoBrowser where there is none."""
    options = ChromeOptions()
    options.binary_location, driver = provide()
    options.page_load_strategy = "none"  # `visit` waits for more than the load event
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING", "performance": "ALL"})
    options.ignore_local_proxy_environment_variables()  # the driver listens on this machine
    for flag in FLAGS:
        options.add_argument(flag)
    with tempfile.TemporaryDirectory(prefix="prorl-chromium-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "TMPDIR": folder}  # for the profile
        service = ChromeService(driver, env=environment, popen_kw={"start_new_session": True})
        try:
            try:
                chromium = Chrome(options, service)
            except WebDriverException as error:
                raise NoBrowser(f"Chromium does not start: {error.msg}") from error
            yield Browser(chromium)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(service.process.pid, signal.SIGKILL)  # Chromium is of the driver's session
            service.process.wait(10)
