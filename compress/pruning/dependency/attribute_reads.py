"""Which attributes a module's forward reads: only those can matter to a cut."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator


class AttributesRead:
    """What a call reads: attributes of modules, and of what they hold, like a configuration."""

    def __init__(self) -> None:
        self._read: set[tuple[int, str]] = set()
        self._watched: dict[int, tuple[Any, type]] = {}

    def __contains__(self, place: tuple[int, str]) -> bool:
        """Whether an object's attribute was read, or may have been as nobody could watch."""
        return place in self._read or place[0] not in self._watched

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Note what is read meanwhile."""
        try:
            for part in list(module.modules()):
                for held in (part, *filter(is_configuration, vars(part).values())):
                    self._watch(held)
            yield
        finally:
            for held, original in self._watched.values():
                object.__setattr__(held, "__class__", original)

    def _watch(self, held: Any) -> None:
        original: Any = type(held)
        read = self._read

        def look_up(self: Any, name: str) -> Any:
            read.add((id(self), name))
            return original.__getattribute__(self, name)

        if id(held) not in self._watched:
            with suppress(TypeError):  # the class is final, or cannot be exchanged
                watching = type(original.__name__, (original,), {"__getattribute__": look_up})
                object.__setattr__(held, "__class__", watching)
                self._watched[id(held)] = held, original


def place_of(module: nn.Module, attribute: str) -> tuple[int, str]:
    """Return the id of the object that holds an attribute, given its dotted name, and its name."""
    *path, short = attribute.split(".")
    return id(reduce(getattr, path, module)), short


def is_configuration(value: object) -> bool:
    """Whether an object is a plain holder of attributes, like a configuration."""
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, nn.Module | torch.Tensor)
    )
