"""The artifact `OnnxModel`, and the stage `export_onnx` that writes it."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.forward import opened_model
from compress.core.context import Context
from compress.core.stage import Stage
from compress.export.common.targets import (
    NO_BFLOAT16,
    NO_UINT16_IN_OPSET,
    UINT16_OPSET,
    warn_of_other_target,
)
from compress.export.parity.stored_parity import ComparesStoredFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    import onnx_ir as ir
    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.onnx.translate import Translation
    from compress.export.parity.bisect import Tensors

logger = logging.getLogger(__name__)

UNFUSED = {"Conv", "FusedConv", "Gemm", "FusedGemm"}
"""Float kernels that a fully quantized model has none of; MatMul may be left in float on purpose,
as in attention."""

ROUNDING = 1e-4
"""What is less, as a share of the outputs' norm, may be the order in which floats are added."""
NOT_EXACT = (
    "%s: this processor has no VNNI, and onnxruntime's answers are off by %.2g of their norm "
    "unless a session sets session.x64quantprecision to 1, as this toolkit and its servers do"
)
ONNX_TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt")
"""Quantization targets whose graphs become ONNX files."""


class OnnxModel(Artifact):
    """An ONNX file, run by onnxruntime: on the CPU, or on CUDA where it is built for it."""

    kind: ClassVar[str] = "onnx"
    payload: ClassVar[str] = "model.onnx"
    reports_integer_share: ClassVar[bool] = True
    opened_with: ClassVar[tuple[str, ...]] = ("compress.export.onnx.session",)

    def runs_on(self, device: str) -> str:
        """Return the device if onnxruntime is built for it, as onnxruntime-gpu is, else the CPU."""
        from compress.export.onnx.session import device_of

        return device_of(device)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open an onnxruntime session as a predictor.

        Raises:
            ArtifactInvalid: the file was altered after sealing, or cannot be loaded.
            Unavailable: it is to run on CUDA, whose libraries onnxruntime does not find.
        """
        from compress.export.onnx.session import session_predictor

        self.verify_cached()
        yield session_predictor(self.payload_path, threads, self.runs_on(device))

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the file, and of the weights beside it where it is large."""
        return sum(file.bytes for file in self.model_files.values())

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        from compress.export.onnx.graph import count_weights
        from compress.export.onnx.proto_io import read

        # Once fused into onnxruntime's own operators, weights cannot be counted in the file.
        recorded: Any = self.manifest.facts.get("parameters")
        return count_weights(read(self.payload_path)) if recorded is None else recorded

    def macs(self) -> int | None:
        """Count the multiply-accumulates of convolutions and products for one sample."""
        from compress.export.onnx.graph import count_macs
        from compress.export.onnx.proto_io import read

        recorded: Any = self.manifest.facts.get("macs")
        return count_macs(read(self.payload_path)) if recorded is None else recorded


