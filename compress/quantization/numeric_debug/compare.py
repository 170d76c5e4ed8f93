"""Compare a quantized graph with its float model: outputs, labels, and layer by layer.

A layer's error is measured twice. As the graph runs, a layer's output carries the quantization
error of all layers before it. To find the layer at fault, the graph is run once more, and each
layer is given the float model's output of the layer before: what differs then is its own error.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers choose_qparams
from torch import fx
from torch.ao.quantization.utils import determine_qparams
from torch.nn.modules.batchnorm import _BatchNorm

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs, plain_attention
from compress.core.context import COMPARED_BATCHES, QUICK_SAMPLES
from compress.graph.constant_folding import fold_constants_
from compress.graph.flops import count_macs
from compress.quantization.numeric_debug.activation_tap import NodeTap
from compress.quantization.numeric_debug.fidelity_report import (
    Fidelity,
    LayerFidelity,
    MetricPair,
    OutputFidelity,
)
from compress.quantization.numeric_debug.sqnr import Deviation, OutputDeviation
from compress.quantization.pt2e.graph_capture import module_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import fx, nn

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.metrics import Metric, MetricMeter
    from compress.data.targets import Targets

    Tensors = tuple[torch.Tensor, ...]

# torchao's numeric debugger has only the first (`prepare_for_propagation_comparison`), by node
# instead of by the user's module, and keeps every output in memory; so it is not used here.

LayerCall = tuple[str, int]
"""A module's name, and how many times it was called before in the same run."""
SAMPLES, FEWEST_SAMPLES = 256, 8
LARGEST_MACS = 2 * 10**10
"""Multiply-accumulates of all samples in the float model, beyond the fewest: torch takes several
times as long for a graph with integers, which runs twice. By a count and not by time, as manifests
record what was found."""
LARGEST_BATCH = 64
FEW_ROWS = 1
"""Samples of the comparison where each call reads all weights from disk: the scores of a long text
alone take as much memory as a block."""
SEEDED_ROWS = 8
"""Rows of a batch where there is no data."""
MAX_BYTES = 2**26
"""Memory for the outputs of all layers of one batch."""


def compare(
    module: nn.Module,
    graph: fx.GraphModule,
    signature: Signature,
    context: Context,
    rescaled: Collection[str] = (),
) -> Fidelity:
    """Measure how near a quantized graph's outputs are to its float model's.

    A seeded sample of at most 256 samples of `val`, or 8 for a large model, runs once through the
    module, which is left with hooks, and twice through the graph, whose constants are folded in
    place, on the CPU; without data a few seeded inputs do. Modules in `rescaled`, whose outputs
    have other scales in the graph, are not compared.

    Raises:
        StageFailed: the graph has outputs of other shapes, or some that are not finite.
    """
    fold_constants_(graph)
    # At the sizes of `val`: on 128 tokens a sample costs 16 times as much as on the usual 8.
    example = signature.example(sizes=context.typical_sizes(signature))
    affordable = LARGEST_MACS // max(1, count_macs(module, example))
    fewest, most = (2, QUICK_SAMPLES) if context.is_quick else (FEWEST_SAMPLES, SAMPLES)
    samples = max(fewest, min(most, affordable))
    # Ranges of a whole call depend on its rows; such graphs are served one row at a time.
    one_by_one = has_call_ranges(graph) and not (
        signature.batch_axis and choose_ranges_by_row_(graph)
    )
    layers = {n: call for n, call in layer_calls(graph, module).items() if call[0] not in rescaled}
    names_in_graph = {name for node in graph.graph.nodes for name in module_names(node)}
    reference = LayerOutputRecorder(module, {name for name, _ in layers.values()}, names_in_graph)
    sample = _Sample.from_context(signature, context, samples, one_by_one=one_by_one)
    result = _Comparison.of_metric(signature, context)
    with torch.inference_mode(), plain_attention():
        for inputs, target in sample.batches(reference):
            expected = reference(*inputs)
            as_run = LayerComparison(graph, layers, reference.outputs, result.layers, replace=False)
            result.add(expected, flatten_outputs(as_run.run(*inputs)), target)
            LayerComparison(graph, layers, reference.outputs, result.own, replace=True).run(*inputs)
            context.progress("compare with the float model", result.samples, len(sample))
    result.require_finite(signature)
    return result.fidelity(signature, context)


