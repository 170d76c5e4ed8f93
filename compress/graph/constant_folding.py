"""Make a graph quicker to run, with the same values.

What depends on weights alone is computed once, and numbers are rounded to integers and read back in
one step.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from torch import fx

MAX_BYTES = 2**30
aten = torch.ops.aten
QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default


def fold_constants_(graph: fx.GraphModule, max_bytes: int = MAX_BYTES) -> None:
    """Replace values that depend on weights alone, such as dequantized ones, in place.

    Once they take `max_bytes`, the rest is left as it is: computed at each run. So is what an
    operator writes to in place: folded, it would start from what the run before has left there.
    Steps on the way, such as unpacked integers, are freed once they are read.
    """
    values: dict[fx.Node, Any] = {}
    written = _written_to(graph.graph)
    size = 0
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            values[node] = attrgetter(node.target)(graph)
        elif (
            _is_function(node)
            and node not in written
            and values.keys() >= {*node.all_input_nodes}
            and size < max_bytes
        ):
            arguments = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*arguments[0], **arguments[1])
            size += _bytes(values[node])
            for step in node.all_input_nodes:
                if step.op != "get_attr" and values.keys() >= step.users.keys():
                    size -= _bytes(values[step])
                    values[step] = None
    for node, value in values.items():
        is_read = any(user not in values for user in node.users)
        if node.op == "get_attr" or not is_read or not isinstance(value, torch.Tensor):
            continue
        name = f"folded_{node.name}"
        graph.register_buffer(name, value, persistent=False)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = node.meta
        node.replace_all_uses_with(constant)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def fuse_rounding_(graph: fx.GraphModule) -> None:
    """Let one function round activations and read the integers back, in place.

    Torch's own two make a tensor for each of their eight steps, which was most of the time of an
    int8 network in PyTorch. Values are the same, bit by bit.
    """
    written = _written_to(graph.graph)
    for quantize in graph.graph.find_nodes(op="call_function", target=QUANTIZE):
        readers = list(quantize.users)
        # Readers of one tensor would see what another one has written to it.
        if not readers or not written.isdisjoint(readers):
            continue
        if any(n.target is not DEQUANTIZE or n.kwargs for n in readers):
            continue
        if any(n.args[1:] != quantize.args[1:] for n in readers):
            continue
        with graph.graph.inserting_before(quantize):
            rounded = graph.graph.call_function(round_to_step, quantize.args[:5])
        rounded.meta = readers[-1].meta
        for reader in readers:
            reader.replace_all_uses_with(rounded)
    graph.graph.eliminate_dead_code()
    _work_in_place_(graph.graph)
    graph.recompile()


def _work_in_place_(graph: fx.Graph) -> None:
    """Let functions of each number write it back where nothing else reads the tensor."""
    new = set[fx.Node]()  # nodes whose tensor shares no memory with that of another reader
    for node in graph.nodes:
        if node.target not in NEW_TENSORS:
            continue
        new.add(node)
        sources = node.all_input_nodes
        if (
            node.target in IN_PLACE
            and len(sources) == 1
            and new.issuperset(sources)
            and [*sources[0].users] == [node]
            and getattr(sources[0].meta.get("val"), "dtype", None) is torch.float32
        ):
            node.target = IN_PLACE[node.target]


def round_to_step(
    x: torch.Tensor, scale: float, zero_point: int, least: int, most: int
) -> torch.Tensor:
    """Return float32 numbers as integers of these limits would have them, scaled back."""
    return _rounded_(x.to(torch.float32) * (1.0 / scale), scale, zero_point, least, most)


def round_to_step_(
    x: torch.Tensor, scale: float, zero_point: int, least: int, most: int
) -> torch.Tensor:
    """Round float32 numbers as :func:`round_to_step` does, in place."""
    return _rounded_(x.mul_(1.0 / scale), scale, zero_point, least, most)


def _rounded_(
    steps: torch.Tensor, scale: float, zero_point: int, least: int, most: int
) -> torch.Tensor:
    # As many steps from zero as the integer is from its zero point, without adding that first.
    steps.round_().clamp_(least - zero_point, most - zero_point)
    if steps.sum().isnan():  # a pass less than replacing what is seldom there
        steps.nan_to_num_(-zero_point)  # a NaN is 0 as an integer of 8 bits
    # Zero plus them: a number that is rounded to zero from below is no zero with a sign.
    return torch.add(steps.new_zeros(()), steps, alpha=scale, out=steps)


IN_PLACE: dict[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.clamp.default: aten.clamp_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    round_to_step: round_to_step_,
}
NEW_TENSORS = {
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.linear.default),
    *(aten.add.Tensor, *IN_PLACE),
}
"""Functions whose result is a tensor of its own."""


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _written_to(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are changed in place, and all that these are made from."""
    written, found = set[fx.Node](), list[fx.Node]()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            for value, argument in zip(node.args, schema.arguments, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                found += [value] if is_written and isinstance(value, fx.Node) else []
    while found:  # they may be views of what they are made from
        if (node := found.pop()) not in written:
            written.add(node)
            found += node.all_input_nodes
    return written


def _is_function(node: fx.Node) -> bool:
    """Whether a node returns the same for the same inputs, of which it has at least one."""
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and bool(node.all_input_nodes)
        and schema is not None
        and not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
    )
