"""The base of every part of a config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

CENTURY_DAYS = 36_500  # longer than any of these spans means anything, and short enough to count back from any day
Days = Annotated[int, Field(ge=0, le=CENTURY_DAYS)]
Seconds = Annotated[int, Field(ge=0, le=CENTURY_DAYS * 86_400)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the config: frozen, strict about unknown keys, documented by its field strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
