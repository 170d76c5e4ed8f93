"""Prepare a model for quantization-aware training: observe, fake-quantize, save, convert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.graph.lifting import program_of_graph
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e.graph_capture import capture, copy_graph
from compress.quantization.pt2e.observer_ranges import fit_ranges_
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq.calibrate import (
    calibrate_,
    convert,
    leave_float_,
    leave_vanishing_float_,
    prepare,
)
from compress.quantization.qat.fake_model import ConvBnParameters, FakeQuantizedModel, find_conv_bn

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.data.batch import Batch

FACTORY = f"{__name__}:fake_quantized"
TRACKED = ("minmax", "moving_average")
"""Observers whose ranges can follow a batch's extremes; the others clip, and extremes do not tell
where."""
ROUNDING = ("target", "weight_bits", "observer", "embeddings", "exclude", "learn_steps")
"""Settings of the stage that decide which tensors are fake-quantized, and how."""


@dataclass(frozen=True)
class PreparedModel:
    """A model's graph with observers; equal models give equal graphs, node names included."""

    model: Artifact
    settings: dict[str, Any]
    """Of `ROUNDING`, as in JSON."""
    graph: GraphModule
    conv_bn: dict[str, ConvBnParameters]
    """Node of each layer whose BatchNorm was folded → the tensors of both."""
    quantizer: OnnxRuntimeQuantizer
    """Annotated the graph, and recorded what it quantized."""
    float_operators: tuple[str, ...] = ()
    """Names of the nodes that compute in float, as what they read is too small for integers."""

    @classmethod
    def from_artifact(
        cls, model: Artifact, settings: dict[str, Any], float_operators: Sequence[str] = ()
    ) -> PreparedModel:
        """Capture a model and insert observers, but not before the operators that stay float."""
        graph = capture(model.load(), model.signature)
        conv_bn = find_conv_bn(graph)  # before `prepare` folds them
        quantizer = OnnxRuntimeQuantizer(
            scheme_for(settings["target"], settings["weight_bits"]),
            settings["observer"],
            settings["exclude"],
            embeddings=settings["embeddings"],
        )
        prepared = prepare(graph, quantizer)
        readers = [node for node in prepared.graph.nodes if node.name in float_operators]
        leave_float_(prepared, quantizer, readers)
        return cls(model, settings, prepared, conv_bn, quantizer, tuple(float_operators))

    def calibrated(
        self, batches: Iterable[Batch], report: Callable[[int], None]
    ) -> tuple[PreparedModel, FakeQuantizedModel]:
        """Return the fake-quantized model with the ranges that `quantize_static` finds.

        Operators that read what is too small for integers stay float in it, and in the prepared
        model that is returned too.
        """
        graph = copy_graph(self.graph)
        calibrate_(graph, self.model.signature, batches, report)
        _, readers = leave_vanishing_float_(graph, self.quantizer)
        names = [node.name for node in readers]
        prepared = self.from_artifact(self.model, self.settings, names) if names else self
        fit_ranges_(graph)
        return prepared, prepared._fake_quantized(graph, calibrated=True)

    def save(self, module: FakeQuantizedModel, path: Path) -> EagerModel:
        """Save a fake-quantized model, so that every process of a training can rebuild it."""
        arguments = {
            "model": str(self.model.path.absolute()),
            "rounding": self.settings,
            "float_operators": list(self.float_operators),
        }
        recipe = Recipe(factory=FACTORY, arguments=arguments)
        return EagerModel.create(path, recipe, module.state_dict(), self.model.signature)

    def convert(self, module: FakeQuantizedModel) -> ExportedProgram:
        """Return the integer graph of a trained model, and freeze the model as it is."""
        graph = copy_graph(self.graph)
        module.transfer_to_(graph, self.model.signature)
        return program_of_graph(convert(graph), self.model.signature)

    def _fake_quantized(self, graph: GraphModule, *, calibrated: bool) -> FakeQuantizedModel:
        return FakeQuantizedModel(
            graph,
            self.conv_bn,
            learn_scale=self.settings["learn_steps"],
            track_ranges=self.settings["observer"] in TRACKED,
            calibrated=calibrated,
        )


def fake_quantized(
    model: str, rounding: dict[str, Any], float_operators: Sequence[str] = ()
) -> FakeQuantizedModel:
    """Rebuild a fake-quantized model, its ranges not yet known, from what `save` recorded."""
    source = Artifact.from_directory(Path(model))
    prepared = PreparedModel.from_artifact(source, rounding, float_operators)
    return prepared._fake_quantized(copy_graph(prepared.graph), calibrated=False)
