"""From a float module to an integer graph: trace, observe activations, round."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import torch
from torch.fx import Node

from compress.core.errors import StageFailed
from compress.core.program import export_program
from compress.quantization.pt2e import MinMaxObserver, convert_pt2e, prepare_pt2e
from compress.quantization.quantizer import (
    CONVOLUTIONS,
    LINEAR,
    SMALLEST_SCALE,
    OnnxRuntimeQuantizer,
    module_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.core.data import Batch
    from compress.core.signature import Signature

WEIGHTED = {*CONVOLUTIONS, LINEAR}
LARGEST_BIAS = 2.0**30
"""Half of what 32 bits hold; the products are added to it."""


def quantize(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> ExportedProgram:
    """Return the module as a graph with integer weights and fixed activation ranges.

    Post-training quantization after Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference" (2018).

    Args:
        module: a module in eval mode; it is not changed.
        signature: its interface.
        quantizer: which operators are quantized, and how.
        batches: calibration inputs; one batch at a time is held in memory.
        report: called with the number of samples seen so far.

    Raises:
        StageFailed: nothing can be quantized, the data does not fit the signature, or an activation
            is not finite or vanishes.
    """
    graph = functional(export_program(module, signature)).module(check_guards=False)
    prepared = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 convolution or linear layer "
            "that `exclude` does not name"
        )
    observe_(prepared, signature, batches, report)
    fit_ranges_(prepared)
    converted = convert_pt2e(prepared)
    drop_unread_tensors_(converted)
    return export_program(converted, signature)


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same and writes into no tensor.

    Between rounding and its inverse a tensor is a copy: what is written into a view of it would not
    reach its other readers.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        decomposed: ExportedProgram = program.run_decompositions({})
        return decomposed


def observe_(
    prepared: GraphModule,
    signature: Signature,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> None:
    """Run batches through a prepared graph, whose observers then know each activation's range.

    Raises:
        StageFailed: the data does not fit the signature, or an input or activation is NaN or
            infinite; the message names the place.
    """
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            _observer(prepared, node).register_forward_pre_hook(
                _finite_check(_place(_observed(node)))
            )
    seen = 0
    with torch.inference_mode():
        for batch in batches:
            _refuse_misfit(batch.inputs, signature)
            for spec, values in zip(signature.inputs, batch.inputs, strict=True):
                _refuse_unless_finite(values, f"input {spec.name}")
            prepared(*batch.inputs)
            seen += len(batch)
            report(seen)


def fit_ranges_(prepared: GraphModule) -> None:
    """Widen the ranges of weights so that each bias fits its 32 bits, in place.

    A bias is held in steps of input scale times weight scale. Where these are so small that it
    would overflow, the products are lost beside the bias, and the channel's weights can be coarser.

    Raises:
        StageFailed: a range is so small that the products of its scale would vanish.
    """
    for node in prepared.graph.nodes:
        if node.op == "call_module" and hasattr(_observer(prepared, node), "max_val"):
            _refuse_vanishing(_observer(prepared, node), _place(_observed(node)))
    for node in prepared.graph.nodes:
        bias = node.args[2] if node.target in WEIGHTED and len(node.args) > 2 else None
        if isinstance(bias, Node) and bias.op == "call_module":
            source, weight = (_observer(prepared, part) for part in node.args[:2])
            bias_O = attrgetter(str(_observed(bias).target))(prepared).detach()
            scale, _ = source.calculate_qparams()
            largest_O = bias_O.abs() / (scale * LARGEST_BIAS) * weight.quant_max
            weight.max_val = torch.maximum(weight.max_val, largest_O)


def _refuse_vanishing(observer: MinMaxObserver, place: str) -> None:
    largest = max(float(observer.min_val.abs().max()), float(observer.max_val.abs().max()))
    scale, _ = observer.calculate_qparams()
    if largest > 0 and float(scale.max()) <= SMALLEST_SCALE:
        raise StageFailed(
            f"calibration: {place} is {largest:.2g} at most, too small for 8 bits; expected "
            f"{255 * SMALLEST_SCALE:.2g} or more; rescale the data or the weights"
        )


def drop_unread_tensors_(graph: GraphModule) -> None:
    """Remove the float weights that integer ones have replaced, in place."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)


def _observer(prepared: GraphModule, node: object) -> MinMaxObserver:
    return prepared.get_submodule(str(cast("Node", node).target))


def _observed(node: Node) -> Node:
    return cast("Node", node.args[0])


def _place(node: Node) -> str:
    if node.op == "get_attr":
        return f"weight {node.target}"
    return f"{node.name} of {(module_names(node) or ['the model'])[-1]}"


def _finite_check(place: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
    def check(observer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        _refuse_unless_finite(inputs[0], place)

    return check


def _refuse_unless_finite(values: torch.Tensor, place: str) -> None:
    if not torch.isfinite(values).all():
        raise StageFailed(
            f"calibration: {place} is NaN or infinite, expected finite numbers; mend the data or "
            "the weights"
        )


def _refuse_misfit(inputs: Sequence[torch.Tensor], signature: Signature) -> None:
    found = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in inputs]
    expected = [(spec.dtype, spec.shape) for spec in signature.inputs]
    fits = len(found) == len(expected) and all(
        dtype == expected_dtype and _is_size_of(shape, expected_shape)
        for (dtype, shape), (expected_dtype, expected_shape) in zip(found, expected, strict=True)
    )
    if not fits:
        raise StageFailed(
            f"calibration: a batch of the data is {_described(found)}, expected "
            f"{_described(expected)}; mend the data or model.inputs"
        )


def _is_size_of(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    return len(shape) == len(expected) and all(
        isinstance(e, str) or e == n for n, e in zip(shape, expected, strict=True)
    )


def _described(tensors: Sequence[tuple[str, tuple[int | str, ...]]]) -> str:
    return " and ".join(f"{dtype} [{', '.join(map(str, shape))}]" for dtype, shape in tensors)
