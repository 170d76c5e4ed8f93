"""torchao quantizer: annotates the operators of an ATen graph that a runtime computes in integers.

onnxruntime fuses an operator into an integer kernel (QLinearConv, QLinearAdd, QGemm …) when it
stands alone between DequantizeLinear and QuantizeLinear. So each pattern below is annotated as a
whole, and operators without an integer kernel stay float. The other runtimes' patterns are in
:class:`~compress.quantization.config.dtype_scheme.Patterns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

from compress.quantization.pt2e.graph_capture import is_excluded, is_wrapped, module_of, value_of
from compress.quantization.pt2e.observers import observer_class
from compress.quantization.pt2e.torchao_api import (
    Q_ANNOTATION_KEY,
    DerivedQuantizationSpec,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
    fuse_conv_bn_,
)

if TYPE_CHECKING:
    from compress.quantization.config.dtype_scheme import IntegerFormat, Observer, Scheme

SMALLEST_SCALE = 2.0**-60
"""Keeps the product of two scales, which both runtimes hold in a float32, a normal number."""


def qspec(numbers: IntegerFormat, observer: Any, **options: float) -> QuantizationSpec:
    """Return the torchao spec of an integer format, with the class of its observer and options."""
    granularity = "channel" if numbers.per_channel else "tensor"
    symmetry = "symmetric" if numbers.symmetric else "affine"
    return QuantizationSpec(
        dtype=getattr(torch, numbers.dtype),
        observer_or_fake_quant_ctr=observer.with_args(eps=SMALLEST_SCALE, **options),
        quant_min=numbers.quant_min,
        quant_max=numbers.quant_max,
        qscheme=getattr(torch, f"per_{granularity}_{symmetry}"),
        ch_axis=0 if numbers.per_channel else None,
    )


def bias_qspec(node: Node, source: Node, weight: Node) -> DerivedQuantizationSpec:
    """Return the int32 spec of a bias, with scale `input_scale * weight_scale`."""

    # onnxruntime would round a float bias to the same integers. Doing so here gives both runtimes
    # equal sums, and lets onnxruntime compute a Gemm with a float output in integers.
    def derive(observers: Sequence[MinMaxObserver]) -> tuple[torch.Tensor, torch.Tensor]:
        (scale, _), (scale_O, _) = (observer.calculate_qparams() for observer in observers)
        bias_scale_O = scale * scale_O
        return bias_scale_O, torch.zeros_like(bias_scale_O, dtype=torch.int32)

    return DerivedQuantizationSpec(
        derived_from=[(source, node), (weight, node)],
        derive_qparams_fn=derive,
        dtype=torch.int32,
        quant_min=-(2**31),
        quant_max=2**31 - 1,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


aten = torch.ops.aten
CONVOLUTIONS = {
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
}
CONVOLUTIONS_2D = {aten.conv2d.default, aten.conv2d.padding}
LINEAR = aten.linear.default
WEIGHTED = {*CONVOLUTIONS, LINEAR}
EMBEDDING = aten.embedding.default
ADDITION = aten.add.Tensor
CLAMPS = {aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default}
"""Activations that onnxruntime folds into the clipping of the QuantizeLinear that follows."""
MOVES = {
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.reshape.default,
    aten.permute.default,
    aten.transpose.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
}
"""Operators that only move or pick values, so that their output keeps the scale of the input."""
AVERAGE_POOL = aten.avg_pool2d.default


class OnnxRuntimeQuantizer(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Annotates the patterns that a scheme's runtime fuses into integer kernels."""

    expected = "a float32 convolution or linear layer that `exclude` does not name"

    def __init__(
        self,
        scheme: Scheme,
        observer: Observer,
        exclude: Sequence[str] = (),
        *,
        embeddings: bool = False,
        percentile: float = 99.99,
    ) -> None:
        """Choose the formats; `percentile` is for the observer of that name, in percent."""
        super().__init__()
        self.scheme = scheme
        self.embeddings = embeddings
        options = {"percentile": percentile} if observer == "percentile" else {}
        self.activation = qspec(scheme.activations, observer_class(observer), **options)
        self.weight = qspec(scheme.weights, PerChannelMinMaxObserver)
        self.table = qspec(scheme.embeddings, PerChannelMinMaxObserver)
        self.patterns = scheme.patterns
        self.exclude = tuple(exclude)
        self.quantized: Counter[str] = Counter()
        """Number of quantized operators by kind, filled while annotating."""
        self.float_modules: list[str] = []
        """Modules with weights that stayed float, filled while annotating."""
        self.ranges: dict[str, Any] = {}
        """Saturated and dead ranges by module, filled while calibrating."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Give each layer its own bias, whose scale is that of the layer's input and weight."""
        for bias in model.graph.find_nodes(op="get_attr"):
            layers = [n for n in bias.users if n.target in WEIGHTED and bias in n.args[2:3]]
            for layer in layers[1:]:
                name = f"{bias.target}_of_{layer.name}".replace(".", "_")
                model.register_parameter(name, torch.nn.Parameter(value_of(model, bias).clone()))
                with model.graph.inserting_before(layer):
                    copy = model.graph.get_attr(name)
                copy.meta = dict(bias.meta)
                layer.update_arg(2, copy)
        model.recompile()
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the operators to be quantized, in graph order."""
        for node in model.graph.nodes:
            if node.op != "call_function" or is_excluded(node, self.exclude):
                continue
            if Q_ANNOTATION_KEY in node.meta:  # the clamp of a layer before
                continue
            if node.target in WEIGHTED:
                self._annotate_weighted(node)
            elif node.target is ADDITION:
                self._annotate_addition(node)
            elif node.target in MOVES or node.target is AVERAGE_POOL:
                source = node.args[0]
                if _is_quantized_output(source):
                    shared = SharedQuantizationSpec((source, node))
                    output = shared if node.target in MOVES else self.activation
                    self._annotate_chain([node], [source], output)
            elif node.target is EMBEDDING:
                self._annotate_embedding(node)
        if self.patterns.float_outputs:
            self._leave_unread_integers(model)
        if not self.patterns.lone_depthwise:
            for node in model.graph.nodes:
                if Q_ANNOTATION_KEY in node.meta and _is_lone_depthwise(node):
                    self.leave_float(_with_clamp(node))
        self.float_modules = find_float_modules(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept every graph; what was not annotated stays float."""

    def leave_float(self, operators: Sequence[Node]) -> None:
        """Record that operators, annotated before, stay float."""
        layers = {module_of(node) for node in operators if node.target in {*WEIGHTED, EMBEDDING}}
        for node in operators:
            if node.meta.pop(Q_ANNOTATION_KEY, None) and node.target not in MOVES:
                self.quantized[_kind(node)] -= 1
        self.quantized = +self.quantized
        self.float_modules = sorted({*self.float_modules, *layers})

    def _leave_unread_integers(self, model: GraphModule) -> None:
        """Leave outputs of linear layers in float where float operators alone read them."""
        # Such as scores before a softmax, of which a step of 8 bits is a tenth of a probability.
        for node in reversed(model.graph.nodes):
            annotation, layer = node.meta.get(Q_ANNOTATION_KEY), node
            while layer.target in MOVES:
                layer = layer.args[0]
            if annotation and layer.target is LINEAR and not _is_read_as_integers(node):
                annotation.output_qspec = None
                if node.target in MOVES:
                    del node.meta[Q_ANNOTATION_KEY]

    def _annotate_weighted(self, node: Node) -> None:
        source, weight = node.args[:2]
        if not (is_float(source) and is_constant(weight)):
            return
        shape = source.meta["val"].shape
        is_dynamic = not all(isinstance(size, int) for size in shape)
        one_channel = node.target in CONVOLUTIONS and shape[1] == 1
        if one_channel and is_dynamic and not self.patterns.one_channel:
            return
        chain = _with_clamp(node)
        # onnxruntime fuses a convolution only with an integer output. It fuses a matrix product
        # with a float one too, which is more exact at no cost: for the model's outputs, and for
        # products of sequences, whose wide ranges 8 bits ruin (MiniLM: cosine 0.93, not 0.99).
        is_last = any(reader.op == "output" for reader in chain[-1].users)
        fuses_float = (
            self.patterns.float_outputs
            and node.target is LINEAR
            and (is_sequence_linear(node) or is_last)
        )
        rounds_output = self.patterns.outputs and not fuses_float
        self._annotate_chain(chain, [source], self.activation if rounds_output else None)
        specs = node.meta[Q_ANNOTATION_KEY].input_qspec_map
        specs[weight] = self.weight
        bias = node.args[2] if len(node.args) > 2 else None
        if self.patterns.biases and is_constant(bias) and not is_sequence_linear(node):
            specs[bias] = bias_qspec(node, source, weight)

    def _annotate_addition(self, node: Node) -> None:
        terms = node.args[:2]
        if self.patterns.additions == "convolution" and self._annotate_sum(node):
            return
        if self.patterns.additions != "residual":
            # A term must be quantized anyway, as an output or as another operator's input: else one
            # float addition would keep every later one on the same residual path in float.
            # onnxruntime's QLinearAdd has no alpha.
            if all(map(_is_quantized_anyway, terms)) and "alpha" not in node.kwargs:
                self._annotate_chain(_with_clamp(node), terms, self.activation)
            return
        layer, residual = _residual(node, WEIGHTED)
        if layer and residual:
            self._annotate_chain([node], [residual], None)

    def _annotate_sum(self, node: Node) -> bool:
        """Annotate an addition that is computed within the convolution before it, if it is one."""
        layer, residual = _residual(node, CONVOLUTIONS_2D)
        if not (layer and residual) or "alpha" in node.kwargs:
            return False
        if layer.meta["val"].shape != residual.meta["val"].shape:
            return False  # the kernel adds elements to elements
        layer.meta[Q_ANNOTATION_KEY].output_qspec = None
        self._annotate_chain(_with_clamp(node), [residual], self.activation)
        return True

    def _annotate_embedding(self, node: Node) -> None:
        table = node.args[0]
        if self.embeddings and is_constant(table):
            self._annotate_inputs(node, {table: self.table})

    def _annotate_inputs(self, node: Node, specs: dict[Node, QuantizationSpec]) -> None:
        """Annotate inputs and weights of an operator whose output stays float."""
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
        self.quantized[_kind(node)] += 1

    def _annotate_chain(
        self, chain: Sequence[Node], sources: Sequence[object], output: object
    ) -> None:
        """Annotate a chain of operators: integers enter at its head and leave at its tail."""
        for node in chain:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        chain[0].meta[Q_ANNOTATION_KEY].input_qspec_map = dict.fromkeys(sources, self.activation)
        chain[-1].meta[Q_ANNOTATION_KEY].output_qspec = output
        if chain[0].target not in MOVES:
            self.quantized[_kind(chain[0])] += 1


