"""All known stages, those of this toolkit and of other packages, by their entry points."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from compress.common.requirements import announced

if TYPE_CHECKING:
    from compress.core.stage import Stage


@cache
def stages() -> dict[str, type[Stage[Any, Any]]]:
    """Return stage classes by key; Unavailable: one cannot be imported, clashes, is unannounced."""
    return announced("compress.stages", "stage", "stage")


if TYPE_CHECKING:
    AnyStage = Stage[Any, Any]
else:
    # A union that is built at run time means nothing to mypy.
    AnyStage = Annotated[reduce(or_, stages().values()), Field(discriminator="stage")]
