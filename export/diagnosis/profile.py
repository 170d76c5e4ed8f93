"""Where the time of a call goes: onnxruntime's own profile of a file, by the user's modules.

Exporters shorten names, and stored graphs have no modules. The layers with weights come in the same
order in every file that is made from a model, so a plain export of the float model names them.
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.export.latency.resizing import weighted_layers
from compress.export.onnx.graph import (
    BLOCKED_BATCH_NORM,
    CONVOLUTIONS,
    HEAVY_KERNELS,
    KERNEL_TIME,
    PACKED_GATHER,
    inputs_of,
    is_batch_norm,
    is_integer_kernel,
    is_kernel_call,
    kernel_macs,
    producer,
    remove_unread_,
    sizes,
    stored,
)
from compress.export.onnx.lowering import translate
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import exact_session
from compress.export.onnx.stage import OnnxModel

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from compress.artifacts.artifact import Artifact

TABLES = {"Gather", PACKED_GATHER}
SCOPES = "pkg.torch.onnx.name_scopes"
"""Property that torch's exporter gives each operator: names of its modules, as a list's text."""
SEPARATOR = "@"  # between a module's name and the rest of an operator's or a value's name
CALLS, WARM_UP = 60, 10  # profiled calls, and those before them that are not counted
SHORTEST_SHARE = 0.75
"""Share of an operator's calls, the shortest ones, of which the mean is taken: other load on the
machine only ever makes a call longer."""
IN_BLOCKS = ("_nchwc", BLOCKED_BATCH_NORM)
"""What onnxruntime adds to a value's name for the kernel that computes it in blocks of channels."""
CUT_OFF_MS = 0.5e-3  # onnxruntime writes whole microseconds, cut off
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "ReorderInput", "ReorderOutput"}
"""Operators that change the layout of what others read."""
NORM = "BatchNormalization"  # which onnxruntime may compute as a convolution of single channels
ACTIVATIONS = {
    *("Relu", "Clip", "LeakyRelu", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "Elu"),
    *("Gelu", "QuickGelu", "Selu", "Celu", "PRelu", "Softplus", "Softsign", "Mish"),
}
"""Operators that runtimes compute within the kernel before them, where they can."""


def plain_export(source: EagerModel | GraphModel) -> tuple[ir.Model, list[str]]:
    """Return a float model as ONNX, and the modules of its layers with weights and its tables."""
    model, _ = translate(source, None, "compress explain")
    modules = set()
    if isinstance(source, EagerModel):
        modules = {name for name, _ in source.load().named_modules()}
    return model, [_module_of_layer(node, modules) for node in layers_of(model)]


def as_onnx(artifact: Artifact) -> ir.Model:
    """Return an ONNX file's model, or the plain export of a model that is run by PyTorch."""
    if isinstance(artifact, OnnxModel):
        return read(artifact.payload_path, weights=True)
    if isinstance(artifact, EagerModel | GraphModel):
        return translate(artifact, None, "compress explain")[0]
    raise StageFailed(f"{artifact.kind} files are not taken apart; expected an ONNX file")


def layers_of(model: ir.Model) -> list[ir.Node]:
    """Return the layers with weights, in graph order, and then the lookups in tables."""
    return [*weighted_layers(model), *tables_of(model)]


def tables_of(model: ir.Model) -> list[ir.Node]:
    """Return the lookups in stored tables, in graph order; scales of a table's rows are none."""
    lookups = [(node, stored(node.inputs[0])) for node in model.graph if node.op_type in TABLES]
    return [n for n, table in lookups if table and len(s := sizes(table)) == 2 and s[1] > 1]