def _kind(node: Node) -> str:
    return str(node.target).split(".")[1].rstrip("_")


def _with_clamp(node: Node) -> list[Node]:
    """Return an operator and the clamping activation after it, where that is its only reader."""
    readers = list(node.users)
    return [node, *readers] if len(readers) == 1 and readers[0].target in CLAMPS else [node]


def _is_lone_depthwise(node: Node) -> bool:
    """Whether a depthwise convolution reads floats, and nothing reads integers of its output."""
    source, weight = [*node.args, None, None][:2]
    if not (node.target in CONVOLUTIONS and is_float(source) and is_constant(weight)):
        return False
    is_depthwise = source.meta["val"].shape[1] > weight.meta["val"].shape[1] == 1
    output = _with_clamp(node)[-1]
    return is_depthwise and not (_is_quantized_output(source) or _is_read_as_integers(output))


def _residual(addition: Node, layers: Container[object]) -> tuple[Node | None, Node | None]:
    """Return the quantized layer that an addition follows, and the term that bypasses it.

    Where both terms are outputs of layers (a shortcut with a convolution of its own), the second
    one is taken for the other term.
    """
    terms = addition.args[:2]
    floats = [term for term in terms if is_float(term)]
    found = [
        term
        for term in floats
        if term.target in layers and len(term.users) == 1 and Q_ANNOTATION_KEY in term.meta
    ]
    if len(floats) < len(terms) or not found:
        return None, None
    return found[0], next((term for term in floats if term is not found[0]), None)


