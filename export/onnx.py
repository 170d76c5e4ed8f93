"""ONNX: the artifact, and the stage that lowers a module or a quantized graph to it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.core.artifact import Artifact, Predictor
from compress.core.bounds import limits_of
from compress.core.eager import EagerModel
from compress.core.graph import GraphModel, program_of
from compress.core.stage import Context, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    import torch
    from torch.export import ExportedProgram

    from compress.core.signature import Signature

logger = logging.getLogger(__name__)

UNFUSED = {"Conv", "FusedConv", "Gemm", "FusedGemm"}
"""Float kernels that a fully quantized model has none of; those of products may be meant."""

ONNX_TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt")
"""What graphs that become ONNX files are quantized for."""


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
        from export.agreement import prove_equal
        from export.onnx_graph import count_operators, shrink_
        from export.onnx_lowering import lower, write
        from export.onnx_session import count_kernels, session_predictor
        from export.parity_report import Account, accounting
        from export.reproduction import ONNX
        from export.targets import warn_of_another

        warn_of_another(model, ONNX_TARGETS, self.title)
        program = program_of(model)
        graph = lower(program, model.signature, self.opset)
        shrink_(graph)
        facts = {"opset": graph.opset_import[0].version, "operators": count_operators(graph)}
        facts |= limits_of(program, model.signature, self.title)
        with OnnxModel.sealing(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            file = partial / OnnxModel.payload
            write(graph, file)
            facts |= count_kernels(file)
            got = session_predictor(file, context.threads)
            account = Account(
                self.title, model, got, file, program, self._export_again, ONNX, context
            )
            with accounting(account):
                prove_equal(model, got, context)
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        self._tell_of_floats(model, program, facts["float_kernels"].keys())
        return OnnxModel.at(context.root)

    def _export_again(
        self,
        program: ExportedProgram,
        signature: Signature,
        file: Path,
        inputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Export a part of the graph and return its answers."""
        from export.onnx_graph import shrink_
        from export.onnx_lowering import lower, write
        from export.onnx_session import session_predictor

        graph = lower(program, signature, self.opset)
        shrink_(graph)
        write(graph, file)
        return session_predictor(file, threads=1)(*inputs)

    def _tell_of_floats(
        self, model: EagerModel | GraphModel, program: ExportedProgram, kernels: Set[str]
    ) -> None:
        """Warn where a graph was to be computed in fewer bits and is not."""
        import torch

        from export.onnx_half import holds

        meant = model.manifest.facts.get("target", ONNX_TARGETS[0]) == ONNX_TARGETS[0]
        unfused = UNFUSED & kernels
        if holds(program, torch.float16):
            logger.warning(
                "%s: onnxruntime turns float16 into float32 to compute it on the CPU: a "
                "smaller file, not a faster answer; float16 kernels are for GPUs",
                self.title,
            )
        elif isinstance(model, GraphModel) and meant and unfused:
            logger.warning("%s: quantized, yet computed in floats: %s", self.title, sorted(unfused))
