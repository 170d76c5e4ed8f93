"""Capture a module as an ATen graph, map its nodes to modules, replace its constants, run parts."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import fx
from torch._export import utils
from torch._prims_common import is_contiguous_or_false

from compress.graph.decomposition import FORMS, call, decompose_, is_composite
from compress.graph.library_cache import cached_composite_ops
from compress.graph.lifting import graph_of_program
from compress.graph.torch_export import (
    FlatOutputs,
    any_sequence_length,
    export_program,
    reshape_views_,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature
    from compress.data.batch import Batch

    Values = dict[Node, Any]

aten = torch.ops.aten
# `nn_module_stack` names classes by module and qualified name.
FLAT_OUTPUTS = f"{FlatOutputs.__module__}.{FlatOutputs.__qualname__}"
INPUT_NAME = "name in the signature"


def module_names(node: Node) -> list[str]:
    """Return the dotted names of the user's modules that a node belongs to, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    names = [path for path, _ in stack]
    if is_wrapped(node):
        names = [name.removeprefix("module").removeprefix(".") for name in names]
    return [n for n in names if n]


def module_of(node: Node) -> str:
    """Return the innermost of the user's modules of a node; empty for the model itself."""
    return (module_names(node) or [""])[-1]


def is_wrapped(node: Node) -> bool:
    """Whether the user's module was exported as the child ``module`` of `FlatOutputs`."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(kind == FLAT_OUTPUTS for _, kind in stack)


def is_excluded(node: Node, patterns: Sequence[str]) -> bool:
    """Whether a node belongs to a module that one of the patterns matches."""
    return any(fnmatchcase(m, p) for m in module_names(node) for p in patterns)


def name_layers_(graph: GraphModule) -> None:
    """Assign operators to the modules that hold their parameters, where a graph names no modules.

    Sealed programs name none; their parameters keep the names that they had in the model.
    """
    tensors = graph.graph.find_nodes(op="get_attr")
    if any(module_of(reader) for tensor in tensors for reader in tensor.users):
        return
    for tensor in tensors:
        path = str(tensor.target).split(".")[:-1]
        prefixes = [".".join(path[: i + 1]) for i in range(len(path))]
        for reader in tensor.users:
            stack = reader.meta.get("nn_module_stack") or {}
            # One entry for each call, as a module may be called several times.
            calls = {f"{prefix}@{reader.name}": (prefix, "torch.nn.Module") for prefix in prefixes}
            reader.meta["nn_module_stack"] = stack | calls


def name_inputs_(graph: GraphModule, signature: Signature) -> None:
    """Store the signature's input names in the metadata of a graph's placeholders."""
    for node, spec in zip(graph.graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
        node.meta[INPUT_NAME] = spec.name


def describe_tensor(node: Node) -> str:
    """Describe where a tensor comes from, for messages: `relu of layer1`, `input image`."""
    if node.op == "get_attr":
        return f"weight {node.target}"
    if node.op == "placeholder":
        return f"input {node.meta.get(INPUT_NAME, node.name)}"
    return f"{node.name} of {module_of(node) or 'the model'}"


def capture(module: torch.nn.Module, signature: Signature) -> GraphModule:
    """Export a module in eval mode as a graph without in-place writes; it is not changed."""
    graph = graph_of_program(functionalize(export_program(module, signature)))
    name_layers_(graph)
    return graph


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return an equal program that writes into no tensor, with ``reshape`` for every ``view``.

    The given one may be changed.
    """
    # Dequantizing a quantized tensor makes a copy: a write into a view of it would not reach the
    # other readers of the original.
    if decompose_(program, FUNCTIONAL_FORMS, _is_functional):
        program.graph.eliminate_dead_code()
    else:
        with (
            _without_treespec_warnings(),
            cached_composite_ops(),
            any_sequence_length(),
        ):
            program = program.run_decompositions({})
    reshape_views_(program.graph_module)
    return program


def _is_functional(node: Node) -> bool:
    """Whether `run_decompositions` leaves what a node calls as it is."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OperatorBase):
        return True  # Python's own, of sizes
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    keeps: Any = getattr(utils, "_is_preservable_cia_op", lambda operator: False)
    return not is_composite(target) or target is aten.reshape.default or keeps(target)


def _dropout(graph: fx.Graph, node: Node) -> Node | None:
    x, _, training = node.args
    return None if training else call(graph, aten.clone.default, (x,), node)


def _contiguous(graph: fx.Graph, node: Node) -> Node | None:
    x: Any = node.args[0]
    if len(node.args) > 1 or node.kwargs:
        return None
    if is_contiguous_or_false(x.meta["val"]):
        return x  # type: ignore[no-any-return]
    layout = torch.contiguous_format
    return call(graph, aten.clone.default, (x,), node, memory_format=layout)


FUNCTIONAL_FORMS = {
    **FORMS,
    aten.dropout.default: _dropout,
    aten.contiguous.default: _contiguous,
}


def copy_graph(graph: GraphModule, shared: Iterable[torch.Tensor] = ()) -> GraphModule:
    """Deep-copy a graph with its observers, but not its tensors in `shared`."""
    with _without_treespec_warnings():
        return deepcopy(graph, {id(tensor): tensor for tensor in shared})


@contextmanager
def _without_treespec_warnings() -> Iterator[None]:
    """Hide torch's deprecation warning about a check that its own export code makes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        yield


