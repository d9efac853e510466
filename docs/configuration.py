"""Writes docs/reference/configuration.md from the types in nemo_prorl/config.py, by `python docs/configuration.py`."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from nemo_prorl.config import MISSING, Config, ConfigKey, all_keys

PAGE = Path(__file__).resolve().parent / "reference" / "configuration.md"
ENDS = "...\n"  # yaml writes it after a single value
BAR = r"\|"  # a | within a cell
HEAD = """# Configuration keys

Set a key with `KEY=VALUE`, for example `prorl train trainer.grpo.max_steps=200`.
[Changing a run](../howto/overrides.md) lists the common keys.

- **Defaults** below are those of the schema. The files in [conf](../../conf) set other values for many keys;
  `prorl train --dry-run` prints the values of a run.
- **`*`** marks the keys that a continued run may change. Other keys keep their value for the life of a run directory.
- A **wrong value** is refused before anything starts. The message names the key, the value, and what would be right.
- "The paper" is [Scaling Up RL](https://arxiv.org/abs/2507.12507).

`python docs/configuration.py` writes this page from [config.py](../../nemo_prorl/config.py).
"""


def page() -> str:
    """Return the page as Markdown."""
    sections: dict[str, list[ConfigKey]] = defaultdict(list)
    for key in all_keys():
        if not is_dataclass(key.kind) and not key.name.startswith("data.validation."):
            sections[key.name.rpartition(".")[0]].append(key)
    about = dict(_descriptions(Config, ""))
    return HEAD + "".join(_section(name, about[name], keys) for name, keys in sections.items())


def _descriptions(section: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of a section and of all sections within it, as `all_keys` names them."""
    yield name, " ".join((section.__doc__ or "").split()) if name else "Keys outside of any section."
    hints = get_type_hints(section)
    for item in fields(section):
        rule, inner = item.metadata.get("rule"), f"{name}.{item.name}".lstrip(".")
        kind = rule.described if rule is not None and rule.described else hints[item.name]
        parts = [part for part in get_args(kind) if is_dataclass(part)]
        for part, key in [(kind, inner)] if is_dataclass(kind) else [(part, f"{inner}.*") for part in parts]:
            yield from _descriptions(part, key)


def _section(name: str, about: str, keys: list[ConfigKey]) -> str:
    rows = ["| Key | Type | Default | Values | Meaning |", "|---|---|---|---|---|", *map(_row, keys)]
    title = f"`{name}`" if name else "The run"
    also = " and `data.validation.*`" if name == "data.train.*" else ""
    return f"\n## {title}{also}\n\n{about}\n\n" + "\n".join(rows) + "\n"


def _row(key: ConfigKey) -> str:
    name = f"`{key.name.rpartition('.')[2]}`{' *' if key.rule.may_change else ''}"
    cells = (name, _kind(key), _default(key.default), _values(key), key.rule.meaning)
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _kind(key: ConfigKey) -> str:
    words = {Any: "number or string", int: "integer", float: "number", str: "string", bool: "true or false"}
    plurals = {int: "integers", float: "numbers", str: "strings"}
    parts = get_args(key.kind)
    if not parts:
        text = words[key.kind]
    elif len(parts) == 1:
        text = f"list of {plurals.get(parts[0], 'sources')}"
    else:
        text = "mapping"
    return text + (" or null" if key.optional else "")


def _default(value: Any) -> str:
    if isinstance(value, str) and value == MISSING:
        return "set by the model or by you"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix(ENDS).strip()
    if "\n" in text:  # a row of a table is one line
        text = json.dumps(value)
    return f"`{text}`"


def _values(key: ConfigKey) -> str:
    rule = key.rule
    words = {"at least": rule.least, "above": rule.above, "at most": rule.most}
    bounds = ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
    choices = [f"`{value}`" for value in dict.fromkeys(map(str, rule.choices))]
    return bounds or ", ".join([*choices, *(["[a function of your own](../howto/own_loss.md)"] if rule.own else [])])


if __name__ == "__main__":
    PAGE.write_text(page())