def fitting_names(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Return the modules of a file's layers; by place and operator where it has more or fewer."""
    layers = layers_of(model)
    if len(layers) == len(names):
        return [*names]
    return [f"layer {place} ({node.op_type})" for place, node in enumerate(layers)]


def modules_by_node(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Return the module of each operator, of :func:`plain_export`'s names.

    One without weights belongs to the layer before it; what stands before all, to its first reader.
    """
    of_layer = dict(zip(layers_of(model), fitting_names(model, names), strict=True))
    by_value: dict[ir.Value, str] = {}
    found: dict[ir.Node, str] = {}
    for node in model.graph:
        before = (by_value[value] for value in inputs_of(node) if by_value.get(value))
        found[node] = of_layer.get(node) or next(before, "")
        by_value |= dict.fromkeys(node.outputs, found[node])
    for node in reversed(model.graph):
        if not found[node]:
            found[node] = next((by_value[v] for v in node.outputs if by_value.get(v)), "")
        for value in inputs_of(node):
            by_value[value] = by_value.get(value) or found[node]
    return [*found.values()]


def _module_of_layer(node: ir.Node, modules: set[str]) -> str:
    for value in inputs_of(node):
        module = str(value.name).rpartition(".")[0]
        if module and (not modules or module in modules):
            return module
    scopes = node.metadata_props.get(SCOPES, "[]")
    inner = [name for name in ast.literal_eval(scopes)[:-1] if name]
    return str(inner[-1] if inner else node.op_type)


@dataclass(frozen=True, eq=False)
class ProfiledNode:
    """An operator that onnxruntime ran."""

    node: ir.Node
    """Of the model as onnxruntime rewrote it."""
    origin: ir.Node | None
    """The file's operator that it has its name of; None where it was put in."""
    module: str
    ms: float
    """Of one call."""
    written: str
    """Type of what it writes, as onnxruntime calls it: `float`, `uint8` …; empty without one."""
    written_bytes: int
    """What it writes in one call."""
    macs: int
    in_integers: bool


@dataclass(frozen=True)
class FloatIsland:
    """Operators in float between integer ones, with the conversions around them."""

    nodes: tuple[ProfiledNode, ...]
    conversions: tuple[ProfiledNode, ...]

    @property
    def modules(self) -> frozenset[str]:
        """Modules of its operators, without those that move values or convert them."""
        return frozenset(n.module for n in self.nodes if n.node.op_type not in MOVES)

    @property
    def around(self) -> frozenset[str]:
        """Modules that give it what it reads, or read what it gives."""
        nodes = (*self.nodes, *self.conversions)
        return frozenset(node.module for node in nodes) - self.modules


@dataclass(frozen=True)
class Profile:
    """The operators of one call, in the order in which they ran."""

    model: ir.Model
    """The file's model, with names that begin with modules."""
    optimized: ir.Model
    """As onnxruntime rewrote it; without the weights."""
    nodes: tuple[ProfiledNode, ...]

    @classmethod
    def measure(
        cls, model: ir.Model, names: Sequence[str], inputs: Sequence[torch.Tensor], threads: int
    ) -> Self:
        """Profile a model, with its layers' names in the order of :func:`layers_of`."""
        # Names begin with modules: onnxruntime names what it fuses after what it was made of.
        named, modules = model.clone(), modules_by_node(model, names)
        for number, (node, module) in enumerate(zip(named.graph, modules, strict=True)):
            node.name = f"{module}{SEPARATOR}{number}"
            for value in node.outputs:
                if value.name and not value.is_graph_output():
                    value.name = f"{module}{SEPARATOR}{value.name}"
        with TemporaryDirectory(prefix="compress-profile-") as folder:
            file, optimized = Path(folder) / "model.onnx", Path(folder) / "optimized.onnx"
            write(named, file)
            session = exact_session(file, threads, optimized, profiled=True)
            feed = {
                value.name: x.detach().cpu().numpy()
                for value, x in zip(session.get_inputs(), inputs, strict=True)
            }
            for _ in range(WARM_UP + CALLS):
                session.run(None, feed)
            events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
            rewritten = read(optimized)
        calls = defaultdict[str, list[dict[str, Any]]](list)
        for event in filter(is_kernel_call, events):
            calls[event["name"].removesuffix(KERNEL_TIME)].append(event)
        origins = {key: n for n in named.graph for key in (*(v.name for v in n.outputs), n.name)}
        nodes = []
        for node in rewritten.graph:
            if not (own := calls.get(name := str(node.name))):
                continue
            ms = sorted(1e-3 * event["dur"] + CUT_OFF_MS for event in own[WARM_UP:])
            arguments = own[-1]["args"]
            types = [kind for value in arguments["output_type_shape"] for kind in value]
            written = (types[0] if types else "", int(arguments.get("output_size", 0)))
            names_in_file = (name, *(name.removesuffix(ending) for ending in IN_BLOCKS))
            origin = next((origins[key] for key in names_in_file if key in origins), None)
            shortest = fmean(ms[: max(1, int(SHORTEST_SHARE * len(ms)))])
            macs = kernel_macs(node, arguments)
            nodes.append(ProfiledNode(node, origin, _module_of(node), shortest, *written, *macs))
        return cls(named, rewritten, tuple(nodes))

    @cached_property
    def ms(self) -> float:
        """Time of all kernels, without what a call takes besides."""
        return sum(node.ms for node in self.nodes)

    @cached_property
    def by_module(self) -> dict[str, float]:
        """Module → milliseconds of its operators, the longest first."""
        found = defaultdict[str, float](float)
        for node in self.nodes:
            found[node.module] += node.ms
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of a call."""
        return sum(node.macs for node in self.nodes)

    @cached_property
    def float_macs(self) -> dict[str, int]:
        """Module → multiply-accumulates of a call in float kernels, the most first."""
        found = Counter[str]()
        for node in self.nodes:
            found[node.module] += 0 if node.in_integers else node.macs
        return dict(found.most_common())

    @property
    def float_share(self) -> float:
        """Share of the multiply-accumulates that float kernels do."""
        return sum(self.float_macs.values()) / self.macs if self.macs else 0.0

    @cached_property
    def _profiled(self) -> dict[ir.Node, ProfiledNode]:
        return {node.node: node for node in self.nodes}

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
            for node in self.nodes
            if node.node.op_type in HEAVY_KERNELS and is_integer_kernel(node.node.op_type)
        )

    @cached_property
    def float_islands(self) -> tuple[FloatIsland, ...]:
        """All islands, of a graph with integer kernels."""
        if not self.integer_modules:
            return ()
        left = [node for node in self.nodes if _is_float(node)]
        found = []
        while left:
            island = self._connected(left[0], _is_float)
            left = [node for node in left if node not in island]
            conversions = [
                conversion
                for node in island
                for neighbour in (*self.before(node), *self.after(node))
                if neighbour.node.op_type in (QUANTIZE, DEQUANTIZE)
                for conversion in self._connected(neighbour, _is_conversion)
            ]
            if conversions:
                found.append(FloatIsland(tuple(island), tuple(dict.fromkeys(conversions))))
        return tuple(found)

    @cached_property
    def lone_pairs(self) -> tuple[ProfiledNode, ...]:
        """Roundings to integers that no integer kernel reads, and what makes floats of them."""
        found: dict[ProfiledNode, None] = {}
        for node in self.nodes:
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
            for node in self.nodes
            if node.node.op_type == NORM
            or is_batch_norm(node.node)
            or (node.node.op_type in ACTIVATIONS and any(map(self._feeds_alone, self.before(node))))
        )

    def _feeds_alone(self, node: ProfiledNode) -> bool:
        if node.node.op_type in MOVES:
            return any(map(self._feeds_alone, self.before(node)))
        is_product = node.node.op_type in HEAVY_KERNELS | CONVOLUTIONS | {NORM}
        return is_product and len([*self.after(node)]) == 1

    def _connected(
        self, start: ProfiledNode, belongs: Callable[[ProfiledNode], bool], *, forward: bool = False
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


def _module_of(node: ir.Node) -> str:
    """Return the module in an operator's name; where it was put in, that of what it reads."""
    for name in (node.name, *(value.name for value in node.outputs)):
        if name and SEPARATOR in name:
            return name.partition(SEPARATOR)[0]
    return next(map(_module_of, node.predecessors()), "")


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