def value_of(graph: GraphModule, node: Node) -> torch.Tensor:
    """Return the tensor that a `get_attr` node reads."""
    owner, _, name = str(node.target).rpartition(".")
    value: torch.Tensor = getattr(graph.get_submodule(owner), name)
    return value.detach()


def replace_value_(graph: GraphModule, node: Node, value: torch.Tensor) -> None:
    """Make a `get_attr` node read another tensor; the old one, the user's, is not written to."""
    owner, _, name = str(node.target).rpartition(".")
    module = graph.get_submodule(owner)
    value = value.detach().contiguous()
    is_parameter = isinstance(getattr(module, name), torch.nn.Parameter)
    setattr(module, name, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value)


def computed(graph: GraphModule, function: Callable[..., Any], *nodes: Node) -> Node:
    """Insert the operators by which a function of tensors computes another one; return its node."""
    tracer = fx.proxy.GraphAppendingTracer(graph.graph)
    result: Node = function(*(fx.Proxy(node, tracer) for node in nodes)).node
    return result


def readers_of(graph: GraphModule, node: Node) -> list[Node]:
    """Return the users of a tensor over all `get_attr` nodes that read it."""
    same = graph.graph.find_nodes(op="get_attr", target=node.target)
    return [reader for tensor in same for reader in tensor.users]


def remove_unread_tensors_(graph: GraphModule) -> None:
    """Remove the tensors that no node reads, such as float weights that integers replaced."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)


class NodeTap(fx.Interpreter):
    """Runs a graph, and lets a function observe some of its nodes.

    `observe` is called with a node, its first input and its output, and returns the output that the
    run goes on with.
    """

    def __init__(
        self, graph: GraphModule, nodes: Iterable[Node], observe: Callable[[Node, Any, Any], Any]
    ) -> None:
        super().__init__(graph)
        self._nodes, self._observe = frozenset(nodes), observe

    def run_node(self, n: Node) -> Any:
        """Run one node, and let it be observed."""
        output = super().run_node(n)
        if n not in self._nodes:
            return output
        # The interpreter drops values after their last reader, and after this method at that.
        args, _ = self.fetch_args_kwargs_from_env(n)
        return self._observe(n, args[0] if args else None, output)


@torch.inference_mode()
def tap_activations(
    graph: GraphModule,
    batches: Iterable[Batch],
    nodes: Collection[Node],
    callback: Callable[[Node, torch.Tensor], None],
    keep_outputs: Callable[[Any], None] = lambda outputs: None,
) -> None:
    """Run batches through a graph, one at a time, and pass some of its operators to a callback.

    The callback is called with the operator and its first input; `keep_outputs` with the graph's
    outputs for each batch.
    """

    def observe(node: Node, source: Any, output: Any) -> Any:
        callback(node, source)
        return output

    tap = NodeTap(graph, nodes, observe)
    for batch in batches:
        keep_outputs(tap.run(*batch.inputs))


def sample_rows(values: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """Return a seeded choice along an axis; evenly spaced rows would all be first tokens."""
    length = values.shape[axis]
    if length <= count:
        return values.clone()
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]
    return values.index_select(axis, chosen.to(values.device))


class LayerInputs:
    """The inputs of a prepared graph's layers, while its weights are replaced one after another.

    A context manager. The graph is evaluated once: layers are asked for in graph order, and what
    later nodes read is kept until then, beyond `MEMORY` in a temporary folder, so that memory does
    not grow with the sample.
    """

    MEMORY = 2**29
    """Bytes of values that are kept in memory: writing them takes as long as a convolution."""

    def __init__(self, prepared: GraphModule, batches: Iterable[Batch]) -> None:
        """Remember the current weights as those of the float model; observers are not updated."""
        self._nodes = list(prepared.graph.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._constant: set[Node] = set()
        for node in self._nodes:
            if node.op != "placeholder" and self._constant.issuperset(node.all_input_nodes):
                self._constant.add(node)
        weights = {n.target: value_of(prepared, n) for n in self._nodes if n.op == "get_attr"}
        self._models = tuple(_Interpreter(prepared, self._constant, w) for w in (weights, None))
        self._batches = batches
        self._kept: list[Path | list[dict[int, Any]]] = []
        """Of each batch the values of both models by node, or the file that has them."""
        self._evaluated = 0  # number of nodes, in graph order, that are evaluated

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="layer-inputs-")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @torch.no_grad()
    def pairs(self, layer: Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a layer's input for each batch: the float model's, and the quantized one's.

        In the second everything before the layer is fake-quantized, with the weights that the
        layers before have now. Layers before may not be replaced afterwards.
        """
        source: Any = layer.args[0]
        self._evaluate(self._index[source] + 1)
        for i in range(len(self._kept)):
            both = zip(self._models, self._read(i), strict=True)
            in_float, quantized = (model.value(source, values) for model, values in both)
            yield in_float, quantized

    def _evaluate(self, count: int) -> None:
        if not self._kept:
            inputs = [node for node in self._nodes if node.op == "placeholder"]
            for i, batch in enumerate(self._batches):
                self._kept.append([])
                images = (to_channels_last(x, self._nodes) for x in batch.inputs)
                values = dict(zip(inputs, images, strict=True))
                self._write(i, [values, values])
        # Weights are read when they are used: the layer's own may be replaced until then.
        todo = [
            node
            for node in self._nodes[self._evaluated : count]
            if node.op != "placeholder" and node not in self._constant
        ]
        if not todo:
            return
        self._evaluated = count
        for model in self._models:
            model.constants.clear()
        for i in range(len(self._kept)):
            both = self._read(i)
            for model, values in zip(self._models, both, strict=True):
                for node in todo:
                    values[node] = model.evaluate(node, values)
            self._write(i, both)

    def _write(self, batch: int, both: list[Values]) -> None:
        """Keep the values that nodes read which are not evaluated yet."""

        def is_read(node: Node) -> bool:
            unread = any(self._index[user] >= self._evaluated for user in node.users)
            return unread and node not in self._constant

        kept = [{self._index[n]: v for n, v in vs.items() if is_read(n)} for vs in both]
        size = sum(getattr(value, "nbytes", 0) for values in kept for value in values.values())
        if size * len(self._kept) <= self.MEMORY:
            self._kept[batch] = kept
            return
        # Moved there: the values may be mapped from the file that is replaced.
        self._kept[batch] = file = Path(self._folder.name) / f"{batch}.pt"
        written = file.with_suffix(".new")
        torch.save(kept, written)
        written.replace(file)

    def _read(self, batch: int) -> list[Values]:
        both = self._kept[batch]
        if isinstance(both, Path):
            both = torch.load(both, weights_only=True, mmap=True)
        return [{self._nodes[i]: value for i, value in values.items()} for values in both]


