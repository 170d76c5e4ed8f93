"""What makes a file larger than a gate allows: bytes and memory by module."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from onnx import TensorProto, numpy_helper

from export.diagnosis.layer_names import as_onnx, modules_by_node, plain_export, tables_of
from export.diagnosis.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    import onnx

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context

    Rerun = Callable[[str, Mapping[str, Any]], onnx.ModelProto | None]

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
SMALL = 1024
"""Bytes of a tensor that is not looked for twice: scales and biases are equal by chance."""


class TensorSize(NamedTuple):
    """A tensor of a file."""

    module: str
    bytes: int
    is_float: bool
    is_table: bool
    """Whether rows of it are looked up, as in an embedding."""
    is_copy: bool
    """Whether the file has the same values in an earlier tensor."""


def tensor_sizes(model: onnx.ModelProto, names: Sequence[str]) -> list[TensorSize]:
    """Return the tensors of a model with its weights, by the module that reads them first."""
    readers: dict[str, str] = {}
    for node, module in zip(model.graph.node, modules_by_node(model, names), strict=True):
        for name in node.input:
            readers.setdefault(name, module)
    tables = {node.input[0] for node in tables_of(model)}
    found, seen = [], set[bytes]()
    for tensor in model.graph.initializer:
        content = (
            numpy_helper.to_array(tensor).tobytes() if not tensor.raw_data else tensor.raw_data
        )
        key = repr([tensor.data_type, *sorted(tensor.dims)]).encode() + content
        is_copy = len(content) >= SMALL and key in seen
        seen.add(key)
        found.append(
            TensorSize(
                readers.get(tensor.name, ""),
                len(content),
                tensor.data_type in FLOATS,
                tensor.name in tables,
                is_copy,
            )
        )
    return found


def bytes_by_module(tensors: Sequence[TensorSize]) -> dict[str, int]:
    """Return module → bytes, the largest first."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.module] += tensor.bytes
    return dict(counts.most_common())


def _largest_values(profile: Profile) -> tuple[dict[str, int], int]:
    """Return module → bytes of its largest value, and the most bytes needed at the same time."""
    last_use = {name: i for i, n in enumerate(profile.nodes) for name in n.node.input}
    largest: dict[str, int] = {}
    ends: Counter[int] = Counter()
    now = peak = 0
    for place, node in enumerate(profile.nodes):
        largest[node.module] = max(largest.get(node.module, 0), node.written_bytes)
        now += node.written_bytes
        peak = max(peak, now)
        outputs = [last_use.get(name, len(profile.nodes)) for name in node.node.output if name]
        ends[max(outputs, default=place)] += node.written_bytes
        now -= ends[place]
    return dict(sorted(largest.items(), key=lambda item: -item[1])), peak


@dataclass
class SizeDiagnosis:
    """A file that is too large, or takes too much memory: what holds the bytes."""

    tensors: list[TensorSize]
    before: list[TensorSize]
    """Of the plain export of the float model that the file was made of."""
    file_bytes: int
    missing: float
    """Bytes by which the gate's limit is missed."""
    activations: dict[str, int]
    """Module → bytes of the largest value that it writes in a call, the largest first."""
    peak_values: int
    """Bytes of the values that a call needs at the same time, at most."""
    rerun: Rerun
    names: list[str]
    measured: int = 0
    """How many changed files were made."""

    @classmethod
    def create(
        cls,
        file: Artifact,
        source: EagerModel | GraphModel,
        missing: float,
        batch: int,
        rerun: Rerun,
        context: Context,
    ) -> Self:
        """Read a file, and the plain export of its float model.

        Raises:
            StageFailed: the file is not taken apart, or the float model cannot be exported.
        """
        plain, names = plain_export(source)
        model = as_onnx(file)
        inputs = context.measured_batches(file.signature, batch)[0]
        largest, peak = _largest_values(Profile.measure(model, names, inputs, context.threads))
        tensors, before = tensor_sizes(model, names), tensor_sizes(plain, names)
        return cls(tensors, before, file.payload_bytes, missing, largest, peak, rerun, names)

    def returned(self, saved: float) -> float:
        """Return saved bytes as a share of what must be saved."""
        return saved / self.missing if self.missing > 0 else 0.0

    def saved_with(self, stage: str, settings: Mapping[str, Any]) -> float:
        """Return the bytes that other settings of a stage save; 0 where that takes training."""
        self.measured += 1
        changed = self.rerun(stage, settings)
        if changed is None:
            return 0.0
        left = sum(t.bytes for t in tensor_sizes(changed, self.names))
        return sum(t.bytes for t in self.tensors) - left
