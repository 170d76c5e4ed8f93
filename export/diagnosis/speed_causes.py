"""Causes of a file that is too slow: what they measure, and what mends them.

Thresholds were set on half of the injected faults of `benchmarks/explain_costs.py`. A cause is
named only where the file without it was timed, and is faster.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING, Any

from compress.core.diagnosis.cause import SPEED_GATES, Cause, Repair
from compress.export.diagnosis.costs import SpeedDiagnosis
from compress.export.diagnosis.profile import QUANTIZE, without
from compress.export.latency.float_layers import weighted_layers
from compress.export.onnx.graph import sizes, stored

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from compress.core.diagnosis.cause import RefusedStage

    Refused = RefusedStage[SpeedDiagnosis]

STATIC = ("quantize_static", "quantize_aware_training")
QUANTIZING = (*STATIC, "quantize_dynamic", "quantize_weights")
BLOCK = 16
"""Channels that convolution kernels compute at once with AVX-512; 8 with AVX2."""


class SpeedCause(Cause[SpeedDiagnosis]):
    """A reason why a file is too slow."""

    gates = SPEED_GATES


class FloatIslands(SpeedCause):
    """Operators in float between integer kernels, with conversions on both sides."""

    stages = STATIC
    limit = 0.1
    text = "computed in float between integer kernels ({value:.0%} of the time; limit {limit:.0%})"

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the time that the islands with a layer's operators take."""
        measured = refused.measured
        own = [i.ms for i in measured.graph.float_islands if layer in i.modules]
        return measured.share(sum(own)) if own else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that is saved where they are quantized, or their neighbours are not."""
        changes = self._changes(refused, layers)
        return refused.measured.returned(max((saved for saved, _ in changes), default=0.0))

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the layers quantized, or in float with their neighbours."""
        return tuple(repair for saved, repair in self._changes(refused, layers) if saved > 0)

    def _changes(self, refused: Refused, layers: Sequence[str]) -> list[tuple[float, Repair]]:
        measured, own = refused.measured, refused.stage.own_settings()
        excluded = excluding(own["exclude"], layers)
        if excluded:
            left = {"exclude": [p for p in own["exclude"] if p not in excluded]}
            return [(measured.saved_with(refused.stage.title, left), Repair(left, 0))]
        islands = [i for i in measured.graph.float_islands if i.modules & {*layers}]
        around = sorted({m for i in islands for m in i.around | i.modules if m in measured.names})
        saved = measured.saved_in_float(around)
        return [(saved, Repair({"exclude": [*own["exclude"], *around]}, 1))]


class SlowIntegers(SpeedCause):
    """Layers whose integer kernel takes longer than their float kernel."""

    stages = QUANTIZING
    limit = 1.25
    text = "slower in integers than in float ({value:.3g} times the time; limit {limit:g})"

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return a layer's time over that of the plain float model."""
        measured = refused.measured
        before = measured.float_profile.by_module.get(layer, 0.0)
        now = measured.profile.by_module.get(layer, 0.0)
        return now / before if before and layer in measured.graph.integer_modules else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that is saved with these layers in float."""
        return refused.measured.returned(refused.measured.saved_in_float(layers))

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return the layers in float."""
        own = refused.stage.own_settings()
        return (Repair({"exclude": [*own["exclude"], *layers]}, 1),)


