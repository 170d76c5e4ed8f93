"""The optional algorithms that reduce the quantization error, and the order they run in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.quantization.algorithms.adaround import adaround_
from compress.quantization.algorithms.bias_correction import correct_bias_
from compress.quantization.algorithms.cross_layer_equalization import equalize_
from compress.quantization.algorithms.matmul_view import UNSUPPORTED
from compress.quantization.algorithms.smoothquant import smooth_
from compress.quantization.pt2e.observer_ranges import layers_of, weight_of
from compress.quantization.pt2e.partial_graph import LayerInputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule

    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Rounding, Scheme, Smoothing


@dataclass
class Corrections:
    """Which algorithms run; records for the manifest what they changed."""

    smooth: Smoothing = "off"
    equalize: bool = False
    rounding: Rounding = "nearest"
    rounding_steps: int = 500
    bias_correction: bool = False
    float_between_layers: bool = False
    """Whether activations between layers are float, as with ranges found at run time, so that a
    multiplication may be inserted anywhere."""
    facts: dict[str, Any] = field(default_factory=dict)
    rescaled: set[str] = field(default_factory=set)
    """Modules whose outputs have other scales than the float model's."""

    def smooth_(
        self, graph: GraphModule, batches: Iterable[Batch], scheme: Scheme, exclude: Sequence[str]
    ) -> None:
        """Apply SmoothQuant to a captured graph, before it is prepared."""
        if self.smooth != "off":
            anywhere = self.float_between_layers
            self.facts["smoothed"], rescaled = smooth_(
                graph, batches, scheme, self.smooth, exclude, float_between_layers=anywhere
            )
            self.rescaled |= rescaled

    def equalize_(self, prepared: GraphModule) -> None:
        """Apply cross-layer equalization to a prepared graph, before it is calibrated."""
        if self.equalize:
            equalized = equalize_(prepared)
            self.facts["equalized_pairs"] = len(equalized)
            self.rescaled |= set(equalized)

    def round_(self, prepared: GraphModule, batches: Iterable[Batch]) -> None:
        """Apply AdaRound and bias correction to a calibrated graph, layer after layer.

        In graph order, so that each layer compensates the quantization error of those before it.
        """
        changed: list[float] = []
        with LayerInputs(prepared, batches) as inputs:
            for layer in layers_of(prepared):
                observed: Any = layer.args[:2]
                if any(operand.op != "call_module" for operand in observed):
                    continue  # its input or weight stays float
                weight = weight_of(prepared, layer)
                # AdaRound first: it leaves little shift for the bias to correct.
                if self.rounding == "adaround" and layer.target not in UNSUPPORTED:
                    pairs = inputs.pairs(layer)
                    changed.append(adaround_(prepared, layer, pairs, self.rounding_steps))
                if self.bias_correction:
                    correct_bias_(prepared, layer, weight, inputs.pairs(layer))
        if changed:
            self.facts["rounded_away"] = round(sum(changed) / len(changed), 4)
