"""Rewrite programs, and Inductor's graph, into forms that are compiled right and to faster code."""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers dequantize_per_channel and its kin
from torch._inductor.custom_graph_pass import CustomGraphPass

from compress.export.common.macs import count_macs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
LINEAR = aten.linear.default
CHOOSE = decomposed.choose_qparams.tensor
DEQUANTIZE = (decomposed.dequantize_per_tensor.default, decomposed.dequantize_per_tensor.tensor)
DEQUANTIZE_CHANNELS = decomposed.dequantize_per_channel.default
DEQUANTIZE_ROWS = decomposed.dequantize_per_token.default
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
MOVES = {*VIEWS, aten.permute.default, aten.transpose.int, aten.unsqueeze.default}


def merge_products_(program: ExportedProgram) -> None:
    """Merge integer products that read the same input (attention's Q, K, V) into one, in place."""
    # A call of oneDNN's kernel costs about as much as the product of a short sentence.
    by_input: dict[Any, list[Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=LINEAR):
        source, weight = node.args[:2]
        # The kernel fuses an operator such as an addition that follows: such products stay alone.
        only_moved = bool(node.users) and all(reader.target in MOVES for reader in node.users)
        if (
            only_moved
            and source.target in DEQUANTIZE
            and weight.target is DEQUANTIZE_CHANNELS
            and weight.args[3] == 0
            and all(given is None or given.op == "placeholder" for given in _constants(node))
        ):
            key = (source.target, source.args, weight.args[3:], _bias(node) is None)
            by_input.setdefault(key, []).append(node)
    for products in (group for group in by_input.values() if len(group) > 1):
        _merge_(program.graph, products)
        # Parts of a product lie in memory with gaps, which a view cannot always read.
        for node in program.graph.nodes:
            if node.target in VIEWS:
                node.target = aten.reshape.default
    program.graph_module.recompile()


def widen_ranges_(program: ExportedProgram) -> None:
    """Extend every range that is found at run time to include zero, in place."""
    # PyTorch's own choose_qparams does; Inductor's decomposition does not (torch 2.11 to 2.13), and
    # is far off where all values have one sign.
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=CHOOSE):
        with graph.inserting_before(node):
            smallest = _call(graph, aten.amin.default, node.args[0])
            largest = _call(graph, aten.amax.default, node.args[0])
            least = _call(graph, aten.clamp_max.default, smallest, 0)
            most = _call(graph, aten.clamp_min.default, largest, 0)
            ends = _call(graph, aten.stack.default, [least, most])
        node.update_arg(0, ends)
    program.graph_module.recompile()


def multiply_rows_(program: ExportedProgram) -> None:
    """Multiply rows with scales of their own by integer weights with `_int_mm`, in place."""
    # Inductor has a pattern for one scale for all rows, and computes this form in floats.
    graph = program.graph
    for product in graph.find_nodes(op="call_function", target=LINEAR):
        rows, weight = product.args[:2]
        if (
            rows.target is not DEQUANTIZE_ROWS
            or weight.target is not DEQUANTIZE_CHANNELS
            or not all(n is None or n.op == "placeholder" for n in _constants(product))
        ):
            continue
        (integers, scale), bias = rows.args[:2], _bias(product)
        weight_OI, scale_O = weight.args[:2]
        with graph.inserting_before(product):
            size = integers.meta["val"].shape[-1]
            leading = [
                _call(graph, aten.sym_size.int, integers, axis)
                for axis in range(integers.meta["val"].dim() - 1)
            ]
            flat = _call(graph, aten.reshape.default, integers, [-1, size])
            weight_IO = _call(graph, aten.permute.default, weight_OI, [1, 0])
            sums = _call(graph, aten._int_mm.default, flat, weight_IO)
            outputs = weight_OI.meta["val"].shape[0]
            sums = _call(graph, aten.reshape.default, sums, [*leading, outputs])
            floats = _call(graph, aten._to_copy.default, sums)
            floats.kwargs = {"dtype": torch.float32}
            floats.meta["val"] = floats.meta["val"].to(torch.float32)
            scaled = _call(graph, aten.mul.Tensor, floats, scale)
            result = _call(graph, aten.mul.Tensor, scaled, scale_O)
            if bias is not None:
                result = _call(graph, aten.add.Tensor, result, bias)
        product.replace_all_uses_with(result)
        graph.erase_node(product)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _constants(product: Any) -> list[Any]:
    return [*product.args[1].args[:3], _bias(product)]


def _bias(product: Node) -> Any:
    return product.args[2] if len(product.args) > 2 else None


