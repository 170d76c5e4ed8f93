"""All known stages: those of this toolkit, and those that installed packages add."""

from __future__ import annotations

from functools import cache, reduce
from importlib.metadata import entry_points
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from compress.common.errors import Unavailable
from compress.common.requirements import load_entry_point
from compress.distillation.stage import Distill
from compress.export.aotinductor.stage import ExportAot
from compress.export.compressed_tensors.stage import ExportCompressedTensors
from compress.export.executorch.stage import ExportExecuTorch
from compress.export.exported_program import ExportProgram
from compress.export.fastest.stage import ExportFastest
from compress.export.genai.stage import ExportGenai
from compress.export.gguf.stage import ExportGguf
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.tensorrt.stage import ExportTensorRT
from compress.export.torchscript.stage import ExportTorchScript
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_layers import PruneLayers
from compress.pruning.prune_weights import PruneWeights
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.half_precision import ConvertPrecision
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.quantization.stages.qat import QuantizeAwareTraining
from compress.quantization.stages.rotation import RotateWeights
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from compress.serve.repository import PackageKServe, PackageTriton
from compress.serve.torchserve.stage import PackageTorchServe
from compress.training.stage import Train

if TYPE_CHECKING:
    from compress.core.stage import Stage

ENTRY_POINT_GROUP = "compress.stages"

OURS: tuple[type[Stage[Any, Any]], ...] = (
    Train,
    PruneChannels,
    PruneLayers,
    PruneWeights,
    Distill,
    RotateWeights,
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
    ExportOpenVINO,
    ExportExecuTorch,
    ExportGenai,
    ExportCompressedTensors,
    ExportGguf,
    ExportTensorRT,
    ExportFastest,
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
        stage = load_entry_point(entry, "stage")
        if stage_type(stage) in known:
            raise Unavailable(f"stage {entry.name!r} of {entry.value}: the name is taken")
        known[stage_type(stage)] = stage
    return known


def stage_type(stage: type[Stage[Any, Any]]) -> str:
    """Return a stage class's `stage` key."""
    return str(stage.model_fields["stage"].default)


if TYPE_CHECKING:
    AnyStage = Stage[Any, Any]
else:
    # A union that is built at run time means nothing to mypy.
    AnyStage = Annotated[reduce(or_, stages().values()), Field(discriminator="stage")]
