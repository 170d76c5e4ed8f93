"""Passes over Inductor's graph: pack weights for the image size, count what is multiplied."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from compress.export.common.macs import count_macs

if TYPE_CHECKING:
    from torch.fx import Graph, Node

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
