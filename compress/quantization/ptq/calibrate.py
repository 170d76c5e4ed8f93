"""Post-training quantization of a captured graph: calibrate, correct, convert."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.quantization.algorithms.input_scaling import smooth_
from compress.quantization.algorithms.layer_corrections import (
    RELU,
    UNSUPPORTED,
    adaround_,
    correct_bias_,
    equalize_,
)
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.graph_capture import module_of, remove_unread_tensors_
from compress.quantization.pt2e.observer_ranges import (
    fit_ranges_,
    layers_of,
    module_or_tensor,
    monitor_ranges,
    observed,
    range_facts,
    require_finite,
    vanishing_ranges,
    weight_of,
)
from compress.quantization.pt2e.partial_graph import LayerInputs
from compress.quantization.pt2e.quantizer import (
    BATCH_NORM,
    CONVOLUTIONS,
    EMBEDDING,
    LINEAR,
    WEIGHTED,
    is_sequence_linear,
    protect_shared_layers_,
)
from compress.quantization.pt2e.torchao_api import convert_pt2e, prepare_pt2e

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Rounding, Scheme, Smoothing
    from compress.quantization.pt2e.observer_ranges import RangeMonitor
    from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer

logger = logging.getLogger(__name__)

aten = torch.ops.aten
DEQUANTIZE_ROWS = torch.ops.quantized_decomposed.dequantize_per_channel.default
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"bias_correction": True},
    {"observer": "mse"},
    {"equalize": True},
    {"smooth": "auto"},
)
"""Settings of `quantize_static`, each tried upon those that were kept before it.

The bias comes first: EfficientNet-Lite0 gains 6 dB by it, and half a dB by ranges alone. AdaRound
is left out: with weights of 8 bits it gains next to nothing for minutes of its own.
"""
ROWS = 32
"""Samples at most that ranges are found on, and as many more that noise is measured on."""
LEAST_GAIN_DB = 0.1
"""A correction that gains less is left out: over so few rows it may as well be chance."""

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
            self.facts["smoothed"], rescaled = smooth_(
                graph,
                batches,
                scheme,
                self.smooth,
                exclude,
                float_between_layers=self.float_between_layers,
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


def prepare_calibrated(
    graph: GraphModule,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    corrections: Corrections,
) -> GraphModule:
    """Return a captured graph with calibrated observers, ready to be converted; it is changed.

    Post-training quantization after Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference" (2018). `report` is called with the number of
    samples seen so far.

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
    reference: list[torch.Tensor] = []
    samples, differ = 0, False
    with monitor_ranges(prepared, signature) as monitors, torch.inference_mode():
        for batch in batches:
            require_matching_inputs(batch.inputs, signature)
            for spec, values in zip(signature.inputs, batch.inputs, strict=True):
                require_finite(values, f"input {spec.name}")
            reference = reference or [x[:1].clone() for x in batch.inputs]
            differ = differ or any(
                x.shape[1:] != y.shape[1:] or not bool((x == y).all())
                for x, y in zip(batch.inputs, reference, strict=True)
            )
            prepared(*batch.inputs)
            samples += len(batch)
            report(samples)
    if not differ:
        raise StageFailed(
            f"calibration: all {samples} samples are equal, expected samples that vary; mend the "
            "data"
        )
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
    ranges: dict[str, float] = {}
    readers: dict[Node, None] = {}
    for node, largest in vanishing_ranges(prepared):
        ranges[module_or_tensor(observed(node))] = largest
        readers |= dict.fromkeys(node.users)
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
    return ranges, [*readers]


def leave_float_(
    prepared: GraphModule, quantizer: OnnxRuntimeQuantizer, readers: Iterable[Node]
) -> list[Node]:
    """Compute nodes of a prepared graph in float, and return the operators among them."""
    observers = [n for n in prepared.graph.nodes if n.op == "call_module"]
    for reader in readers:
        # All of them: a kernel takes integers only where its other inputs are integers too.
        for operand in reader.all_input_nodes:
            if operand in observers:
                reader.replace_input_with(operand, observed(operand))
    for node in reversed(observers):
        if not node.users:
            prepared.graph.erase_node(node)
    prepared.recompile()
    operators = [node for node in readers if node.op == "call_function"]
    quantizer.leave_float(operators)
    return operators


