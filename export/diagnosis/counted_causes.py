"""Causes of a file that is too large, takes too much memory or is too little in integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from compress.core.diagnosis.cause import (
    MACS_GATES,
    MEMORY_GATES,
    PARAMETER_GATES,
    SIZE_GATES,
    Cause,
    Repair,
)
from compress.export.diagnosis.causes import QUANTIZING, excluding, formats_with_kernels
from compress.export.diagnosis.costs import CountedCost, MacsDiagnosis, SizeDiagnosis

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.diagnosis.cause import RefusedStage

    Refused = RefusedStage[SizeDiagnosis]
    Change = tuple[dict[str, Any], int]
    """Settings, and what they cost the other gates."""

BYTE_GATES = (*SIZE_GATES, *MEMORY_GATES)
"""Weights are in memory too."""
Counted = TypeVar("Counted", bound=CountedCost)


class CountedCause(Cause[Counted]):
    """A reason why a file has too many bytes, weights or multiplications in float."""

    def changes(self, refused: RefusedStage[Counted], layers: Sequence[str]) -> Iterator[Change]:
        """Yield changes of the settings that mend it, and what they cost."""
        yield from ()

    def returned(self, refused: RefusedStage[Counted], layers: Sequence[str]) -> float | None:
        """Return the share of what is missing that the best change saves."""
        measured, title = refused.measured, refused.stage.title
        saved = [measured.saved_with(title, s) for s, _ in self.changes(refused, layers)]
        return measured.returned(max(saved, default=0.0)) if saved else None

    def repairs(self, refused: RefusedStage[Counted], layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the changes."""
        return tuple(Repair(s, cost) for s, cost in self.changes(refused, layers))


class FloatTables(CountedCause[SizeDiagnosis]):
    """Tables of embeddings that a quantized model holds in float."""

    gates = BYTE_GATES
    stages = (*QUANTIZING, "quantize_mixed")
    limit = 0.1
    text = "tables of embeddings left in float ({value:.0%} of the file; limit {limit:.0%})"

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the file that a module's float tables have."""
        return refused.measured.share_where(layer, lambda t: t.is_table and t.is_float)

    def changes(self, refused: Refused, layers: Sequence[str]) -> Iterator[Change]:
        """Yield tables in 8 bits."""
        own = refused.stage.own_settings()
        excluded = excluding(own.get("exclude", ()), layers)
        settings: dict[str, Any] = {}
        if own.get("embeddings") is False:
            settings["embeddings"] = True
        if excluded:
            settings["exclude"] = [p for p in own["exclude"] if p not in excluded]
        if settings:
            yield settings, 0


class ExcludedLayers(CountedCause[CountedCost]):
    """Layers that `exclude` leaves in float, or whose channels it keeps."""

    gates = (*BYTE_GATES, *PARAMETER_GATES, *MACS_GATES)
    stages = (*QUANTIZING, "quantize_mixed", "prune_channels")
    limit = 0.1
    text = "left out by exclude ({value:.0%} of the whole; limit {limit:.0%})"

    def measure(self, refused: RefusedStage[CountedCost], layer: str) -> float | None:
        """Return the share of the whole that a module has which a pattern leaves out."""
        if not excluding(refused.stage.own_settings()["exclude"], [layer]):
            return None
        is_pruned = refused.stage.stage == "prune_channels"
        return refused.measured.share_of(layer, floats_alone=not is_pruned)

    def changes(
        self, refused: RefusedStage[CountedCost], layers: Sequence[str]
    ) -> Iterator[Change]:
        """Yield the stage without these patterns."""
        own = refused.stage.own_settings()["exclude"]
        excluded = excluding(own, layers)
        if excluded:
            yield {"exclude": [p for p in own if p not in excluded]}, 0


class FloatKernels(CountedCause[MacsDiagnosis]):
    """Layers with weights in integers that the runtime multiplies in float all the same."""

    gates = MACS_GATES
    stages = QUANTIZING
    limit = 0.05
    text = (
        "weights in integers, but a float kernel ({value:.0%} of the multiply-accumulates; limit "
        "{limit:.0%})"
    )

    def measure(self, refused: RefusedStage[MacsDiagnosis], layer: str) -> float | None:
        """Return the share of the multiply-accumulates that a quantized layer has in float."""
        measured = refused.measured
        return measured.share_of(layer, floats_alone=True) if layer in measured.quantized else None

    def changes(
        self, refused: RefusedStage[MacsDiagnosis], layers: Sequence[str]
    ) -> Iterator[Change]:
        """Yield formats that the runtime has integer kernels for."""
        for settings in formats_with_kernels(refused.stage.own_settings()):
            yield settings, 0


class StoredTwice(CountedCause[SizeDiagnosis]):
    """Tensors of the same values, of which one would do."""

    gates = (*BYTE_GATES, *PARAMETER_GATES)
    stages = ("export_onnx",)
    limit = 0.05
    text = (
        "the same values are stored twice ({value:.0%} of the file; limit {limit:.0%}); tie the "
        "modules' weights in the model's code"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the file that a module's copies have."""
        return refused.measured.share_where(layer, lambda t: t.is_copy)

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of what is missing that the copies have."""
        measured = refused.measured
        copies = [getattr(t, measured.unit) for t in measured.tensors if t.is_copy]
        return measured.returned(sum(copies))


class LargeActivation(CountedCause[SizeDiagnosis]):
    """One value that takes most of the memory of a call."""

    gates = MEMORY_GATES
    stages = ("export_onnx",)
    limit = 0.4
    text = (
        "one value of a call takes {value:.0%} of the memory of weights and values (limit "
        "{limit:.0%}); smaller batches or inputs take less"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return a module's largest value as a share of all weights and values in memory."""
        measured = refused.measured
        if layer not in measured.activations:
            return None
        weights = sum(tensor.bytes for tensor in measured.tensors)
        return measured.activations[layer] / (weights + measured.peak_values)


COUNTED_CAUSES: tuple[type[CountedCause[Any]], ...] = (
    FloatTables,
    ExcludedLayers,
    FloatKernels,
    StoredTwice,
    LargeActivation,
)
