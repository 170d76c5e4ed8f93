"""The class of each kind of artifact, found by the entry point of the package that has it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from compress.common.requirements import is_foreign, load_entry_point

ENTRY_POINT_GROUP = "compress.artifacts"
"""Group in which packages, this one included, announce artifacts: `kind = "module:Class"`."""
LOADED: dict[str, type[Any]] = {}  # classes by kind, of the modules that were imported


def artifact_class(kind: str) -> type[Any] | None:
    """Return the class of a kind, imported if need be, or raise Unavailable; None if unknown."""
    # By name and not by an import: the formats lie above this package, in `export` and `serve`.
    if kind not in LOADED:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=kind):
            load_entry_point(entry, "artifact")
    if kind not in LOADED:  # of a package that announces a stage alone, which defines its artifact
        for entry in filter(is_foreign, entry_points(group="compress.stages")):
            load_entry_point(entry, "stage")
    return LOADED.get(kind)


def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds that were imported or are announced, in order."""
    return tuple(sorted({*LOADED, *entry_points(group=ENTRY_POINT_GROUP).names}))


def import_announced() -> None:
    """Import the modules of all kinds, with what they register besides, such as runtimes."""
    for kind in known_kinds():
        artifact_class(kind)