def convert(prepared: GraphModule) -> GraphModule:
    """Return the integer form of a calibrated graph, which cannot be used afterwards."""
    graph = convert_pt2e(prepared)
    # PT2E's conversion dequantizes embedding tables before the lookup, so that each call would
    # dequantize the whole table to read some of its rows.
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
    remove_unread_tensors_(graph)
    return graph


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


def search_corrections(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    quantized: Callable[[Mapping[str, Any], list[Batch]], GraphModule],
    candidates: Iterable[dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the settings with the least output noise, and the SQNR of each trial in dB.

    Args:
        model: the float model.
        batches: calibration samples; ranges are found on every other batch until there are `ROWS`,
            and noise is measured on as many that no range has seen.
        quantized: settings and samples → the model quantized with them.
        candidates: changes of settings, each kept where it gains.
    """
    seen, held_out = halves(batches)
    with torch.inference_mode():
        expected = [flatten_outputs(model(*batch.inputs)) for batch in held_out]

    def sqnr(settings: Mapping[str, Any]) -> float:
        graph = quantized(settings, seen)
        deviations = [Deviation() for _ in expected[0]]
        with torch.inference_mode():
            for batch, outputs in zip(held_out, expected, strict=True):
                found = flatten_outputs(graph(*batch.inputs))
                for deviation, a, b in zip(deviations, outputs, found, strict=True):
                    deviation.add(a, b)
        # The mean over outputs: boxes in pixels would drown out probabilities in a sum of squares.
        return sum(deviation.sqnr_db for deviation in deviations) / len(deviations)

    chosen: dict[str, Any] = {}
    best = sqnr(chosen)
    tried = {"none": round(best, 2)}
    for candidate in candidates:
        settings = chosen | candidate
        decibels = sqnr(settings)
        tried[", ".join(f"{name}: {value}" for name, value in settings.items())] = round(
            decibels, 2
        )
        if decibels >= best + LEAST_GAIN_DB:
            chosen, best = settings, decibels
    logger.info("corrections: %s, of %s dB", chosen or "none", tried)
    return chosen, tried


def useful_candidates(graph: GraphModule) -> list[dict[str, Any]]:
    """Return the candidates that can change a captured graph: a trial costs a calibration."""
    nodes = graph.graph.nodes
    useless = set[str]()
    if not any(is_sequence_linear(node) for node in nodes if node.target is LINEAR):
        useless.add("smooth")
    if not any(_reads_convolution(node) for node in nodes if node.target in CONVOLUTIONS):
        useless.add("equalize")
    return [candidate for candidate in CANDIDATES if useless.isdisjoint(candidate)]


def _reads_convolution(node: Node) -> bool:
    before: Any = node.args[0]
    # BatchNorms, of whose outputs the first is taken, are folded before layers are equalized.
    while before.target in (RELU, BATCH_NORM, operator.getitem):
        before = before.args[0]
    return before.target in CONVOLUTIONS


def halves(batches: Iterable[Batch], rows: int = ROWS) -> tuple[list[Batch], list[Batch]]:
    """Return batches by turns: some to find ranges on, others to measure noise on.

    Raises:
        StageFailed: there is but one batch.
    """
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    counts = [0, 0]
    for batch in batches:
        place = counts.index(min(counts))
        parts[place].append(batch)
        counts[place] += len(batch)
        if min(counts) >= rows:
            break
    if not parts[1]:
        raise StageFailed(
            f"corrections: auto measures noise on samples that no range was found on, and all "
            f"{counts[0]} are one batch of the model; bring at least two batches"
        )
    return parts
