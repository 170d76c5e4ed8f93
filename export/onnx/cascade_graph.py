"""Joins two ONNX graphs: rows that the first is unsure of are answered by the second, in an If."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir
import torch

from compress.common.errors import StageFailed
from compress.core.metrics.builtin import has_classes, labelled_outputs
from compress.export.onnx.graph import (
    CONVOLUTIONS,
    add_tensor,
    consumers,
    rename_values_,
    sizes,
    stored,
    values_in_order,
    weight_elements,
)
from compress.export.onnx.proto_io import LARGEST, SMALLEST_OUTSIDE

if TYPE_CHECKING:
    from compress.core.objectives.task import Task

PREFIX = "cascade_"


@dataclass(frozen=True)
class RowScore:
    """How sure a model is of each row, by its outputs: of several, the least."""

    of_outputs: tuple[tuple[int, Literal["score", "classes", "logits"]], ...]
    """Place of an output, and what it holds: the score itself, classes, or logits of yes or no."""

    @classmethod
    def of(
        cls,
        answers: Sequence[torch.Tensor],
        names: Sequence[str],
        task: Task | None,
        score: str | None,
        title: str,
    ) -> RowScore:
        """Return how to score rows with such answers; StageFailed where there is no way."""
        if score is not None:
            if score not in names or answers[names.index(score)][0].numel() != 1:
                raise StageFailed(
                    f"{title}: score: expected an output with one number a row, found {score!r}; "
                    f"outputs: {', '.join(names)}"
                )
            return cls(((names.index(score), "score"),))
        places = labelled_outputs(answers, task)
        if any(answers[i].dim() > 2 or not answers[i].is_floating_point() for i in places):
            shapes = ", ".join(f"{names[i]} {list(answers[i].shape[1:])}" for i in places)
            raise StageFailed(
                f"{title}: a margin takes one label a row, found {shapes}; name an output with "
                "one number a row as score"
            )
        kinds = ("classes" if has_classes(answers[i], task) else "logits" for i in places)
        return cls(tuple(zip(places, kinds, strict=True)))  # type: ignore[arg-type]

    def measure(self, answers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the score of each row, `(rows,)`, float32, as the graph computes it."""
        found = []
        for place, kind in self.of_outputs:
            x = answers[place].float()
            if kind == "classes":
                first, second = x.topk(2, 1).values.unbind(1)
                x = first - second
            elif kind == "logits":
                x = x.abs().reshape(len(x), -1).amin(1)
            found.append(x.reshape(-1))
        return torch.stack(found).amin(0)

    def build(self, graph: GraphBuilder, answers: Sequence[ir.Value]) -> ir.Value:
        """Return the scores, `(rows, 1)`, computed by operators of a graph."""
        found: list[ir.Value] = []
        for place, kind in self.of_outputs:
            (x,) = graph.add("Cast", [answers[place]], to=ir.DataType.FLOAT)
            if kind == "classes":
                two, _ = graph.add("TopK", [x, graph.constant([2])], outputs=2, axis=1)
                (x,) = graph.add("Sub", graph.add("Split", [two], outputs=2, axis=1, num_outputs=2))
            elif kind == "logits":
                rows = graph.add("Flatten", graph.add("Abs", [x]), axis=1)
                (x,) = graph.add("ReduceMin", [*rows, graph.constant([1])])
            else:
                (x,) = graph.add("Reshape", [x, graph.constant([-1, 1])])
            found.append(x)
        return graph.add("Min", found)[0] if len(found) > 1 else found[0]