class ExportOnnx(ComparesStoredFile, Stage[EagerModel | GraphModel, OnnxModel]):
    """Write an ONNX file, checked against its source at several sizes of every named axis."""

    stage: Literal["export_onnx"] = "export_onnx"
    opset: Annotated[int, Field(ge=18, le=24)] | None = None
    """Version of the ONNX operator set; the exporter's default when left out."""
    optimize: Literal["none", "basic", "extended"] = "none"
    """Rewriting by onnxruntime ahead of time, which it otherwise does at each load: `basic` folds
    constants and BatchNorm, for any runtime; `extended` fuses operators into onnxruntime's own, for
    it alone. Neither ties the file to a processor."""
    class_names: tuple[str, ...] = ()
    """Names of the first output's classes, written into the model's properties; by default
    `id2label` of a Hugging Face folder."""

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why onnxruntime or the operator set lacks a format; empty where neither does."""
        if "bfloat16" in formats:
            return NO_BFLOAT16
        if "uint16" in formats and self.opset is not None and self.opset < UINT16_OPSET:
            return NO_UINT16_IN_OPSET.format(self.opset)
        return ""

    def run(self, model: EagerModel | GraphModel, context: Context) -> OnnxModel:
        """Trace, translate, write, compare with the source."""
        from compress.export.onnx.proto_io import mapped
        from compress.export.onnx.session import counted_predictor, plain_session_error
        from compress.export.parity.compare import compare_outputs, parity_inputs
        from compress.export.parity.reference_outputs import recorded_outputs
        from compress.export.parity.report import ParityContext, report_on_mismatch
        from compress.export.parity.repro_script import ONNX
        from compress.export.parity.sample_parity import val_inputs

        warn_of_other_target(model, ONNX_TARGETS, self.title)
        facts: dict[str, Any] = {}
        with OnnxModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as partial:
            file = partial / OnnxModel.payload
            translation = self._write(model, file, facts)
            limits = translation.facts.get("axis_limits")
            val_batches, threads = list(val_inputs(context)), context.threads
            inputs = (x for _, x in parity_inputs(model.signature, val_batches, limits))
            # The source runs first and leaves memory before onnxruntime loads the file.
            with recorded_outputs(model, chain(inputs, val_batches), threads) as expected:
                with mapped(file) as graph:
                    example = model.signature.example()
                    exported, kernels = counted_predictor(graph, threads, example)
                    if kernels["integer_kernels"]:
                        error = plain_session_error(exported, graph, threads, example)
                        if error > ROUNDING:
                            logger.warning(NOT_EXACT, self.title, error)
                facts |= kernels
                parity = ParityContext(
                    self.title, model, exported, file, None, self.reexport, ONNX, context
                )
                with report_on_mismatch(parity), translation.explaining_failure():
                    compare_outputs(
                        model, expected, exported, val_batches, limits, facts["operators"]
                    )
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        for_cpu = model.manifest.facts.get("target", ONNX_TARGETS[0]) == ONNX_TARGETS[0]
        unfused = sorted(UNFUSED & facts["float_kernels"].keys())
        if translation.half:
            logger.warning(
                "%s: onnxruntime turns float16 into float32 to compute it on the CPU: a "
                "smaller file, not a faster answer; float16 kernels are for GPUs",
                self.title,
            )
        elif isinstance(model, GraphModel) and for_cpu and unfused:
            logger.warning("%s: quantized, yet computed in floats: %s", self.title, unfused)
        return OnnxModel.from_directory(context.root)

    def translated(self, model: EagerModel | GraphModel) -> tuple[ir.Model, Translation]:
        """Return a model as ONNX, with names that :meth:`run` shortens."""
        from compress.export.onnx.passes.stored_integers import compact_
        from compress.export.onnx.session import optimize
        from compress.export.onnx.translate import translate

        graph, translation = translate(model, self.opset, self.title)
        if self.optimize != "none":
            graph = optimize(graph, self.optimize)
        compact_(graph)
        return graph, translation

    def _write(
        self, model: EagerModel | GraphModel, file: Path, facts: dict[str, Any]
    ) -> Translation:
        """Translate and write a model, and free its memory; what is found is added to the facts."""
        from compress.export.onnx.graph import count_operators, strip_
        from compress.export.onnx.metadata import add_metadata_
        from compress.export.onnx.proto_io import free_weights_, write, write_mapped
        from compress.profiling.rss import release_memory

        graph, translation = self.translated(model)
        strip_(graph)
        if names := add_metadata_(graph, model, self.class_names):
            facts["class_names"] = [*names]
        facts |= {
            "exporter": translation.exporter,
            "opset": graph.opset_imports[""],
            "operators": count_operators(graph),
            **translation.facts,
        }
        if self.optimize == "extended":  # what fused operators multiply cannot be counted
            facts |= {"parameters": model.parameters(), "macs": model.macs()}
        write(graph, file)
        write_mapped(graph, file)
        free_weights_(graph)
        del graph
        release_memory()
        return translation

    def reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Export a part of the graph and return its outputs."""
        from compress.export.onnx.graph import strip_
        from compress.export.onnx.lowering import lower
        from compress.export.onnx.proto_io import write
        from compress.export.onnx.session import session_predictor

        graph = lower(program, signature, self.opset)
        strip_(graph)
        write(graph, file)
        return session_predictor(file, threads=1)(*inputs)
