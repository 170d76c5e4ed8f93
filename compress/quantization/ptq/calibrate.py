"""Post-training quantization of a captured graph: calibrate, correct, convert.

Ranges of activations are calibrated beforehand, or found in each call (dynamic quantization).
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_token and its inverse

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs, run_in_eval
from compress.graph.lifting import program_of_graph
from compress.quantization.algorithms.input_scaling import smooth_
from compress.quantization.algorithms.layer_corrections import (
    RELU,
    adaround_,
    correct_bias_,
    equalize_,
    gptq_,
)
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.graph_capture import (
    LayerInputs,
    capture,
    is_excluded,
    module_of,
    remove_unread_tensors_,
)
from compress.quantization.pt2e.observer_ranges import (
    fit_ranges_,
    layers_of,
    module_or_tensor,
    monitor_ranges,
    observed,
    observer_of,
    range_facts,
    require_finite,
    set_weight_,
    skip_observers,
    vanishing_ranges,
    weight_of,
)
from compress.quantization.pt2e.quantizer import (
    BATCH_NORM,
    CONVOLUTIONS,
    EMBEDDING,
    LINEAR,
    SMALLEST_SCALE,
    WEIGHTED,
    OnnxRuntimeQuantizer,
    find_float_modules,
    is_constant,
    is_float,
    is_sequence_linear,
    protect_shared_layers_,
    qspec,
)
from compress.quantization.pt2e.torchao_api import (
    PlaceholderObserver,
    convert_pt2e,
    prepare_pt2e,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.algorithms.layer_corrections import InputPairs
    from compress.quantization.config.dtype_scheme import (
        IntegerFormat,
        Rounding,
        Scheme,
        Smoothing,
    )
    from compress.quantization.pt2e.observer_ranges import RangeMonitor

logger = logging.getLogger(__name__)

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
LARGEST = 127
"""Largest integer of a row; ranges are symmetric, so that all rows have the zero point 0."""
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"bias_correction": True},
    {"observer": "l3"},
    {"equalize": True},
    {"smooth": "auto"},
    {"rounding": "gptq"},
)
"""Settings of `quantize_static`, each tried upon those that were kept before it.

The bias comes first: EfficientNet-Lite0 gains 6 dB by it, and half a dB by ranges alone. GPTQ comes
last, as it takes twice as long as all else of a trial. AdaRound is left out: with weights of 8 bits
it gains next to nothing for minutes of its own.
"""
ROWS = 32  # samples from which on no more batches find ranges of a trial, or measure its noise
LEAST_GAIN_DB = 0.25
"""A correction that gains less is left out: over so few rows it may as well be chance.

