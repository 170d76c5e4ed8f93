"""What is done to a float model so that integers answer more like it, before and after ranges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.quantization.algorithms.adaround import round_adaptively_
from compress.quantization.algorithms.bias_correction import correct_bias_
from compress.quantization.algorithms.cross_layer_equalization import equalize_
from compress.quantization.algorithms.matmul_view import is_product
from compress.quantization.algorithms.smoothquant import smooth_
from compress.quantization.pt2e.observed_layers import is_rounded, layers_of, weight_of
from compress.quantization.pt2e.partial_graph import Reaching

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule

    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Rounding, Scheme, Smoothing


@dataclass
class Corrections:
    """Which corrections are made; knows afterwards what they came to."""

    smooth: Smoothing = "off"
    equalize: bool = False
    rounding: Rounding = "nearest"
    rounding_steps: int = 500
    bias_correction: bool = False
    passes_floats: bool = False
    """Whether layers pass floats on to each other, so that outliers may be divided anywhere."""
    facts: dict[str, Any] = field(default_factory=dict)
    rescaled: set[str] = field(default_factory=set)
    """Modules whose results have other scales than the float model's."""

    def smooth_(
        self,
        graph: GraphModule,
        batches: Iterable[Batch],
        scheme: Scheme,
        exclude: Sequence[str],
    ) -> None:
        """Move outliers of activations into weights, in place, before the graph is prepared."""
        if self.smooth != "off":
            smoothed = smooth_(
                graph, batches, scheme, self.smooth, exclude, passes_floats=self.passes_floats
            )
            self.facts["smoothed"] = smoothed.strengths
            self.rescaled |= smoothed.rescaled

    def equalize_(self, prepared: GraphModule) -> None:
        """Bring channels of neighbouring layers to one range, in place, before any is observed."""
        if self.equalize:
            equalized = equalize_(prepared)
            self.facts["equalized_pairs"] = len(equalized)
            self.rescaled |= set(equalized)

    def round_(self, prepared: GraphModule, batches: Iterable[Batch]) -> None:
        """Choose weights and biases with the ranges known, in place, layer after layer.

        Each layer makes up for what rounding did to those before it.
        """
        reaching, steps, away = Reaching(prepared, batches), self.rounding_steps, []
        for layer in filter(is_rounded, layers_of(prepared)):
            weight = weight_of(prepared, layer)
            if self.rounding == "adaround" and is_product(layer):
                away.append(round_adaptively_(prepared, layer, reaching.pairs(layer), steps))
            if self.bias_correction:
                correct_bias_(prepared, layer, weight, reaching.pairs(layer))
        if away:
            self.facts["rounded_away"] = round(sum(away) / len(away), 4)
