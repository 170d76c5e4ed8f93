"""Bounds of dynamic axes and ids: as declared, and as torch.export infers them from code."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from compress.common.counts import count
from compress.common.signature import TABLE_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.export import Dim, ExportedProgram

    from compress.common.signature import Signature

logger = logging.getLogger(__name__)

# torch.export's error where a graph is valid for some sizes of an axis only, and the bound that it
# suggests: both exist as text alone.
SOME_SIZES = re.compile(r"in the specified range (\S.* )?satisfy the generated guard")
LARGEST = re.compile(r"^ *(\w+) = Dim\('\1', (?:min=\d+, )?max=(\d+)\)$", re.MULTILINE)


def trace(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    signature: Signature,
    *,
    var_positional: str = "",
) -> ExportedProgram:
    """Trace a module with the signature's axes dynamic, up to the size that its code supports.

    A table of position embeddings, for example, bounds the length of a text and so the graph's
    axis. `var_positional` is the name of the parameter ``*inputs``, where ``forward`` takes its
    inputs so.
    """
    import torch

    from compress.graph.rnn import any_sequence_length

    def export(limits: dict[str, int], *, checks: bool = False) -> ExportedProgram:
        shapes: Any = dynamic_shapes(signature, limits)
        count("traces")
        return torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes={var_positional: shapes} if var_positional else shapes,
            prefer_deferred_runtime_asserts_over_guards=checks,
        )

    with any_sequence_length():
        try:
            return export({})
        except torch._dynamo.exc.UserError as error:
            if not SOME_SIZES.search(str(error)):
                raise
            limits = {axis: int(most) for axis, most in LARGEST.findall(str(error))}
        limits.pop(signature.batch_axis or "", None)  # no model means a bound of its batch
        # Guards such as (width - 1) // 2 + 1 != 1, which torch.export cannot solve for a range,
        # become runtime assertions.
        return export(limits, checks=True)


def dynamic_shapes(
    signature: Signature, limits: dict[str, int] | None = None
) -> tuple[dict[int, Dim] | None, ...]:
    """Return the dynamic axes of each input, as torch.export's ``dynamic_shapes``."""
    import torch

    sizes = {}
    for name in signature.dynamic_axes:
        declared = signature.bounds(name)
        bounds = [size for size in (declared.max, (limits or {}).get(name)) if size is not None]
        # torch.export assumes sizes of at least 2.
        smallest = declared.min if declared.min > 1 else None
        sizes[name] = torch.export.Dim(name, min=smallest, max=min(bounds, default=None))
    return tuple(
        {axis: sizes[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} or None
        for spec in signature.inputs
    )


def axis_limits(program: ExportedProgram, signature: Signature) -> dict[str, int]:
    """Return the largest size of each dynamic axis that is bounded, as the graph has it."""
    import torch
    from torch.utils._sympy.numbers import int_oo

    inputs = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    limits = {}
    for spec, name in zip(signature.inputs, program.graph_signature.user_inputs, strict=True):
        shape = inputs[str(name)].meta["val"].shape
        for axis, size in zip(spec.shape, shape, strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                bounds = program.range_constraints.get(size.node.expr)
                if bounds is not None and bounds.upper is not int_oo and bounds.upper < 2**31:
                    limits[axis] = int(bounds.upper)
    return limits


def input_limit_facts(program: ExportedProgram, signature: Signature, title: str) -> dict[str, Any]:
    """Return what a graph's inputs are limited to, as an artifact's facts.

    These are the largest sizes of axes, of which the undeclared are logged as the stage `title`,
    and the rows of the tables that ids look up.
    """
    limits = axis_limits(program, signature)
    for axis, largest in limits.items():
        if largest != signature.bounds(axis).max:
            logger.info("%s: the model's code takes %s of at most %d", title, axis, largest)
    facts = {"axis_limits": limits, TABLE_ROWS: _rows_looked_up(program, signature)}
    return {name: found for name, found in facts.items() if found}


def _rows_looked_up(program: ExportedProgram, signature: Signature) -> dict[str, int]:
    """Return the rows of the embedding table that each input of ids looks up, where one does."""
    import torch

    aten = torch.ops.aten
    same_numbers = (
        *(aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default),
        *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
        *(aten._assert_tensor_metadata.default, aten.flatten.using_ints),
    )
    inputs = dict(zip(program.graph_signature.user_inputs, signature.inputs, strict=True))
    rows: dict[str, int] = {}
    for node in program.graph.find_nodes(op="call_function", target=aten.embedding.default):
        table, ids = node.args[:2]
        while ids.op == "call_function" and ids.target in same_numbers:
            ids = ids.args[0]
        if ids.name in inputs:
            name, count = inputs[ids.name].name, int(table.meta["val"].shape[0])
            rows[name] = min(rows.get(name, count), count)
    return rows