A tenth of a dB gave EfficientNet-Lite0 another observer, which took a sixth of the run's time and
left 94 % of the labels equal instead of 95 %.
"""
MEAN_SAMPLES, MEAN_VALUES = 64, 2**22
"""Bias correction stops after so many samples with so many input values: a mean over samples and
positions is known then, and an image of 224² costs several times what calibration does."""


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

    def round_(
        self,
        prepared: GraphModule,
        batches: Iterable[Batch],
        rounded: dict[str, RoundedWeight] | None = None,
    ) -> None:
        """Apply AdaRound or GPTQ and bias correction to a calibrated graph, layer after layer.

        In graph order, so that each layer compensates the quantization error of those before it.
        `rounded` has weights by their names that GPTQ has rounded, in another copy of the graph
        too, and is given others.
        """
        if self.rounding == "nearest" and not self.bias_correction:
            return
        if self.rounding != "adaround":
            batches = enough_for_means(batches)
        changed: list[float] = []
        with LayerInputs(prepared, batches) as inputs:
            for layer in layers_of(prepared):
                observed: Any = layer.args[:2]
                if any(operand.op != "call_module" for operand in observed):
                    continue  # its input or weight stays float
                weight = weight_of(prepared, layer)
                # Rounding first: the bias corrects the shift that it leaves.
                pairs = inputs.pairs(layer)
                if self.rounding == "adaround":
                    changed.append(adaround_(prepared, layer, pairs, self.rounding_steps))
                elif self.rounding == "gptq":
                    is_corrected = self.bias_correction
                    changed.append(
                        gptq_once_(prepared, layer, pairs, rounded, bias_correction=is_corrected)
                    )
                if self.bias_correction:
                    correct_bias_(prepared, layer, weight, inputs.pairs(layer))
        if changed:
            self.facts["rounded_away"] = round(sum(changed) / len(changed), 4)


@dataclass(frozen=True)
class RoundedWeight:
    """What GPTQ made of a weight that was given with the scales of its outputs."""

    given: torch.Tensor
    scale_O: torch.Tensor  # noqa: N815 - the letter names the axis
    weight: torch.Tensor
    share: float
    """Of weights that are not rounded to nearest."""


def gptq_once_(
    prepared: GraphModule,
    layer: Node,
    pairs: InputPairs,
    rounded: dict[str, RoundedWeight] | None,
    *,
    bias_correction: bool,
) -> float:
    """Round a layer's weight, or take it as it is known; return the share not to nearest."""
    if rounded is None:  # two floats of each weight are not kept for nothing
        return gptq_(prepared, layer, pairs, bias_correction=bias_correction)
    name, given = skip_observers(layer.args[1]).target, weight_of(prepared, layer)
    scale_O, _ = observer_of(prepared, layer.args[1]).calculate_qparams()
    known = rounded.get(name)
    if known and torch.equal(known.given, given) and torch.equal(known.scale_O, scale_O):
        set_weight_(prepared, layer, known.weight)
    else:
        share = gptq_(prepared, layer, pairs, bias_correction=bias_correction)
        known = RoundedWeight(given, scale_O, weight_of(prepared, layer), share)
        rounded[name] = known
    return known.share