class LonePairs(SpeedCause):
    """Values that are rounded to integers and made floats again, and that no kernel reads so."""

    stages = (*STATIC, "export_onnx")
    limit = 0.05
    text = (
        "quantized and dequantized for no integer kernel ({value:.0%} of the time; "
        "limit {limit:.0%})"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the time that the pairs behind a layer take, or all pairs."""
        measured = refused.measured
        if refused.stage.stage == "export_onnx" and refused.before.kind == "graph":
            return None  # of its quantization
        own = [node.ms for node in measured.graph.lone_pairs if layer in ("", node.module)]
        return measured.share(sum(own)) if own else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that is saved without the pairs."""
        measured = refused.measured
        pairs = [
            n.origin.name
            for n in measured.graph.lone_pairs
            if n.origin is not None and n.node.op_type == QUANTIZE
        ]
        model = measured.profile.model
        saved = measured.saved_by(f"without {pairs}", lambda: without(model, pairs))
        return measured.returned(saved)

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return formats that the runtime has kernels for, and the layers in float."""
        own = refused.stage.own_settings()
        found = [Repair(settings, 0) for settings in formats_with_kernels(own)]
        if "exclude" in own:
            found.append(Repair({"exclude": [*own["exclude"], *layers]}, 1))
        return tuple(found)


class OddWidths(SpeedCause):
    """Numbers of channels that fill blocks of the kernels in part."""

    stages = ("prune_channels",)
    limit = 0.1
    text = (
        "kernels compute blocks of 8 or 16 channels ({value:.0%} more than there are; "
        "limit {limit:.0%})"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return how many channels are missing in the last block, as a share of the layer's."""
        measured, width = refused.measured, 0
        for name, node in zip(measured.names, weighted_layers(measured.model), strict=False):
            weight = stored(node.inputs[1])
            if name == layer and node.op_type == "Conv" and weight is not None:
                width = sizes(weight)[0]
        return (ceil(width / BLOCK) * BLOCK - width) / width if width >= BLOCK // 2 else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that is saved with multiples of 8 or 16 channels."""
        saved = [refused.measured.saved_with(refused.stage.title, s) for s in self._wider(refused)]
        return refused.measured.returned(max(saved, default=0.0))

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return whole blocks, the ones that save more first."""
        measured, title = refused.measured, refused.stage.title
        found = [(measured.saved_with(title, s), s) for s in self._wider(refused)]
        found.sort(key=lambda pair: -pair[0])
        return tuple(Repair(settings, 0) for saved, settings in found if saved > 0)

    def _wider(self, refused: Refused) -> list[dict[str, Any]]:
        own = refused.stage.own_settings()
        if own["widths"]:
            return [
                {
                    "widths": {
                        g: max(block, round(n / block) * block) for g, n in own["widths"].items()
                    }
                }
                for block in (BLOCK, BLOCK // 2)
            ]
        return [{"round_to": b} for b in (BLOCK, BLOCK // 2) if own["round_to"] % b]


class Unfused(SpeedCause):
    """Normalisations and activations that are computed apart from the layer before them."""

    stages = ("export_onnx",)
    limit = 0.1
    text = (
        "normalisation or activation apart from its layer's kernel ({value:.0%} of the time; "
        "limit {limit:.0%})"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the share of the time that all of these operators take."""
        measured = refused.measured
        own = [n.ms for n in measured.graph.unfused if layer in ("", n.module)]
        return measured.share(sum(own)) if own else None

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share that is saved without them: what a kernel that fuses them may save."""
        measured = refused.measured
        names = [n.origin.name for n in measured.graph.unfused if n.origin is not None]
        model = measured.profile.model
        saved = measured.saved_by(f"without {names}", lambda: without(model, names))
        return measured.returned(saved)

    def repairs(self, refused: Refused, layers: Sequence[str]) -> tuple[Repair, ...]:
        """Return a runtime that fuses more."""
        return (Repair({"stage": "export_openvino"}, 1),) if find_spec("openvino") else ()


class CallOverhead(SpeedCause):
    """A model so small that most of a call is spent around its kernels."""

    stages = ("export_onnx",)
    limit = 0.4
    text = (
        "a call of any model takes {value:.0%} of the time (limit {limit:.0%}); larger batches "
        "share it"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return the time of a call that computes nothing, as a share of the model's."""
        if layer:
            return None
        measured = refused.measured
        return measured.empty_call_ms / measured.ms

    def returned(self, refused: Refused, layers: Sequence[str]) -> float | None:
        """Return the share of what must be saved that calls would save if they cost nothing."""
        return refused.measured.returned(refused.measured.empty_call_ms)


class Noise(SpeedCause):
    """Measurements that lie further apart than the limit is away."""

    stages = ()
    """None: it is tested before all others, whatever the stage."""
    limit = 1.0
    text = (
        "cannot be told on this machine now: measurements lie {value:.3g} times as far apart as "
        "the limit is away (limit {limit:g}); run again when it has less to do"
    )

    def measure(self, refused: Refused, layer: str) -> float | None:
        """Return how far measurements lie apart over the distance to the limit."""
        return None if layer else refused.measured.gate.spread_in_margin


SPEED_CAUSES: tuple[type[SpeedCause], ...] = (
    FloatIslands,
    LonePairs,
    OddWidths,
    SlowIntegers,
    Unfused,
    CallOverhead,
    Noise,
)


def excluding(patterns: Sequence[str], layers: Collection[str]) -> list[str]:
    """Return the patterns of `exclude` that name some layers."""
    return [p for p in patterns if any(fnmatchcase(layer, p) for layer in layers)]


def formats_with_kernels(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return changes of a quantization's settings to formats that onnxruntime has kernels for."""
    found: list[dict[str, Any]] = []
    if own.get("activation_bits", 8) != 8:
        found.append({"activation_bits": 8})
    if own.get("target", "onnxruntime-cpu") != "onnxruntime-cpu":
        found.append({"target": "onnxruntime-cpu"})
    return found
