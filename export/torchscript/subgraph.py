"""Reduce a TorchScript module to some of its outputs."""

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


class Wrapper(nn.Module):
    """A module around another one."""

    # TorchScript files hold the class's name: this one keeps their digests what they were.
    _jit_override_qualname = "__torch__.export.torchscript_outputs.Chosen"

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def select_outputs(
    module: torch.jit.ScriptModule, names: Sequence[str], output: Any, inputs: int
) -> torch.jit.ScriptModule:
    """Return a module that returns a tuple of some tensors of another's output.

    They are named as :func:`~compress.common.forward.match_outputs` names them; `output`, that for
    some input, shows where they are. The module takes `inputs` tensors.
    """
    # Written in TorchScript: a trace would record one path through the module alone.
    places = dict(_places(output))
    arguments = ", ".join(f"x{i}" for i in range(inputs))
    selected = "".join(f"answer{places[name]}, " for name in names)
    with quiet():
        outer: Any = torch.jit.script(Wrapper(module))
    outer.define(
        f"def forward(self, {arguments}):\n    answer = self.part({arguments})\n"
        f"    return ({selected})\n"
    )
    return outer  # type: ignore[no-any-return]


def _places(output: Any, name: str = "") -> list[tuple[str, str]]:
    """Return for each tensor its name, and the source code that takes it from the output."""
    if isinstance(output, torch.Tensor):
        return [(name, "")]
    before = f"{name}_" if name else ""
    if hasattr(output, "_asdict"):
        parts = [(f"{before}{key}", f".{key}", value) for key, value in output._asdict().items()]
    elif isinstance(output, Mapping):
        parts = [(f"{before}{key}", f"[{key!r}]", value) for key, value in output.items()]
        parts += [(re.sub(r"\W", "_", key), *place) for key, *place in parts]
    else:
        parts = [(f"{name or OUTPUT}_{i}", f"[{i}]", value) for i, value in enumerate(output)]
    return [(n, f"{place}{rest}") for k, place, v in parts for n, rest in _places(v, k)]