def enough_for_means(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches until there are `MEAN_SAMPLES` samples and `MEAN_VALUES` input values."""
    samples = values = 0
    for batch in batches:
        yield batch
        samples += len(batch)
        values += input_values(batch)
        if samples >= MEAN_SAMPLES and values >= MEAN_VALUES:
            return


def input_values(batch: Batch) -> int:
    """Count the numbers of a batch's inputs."""
    return sum(x.numel() for x in batch.inputs)


def prepare_calibrated(
    graph: GraphModule,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    corrections: Corrections,
) -> GraphModule:
    """Return a captured graph with calibrated observers, ready to be rounded; it is changed.

    Post-training quantization after Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference" (2018). `report` is called with the number of
    samples seen so far. StageFailed where nothing can be quantized, the data does not fit the
    signature or does not vary, or activations are not finite or too small for integers.
    """
    corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare(graph, quantizer)
    if corrections.equalize:  # it needs folded BatchNorms, which `prepare` leaves
        equalized = equalize_(prepared)
        corrections.facts["equalized_pairs"] = len(equalized)
        corrections.rescaled |= set(equalized)
    monitors = calibrate_(prepared, signature, batches, report)
    vanishing, _ = leave_vanishing_float_(prepared, quantizer)
    fit_ranges_(prepared)
    quantizer.ranges = range_facts(monitors) | {"vanishing_ranges": vanishing}
    return prepared


def prepare(graph: GraphModule, quantizer: OnnxRuntimeQuantizer) -> GraphModule:
    """Fold BatchNorms and insert observers; StageFailed where nothing can be quantized."""
    protect_shared_layers_(graph)
    prepared: GraphModule = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(f"no operator could be quantized; expected {quantizer.expected}")
    return prepared


def calibrate_(
    prepared: GraphModule,
    signature: Signature,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> list[RangeMonitor]:
    """Run batches through a graph, to find ranges; StageFailed if data do not fit or vary."""
    reference: list[torch.Tensor] = []
    samples, differ = 0, False
    with ExitStack() as stack:
        monitors = stack.enter_context(monitor_ranges(prepared, signature))
        # A histogram would copy each tensor into the order of its axes.
        if all(monitor.histogram is None for monitor in monitors):
            stack.enter_context(channels_last(prepared))
        stack.enter_context(torch.inference_mode())  # last: weights must not be of this mode
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


@contextmanager
def channels_last(graph: GraphModule) -> Iterator[None]:
    """Let a graph's convolutions keep the channels of a pixel together, in a block.

    What follows a convolution has the layout of its weight. EfficientNet-Lite0 and ResNet-18 take
    a fifth less time on a processor so.
    """
    # Not `graph.to`, which fails for weights of five axes; and not `contiguous`, which leaves those
    # of depthwise layers as they are, whose outputs then have the usual layout.
    weights = [p for p in (*graph.parameters(), *graph.buffers()) if p.dim() == len("NCHW")]
    for weight in weights:
        weight.data = weight.data.clone(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)


def leave_vanishing_float_(
    prepared: GraphModule, quantizer: OnnxRuntimeQuantizer
) -> tuple[dict[str, float], list[Node]]:
    """Leave operators float whose inputs or weights are too small for integers, with a warning.

    Returns the largest absolute value of each such tensor, by its module, and the nodes whose
    inputs are not observed any more. StageFailed where no weight is left to quantize.
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
        if table is None or table.target is not decomposed.dequantize_per_channel.default:
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


@dataclass(frozen=True)
class TrialSamples:
    """Calibration samples that corrections are tried on, in batches."""

    seen: list[Batch]
    """Those that ranges are found on, and biases corrected: batches until there are `ROWS`."""
    rounding: list[Batch]
    """Those that GPTQ reads: the same, and as many more as it would read of all."""
    held_out: list[Batch]
    """Those that noise is measured on, about a quarter of all: no trial has seen them."""

    @classmethod
    def from_batches(cls, batches: Iterable[Batch], count: int) -> TrialSamples:
        """Share out batches of so many samples by turns; StageFailed where there is but one."""
        rounding: list[Batch] = []
        held_out: list[Batch] = []
        held = others = values = 0
        for batch in batches:
            if held < min(others, ROWS, count / 4):
                held_out.append(batch)
                held += len(batch)
            elif others < MEAN_SAMPLES or values < MEAN_VALUES:
                rounding.append(batch)
                others += len(batch)
                values += input_values(batch)
            else:
                break
        if not held_out:
            raise StageFailed(
                f"corrections: auto measures noise on samples that no range was found on, and all "
                f"{count} are one batch of the model; bring at least two batches"
            )
        ends = [*accumulate(map(len, rounding))]
        return cls(rounding[: bisect_left(ends, ROWS) + 1], rounding, held_out)


def search_corrections(
    model: torch.nn.Module,
    held_out: Sequence[Batch],
    quantized: Callable[[Mapping[str, Any]], Callable[..., Any]],
    candidates: Iterable[dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the settings with the least output noise, and the SQNR of each trial in dB.

    Each candidate is kept where it gains. `quantized` returns a function that runs the model
    quantized with settings; noise is measured on batches that it has not seen.
    """
    expected = [run_in_eval(model, batch.inputs) for batch in held_out]

    def sqnr(settings: Mapping[str, Any]) -> float:
        graph = quantized(settings)
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
        title = ", ".join(f"{name}: {value}" for name, value in settings.items())
        tried[title] = round(decibels, 2)
        if decibels >= best + LEAST_GAIN_DB:
            chosen, best = settings, decibels
    logger.info("corrections: %s, of %s dB", chosen or "none", tried)
    return chosen, tried


def useful_candidates(graph: GraphModule) -> list[dict[str, Any]]:
    """Return the candidates that can change a captured graph: a trial costs a calibration."""
    useless = {"smooth", "equalize"}
    for node in graph.graph.nodes:
        if is_sequence_linear(node):
            useless.discard("smooth")
        if node.target in CONVOLUTIONS:
            before = node.args[0]
            # BatchNorms, of whose outputs the first is taken, are folded before layers are
            # equalized.
            while before.target in (RELU, BATCH_NORM, operator.getitem):
                before = before.args[0]
            if before.target in CONVOLUTIONS:
                useless.discard("equalize")
    return [candidate for candidate in CANDIDATES if useless.isdisjoint(candidate)]


class DynamicQuantizer(OnnxRuntimeQuantizer):
    """Annotates linear and recurrent layers, and embeddings; convolutions stay float."""

    expected = (
        "a float32 linear or recurrent layer or an embedding that `exclude` does not name; for "
        "convolutions use quantize_static"
    )
    # onnxruntime's integer convolution with run-time ranges is far slower than its float one.

    def __init__(
        self, scheme: Scheme, exclude: Sequence[str] = (), *, embeddings: bool, by_row: bool = False
    ) -> None:
        """Choose the formats; with `by_row` each row of an activation has a range of its own."""
        super().__init__(scheme, "minmax", exclude, embeddings=embeddings)
        self.by_row = by_row
        self.activation = replace(qspec(scheme.activations, PlaceholderObserver), is_dynamic=True)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the operators to be quantized, in graph order."""
        for node in model.graph.nodes:
            if node.op != "call_function" or is_excluded(node, self.exclude):
                continue
            if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
                source, weight = node.args[:2]
                self._annotate_inputs(node, {source: self.activation, weight: self.weight})
            elif node.target is EMBEDDING:
                self._annotate_embedding(node)
            # Integer kernels of recurrent layers take one range for all rows.
            elif node.target in RECURRENT and not self.by_row:
                matrices = [w for w in node.args[2] if w.meta["val"].dim() == 2]
                if all(is_constant(w) and is_float(w) for w in matrices):
                    self._annotate_inputs(node, dict.fromkeys(matrices, self.weight))
        self.float_modules = find_float_modules(model)
        return model


def quantize_dynamic(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: DynamicQuantizer,
    batches: Iterable[Batch],
    corrections: Corrections,
) -> ExportedProgram:
    """Return a graph of integer weights, ranges found in each call; SmoothQuant reads batches."""
    graph = capture(module, signature)
    corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare(graph, quantizer)
    with torch.inference_mode():
        prepared(*signature.example())  # observers of weights see them only when the graph runs
    integers = convert(prepared)
    if quantizer.by_row:
        scale_rows_(integers, quantizer.scheme.activations)
    return program_of_graph(integers, signature)


def scale_rows_(graph: GraphModule, activations: IntegerFormat) -> None:
    """Replace the range of a whole activation by one for each row, so that rows are independent.

    A row is what the last axis holds, over which a linear layer sums. Signed activations with a
    zero point get a row's extremes, as XNNPACK's kernels take them; others its largest magnitude.
    """
    call = graph.graph.call_function
    has_zero_points = activations.dtype == "int8" and not activations.symmetric
    least, most, dtype = -128 if has_zero_points else -LARGEST, LARGEST, torch.int8
    for qparams in graph.graph.find_nodes(
        op="call_function", target=decomposed.choose_qparams.tensor
    ):
        source = qparams.args[0]
        with graph.graph.inserting_before(qparams):
            if has_zero_points:
                rows = decomposed.choose_qparams_per_token_asymmetric.default
                both = call(rows, (source, torch.int8))
                scale, zero = (call(operator.getitem, (both, i)) for i in (0, 1))
            else:
                largest = call(aten.amax.default, (call(aten.abs.default, (source,)), [-1], True))
                scale = call(aten.mul.Tensor, (largest, 1 / LARGEST))
                scale = call(aten.clamp_min.default, (scale, SMALLEST_SCALE))
                zero = call(aten.zeros_like.default, (scale,))
        per_tensor = decomposed.quantize_per_tensor.tensor
        readers = [node for node in source.users if node.target is per_tensor]
        for quantize in [node for node in readers if node.args[1].args[:1] == (qparams,)]:
            with graph.graph.inserting_before(quantize):
                integers = call(
                    decomposed.quantize_per_token.default, (source, scale, zero, least, most, dtype)
                )
            for dequantize in list(quantize.users):
                with graph.graph.inserting_before(dequantize):
                    floats = call(
                        decomposed.dequantize_per_token.default,
                        (integers, scale, zero, least, most, dtype, torch.float32),
                    )
                floats.meta |= {k: v for k, v in dequantize.meta.items() if k != "val"}
                dequantize.replace_all_uses_with(floats)
                graph.graph.erase_node(dequantize)
    graph.graph.eliminate_dead_code()
    graph.recompile()
