"""Words for the types of documented formats: what a JSON schema says beyond a Python type.

`setup/schemas.py` makes docs/schemas of the types; the docstring below a field becomes its description.  Standard
library only, Python 3.9 at least: the script of a Slurm job imports this, too.
"""

from __future__ import annotations

from typing import Annotated, Any


class Constraint:
    """Keywords of JSON Schema that a value keeps, such as `minimum`."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Any:
        return {**handler(core_schema), **self.keywords}


class JsonOf:
    """Marks a JSON value that is written from a dataclass, whose fields it has."""

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
