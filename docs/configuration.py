"""Writes docs/reference/configuration.md from the types in nemo_prorl/config.py, by `python docs/configuration.py`."""

from collections import defaultdict
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from nemo_prorl.config import MISSING, ConfigKey, all_keys

PAGE = Path(__file__).resolve().parent / "reference" / "configuration.md"
ENDS = "...\n"  # yaml writes it after a single value
HEAD = """# Configuration keys

Set a key with `KEY=VALUE`: `prorl train trainer.grpo.max_steps=200`. The defaults below are those of the schema;
the files in [conf](../../conf) set others, and `prorl train --dry-run` prints the values of a run. A continued run may
change the keys marked `*`. A wrong value is refused before anything starts.

`python docs/configuration.py` writes this page from [config.py](../../nemo_prorl/config.py).
"""


def page() -> str:
    """Return the page as Markdown."""
    sections: dict[str, list[ConfigKey]] = defaultdict(list)
    for key in all_keys():
        if not is_dataclass(key.kind) and not key.name.startswith("data.validation."):
            sections[key.name.rpartition(".")[0]].append(key)
    return HEAD + "".join(_section(name, keys) for name, keys in sections.items())


def _section(name: str, keys: list[ConfigKey]) -> str:
    rows = ["| Key | Type | Default | Values | Meaning |", "|---|---|---|---|---|", *map(_row, keys)]
    title = f"`{name}`" if name else "The run"
    also = " and `data.validation.*`" if name == "data.train.*" else ""
    return f"\n## {title}{also}\n\n" + "\n".join(rows) + "\n"


def _row(key: ConfigKey) -> str:
    name = f"`{key.name.rpartition('.')[2]}`{' *' if key.rule.may_change else ''}"
    cells = (name, _kind(key), _default(key.default), _values(key), key.rule.meaning)
    return f"| {' | '.join(cells)} |"


def _kind(key: ConfigKey) -> str:
    words = {Any: "any", int: "whole number", float: "number", str: "text", bool: "true, false"}
    parts = get_args(key.kind)
    if not parts:
        text = words[key.kind]
    elif len(parts) == 1:
        text = f"list of {words.get(parts[0], 'sources')}"
    else:
        text = "mapping"
    return text + (" or null" if key.optional else "")


def _default(value: Any) -> str:
    if isinstance(value, str) and value == MISSING:
        return "by the model or the user"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return f"`{text.removesuffix(ENDS).strip()}`"


def _values(key: ConfigKey) -> str:
    rule = key.rule
    words = {"at least": rule.least, "above": rule.above, "at most": rule.most}
    bounds = ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
    return bounds or ", ".join(f"`{value}`" for value in dict.fromkeys(map(str, rule.choices)))


if __name__ == "__main__":
    PAGE.write_text(page())
