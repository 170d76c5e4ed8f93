"""OnnxModule: a PyTorch module that computes an ONNX graph, with its weights as parameters."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.nn import functional as F

from compress.graph.from_onnx import (  # noqa: F401 - each registers its operators
    control_flow,
    elementwise,
    indexing,
    integers,
    layers,
    recurrence,
    resizing,
)
from compress.graph.from_onnx.registry import OPERATORS, Node, Unsupported
from compress.graph.from_onnx.shape_tensor import (
    LARGEST,
    from_constant,
    from_numpy,
    to_sizes,
    to_tensor,
)

STANDARD = ("", "ai.onnx")


def build(graph: str) -> OnnxModule:
    """Build the module of a graph that :func:`~.reading.pack` wrote; recipes name it."""
    proto = onnx.ModelProto.FromString(zlib.decompress(base64.b64decode(graph)))
    return OnnxModule(ir.from_proto(proto))


@dataclass
class _Source:
    """Where a parameter or buffer has its numbers from."""

    initializer: str
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Gives the initializer the layer's order of rows and columns; None where it has it."""


@dataclass
class Step:
    """A node, and how it is computed: by an operator, or by a layer of the module."""

    node: Node
    call: Callable[..., Any]
    """A layer, or a `partial` of it: a copied module would go on with a closure's layer."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...] = ()
    """Values that no later step reads."""


class OnnxModule(nn.Module):
    """Computes an ONNX graph by PyTorch's operators, layers with weights by `torch.nn` modules.

    Sizes are computed in Python numbers, so that `torch.export` keeps named axes dynamic.
    Parameters have the names of their initializers, as far as PyTorch takes them.
    """

    def __init__(self, model: ir.Model) -> None:
        """Build the layers; weights are not read (:func:`~.reading.weights_of`)."""
        super().__init__()
        graph: Any = model.graph
        opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        self.sources: dict[str, _Source] = {}
        self.input_names: list[str] = [
            value.name for value in graph.inputs if value.name not in graph.initializers
        ]
        self.output_names: list[str] = [value.name for value in graph.outputs]
        self._constants: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        builder = _Builder(self, opset)
        self.steps = builder.steps_of(graph, self.output_names)

    def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the graph's outputs by name, for its inputs in their order."""
        if len(inputs) != len(self.input_names):
            names = ", ".join(self.input_names)
            raise TypeError(
                f"expected {len(self.input_names)} inputs ({names}), found {len(inputs)}"
            )
        values = dict(zip(self.input_names, inputs, strict=True))
        self._run(self.steps, values)
        return {name: to_tensor(self._value(values, name)) for name in self.output_names}

    def _value(self, values: Mapping[str, Any], name: str) -> Any:
        if name in values:
            return values[name]
        if name in self._constants:
            return self._constants[name]
        owner, _, key = self._owners[name].rpartition(".")
        return getattr(self.get_submodule(owner), key)

    def _run(self, steps: Sequence[Step], values: dict[str, Any]) -> None:
        for step in steps:
            values.update(self.compute(step, values))
            for name in step.dead:
                values.pop(name, None)

    def compute(self, step: Step, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node's outputs by name; `values` are inputs and what nodes before computed."""
        arguments = [self._value(values, name) if name else None for name in step.inputs]
        node = step.node
        if node.graphs:
            graphs = {
                key: lambda *given, body=body: self._call(body, given, values)
                for key, body in node.graphs.items()
            }
            arguments.insert(0, replace(node, graphs=graphs))
        try:
            results = step.call(*arguments)
        except Unsupported as error:
            raise Unsupported(f"{node.operator} ({node.name}) {error}") from error
        several = results if isinstance(results, tuple) else (results,)
        return {n: v for n, v in zip(step.outputs, several, strict=False) if n}

    def _call(self, body: _Body, given: Sequence[Any], outer: Mapping[str, Any]) -> list[Any]:
        values = {**outer, **dict(zip(body.inputs, given, strict=True))}
        self._run(body.steps, values)
        return [self._value(values, name) for name in body.outputs]


@dataclass
class _Body:
    """The graph of a branch, or of a loop's step."""

    inputs: list[str]
    outputs: list[str]
    steps: list[Step] = field(default_factory=list)


class _Builder:
    """Turns the nodes of a graph into steps, and the weights that they read into layers."""

    def __init__(self, module: OnnxModule, opset: int) -> None:
        self.module = module
        self.opset = opset

    def steps_of(
        self, graph: Any, outputs: Sequence[str], outer: Mapping[str, Any] | None = None
    ) -> list[Step]:
        """Return the steps of a graph, and register its constants with the module.

        `outer` are the weights of the graphs around that of a branch or loop.
        """
        weights = dict(outer or {})
        kept = weight_names(graph)
        for name, value in graph.initializers.items():
            constant: Any = value.const_value
            held = None if name in kept else from_constant(from_numpy(constant.numpy()))
            if held is not None:
                self.module._constants[name] = held
            else:
                weights[name] = constant
        steps = [self._step(node, weights) for node in graph]
        read = {name for step in steps for name in step.inputs} | {*outputs}
        for name, constant in weights.items():
            if name not in self.module._owners and name in read:
                self._register(name, constant)
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            last.update(dict.fromkeys(step.inputs, index))
        kept = {*outputs, *graph.initializers}
        if any(step.node.graphs for step in steps):  # whose bodies may read any value
            return steps
        for name, index in last.items():
            if name not in kept:
                steps[index].dead += (name,)
        return steps

    def _step(self, node: Any, weights: Mapping[str, Any]) -> Step:
        attributes: dict[str, Any] = {}
        graphs: dict[str, Any] = {}
        for name, attribute in node.attributes.items():
            value = attribute.value
            if attribute.type.name == "GRAPH":
                names = [v.name for v in value.outputs]
                body = _Body([v.name for v in value.inputs], names)
                body.steps = self.steps_of(value, names, weights)
                graphs[name] = body
            elif attribute.type.name == "TENSOR":
                attributes[name] = from_numpy(value.numpy())
            elif attribute.type.name in ("INTS", "FLOATS", "STRINGS"):
                attributes[name] = list(value)
            else:
                attributes[name] = value
        inputs = tuple("" if v is None else v.name for v in node.inputs)
        outputs = tuple(v.name for v in node.outputs)
        plain = Node(
            node.op_type, node.name or outputs[0], inputs, outputs, self.opset, attributes, graphs
        )
        if layer := LAYERS.get(node.op_type):
            made = layer(self, plain, weights)
            if made is not None:
                call, read = made
                return Step(plain, call, read, outputs)
        function = OPERATORS[node.op_type]
        call = function if graphs else lambda *values: function(plain, *values)
        return Step(plain, call, inputs, outputs)

    def _register(self, name: str, constant: Any) -> None:
        """Keep an initializer that no layer reads as a parameter, or as a buffer of integers."""
        dtype = torch_dtype(constant)
        tensor = torch.empty(tuple(constant.shape), dtype=dtype)
        path = self._free_name(name)
        owner, _, key = path.rpartition(".")
        parent = self._parent(owner)
        if dtype.is_floating_point:
            parent.register_parameter(key, nn.Parameter(tensor))
        else:
            parent.register_buffer(key, tensor)
        self.module.sources[path] = _Source(name)
        self.module._owners[name] = path

    def add_layer(self, node: Node, layer: nn.Module, sources: Mapping[str, _Source]) -> None:
        """Add a layer under the name of its first weight, or of its node."""
        first = next((source.initializer for source in sources.values()), "")
        stem, _, key = first.rpartition(".")
        names = stem if stem and key == "weight" else node.name
        path = self._free_name(names or node.outputs[0])
        owner, _, key = path.rpartition(".")
        self._parent(owner).add_module(key, layer)
        for key, source in sources.items():
            self.module.sources[f"{path}.{key}"] = source
            if source.change is None:
                known = self.module._owners.setdefault(source.initializer, f"{path}.{key}")
                if known != f"{path}.{key}":
                    self._tie(layer, key, known)

    def _tie(self, layer: nn.Module, key: str, known: str) -> None:
        owner, _, other = known.rpartition(".")
        shared = getattr(self.module.get_submodule(owner), other)
        own = layer._parameters.get(key)  # None for a buffer, such as a mean that is also the bias
        if isinstance(shared, nn.Parameter) and own is not None and shared.shape == own.shape:
            layer.register_parameter(key, shared)

    def _parent(self, owner: str) -> nn.Module:
        parent: nn.Module = self.module
        for part in filter(None, owner.split(".")):
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]  # type: ignore[assignment]
        return parent

    def _free_name(self, name: str) -> str:
        parts = [re.sub(r"\W", "_", part) for part in name.strip("/.").split(".")]
        path = ".".join(part for part in parts if part) or "value"
        while not self._is_free(path):
            path = f"{path}_"
        return path

    def _is_free(self, path: str) -> bool:
        parent: Any = self.module
        *owners, key = path.split(".")
        for owner in owners:
            if owner not in parent._modules and hasattr(parent, owner):
                return False
            parent = parent._modules.get(owner, nn.Module())
        return not hasattr(parent, key)


