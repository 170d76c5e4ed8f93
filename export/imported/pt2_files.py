"""Imports `torch.export` files as programs that take tensors by position.

A program is called as it was traced: with positional and keyword tensors, tensors in lists and
mappings, and constants. Stages call a model with tensors in the signature's order. Where that is
another call, or only some of its outputs are wanted, it is traced again.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from compress.common.errors import ArtifactInvalid, CompressError
from compress.common.signature import AxisBounds, Signature, TensorSpec

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.artifacts.graph_model import GraphModel


class PositionalProgram(nn.Module):
    """A program that takes tensors by position."""

    def __init__(self, program: ExportedProgram, order: Sequence[int]) -> None:
        """Wrap a program; `order` gives for each of its tensors the position among the inputs."""
        super().__init__()
        self.program = program.module()
        self.call = program.call_spec.in_spec
        self.constants = {
            i: a.value for i, a in enumerate(_arguments(program)) if isinstance(a, ConstantArgument)
        }
        self.order = tuple(order)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module alone: programs have none."""
        self.training = mode
        return self

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the program's outputs."""
        if len(inputs) != len(self.order):
            raise TypeError(f"the program takes {len(self.order)} tensors, found {len(inputs)}")
        tensors = iter([inputs[i] for i in self.order])
        count = len(self.order) + len(self.constants)
        given = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        arguments, keywords = pytree.tree_unflatten(given, self.call)
        return self.program(*arguments, **keywords)


def import_program(
    file: Path,
    signature: Signature,
    path: Path,
    inputs: Sequence[torch.Tensor] | None,
    carried: Mapping[str, bytes] | None,
) -> GraphModel:
    """Import a program to take the signature's tensors in order, traced again where it does not."""
    from compress.artifacts.graph_model import GraphModel, refuse_other_answers
    from compress.artifacts.recipe_inference import fit_call
    from compress.graph.torch_export import export_program

    program = read_program(file)
    own = [spec.name for spec in _specs(file, program)]
    names = [spec.name for spec in signature.inputs]
    # By name where these are the same; else the declared names are new ones, in the file's order.
    order = [names.index(n) for n in own] if set(names) == set(own) else list(range(len(own)))
    ordered = [signature.inputs[i] for i in order[: len(names)]]
    bounds = {**_bounds(ordered, program, signature.batch_axis), **signature.axes}
    signature = signature.model_copy(update={"axes": bounds})
    module = PositionalProgram(program, order).eval()
    inputs = inputs or signature.example()
    edits, signature = fit_call(module, signature, inputs, str(file))
    positional, keywords = program.call_spec.in_spec.children()
    by_position = not (keywords.children() or module.constants) and all(
        child.is_leaf() for child in positional.children()
    )
    if edits or order != sorted(order) or not by_position:
        for edit in edits:
            edit.apply_(module)
        program = export_program(module, signature)
        refuse_other_answers(module, program, signature)
    if state := signature.state:
        stored = tuple(name.removeprefix("program.") for name in state.names)
        state = state.model_copy(update={"names": stored})
        signature = signature.model_copy(update={"state": state})
    return GraphModel.create(path, program, signature, carried=carried)


def signature_of_program(file: Path) -> Signature:
    """Read the inputs of a program, also those that it takes by keyword."""
    return Signature(inputs=tuple(_specs(file, read_program(file))))


def read_program(file: Path) -> ExportedProgram:
    """Read a program, without its pickled example inputs and its guards, which are source code."""
    from torch.export.pt2_archive import PT2ArchiveReader

    from compress.checkpoint.file_kinds import PROGRAM, unreadable
    from compress.checkpoint.safe_zip import refuse_bomb
    from compress.graph.torch_export import copy_plain_records, load_program

    refuse_bomb(file)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / file.name
        try:
            copy_plain_records(PT2ArchiveReader(io.BytesIO(file.read_bytes())), plain)
            return load_program(plain)
        except CompressError as error:
            raise type(error)(str(error).replace(str(plain), str(file))) from error
        except Exception as error:
            raise unreadable(file, PROGRAM, error) from error


def _arguments(program: ExportedProgram) -> list[Any]:
    """Return the arguments that a program was traced with, tensors and constants, in order."""
    specs = program.graph_signature.input_specs
    return [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]


def _specs(file: Path, program: ExportedProgram) -> Iterator[TensorSpec]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    axes: dict[str, str] = {}
    for argument in _arguments(program):
        if isinstance(argument, ConstantArgument):
            continue
        name, value = argument.name, values.get(argument.name)
        if not isinstance(value, torch.Tensor):
            raise ArtifactInvalid(f"{file}: input {name!r} is not a tensor")
        shape = [
            d if isinstance(d, int) else axes.setdefault(str(d), f"{name}_{i}" if i else "batch")
            for i, d in enumerate(value.shape)
        ]
        dtype = str(value.dtype).removeprefix("torch.")
        yield TensorSpec.model_validate({"name": name, "shape": shape, "dtype": dtype})


def _bounds(
    inputs: Sequence[TensorSpec], program: ExportedProgram, batch_axis: str | None
) -> dict[str, AxisBounds]:
    """Return the sizes that a program takes of the inputs' named axes, where not any."""
    from torch.utils._sympy.numbers import int_oo

    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    tensors = [values[a.name] for a in _arguments(program) if not isinstance(a, ConstantArgument)]
    found = {}
    for spec, value in zip(inputs, tensors, strict=False):
        for axis, size in zip(spec.shape, value.shape, strict=False):
            if isinstance(axis, int) or isinstance(size, int) or axis == batch_axis:
                continue
            allowed = program.range_constraints.get(size.node.expr)
            least = 1 if allowed is None else max(1, int(allowed.lower))
            upper = int_oo if allowed is None else allowed.upper
            most = int(upper) if upper is not int_oo and upper < 2**31 else None
            # torch.export specializes on sizes 0 and 1, so that its own lower bound is 2.
            if least > 2 or most is not None:
                found[axis] = AxisBounds(min=least, max=most)
    return found
