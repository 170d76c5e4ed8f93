"""What makes a file slower, larger, less integer or wrong, by the user's modules."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import onnx_ir as ir
import torch

from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import CompressError
from compress.common.forward import Predictor, accept_any_batch, flatten_outputs
from compress.common.tensor_difference import largest, largest_difference
from compress.export.diagnosis.profile import (
    Profile,
    as_onnx,
    fitting_names,
    modules_by_node,
    plain_export,
    tables_of,
    without,
)
from compress.export.latency.resizing import is_float, leave_float, weighted_layers
from compress.export.onnx.graph import inputs_of, remove_unread_, sizes, weight_elements
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import opened_session, session_predictor
from compress.export.parity.bisect import LayerSearch, Tensors, WrongLayer
from compress.export.parity.compare import KindOutputs, largest_relative_error, outputs_by_kind
from compress.export.parity.sample_parity import Float64Reference, tolerance_for
from compress.profiling.benchmark import Comparison, compare_latency

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.export.diagnosis.profile import ProfiledNode
    from compress.export.onnx.stage import ExportOnnx
    from compress.export.parity.report import RefusedFile
    from compress.profiling.quantiles import Interval

    Rerun = Callable[[str, Mapping[str, Any]], ir.Model | None]

Unit = Literal["bytes", "weights"]
FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
SMALL = 1024
"""Bytes of a tensor that is not looked for twice: scales and biases are equal by chance."""


@dataclass(eq=False)
class FileDiagnosis(ABC):
    """A file that costs too much, and what files of other settings would save.

    Measuring raises StageFailed where the file is not taken apart, or its float model not exported.
    """

    file: Artifact
    source: EagerModel | GraphModel
    """The float model that it was made of."""
    rerun: Rerun
    """Returns the file that the stages would make with other settings of one of them, None where
    that would take training."""
    context: Context
    missing: float
    """By how much the gate's limit is missed, in the unit of the cost."""
    measured: int = field(default=0, init=False)
    """How many changed files were measured."""
    _saved: dict[str, float] = field(default_factory=dict, init=False)

    @abstractmethod
    def saved_by(self, changed: ir.Model) -> float:
        """Return what a changed file saves."""

    @property
    def batch(self) -> int:
        """Samples of a measured call."""
        return self.file.signature.smallest_batch

    @cached_property
    def model(self) -> ir.Model:
        """The file's model."""
        return as_onnx(self.file)

    @cached_property
    def plain(self) -> tuple[ir.Model, list[str]]:
        """The plain export of the float model, and the modules of its layers."""
        return plain_export(self.source)

    @property
    def names(self) -> list[str]:
        """Modules of the float model's layers."""
        return self.plain[1]

    @cached_property
    def layer_names(self) -> list[str]:
        """Modules of the file's layers."""
        return fitting_names(self.model, self.names)

    @cached_property
    def batches(self) -> Sequence[Sequence[torch.Tensor]]:
        """What the gate measures on."""
        return self.context.measured_batches(self.file.signature, self.batch)

    @cached_property
    def profile(self) -> Profile:
        """Of the file."""
        return self.profile_of(self.model)

    @cached_property
    def float_profile(self) -> Profile:
        """Of the plain export of the float model."""
        return self.profile_of(self.plain[0])

    def profile_of(self, model: ir.Model) -> Profile:
        """Profile a model on the first batch."""
        return Profile.measure(model, self.names, self.batches[0], self.context.threads)

    def saved(self, key: str, change: Callable[[], ir.Model | None]) -> float:
        """Return what a changed file saves, measured once by `key`; 0 where it cannot be made."""
        if key not in self._saved:
            changed = change()
            self.measured += changed is not None
            self._saved[key] = 0.0 if changed is None else self.saved_by(changed)
        return self._saved[key]

    def saved_with(self, stage: str, settings: Mapping[str, Any]) -> float:
        """Return what other settings of a stage save; 0 where that takes training."""
        key = f"{stage} {sorted(settings.items())}"
        return self.saved(key, lambda: self.rerun(stage, settings))

    def recovered_share(self, saved: float) -> float:
        """Return what is saved as a share of what must be saved."""
        return saved / self.missing if self.missing > 0 else 0.0


class CountedCost(FileDiagnosis):
    """A cost by a count that needs no clock."""

    @abstractmethod
    def share_of(self, layer: str, *, floats_alone: bool) -> float | None:
        """Return the share of the whole that a module, or its floats alone, has, if any."""


