"""Prompts with instructions that a program can check, in IFEval's form."""

import json
from typing import Any

from nemo_prorl.data.prepare.answers import own_id
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row


def ifeval(row: Row) -> Draft | Drop:
    """IFEval's columns; or Llama-Nemotron's, whose `input` is a list of messages and `args` holds the two lists."""
    prompt = row.needed("prompt", "input")
    if isinstance(prompt, list):
        if len(prompt) > 1:
            return Drop("several messages", f"{len(prompt)}; the instructions may belong to any of them")
        prompt = prompt[0].get("content") if prompt and isinstance(prompt[0], dict) else None
    if not isinstance(prompt, str):
        raise row.wrong("prompt", row.first("prompt", "input"), "a string, or a list of one message")
    values = row.values
    if "instruction_id_list" not in values and "args" in values:
        values = _object(row, "args", values["args"])
    inner = Row(row.file, row.line, values)
    names = inner.needed("instruction_id_list")
    arguments = inner.needed("kwargs", "instruction_kwargs")
    arguments = _object(row, "kwargs", arguments) if isinstance(arguments, str) else arguments
    if not prompt.strip():
        return Drop("no problem", "the text is empty")
    if not isinstance(names, list) or not isinstance(arguments, list):
        raise row.wrong("instruction_id_list", names, "a list, with another of equal length in kwargs")
    if not names:
        return Drop("no instructions", "the source gives none")
    # Tables give each instruction the arguments of all, null where it has none of them.
    kwargs = [{key: value for key, value in (one or {}).items() if value is not None} for one in arguments]
    truth = {"instruction_id_list": names, "kwargs": kwargs}
    return Draft("instructions", prompt.strip(), truth, theirs=own_id(row))


def _object(row: Row, field: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise row.wrong(field, value, "JSON") from None