def is_sequence_linear(node: Node) -> bool:
    """Whether a node is a linear layer over more than two axes: in ONNX a MatMul, not a Gemm."""
    return node.target is LINEAR and node.args[0].meta["val"].dim() != 2  # type: ignore[union-attr]


def is_float(value: object) -> TypeGuard[Node]:
    """Whether an operand is a node that was a float32 tensor when it was traced."""
    known = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(known, torch.Tensor) and known.dtype is torch.float32


def is_constant(value: object) -> TypeGuard[Node]:
    """Whether an operand is a parameter or buffer."""
    return isinstance(value, Node) and value.op == "get_attr"


def _is_quantized_output(value: object) -> bool:
    annotation = value.meta.get(Q_ANNOTATION_KEY) if isinstance(value, Node) else None
    return annotation is not None and annotation.output_qspec is not None


def _is_quantized_anyway(value: object) -> bool:
    """Whether a tensor is quantized as an output, or as the input of another operator."""
    return isinstance(value, Node) and (_is_quantized_output(value) or _is_read_as_integers(value))


def _is_read_as_integers(value: Node) -> bool:
    annotations = (reader.meta.get(Q_ANNOTATION_KEY) for reader in value.users)
    return any(a and value in a.input_qspec_map for a in annotations)


def find_float_modules(model: GraphModule) -> list[str]:
    """Return the modules of weights (two axes and more) that no quantized operator reads."""
    tensors = dict(model.named_parameters())
    prefix = "module." if any(is_wrapped(node) for node in model.graph.nodes) else ""
    names = {
        str(node.target).removeprefix(prefix).rpartition(".")[0]
        for node in model.graph.nodes
        if node.op == "get_attr" and node.target in tensors and tensors[node.target].dim() > 1
        if node.users and not any(Q_ANNOTATION_KEY in reader.meta for reader in node.users)
    }
    return sorted(names)