def weight_names(graph: Any) -> set[str]:
    """Return the initializers that are kept with the weights, and not in the graph."""
    scales, of_layers = set[str](), set[str]()
    for node in graph:
        names = {value.name for value in node.inputs[1:] if value is not None}
        if node.op_type in ("Resize", "Upsample"):
            scales |= names
        elif node.op_type in LAYERS:
            of_layers |= names

    def is_weight(name: str, constant: Any) -> bool:
        shape = tuple(constant.shape)
        size = int(np.prod(shape))
        if constant.dtype.name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"):
            return size > 1 or (name in of_layers and bool(shape))
        return size > LARGEST or (len(shape) > 1 and size > 1)

    held = ((name, value.const_value) for name, value in graph.initializers.items())
    return {name for name, constant in held if name not in scales and is_weight(name, constant)}


def torch_dtype(constant: Any) -> torch.dtype:
    """Return PyTorch's element type of an initializer."""
    return elementwise.DTYPES[constant.dtype.value]


Made = tuple[Callable[..., Any], tuple[str, ...]]
"""How a node is computed by a layer, and the names of the values that it takes."""


def _sources(keys: Sequence[str], node: Node, weights: Mapping[str, Any]) -> dict[str, _Source]:
    """Return the sources of a layer's tensors: all of a node's inputs but the first."""
    sources = {key: _Source(name) for key, name in zip(keys, node.inputs[1:], strict=False)}
    if "bias" in sources and len(weights[sources["bias"].initializer].shape) > 1:
        sources["bias"].change = torch.flatten  # other nodes read it with its axes of size 1
    return sources


