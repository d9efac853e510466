"""Make the screenshots of the report in the documentation, in a headless Chromium.

    python -m tests.report.pictures tour RUN              docs/tour/report.html, and docs/images/tour-*.png
    python -m tests.report.pictures report CHAIN RUN...   docs/images/report-*.png for docs/howto/report.md

CHAIN is the folder of a chain, or a run; the RUNs are compared with each other.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

from nemo_prorl.report import cli
from tests.report.browser import Browser, Page, browser

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def pictures(chromium: Browser, chain: str, many: str, folder: Path) -> None:
    """Screenshots of both pages, at a desk and on a phone."""

    def show(page: Page, selector: str) -> None:
        page.evaluate(f"document.querySelector('{selector}').scrollIntoView({{ behavior: 'instant' }})")

    with chromium.visit(chain, 1240, 1040) as page:
        page.screenshot(folder / "report-overview.png")
        show(page, "#time")
        page.screenshot(folder / "report-time.png")
    with chromium.visit(chain, 1000, 860, dark=True) as page:
        page.evaluate("document.querySelectorAll('.sample')[3].open = true")
        show(page, "#samples")
        page.until("document.querySelectorAll('.sample pre').length > 0")
        page.screenshot(folder / "report-samples.png")
    with chromium.visit(many, 1240, 800) as page:
        show(page, "#comparison")
        page.screenshot(folder / "report-comparison.png")
    with chromium.visit(chain, 360, 720) as page:
        for number, place in enumerate(("header", "#chart-validation", "#chart-reward")):
            show(page, place)
            page.screenshot(folder / f"phone-{number}.png")
    views = [Image.open(path).convert("RGB") for path in sorted(folder.glob("phone-*.png"))]
    side = Image.new("RGB", (sum(view.width + 24 for view in views) - 24, views[0].height), "#888888")
    for number, view in enumerate(views):
        side.paste(view, (number * (view.width + 24), 0))
    side.resize((side.width // 2, side.height // 2), Image.Resampling.LANCZOS).save(folder / "report-phone.png")


def tour(run: Path) -> None:
    """Write the report of a run for docs/tour.md, and its pictures: light and dark, desktop and phone."""
    address = cli.write([run], [], 40, DOCS / "tour" / "report.html").as_uri()
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        for width, height, size in ((1240, 1040, "desktop"), (390, 844, "phone")):
            for dark in (False, True):
                path = Path(name) / f"tour-{size}-{'dark' if dark else 'light'}.png"
                with chromium.visit(address, width, height, dark) as page:
                    page.screenshot(path)
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
