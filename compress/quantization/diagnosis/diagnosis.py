"""Find the layers by which a quantized model loses accuracy."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from compress.common.forward import torch_predictor
from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
from compress.quantization.diagnosis.diagnosis import (
    LayerEvidence,
    collect_evidence,
    collect_inputs,
)
from compress.quantization.diagnosis.rounding_switches import ALL, SwitchedGraph
from compress.quantization.numeric_debug.sqnr import LARGEST_DB
from compress.quantization.stages.base import FIDELITY

if TYPE_CHECKING:
    from collections.abc import Collection

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.core.val_halves import HalfOfVal
    from compress.quantization.diagnosis.rounding_switches import Rounded
    from compress.quantization.stages.base import QuantizationStage
    from compress.quantization.stages.static import QuantizeStatic

EVIDENCE_SAMPLES, EVIDENCE_BATCH = 128, 32
"""Samples on which layers are measured, and how many of them at once."""
CALIBRATION_BATCHES = 4
"""Batches of the calibration sample of which the middle values are measured."""


@dataclass
class QuantizationDiagnosis(LayerDiagnosis):
    """A model of `quantize_static` with a switch at each rounding."""

    switched: SwitchedGraph
    evidence: dict[str, LayerEvidence]
    """Of each layer, on samples of `val`."""
    calibrated: dict[str, LayerEvidence]
    """What each layer reads of the calibration sample."""
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
        halves = cls.halves(model, context)
        prepared, _, _ = stage.prepare(model, context)
        switched = SwitchedGraph.from_prepared(prepared)
        size = model.signature.smallest_batch
        batches = halves[0].data.batches(
            "val", EVIDENCE_BATCH if size == 1 else size, EVIDENCE_SAMPLES
        )
        whole = (batch for batch in batches if len(batch) % size == 0)
        evidence = collect_evidence(switched, whole, context.seed)
        calibration = islice(stage.calibration_data(model, context), CALIBRATION_BATCHES)
        calibrated = collect_inputs(switched, calibration)
        # Where no gradient reaches a layer, its own noise is all that is known.
        ranking = sorted(
            switched.layers, key=lambda name: (-evidence[name].effect, evidence[name].own.sqnr_db)
        )
        found = cls(model, context, *halves, switched, evidence, calibrated)
        found.begin(ranking, points)
        return found

    def drop(self, layers: Collection[str], rounds: Collection[Rounded] = ALL) -> float:
        """Return the points lost with some layers, or some of their operands, in float."""
        with (
            self.switched.in_float(layers, rounds) as graph,
            torch_predictor(graph, "cpu", self.context.threads) as predict,
        ):
            return self._judge(self.decided_on, predict)

    def own_sqnr_db(self, layer: str) -> float:
        """Return what was measured of the layer."""
        return round(self.evidence[layer].own.sqnr_db, 1)

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        with (
            self.switched.in_float(layers) as graph,
            torch_predictor(graph, "cpu", self.context.threads) as predict,
        ):
            return self._judge(half, predict)


@dataclass
class RequantizationDiagnosis(LayerDiagnosis):
    """A model of a stage that is run again for each set of layers, with these in `exclude`."""

    stage: QuantizationStage
    fidelity: dict[str, float]
    """Layer → the signal to noise ratio that the stage has recorded, the worst first."""
    known: dict[str, float] = field(default_factory=dict)
    """Other settings → the points lost with them."""

    @classmethod
    def create(
        cls,
        stage: QuantizationStage,
        model: EagerModel | GraphModel,
        after: Artifact,
        context: Context,
        points: float,
    ) -> Self:
        """Rank the layers by what the stage's artifact records of them.

        Args:
            stage: the stage with its settings.
            model: the float model that it reads.
            after: what it made.
            context: data, metric and seed of the run.
            points: what the refused gate allows.
        """
        recorded: Any = after.manifest.facts[FIDELITY]
        fidelity = {layer["module"]: layer["own_sqnr_db"] for layer in recorded["layers"]}
        # Float layers are recorded too, without an error.
        rounded = [name for name, value in fidelity.items() if value < LARGEST_DB]
        found = cls(model, context, *cls.halves(model, context), stage, fidelity)
        found.begin(rounded, points)
        return found

    def drop_with(self, settings: dict[str, Any]) -> float:
        """Return the points lost with other settings of the stage, measured once."""
        key = str(settings)
        if key not in self.known:
            self.known[key] = self._run(self.decided_on, settings)
        return self.known[key]

    def own_sqnr_db(self, layer: str) -> float:
        """Return what the stage has recorded."""
        return round(self.fidelity[layer], 1)

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        if len(layers) == len(self.search.ranking):
            return 0.0  # the float model, whose score is that which is compared with
        return self._run(half, {"exclude": [*self.stage.exclude, *layers]})

    def _run(self, half: HalfOfVal, settings: dict[str, Any]) -> float:
        model: Any = self.model
        with self.context.in_temporary_folder() as context:
            made = self.stage.with_settings(settings).run(model, context)
            with made.open("cpu", self.context.threads) as predict:
                return self._judge(half, predict)
