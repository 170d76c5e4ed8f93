"""The names of torchao's PT2E quantization that this package uses."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from compress.artifacts.carried_files import FROZEN_NAME
from compress.common.foreign.patching import patched_attribute
from compress.common.process import gc_disabled

# Without garbage collection: the import creates many objects that all stay.
with gc_disabled():
    from torch.ao.quantization.fx import utils as torch_utils
    from torchao import utils
    from torchao.quantization.pt2e import (
        DerivedObserverOrFakeQuantize as DerivedObserverOrFakeQuantize,
    )
    from torchao.quantization.pt2e import HistogramObserver as HistogramObserver
    from torchao.quantization.pt2e import MinMaxObserver as MinMaxObserver
    from torchao.quantization.pt2e import MovingAverageMinMaxObserver as MovingAverageMinMaxObserver
    from torchao.quantization.pt2e import ObserverBase as ObserverBase
    from torchao.quantization.pt2e import PerChannelMinMaxObserver as PerChannelMinMaxObserver
    from torchao.quantization.pt2e import PlaceholderObserver as PlaceholderObserver
    from torchao.quantization.pt2e import constant_fold, quantize_pt2e
    from torchao.quantization.pt2e.observer import (
        UniformQuantizationObserverBase as UniformQuantizationObserverBase,
    )
    from torchao.quantization.pt2e.quantizer import (
        DerivedQuantizationSpec as DerivedQuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation as QuantizationAnnotation
    from torchao.quantization.pt2e.quantizer import QuantizationSpec as QuantizationSpec
    from torchao.quantization.pt2e.quantizer import Quantizer as Quantizer
    from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec as SharedQuantizationSpec
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY as Q_ANNOTATION_KEY
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_

fuse_conv_bn_ = _fuse_conv_bn_
AT_ONCE = 2**20  # weights quantized at a time, of which there are four copies in between


def prepare_pt2e(graph: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Insert the observers that a quantizer asks for into a graph, which is changed."""
    try:
        prepared: GraphModule = quantize_pt2e.prepare_pt2e(graph, quantizer)
    finally:
        _forget_devices()
    return prepared


def _forget_devices() -> None:
    # torchao (0.18) and torch (2.13) cache the device of each module that they prepare or convert,
    # and so keep its float weights until the process ends.
    cached: tuple[Any, ...] = (
        getattr(utils, "_assert_and_get_unique_device", None),
        getattr(torch_utils, "assert_and_get_unique_device", None),
    )
    for function in cached:
        if hasattr(function, "cache_clear"):  # another release may not cache it
            function.cache_clear()


def convert_pt2e(prepared: GraphModule) -> GraphModule:
    """Convert a graph of `prepare_pt2e`, once calibrated or trained, to integers."""
    # Where a batch normalization is left, torchao (0.18) looks for 96 patterns of its own training
    # with quantization, which is not used here, and traces them anew each time: ten seconds.
    with (
        patched_attribute(quantize_pt2e, "_fold_conv_bn_qat", lambda graph: graph),
        patched_attribute(constant_fold, "replace_node_with_constant", _replace_by_named),
        patched_attribute(constant_fold.ConstantFolder, "_deduce_value", _constant_value),
    ):
        try:
            converted: GraphModule = quantize_pt2e.convert_pt2e(prepared)
        finally:
            _forget_devices()
    return converted


_deduce: Any = constant_fold.ConstantFolder._deduce_value


def _constant_value(folder: Any, node: Node) -> Any:
    """Return what a node computes of constants, without copies of the whole weight on the way."""
    # torchao (0.18) dequantizes each weight, and then leaves that operator in the graph.
    if node.op == "call_function" and folder.is_impure(node):
        return folder.unknown_value
    if node.target is not torch.ops.quantized_decomposed.quantize_per_channel.default:
        return _deduce(folder, node)
    (weight, scales, zeros, axis, *limits), _ = folder.fetch_args_kwargs_from_env(node)
    rows = AT_ONCE // max(1, weight[:1].numel())
    if axis or len(weight) <= rows or not weight.is_contiguous():  # parts joined are contiguous
        return _deduce(folder, node)
    parts = zip(*(x.split(max(1, rows)) for x in (weight, scales, zeros)), strict=True)
    return torch.cat([node.target(*part, axis, *limits) for part in parts])


_replace: Any = constant_fold.replace_node_with_constant


def _replace_by_named(graph: GraphModule, node: Node, constant: Any = None) -> None:
    """Replace what was computed of a weight by a constant, whose name tells which weight."""
    source = node
    while source.op == "call_function" and isinstance(first := next(iter(source.args), None), Node):
        source = first
    name = FROZEN_NAME.format(str(source.target).replace(".", "_"))
    is_free = source.op == "get_attr" and not hasattr(graph, name)
    _replace(graph, node, constant, name if is_free else None)
