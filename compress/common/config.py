"""Base class and field types of all settings: frozen pydantic models without unknown keys."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """An immutable group of settings; every field's docstring becomes its text in the schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        # A command validates few of the classes that it imports, and building one takes long.
        defer_build=True,
    )

    def refuse_settings_of_others(
        self, choice: str, takers_of: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Raise ValueError for a setting that is set and not for the chosen value of another.

        ``takers_of`` maps the setting's name to the values of ``choice`` that it is for.
        """
        chosen = getattr(self, choice)
        for name, takers in takers_of.items():
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and chosen not in takers:
                raise ValueError(f"{name} is for {choice}: {', '.join(takers)}, found {chosen}")


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
    """Return a name; raise ValueError where it is too long for a folder's."""
    size = len(name.encode())  # letters beyond ASCII have several bytes
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
