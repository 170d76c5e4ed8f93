"""How large a named axis may be, as torch.export finds it in a model's code."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.export import Dim, ExportedProgram

    from compress.core.signature import Signature

logger = logging.getLogger(__name__)

SUGGESTED = re.compile(r"^\s*(\w+) = Dim\('\w+', max=(\d+)\)\s*$", re.MULTILINE)
"""torch's own mending of an axis that, say, a table of positions bounds."""


def trace(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    signature: Signature,
    *,
    gathered: bool = False,
) -> ExportedProgram:
    """Trace a module with the signature's axes dynamic, up to the size that its code takes.

    Args:
        module: the module, in eval mode.
        inputs: example inputs.
        signature: the interface.
        gathered: whether the module takes its inputs as ``*inputs``.
    """
    import torch

    def traced(limits: dict[str, int]) -> ExportedProgram:
        shapes: Any = dynamic_shapes(signature, limits)
        shapes = {"inputs": shapes} if gathered else shapes
        return torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)

    try:
        return traced({})
    except torch._dynamo.exc.UserError as error:
        # A batch that is limited is a mistake, and is refused.
        others = set(signature.dynamic_axes) - {signature.batch_axis}
        found = SUGGESTED.findall(str(error))
        limits = {axis: int(most) for axis, most in found if axis in others}
        if not limits:
            raise
    return traced(limits)


def dynamic_shapes(
    signature: Signature, limits: dict[str, int] | None = None
) -> tuple[dict[int, Dim] | None, ...]:
    """Return the named axes of each input, in the form that torch.export and its kin take."""
    import torch

    most = limits or {}
    sizes = {name: torch.export.Dim(name, max=most.get(name)) for name in signature.dynamic_axes}
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


def limits_of(program: ExportedProgram, signature: Signature, title: str) -> dict[str, Any]:
    """Return the facts on how large axes may be, and say them aloud; none where nothing bounds.

    Args:
        program: the model's graph.
        signature: its interface.
        title: name of the stage that exports.
    """
    limits = axis_limits(program, signature)
    for axis, most in limits.items():
        logger.info("%s: the model's code takes %s of at most %d", title, axis, most)
    return {"axis_limits": limits} if limits else {}
