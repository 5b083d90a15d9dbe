"""Tables of an experiment: frozen, typed, and without keys that nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError, core_schema

from fedrts.registry import IMPORT_PATH, Registry

Number = Annotated[float, Field(allow_inf_nan=False)]


class Table(BaseModel):
    """Keys that belong together, with their defaults, ranges and meanings; whoever needs them takes the table itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def but(self, **changes: Any) -> Self:
        """This table with some `changes`."""
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class Named:
    """Marks a key that names an entry of a registry, or one's own by import path: `Annotated[str, Named(registry)]`.

    No import path is followed here: reading settings runs nobody's code.
    """

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def _known(self, name: object) -> str:
        names = self.registry.names()
        if isinstance(name, str) and (name in names or IMPORT_PATH.fullmatch(name)):
            return name
        known = ", ".join(map(repr, names))
        raise PydanticCustomError("unknown_name", "Input should be {known} or an import path MODULE:NAME", {"known": known})
