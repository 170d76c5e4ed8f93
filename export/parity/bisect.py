"""Find the first layer out of tolerance, by exporting parts of the graph again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from pydantic import ValidationError
from torch import fx
from torch.export import ExportedProgram

from compress.common.errors import CompressError, StageFailed, raised_as
from compress.common.signature import OutputSpec, Signature
from compress.common.tensor_difference import largest, relative_error
from compress.graph.torch_export import trace

Tensors = tuple[torch.Tensor, ...]
Reexport: TypeAlias = Callable[[ExportedProgram, Signature, Path, Tensors], Tensors]
"""Writes a program to a file in some format, and returns the file's outputs for inputs."""


@dataclass(frozen=True)
class WrongLayer:
    """Where an exported model's values leave its source's."""

    module: str
    """Path of the user's module; empty where the graph does not say."""
    operator: str
    node: str
    """Name in the graph of torch.export."""
    error: float
    """Relative to the norm of the value."""
    verified: bool
    """Whether everything that it is computed from was found within tolerance."""

    def __str__(self) -> str:
        return f"{self.module or self.node} ({self.operator})"


@dataclass
class LayerSearch:
    """A bisection of one graph, on one input for which the export's outputs are wrong."""

    program: ExportedProgram
    signature: Signature
    inputs: Tensors
    reexport: Reexport
    scratch: Path
    limit: float
    """Largest error of a layer, relative to its norm."""
    deadline: float = math.inf
    """On the clock of :func:`time.monotonic`; no part is exported that would end later."""
    longest: float = 0.0
    """How long the export of a part has taken, at most, or is expected to."""
    exports: int = 0
    out_of_time: bool = False
    refused: bool = False
    """Whether not even the whole graph could be exported again."""
    refusal: str = ""
    """Why the last part that could not be exported was not."""
    node: fx.Node | None = None
    """The wrong layer's node, once it was found."""
    layer: WrongLayer | None = None
    module: fx.GraphModule = field(init=False)

    def __post_init__(self) -> None:
        self.module = self.program.module(check_guards=False)
        self._errors: dict[fx.Node, float] = {}

    def run(self) -> WrongLayer | None:
        """Return the first layer out of tolerance; None where no part of the graph is."""
        outputs = [n for n in self.module.graph.output_node().all_input_nodes if ancestors(n)]
        errors = {n: self._measure([n]) for n in outputs}
        self.refused = bool(self.refusal) and all(e is None for e in errors.values())
        worst = next((n for n, e in errors.items() if e and e[0] > self.limit), None)
        if worst is None:
            return None
        verified = False
        while not self.out_of_time:
            worst = self._bisect(worst)
            before = values_before(worst)
            if not before:
                verified = True
                break
            # Errors need not grow along the graph, so the layer and its inputs are measured again.
            measured = self._measure([*before, worst])
            if measured is None:
                break
            earlier = [n for n, e in zip(before, measured, strict=False) if e > self.limit]
            if not earlier:
                verified = measured[-1] > self.limit
                break
            worst = earlier[0]
        self.node = worst
        place = module_of(worst), operator_of(worst), worst.name
        self.layer = WrongLayer(*place, self._errors[worst], verified)
        return self.layer

    def _bisect(self, wrong: fx.Node) -> fx.Node:
        """Return a layer out of tolerance that leads to a wrong one, the one before it within."""
        line = ancestors(wrong)
        right = -1
        while len(line) - right > 2 and not self.out_of_time:
            middle = (right + len(line) - 1) // 2
            errors = self._measure([line[middle]])
            if errors is None:
                del line[middle]  # this part cannot be exported: cut elsewhere
            elif errors[0] > self.limit:
                del line[middle + 1 :]
            else:
                right = middle
        return line[-1]

    def _measure(self, nodes: Sequence[fx.Node]) -> list[float] | None:
        began = time.monotonic()
        self.out_of_time = self.out_of_time or began + self.longest > self.deadline
        if self.out_of_time:
            return None
        part = prefix(self.module, nodes)
        self.exports += 1
        try:
            signature = self._signature_with_outputs(len(nodes))
            errors = export_errors(part, signature, self.inputs, self.reexport, self.scratch)
        except StageFailed as error:
            self.refusal = str(error)
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        self._errors |= dict(zip(nodes, errors, strict=True))
        return errors

    def _signature_with_outputs(self, count: int) -> Signature:
        names = tuple(OutputSpec(name=f"value_of_part_{i}") for i in range(count))
        return self.signature.model_copy(update={"outputs": names})

    def export_smallest(
        self, node: fx.Node, file: Path
    ) -> tuple[fx.GraphModule, Signature, Tensors, float]:
        """Export the smallest part that shows the difference: the operator, or all up to it.

        Returns the part, its signature, the inputs that show the difference, and its error.
        """
        try:
            part, arguments = single_operator(self.module, node)
            with torch.no_grad():
                inputs = tuple(t.clone() for t in prefix(self.module, arguments)(*self.inputs))
            signature = Signature.from_examples(inputs, batch_axis=None)
            error = largest(export_errors(part, signature, inputs, self.reexport, file))
            if error > self.limit:
                return part, signature, inputs, error
        except (CompressError, ValidationError):
            pass  # it needs sizes that are not its own, or types that no signature has
        part, signature = prefix(self.module, [node]), self._signature_with_outputs(1)
        errors = export_errors(part, signature, self.inputs, self.reexport, file)
        return part, signature, self.inputs, largest(errors)


