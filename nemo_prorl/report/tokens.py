"""A page with the tokens of responses, coloured by the probabilities that engine and trainer gave them."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_prorl.files import new_file

_STYLE = """
body { font: 15px/1.9 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
body { color: #111; background: #fff }
h2 { font-size: 1em; margin: 2em 0 .3em } pre { white-space: pre-wrap; background: #f4f4f4; padding: .6em }
.t span { white-space: pre-wrap; padding: .25em 0 } p { margin: .3em 0 }
"""
_LEGEND = (
    "The upper half of a token's background is the engine's probability, the lower half the trainer's: white is 1,"
    " orange is small. The numbers appear under the pointer, with the log-probability in float64."
)


@dataclass(frozen=True)
class ShownResponse:
    """A response: its heading, prompt and verdict as text, its tokens as text, and log-probabilities of each token."""

    heading: str
    prompt: str
    detail: str
    tokens: Sequence[str]
    engine: Sequence[float]
    trainer: Sequence[float]
    exact: Sequence[float]


def write_page(file: Path, title: str, responses: Sequence[ShownResponse]) -> None:
    """Write the page; it is one file without links."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1><p>{_LEGEND}</p>")
    parts += [_section(response) for response in responses]
    with new_file(file) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def _section(shown: ShownResponse) -> str:
    rows = zip(shown.tokens, shown.engine, shown.trainer, shown.exact, strict=True)
    tokens = "".join(_token(*row) for row in rows)
    prompt = f"<details><summary>prompt</summary><pre>{html.escape(shown.prompt)}</pre></details>"
    return f"<h2>{html.escape(shown.heading)}</h2>{prompt}<p>{html.escape(shown.detail)}</p><p class=t>{tokens}</p>"


def _token(text: str, engine: float, trainer: float, exact: float) -> str:
    title = f"engine {engine:.4f}, trainer {trainer:.4f}, float64 {exact:.4f}"
    upper, lower = (_colour(logprob) for logprob in (engine, trainer))
    style = f"background:linear-gradient({upper} 50%,{lower} 50%)"
    return f'<span title="{title}" style="{style}">{html.escape(text)}</span>'


def _colour(logprob: float) -> str:
    """Return the colour of a log-probability: orange, the more opaque the lower; the same below -5."""
    return f"rgba(255,140,0,{min(max(-logprob, 0.0), 5.0) / 5.0:.2f})"
