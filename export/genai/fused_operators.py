"""Fewer operators in a decoder, of the kinds that onnxruntime 1.32 does not find while it loads.

With one token in a call each operator's own cost counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from compress.export.onnx.graph import (
    PACKED_MATMUL,
    add_tensor,
    producer,
    remove_unread_,
    stored,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ATTENTION = "GroupQueryAttention"
SKIP_NORM = "SkipSimplifiedLayerNormalization"
"""Adds to the residual stream and normalizes the sum; its fourth output is the sum."""
NORM = ("ReduceMean", "Add", "Sqrt", "Div", "Mul")
"""Operators of an RMS norm after the first, `Pow`, each of which reads the one before."""


def fuse_operators_(model: ir.Model) -> None:
    """Fuse what stands around attention and norms, in place.

    It takes the shapes that the exporter wrote, and norms that divide by a root.
    """
    read_before_reshapes_(model)
    join_projections_(model.graph)
    add_in_norms_(model.graph)
    remove_unread_(model)


def read_before_reshapes_(model: ir.Model) -> None:
    """Read a value itself where it is reshaped, and then reshaped back."""
    for node in model.graph:
        for place, value in enumerate(node.inputs):
            source, shape = value, _shape(value)
            while (reshape := producer(source, "Reshape")) is not None:
                source = reshape.inputs[0]
                if shape and all(shape) and shape == _shape(source):
                    node.replace_input_with(place, source)
    remove_unread_(model)


def join_projections_(graph: ir.Graph) -> None:
    """Compute queries, keys and values of a few bits by one product, where one is attended."""
    for attention in [node for node in graph if node.op_type == ATTENTION]:
        parts = [p for v in attention.inputs[:3] if (p := producer(v, PACKED_MATMUL)) is not None]
        if len(parts) < 3 or any(len(part.outputs[0].uses()) > 1 for part in parts):
            continue
        sizes = [{name: a.as_int() for name, a in part.attributes.items()} for part in parts]
        outputs = sum(size.pop("N") for size in sizes)
        kinds = [(p.inputs[0], len(p.inputs), size) for p, size in zip(parts, sizes, strict=True)]
        if any(kind != kinds[0] for kind in kinds):
            continue
        operands = zip(*(part.inputs[1:] for part in parts), strict=True)
        made = ir.node(
            PACKED_MATMUL,
            [parts[0].inputs[0], *(_concatenated(graph, values) for values in operands)],
            dict(sorted({**sizes[0], "N": outputs}.items())),
            domain=parts[0].domain,
            outputs=[ir.Value(name=f"{parts[0].outputs[0].name}_joined")],
        )
        # In the place of the first one: nothing else reads what it gave.
        graph.insert_before(next(node for node in graph if node in parts), made)
        for place, value in enumerate((made.outputs[0], None, None)):
            attention.replace_input_with(place, value)


def add_in_norms_(graph: ir.Graph) -> None:
    """Let a norm add to the residual stream what it normalizes."""
    for power in [node for node in graph if node.op_type == "Pow"]:
        add, nodes = producer(power.inputs[0], "Add"), [power]
        for kind in NORM:
            after = [use.node for use in nodes[-1].outputs[0].uses()]
            if len(after) != 1 or after[0].op_type != kind:
                break
            nodes += after
        if add is None or len(nodes) <= len(NORM):
            continue
        _, mean, stabilize, _, divide, scale = nodes
        (stream,) = add.outputs
        shape = _shape(stream)
        weight = next(value for value in scale.inputs if value is not divide.outputs[0])
        constants = [_number(value) for value in (power.inputs[1], *stabilize.inputs)]
        epsilon = next((x for x in constants[1:] if x is not None), None)
        if (
            len(shape) != 3
            or any(_shape(value) != shape for value in add.inputs)
            or _shape(mean.outputs[0]) != (*shape[:2], 1)
            or divide.inputs[0] is not stream
            or stored(weight) is None
            or _shape(weight) != shape[2:]
            or constants[0] != 2
            or epsilon is None
        ):
            continue
        norm, summed = (
            ir.Value(name=value.name, type=value.type, shape=value.shape)
            for value in (scale.outputs[0], stream)
        )
        fused = ir.node(
            SKIP_NORM,
            [*add.inputs, weight],
            {"epsilon": epsilon},
            domain="com.microsoft",
            outputs=[norm, ir.Value(name=""), ir.Value(name=""), summed],
        )
        add.append(fused)
        scale.outputs[0].replace_all_uses_with(norm, replace_graph_outputs=True)
        stream.replace_all_uses_with(summed, replace_graph_outputs=True)
        graph.remove([scale, add])


def _shape(value: ir.Value | None) -> tuple[int | str | None, ...]:
    """Return a value's sizes, by name where they are not fixed; none where none is known."""
    tensor = stored(value)
    shape = tensor.shape if tensor is not None else None if value is None else value.shape
    return tuple(d if isinstance(d, int) else d.value for d in shape) if shape is not None else ()


def _number(value: ir.Value | None) -> float | None:
    """Return the value of a constant of one number."""
    tensor = stored(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


def _concatenated(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value:
    arrays = [tensor.numpy() for value in values if (tensor := stored(value)) is not None]
    name = values[0].name if values[0] is not None else ""
    return add_tensor(graph, f"{name}_joined", np.concatenate(arrays))