class TensorSize(NamedTuple):
    """A tensor of a file."""

    module: str
    bytes: int
    weights: int
    """Elements; 0 for scales, zero points and shapes."""
    is_float: bool
    is_table: bool
    """Whether rows of it are looked up, as in an embedding."""
    is_copy: bool
    """Whether the file has the same values in an earlier tensor."""


def tensor_sizes(model: ir.Model, names: Sequence[str]) -> list[TensorSize]:
    """Return the tensors of a model with its weights, by the module that reads them first."""
    readers: dict[ir.Value, str] = {}
    for node, module in zip(model.graph, modules_by_node(model, names), strict=True):
        for value in inputs_of(node):
            readers.setdefault(value, module)
    tables, elements = {node.inputs[0] for node in tables_of(model)}, weight_elements(model)
    found, seen = [], set[bytes]()
    for name, value in model.graph.initializers.items():
        tensor = model.graph.initializers.get_tensor(name)
        assert tensor is not None
        content = tensor.tobytes()
        # Sorted, as a copy may be stored in another shape, such as (1, N) for (N, 1).
        key = repr([tensor.dtype.value, *sorted(sizes(tensor))]).encode() + content
        found.append(
            TensorSize(
                module=readers.get(value, ""),
                bytes=len(content),
                weights=elements.get(name, 0),
                is_float=tensor.dtype in FLOATS,
                is_table=value in tables,
                is_copy=len(content) >= SMALL and key in seen,
            )
        )
        seen.add(key)
    return found


def sizes_by_module(tensors: Sequence[TensorSize], unit: Unit = "bytes") -> dict[str, int]:
    """Return module → bytes or weights, the largest first."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.module] += getattr(tensor, unit)
    return dict(counts.most_common())


@dataclass(eq=False)
class SizeDiagnosis(CountedCost):
    """A file that is too large, or takes too much memory: what holds the bytes."""

    unit: Unit = "bytes"
    memory_batch: int | None = None
    """Samples of a call, of a gate on memory."""

    @property
    def batch(self) -> int:
        """Samples of a measured call."""
        return self.memory_batch or super().batch

    @cached_property
    def tensors(self) -> list[TensorSize]:
        """Of the file."""
        return tensor_sizes(self.model, self.names)

    @cached_property
    def before(self) -> list[TensorSize]:
        """Of the plain export of the float model."""
        return tensor_sizes(*self.plain)

    @property
    def whole(self) -> int:
        """Bytes or weights of the file."""
        in_bytes = self.unit == "bytes"
        return self.file.payload_bytes if in_bytes else sum(t.weights for t in self.tensors)

    @cached_property
    def activations(self) -> dict[str, int]:
        """Module → bytes of the largest value that it writes in a call, the largest first.

        Empty where the gate is not about memory.
        """
        largest: dict[str, int] = {}
        for node in self.profile.nodes if self.memory_batch is not None else ():
            largest[node.module] = max(largest.get(node.module, 0), node.written_bytes)
        return dict(sorted(largest.items(), key=lambda item: -item[1]))

    @cached_property
    def peak_values(self) -> int:
        """Bytes of the values that a call needs at the same time, at most."""
        nodes = self.profile.nodes
        last_use = {value: i for i, n in enumerate(nodes) for value in inputs_of(n.node)}
        ends: Counter[int] = Counter()
        now = peak = 0
        for place, node in enumerate(nodes):
            now += node.written_bytes
            peak = max(peak, now)
            # What nobody reads is an output of the model, and stays until the call ends.
            outputs = [last_use.get(v, len(nodes)) for v in node.node.outputs if v.name]
            ends[max(outputs, default=place)] += node.written_bytes
            now -= ends[place]
        return peak

    def share_of(self, layer: str, *, floats_alone: bool) -> float | None:
        """Return the share of the file that a module has; tables in float are another cause."""
        return self.share_where(
            layer, lambda t: not floats_alone or (t.is_float and not t.is_table)
        )

    def share_where(self, layer: str, is_counted: Callable[[TensorSize], bool]) -> float | None:
        """Return the share of the file that some of a module's tensors have; None without any."""
        own = [getattr(t, self.unit) for t in self.tensors if t.module == layer and is_counted(t)]
        return sum(own) / self.whole if own else None

    def saved_by(self, changed: ir.Model) -> float:
        """Return the bytes or weights that a changed file saves."""
        left = tensor_sizes(changed, self.names)
        own, others = (sum(getattr(t, self.unit) for t in some) for some in (self.tensors, left))
        return float(own - others)


