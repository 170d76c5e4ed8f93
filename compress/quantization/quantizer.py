"""Which operators of an ATen graph are quantized: those that onnxruntime computes in integers.

An operator is fused into an integer kernel (QLinearConv, QLinearAdd, QGemm …) when it stands alone
between DequantizeLinear and QuantizeLinear. So each pattern below is annotated as a whole, and what
would only gain a detour through integers stays float.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.fx import GraphModule, Node

from compress.core.program import FlatOutputs
from compress.quantization.pt2e import (
    Q_ANNOTATION_KEY,
    DerivedQuantizationSpec,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.quantization.scheme import IntegerFormat, Observer, Scheme


FLAT_OUTPUTS = f"{FlatOutputs.__module__}.{FlatOutputs.__qualname__}"
aten = torch.ops.aten
CONVOLUTIONS = {
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
}
LINEAR = aten.linear.default
ADDITION = aten.add.Tensor
CLAMPS = {
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.clamp.default,
}
"""Activations that onnxruntime folds into the clipping of the QuantizeLinear that follows."""
MOVES = {
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
}
"""Operators that only move or pick values: their result keeps the scale of what they read."""
AVERAGE_POOL = aten.avg_pool2d.default
SMALLEST_SCALE = 2.0**-60
"""Keeps the product of two scales, which both runtimes hold in a float32, a normal number."""
OBSERVERS = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
}


class OnnxRuntimeQuantizer(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Annotates the patterns that onnxruntime's CPU provider fuses into integer kernels."""

    def __init__(self, scheme: Scheme, observer: Observer, exclude: Sequence[str] = ()) -> None:
        """Choose the formats.

        Args:
            scheme: integer formats of activations and weights.
            observer: how the range of an activation is estimated.
            exclude: patterns of module names whose operators stay float.
        """
        super().__init__()
        self.activation = _spec(scheme.activations, OBSERVERS[observer])
        self.weight = _spec(scheme.weights, PerChannelMinMaxObserver)
        self.exclude = tuple(exclude)
        self.quantized: Counter[str] = Counter()
        """Number of quantized operators by kind, filled while annotating."""
        self.float_modules: list[str] = []
        """Modules with weights that stayed float, filled while annotating."""

    def annotate(self, model: GraphModule) -> GraphModule:
        """Mark the operators to be quantized, in graph order."""
        for node in model.graph.nodes:
            if node.op != "call_function" or Q_ANNOTATION_KEY in node.meta or self._excluded(node):
                continue
            if node.target in CONVOLUTIONS or node.target is LINEAR:
                self._annotate_weighted(node)
            elif node.target is ADDITION:
                self._annotate_addition(node)
            elif node.target in MOVES or node.target is AVERAGE_POOL:
                self._annotate_unary(node)
        self.float_modules = _float_modules(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept every graph; what was not annotated stays float."""

    def _annotate_weighted(self, node: Node) -> None:
        source, weight = node.args[:2]
        if not (_is_float(source) and _is_constant(weight)):
            return
        chain = _with_clamp(node)
        self._mark(chain, [source], self.activation if _wants_integers(chain) else None)
        specs = node.meta[Q_ANNOTATION_KEY].input_qspec_map
        specs[weight] = self.weight
        bias = node.args[2] if len(node.args) > 2 else None
        if _is_constant(bias) and not _is_sequence_product(node):
            specs[bias] = _bias_spec(node, source, weight)

    def _annotate_addition(self, node: Node) -> None:
        terms = node.args[:2]
        if all(_has_integers(t) for t in terms) and "alpha" not in node.kwargs:
            self._mark(_with_clamp(node), terms, self.activation)

    def _annotate_unary(self, node: Node) -> None:
        source = node.args[0]
        if _has_integers(source):
            shared = SharedQuantizationSpec((source, node))
            self._mark([node], [source], shared if node.target in MOVES else self.activation)

    def _mark(self, chain: Sequence[Node], sources: Sequence[object], output: object) -> None:
        """Annotate a chain of operators: integers enter at its head and leave at its tail."""
        for node in chain:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        chain[0].meta[Q_ANNOTATION_KEY].input_qspec_map = dict.fromkeys(sources, self.activation)
        chain[-1].meta[Q_ANNOTATION_KEY].output_qspec = output
        if chain[0].target not in MOVES:
            self.quantized[str(chain[0].target).split(".")[1].rstrip("_")] += 1

    def _excluded(self, node: Node) -> bool:
        return any(fnmatchcase(m, p) for m in module_names(node) for p in self.exclude)


def module_names(node: Node) -> list[str]:
    """Return the dotted names of the user's modules that a node lies in, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    names = [path for path, _ in stack]
    if _wrapped(node):
        names = [name.removeprefix("module").removeprefix(".") for name in names]
    return [n for n in names if n]


def _wrapped(node: Node) -> bool:
    """Whether the user's module is the child ``module`` of one that flattens its outputs."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(kind == FLAT_OUTPUTS for _, kind in stack)


def _spec(numbers: IntegerFormat, observer: type) -> QuantizationSpec:
    kind = "channel" if numbers.per_channel else "tensor"
    form = "symmetric" if numbers.symmetric else "affine"
    return QuantizationSpec(
        dtype=getattr(torch, numbers.dtype),
        observer_or_fake_quant_ctr=observer.with_args(eps=SMALLEST_SCALE),  # type: ignore[attr-defined]
        quant_min=numbers.low,
        quant_max=numbers.high,
        qscheme=getattr(torch, f"per_{kind}_{form}"),
        ch_axis=0 if numbers.per_channel else None,
    )


def _bias_spec(node: Node, source: Node, weight: Node) -> DerivedQuantizationSpec:
    """Return the 32-bit format in which a bias is added to integer products.

    onnxruntime would round a float bias itself; doing so here keeps both runtimes' sums equal, and
    is what lets it compute a Gemm with a float result in integers.
    """

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


def _with_clamp(node: Node) -> list[Node]:
    """Return an operator and the activation after it, where that is its only reader."""
    readers = list(node.users)
    return [node, *readers] if len(readers) == 1 and readers[0].target in CLAMPS else [node]


def _wants_integers(chain: Sequence[Node]) -> bool:
    """Whether a result should be rounded to integers.

    A convolution is only fused with an integer result. A matrix product is fused with a float one
    too, which is kept where it is more exact at no cost: for the model's outputs, and for products
    of sequences, whose wide ranges 8 bits ruin (a sentence encoder: cosine 0.93 instead of 0.99).
    """
    head, tail = chain[0], chain[-1]
    if head.target is not LINEAR:
        return True
    return not (_is_sequence_product(head) or any(r.op == "output" for r in tail.users))


def _is_sequence_product(node: Node) -> bool:
    """Whether a node is a linear layer over several axes, in ONNX a MatMul and not a Gemm."""
    return node.target is LINEAR and node.args[0].meta["val"].dim() != 2  # type: ignore[union-attr]


def _is_float(value: object) -> TypeGuard[Node]:
    return isinstance(value, Node) and value.meta["val"].dtype is torch.float32


def _is_constant(value: object) -> TypeGuard[Node]:
    return isinstance(value, Node) and value.op == "get_attr"


def _has_integers(value: object) -> bool:
    annotation = value.meta.get(Q_ANNOTATION_KEY) if isinstance(value, Node) else None
    return annotation is not None and annotation.output_qspec is not None


def _float_modules(model: GraphModule) -> list[str]:
    """Return the modules of weights (two axes and more) that no quantized operator reads."""
    tensors = dict(model.named_parameters())
    prefix = "module." if any(_wrapped(node) for node in model.graph.nodes) else ""
    names = {
        str(node.target).removeprefix(prefix).rpartition(".")[0]
        for node in model.graph.nodes
        if node.op == "get_attr" and node.target in tensors and tensors[node.target].dim() > 1
        if not any(Q_ANNOTATION_KEY in reader.meta for reader in node.users)
    }
    return sorted(names)
