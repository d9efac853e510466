"""Annotations for the types of documented file formats: JSON Schema constraints that a type hint cannot express.

`setup/schemas.py` generates docs/schemas from the types; the docstring below a field becomes its description.  This
file uses the standard library only and runs on Python 3.9, because the script of a Slurm job imports it.
"""

from __future__ import annotations

from typing import Annotated, Any


class Constraint:
    """Keywords of JSON Schema for a value, such as `minimum`."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Any:
        return {**handler(core_schema), **self.keywords}


class JsonOf:
    """An annotation: the value is a JSON object with the fields of the dataclass `kind`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(self.kind)


Count = Annotated[int, Constraint(minimum=0)]
Number = Annotated[int, Constraint(minimum=1)]
Share = Annotated[float, Constraint(minimum=0, maximum=1)]
Amount = Annotated[float, Constraint(minimum=0)]
Sha256 = Annotated[str, Constraint(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Constraint(pattern=r"\S")]
Texts = Annotated[list[Text], Constraint(minItems=1)]
Time = Annotated[float, Constraint(description="seconds since 1970, UTC")]