class GraphBuilder:
    """Makes operators, which the caller adds to a graph or a branch, and constants of the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.nodes, self.count = graph, list[ir.Node](), 0

    def _name(self) -> str:
        self.count += 1
        return f"{PREFIX}{self.count}"

    def constant(self, numbers: Any, dtype: type = np.int64) -> ir.Value:
        """Store numbers in the graph; return their value."""
        return add_tensor(self.graph, self._name(), np.array(numbers, dtype))

    def add(
        self, operator: str, inputs: Sequence[ir.Value], outputs: int = 1, **attributes: Any
    ) -> Sequence[ir.Value]:
        """Make an operator; return the values that it writes."""
        node = ir.node(operator, inputs, attributes, num_outputs=outputs, name="")
        for value in node.outputs:
            value.name = self._name()
        self.nodes.append(node)
        return node.outputs

    def take(self) -> list[ir.Node]:
        """Return the operators that were added since the last call."""
        nodes, self.nodes = self.nodes, []
        return nodes


def joined(
    small: ir.Model, large: ir.Model, score: RowScore, threshold: float
) -> tuple[ir.Model, int]:
    """Return the first model, with rows of no score above a threshold answered by the second.

    Also how many weights both share, which are stored once. StageFailed where the operator sets
    differ, or one file cannot hold both.
    """
    for domain in small.opset_imports.keys() & large.opset_imports.keys():
        versions = [model.opset_imports[domain] for model in (small, large)]
        if versions[0] != versions[1]:
            raise StageFailed(
                f"the files have versions {versions[0]} and {versions[1]} of operator set "
                f"{domain or 'ai.onnx'!r}; give both exports the same opset"
            )
    if small.functions or large.functions:
        raise StageFailed("a file has local functions, which are not moved into a branch")
    graph = small.graph
    public = [str(value.name) for value in graph.outputs]
    _prefix_(small, "small_", {*public})
    _prefix_(large, "large_", {str(value.name) for value in values_in_order(large)})
    add = GraphBuilder(graph)
    answers = list(graph.outputs)
    # Each operator out here delays every answer: a quantized ResNet-20 takes 1 % longer by one.
    # Not "less or equal": what is not a number falls back.
    sure = add.add("Greater", [score.build(add, answers), add.constant(threshold, np.float32)])
    # Of no rows there is no least one, and their product is 1.
    product = add.add("ReduceProd", add.add("Cast", sure, to=ir.DataType.FLOAT), keepdims=0)
    all_sure = add.add("Cast", product, to=ir.DataType.BOOL)
    outside = add.take()

    unsure = add.add("Not", add.add("Reshape", [*sure, add.constant([-1])]))
    (rows,) = add.add("Transpose", add.add("NonZero", unsure))
    gathered = [add.add("GatherND", [x, rows])[0] for x in graph.inputs]
    inside = add.take()
    nodes, own = list(large.graph), list(large.graph.outputs)
    shared = _share_weights_(graph, large)
    for given, taken in zip(large.graph.inputs, gathered, strict=True):
        given.replace_all_uses_with(taken)
    # Not beside the first model's: ONNX Runtime (1.32) fuses convolutions with weights of their own
    # graph alone, and the branch takes twice as long.
    weights = [*large.graph.initializers.values()]
    large.graph.remove(nodes)
    large.graph.initializers.clear()
    pairs = zip(answers, own, strict=True)
    mixed = [add.add("ScatterND", [answer, rows, found])[0] for answer, found in pairs]
    nodes = [*inside, *nodes, *add.take()]
    falls_back = ir.Graph((), mixed, nodes=nodes, initializers=weights, name="else_branch")
    same = [add.add("Identity", [answer])[0] for answer in answers]
    branches = {
        "then_branch": ir.Graph((), same, nodes=add.take(), name="then_branch"),
        "else_branch": falls_back,
    }
    results = add.add("If", all_sure, outputs=len(answers), **branches)
    for name, result, answer in zip(public, results, answers, strict=True):
        result.name, result.type, result.shape = name, answer.type, answer.shape
    graph.extend([*outside, *add.take()])
    graph.outputs[:] = results
    small.ir_version = max(small.ir_version, large.ir_version)
    small.opset_imports.update(large.opset_imports)
    held = (t for g in small.graphs() for t in g.initializers.tensors())
    if sum(tensor.nbytes for tensor in held) > LARGEST:
        raise StageFailed("both models together have 2 GiB and more, expected less in one file")
    return small, shared


def _prefix_(model: ir.Model, prefix: str, names: set[str]) -> None:
    """Put a prefix before names of a model's values, in place."""
    values = [*dict.fromkeys(values_in_order(model))]
    while any(str(value.name).startswith(prefix) for value in values):
        prefix = f"_{prefix}"
    rename_values_(model, values, {name: f"{prefix}{name}" for name in names if name})


def _share_weights_(graph: ir.Graph, large: ir.Model) -> int:
    """Let a model read the weights that a graph has as well, in place; return how many numbers."""

    def key(value: ir.Value) -> tuple[Any, ...]:
        tensor = stored(value)
        if tensor is None or tensor.nbytes < SMALLEST_OUTSIDE:
            return ()
        return tensor.dtype, sizes(tensor), hashlib.sha256(tensor.tobytes()).digest()

    known, shared = {key(value): value for value in graph.initializers.values()}, 0
    counted = weight_elements(large)
    for name, value in [*large.graph.initializers.items()]:
        # A convolution is slower with weights of an outer graph (see above).
        if (found := key(value)) and found in known and not consumers(value, *CONVOLUTIONS):
            value.replace_all_uses_with(known[found])
            del large.graph.initializers[name]
            shared += counted.get(name, 0)
    return shared
