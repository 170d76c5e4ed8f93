"""TorchScript from a torch.export graph, with torch's own quantized kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from torch import fx
from torch.fx.graph import CodeGen

from compress.common.errors import StageFailed, raised_as
from compress.export.common.runtime import UINT8_ONLY, kernel_facts
from compress.export.torchscript.file_io import quiet
from compress.graph.torch_export import reshape_views_

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
kernels = torch.ops.quantized
QUANTIZE = decomposed.quantize_per_tensor.default
DEQUANTIZE = decomposed.dequantize_per_tensor.default
DEQUANTIZE_CHANNELS = decomposed.dequantize_per_channel.default
DEQUANTIZE_AT_RUN_TIME = decomposed.dequantize_per_tensor.tensor
CONVOLUTIONS: dict[Any, tuple[Any, Any]] = {
    getattr(aten, f"conv{rank}d").default: (
        getattr(kernels, f"conv{rank}d_prepack"),
        getattr(kernels, f"conv{rank}d").new if rank > 1 else kernels.conv1d.default,
    )
    for rank in (1, 2, 3)
}
"""Convolution → the function that packs its weight and bias, and the kernel."""
PADDED = {aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding}
LINEAR = aten.linear.default
MOVES = {
    aten.max_pool2d.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
}
"""Operators that only move values, and take integers as they are."""
LIMITS = {aten.relu.default: (0.0, float("inf")), aten.relu6.default: (0.0, 6.0)}
"""Clamp → the smallest and the largest value that it lets through."""
UNLIMITED = {aten.hardtanh.default: (-1.0, 1.0), aten.clamp.default: (float("-inf"), float("inf"))}
"""Clamp to limits that it is given → the limits without them."""


@dataclass(frozen=True)
class Grid:
    """Scale and zero point of a static quantization to unsigned 8 bits."""

    scale: float
    zero_point: int

    @classmethod
    def from_node(cls, node: Any) -> Grid:
        """Return a quantize or dequantize node's grid; StageFailed where torch has no kernels."""
        _, scale, zero_point, low, high, dtype = node.args
        if (low, high, dtype) != (0, 255, torch.uint8):
            integers = f"{str(dtype).removeprefix('torch.')} from {low} to {high}"
            raise StageFailed(UINT8_ONLY.format(integers))
        return cls(float(scale), int(zero_point))

    def within(self, low: float, high: float) -> bool:
        """Whether the quantization range already enforces a clamp within half a step."""
        slack = self.scale / 2
        smallest, largest = -self.zero_point * self.scale, (255 - self.zero_point) * self.scale
        return smallest >= low - slack and largest <= high + slack


def lower_quantized_(graph: fx.GraphModule) -> None:
    """Replace quantize and dequantize, and operators between them, by torch's kernels, in place."""
    lowering = QuantizedLowering(graph)
    # Dequantize comes last: the others recognize integer operands by it.
    passes: dict[Any, Callable[[fx.Node], None]] = {
        QUANTIZE: lowering.fuse_,
        LINEAR: lowering.multiply_,
        aten.lstm.input: lowering.lower_rnn_,
        aten.gru.input: lowering.lower_rnn_,
        DEQUANTIZE: lowering.dequantize_,
    }
    for target, rewrite_ in passes.items():
        for node in [n for n in graph.graph.nodes if n.target is target]:
            rewrite_(node)
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.target is DEQUANTIZE_CHANNELS:
            lowering.dequantize_channels_(node)
        elif str(node.target).startswith("quantized_decomposed"):
            raise StageFailed(f"TorchScript has no form of {node.target}; use export_onnx")
    graph.graph.eliminate_dead_code()


