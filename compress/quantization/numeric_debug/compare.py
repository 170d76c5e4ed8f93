"""Compare a quantized graph with its float model: outputs, labels, and layer by layer.

A layer's error is measured twice. As the graph runs, a layer's output carries the quantization
error of all layers before it. To find the layer at fault, the graph is run once more, and each
layer is given the float model's output of the layer before: what differs then is its own error.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers choose_qparams
from torch import fx, nn
from torch.ao.quantization.utils import determine_qparams
from torch.nn.modules.batchnorm import _BatchNorm

from compress.common.errors import StageFailed
from compress.common.forward import Predictor, flatten_outputs, plain_attention
from compress.common.malloc import trim_memory
from compress.core.context import COMPARED_BATCHES, QUICK_SAMPLES, Context
from compress.graph.constant_folding import fold_constants_, fuse_rounding_
from compress.graph.flops import count_macs
from compress.quantization.numeric_debug.fidelity_report import (
    Fidelity,
    LayerFidelity,
    MetricPair,
    OutputFidelity,
)
from compress.quantization.numeric_debug.sqnr import Deviation, OutputDeviation
from compress.quantization.pt2e.graph_capture import NodeTap, module_names

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.data.targets import Targets

    Tensors = tuple[torch.Tensor, ...]

# torchao's numeric debugger has only the first (`prepare_for_propagation_comparison`), by node
# instead of by the user's module, and keeps every output in memory; so it is not used here.

LayerCall = tuple[str, int]
"""A module's name, and how many times it was called before in the same run."""
SAMPLES, FEWEST_SAMPLES = 256, 8
LARGEST_MACS = 8 * 10**9
"""Multiply-accumulates of all samples in the float model, beyond the fewest: torch takes several
times as long for a graph with integers, which runs twice, and each output of a layer is read. By a
count and not by time, as manifests record what was found."""
LARGEST_BATCH = 64
FEW_ROWS = 1
"""Samples of the comparison where each call reads all weights from disk: the scores of a long text
alone take as much memory as a block."""
SEEDED_ROWS = 8  # rows of a batch where there is no data
MAX_BYTES = 2**24  # memory for the outputs of all layers of one batch


def compare(
    module: nn.Module,
    graph: fx.GraphModule,
    signature: Signature,
    context: Context,
    rescaled: Collection[str] = (),
) -> Fidelity:
    """Measure how near a quantized graph's outputs are to its float model's.

    A seeded sample of at most 256 samples of `val`, or 8 for a large model, runs once through the
    module, which is left with hooks, and twice through the graph, which is made quicker in
    place, on the CPU; without data a few seeded inputs do. Modules in `rescaled`, whose outputs
    have other scales in the graph, are not compared. StageFailed where outputs of the graph have
    other shapes, or are not finite.
    """
    fold_constants_(graph)
    fuse_rounding_(graph)
    # At the sizes of `val`: on 128 tokens a sample costs 16 times as much as on the usual 8.
    example = signature.example(sizes=context.typical_sizes(signature))
    affordable = LARGEST_MACS // max(1, count_macs(module, example))
    fewest, most = FEWEST_SAMPLES, SAMPLES
    if context.is_quick:
        affordable, fewest, most = affordable // 4, 2, QUICK_SAMPLES
    samples = max(fewest, min(most, affordable))
    # Ranges of a whole call depend on its rows; such graphs are served one row at a time.
    one_by_one = has_call_ranges(graph) and not (
        signature.batch_axis and choose_ranges_by_row_(graph)
    )
    layers = {n: call for n, call in layer_calls(graph, module).items() if call[0] not in rescaled}
    names_in_graph = {name for node in graph.graph.nodes for name in module_names(node)}
    reference = LayerOutputRecorder(module, {name for name, _ in layers.values()}, names_in_graph)
    indices, batch_size = _sample(signature, context, samples, one_by_one=one_by_one)
    batches: Iterable[tuple[Tensors, Targets | None]]
    if indices:
        total = len(indices)
        batches = _batches_of_val(reference, indices, batch_size, context)
    else:
        rows = batch_size or SEEDED_ROWS
        seeded = COMPARED_BATCHES * (SEEDED_ROWS if one_by_one and batch_size == 1 else 1)
        total = seeded * len(signature.example(batch=rows)[0])
        batches = ((signature.example(rows, context.seed + i), None) for i in range(seeded))
    result = _Comparison(signature, context)
    trim_memory()  # what loading and folding took
    with torch.inference_mode(), plain_attention():
        for inputs, target in batches:
            expected = reference(*inputs)
            common = (graph, layers, reference.outputs)
            as_run = compare_layers(*common, result.layers, inputs, replace=False)
            result.add(expected, flatten_outputs(as_run), target, inputs[0].shape[:1].numel())
            compare_layers(*common, result.own, inputs, replace=True)
            context.progress("compare with the float model", result.samples, total)
    return result.fidelity()


