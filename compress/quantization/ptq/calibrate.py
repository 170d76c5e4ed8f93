"""Post-training quantization of a captured graph: calibrate its observers, correct, convert."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed
from compress.graph.torch_export import export_program
from compress.quantization.algorithms.input_scaling import smooth_
from compress.quantization.algorithms.layer_corrections import (
    UNSUPPORTED,
    adaround_,
    correct_bias_,
    equalize_,
)
from compress.quantization.config.calibration_data import require_varying
from compress.quantization.pt2e.graph_capture import module_of, remove_unread_tensors_
from compress.quantization.pt2e.observer_ranges import (
    detach_observers_,
    find_vanishing,
    fit_ranges_,
    layers_of,
    monitor_ranges,
    range_facts,
    require_finite,
    weight_of,
)
from compress.quantization.pt2e.partial_graph import LayerInputs
from compress.quantization.pt2e.quantizer import EMBEDDING, WEIGHTED, protect_shared_layers_
from compress.quantization.pt2e.torchao_api import convert_pt2e, prepare_pt2e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Rounding, Scheme, Smoothing
    from compress.quantization.pt2e.observer_ranges import RangeMonitor
    from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer

logger = logging.getLogger(__name__)

aten = torch.ops.aten
DEQUANTIZE_ROWS = torch.ops.quantized_decomposed.dequantize_per_channel.default


MEAN_SAMPLES, MEAN_VALUES = 64, 2**22
"""Bias correction stops after so many samples with so many input values: a mean over samples and
positions is known then, and each further image of 224² costs ten times what calibration does."""


@dataclass
class Corrections:
    """Which algorithms run; records for the manifest what they changed."""

    smooth: Smoothing = "off"
    equalize: bool = False
    rounding: Rounding = "nearest"
    rounding_steps: int = 500
    bias_correction: bool = False
    float_between_layers: bool = False
    """Whether activations between layers are float, as with ranges found at run time, so that a
    multiplication may be inserted anywhere."""
    facts: dict[str, Any] = field(default_factory=dict)
    rescaled: set[str] = field(default_factory=set)
    """Modules whose outputs have other scales than the float model's."""

    def smooth_(
        self, graph: GraphModule, batches: Iterable[Batch], scheme: Scheme, exclude: Sequence[str]
    ) -> None:
        """Apply SmoothQuant to a captured graph, before it is prepared."""
        if self.smooth != "off":
            anywhere = self.float_between_layers
            self.facts["smoothed"], rescaled = smooth_(
                graph, batches, scheme, self.smooth, exclude, float_between_layers=anywhere
            )
            self.rescaled |= rescaled

    def equalize_(self, prepared: GraphModule) -> None:
        """Apply cross-layer equalization to a prepared graph, before it is calibrated."""
        if self.equalize:
            equalized = equalize_(prepared)
            self.facts["equalized_pairs"] = len(equalized)
            self.rescaled |= set(equalized)

    def round_(self, prepared: GraphModule, batches: Iterable[Batch]) -> None:
        """Apply AdaRound and bias correction to a calibrated graph, layer after layer.

        In graph order, so that each layer compensates the quantization error of those before it.
        """
        if self.rounding == "nearest":
            if not self.bias_correction:
                return
            batches = enough_for_means(batches)
        changed: list[float] = []
        with LayerInputs(prepared, batches) as inputs:
            for layer in layers_of(prepared):
                observed: Any = layer.args[:2]
                if any(operand.op != "call_module" for operand in observed):
                    continue  # its input or weight stays float
                weight = weight_of(prepared, layer)
                # AdaRound first: it leaves little shift for the bias to correct.
                if self.rounding == "adaround" and layer.target not in UNSUPPORTED:
                    pairs = inputs.pairs(layer)
                    changed.append(adaround_(prepared, layer, pairs, self.rounding_steps))
                if self.bias_correction:
                    correct_bias_(prepared, layer, weight, inputs.pairs(layer))
        if changed:
            self.facts["rounded_away"] = round(sum(changed) / len(changed), 4)


