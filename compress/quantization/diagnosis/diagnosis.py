"""Find the layers by which a calibrated integer model loses accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.metrics import FRACTIONS
from compress.core.val_halves import halves_of_val
from compress.quantization.diagnosis.guilty_layers import GuiltSearch
from compress.quantization.diagnosis.layer_evidence import LayerEvidence, collect_evidence
from compress.quantization.diagnosis.rounding_switches import ALL, SwitchedGraph

if TYPE_CHECKING:
    from collections.abc import Collection

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.core.val_halves import HalfOfVal
    from compress.quantization.diagnosis.rounding_switches import Rounded
    from compress.quantization.stages.static import QuantizeStatic

WHY = "compress explain"
MOST_SAMPLES = 1024
"""Samples that models are judged on."""
EVIDENCE_SAMPLES, EVIDENCE_BATCH = 128, 32
"""Samples on which layers are measured, and how many of them at once."""


@dataclass
class QuantizationDiagnosis:
    """An integer model with a switch at each rounding, and the search for the guilty layers."""

    switched: SwitchedGraph
    evidence: dict[str, LayerEvidence]
    decided_on: HalfOfVal
    confirmed_on: HalfOfVal
    model: EagerModel | GraphModel
    context: Context
    search: GuiltSearch
    judgings: int = 0
    """How many models were judged on half of `val`."""
    weights_returned: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Layers → the share of the loss that returned with their weights in float."""

    @classmethod
    def create(
        cls, stage: QuantizeStatic, model: EagerModel | GraphModel, context: Context, points: float
    ) -> Self:
        """Calibrate a stage's model again, and measure all layers once.

        Args:
            stage: the stage with its settings.
            model: the float model that it reads.
            context: data, metric and seed of the run.
            points: what the refused gate allows.
        """
        metric = context.metric.for_model(model.signature).with_inferred_loss(context.data)
        halves = halves_of_val(model, context, WHY, metric, MOST_SAMPLES)
        prepared, _, _ = stage.prepare(model, context)
        switched = SwitchedGraph.from_prepared(prepared)
        size = model.signature.smallest_batch
        batches = halves[0].data.batches(
            "val", EVIDENCE_BATCH if size == 1 else size, EVIDENCE_SAMPLES
        )
        whole = (batch for batch in batches if len(batch) % size == 0)
        evidence = collect_evidence(switched, whole, context.seed)
        # Where no gradient reaches a layer, its own noise is all that is known.
        ranking = sorted(
            switched.layers, key=lambda name: (-evidence[name].effect, evidence[name].own.sqnr_db)
        )
        search = GuiltSearch(ranking, lambda layers: 0.0)
        found = cls(switched, evidence, *halves, model, context, search)
        search.drop = found.drop
        lost = search.lost
        search.wanted = (search.points(frozenset()) - points) / lost if lost > 0 else 0.0
        search.least_points = max(points, found.resolution)
        return found

    @property
    def samples(self) -> int:
        """How many samples decide."""
        return len(self.decided_on.data.split("val"))  # type: ignore[arg-type]

    @property
    def resolution(self) -> float:
        """Points that two samples are worth, of a fraction of them: less may be chance."""
        return 200 / self.samples if self.context.metric.name in FRACTIONS else 0.0

    def drop(self, layers: Collection[str], rounds: Collection[Rounded] = ALL) -> float:
        """Return the points lost with some layers, or some of their operands, in float."""
        return self._drop_on(self.decided_on, layers, rounds)

    def confirm(self, layers: Collection[str]) -> float:
        """Return the share of the loss that layers return on the half that did not decide."""
        total, left, none = (
            self._drop_on(self.confirmed_on, some, ALL)
            for some in ((), layers, self.switched.layers)
        )
        return (total - left) / (total - none) if total > none else 0.0

    def returned(self, points: float) -> float:
        """Return the share of the loss that is mended where so many points are lost."""
        search = self.search
        return (search.points(frozenset()) - points) / search.lost

    def _drop_on(
        self, half: HalfOfVal, layers: Collection[str], rounds: Collection[Rounded]
    ) -> float:
        self.judgings += 1
        with (
            self.switched.in_float(layers, rounds) as graph,
            torch_predictor(graph, "cpu", self.context.threads) as predict,
        ):
            return half.drop_points(accept_any_batch(predict, self.model.signature))