class QuantizedLowering:
    """Rewrites the quantized operators of one graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.call = graph.graph.call_function
        self.inserting_before = graph.graph.inserting_before
        self.integers: dict[fx.Node, fx.Node] = {}
        """A quantize of the original graph → the node that now computes its integers."""
        self.packed = 0

    def fuse_(self, quantize: fx.Node) -> None:
        """Replace a quantize and the operator before it by one kernel, where there is one."""
        grid = Grid.from_node(quantize)
        head = _before_clamp(quantize, grid)
        with self.inserting_before(quantize):
            integers = self._fused(head, grid)
            if integers is None:
                source = quantize.args[0]
                integers = self.call(
                    aten.quantize_per_tensor.default,
                    (source, grid.scale, grid.zero_point, torch.quint8),
                )
        self.integers[quantize] = integers

    def _fused(self, head: Any, grid: Grid) -> fx.Node | None:
        if head is None:
            return None
        operands = [self._integers_of(operand) for operand in head.args[:2]]
        if head.target in MOVES and operands[0] is not None:
            same = Grid.from_node(head.args[0]) == grid
            return self.call(head.target, (operands[0], *head.args[1:])) if same else None
        if head.target is aten.add.Tensor and None not in operands and not head.kwargs:
            return self.call(kernels.add.default, (*operands, grid.scale, grid.zero_point))
        if operands and operands[0] is not None:
            packed, kernel = self._packed(head)
            if packed is not None:
                return self.call(kernel, (operands[0], packed, grid.scale, grid.zero_point))
        return None

    def _integers_of(self, operand: Any) -> fx.Node | None:
        target = getattr(operand, "target", None)
        return self.integers.get(operand.args[0]) if target is DEQUANTIZE else None

    def multiply_(self, product: Any) -> None:
        """Replace a linear layer with a float result by one integer kernel."""
        source = product.args[0]
        static = self._integers_of(source) is not None
        if not (static or source.target is DEQUANTIZE_AT_RUN_TIME):
            return
        with self.inserting_before(product):
            packed, _ = self._packed(product)
            if packed is None:
                return
            quantize = source.args[0]
            if static:
                grid = Grid.from_node(source)
                kernel = kernels.linear_with_input_q_dq_qweight_dq_output_fp32.default
                result = self.call(kernel, (quantize.args[0], grid.scale, grid.zero_point, packed))
            else:
                result = self.call(kernels.linear_dynamic.default, (quantize.args[0], packed))
        product.replace_all_uses_with(result)

    def lower_rnn_(self, node: fx.Node) -> None:
        """Replace an LSTM or GRU by torch's kernel that quantizes inputs and states in each step.

        Layers whose weights are floats, or that project their states, stay what they are.
        """
        source, states, weights, has_biases, layers, _, _, both_ways, _ = node.args
        directions = int(layers) * (2 if both_ways else 1)  # type: ignore[arg-type]  # a number
        parts: list[Any] = list(weights)  # type: ignore[arg-type]  # a list
        width = 4 if has_biases else 2
        quantized = [
            part.target is DEQUANTIZE_CHANNELS for part in parts if part.meta["val"].dim() == 2
        ]
        if len(parts) != directions * width or not all(quantized):
            return
        with self.inserting_before(node):
            cells = []
            for start in range(0, len(parts), width):  # of each layer and direction
                matrices = [self.quantized_weight(part) for part in parts[start : start + 2]]
                biases = [self.value(p).detach() for p in parts[start + 2 : start + width]] or [
                    torch.zeros(len(matrix)) for matrix in matrices
                ]
                packed = [
                    kernels.linear_prepack(w, b) for w, b in zip(matrices, biases, strict=True)
                ]
                cell = kernels.make_quantized_cell_params_dynamic(*packed, *biases, False)
                cells.append(self.constant(cell))
            arguments = (source, states, cells, True, *node.args[4:])
            if node.target is aten.lstm.input:
                options: dict[str, Any] = {"dtype": torch.qint8, "use_dynamic": True}
                result = self.call(aten.quantized_lstm.input, arguments, options)
            else:
                result = self.call(aten.quantized_gru.input, arguments)
        node.replace_all_uses_with(result)
        self.graph.graph.erase_node(node)  # it may draw random numbers, so it is never dead code

    def dequantize_(self, node: Any) -> None:
        """Replace a dequantize by the operator that TorchScript has for it."""
        with self.inserting_before(node):
            floats = self.call(aten.dequantize.self, (self.integers[node.args[0]],))
        node.replace_all_uses_with(floats)

    def dequantize_channels_(self, node: Any) -> None:
        """Compute the floats of a weight that no integer kernel reads."""
        weight, scale, zero, axis, *_ = node.args
        shape = [1] * self.value(weight).dim()
        shape[axis] = -1
        with self.inserting_before(node):
            floats = self.call(aten.to.dtype, (weight, torch.float32))
            zeros, scales = (self.call(aten.view.default, (p, shape)) for p in (zero, scale))
            centred = self.call(aten.sub.Tensor, (floats, zeros))
            scaled = self.call(aten.mul.Tensor, (centred, scales))
        node.replace_all_uses_with(scaled)

    def _packed(self, head: Any) -> tuple[fx.Node | None, Any]:
        """Return an operator's packed weight and bias, and the kernel; None where it has none."""
        arguments = _conv_arguments(head)
        if arguments is None or head.args[1].target is not DEQUANTIZE_CHANNELS:
            return None, None
        weight = self.quantized_weight(head.args[1])
        bias = self._bias(head.args[2] if len(head.args) > 2 else None)
        if head.target is LINEAR:
            return self.constant(kernels.linear_prepack(weight, bias)), kernels.linear.default
        target = getattr(aten, str(head.target).split(".")[1]).default
        prepack, kernel = CONVOLUTIONS[target]
        return self.constant(prepack(weight, bias, *arguments)), kernel

    def quantized_weight(self, node: Any) -> torch.Tensor:
        """Return a weight as the quantized tensor that torch's kernels take."""
        weight, scale, zero, axis, *_ = node.args
        return torch._make_per_channel_quantized_tensor(
            self.value(weight), self.value(scale).double(), self.value(zero).long(), axis
        )

    def _bias(self, node: Any) -> torch.Tensor | None:
        if node is None:
            return None
        if node.target is DEQUANTIZE_CHANNELS:
            integers, scale = (self.value(part) for part in node.args[:2])
            return integers.float() * scale.float()
        return self.value(node).detach()

    def constant(self, packed: Any) -> fx.Node:
        """Store packed weights in the graph module; return a node that reads them."""
        name = f"_packed_{self.packed}"
        self.packed += 1
        setattr(self.graph, name, packed)
        return self.graph.graph.create_node("get_attr", name)

    def value(self, node: Any) -> torch.Tensor:
        """Return the tensor that a get_attr node reads."""
        owner, _, name = str(node.target).rpartition(".")
        value: torch.Tensor = getattr(self.graph.get_submodule(owner), name)
        return value


