"""Draws docs/images/processes.svg and docs/images/step.svg, by `python docs/diagrams.py`."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
# Fills by role. The card behind them is white in both colour schemes.
COLOURS = {"launch": "#e8eaf6", "train": "#e3f2fd", "engine": "#e8f5e9", "reward": "#fff3e0", "file": "#eceff1"}
STYLE = "font-family: sans-serif; font-size: 13px; fill: #263238"


def box(x: int, y: int, width: int, height: int, role: str, *lines: str) -> str:
    """Return a box with its first line in bold; sizes are pixels."""
    rows = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{COLOURS[role]}" stroke="#90a4ae"/>']
    top = y + height // 2 - 8 * (len(lines) - 1) + 4
    for number, line in enumerate(lines):
        weight = ' font-weight="bold"' if number == 0 else ""
        place = f'x="{x + width // 2}" y="{top + 16 * number}" text-anchor="middle"'
        rows.append(f"<text {place}{weight}>{escape(line)}</text>")
    return "".join(rows)


def arrow(x1: int, y1: int, x2: int, y2: int, text: str = "", *, x: int = 0, y: int = 0) -> str:
    """Return an arrow; its text is moved by (x, y) pixels from the middle."""
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#546e7a" stroke-width="1.5" marker-end="url(#tip)"/>'
    place = f'x="{(x1 + x2) // 2 + x}" y="{(y1 + y2) // 2 + y}" text-anchor="middle" font-size="12"'
    return line + (f"<text {place}>{escape(text)}</text>" if text else "")


def bent_arrow(points: str) -> str:
    """Return an arrow along `points`, "x,y x,y ..."."""
    return f'<polyline points="{points}" fill="none" stroke="#546e7a" stroke-width="1.5" marker-end="url(#tip)"/>'


def frame(x: int, y: int, width: int, height: int, text: str) -> str:
    """Return a dashed frame with its text in the upper left corner."""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    rect = f'<rect {place} rx="8" fill="none" stroke="#78909c" stroke-dasharray="5 4"/>'
    return rect + f'<text x="{x + 12}" y="{y + 20}" fill="#546e7a">{escape(text)}</text>'


def drawing(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    """Return the SVG file."""
    tip = (
        '<marker id="tip" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#546e7a"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" style="{STYLE}">'
    card = f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    return f"{head}<title>{escape(title)}</title><defs>{tip}</defs>{card}\n" + "\n".join(parts) + "\n</svg>\n"


def processes() -> Iterator[str]:
    """Yield the processes of a run and what goes between them."""
    yield box(300, 16, 300, 46, "launch", "sbatch slurm/stage.sbatch run1", "or, on one machine, prorl train")
    yield arrow(450, 62, 450, 120, "one per node", x=48)
    yield frame(20, 90, 860, 290, "each node")
    yield box(
        60,
        124,
        780,
        46,
        "launch",
        "supervisor",
        "starts the processes below, watches them, and ends all if one of them cannot go on",
    )
    for x in (180, 470, 750):
        yield arrow(x, 170, x, 218)
    yield box(
        60,
        222,
        240,
        112,
        "train",
        "trainer ranks",
        "NeMo-Aligner, Megatron-Core:",
        "log-probabilities, updates,",
        "hard resets, checkpoints.",
        "Rank 0 collects all groups.",
    )
    yield box(400, 222, 150, 66, "engine", "rollout engines", "vLLM,", "one per GPU")
    yield box(650, 222, 190, 66, "reward", "reward server", "workers of the plugins,", "sandbox for programs")
    yield arrow(300, 238, 396, 238, "weights", y=-5)
    yield arrow(300, 258, 396, 258, "prompts", y=-5)
    yield arrow(400, 278, 304, 278, "responses", y=15)
    yield bent_arrow("300,306 720,306 720,292")
    yield bent_arrow("770,288 770,326 304,326")
    yield '<text x="620" y="302" font-size="12">responses</text><text x="620" y="342" font-size="12">verdicts</text>'
    yield arrow(180, 334, 180, 404, "metrics, rollouts, checkpoints", x=92, y=16)
    yield box(
        60,
        408,
        780,
        62,
        "file",
        "run directory, on a file system that all nodes see",
        "config.yaml  metrics.jsonl  journal.jsonl  summary.json  rollouts/  checkpoints/  endpoints/  control/  logs/",
    )


def step() -> Iterator[str]:
    """Yield the parts of a step by time."""
    lanes = [(60, "rollout engines"), (150, "reward server"), (240, "trainer ranks")]
    for y, name in lanes:
        yield f'<text x="16" y="{y + 30}" font-weight="bold">{name}</text>'
        yield f'<line x1="140" y1="{y + 62}" x2="900" y2="{y + 62}" stroke="#cfd8dc"/>'
    yield '<text x="140" y="30" fill="#546e7a">time of one step &#8594;</text>'
    yield box(140, 240, 90, 50, "train", "publish", "weights")
    yield arrow(206, 240, 226, 112)
    yield box(230, 60, 270, 50, "engine", "generate", "and draw more until the batch is full")
    yield box(270, 150, 250, 50, "reward", "judge", "each response as soon as it ends")
    yield arrow(320, 110, 320, 148)
    yield arrow(420, 110, 420, 148)
    yield arrow(510, 200, 536, 238, "groups with a signal", x=72, y=-4)
    yield box(530, 240, 140, 50, "train", "log-probabilities", "policy, reference")
    yield box(676, 240, 110, 50, "train", "updates", "clipped loss")
    yield box(792, 240, 108, 50, "file", "if due: reset,", "checkpoint")
    note = "Engines with devices of their own generate the next step beside log-probabilities and updates."
    yield f'<text x="140" y="330" fill="#546e7a">{note}</text>'


def drawings() -> dict[str, str]:
    """Return the SVG of each file name."""
    return {
        "processes.svg": drawing(900, 490, "Processes of a run", processes()),
        "step.svg": drawing(920, 350, "One training step", step()),
    }


if __name__ == "__main__":
    for name, text in drawings().items():
        (IMAGES / name).write_text(text)