class MacsDiagnosis(CountedCost):
    """A file of which float kernels multiply too much; it is saved where integer kernels do it."""

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Modules whose weights are stored in integers."""
        layers = zip(self.layer_names, weighted_layers(self.model), strict=False)  # then tables
        return frozenset(name for name, layer in layers if not is_float(layer))

    def share_of(self, layer: str, *, floats_alone: bool) -> float | None:
        """Return the share of all multiply-accumulates that float kernels do for a module."""
        total = self.profile.macs
        return self.profile.float_macs.get(layer, 0) / total if total else None

    def saved_by(self, changed: ir.Model) -> float:
        """Return by how much the float kernels' share is smaller in a changed file."""
        return self.profile.float_share - self.profile_of(changed).float_share


@dataclass(frozen=True)
class SpeedGate:
    """What a refused gate on speed found, measured once more."""

    interval: Interval
    """Of the speedup, or of the 95th percentile in milliseconds."""
    middle: float
    limit: float
    higher_passes: bool
    batch: int
    earlier: float | None
    """What the gate found in the run."""

    @property
    def value(self) -> float:
        """What is held against the limit."""
        return self.interval.low if self.higher_passes else self.middle

    @property
    def spread_in_margin(self) -> float:
        """Half the interval's width, or the distance to what the run has found, over the margin."""
        spread = (self.interval.high - self.interval.low) / 2
        margin = abs(self.value - self.limit)
        if self.earlier is not None:
            spread = max(spread, abs(self.value - self.earlier))
            margin = min(margin, abs(self.earlier - self.limit))
        return spread / margin if margin else float("inf")

    @property
    def factor(self) -> float:
        """How many times faster the file must be for the gate to pass."""
        if self.higher_passes:
            return self.limit / self.interval.low if self.interval.low > 0 else float("inf")
        return self.middle / self.limit

    def missing(self, ms: float) -> float:
        """Return by how much a call of so many milliseconds must become shorter."""
        return ms - ms / self.factor


@dataclass(eq=False)
class SpeedDiagnosis(FileDiagnosis):
    """A file that is too slow: where its time goes, and what of it changes would save, in ms."""

    gate: SpeedGate
    ms: float
    """Median time of a call."""

    @property
    def batch(self) -> int:
        """Samples of a measured call."""
        return self.gate.batch

    def share(self, nodes: Iterable[ProfiledNode]) -> float | None:
        """Return the time of some operators as a share of all kernels'; None without any."""
        own = [node.ms for node in nodes]
        if not own:
            return None
        return sum(own) / self.profile.ms if self.profile.ms else 0.0

    def saved_in_float(self, modules: Collection[str]) -> float:
        """Return the milliseconds that a file with more layers in float saves."""
        layers = range(len(weighted_layers(self.model)))
        numbers = [i for i in layers if self.layer_names[i] in modules]
        key = f"float {numbers}"
        return self.saved(key, lambda: leave_float(self.model, numbers)) if numbers else 0.0

    def saved_without(self, nodes: Iterable[ProfiledNode]) -> float:
        """Return the milliseconds that a file without some operators saves."""
        names = [node.origin.name for node in nodes if node.origin is not None]
        return self.saved(f"without {names}", lambda: without(self.profile.model, names))

    @cached_property
    def empty_call_ms(self) -> float:
        """Time of a call of a model with the same inputs that computes nothing."""
        empty = self.model.clone()
        value = empty.graph.inputs[0]
        unchanged = ir.Value(name="unchanged", type=value.type, shape=value.shape)
        empty.graph.insert_before(empty.graph[0], ir.node("Identity", [value], outputs=[unchanged]))
        empty.graph.outputs.clear()
        empty.graph.outputs.append(unchanged)
        remove_unread_(empty)
        self.measured += 1
        return self.ms / self._compared(empty).speedup

    def saved_by(self, changed: ir.Model) -> float:
        """Return the milliseconds that a changed file saves; 0 if it may be noise."""
        compared = self._compared(changed)
        is_faster = compared.interval.low > 1 and not compared.speedup_doubt
        return self.ms * (1 - 1 / compared.speedup) if is_faster else 0.0

    def _compared(self, changed: ir.Model) -> Comparison:
        threads = self.context.threads
        with TemporaryDirectory(prefix="compress-timed-") as folder:
            files = [Path(folder) / name / "model.onnx" for name in ("own", "changed")]
            # Both from files that the same code wrote, as the way of writing may tell in the time.
            for file, model in zip(files, (self.model, changed), strict=True):
                file.parent.mkdir()
                write(model, file)
            own, other = (partial(opened_session, file, threads) for file in files)
            return compare_latency(own, other, self.batches, threads=threads)


LEAST_ERROR = 1e-5
"""Relative error of an operator below which it may be the order in which floats are added."""


