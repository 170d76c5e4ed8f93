"""How large a named axis may be: as declared, and as torch.export finds it in a model's code."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.export import Dim, ExportedProgram

    from compress.common.signature import Signature

logger = logging.getLogger(__name__)

SOME_SIZES = re.compile(r"in the specified range (\S.* )?satisfy the generated guard")
"""What torch.export says where a graph is right for some sizes of an axis alone."""
LARGEST = re.compile(r"^ *(\w+) = Dim\('\1', (?:min=\d+, )?max=(\d+)\)$", re.MULTILINE)
"""Its own mending."""


def trace(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    signature: Signature,
    *,
    gathered: str = "",
) -> ExportedProgram:
    """Trace a module with the signature's axes dynamic, up to the size that its code takes.

    A table of positions limits the length of a text, and then the axis of the graph; a limit of the
    batch is not meant so. Guards such as ``(width - 1) // 2 + 1 != 1``, which torch.export cannot
    solve for a range, become checks in the graph.

    Args:
        module: the module, in eval mode.
        inputs: example inputs.
        signature: the interface.
        gathered: name of the parameter ``*inputs`` with which the module takes them all, if so.
    """
    import torch

    from compress.graph.rnn import any_sequence_length

    def traced(limits: dict[str, int], *, checks: bool = False) -> ExportedProgram:
        shapes: Any = dynamic_shapes(signature, limits)
        return torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes={gathered: shapes} if gathered else shapes,
            prefer_deferred_runtime_asserts_over_guards=checks,
        )

    with any_sequence_length():
        try:
            return traced({})
        except torch._dynamo.exc.UserError as error:
            if not SOME_SIZES.search(str(error)):
                raise
            limits = {axis: int(most) for axis, most in LARGEST.findall(str(error))}
        limits.pop(signature.batch_axis or "", None)
        return traced(limits, checks=True)


def dynamic_shapes(
    signature: Signature, limits: dict[str, int] | None = None
) -> tuple[dict[int, Dim] | None, ...]:
    """Return the named axes of each input, in the form that torch.export and its kin take."""
    import torch

    sizes = {}
    for name in signature.dynamic_axes:
        declared = signature.bounds(name)
        known = [most for most in (declared.max, (limits or {}).get(name)) if most is not None]
        least = declared.min if declared.min > 1 else None
        sizes[name] = torch.export.Dim(name, min=least, max=min(known, default=None))
    return tuple(
        {axis: sizes[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} or None
        for spec in signature.inputs
    )


def axis_limits(program: ExportedProgram, signature: Signature) -> dict[str, int]:
    """Return the largest size of each named axis that has one."""
    import torch
    from torch.utils._sympy.numbers import int_oo

    inputs = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    limits = {}
    for spec, name in zip(signature.inputs, program.graph_signature.user_inputs, strict=True):
        shape = inputs[str(name)].meta["val"].shape
        for axis, size in zip(spec.shape, shape, strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                found = program.range_constraints.get(size.node.expr)
                if found is not None and found.upper is not int_oo and found.upper < 2**31:
                    limits[axis] = int(found.upper)
    return limits


def axis_limit_facts(program: ExportedProgram, signature: Signature, title: str) -> dict[str, Any]:
    """Return the facts on how large axes may be, and say aloud what was not declared so.

    Args:
        program: the model's graph.
        signature: its interface.
        title: name of the stage that exports.
    """
    limits = axis_limits(program, signature)
    for axis, most in limits.items():
        if most != signature.bounds(axis).max:
            logger.info("%s: the model's code takes %s of at most %d", title, axis, most)
    return {"axis_limits": limits} if limits else {}
