"""TorchScript modules around others: inputs by name, some outputs, state that calls start from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.artifacts.edits.independent_calls import script_attributes, unchanged
from compress.artifacts.recipe import CallByName, IndependentCalls
from compress.common.errors import ArtifactInvalid
from compress.common.forward import OUTPUT
from compress.export.torchscript.file_io import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.artifacts.recipe import AnyEdit


class Wrapper(nn.Module):
    """A module around another one."""

    # TorchScript files hold the class's name: this one keeps their digests what they were.
    _jit_override_qualname = "__torch__.export.torchscript_outputs.Chosen"

    def __init__(self, part: nn.Module, start: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        for name, tensor in start.items():
            self.register_buffer(name, tensor)


def adapt_calls(
    module: torch.jit.ScriptModule, edits: Sequence[AnyEdit], inputs: Sequence[torch.Tensor]
) -> torch.jit.ScriptModule:
    """Return a module around another one that is called as edits of a recipe say.

    `inputs` are an example: the outputs for it show where each is.

    Raises:
        ArtifactInvalid: its state is of a type that TorchScript code cannot write.
    """
    if not edits:
        return module
    # Written in TorchScript: a trace would record one path through the module alone.
    types, start, lines = script_attributes(module), dict[str, torch.Tensor](), list[str]()
    given, returned = [f"x{i}" for i in range(len(inputs))], "answer"
    arguments = ", ".join(["self", *given])
    for edit in edits:
        if isinstance(edit, IndependentCalls):
            for name in edit.state:
                value = _source(attrgetter(name)(module), name, start)
                lines.append(f"self.part.{name} = torch.jit.annotate({types[name]}, {value})")
            given = [f"{x}.clone()" if edit.copies_inputs else x for x in given]
        elif isinstance(edit, CallByName):
            if edit.inputs:
                given = [f"{key}={x}" for key, x in zip(edit.inputs, given, strict=True)]
            if edit.outputs:
                with unchanged(module), torch.inference_mode():
                    places = dict(_places(module(*[x.clone() for x in inputs])))
                returned = f"({''.join(f'answer{places[name]}, ' for name in edit.outputs)})"
    lines += [f"answer = self.part({', '.join(given)})", f"return {returned}"]
    with quiet():
        outer: Any = torch.jit.script(Wrapper(module, start))
    outer.define("\n    ".join([f"def forward({arguments}):", *lines]) + "\n")
    return outer  # type: ignore[no-any-return]


def _source(value: Any, name: str, start: dict[str, torch.Tensor]) -> str:
    """Return TorchScript code that makes a value anew; its tensors are added to `start`."""
    if isinstance(value, torch.Tensor):
        start[f"start_{len(start)}"] = value.detach().clone()
        return f"self.{[*start][-1]}.clone()"
    if isinstance(value, float):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | complex | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = "".join(f"{_source(x, name, start)}, " for x in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, dict):
        pairs = [(_source(k, name, start), _source(x, name, start)) for k, x in value.items()]
        return f"{{{', '.join(f'{k}: {x}' for k, x in pairs)}}}"
    raise ArtifactInvalid(
        f"the TorchScript module keeps state in {name}, of type {type(value).__name__}, which no "
        "call can start anew; make the state an input and an output of forward"
    )


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
