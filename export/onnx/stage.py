"""The artifact `OnnxModel`, and the stage `export_onnx` that writes it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.export.common.runtime import (
    NO_BFLOAT16,
    NO_UINT16_IN_OPSET,
    UINT16_OPSET,
    Reproducer,
    Runtime,
    TritonBackend,
)
from compress.export.exporter import ExportedModel, Exporter, source_counts

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.onnx.lowering import Translation

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
COARSE_LSTM = (
    "%s: %s is computed in float, with its weights of 8 bits: onnxruntime's integer kernel rounds "
    "all numbers of a call with one scale, and on val its output is off by %.2g %% of the norm"
)
ONNX_TARGETS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt")
"""Quantization targets whose graphs become ONNX files."""
RUNTIME = Runtime(
    name="onnxruntime",
    title="ONNX Runtime",
    targets=ONNX_TARGETS,
    refused_formats={"bfloat16": NO_BFLOAT16},
    reproducer=Reproducer(
        file="model.onnx",
        library="onnxruntime",
        imports="import onnxruntime\n",
        run_lines=(
            'session = onnxruntime.InferenceSession(HERE / "model.onnx", '
            'providers=["CPUExecutionProvider"])',
            "names = [i.name for i in session.get_inputs()]",
            "feed = {n: x.numpy() for n, x in zip(names, inputs)}",
            "return [torch.from_numpy(y) for y in session.run(None, feed)]",
        ),
    ),
    triton=TritonBackend(
        backend="onnxruntime",
        platform="onnxruntime_onnx",
        file="model.onnx",
        thread_parameters=("intra_op_thread_count", "inter_op_thread_count"),
        kserve_format="onnx",
    ),
    from_onnx=lambda file, signature: file,
    torch_free_package="onnxruntime",
)


class OnnxModel(ExportedModel):
    """An ONNX file, run by onnxruntime: on the CPU, or on CUDA where it is built for it."""

    kind: ClassVar[str] = "onnx"
    runtime: ClassVar[Runtime] = RUNTIME
    payload: ClassVar[str] = "model.onnx"
    reports_integer_share: ClassVar[bool] = True
    opened_with: ClassVar[tuple[str, ...]] = ("compress.export.onnx.session",)

    def runs_on(self, device: str) -> str:
        """Return the device if onnxruntime is built for it, as onnxruntime-gpu is, else the CPU."""
        if device == "cpu":  # without importing onnxruntime: runs of cached results ask, too
            return device
        from compress.export.onnx.session import CUDA, onnxruntime

        return device if CUDA in onnxruntime.get_available_providers() else "cpu"

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Open an onnxruntime session; Unavailable where it does not find CUDA's libraries."""
        from compress.export.onnx.session import session_predictor

        return nullcontext(session_predictor(file, threads, device))

    def parameters(self) -> int:
        """Count the weights; scales and zero points are not weights."""
        from compress.export.onnx.graph import weight_elements
        from compress.export.onnx.proto_io import read_briefly

        # Once fused into onnxruntime's own operators, weights cannot be counted in the file.
        if (recorded := super().parameters()) is not None:
            return recorded
        with read_briefly(self.payload_path) as graph:
            return sum(weight_elements(graph).values())

    def macs(self, sizes: Mapping[str, int] | None = None) -> int | None:
        """Count the multiply-accumulates of convolutions and products for one sample."""
        from compress.export.onnx.graph import count_macs
        from compress.export.onnx.proto_io import read_briefly

        if "macs" in self.manifest.facts:
            return super().macs(sizes)
        with read_briefly(self.payload_path) as graph:
            return count_macs(graph, sizes)