def compare_outputs(
    expected: Predictor, actual: Predictor, signature: Signature, context: Context
) -> Fidelity:
    """Measure how near a quantized model's outputs are to its float model's, on one small batch.

    For models whose weights stay on disk, of which each call reads all; layers are not compared.

    Raises:
        StageFailed: there are outputs of other shapes, or some that are not finite.
    """
    result = _Comparison.of_metric(signature, context)
    sample = _Sample.from_context(signature, context, FEW_ROWS, one_by_one=False)
    rows = sample.batch_size or FEW_ROWS
    if context.data is not None and sample.indices:
        chosen = sample.indices[:rows]
        batches = [(b.inputs, b.target) for b in context.data.read("val", chosen, rows)]
    else:
        batches = [(signature.example(batch=rows, seed=context.seed), None)]
    for inputs, target in batches:
        result.add(expected(*inputs), actual(*inputs), target)
    result.require_finite(signature)
    return result.fidelity(signature, context)


@dataclass
class _Comparison:
    """The sums over the batches compared so far."""

    meters: tuple[MetricMeter, MetricMeter]
    """Of the float model and of the graph, for their first outputs."""
    is_measured: bool = True
    """Whether the metric could be measured on every batch so far."""
    equal_labels: int = 0
    labels: int = 0
    targets_are_labels: bool = True
    """Whether every target was a label for each of the model's."""
    outputs: list[OutputDeviation] = field(default_factory=list)
    layers: dict[str, Deviation] = field(default_factory=lambda: defaultdict(Deviation))
    own: dict[str, Deviation] = field(default_factory=lambda: defaultdict(Deviation))
    samples: int = 0

    @classmethod
    def of_metric(cls, signature: Signature, context: Context) -> _Comparison:
        metric = context.metric.for_model(signature).with_inferred_loss(context.data)
        return cls((metric.meter(), metric.meter()))

    def add(self, expected: Tensors, actual: Tensors, target: Targets | None) -> None:
        if [a.shape for a in expected] != [b.shape for b in actual]:
            shapes = [[tuple(t.shape) for t in side] for side in (actual, expected)]
            raise StageFailed(
                f"the quantized model's outputs have shapes {shapes[0]}, the float model's "
                f"{shapes[1]}"
            )
        self.outputs = self.outputs or [OutputDeviation() for _ in expected]
        for deviation, a, b in zip(self.outputs, expected, actual, strict=True):
            deviation.add(a, b)
        self.samples += len(expected[0]) if expected[0].dim() else 1
        self.is_measured &= target is not None
        if self.is_measured and target is not None:
            try:
                for meter, outputs in zip(self.meters, (expected, actual), strict=True):
                    meter.update(outputs, target)
            except Exception:  # noqa: BLE001 - a metric of the user's may raise any
                self.is_measured = False
        self._count_labels(expected[0], actual[0], target)

    def _count_labels(
        self, scores: torch.Tensor, others: torch.Tensor, target: Targets | None
    ) -> None:
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

    def _metric_pair(self, metric: Metric) -> MetricPair | None:
        """Return the metric of both models; None where it cannot be measured."""
        if not self.is_measured or metric.needs_reference:
            return None
        try:
            before, after = (meter.compute() for meter in self.meters)
        except Exception:  # noqa: BLE001 - a metric of the user's may raise any
            return None
        if not (math.isfinite(before) and math.isfinite(after)):
            return None
        return MetricPair(name=metric.name, before=round(before, 6), after=round(after, 6))

    def require_finite(self, signature: Signature) -> None:
        """Refuse a graph whose outputs are not finite where the float model's are."""
        for spec, deviation in zip(signature.outputs, self.outputs, strict=False):
            if not deviation.is_finite:
                layer = next((n for n, d in self.layers.items() if not d.is_finite), None)
                place = f", from layer {layer} on" if layer else ""
                raise StageFailed(
                    f"output {spec.name} of the quantized model is NaN or infinite{place}, where "
                    "the float model's is finite; leave that part in float with `exclude`"
                )

    def fidelity(self, signature: Signature, context: Context) -> Fidelity:
        """Summarize the sums, rounded, so that figures do not depend on how sums are split up."""
        metric = context.metric
        known = self.labels and (self.targets_are_labels or metric.needs_reference)
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
            split="val" if context.data is not None and "val" in context.data.datasets else None,
            label_agreement=round(self.equal_labels / self.labels, 6) if known else None,
            metric=self._metric_pair(metric),
            outputs=tuple(
                OutputFidelity(
                    name=spec.name, cosine=round(d.cosine, 5), sqnr_db=round(d.sqnr_db, 1)
                )
                for spec, d in zip(signature.outputs, self.outputs, strict=False)
            ),
            layers=tuple(sorted(layers, key=lambda layer: layer.own_sqnr_db)),
        )