class _Interpreter(fx.Interpreter):
    """Evaluates nodes: fake-quantized, or where weights are given with these, in float."""

    def __init__(
        self,
        prepared: GraphModule,
        constant: set[Node],
        float_weights: dict[Any, torch.Tensor] | None,
    ) -> None:
        super().__init__(prepared)
        self._constant, self._float_weights = constant, float_weights
        self.constants: Values = {}  # values of constant nodes, as long as no weight is replaced

    def evaluate(self, node: Node, values: Values) -> Any:
        self.env = {read: self.value(read, values) for read in node.all_input_nodes}
        return self.run_node(node)

    def value(self, node: Node, values: Values) -> Any:
        if node not in self._constant:
            return values[node]
        if node not in self.constants:
            self.constants[node] = self.evaluate(node, values)
        return self.constants[node]

    def run_node(self, n: Node) -> Any:
        if n.op == "get_attr" and self._float_weights is not None:
            return self._float_weights[n.target]
        if n.op != "call_module":
            return super().run_node(n)
        (value,), _ = self.fetch_args_kwargs_from_env(n)
        if self._float_weights is not None:
            return value
        return fake_quantize(self.module.get_submodule(str(n.target)), value)


def fake_quantized(prepared: GraphModule) -> Callable[..., Any]:
    """Return a function that runs a calibrated graph and rounds all that is observed."""
    run = _Interpreter(prepared, set(), None).run
    nodes = prepared.graph.nodes
    return lambda *inputs: run(*(to_channels_last(x, nodes) for x in inputs))


def to_channels_last(image: torch.Tensor, nodes: Iterable[Node]) -> torch.Tensor:
    """Return images with the channels of a pixel together, as then do a graph's convolutions.

    A ResNet-18 takes a fifth less time on a processor so, whatever the order of its weights. Not
    where the graph reads memory in the order in which it was traced.
    """
    if image.dim() != len("NCHW") or any(n.target is aten.as_strided.default for n in nodes):
        return image
    return image.contiguous(memory_format=torch.channels_last)


def fake_quantize(observer: Any, value: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize a tensor with an observer's scale and zero point."""
    scale, zero = observer.calculate_qparams()
    if scale.numel() == 1:
        scale, zero = float(scale), int(zero)
    else:
        scale, zero = (x.view(-1, *[1] * (value.dim() - 1)) for x in (scale, zero))
    # In place: torch's own writes a mask for gradients, too, and takes nearly three times as long.
    rounded: torch.Tensor = (value * (1 / scale)).round_()
    return rounded.clamp_(observer.quant_min - zero, observer.quant_max - zero).mul_(scale)
