"""What makes a file larger than a gate allows: bytes, weights and memory by module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import onnx_ir as ir

from compress.export.diagnosis.profile import (
    Profile,
    as_onnx,
    modules_by_node,
    plain_export,
    tables_of,
)
from compress.export.onnx.graph import inputs_of, sizes, weight_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context

    Rerun = Callable[[str, Mapping[str, Any]], ir.Model | None]

Unit = Literal["bytes", "weights"]
FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
SMALL = 1024
"""Bytes of a tensor that is not looked for twice: scales and biases are equal by chance."""


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
        key = repr([tensor.dtype.value, *sorted(sizes(tensor))]).encode() + content
        is_copy = len(content) >= SMALL and key in seen
        seen.add(key)
        found.append(
            TensorSize(
                readers.get(value, ""),
                len(content),
                elements.get(name, 0),
                tensor.dtype in FLOATS,
                value in tables,
                is_copy,
            )
        )
    return found


def sizes_by_module(tensors: Sequence[TensorSize], unit: Unit = "bytes") -> dict[str, int]:
    """Return module → bytes or weights, the largest first."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.module] += getattr(tensor, unit)
    return dict(counts.most_common())


def _largest_values(profile: Profile) -> tuple[dict[str, int], int]:
    """Return module → bytes of its largest value, and the most bytes needed at the same time."""
    last_use = {value: i for i, n in enumerate(profile.nodes) for value in inputs_of(n.node)}
    largest: dict[str, int] = {}
    ends: Counter[int] = Counter()
    now = peak = 0
    for place, node in enumerate(profile.nodes):
        largest[node.module] = max(largest.get(node.module, 0), node.written_bytes)
        now += node.written_bytes
        peak = max(peak, now)
        outputs = [last_use.get(v, len(profile.nodes)) for v in node.node.outputs if v.name]
        ends[max(outputs, default=place)] += node.written_bytes
        now -= ends[place]
    return dict(sorted(largest.items(), key=lambda item: -item[1])), peak


@dataclass
class CountedCost(ABC):
    """What a file costs by a count that needs no clock, and what other settings would save."""

    missing: float
    """By how much the gate's limit is missed, in the unit of the count."""
    rerun: Rerun
    """Returns the file that the stages would make with other settings of one of them, None where
    that would take training."""
    names: list[str]
    """Modules of the file's layers."""
    measured: int = field(default=0, init=False)
    """How many changed files were made."""

    @abstractmethod
    def share_of(self, layer: str, *, floats_alone: bool) -> float | None:
        """Return the share of the whole that a module's layer has; None without any.

        Args:
            layer: the module.
            floats_alone: whether what is in integers is left out.
        """

    @abstractmethod
    def saved_by(self, changed: ir.Model) -> float:
        """Return what a changed file saves."""

    def saved_with(self, stage: str, settings: Mapping[str, Any]) -> float:
        """Return what other settings of a stage save; 0 where that takes training."""
        self.measured += 1
        changed = self.rerun(stage, settings)
        return 0.0 if changed is None else self.saved_by(changed)

    def returned(self, saved: float) -> float:
        """Return what is saved as a share of what must be saved."""
        return saved / self.missing if self.missing > 0 else 0.0


@dataclass
class SizeDiagnosis(CountedCost):
    """A file that is too large, or takes too much memory: what holds the bytes."""

    tensors: list[TensorSize]
    before: list[TensorSize]
    """Of the plain export of the float model that the file was made of."""
    whole: int
    """Bytes or weights of the file."""
    unit: Unit
    activations: dict[str, int]
    """Module → bytes of the largest value that it writes in a call, the largest first; empty where
    the gate is not about memory."""
    peak_values: int
    """Bytes of the values that a call needs at the same time, at most."""

    @classmethod
    def create(
        cls,
        file: Artifact,
        source: EagerModel | GraphModel,
        missing: float,
        rerun: Rerun,
        context: Context,
        unit: Unit = "bytes",
        batch: int | None = None,
    ) -> Self:
        """Read a file, and the plain export of its float model.

        Args:
            file: what is too large.
            source: the float model that it was made of.
            missing: bytes or weights by which the gate's limit is missed.
            rerun: makes the file with other settings of a stage.
            context: data and threads of the run.
            unit: what the gate counts.
            batch: samples of a call, of a gate on memory.

        Raises:
            StageFailed: the file is not taken apart, or the float model cannot be exported.
        """
        plain, names = plain_export(source)
        model = as_onnx(file)
        largest, peak = dict[str, int](), 0
        if batch is not None:
            inputs = context.measured_batches(file.signature, batch)[0]
            largest, peak = _largest_values(Profile.measure(model, names, inputs, context.threads))
        tensors, before = tensor_sizes(model, names), tensor_sizes(plain, names)
        whole = file.payload_bytes if unit == "bytes" else sum(t.weights for t in tensors)
        return cls(missing, rerun, names, tensors, before, whole, unit, largest, peak)

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
