"""What every user-facing setting is made of: frozen pydantic models that refuse unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """An immutable group of settings; every field's docstring becomes its text in the schema."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Ratio = Annotated[float, Field(gt=0, lt=1)]
"""A fraction strictly between 0 and 1."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A fraction from 0 to 1, both included."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""

Count = Annotated[int, Field(gt=0)]
"""A whole number from 1."""
