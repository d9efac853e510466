"""Make the screenshots of the report in the documentation, in a headless Chromium.

    python -m tests.report.pictures tour RUN              docs/tour/report.html, and docs/images/tour-*.png
    python -m tests.report.pictures report CHAIN RUN...   docs/images/report-*.png for docs/howto/report.md

CHAIN is the folder of a chain, or a run; the RUNs are compared with each other.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

from PIL import Image

from nemo_prorl.report import cli
from tests.report.browser import Browser, Page, browser

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def pictures(chromium: Browser, chain: str, many: str, folder: Path) -> None:
    """Screenshots of both pages, at a desk and on a phone."""

    async def desk(page: Page) -> None:
        await page.screenshot(folder / "report-overview.png")
        await page.evaluate("document.querySelector('#time').scrollIntoView({ behavior: 'instant' })")
        await page.screenshot(folder / "report-time.png")

    async def dark(page: Page) -> None:
        await page.evaluate("document.querySelectorAll('.sample')[3].open = true")
        await page.evaluate("document.querySelector('#samples').scrollIntoView({ behavior: 'instant' })")
        await page.until("document.querySelectorAll('.sample pre').length > 0")
        await page.screenshot(folder / "report-samples.png")

    async def compare(page: Page) -> None:
        await page.evaluate("document.querySelector('#comparison').scrollIntoView({ behavior: 'instant' })")
        await page.screenshot(folder / "report-comparison.png")

    async def phone(page: Page) -> None:
        for number, place in enumerate(("header", "#chart-validation", "#chart-reward")):
            await page.evaluate(f"document.querySelector('{place}').scrollIntoView({{ behavior: 'instant' }})")
            await page.screenshot(folder / f"phone-{number}.png")

    chromium.visit(chain, desk, 1240, 1040)
    chromium.visit(chain, dark, 1000, 860, dark=True)
    chromium.visit(many, compare, 1240, 800)
    chromium.visit(chain, phone, 360, 720)
    views = [Image.open(path).convert("RGB") for path in sorted(folder.glob("phone-*.png"))]
    side = Image.new("RGB", (sum(view.width + 24 for view in views) - 24, views[0].height), "#888888")
    for number, view in enumerate(views):
        side.paste(view, (number * (view.width + 24), 0))
    side.resize((side.width // 2, side.height // 2), Image.Resampling.LANCZOS).save(folder / "report-phone.png")


def tour(run: Path) -> None:
    """Write the report of a run for docs/tour.md, and its pictures: light and dark, desktop and phone."""
    page = cli.write([run], [], 40, DOCS / "tour" / "report.html")
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        for width, height, size in ((1240, 1040, "desktop"), (390, 844, "phone")):
            for dark in (False, True):
                path = Path(name) / f"tour-{size}-{'dark' if dark else 'light'}.png"
                chromium.visit(page.as_uri(), partial(Page.screenshot, path=path), width, height, dark)
                _save(path)


def report(chain: Path, *runs: Path) -> None:
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        pages = [
            cli.write(which, [], 400, folder / f"{k}.html").as_uri() for k, which in enumerate(([chain], list(runs)))
        ]
        pictures(chromium, pages[0], pages[1], folder)
        for path in folder.glob("report-*.png"):
            _save(path)


def _save(path: Path) -> None:
    """Save a picture in docs/images with at most 40 colours, so that the site stays small."""
    Image.open(path).convert("RGB").quantize(40, kmeans=1).save(DOCS / "images" / path.name, optimize=True)


if __name__ == "__main__":
    folders = list(map(Path, sys.argv[2:]))
    if sys.argv[1] == "tour":
        tour(folders[0])
    else:
        report(folders[0], *folders[1:])
