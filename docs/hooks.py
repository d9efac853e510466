"""Hooks of the documentation site: formulas become MathML, links to files outside docs lead to the repository.

On the repository's own site ```` ```math ```` blocks, `$...$` and relative links to source files work without a hook.
"""

import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^(`{3,}|~{3,})(.*?)\n(.*?)^\1[ ]*$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]+`")
_INLINE = re.compile(r"(?<![\\\w$])\$(?=[^\s$])([^$\n]+?)(?<=[^\s\\])\$(?![\w$])")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page's Markdown with formulas as MathML and with links that work on the site."""
    kept: list[str] = []

    def keep(text: str) -> str:
        kept.append(text)
        return f"\x02{len(kept) - 1}\x03"

    def fence(match: re.Match[str]) -> str:
        if match[2].strip() != "math":
            return keep(match[0])
        return keep(f'<div class="arithmatex">{convert(match[3].strip(), display="block")}</div>')

    text = _FENCE.sub(fence, markdown)
    text = _LINK.sub(lambda match: _link(match, page.file.src_uri, config), text)
    text = _CODE.sub(lambda match: keep(match[0]), text)
    text = _INLINE.sub(lambda match: keep(f"<span>{convert(match[1])}</span>"), text)
    while "\x02" in text:
        text = re.sub("\x02(\\d+)\x03", lambda match: kept[int(match[1])], text)
    return text


def _link(match: re.Match[str], page: str, config: Any) -> str:
    """Return a link as the site needs it: unchanged if it stays inside docs, otherwise into the repository."""
    picture, text, target = match.groups()
    path = target.partition("#")[0]
    if picture or not path or re.match(r"[a-z]+:", path):
        return match[0]
    absolute = Path(os.path.normpath(ROOT / "docs" / Path(page).parent / path))
    if absolute.is_relative_to(ROOT / "docs") and not absolute.is_dir():
        return match[0]
    if not absolute.exists():
        raise FileNotFoundError(f"docs/{page} links to {target}, which does not exist")
    name = absolute.relative_to(ROOT)
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{name})"
    return f"`{name}`" if str(name).endswith(text.strip("`")) else f"{text} (`{name}`)"


def on_post_build(config: Any, **_: Any) -> None:
    """Delete what no reader loads: source maps, and stemmers of languages that no page is written in."""
    for pattern in ("**/*.map", "assets/javascripts/lunr/**/*.js"):
        for path in Path(config.site_dir).glob(pattern):
            path.unlink()
