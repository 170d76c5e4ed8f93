"""Public names of a package, imported on first use: `compress --help` must not read every stage."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def imported_on_use(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``.

    Args:
        package: name of the package.
        homes: module → the public names that live in it.
    """

    def get(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
