"""Base class and field types of all settings: frozen pydantic models without unknown keys."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


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

LONGEST_NAME = 200
"""Bytes of a folder's name; file systems take 255, and temporary names have a suffix."""


def check_length(name: str) -> str:
    """Check that a name fits into a folder's name.

    Raises:
        ValueError: it is too long in bytes, of which letters beyond ASCII have several.
    """
    size = len(name.encode())
    if size > LONGEST_NAME:
        raise ValueError(
            f"the name {name[:16]!r}… is too long: it has {size} bytes, expected at most "
            f"{LONGEST_NAME}, as folders are named so"
        )
    return name


StageName = Annotated[
    str,
    # maxLength in the schema counts letters, which are never more than the bytes.
    Field(pattern=r"^[A-Za-z0-9][\w.=-]*$", json_schema_extra={"maxLength": LONGEST_NAME}),
    AfterValidator(check_length),
]
"""Name of a stage and of its folders."""
