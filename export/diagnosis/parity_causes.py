"""Causes of an ONNX file whose outputs differ from its source's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from compress.core.diagnosis.cause import PARITY_GATES, Cause, Repair
from compress.export.diagnosis.parity import LEAST_ERROR, ParityDiagnosis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.core.diagnosis.cause import RefusedStage

    Refused = RefusedStage[ParityDiagnosis]

LARGEST_RATIO = 1e9
IN_PYTORCH = Repair({"stage": "export_torchscript"}, 2)
"""A file that PyTorch's own operators run."""


class ParityCause(Cause[ParityDiagnosis]):
    """A reason why outputs differ."""

    gates = PARITY_GATES
    stages = ("export_onnx",)


class BakedAxis(ParityCause):
    """A named axis whose size while tracing was kept as a number."""

    limit = 100.0
    text = (
        "right at the size that it was traced with, and wrong at others (error {value:.3g} times "
        "as large; limit {limit:g}); compute sizes from the input's shape in the model's code"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the error at other sizes of an axis, as a multiple of that at its own."""
        measured = refused.measured
        if layer not in measured.axis_errors:
            return None
        ratio = measured.axis_errors[layer] / max(measured.own_size_error, 1e-7)
        return min(ratio, LARGEST_RATIO)  # infinite where the file fails


class OtherGraph(ParityCause):
    """A traced graph that computes other than the model's code does."""

    limit = 1e-4
    text = (
        "the graph that torch.export traced is wrong in PyTorch too (by {value:.2g} of the norm; "
        "limit {limit:g}): code goes another way while it is exported, or keeps a value that "
        "depends on the input"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the relative error of the graph, run by PyTorch."""
        is_eager = refused.before.kind == "eager"
        return refused.measured.graph_error if is_eager and not layer else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the graph's share of the error."""
        measured = refused.measured
        total = max((e for e in measured.errors.values() if math.isfinite(e)), default=0.0)
        return min(1.0, measured.graph_error / total) if total else None

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return an export of the code, where it can be scripted."""
        return (IN_PYTORCH,)


class RewrittenGraph(ParityCause):
    """Rewriting ahead of time that uses approximations."""

    limit = 0.5
    text = (
        "rewritten by optimize (without it {value:.0%} of the difference is gone; "
        "limit {limit:.0%})"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the difference that is gone without rewriting."""
        measured = refused.measured
        if layer or measured.stage.optimize == "none" or not measured.difference:
            return None
        return 1 - measured.difference_with({"optimize": "none"}) / measured.difference

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the measured share."""
        return self.measure(refused, "")

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the export without it."""
        return (Repair({"optimize": "none"}, 0),)


class Float32(ParityCause):
    """A source that is off by as much itself, as float32 holds 7 digits."""

    limit = 0.25
    text = (
        "float32 itself: the source is off its outputs in float64 by {value:.2g} of the "
        "difference (limit {limit:g}); the limit asks for more digits than float32 has"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the source's own error over the difference."""
        measured = refused.measured
        if layer or measured.own_error is None or not measured.difference:
            return None
        return measured.own_error / measured.difference

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of the difference that the source's own error has."""
        value = self.measure(refused, "")
        return None if value is None else min(1.0, value)


class WrongOperator(ParityCause):
    """An operator whose ONNX form computes something else."""

    limit = LEAST_ERROR
    text = "the first operator out of tolerance (error {value:.2g} of its norm; limit {limit:g})"

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the error of the first wrong operator, relative to its norm."""
        found = refused.measured.wrong_layer
        return found.error if found is not None and layer == str(found) else None

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return a file that PyTorch's own operators run."""
        return (IN_PYTORCH,)


PARITY_CAUSES: tuple[type[ParityCause], ...] = (
    BakedAxis,
    OtherGraph,
    RewrittenGraph,
    Float32,
    WrongOperator,
)