def _batches_of_val(
    reference: LayerOutputRecorder, indices: list[int], size: int | None, context: Context
) -> Iterator[tuple[Tensors, Targets | None]]:
    """Yield samples in batches of a size, or else of as many as their layers' outputs allow."""
    data = context.need_data("val")
    if size is None:
        (sample,) = data.read("val", indices[:1], 1)
        reference(*sample.inputs)
        of_one = sum(output.nbytes for output in reference.outputs.values())
        size = max(1, min(LARGEST_BATCH, MAX_BYTES // max(of_one, 1)))
    for batch in data.read("val", indices, size):
        yield batch.inputs, batch.target


def compare_outputs(
    expected: Predictor, actual: Predictor, signature: Signature, context: Context
) -> Fidelity:
    """Measure how near a quantized model's outputs are to its float model's, on one small batch.

    For models whose weights stay on disk, of which each call reads all; layers are not compared.
    """
    result = _Comparison(signature, context)
    indices, batch_size = _sample(signature, context, FEW_ROWS, one_by_one=False)
    rows = batch_size or FEW_ROWS
    if context.data is not None and (chosen := indices[:rows]):
        for batch in context.data.read("val", chosen, rows):
            result.add(expected(*batch.inputs), actual(*batch.inputs), batch.target, len(chosen))
    else:
        inputs = signature.example(batch=rows, seed=context.seed)
        result.add(expected(*inputs), actual(*inputs), None, rows)
    return result.fidelity()


class _Comparison:
    def __init__(self, signature: Signature, context: Context) -> None:
        self.signature, self.context = signature, context
        metric = context.metric.for_model(signature).with_inferred_loss(context.data)
        # Of the float model and of the graph, for their first outputs.
        self.meters = (metric.meter(), metric.meter())
        self.is_measured = True  # the metric, on every batch so far
        self.targets_are_labels = True  # every target, one for each of the model's
        self.equal_labels = self.labels = self.samples = 0
        self.outputs: list[OutputDeviation] = []
        self.layers: dict[str, Deviation] = defaultdict(Deviation)
        self.own: dict[str, Deviation] = defaultdict(Deviation)

    def add(self, expected: Tensors, actual: Tensors, target: Targets | None, rows: int) -> None:
        if [a.shape for a in expected] != [b.shape for b in actual]:
            shapes = [[tuple(t.shape) for t in side] for side in (actual, expected)]
            raise StageFailed(
                f"the quantized model's outputs have shapes {shapes[0]}, the float model's "
                f"{shapes[1]}"
            )
        self.outputs = self.outputs or [OutputDeviation() for _ in expected]
        for deviation, a, b in zip(self.outputs, expected, actual, strict=True):
            deviation.add(a, b)
        self.samples += rows
        self.is_measured &= target is not None
        if self.is_measured and target is not None:
            try:
                for meter, outputs in zip(self.meters, (expected, actual), strict=True):
                    meter.update(outputs, target)
            except Exception:  # noqa: BLE001 - a metric of the user's may raise any
                self.is_measured = False
        scores, others = expected[0], actual[0]
        if task := self.meters[0].metric.loss.task:
            scores, others = task.classes_first(scores), task.classes_first(others)
            self.targets_are_labels &= task.labels == "class"
        if scores.dim() < 2 or scores.shape[1] < 2 or not scores.is_floating_point():
            self.targets_are_labels = False  # outputs are no scores of classes
            return
        expected_labels, labels = scores.argmax(1), others.argmax(1)
        self.equal_labels += int((expected_labels == labels).sum())
        self.labels += labels.numel()
        self.targets_are_labels &= (
            isinstance(target, torch.Tensor)
            and not target.is_floating_point()
            and target.shape == labels.shape
        )

    def _metric_pair(self) -> MetricPair | None:
        """Return the metric of both models; None where it cannot be measured."""
        metric = self.context.metric
        if not self.is_measured or metric.needs_reference:
            return None
        try:
            before, after = (meter.compute() for meter in self.meters)
        except Exception:  # noqa: BLE001 - a metric of the user's may raise any
            return None
        if not (math.isfinite(before) and math.isfinite(after)):
            return None
        return MetricPair(name=metric.name, before=round(before, 6), after=round(after, 6))

    def fidelity(self) -> Fidelity:
        """Summarize the sums, rounded, so that figures do not depend on how sums are split up."""
        outputs = [*zip(self.signature.outputs, self.outputs, strict=False)]
        for spec, deviation in outputs:
            if not deviation.is_finite:
                layer = next((n for n, d in self.layers.items() if not d.is_finite), None)
                place = f", from layer {layer} on" if layer else ""
                raise StageFailed(
                    f"output {spec.name} of the quantized model is NaN or infinite{place}, where "
                    "the float model's is finite; leave that part in float with `exclude`"
                )
        data = self.context.data
        known = self.labels and (self.targets_are_labels or self.context.metric.needs_reference)
        layers = [
            LayerFidelity(
                module=module,
                sqnr_db=round(self.layers[module].sqnr_db, 1),
                own_sqnr_db=round(own.sqnr_db, 1),
            )
            for module, own in self.own.items()
        ]
        return Fidelity(
            samples=self.samples,
            split="val" if data is not None and "val" in data.datasets else None,
            label_agreement=round(self.equal_labels / self.labels, 6) if known else None,
            metric=self._metric_pair(),
            outputs=tuple(
                OutputFidelity(
                    name=spec.name, cosine=round(d.cosine, 5), sqnr_db=round(d.sqnr_db, 1)
                )
                for spec, d in outputs
            ),
            layers=tuple(sorted(layers, key=lambda layer: layer.own_sqnr_db)),
        )


def _sample(
    signature: Signature, context: Context, samples: int, *, one_by_one: bool
) -> tuple[list[int], int | None]:
    """Draw seeded indices into `val` that fill batches, some twice; return them and the size."""
    batch_size = 1 if one_by_one else None
    if not signature.batch_axis:
        batch_size = int(next(iter(signature.inputs[0].shape), 1))
    indices: list[int] = []
    if context.data is not None and "val" in context.data.datasets:
        generator = torch.Generator().manual_seed(context.seed)
        available = len(context.data.split("val"))  # type: ignore[arg-type]
        indices = torch.randperm(available, generator=generator)[:samples].tolist()
        missing = -len(indices) % (batch_size or 1)
        indices += (indices * (missing // len(indices) + 1))[:missing]
    return indices, batch_size


def layer_calls(graph: fx.GraphModule, module: nn.Module) -> dict[fx.Node, LayerCall]:
    """Return the last node of each call of a module that has a weight (two axes and more)."""
    weighted = {
        name
        for name, part in module.named_modules()
        if any(p.dim() > 1 for p in part.parameters(recurse=False))
    }
    last_nodes: dict[str, tuple[fx.Node, str]] = {}
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for name, call in zip(reversed(module_names(node)), reversed(stack), strict=False):
            if name in weighted:
                last_nodes[call] = node, name
    counts: Counter[str] = Counter()
    layers: dict[fx.Node, LayerCall] = {}
    for node, name in last_nodes.values():
        layers[node] = name, counts[name]
        counts[name] += 1
    return layers


class LayerOutputRecorder:
    """Runs a float module and records the output of its layers, with forward hooks."""

    def __init__(
        self, module: nn.Module, names: Collection[str], names_in_graph: Collection[str]
    ) -> None:
        """Register hooks on the layers `names`, which the module keeps."""
        self.module = module
        self.outputs: dict[LayerCall, torch.Tensor] = {}  # of each call of a layer in the last run
        self._counts: Counter[str] = Counter()
        self._latest: tuple[LayerCall, torch.Tensor] | None = None
        for name, part in module.named_modules():
            if name in names:
                part.register_forward_hook(partial(self._record, name))
            # Folded into the layer before it: its output counts as that layer's.
            elif isinstance(part, _BatchNorm) and name not in names_in_graph:
                part.register_forward_hook(partial(self._record, None))

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the module, and return its outputs."""
        self.outputs, self._latest = {}, None
        self._counts.clear()
        return flatten_outputs(self.module(*inputs))

    def _record(self, name: str | None, part: nn.Module, inputs: Any, output: Any) -> None:
        if name is not None:
            call = name, self._counts[name]
            self._counts[name] += 1
        elif self._latest is not None and inputs and inputs[0] is self._latest[1]:
            call = self._latest[0]
        else:
            return
        if isinstance(output, torch.Tensor):
            self._latest = call, output
            self.outputs[call] = output.clone()  # an in-place activation may overwrite it


def compare_layers(
    graph: fx.GraphModule,
    layers: Mapping[fx.Node, LayerCall],
    expected: dict[LayerCall, torch.Tensor],
    deviations: dict[str, Deviation],
    inputs: Tensors,
    *,
    replace: bool,
) -> Any:
    """Run a quantized graph, add up the deviation of its layers' outputs, and return its own.

    With `replace` it goes on with the float model's output after each layer, whose deviation is
    then its own error.
    """

    def observe(node: fx.Node, source: Any, output: Any) -> Any:
        call = layers[node]
        # What goes on may be written to: it is given away.
        reference = expected.pop(call, None) if replace else expected.get(call)
        if reference is None or not isinstance(output, torch.Tensor):
            return output
        if output.shape != reference.shape:
            return output
        deviations[call[0]].add(reference, output)
        return reference.to(output.dtype) if replace else output

    return NodeTap(graph, layers, observe).run(*inputs)


DECOMPOSED = torch.ops.quantized_decomposed
CHOOSE = DECOMPOSED.choose_qparams.tensor


def has_call_ranges(graph: fx.GraphModule) -> bool:
    """Whether a graph's outputs for a row depend on the other rows of the call."""
    return any(node.target is CHOOSE for node in graph.graph.nodes)


def choose_ranges_by_row_(graph: fx.GraphModule) -> bool:
    """Let a graph that takes any number of rows choose a range for each, in place.

    Rows of a batch then have the outputs that each has alone, up to rounding. False, with the graph
    as it was, where a tensor's first axis is not that of the rows, or scales are read by other
    operators than those that quantize and dequantize.
    """
    rows = next(iter(graph.graph.find_nodes(op="placeholder"))).meta["val"].shape[0]
    by_row: dict[Any, Any] = {
        DECOMPOSED.quantize_per_tensor.tensor: _quantize,
        DECOMPOSED.dequantize_per_tensor.tensor: _dequantize,
    }
    readers: list[fx.Node] = []
    chosen = graph.graph.find_nodes(op="call_function", target=CHOOSE)
    for choose in chosen:
        value = choose.args[0].meta.get("val")
        if not isinstance(rows, torch.SymInt) or value is None or not value.dim():
            return False
        if str(value.shape[0]) != str(rows):
            return False
        for part in choose.users:
            readers += part.users
            if part.target is not operator.getitem:
                return False
    if any(reader.target not in by_row for reader in readers):
        return False
    for choose in chosen:
        choose.target = _choose
    for reader in {*readers}:
        reader.target = by_row[reader.target]
    graph.recompile()
    return True


def _choose(
    x: torch.Tensor, least: int, most: int, smallest: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point of each row, in the shape [rows, 1, …]."""
    low_N, high_N = x.flatten(1).aminmax(dim=1)
    scale_N, zero_N = determine_qparams(
        low_N, high_N, least, most, dtype, torch.tensor([smallest]), has_customized_qrange=False
    )
    shape = (len(x), *[1] * (x.dim() - 1))
    return scale_N.reshape(shape), zero_N.reshape(shape)


# This and the next as quantize_per_tensor and dequantize_per_tensor, which take a single scale.
def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    integers = torch.round(x * (1.0 / scale).to(x.dtype)) + zero
    return integers.clamp(least, most).to(dtype)


def _dequantize(
    integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *_limits: Any, **_out: Any
) -> torch.Tensor:
    return (integers.to(torch.float32) - zero) * scale.float()
