"""The uncompressed model in the runtimes that exports are for, as the baseline of a speedup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.core.gates.baselines import BASELINES, BaselineRuntime
from compress.core.stage import members_of
from compress.export.aotinductor.stage import ExportAot
from compress.export.executorch.stage import ExportExecuTorch
from compress.export.genai.stage import ExportGenai
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.tensorrt.stage import ExportTensorRT
from compress.export.torchscript.stage import ExportTorchScript

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.stage import Stage


def _register(
    name: str,
    title: str,
    exporter: Any,
    stage_for: Callable[[Context], Stage[Any, Any]] | None = None,
) -> None:
    """Add a runtime whose files a stage writes with default settings, or with those for a context.

    An artifact of that kind that is no export, such as an imported ONNX file, is run as it is.
    """

    def write(model: Artifact, context: Context) -> Artifact:
        stage = stage_for(context) if stage_for else exporter()
        exported: Artifact = stage.run(model, context)
        return exported

    kinds = frozenset(kind.kind for kind in members_of(exporter.writes()))
    reads = frozenset(kind.kind for kind in members_of(exporter.reads()))
    needs = tuple(exporter().all_requirements())
    BASELINES[name] = BaselineRuntime(name, title, kinds, write, reads, requirements=needs)


_register("onnxruntime", "ONNX Runtime", ExportOnnx)
_register("openvino", "OpenVINO", ExportOpenVINO)
_register("torchscript", "TorchScript", ExportTorchScript)
_register(
    "aot",
    "AOTInductor",
    ExportAot,
    lambda context: ExportAot(device="cuda" if context.device.startswith("cuda") else "cpu"),
)
_register("executorch", "ExecuTorch", ExportExecuTorch)
_register("tensorrt", "TensorRT", ExportTensorRT)
_register("genai", "onnxruntime-genai", ExportGenai)
