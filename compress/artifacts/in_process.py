"""Objects of this process that have no importable name, given a reference as if they had one.

A class in a notebook cell or a function cannot be imported, neither by another process nor later. A
recipe then names ``compress.artifacts.in_process:<name>``, which resolves here and nowhere else.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid, raised_as
from compress.common.forward import copy_module

if TYPE_CHECKING:
    import torch

PREFIX = f"{__name__}:"
_objects: dict[str, Callable[..., Any]] = {}


def register(function: Callable[..., Any], name: str) -> str:
    """Return a reference (``module:callable``) by which this process finds a function."""
    # Random, so that a reference that another process has written never names another object.
    key = f"{re.sub(r'[^A-Za-z0-9]', '_', name)}_{uuid.uuid4().hex[:12]}"
    _objects[f"of_{key}" if key[0].isdigit() else key] = function
    return f"{PREFIX}{next(reversed(_objects))}"


def register_module(module: torch.nn.Module) -> str:
    """Return a reference to a factory of copies of a module; ArtifactInvalid if none are made."""
    kind = type(module)
    advice = "; put its class into a file of its own, or pass factory='module:callable'"
    with raised_as(ArtifactInvalid, f"{kind.__qualname__} cannot be copied", advice):
        original = copy_module(module)
    return register(lambda: copy_module(original), kind.__name__)


def is_in_process(reference: str) -> bool:
    """Whether a reference names an object of one process."""
    return reference.startswith(PREFIX)


def __getattr__(name: str) -> Callable[..., Any]:
    # pickle asks each imported module for any name, and expects an AttributeError.
    if not re.search(r"_[0-9a-f]{12}$", name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _objects:
        raise ArtifactInvalid(
            f"{name.rpartition('_')[0]} was given as an object in memory of another process, and "
            "can be loaded in that one alone; return it from a function in a file of its own, or "
            "write the model there with compress.export_program or compress.export_onnx"
        )
    return _objects[name]