def _merge_(graph: Graph, products: Sequence[Any]) -> None:
    first = products[0]
    # Freezing computes the joined weights while it compiles.
    with graph.inserting_before(first):
        joined = [
            None if parts[0] is None else _call(graph, aten.cat.default, list(parts))
            for parts in zip(*map(_constants, products), strict=True)
        ]
        *integers, bias = joined
        weight = _call(graph, DEQUANTIZE_CHANNELS, *integers, *first.args[1].args[3:])
        merged = _call(graph, LINEAR, first.args[0], weight, bias)
        sizes = [len(product.args[1].meta["val"]) for product in products]
        split = _call(graph, aten.split_with_sizes.default, merged, sizes, -1)
        parts = [_call(graph, operator.getitem, split, i) for i in range(len(products))]
    for product, part in zip(products, parts, strict=True):
        part.meta |= {k: v for k, v in product.meta.items() if k == "nn_module_stack"}
        product.replace_all_uses_with(part)
        graph.erase_node(product)


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    node = graph.call_function(target, arguments)
    values = torch.fx.node.map_arg(arguments, lambda given: given.meta["val"])
    node.meta["val"] = target(*values)
    return node


CONVOLUTION = "onednn.qconv"
PREPACK = torch.ops.onednn.qconv_prepack.default
SHARED = ("stride", "padding", "dilation", "groups")
INTEGER_OPERATOR = re.compile(r"onednn\.q(conv|linear)|aten\._int_mm")


class PassSequence(CustomGraphPass):
    """Graph pass of Inductor: applies passes one after the other (torch 2.11 takes only one)."""

    def __init__(self, *passes: CustomGraphPass) -> None:
        """Take the passes in their order."""
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        """Apply all passes to a graph, in place."""
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> str:
        """Return the passes' key in the compiler's cache."""
        return " ".join(str(graph_pass.uuid()) for graph_pass in self.passes)


class PackForImages(CustomGraphPass):
    """Graph pass of Inductor: packs weights for one image of the traced size.

    Where the batch is dynamic, Inductor (torch 2.13) packs them for an image of no particular size.
    oneDNN's kernels that want another order then reorder the weights in each call. The order for
    one image suits any batch.
    """

    def __call__(self, graph: Graph) -> None:
        """Repack the weights of a graph, in place."""
        for node in list(graph.nodes):
            if str(node.target).startswith(CONVOLUTION) and node.target is not PREPACK:
                pack_(graph, node)

    def uuid(self) -> str:
        """Return the pass's key in the compiler's cache."""
        return f"{__name__}:1"


class IntegerShare(CustomGraphPass):
    """Graph pass of Inductor: counts the multiply-accumulates of integer operators and of all."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self.macs: Counter[bool] = Counter()

    def __deepcopy__(self, _: dict[int, Any]) -> IntegerShare:
        return self  # Inductor copies its settings, and the count would be lost

    def __call__(self, graph: Graph) -> None:
        """Count those of a graph, at the sizes that were traced."""
        for node in graph.nodes:
            if node.op == "call_function":
                self.macs[bool(INTEGER_OPERATOR.match(str(node.target)))] += count_macs(node)

    @property
    def value(self) -> float | None:
        """The integer operators' share; None where nothing is multiplied."""
        return self.macs[True] / self.macs.total() if self.macs.total() else None

    def uuid(self) -> str:
        """Return the pass's key in the compiler's cache."""
        return f"{__name__}.{type(self).__name__}:1"


def pack_(graph: Graph, convolution: Node) -> None:
    """Repack a convolution's weight for one image, in place, where its size is known."""
    schema = convolution.target._schema  # type: ignore[union-attr]  # an operator has one
    names = [argument.name for argument in schema.arguments]
    given: dict[str, Any] = dict(zip(names, convolution.args, strict=False))
    source, packed = given["qx"], given["qw"]
    sizes = source.meta["val"].shape[1:]
    owner = graph.owning_module
    if packed.op != "get_attr" or not all(isinstance(size, int) for size in sizes):
        return

    def value(name: str) -> Any:
        argument = given[name]
        is_node = isinstance(argument, torch.fx.Node)
        return getattr(owner, str(argument.target)) if is_node else argument

    weight = value("qw")
    repacked = PREPACK(
        weight.to_dense() if weight.is_mkldnn else weight,
        value("w_scale"),
        float(value("x_scale")),
        int(value("x_zero_point")),
        *(given[name] for name in SHARED),
        [1, *sizes],
    )
    name = f"{packed.target}_for_{convolution.name}"
    owner.register_buffer(name, repacked)  # type: ignore[union-attr]
    with graph.inserting_before(convolution):
        constant = graph.get_attr(name)
    constant.meta["val"] = packed.meta["val"]
    convolution.replace_input_with(packed, constant)
