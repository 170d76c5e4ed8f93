"""A TorchScript module with some of its outputs alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.common.forward import OUTPUT
from export.torchscript.file_io import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence


class Chosen(nn.Module):
    """A module of which another is a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def choosing(
    module: torch.jit.ScriptModule, names: Sequence[str], answer: Any, count: int
) -> torch.jit.ScriptModule:
    """Return a module that gives a tuple of some entries of another's answer.

    It is written in TorchScript: a trace would take one path through the module alone.

    Args:
        module: the module; it becomes a part.
        names: the entries, as :func:`~compress.common.forward.match_outputs` calls them.
        answer: what the module answered once, which shows where entries are.
        count: how many tensors it takes.
    """
    places = dict(_places(answer))
    inputs = ", ".join(f"x{i}" for i in range(count))
    chosen = "".join(f"answer{places[name]}, " for name in names)
    with quiet():
        outer: Any = torch.jit.script(Chosen(module))
    outer.define(
        f"def forward(self, {inputs}):\n    answer = self.part({inputs})\n    return ({chosen})\n"
    )
    return outer  # type: ignore[no-any-return]


def _places(answer: Any, name: str = "") -> list[tuple[str, str]]:
    """Return for each tensor its name, and where it is in an answer, as source code."""
    if isinstance(answer, torch.Tensor):
        return [(name, "")]
    before = f"{name}_" if name else ""
    if hasattr(answer, "_asdict"):
        parts = [(f"{before}{key}", f".{key}", value) for key, value in answer._asdict().items()]
    elif isinstance(answer, Mapping):
        parts = [(f"{before}{key}", f"[{key!r}]", value) for key, value in answer.items()]
        parts += [(re.sub(r"\W", "_", key), *place) for key, *place in parts]
    else:
        parts = [(f"{name or OUTPUT}_{i}", f"[{i}]", value) for i, value in enumerate(answer)]
    return [(n, f"{place}{rest}") for k, place, v in parts for n, rest in _places(v, k)]
