"""Parts of a graph that cost time without need, and the graph without them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from compress.export.onnx.graph import consumers, producer, remove_unread_
from compress.export.onnx.kernels import CONVOLUTIONS, COUNTED, is_integer_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import onnx_ir as ir

    from compress.export.diagnosis.profile import Profile, ProfiledNode

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "ReorderInput", "ReorderOutput"}
"""Operators that change the layout of what others read."""
NORM = "BatchNormalization"
"""Which onnxruntime may compute as a convolution of single channels."""
ACTIVATIONS = {
    *("Relu", "Clip", "LeakyRelu", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "Elu"),
    *("Gelu", "QuickGelu", "Selu", "Celu", "PRelu", "Softplus", "Softsign", "Mish"),
}
"""Operators that runtimes compute within the kernel before them, where they can."""


@dataclass(frozen=True)
class FloatIsland:
    """Operators in float between integer ones, with the conversions around them."""

    nodes: tuple[ProfiledNode, ...]
    conversions: tuple[ProfiledNode, ...]

    @property
    def ms(self) -> float:
        """Time of its operators and of the conversions."""
        return sum(node.ms for node in (*self.nodes, *self.conversions))

    @property
    def modules(self) -> frozenset[str]:
        """Modules of its operators, without those that move values or convert them."""
        return frozenset(n.module for n in self.nodes if n.node.op_type not in MOVES)

    @property
    def around(self) -> frozenset[str]:
        """Modules that give it what it reads, or read what it gives."""
        nodes = (*self.nodes, *self.conversions)
        return frozenset(node.module for node in nodes) - self.modules


@dataclass
class ProfiledGraph:
    """A profiled graph whose values can be followed."""

    profile: Profile

    def __post_init__(self) -> None:
        self._profiled = {node.node: node for node in self.profile.nodes}

    def before(self, node: ProfiledNode) -> Iterator[ProfiledNode]:
        """Yield the operators whose values an operator reads."""
        sources = (producer(value) for value in node.node.inputs)
        yield from (self._profiled[s] for s in sources if s is not None and s in self._profiled)

    def after(self, node: ProfiledNode) -> Iterator[ProfiledNode]:
        """Yield the operators that read an operator's values."""
        readers = (use.node for value in node.node.outputs for use in value.uses())
        yield from (self._profiled[reader] for reader in readers if reader in self._profiled)

    @cached_property
    def integer_modules(self) -> frozenset[str]:
        """Modules whose products integer kernels compute."""
        return frozenset(
            node.module
            for node in self.profile.nodes
            if node.node.op_type in COUNTED and is_integer_kernel(node.node.op_type)
        )

    @cached_property
    def float_islands(self) -> tuple[FloatIsland, ...]:
        """All islands, of a graph with integer kernels."""
        if not self.integer_modules:
            return ()
        left = [node for node in self.profile.nodes if _is_float(node)]
        found = []
        while left:
            island = self._connected(left[0], _is_float)
            left = [node for node in left if node not in island]
            conversions: list[ProfiledNode] = []
            for node in island:
                for neighbour in (*self.before(node), *self.after(node)):
                    if neighbour.node.op_type in (QUANTIZE, DEQUANTIZE):
                        conversions += self._connected(neighbour, _is_conversion)
            if conversions:
                found.append(FloatIsland(tuple(island), tuple(dict.fromkeys(conversions))))
        return tuple(found)

    @cached_property
    def lone_pairs(self) -> tuple[ProfiledNode, ...]:
        """Roundings to integers that no integer kernel reads, and what makes floats of them."""
        found: dict[ProfiledNode, None] = {}
        for node in self.profile.nodes:
            if node.node.op_type != QUANTIZE:
                continue
            readers = self._connected(node, lambda n: n.node.op_type in MOVES, forward=True)[1:]
            last = [r for reader in (node, *readers) for r in self.after(reader)]
            ends = [r for r in last if r not in readers]
            if ends and all(r.node.op_type == DEQUANTIZE for r in ends):
                found |= dict.fromkeys((node, *readers, *ends))
        return tuple(found)

    @cached_property
    def unfused(self) -> tuple[ProfiledNode, ...]:
        """Normalisations and activations that stand behind a product which they alone read."""
        return tuple(
            node
            for node in self.profile.nodes
            if self._is_norm(node)
            or (node.node.op_type in ACTIVATIONS and any(map(self._feeds_alone, self.before(node))))
        )

    def _is_norm(self, node: ProfiledNode) -> bool:
        """Whether a kernel computes a normalisation alone, be it as a convolution."""
        if node.origin is None or node.origin.op_type != NORM:
            return False
        value = node.origin.inputs[0]
        before = producer(value, *CONVOLUTIONS)
        return before is None or value is None or len(consumers(value)) > 1

    def _feeds_alone(self, node: ProfiledNode) -> bool:
        if node.node.op_type in MOVES:
            return any(map(self._feeds_alone, self.before(node)))
        is_product = node.node.op_type in COUNTED | CONVOLUTIONS | {NORM}
        return is_product and len([*self.after(node)]) == 1

    def _connected(
        self,
        start: ProfiledNode,
        belongs: Callable[[ProfiledNode], bool],
        *,
        forward: bool = False,
    ) -> list[ProfiledNode]:
        """Return an operator and those that belong to it and are connected with it."""
        found, pending = {start: None}, [start]
        while pending:
            node = pending.pop()
            for neighbour in (*(() if forward else self.before(node)), *self.after(node)):
                if belongs(neighbour) and neighbour not in found:
                    found[neighbour] = None
                    pending.append(neighbour)
        return [*found]


def without(model: ir.Model, names: Collection[str | None]) -> ir.Model:
    """Return a model whose readers of some operators, by name, read what these read first.

    A pair of QuantizeLinear and DequantizeLinear is left out by the name of the former.
    """
    copy = model.clone()
    for node in copy.graph:
        source, value = producer(node.inputs[0]) if node.inputs else None, node.outputs[0]
        if value.is_graph_output():
            continue
        read = None
        if node.op_type == DEQUANTIZE and source is not None and source.name in names:
            read = source.inputs[0]
        elif node.name in names and node.op_type != QUANTIZE:
            read = node.inputs[0]
        if read is not None:
            value.replace_all_uses_with(read)
    remove_unread_(copy)
    return copy


def _is_float(node: ProfiledNode) -> bool:
    operator = node.node.op_type
    return node.written == "float" and operator != DEQUANTIZE and not is_integer_kernel(operator)


def _is_conversion(node: ProfiledNode) -> bool:
    return node.node.op_type in {QUANTIZE, DEQUANTIZE, *MOVES} and not _is_float(node)
