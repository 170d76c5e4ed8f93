"""The artifact `OpenVINOModel`, and the stage that writes it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.foreign.native_runtimes import open_vino
from compress.common.requirements import Requirement, pip_install
from compress.common.signature import TABLE_ROWS
from compress.export.common.runtime import NO_BFLOAT16, Reproducer, Runtime, TritonBackend
from compress.export.exporter import ExportedModel, Exporter, source_counts
from compress.export.onnx.stage import ONNX_TARGETS, OnnxModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context

    Source = EagerModel | GraphModel | OnnxModel

OPENVINO = Requirement(what="openvino", install=pip_install("openvino"))
RUNTIME = Runtime(
    name="openvino",
    title="OpenVINO",
    requirements=(OPENVINO,),
    targets=ONNX_TARGETS,
    refused_formats={"bfloat16": NO_BFLOAT16},
    reproducer=Reproducer(
        file="model.onnx",
        library="openvino",
        imports="import openvino\n",
        run_lines=(
            'settings = {"INFERENCE_PRECISION_HINT": "f32"}',
            'model = openvino.Core().compile_model(HERE / "model.onnx", "CPU", settings)',
            "names = [port.get_any_name() for port in model.inputs]",
            "feed = {n: x.numpy() for n, x in zip(names, inputs)}",
            "return [torch.from_numpy(y) for y in model(feed).values()]",
        ),
    ),
    triton=TritonBackend(
        backend="openvino",
        file="model.xml",
        thread_parameters=("INFERENCE_NUM_THREADS", "NUM_STREAMS"),
        kserve_format="triton",  # KServe has no name for the format
        warning=(
            "Triton's OpenVINO backend computes in bfloat16 on processors that have it, and has no "
            "setting for float32, by which the gates judged"
        ),
    ),
    torch_free_package="openvino",
)


class OpenVINOModel(ExportedModel):
    """An OpenVINO model, run by OpenVINO on the CPU."""

    kind: ClassVar[str] = "openvino"
    payload: ClassVar[str] = "model.xml"
    only_device: ClassVar[str] = "cpu"
    runtime: ClassVar[Runtime] = RUNTIME

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Compile a model for the CPU, in float32; OpenVINO's default may be bfloat16."""
        from compress.export.openvino.runtime import compiled, predictor, within_bounds

        return nullcontext(within_bounds(predictor(compiled(file, threads)), signature))


class ExportOpenVINO(Exporter[EagerModel | GraphModel | OnnxModel, OpenVINOModel]):
    """Write an OpenVINO model, checked against its source at several sizes of every named axis.

    It is made from the model as ONNX; integers of a quantized one stay as they are. For Intel's
    processors, where it is often faster than ONNX Runtime; `export_fastest` measures both.

        - {stage: export_openvino, gates: [{gate: min_speedup, ratio: 1.5, against: eager}]}
    """

    stage: Literal["export_openvino"] = "export_openvino"

    def write(self, model: Source, file: Path, context: Context) -> dict[str, Any]:
        """Write the model as ONNX, and that as OpenVINO's."""
        from compress.export.openvino.runtime import write

        with TemporaryDirectory(prefix="compress-openvino-") as scratch:
            onnx_file, facts = self._as_onnx(model, Path(scratch, OnnxModel.payload))
            write(onnx_file, file, model.signature)
        return {"openvino": open_vino().__version__, **source_counts(model), **facts}

    @contextmanager
    def open(
        self, file: Path, model: Source, facts: dict[str, Any], context: Context
    ) -> Iterator[Predictor]:
        """Compile the model once, to run it and to count its kernels."""
        from compress.export.openvino.runtime import compiled, count_kernels, predictor

        program = compiled(file, context.threads)
        facts |= count_kernels(program)
        yield predictor(program)

    def _as_onnx(self, model: Source, file: Path) -> tuple[Path, dict[str, Any]]:
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
        write(graph, file)
        return file, facts

    def copy_for_report(self, model: Source, file: Path, copy: Path) -> None:
        """Write the model as ONNX, which the reproducer compiles."""
        onnx_file, _ = self._as_onnx(model, copy)
        if onnx_file != copy:
            super().copy_for_report(model, onnx_file, copy)

    def write_program(
        self, program: ExportedProgram, signature: Signature, file: Path, device: str = "cpu"
    ) -> dict[str, Any]:
        """Write a graph as ONNX, which OpenVINO compiles as well."""
        from compress.export.onnx.lowering import lower_to_file

        lower_to_file(program, signature, None, file)
        return {}
