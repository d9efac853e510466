"""A page with groups of a step, token by token, coloured by the probabilities that engine and trainer gave them."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_prorl.files import write_text

_STYLE = """
body { font: 15px/1.9 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
body { color: #111; background: #fff }
h2, h3 { font-size: 1em; margin: 2em 0 .3em } h3 { margin: 1em 0 0; font-weight: normal } p { margin: .3em 0 }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .6em }
table { border-collapse: collapse; line-height: 1.4 } td, th { padding: .1em .8em .1em 0; text-align: left }
section { content-visibility: auto; contain-intrinsic-size: auto 40em }
.t span { white-space: pre-wrap; padding: .25em 0; background: linear-gradient(var(--e) 50%, var(--t, #ddd) 50%) }
"""
_LEGEND = (
    "The upper half of a token's background is the engine's probability, the lower half the trainer's: white is 1,"
    " orange is small, grey is unknown. The log-probabilities appear under the pointer."
)
_SHADES, _LOWEST = 20, -5.0  # colours, and the log-probability from which on they do not change


@dataclass(frozen=True)
class ShownResponse:
    """A response: its heading, its verdict as text, its tokens as text, and their log-probabilities by whose they are.

    `engine` and `trainer` of `logprobs` have colours.  A name that is missing is unknown.
    """

    heading: str
    detail: str
    tokens: Sequence[str]
    logprobs: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class ShownGroup:
    """A group, with the number of its draw, its heading, its prompt as text, and those of its responses to show."""

    draw: int
    heading: str
    prompt: str
    responses: Sequence[ShownResponse]


def write_page(file: Path, title: str, groups: Sequence[ShownGroup], above: Sequence[Sequence[str]] = ()) -> None:
    """Write the page; it is one file without links to others.

    Args:
        above: rows of a table above the groups, with its head; the first column has numbers of draws.
    """
    shades = (f"--{side}: rgba(255,140,0,{k / _SHADES:.2f})" for side in "et" for k in range(_SHADES + 1))
    names = (f".{side}{k}" for side in "et" for k in range(_SHADES + 1))
    style = _STYLE + "\n".join(f"{name} {{ {shade} }}" for name, shade in zip(names, shades, strict=True))
    parts = [
        f'<!doctype html><html lang="en" data-ready="yes"><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{style}</style><h1>{html.escape(title)}</h1><p>{_LEGEND}</p>",
        _table(above, {group.draw for group in groups}) if above else "",
        *(_section(group) for group in groups),
    ]
    text = "\n".join(parts) + "\n"
    write_text(file, text.encode("utf-8", "replace").decode())  # half a surrogate pair in a record


def _table(rows: Sequence[Sequence[str]], shown: set[int]) -> str:
    """Return a table whose draws are links to their groups, where the page has them."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = []
    for draw, *cells in rows[1:]:
        first = f'<a href="#draw-{draw}">{draw}</a>' if int(draw) in shown else draw
        body.append(f"<tr><td>{first}{''.join(f'<td>{html.escape(cell)}' for cell in cells)}")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _section(group: ShownGroup) -> str:
    prompt = f"<details><summary>prompt</summary><pre>{html.escape(group.prompt)}</pre></details>"
    heading = f'<h2 id="draw-{group.draw}">{html.escape(group.heading)}</h2>'
    return f"<section>{heading}{prompt}{''.join(_response(response) for response in group.responses)}</section>"


def _response(shown: ShownResponse) -> str:
    names, columns = list(shown.logprobs), zip(*shown.logprobs.values(), strict=True)
    tokens = "".join(
        _token(text, dict(zip(names, values, strict=True))) for text, values in zip(shown.tokens, columns, strict=True)
    )
    return f"<h3>{html.escape(shown.heading)}</h3><p>{html.escape(shown.detail)}</p><p class=t>{tokens}</p>"


def _token(text: str, logprobs: Mapping[str, float]) -> str:
    title = ", ".join(f"{name} {logprob:.4f}" for name, logprob in logprobs.items())
    shades = (f"{name[0]}{_shade(logprobs[name])}" for name in ("engine", "trainer") if name in logprobs)
    return f'<span class="{" ".join(shades)}" title="{title}">{html.escape(text)}</span>'


def _shade(logprob: float) -> int:
    """Return the number of a log-probability's colour: the lower, the more orange; the same below -5."""
    return round(min(max(logprob / _LOWEST, 0.0), 1.0) * _SHADES) if logprob == logprob else _SHADES
