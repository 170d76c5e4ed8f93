"""A model's graph with observers: what calibration, training and conversion begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.config import Settings
from compress.quantization.config.backend_targets import Target
from compress.quantization.config.dtype_scheme import Observer, scheme_of
from compress.quantization.pt2e.observer_ranges import fit_ranges_
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq.calibrate import copied, observe_, prepare, traced
from compress.quantization.qat.conv_bn_qat import BnParameters, normed_layers
from compress.quantization.qat.fake_model import FakeQuantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.data.batch import Batch

FACTORY = f"{__name__}:fake_quantized"
FOLLOWED = ("minmax", "moving_average")
"""Observers of extremes; the others clip, and the extremes of a batch do not tell where."""


class FakeQuantization(Settings):
    """Which numbers of a model are rounded, and how."""

    target: Target
    """Runtime whose integer kernels decide."""
    weight_bits: int
    """Bits of a weight."""
    observer: Observer
    """How ranges of activations are estimated at first."""
    embeddings: bool
    """Whether tables are rounded too."""
    exclude: tuple[str, ...]
    """Modules left in float."""
    learn_steps: bool
    """Whether scales are trained."""

    def quantizer(self) -> OnnxRuntimeQuantizer:
        """Return what marks the operators."""
        scheme = scheme_of(self.target, self.weight_bits)
        return OnnxRuntimeQuantizer(scheme, self.observer, self.exclude, embeddings=self.embeddings)


@dataclass(frozen=True)
class Prepared:
    """A model's graph with observers; equal models give equal graphs, names included."""

    model: EagerModel
    rounding: FakeQuantization
    graph: GraphModule
    normed: dict[str, BnParameters]
    """The layers that had a BatchNorm, by the names of their nodes."""
    quantizer: OnnxRuntimeQuantizer
    """What marked the operators, and knows which."""

    @classmethod
    def of(cls, model: EagerModel, rounding: FakeQuantization) -> Prepared:
        """Return a model's graph with observers that have seen nothing.

        Raises:
            StageFailed: nothing can be quantized.
        """
        graph = traced(model.load(), model.signature)
        normed, quantizer = normed_layers(graph), rounding.quantizer()
        return cls(model, rounding, prepare(graph, quantizer), normed, quantizer)

    def calibrated(self, batches: Iterable[Batch], report: Callable[[int], None]) -> FakeQuantized:
        """Return the fake-quantized model with the ranges that `quantize_static` finds.

        Args:
            batches: calibration inputs.
            report: called with the number of samples seen so far.
        """
        graph = copied(self.graph)
        observe_(graph, self.model.signature, batches, report)
        fit_ranges_(graph)
        return self._fake_quantized(graph, calibrated=True)

    def uncalibrated(self) -> FakeQuantized:
        """Return the fake-quantized model, its ranges not yet known."""
        return self._fake_quantized(copied(self.graph), calibrated=False)

    def sealed(self, module: FakeQuantized, path: Path) -> EagerModel:
        """Seal a fake-quantized model, so that every process of a training builds it anew.

        Args:
            module: the fake-quantized model.
            path: directory of the artifact.
        """
        arguments = {
            "model": str(self.model.path.absolute()),
            "rounding": self.rounding.model_dump(mode="json"),
        }
        recipe = Recipe(factory=FACTORY, arguments=arguments)
        return EagerModel.create(path, recipe, module.state_dict(), self.model.signature)

    def converted(self, module: FakeQuantized) -> ExportedProgram:
        """Return the integer graph of a fake-quantized model, and freeze this as it is."""
        return module.converted(copied(self.graph), self.model.signature)

    def _fake_quantized(self, graph: GraphModule, *, calibrated: bool) -> FakeQuantized:
        return FakeQuantized(
            graph,
            self.normed,
            learns=self.rounding.learn_steps,
            follows=self.rounding.observer in FOLLOWED,
            calibrated=calibrated,
        )


def fake_quantized(model: str, rounding: dict[str, Any]) -> FakeQuantized:
    """Return the fake-quantized form of an eager model, its ranges not yet known.

    Args:
        model: directory of the eager model.
        rounding: the settings.
    """
    settings = FakeQuantization.model_validate(rounding)
    return Prepared.of(EagerModel.from_directory(Path(model)), settings).uncalibrated()
