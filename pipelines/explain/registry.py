"""All known causes: those of this toolkit, and those that installed packages add."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from compress.common.errors import Unavailable
from compress.common.requirements import load_entry_point
from compress.core.diagnosis.cause import ENTRY_POINT_GROUP, Cause
from compress.distillation.diagnosis.causes import DISTILLATION_CAUSES
from compress.export.diagnosis.causes import COUNTED_CAUSES, PARITY_CAUSES, SPEED_CAUSES
from compress.pruning.diagnosis.causes import PRUNING_CAUSES
from compress.quantization.diagnosis.causes import CAUSES, SETTING_CAUSES
from compress.training.diagnosis.causes import TRAINING_CAUSES

BUILT_IN: tuple[type[Cause[Any]], ...] = (
    *CAUSES,
    *SETTING_CAUSES,
    *PRUNING_CAUSES,
    *DISTILLATION_CAUSES,
    *TRAINING_CAUSES,
    *SPEED_CAUSES,
    *COUNTED_CAUSES,
    *PARITY_CAUSES,
)


@cache
def causes() -> tuple[Cause[Any], ...]:
    """Return every cause, the built-in ones first.

    Raises:
        Unavailable: an installed package announces one that cannot be imported or clashes.
    """
    known: dict[str, Cause[Any]] = {cause.key: cause() for cause in BUILT_IN}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        added = load_entry_point(entry, "cause")
        if added.key in known:
            raise Unavailable(f"cause {entry.name!r} of {entry.value}: the name is taken")
        known[added.key] = added()
    return tuple(known.values())


def causes_of(stage: str, gate: str) -> tuple[Cause[Any], ...]:
    """Return the causes that are tested on a kind of stage where a gate refused."""
    return tuple(cause for cause in causes() if stage in cause.stages and gate in cause.gates)