@dataclass(frozen=True)
class _Sample:
    """The inputs on which both models are compared, and their targets where there are any."""

    signature: Signature
    context: Context
    indices: tuple[int, ...]
    """Into `val`; empty where there is no data."""
    batch_size: int | None
    """Where the signature fixes it, or samples run one by one."""
    seeded_batches: int
    """Number of batches where there is no data."""

    @classmethod
    def from_context(
        cls, signature: Signature, context: Context, samples: int, *, one_by_one: bool
    ) -> _Sample:
        """Draw a seeded sample that fills batches of a fixed size; some samples come twice."""
        if signature.batch_axis:
            batch_size = 1 if one_by_one else None
        else:
            batch_size = int(next(iter(signature.inputs[0].shape), 1))
        indices: list[int] = []
        if context.data is not None and "val" in context.data.datasets:
            generator = torch.Generator().manual_seed(context.seed)
            available = len(context.data.split("val"))  # type: ignore[arg-type]
            indices = torch.randperm(available, generator=generator)[:samples].tolist()
            missing = -len(indices) % (batch_size or 1)
            indices += (indices * (missing // len(indices) + 1))[:missing]
        rows = SEEDED_ROWS if one_by_one and batch_size == 1 else 1
        return cls(signature, context, tuple(indices), batch_size, COMPARED_BATCHES * rows)

    def __len__(self) -> int:
        seeded = self.signature.example(batch=self.batch_size or SEEDED_ROWS)[0]
        return len(self.indices) or self.seeded_batches * len(seeded)

    def batches(self, reference: LayerOutputRecorder) -> Iterator[tuple[Tensors, Targets | None]]:
        """Yield batches in which the outputs of the reference's layers take bounded memory."""
        data = self.context.data
        if not self.indices or data is None:
            rows = self.batch_size or SEEDED_ROWS
            for i in range(self.seeded_batches):
                yield self.signature.example(batch=rows, seed=self.context.seed + i), None
            return
        batch_size = self.batch_size
        if batch_size is None:  # as many as fit
            (sample,) = data.read("val", self.indices[:1], 1)
            reference(*sample.inputs)
            size = sum(output.nbytes for output in reference.outputs.values())
            batch_size = max(1, min(LARGEST_BATCH, MAX_BYTES // max(size, 1)))
        for batch in data.read("val", self.indices, batch_size):
            yield batch.inputs, batch.target


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
        self.outputs: dict[LayerCall, torch.Tensor] = {}
        """Of each call of a layer in the last run."""
        self._counts: Counter[str] = Counter()
        self._latest: tuple[LayerCall, torch.Tensor] | None = None
        for name, part in module.named_modules():
            if name in names:
                part.register_forward_hook(partial(self._record_layer, name))
            # Folded into the layer before it: its output counts as that layer's.
            elif isinstance(part, _BatchNorm) and name not in names_in_graph:
                part.register_forward_hook(self._record_folded_norm)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the module, and return its outputs."""
        self.outputs, self._latest = {}, None
        self._counts.clear()
        return flatten_outputs(self.module(*inputs))

    def _record_layer(self, name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        call = name, self._counts[name]
        self._counts[name] += 1
        if isinstance(output, torch.Tensor):
            self._record(call, output)

    def _record_folded_norm(self, part: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._latest is not None and inputs and inputs[0] is self._latest[1]:
            self._record(self._latest[0], output)

    def _record(self, call: LayerCall, output: torch.Tensor) -> None:
        self._latest = call, output
        self.outputs[call] = output.clone()  # an in-place activation may overwrite it


class LayerComparison(NodeTap):
    """Runs a quantized graph and accumulates the deviation of its layers' outputs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        layers: Mapping[fx.Node, LayerCall],
        expected: Mapping[LayerCall, torch.Tensor],
        deviations: dict[str, Deviation],
        *,
        replace: bool,
    ) -> None:
        """Prepare a run, which with `replace` continues with the float outputs after each layer.

        A layer's deviation is then its own error.
        """
        super().__init__(graph, layers)
        self.layers, self.expected = layers, expected
        self.deviations, self.replace = deviations, replace

    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        """Compare the output of a node that ends a layer."""
        call = self.layers[node]
        expected = self.expected.get(call)
        if expected is None or not isinstance(output, torch.Tensor):
            return output
        if output.shape != expected.shape:
            return output
        self.deviations[call[0]].add(expected, output)
        return expected.to(output.dtype) if self.replace else output


DECOMPOSED = torch.ops.quantized_decomposed
CHOOSE = DECOMPOSED.choose_qparams.tensor


def has_call_ranges(graph: fx.GraphModule) -> bool:
    """Whether a graph's outputs for a row depend on the other rows of the call."""
    return any(node.target is CHOOSE for node in graph.graph.nodes)


def choose_ranges_by_row_(graph: fx.GraphModule) -> bool:
    """Let a graph that takes any number of rows choose a range for each, in place.

    Rows of a batch then have the outputs that each has alone, up to rounding.

    Returns:
        False, with the graph as it was, where a tensor's first axis is not that of the rows, or
        scales are read by other operators than those that quantize and dequantize.
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


# As quantize_per_tensor and dequantize_per_tensor compute, which take a single scale only.


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
