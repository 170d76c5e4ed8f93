"""The artifact `OpenVINOModel`, and the stage that writes it."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.foreign.native_runtimes import open_vino
from compress.common.forward import Predictor, opened_model
from compress.common.requirements import Requirement, pip_install, require_all
from compress.common.signature import TABLE_ROWS
from compress.core.stage import Stage
from compress.export.common.targets import NO_BFLOAT16, warn_of_other_target
from compress.export.onnx.stage import ONNX_TARGETS, OnnxModel
from compress.export.parity.stored_parity import ComparesStoredFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    import torch
    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.core.context import Context

    Tensors = tuple[torch.Tensor, ...]

logger = logging.getLogger(__name__)

OPENVINO = Requirement(what="openvino", install=pip_install("openvino"))


class OpenVINOModel(Artifact):
    """An OpenVINO model, run by OpenVINO on the CPU."""

    kind: ClassVar[str] = "openvino"
    payload: ClassVar[str] = "model.xml"
    only_device: ClassVar[str] = "cpu"

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Compile the model as a predictor; it runs on the CPU whatever the device.

        Floats are computed in float32: OpenVINO's own default is bfloat16 where there is any.

        Raises:
            ArtifactInvalid: it was altered after sealing, or OpenVINO cannot load it.
            Unavailable: OpenVINO is not installed.
        """
        from compress.export.openvino.runtime import compiled, predictor, within_bounds

        require_all([OPENVINO], str(self.path))
        self.verify_cached()
        yield within_bounds(predictor(compiled(self.payload_path, threads)), self.signature)

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the graph and of its weights, which are in another file."""
        return sum(file.bytes for file in self.model_files.values())


class ExportOpenVINO(ComparesStoredFile, Stage[EagerModel | GraphModel | OnnxModel, OpenVINOModel]):
    """Write an OpenVINO model, checked against its source at several sizes of every named axis.

    It is made from the model as ONNX; integers of a quantized one stay as they are.
    """

    stage: Literal["export_openvino"] = "export_openvino"
    requirements: ClassVar[tuple[Requirement, ...]] = (OPENVINO,)

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why ONNX lacks a format; empty where it does not."""
        return NO_BFLOAT16 if "bfloat16" in formats else ""

    def run(self, model: EagerModel | GraphModel | OnnxModel, context: Context) -> OpenVINOModel:
        """Write the model as ONNX, then as OpenVINO's; compile it, compare it with the source."""
        from compress.export.openvino.runtime import compiled, count_kernels, predictor, write
        from compress.export.parity.compare import check_parity
        from compress.export.parity.report import ParityContext, report_on_mismatch
        from compress.export.parity.repro_script import OPENVINO as SCRIPT_RUNTIME

        warn_of_other_target(model, ONNX_TARGETS, self.title)
        facts: dict[str, Any] = {
            "openvino": open_vino().__version__,
            "parameters": model.parameters(),
            "macs": model.macs(),
        }
        with (
            TemporaryDirectory(prefix="compress-openvino-") as scratch,
            OpenVINOModel.atomic_write(
                context.root,
                model.signature,
                lineage=self.lineage(model),
                facts=facts,
                carried=model.carried_files(),
            ) as partial,
        ):
            onnx_file, found = self._as_onnx(model, Path(scratch))
            file = partial / OpenVINOModel.payload
            write(onnx_file, file, model.signature)
            program = compiled(file, context.threads)
            exported = predictor(program)
            facts |= found | count_kernels(program)
            parity = ParityContext(
                *(self.title, model, exported, onnx_file, None),
                *(self._reexport, SCRIPT_RUNTIME, context),
            )
            with report_on_mismatch(parity):
                check_parity(model, exported, context, facts.get("axis_limits"), facts["operators"])
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        return OpenVINOModel.from_directory(context.root)

    def _as_onnx(
        self, model: EagerModel | GraphModel | OnnxModel, folder: Path
    ) -> tuple[Path, dict[str, Any]]:
        """Return the model as an ONNX file, and facts: its operators, the limits of axes."""
        from compress.export.onnx.graph import count_operators, strip_
        from compress.export.onnx.passes.stored_integers import compact_
        from compress.export.onnx.proto_io import read, write
        from compress.export.onnx.translate import translate

        if isinstance(model, OnnxModel):
            known = ("axis_limits", TABLE_ROWS)
            limits = {k: v for k, v in model.manifest.facts.items() if k in known}
            operators = count_operators(read(model.payload_path))
            return model.payload_path, {"operators": operators, **limits}
        graph, translation = translate(model, None, self.title)
        compact_(graph)
        strip_(graph)
        facts = {"operators": count_operators(graph), **translation.facts}
        file = folder / OnnxModel.payload
        write(graph, file)
        return file, facts

    def _reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Write a part of the graph as ONNX, and return OpenVINO's outputs for it."""
        from compress.export.onnx.graph import strip_
        from compress.export.onnx.lowering import lower
        from compress.export.onnx.proto_io import write
        from compress.export.openvino.runtime import compiled, predictor

        graph = lower(program, signature, None)
        strip_(graph)
        write(graph, file)
        return predictor(compiled(file, threads=1))(*inputs)
