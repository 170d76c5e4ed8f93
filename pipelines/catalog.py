"""Every stage there is: ours, and those that installed packages add."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from compress.core.errors import Unavailable, exits_refused
from compress.distillation.stage import Distill
from compress.pruning.layers_stage import PruneLayers
from compress.pruning.stage import PruneChannels
from compress.pruning.weights_stage import PruneWeights
from compress.quantization.dynamic_stage import QuantizeDynamic
from compress.quantization.mixed_stage import QuantizeMixed
from compress.quantization.precision_stage import ConvertPrecision
from compress.quantization.qat_stage import QuantizeAwareTraining
from compress.quantization.static_stage import QuantizeStatic
from compress.quantization.weights_stage import QuantizeWeights
from compress.training.stage import Train
from export.aot import ExportAot
from export.onnx import ExportOnnx
from export.program import ExportProgram
from export.tensorrt import ExportTensorRT
from export.torchscript import ExportTorchScript
from serve.kserve import PackageKServe
from serve.stage import PackageTorchServe
from serve.triton import PackageTriton

if TYPE_CHECKING:
    from compress.core.stage import Stage

ENTRY_POINT_GROUP = "compress.stages"

OURS: tuple[type[Stage[Any, Any]], ...] = (
    Train,
    PruneChannels,
    PruneLayers,
    PruneWeights,
    Distill,
    QuantizeStatic,
    QuantizeAwareTraining,
    QuantizeMixed,
    QuantizeDynamic,
    QuantizeWeights,
    ConvertPrecision,
    ExportOnnx,
    ExportTorchScript,
    ExportAot,
    ExportProgram,
    ExportTensorRT,
    PackageTorchServe,
    PackageTriton,
    PackageKServe,
)


@cache
def stages() -> dict[str, type[Stage[Any, Any]]]:
    """Return stage classes by their `stage` key.

    Raises:
        Unavailable: an installed package announces a stage that cannot be imported or clashes.
    """
    known = {stage_type(stage): stage for stage in OURS}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            with exits_refused():
                stage = entry.load()
        except Exception as error:
            raise Unavailable(
                f"stage {entry.name!r} of {entry.value}: {type(error).__name__}: {error}"
            ) from error
        if stage_type(stage) in known:
            raise Unavailable(f"stage {entry.name!r} of {entry.value}: the name is taken")
        known[stage_type(stage)] = stage
    return known


def stage_type(stage: type[Stage[Any, Any]]) -> str:
    """Return a stage class's `stage` key."""
    return str(stage.model_fields["stage"].default)