def _convolution(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    weight, bias = weights.get(node.inputs[1]), node.inputs[2] if len(node.inputs) > 2 else ""
    if weight is None or (bias and bias not in weights):
        return None
    out, per_group, *kernel = weight.shape
    n, group = len(kernel), node.get("group", 1)
    if n not in (1, 2, 3):
        return None
    pads = node.get("pads", [0] * 2 * n)
    how = node.get("auto_pad", "NOTSET")
    symmetric = how == "VALID" or (how == "NOTSET" and pads[:n] == pads[n:])
    kinds: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layer: Any = kinds[n - 1](
        per_group * group,
        out,
        tuple(kernel),
        stride=tuple(node.get("strides", [1] * n)),
        padding=tuple(layers.padding(node, (), kernel)[0]) if symmetric else 0,
        dilation=tuple(node.get("dilations", [1] * n)),
        groups=group,
        bias=bool(bias),
        dtype=torch_dtype(weight),
    )
    keys = ("weight", "bias") if bias else ("weight",)
    builder.add_layer(node, layer, _sources(keys, node, weights))
    if symmetric:
        return layer, node.inputs[:1]

    return partial(_padded_call, layer, node), node.inputs[:1]


def _padded_call(layer: Any, node: Node, x: torch.Tensor) -> torch.Tensor:
    before, after = layers.padding(node, x.shape[2:], layer.kernel_size)
    return layer(F.pad(x, layers.both_sides(before, after)))


def _linear(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    weight = weights.get(node.inputs[1])
    bias = node.inputs[2] if len(node.inputs) > 2 else ""
    if weight is None or len(weight.shape) != 2 or not torch_dtype(weight).is_floating_point:
        return None
    if node.get("alpha", 1.0) != 1 or node.get("beta", 1.0) != 1 or node.get("transA"):
        return None
    if bias and bias not in weights:
        return None
    transposed = not node.get("transB")
    rows, columns = reversed(weight.shape) if transposed else weight.shape
    sizes = tuple(weights[bias].shape) if bias else (rows,)
    if sizes[-1:] != (rows,) or math.prod(sizes) != rows:  # Gemm may add a column to each column
        return None
    layer = nn.Linear(columns, rows, bias=bool(bias), dtype=torch_dtype(weight))
    sources = _sources(("weight", "bias") if bias else ("weight",), node, weights)
    sources["weight"].change = torch.t if transposed else None
    builder.add_layer(node, layer, sources)
    return layer, node.inputs[:1]


def _norm(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    names = node.inputs[1:]
    if not names or not all(name in weights for name in names) or len(node.outputs) > 1:
        return None
    sizes, epsilon = tuple(weights[names[0]].shape), node.get("epsilon", 1e-5)
    if node.get("axis", -1) != -len(sizes) or any(tuple(weights[n].shape) != sizes for n in names):
        return None
    is_centred = node.operator == "LayerNormalization"
    options: dict[str, Any] = {"bias": len(names) > 1} if is_centred else {}
    kind: Any = nn.LayerNorm if is_centred else nn.RMSNorm
    layer = kind(sizes, epsilon, dtype=torch_dtype(weights[names[0]]), **options)
    builder.add_layer(node, layer, _sources(("weight", "bias"), node, weights))
    return layer, node.inputs[:1]


def _batch_norm(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    names = node.inputs[1:5]
    if not all(name in weights for name in names) or node.get("training_mode"):
        return None
    (channels,) = weights[names[0]].shape
    dtype = torch_dtype(weights[names[0]])
    dtype = torch.promote_types(dtype, torch.float32)  # statistics of halves are floats
    layer = _BatchNorm(channels, node.get("epsilon", 1e-5), dtype=dtype).eval()
    layer.track_running_stats = False
    keys = ("weight", "bias", "running_mean", "running_var")
    builder.add_layer(node, layer, _sources(keys, node, weights))
    return layer, node.inputs[:1]


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization of inputs with any number of axes, by the file's statistics.

    They stay in training, as ONNX has it without `training_mode`: those of other data than the file
    was trained with make another function of it, which the layers around would have to learn anew.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass

    def train(self, mode: bool = True) -> Self:
        """Change nothing."""
        return super().train(False)


class _Split(nn.Module):
    """Splits an axis into parts of constant sizes, which change where channels are removed."""

    named_sizes = ("sizes",)  # as `name_sizes_` has them: pruning counts the channels of each part

    def __init__(self, sizes: list[int], axis: int) -> None:
        super().__init__()
        self.sizes, self.axis = sizes, axis

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.split(self.sizes, self.axis)


def _split(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    given = builder.module._constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
    sizes = node.get("split") if given is None else to_sizes(given)
    if not sizes or 0 in sizes:
        return None
    layer = _Split(list(sizes), node.get("axis", 0))
    builder.add_layer(node, layer, {})
    return partial(_split_call, layer, node), node.inputs


def _split_call(layer: _Split, node: Node, x: Any, *given: Any) -> Any:
    is_tensor = isinstance(x, torch.Tensor)
    return layer(x) if is_tensor else OPERATORS[node.operator](node, x, *given)


RECURRENT: dict[str, tuple[Any, list[int]]] = {
    "LSTM": (nn.LSTM, [0, 2, 3, 1]),
    "GRU": (nn.GRU, [1, 0, 2]),
    "RNN": (nn.RNN, [0]),
}
"""Operator → PyTorch's layer, and the places of its gates in ONNX."""


def _recurrent(builder: _Builder, node: Node, weights: Mapping[str, Any]) -> Made | None:
    x, w, r, bias, lengths, hidden, cell, peepholes = (*node.inputs, *[""] * 5)[:8]
    if lengths or peepholes or any(name not in weights for name in (w, r, bias) if name):
        return None
    if node.operator == "GRU" and not node.get("linear_before_reset"):
        return None
    if not recurrence.has_default_form(node) or node.get("direction") == "reverse":
        return None
    kind, order = RECURRENT[node.operator]
    ways, rows, features = weights[w].shape
    size, dtype = rows // len(order), torch_dtype(weights[w])
    layer = kind(features, size, bias=bool(bias), bidirectional=ways == 2, dtype=dtype)
    sources: dict[str, _Source] = {}

    def part(name: str, way: int, start: int) -> _Source:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            return recurrence.reordered(tensor[way][start : start + rows], order)

        return _Source(name, change)

    for way, suffix in zip(range(ways), ("l0", "l0_reverse"), strict=False):
        sources |= {f"weight_ih_{suffix}": part(w, way, 0), f"weight_hh_{suffix}": part(r, way, 0)}
        if bias:
            sources[f"bias_ih_{suffix}"] = part(bias, way, 0)
            sources[f"bias_hh_{suffix}"] = part(bias, way, rows)
    builder.add_layer(node, layer, sources)

    return partial(_recurrent_call, layer), (x, hidden, cell)


def _recurrent_call(layer: Any, x: torch.Tensor, hidden: Any, cell: Any) -> tuple[Any, ...]:
    ways, size, is_lstm = 1 + layer.bidirectional, layer.hidden_size, isinstance(layer, nn.LSTM)
    zero = x.new_zeros(ways, x.shape[1], size)
    states = [zero if s is None else to_tensor(s) for s in (hidden, cell)]
    y, last = layer(x, tuple(states) if is_lstm else states[0])
    y = y.unsqueeze(1) if ways == 1 else y.unflatten(-1, (ways, size)).transpose(1, 2)
    return y, *(last if is_lstm else (last,))


LAYERS: dict[str, Callable[..., Made | None]] = {
    "Conv": _convolution,
    "Gemm": _linear,
    "MatMul": _linear,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _norm,
    "RMSNormalization": _norm,
    "SimplifiedLayerNormalization": _norm,
    "Split": _split,
    **dict.fromkeys(RECURRENT, _recurrent),
}
"""Operators whose weights, or sizes of parts, belong to a layer where they are constants."""