BATCH_NORM = aten._native_batch_norm_legit_no_training.default
FOLDABLE = {
    *WEIGHTED,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
"""Operators into which torchao folds the BatchNorm that follows."""


def fold_batch_norms_(graph: GraphModule) -> None:
    """Fold each BatchNorm into the layer before it, where that changes no output."""
    protect_shared_layers_(graph)
    fuse_conv_bn_(graph)


def protect_shared_layers_(graph: GraphModule) -> None:
    """Insert a copy between a layer and a BatchNorm that must not be folded into it.

    torchao 0.18 folds every BatchNorm that follows a layer. Where the layer's output has another
    reader too, or another BatchNorm follows the same weight, that would change the model. It fails
    for computed weights, and of grouped transposed convolutions it takes the wrong axis.
    """
    for node in graph.graph.nodes:
        layer = node.args[0] if node.target is BATCH_NORM else None
        if not (isinstance(layer, Node) and layer.target in FOLDABLE):
            continue
        weight = layer.args[1]
        layers = weight.users if isinstance(weight, Node) else [layer]
        readers = [reader for each in layers for reader in each.users]
        equal = [r.target is BATCH_NORM and r.args[1:] == node.args[1:] for r in readers]
        tensors = [part for part in (*layer.args[1:3], *node.args[1:5]) if isinstance(part, Node)]
        is_alone = all(equal) and all(len(each.users) == 1 for each in layers)
        groups = layer.args[6] if len(layer.args) > 6 else layer.kwargs.get("groups", 1)
        has_axis = layer.target in WEIGHTED or groups == 1
        if is_alone and all(map(is_constant, tensors)) and has_axis:
            continue
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(aten.clone.default, (layer,))
            copy.meta = dict(layer.meta)
        node.replace_input_with(layer, copy)
    graph.recompile()
