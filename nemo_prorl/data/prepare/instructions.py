"""Conversion of prompts with verifiable instructions, in IFEval's form."""

import json
from typing import Any

from nemo_prorl.data.prepare.answers import row_id
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.rows import Row


def ifeval(row: Row) -> Draft | Drop:
    """Convert a row of IFEval or Llama-Nemotron.

    Llama-Nemotron has messages in `input`, and IFEval's lists (see `InstructionTruth`) in `args`.
    """
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
    # In tables, each instruction has the arguments of all types, and null for the arguments of other types.
    kwargs = [{key: value for key, value in (entry or {}).items() if value is not None} for entry in arguments]
    truth = {"instruction_id_list": names, "kwargs": kwargs}
    return Draft("instructions", prompt.strip(), truth, row_id=row_id(row))


def _object(row: Row, field: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise row.wrong(field, value, "JSON") from None
