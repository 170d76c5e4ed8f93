"""Causes of a file that is too large or takes too much memory: what they measure and what mends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from compress.core.diagnosis.cause import MEMORY_GATES, SIZE_GATES, Cause, Repair
from export.diagnosis.sizes import SizeDiagnosis
from export.diagnosis.speed_causes import QUANTIZING, excluding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.diagnosis.cause import RefusedStage

    Refused = RefusedStage[SizeDiagnosis]
    Change = tuple[dict[str, Any], int]
    """Settings, and what they cost the other gates."""


class SizeCause(Cause[SizeDiagnosis]):
    """A reason why a file has too many bytes; its weights are in memory too."""

    gates: ClassVar[tuple[str, ...]] = (*SIZE_GATES, *MEMORY_GATES)

    def changes(self, refused: Refused, layers: Sequence[str]) -> Iterator[Change]:
        """Yield changes of the settings that mend it, and what they cost."""
        yield from ()

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of the missing bytes that the best change saves."""
        measured, title = refused.measured, refused.stage.title
        saved = [measured.saved_with(title, s) for s, _ in self.changes(refused, layers)]
        return measured.returned(max(saved, default=0.0)) if saved else None

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the changes."""
        return tuple(Repair(s, cost) for s, cost in self.changes(refused, layers))


class FloatTables(SizeCause):
    """Tables of embeddings that a quantized model holds in float."""

    key: ClassVar[str] = "float_tables"
    stages: ClassVar[tuple[str, ...]] = (*QUANTIZING, "quantize_mixed")
    limit: ClassVar[float] = 0.1
    text: ClassVar[str] = (
        "tables of embeddings left in float ({value:.0%} of the file; limit {limit:.0%})"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the file that a module's float tables have."""
        measured = refused.measured
        own = [t.bytes for t in measured.tensors if t.is_table and t.is_float and t.module == layer]
        return sum(own) / measured.file_bytes if own else None

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


class ExcludedLayers(SizeCause):
    """Layers that `exclude` leaves in float, or whose channels it keeps."""

    key: ClassVar[str] = "excluded_layers"
    stages: ClassVar[tuple[str, ...]] = (*QUANTIZING, "quantize_mixed", "prune_channels")
    limit: ClassVar[float] = 0.1
    text: ClassVar[str] = "left out by exclude ({value:.0%} of the file; limit {limit:.0%})"

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the file that a module has which a pattern leaves out."""
        measured = refused.measured
        if not excluding(refused.stage.own_settings()["exclude"], [layer]):
            return None
        is_pruned = refused.stage.stage == "prune_channels"
        own = [
            t.bytes
            for t in measured.tensors
            if t.module == layer and (is_pruned or t.is_float) and not t.is_table
        ]
        return sum(own) / measured.file_bytes if own else None

    def changes(self, refused: Refused, layers: Sequence[str]) -> Iterator[Change]:
        """Yield the stage without these patterns."""
        own = refused.stage.own_settings()["exclude"]
        excluded = excluding(own, layers)
        if excluded:
            yield {"exclude": [p for p in own if p not in excluded]}, 0


class StoredTwice(SizeCause):
    """Tensors of the same values, of which one would do."""

    key: ClassVar[str] = "stored_twice"
    stages: ClassVar[tuple[str, ...]] = ("export_onnx",)
    limit: ClassVar[float] = 0.05
    text: ClassVar[str] = (
        "the same values are stored twice ({value:.0%} of the file; limit {limit:.0%}); tie the "
        "modules' weights in the model's code"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the file that a module's copies have."""
        measured = refused.measured
        own = [t.bytes for t in measured.tensors if t.is_copy and t.module == layer]
        return sum(own) / measured.file_bytes if own else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of the missing bytes that the copies have."""
        measured = refused.measured
        return measured.returned(sum(t.bytes for t in measured.tensors if t.is_copy))


class LargeActivation(SizeCause):
    """One value that takes most of the memory of a call."""

    key: ClassVar[str] = "large_activation"
    gates: ClassVar[tuple[str, ...]] = MEMORY_GATES
    stages: ClassVar[tuple[str, ...]] = ("export_onnx",)
    limit: ClassVar[float] = 0.4
    text: ClassVar[str] = (
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


SIZE_CAUSES: tuple[type[SizeCause], ...] = (
    FloatTables,
    ExcludedLayers,
    StoredTwice,
    LargeActivation,
)
