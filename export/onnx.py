"""ONNX: the artifact, and the stage that lowers a module or a quantized graph to it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.core.artifact import Artifact, Predictor
from compress.core.eager import EagerModel
from compress.core.graph import GraphModel
from compress.core.stage import Context, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

UNFUSED = {"Conv", "FusedConv", "Gemm", "FusedGemm"}
"""Float kernels that a fully quantized model has none of; those of products may be meant."""


class OnnxModel(Artifact):
    """An ONNX file, answered by onnxruntime on the CPU."""

    kind: ClassVar[str] = "onnx"
    payload: ClassVar[str] = "model.onnx"

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Give an onnxruntime session as a predictor; it runs on the CPU whatever the device."""
        from export.onnx_session import session_predictor

        yield session_predictor(self.payload_path, threads)

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        from export.onnx_graph import count_weights, read

        return count_weights(read(self.payload_path))

    def macs(self) -> int | None:
        """Count the multiply-accumulates of convolutions and products for one sample."""
        from export.onnx_graph import count_macs, read

        return count_macs(read(self.payload_path))


class ExportOnnx(Stage[EagerModel | GraphModel, OnnxModel]):
    """Write an ONNX file, proved to answer like its source at several sizes of every named axis."""

    stage: Literal["export_onnx"] = "export_onnx"
    opset: Annotated[int, Field(ge=18, le=24)] | None = None
    """Version of the ONNX operator set; the exporter's default when left out."""

    def run(self, model: EagerModel | GraphModel, context: Context) -> OnnxModel:
        """Lower, shrink, check and seal."""
        from compress.core.program import export_program
        from export.agreement import check_agreement
        from export.onnx_graph import count_operators, shrink_
        from export.onnx_lowering import lower, write
        from export.onnx_session import count_kernels, session_predictor

        if isinstance(model, GraphModel):
            program = model.program()
        else:
            program = export_program(model.load(), model.signature)
        graph = lower(program, model.signature, self.opset)
        shrink_(graph)
        facts = {"opset": graph.opset_import[0].version, "operators": count_operators(graph)}
        with OnnxModel.sealing(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            file = partial / OnnxModel.payload
            write(graph, file)
            facts |= count_kernels(file)
            with model.open(threads=context.threads) as expected:
                exported = session_predictor(file, context.threads)
                check_agreement(
                    expected, exported, model.signature, rounded=isinstance(model, GraphModel)
                )
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        if isinstance(model, GraphModel) and (unfused := UNFUSED & facts["float_kernels"].keys()):
            logger.warning("%s: quantized, yet computed in floats: %s", self.title, sorted(unfused))
        return OnnxModel.at(context.root)