def enough_for_means(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches until there are `MEAN_SAMPLES` samples and `MEAN_VALUES` input values."""
    samples = values = 0
    for batch in batches:
        yield batch
        samples += len(batch)
        values += sum(x.numel() for x in batch.inputs)
        if samples >= MEAN_SAMPLES and values >= MEAN_VALUES:
            return


def quantize(
    graph: GraphModule,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    corrections: Corrections,
) -> ExportedProgram:
    """Return a captured graph with integer weights and fixed activation ranges; it is changed.

    Post-training quantization after Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference" (2018).

    Raises:
        StageFailed: see :func:`prepare_calibrated`.
    """
    common = (graph, signature, quantizer, batches, report, corrections)
    return export_program(convert(prepare_calibrated(*common)), signature)


def prepare_calibrated(
    graph: GraphModule,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    corrections: Corrections,
) -> GraphModule:
    """Return a captured graph with calibrated observers, ready to be converted; it is changed.

    `report` is called with the number of samples seen so far.

    Raises:
        StageFailed: nothing can be quantized, the data does not fit the signature or does not vary,
            an activation is not finite, or all of them are too small for integers.
    """
    corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare(graph, quantizer)
    corrections.equalize_(prepared)  # needs folded BatchNorms, which `prepare` leaves
    monitors = calibrate_(prepared, signature, batches, report)
    vanishing, _ = leave_vanishing_float_(prepared, quantizer)
    fit_ranges_(prepared)
    quantizer.ranges = range_facts(monitors) | {"vanishing_ranges": vanishing}
    corrections.round_(prepared, batches)
    return prepared


def prepare(graph: GraphModule, quantizer: OnnxRuntimeQuantizer) -> GraphModule:
    """Fold BatchNorms and insert observers; StageFailed where nothing can be quantized."""
    protect_shared_layers_(graph)
    prepared: GraphModule = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 convolution or linear layer "
            "that `exclude` does not name"
        )
    return prepared


def calibrate_(
    prepared: GraphModule,
    signature: Signature,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> list[RangeMonitor]:
    """Run batches through a prepared graph, so that its observers find their ranges.

    Raises:
        StageFailed: the data does not fit the signature, is not finite, or does not vary.
    """
    samples = 0
    with monitor_ranges(prepared, signature) as monitors, torch.inference_mode():
        for batch in require_varying(batches):
            require_matching_inputs(batch.inputs, signature)
            for spec, values in zip(signature.inputs, batch.inputs, strict=True):
                require_finite(values, f"input {spec.name}")
            prepared(*batch.inputs)
            samples += len(batch)
            report(samples)
    for monitor in monitors:
        if monitor.node.op == "placeholder" and monitor.constant is not None:
            raise StageFailed(
                f"calibration: {monitor.name} is {monitor.constant:g} in every sample, "
                "expected values that vary; bring samples like those of use"
            )
    return monitors


def leave_vanishing_float_(
    prepared: GraphModule, quantizer: OnnxRuntimeQuantizer
) -> tuple[dict[str, float], list[Node]]:
    """Leave operators float whose inputs or weights are too small for integers, with a warning.

    Returns the largest absolute value of each such tensor, by its module, and the nodes whose
    inputs are not observed any more.

    Raises:
        StageFailed: no operator with weights is left to quantize.
    """
    ranges, readers = find_vanishing(prepared)
    if not ranges:
        return {}, []
    operators = leave_float_(prepared, quantizer, readers)
    names = {module_of(node) or node.name: None for node in operators}
    reason = ", ".join(f"{name} is {largest:.2g} at most" for name, largest in ranges.items())
    if not any(
        node.target in (*WEIGHTED, EMBEDDING)
        and any(operand.op == "call_module" for operand in node.all_input_nodes)
        for node in prepared.graph.nodes
    ):
        raise StageFailed(
            f"calibration: {reason}, too small for integers, and nothing else is left to "
            "quantize; rescale the data or the weights"
        )
    logger.warning("calibration: %s stay float: %s, too small for integers", [*names], reason)
    return ranges, readers


def leave_float_(
    prepared: GraphModule, quantizer: OnnxRuntimeQuantizer, readers: Iterable[Node]
) -> list[Node]:
    """Compute nodes of a prepared graph in float, and return the operators among them."""
    detach_observers_(prepared, readers)
    operators = [node for node in readers if node.op == "call_function"]
    quantizer.leave_float(operators)
    return operators


def convert(prepared: GraphModule) -> GraphModule:
    """Return the integer form of a calibrated graph, which cannot be used afterwards."""
    converted = convert_pt2e(prepared)
    look_up_before_dequantizing_(converted)
    remove_unread_tensors_(converted)
    return converted


def look_up_before_dequantizing_(graph: GraphModule) -> None:
    """Move the dequantization of embedding tables behind the lookup."""
    # PT2E's conversion puts it before, so that each call would dequantize the whole table to read
    # some of its rows.
    for node in list(graph.graph.nodes):
        table = node.args[0] if node.target is EMBEDDING else None
        if table is None or table.target is not DEQUANTIZE_ROWS:
            continue
        integers, scale_V, *_ = table.args
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            rows = call(EMBEDDING, (integers, *node.args[1:]))
            column_V1 = call(aten.unsqueeze.default, (scale_V, 1))
            scales = call(EMBEDDING, (column_V1, node.args[1]))
            floats = call(aten.to.dtype, (rows, torch.float32))
            product = call(aten.mul.Tensor, (floats, scales))
            node.replace_all_uses_with(product, propagate_meta=True)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def require_matching_inputs(inputs: Sequence[torch.Tensor], signature: Signature) -> None:
    """Refuse inputs of another type or shape than the signature's with StageFailed."""
    actual = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in inputs]
    expected = [(spec.dtype, spec.shape) for spec in signature.inputs]
    matches = len(actual) == len(expected) and all(
        dtype == expected_dtype
        and len(shape) == len(expected_shape)
        # A size with a name is free.
        and all(isinstance(e, str) or e == n for n, e in zip(shape, expected_shape, strict=True))
        for (dtype, shape), (expected_dtype, expected_shape) in zip(actual, expected, strict=True)
    )
    if not matches:
        found, wanted = (
            " and ".join(f"{dtype} [{', '.join(map(str, shape))}]" for dtype, shape in tensors)
            for tensors in (actual, expected)
        )
        raise StageFailed(
            f"calibration: a batch of the data is {found}, expected {wanted}; mend the data or "
            "model.inputs"
        )