def _before_clamp(quantize: Any, grid: Grid) -> fx.Node | None:
    """Return the operator whose result is quantized, skipping a clamp that the range enforces."""
    node: Any = quantize.args[0]
    limits = LIMITS.get(node.target)
    if node.target in UNLIMITED:
        given, default = (*node.args[1:], None, None), UNLIMITED[node.target]
        low, high = (float(default[i] if given[i] is None else given[i]) for i in (0, 1))
        limits = low, high
    if limits is None:
        return node if len(node.users) == 1 or node.target in MOVES else None
    if not grid.within(*limits) or len(node.users) > 1:
        return None
    head: fx.Node = node.args[0]
    return head if len(head.users) == 1 else None


def _conv_arguments(head: Any) -> tuple[Any, ...] | None:
    """Return stride, padding, dilation and groups of a convolution, one number for each axis.

    Empty for a linear layer; None where there is no kernel for it.
    """
    if head.target is LINEAR:
        return ()
    if head.target not in CONVOLUTIONS and head.target not in PADDED:
        return None
    rank = int(str(head.target).split("conv")[1][0])
    given = (*head.args[3:], *[None] * 4)[:4]
    stride, dilation = (
        [1] * rank if v is None else _per_axis(v, rank) for v in (given[0], given[2])
    )
    padding: Any = given[1]
    if isinstance(padding, str):
        kernel = head.args[1].args[0].meta["val"].shape[2:]
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if padding == "same" and any(t % 2 for t in total):
            return None
        padding = [t // 2 if padding == "same" else 0 for t in total]
    padding = [0] * rank if padding is None else _per_axis(padding, rank)
    return stride, padding, dilation, given[3] or 1


def _per_axis(values: Any, rank: int) -> list[int]:
    listed = list(values)
    return listed * rank if len(listed) == 1 else listed


HEAVY = {"conv1d", "conv2d", "conv3d", "linear", "lstm", "gru"}
"""Operators whose float kernels are counted."""


def script(program: ExportedProgram) -> tuple[torch.jit.ScriptModule, dict[str, dict[str, int]]]:
    """Return a program as TorchScript, and how many integer and float kernels it calls."""
    # Scripted and not traced, so that the sizes of named axes stay computed; and not frozen:
    # freezing would turn integer weights back into floats.
    graph = without_guards(program.module(check_guards=False))
    with quiet():
        lower_quantized_(graph)
    kernels = count_kernels(graph)
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in list(graph.named_buffers()):
        if name not in read:  # a weight that a kernel has packed
            delattr(graph, name)
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket  # scripting knows operators, not overloads
    graph.recompile()
    # The first class of a name in a process gets no number, which would make two files differ: so
    # another one is scripted first.
    first = fx.GraphModule({}, fx.symbolic_trace(torch.nn.Identity()).graph)
    with raised_as(StageFailed, "TorchScript cannot express the graph"), quiet():
        torch.jit.script(first)
        return torch.jit.script(graph.eval()), kernels


def without_guards(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program's module as operators and tensors alone, without torch.export's checks."""
    graph = module.graph
    graph.set_codegen(CodeGen())
    reshape_views_(module)  # the outputs of integer convolutions have channels last
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # checks of inputs and types
        elif node.target is aten.sym_size.int:
            node.op, node.target = "call_method", "size"
        elif node.op == "output" and len(node.args[0]) == 1:
            node.args = node.args[0]
    tensors = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = attrgetter(str(node.target))(module)
        if not isinstance(tensor, torch.Tensor):
            raise StageFailed(f"TorchScript has no form of the graph's part {node.target}")
        node.target = str(node.target).replace(".", "__")
        tensors[node.target] = tensor.detach()
    return fx.GraphModule(tensors, graph)


def count_kernels(graph: fx.GraphModule) -> dict[str, dict[str, int]]:
    """Count the integer kernels, and the heavy operators that are computed in floats."""
    operators = [n.target for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    called = [str(operator).split(".")[:2] for operator in operators]
    in_aten = [name for library, name in called if library == "aten"]
    integer = [name for library, name in called if library == "quantized"]
    integer += [name for name in in_aten if name.startswith("quantized_")]
    return kernel_facts(integer, filter(HEAVY.__contains__, in_aten))
