"""Fewer operators in a decoder, of the kinds that onnxruntime 1.32 does not find while it loads.

With one token in a call each operator's own cost counts.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import helper, numpy_helper

from compress.export.onnx.graph import PACKED_MATMUL, remove_unread_

if TYPE_CHECKING:
    import onnx

ATTENTION = "GroupQueryAttention"
SKIP_NORM = "SkipSimplifiedLayerNormalization"
"""Adds to the residual stream and normalizes the sum; its fourth output is the sum."""
NORM = ("ReduceMean", "Add", "Sqrt", "Div", "Mul")
"""Operators of an RMS norm after the first, `Pow`, each of which reads the one before."""


def fuse_operators_(model: onnx.ModelProto) -> None:
    """Fuse what stands around attention and norms, in place.

    It takes the shapes that the exporter wrote, and norms that divide by a root.
    """
    fusion = _Fusion(model.graph)
    fusion.read_before_reshapes_()
    fusion.join_projections_()
    fusion.add_in_norms_()
    remove_unread_(model.graph)


class _Fusion:
    """A graph, with what makes and reads each value."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.made_by = {name: node for node in graph.node for name in node.output}
        self.shapes: dict[str, tuple[Any, ...]] = {
            value.name: tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self.shapes |= {name: tuple(tensor.dims) for name, tensor in self.tensors.items()}

    def read_before_reshapes_(self) -> None:
        """Read a value itself where it is reshaped, and then reshaped back."""
        for node in self.graph.node:
            for place, name in enumerate(node.input):
                shape, source = self.shapes.get(name), name
                while (maker := self.made_by.get(source)) and maker.op_type == "Reshape":
                    source = maker.input[0]
                    if shape and all(shape) and shape == self.shapes.get(source):
                        node.input[place] = source
        remove_unread_(self.graph)

    def join_projections_(self) -> None:
        """Compute queries, keys and values of a few bits by one product, where one is attended."""
        readers = self._readers()
        for attention in [n for n in self.graph.node if n.op_type == ATTENTION]:
            products = [self.made_by.get(name) for name in attention.input[:3]]
            parts = [p for p in products if p is not None and p.op_type == PACKED_MATMUL]
            if len(parts) < 3 or any(len(readers[p.output[0]]) > 1 for p in parts):
                continue
            sizes = [{a.name: a.i for a in p.attribute} for p in parts]
            outputs = sum(size.pop("N") for size in sizes)
            kinds = [(p.input[0], len(p.input), size) for p, size in zip(parts, sizes, strict=True)]
            if any(kind != kinds[0] for kind in kinds):
                continue
            operands = zip(*(p.input[1:] for p in parts), strict=True)
            joined = [self._concatenated(names) for names in operands]
            made = helper.make_node(
                PACKED_MATMUL,
                [parts[0].input[0], *joined],
                [f"{parts[0].output[0]}_joined"],
                domain=parts[0].domain,
                N=outputs,
                **sizes[0],
            )
            attention.input[:3] = [made.output[0], "", ""]
            # In the place of the first one: nothing else reads what it gave.
            first = min(parts, key=[*self.graph.node].index)
            first.CopyFrom(made)

    def add_in_norms_(self) -> None:
        """Let a norm add to the residual stream what it normalizes."""
        readers = self._readers()
        for power in [n for n in self.graph.node if n.op_type == "Pow"]:
            add, nodes = self.made_by.get(power.input[0]), [power]
            for kind in NORM:
                after = readers[nodes[-1].output[0]]
                if len(after) != 1 or after[0].op_type != kind:
                    break
                nodes += after
            if add is None or add.op_type != "Add" or len(nodes) <= len(NORM):
                continue
            _, mean, stabilize, _, divide, scale = nodes
            shape = self.shapes.get(add.output[0], ())
            weight = next(name for name in scale.input if name != divide.output[0])
            constants = [self._number(name) for name in (power.input[1], *stabilize.input)]
            epsilon = next((x for x in constants[1:] if x is not None), None)
            if (
                len(shape) != 3
                or any(self.shapes.get(name) != shape for name in add.input)
                or self.shapes.get(mean.output[0]) != (*shape[:2], 1)
                or divide.input[0] != add.output[0]
                or weight not in self.tensors
                or self.shapes[weight] != shape[2:]
                or constants[0] != 2
                or epsilon is None
            ):
                continue
            add.CopyFrom(
                helper.make_node(
                    SKIP_NORM,
                    [*add.input, weight],
                    [scale.output[0], "", "", add.output[0]],
                    domain="com.microsoft",
                    epsilon=epsilon,
                )
            )
            self.graph.node.remove(scale)

    def _readers(self) -> dict[str, list[onnx.NodeProto]]:
        found = defaultdict(list)
        for node in self.graph.node:
            for name in node.input:
                found[name].append(node)
        return found

    def _number(self, name: str) -> float | None:
        """Return the value of a constant of one number."""
        tensor = self.tensors.get(name)
        array = None if tensor is None else numpy_helper.to_array(tensor)
        return float(array.item()) if array is not None and array.size == 1 else None

    def _concatenated(self, names: tuple[str, ...]) -> str:
        arrays = [numpy_helper.to_array(self.tensors[name]) for name in names]
        tensor = numpy_helper.from_array(np.concatenate(arrays), f"{names[0]}_joined")
        self.graph.initializer.append(tensor)
        return str(tensor.name)
