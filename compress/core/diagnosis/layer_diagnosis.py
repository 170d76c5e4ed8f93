"""A compressed model whose parts can be put back, and the search for those that lose accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.diagnosis.layer_diagnosis import GuiltSearch
from compress.core.val_halves import halves_of_val

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.val_halves import HalfOfVal

WHY = "compress explain"
MOST_SAMPLES = 1024
"""Samples that models are judged on."""


@dataclass
class LayerDiagnosis:
    """What a stage has made, of which parts can be put back, and the search for the guilty ones."""

    parts: ClassVar[str] = "layers"
    """What can be put back, for messages."""
    put_back: ClassVar[str] = "in float"
    """How these parts are once they are put back, for messages."""
    notice: ClassVar[str] = ""
    """What the figures leave out, for messages."""

    model: Artifact
    """The model that the stage has read."""
    context: Context
    decided_on: HalfOfVal
    confirmed_on: HalfOfVal
    search: GuiltSearch = field(init=False)
    """Begun by :meth:`begin`."""
    judgings: int = field(default=0, init=False)
    """How many models were judged on half of `val`."""
    spread: bool = field(default=False, init=False)
    """Whether no quarter of the parts returns half of the loss."""

    @staticmethod
    def halves(model: Artifact, context: Context) -> tuple[HalfOfVal, HalfOfVal]:
        """Measure a model on both halves of `val`."""
        metric = context.metric.for_model(model.signature).with_inferred_loss(context.data)
        return halves_of_val(model, context, WHY, metric, MOST_SAMPLES)

    def begin(self, ranking: Sequence[str], points: float) -> None:
        """Begin the search among ranked parts, given the points that the refused gate allows."""
        self.search = search = GuiltSearch(
            ranking, lambda layers: self._drop_on(self.decided_on, layers)
        )
        search.wanted = search.share_returned(points) if search.lost > 0 else 0.0
        search.least_points = max(points, self.resolution)

    @property
    def samples(self) -> int:
        """How many samples decide."""
        return self.decided_on.samples

    @property
    def resolution(self) -> float:
        """Points that two samples are worth, of a fraction of them: less may be chance."""
        return 2 * self.decided_on.points_of_sample

    def confirm(self, layers: Collection[str]) -> float:
        """Return the share of the loss that layers return on the half that did not decide."""
        total, left, none = (
            self._drop_on(self.confirmed_on, some) for some in ((), layers, self.search.ranking)
        )
        if not (math.isfinite(left) and math.isfinite(total)):
            return 1.0 if math.isfinite(left) else 0.0
        return (total - left) / (total - none) if total > none else 0.0

    def returned(self, points: float) -> float:
        """Return the share of the loss that is mended where so many points are lost."""
        return self.search.share_returned(points)

    def own_sqnr_db(self, layer: str) -> float | None:
        """Return the signal to quantization noise ratio of a rounded layer; None of others."""
        return None

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        """Return the points lost on some samples with some layers put back."""
        raise NotImplementedError

    def _judge(self, half: HalfOfVal, predict: Predictor) -> float:
        self.judgings += 1
        return half.drop_points(accept_any_batch(predict, self.model.signature))

    def _judge_module(self, half: HalfOfVal, module: nn.Module) -> float:
        device = self.context.device
        with torch_predictor(module.to(device), device, self.context.threads) as predict:
            return self._judge(half, predict)
