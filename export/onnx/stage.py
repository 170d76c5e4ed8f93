"""ONNX: the artifact, and the stage that lowers a module or a quantized graph to it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.core.stage import Stage
from export.common.targets import NO_BFLOAT16, SIXTEEN_BITS_SINCE, no_sixteen_bits, warn_of_another

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    import torch
    from onnx import ModelProto
    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from export.onnx.translate import Translation

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
        from export.onnx.session import session_predictor

        self.verify_cached()
        yield session_predictor(self.payload_path, threads)

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the file, and of the weights beside it where it is large."""
        return sum(file.bytes for file in self.manifest.files.values())

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        from export.onnx.graph import count_weights
        from export.onnx.proto_io import read

        counted: Any = self.manifest.facts.get("parameters")
        return count_weights(read(self.payload_path)) if counted is None else counted

    def macs(self) -> int | None:
        """Count the multiply-accumulates of convolutions and products for one sample."""
        from export.onnx.graph import count_macs
        from export.onnx.proto_io import read

        counted: Any = self.manifest.facts.get("macs")
        return count_macs(read(self.payload_path)) if counted is None else counted


class ExportOnnx(Stage[EagerModel | GraphModel, OnnxModel]):
    """Write an ONNX file, proved to answer like its source at several sizes of every named axis."""

    stage: Literal["export_onnx"] = "export_onnx"
    opset: Annotated[int, Field(ge=18, le=24)] | None = None
    """Version of the ONNX operator set; the exporter's default when left out."""
    optimize: Literal["none", "basic", "extended"] = "none"
    """Rewriting by onnxruntime ahead of time, which it otherwise does at each load: `basic` folds
    constants and BatchNorm, for any runtime; `extended` fuses operators into onnxruntime's own, for
    it alone. Neither ties the file to a processor."""
    class_names: tuple[str, ...] = ()
    """Names of the first output's classes, written into the model's properties."""

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why onnxruntime, or the operator set, has no such activations, or nothing."""
        if "bfloat16" in formats:
            return NO_BFLOAT16
        if "uint16" in formats and self.opset is not None and self.opset < SIXTEEN_BITS_SINCE:
            return no_sixteen_bits(self.opset)
        return ""

    def run(self, model: EagerModel | GraphModel, context: Context) -> OnnxModel:
        """Translate, shrink, check and seal."""
        from export.onnx.external_data import mapped
        from export.onnx.session import counted_predictor
        from export.onnx.translate import prove_equal
        from export.parity.compare import cases
        from export.parity.reference_outputs import recorded
        from export.parity.report import ParityContext, report_on_mismatch
        from export.parity.repro_script import ONNX
        from export.parity.sample_parity import val_inputs

        warn_of_another(model, ONNX_TARGETS, self.title)
        facts: dict[str, Any] = {}
        with OnnxModel.atomic_write(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            file = partial / OnnxModel.payload
            translation = self._write(model, file, facts)
            seen = list(val_inputs(context))
            limits = translation.limits.get("axis_limits")
            asked = chain((x for _, x in cases(model.signature, seen, limits)), seen)
            with recorded(model, asked, context.threads) as expected:
                with mapped(file) as graph:
                    got, kernels = counted_predictor(graph, context.threads)
                facts |= kernels
                account = ParityContext(
                    self.title, model, got, file, None, self._export_again, ONNX, context
                )
                with report_on_mismatch(account):
                    prove_equal(model, expected, got, seen, translation, facts["operators"])
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        self._log_float_layers(model, facts["float_kernels"].keys(), half=translation.half)
        return OnnxModel.from_directory(context.root)

    def check_parity(
        self, model: EagerModel | GraphModel, artifact: OnnxModel, context: Context
    ) -> None:
        """Compare a file from an earlier run with its source, on the data of this one."""
        from export.parity.compare import prove_again

        prove_again(model, artifact, context)

    def _write(
        self, model: EagerModel | GraphModel, file: Path, facts: dict[str, Any]
    ) -> Translation:
        """Translate and write a model, and let it go; what was found out is added to the facts."""
        from compress.profiling.rss import release_memory
        from export.onnx.external_data import write_mapped
        from export.onnx.proto_io import write
        from export.onnx.translate import translate

        graph, translation = translate(model, self.opset, self.title)
        graph = self._prepared(graph, model)
        facts |= self._facts(graph, translation, model)
        write(graph, file)
        write_mapped(graph, file)
        del graph
        release_memory()
        return translation

    def _prepared(self, graph: ModelProto, model: Artifact) -> ModelProto:
        """Return a graph rewritten, small, and with its properties."""
        from export.onnx.graph import shrink_
        from export.onnx.metadata import describe_
        from export.onnx.optimize import optimize

        if self.optimize != "none":
            graph = optimize(graph, self.optimize)
        shrink_(graph)
        describe_(graph, model, self.class_names)
        return graph

    def _facts(
        self, graph: ModelProto, translation: Translation, model: EagerModel | GraphModel
    ) -> dict[str, Any]:
        from export.onnx.graph import count_operators

        facts: dict[str, Any] = {"exporter": translation.exporter}
        facts |= {"opset": graph.opset_import[0].version, "operators": count_operators(graph)}
        facts |= translation.limits
        if translation.problem:
            facts["warnings"] = [f"by torch's older, deprecated exporter: {translation.problem}"]
        if self.optimize == "extended":  # fused operators do not tell
            facts |= {"parameters": model.parameters(), "macs": model.macs()}
        return facts

    def _export_again(
        self,
        program: ExportedProgram,
        signature: Signature,
        file: Path,
        inputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Export a part of the graph and return its answers."""
        from export.onnx.graph import shrink_
        from export.onnx.lowering import lower
        from export.onnx.proto_io import write
        from export.onnx.session import session_predictor

        graph = lower(program, signature, self.opset)
        shrink_(graph)
        write(graph, file)
        return session_predictor(file, threads=1)(*inputs)

    def _log_float_layers(
        self, model: EagerModel | GraphModel, kernels: Set[str], *, half: bool
    ) -> None:
        """Warn where a graph was to be computed in fewer bits and is not."""
        meant = model.manifest.facts.get("target", ONNX_TARGETS[0]) == ONNX_TARGETS[0]
        unfused = UNFUSED & kernels
        if half:
            logger.warning(
                "%s: onnxruntime turns float16 into float32 to compute it on the CPU: a "
                "smaller file, not a faster answer; float16 kernels are for GPUs",
                self.title,
            )
        elif isinstance(model, GraphModel) and meant and unfused:
            logger.warning("%s: quantized, yet computed in floats: %s", self.title, sorted(unfused))