class ExportOnnx(Exporter[EagerModel | GraphModel, OnnxModel]):
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
        lacks = "uint16" in formats and self.opset is not None and self.opset < UINT16_OPSET
        reason = NO_UINT16_IN_OPSET.format(self.opset) if lacks else ""
        return super().unsupported_input_reason(formats) or reason

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Translate and write a model, and free its memory."""
        from compress.common.malloc import release_memory
        from compress.export.onnx.graph import (
            add_metadata_,
            count_operators,
            names_of_weights,
            restore_file_,
            strip_,
        )
        from compress.export.onnx.passes.dynamic_quant import compute_coarse_lstms_in_float_
        from compress.export.onnx.proto_io import free_weights_, write, write_mapped
        from compress.export.parity.sample_parity import val_inputs

        graph, translation = self.translated(model)
        if translation.half:
            logger.warning(
                "%s: onnxruntime turns float16 into float32 to compute it on the CPU: a "
                "smaller file, not a faster answer; float16 kernels are for GPUs",
                self.title,
            )
        parts = graph, model.signature, val_inputs(context, model), context.threads
        for name, error in compute_coarse_lstms_in_float_(*parts):
            logger.warning(COARSE_LSTM, self.title, name, 100 * error)
        strip_(graph, names_of_weights(model))
        restore_file_(graph, model)
        class_names = add_metadata_(graph, model, self.class_names)
        facts = {
            **({"class_names": [*class_names]} if class_names else {}),
            "exporter": translation.exporter,
            "opset": graph.opset_imports[""],
            "operators": count_operators(graph),
            **translation.facts,
            # What fused operators multiply cannot be counted in the file.
            **(source_counts(model) if self.optimize == "extended" else {}),
        }
        write(graph, file)
        write_mapped(graph, file)
        free_weights_(graph)
        del graph
        release_memory()
        return facts

    def translated(self, model: EagerModel | GraphModel) -> tuple[ir.Model, Translation]:
        """Return a model as ONNX, with names that :meth:`write` shortens."""
        from compress.export.onnx.lowering import translate
        from compress.export.onnx.passes.stored_integers import compact_
        from compress.export.onnx.session import optimize

        graph, translation = translate(model, self.opset, self.title)
        if self.optimize != "none":
            graph = optimize(graph, self.optimize)
        compact_(graph)
        return graph, translation

    @contextmanager
    def open(
        self, file: Path, model: EagerModel | GraphModel, facts: dict[str, Any], context: Context
    ) -> Iterator[Predictor]:
        """Open the file as it is mapped into memory, and count its kernels."""
        from compress.export.onnx.proto_io import mapped
        from compress.export.onnx.session import counted_predictor, plain_session_error

        example, threads = model.signature.example(), context.threads
        with mapped(file) as graph:
            exported, kernels = counted_predictor(graph, threads, example)
            facts |= kernels
            if kernels["integer_kernels"]:
                error = plain_session_error(exported, graph, threads, example)
                if error > ROUNDING:
                    logger.warning(NOT_EXACT, self.title, error)
        yield exported

    def prove(
        self,
        model: EagerModel | GraphModel,
        file: Path,
        facts: dict[str, Any],
        context: Context,
        began: float,
    ) -> None:
        """Compare with the source; warn of a quantized model that is computed in floats.

        A failure says first why the older exporter was used, if it was.
        """
        from compress.export.onnx.lowering import BY_OLDER_EXPORTER

        try:
            super().prove(model, file, facts, context, began)
        except StageFailed as error:
            if facts["exporter"] != "legacy":
                raise
            problem = facts["warnings"][0].removeprefix(BY_OLDER_EXPORTER)
            raise StageFailed(
                f"{problem} (what torch's older exporter writes is wrong: {error})"
            ) from error
        of_source = model.manifest.facts
        for_cpu = of_source.get("target", ONNX_TARGETS[0]) == ONNX_TARGETS[0]
        # Stages that quantize or convert record the fidelity, those that convert the type as well.
        is_quantized = "fidelity" in of_source and "dtype" not in of_source
        unfused = {k: n for k, n in facts["float_kernels"].items() if k in UNFUSED}
        # Layers that the quantization left in floats on purpose are no surprise.
        intended: Any = of_source.get("float_modules", ())
        is_more = sum(unfused.values()) > len(intended)
        if is_quantized and for_cpu and is_more:
            logger.warning("%s: quantized, yet computed in floats: %s", self.title, sorted(unfused))

    def write_program(
        self, program: ExportedProgram, signature: Signature, file: Path, device: str = "cpu"
    ) -> dict[str, Any]:
        """Translate and write a graph as it is."""
        from compress.export.onnx.graph import strip_
        from compress.export.onnx.lowering import lower
        from compress.export.onnx.proto_io import write

        graph = lower(program, signature, self.opset)
        strip_(graph)
        write(graph, file)
        return {}
