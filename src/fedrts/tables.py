"""Tables of an experiment: frozen, typed, and without keys that nobody knows."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]


class Table(BaseModel):
    """Keys that belong together, with their defaults, ranges and meanings; whoever needs them takes the table itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