@dataclass
class ParityDiagnosis:
    """An export whose outputs differ from its source's."""

    stage: ExportOnnx
    source: EagerModel | GraphModel
    model: ir.Model
    context: Context
    rerun: Rerun
    kept: RefusedFile | None = None
    """The file, where it was refused when it was exported."""
    deadline: float = math.inf
    """Until when the wrong layer is searched for, on the clock of :func:`time.monotonic`."""
    measured: int = 0

    @cached_property
    def outputs(self) -> dict[str, KindOutputs]:
        """Kind of input → what source and file answer, where the source refuses none."""
        with self._opened(self.model) as exported, self._source() as expected:
            found = outputs_by_kind(expected, exported, self.source, self.context)
            return {one.kind: one for one in found if one.refusal is None}

    @cached_property
    def errors(self) -> dict[str, float]:
        """Kind of input → the file's error relative to the norm; infinite where it fails."""
        return {kind: one.error for kind, one in self.outputs.items()}

    @property
    def axis_errors(self) -> dict[str, float]:
        """Named axis → the error at the size with the largest one."""
        axes: dict[str, float] = {}
        for kind, error in self.errors.items():
            axis, is_axis, _ = kind.partition(" of ")
            if is_axis and axis in self.source.signature.dynamic_axes:
                axes[axis] = max(axes.get(axis, 0.0), error)
        return axes

    @cached_property
    def worst(self) -> Tensors:
        """The inputs on which the file is most wrong, of those that it answers to."""
        answered = [one for one in self.outputs.values() if math.isfinite(one.error)]
        return max(answered, key=lambda one: one.error).inputs

    @cached_property
    def difference(self) -> float:
        """Largest absolute difference on `val`, on seeded inputs without data, as the gate has."""
        return self._difference(self.model)

    @cached_property
    def difference_unoptimized(self) -> float:
        """The same of an export with `optimize: none`; infinite where there is none."""
        self.measured += 1
        changed = self.rerun(self.stage.title, {"optimize": "none"})
        return math.inf if changed is None else self._difference(changed)

    @cached_property
    def own_error(self) -> float | None:
        """Largest absolute difference of the source from itself in float64; None without one."""
        with self._source() as expected:
            reference = Float64Reference(self.source, expected)
            errors = []
            for inputs in self.context.comparison_inputs(self.source.signature):
                exact = reference.exact(inputs)
                if exact is None:
                    return None
                errors += [
                    largest_difference(a.double(), b)
                    for a, b in zip(expected(*inputs), exact, strict=True)
                ]
        return largest(errors)

    @cached_property
    def graph_error(self) -> float:
        """Relative error of the traced graph in PyTorch, on the worst inputs."""
        with self._source() as expected, torch.no_grad():
            module = program_of(self.source).module(check_guards=False)
            outputs = flatten_outputs(module(*self.worst))
            return largest_relative_error(expected(*self.worst), outputs)

    @cached_property
    def wrong_layer(self) -> WrongLayer | None:
        """The first operator out of tolerance; None where no part of the graph is."""
        if self.kept is not None:
            return self.stage.search_refused(self.source, self.kept, self.context, self.deadline)
        total = max(e for e in self.errors.values() if math.isfinite(e))
        # Half of the whole error, as no operator need have all of it.
        limit = max(min(tolerance_for(self.source).relative, total / 2), LEAST_ERROR)
        program, signature = program_of(self.source), self.source.signature
        with TemporaryDirectory(prefix="compress-parity-") as folder:
            file = Path(folder) / "model.onnx"
            search = LayerSearch(
                program, signature, self.worst, self.stage.reexport, file, limit, self.deadline
            )
            with suppress(CompressError):
                search.run()
        self.measured += search.exports
        return search.layer

    def _difference(self, model: ir.Model) -> float:
        with self._opened(model) as exported, self._source() as expected:
            return largest(
                largest_difference(a, b)
                for inputs in self.context.comparison_inputs(self.source.signature)
                for a, b in zip(expected(*inputs), exported(*inputs), strict=True)
            )

    @contextmanager
    def _source(self) -> Iterator[Predictor]:
        with self.source.open(threads=self.context.threads) as predict:
            yield accept_any_batch(predict, self.source.signature)

    @contextmanager
    def _opened(self, model: ir.Model) -> Iterator[Predictor]:
        with TemporaryDirectory(prefix="compress-parity-") as folder:
            write(model, file := Path(folder) / "model.onnx")
            predict = session_predictor(file, self.context.threads)
            yield accept_any_batch(predict, self.source.signature)
