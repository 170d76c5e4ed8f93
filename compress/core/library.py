"""What libraries do again and again in one process, done once."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@contextmanager
def replaced(owner: type | ModuleType, name: str, value: Any) -> Iterator[None]:
    """Have a library's own function be another one in a block; where there is none, do nothing.

    Args:
        owner: the class or module that holds it.
        name: its name, which other releases of the library may not have.
        value: the other one.
    """
    if name not in vars(owner):
        yield
        return
    there = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, there)


@contextmanager
def composites_listed_once() -> Iterator[None]:
    """Let torch look up its composite operators once in a block in which none is registered.

    To decompose a graph, torch 2.13 looks up all of them in each of some thirty namespaces, twice
    in an export to ONNX: a quarter of the time that a small model takes.
    """
    from torch._export import utils

    name = "_materialize_cpp_cia_ops"
    with replaced(utils, name, functools.cache(getattr(utils, name, lambda: None))):
        yield