def export_errors(
    part: fx.GraphModule, signature: Signature, inputs: Tensors, reexport: Reexport, file: Path
) -> list[float]:
    """Export a part and return the error of each output, infinite where the export fails to run."""
    with torch.no_grad():
        expected = part(*inputs)
    program = retrace(part, signature)
    try:
        outputs = reexport(program, signature, file, inputs)
    except StageFailed:
        raise
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return [float("inf")] * len(expected)
    return [relative_error(a, b) for a, b in zip(expected, outputs, strict=True)]


def is_value(node: fx.Node) -> bool:
    """Whether a node is an operator whose result is one tensor."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def values_before(node: fx.Node) -> list[fx.Node]:
    """Return the nearest nodes of one tensor that a node is computed from, inputs left out."""
    values: dict[fx.Node, None] = {}
    for argument in node.all_input_nodes:
        if is_value(argument):
            values[argument] = None
        else:  # such as a split into several tensors, or a size
            values |= dict.fromkeys(values_before(argument))
    return list(values)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of one tensor that a node depends on, and itself, in execution order."""
    needed, pending = {node}, [node]
    while pending:
        new = [n for n in pending.pop().all_input_nodes if n not in needed]
        needed.update(new)
        pending += new
    return [n for n in node.graph.nodes if n in needed and is_value(n)]


def prefix(module: fx.GraphModule, ends: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a module that takes the same inputs and returns the values of some nodes."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    graph.output(tuple(copies[n] for n in ends))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph).eval()


def single_operator(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a module of one operator with its weights, and the nodes that are its inputs.

    Raise StageFailed where it takes a size, or one of several results of another.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not inputs or not all(is_value(n) or n.op == "placeholder" for n in inputs):
        raise StageFailed(f"{node.name} cannot stand alone")
    for position, argument in enumerate(inputs):
        copies[argument] = graph.placeholder(f"input_{position}")
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            copies[argument] = graph.node_copy(argument)
    graph.output((graph.node_copy(node, copies.__getitem__),))
    return fx.GraphModule(module, graph).eval(), inputs


def retrace(module: fx.GraphModule, signature: Signature) -> ExportedProgram:
    """Export a part of a graph as a program of its own; StageFailed where torch.export cannot."""
    with raised_as(StageFailed, "torch.export"), torch.no_grad():
        return trace(module, signature.example(), signature)


def module_of(node: fx.Node) -> str:
    """Return the path of the user's module that a node belongs to; empty where it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    wrapped = bool(stack) and str(stack[0][1]).endswith("FlatOutputs")
    for path, _ in reversed(stack):
        name = str(path).removeprefix("module").lstrip(".") if wrapped else str(path)
        if name and name.isascii() and "empty_nn_module" not in name:
            return name
    # A stored graph has no such names, but its weights have.
    weights = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return next((w.rpartition(".")[0] for w in weights if "." in w), "")


def operator_of(node: fx.Node) -> str:
    """Return the name of the operator that computes a node."""
    if node.all_input_nodes and "getitem" in str(node.target):
        return operator_of(node.all_input_nodes[0])
    return str(node.target)
