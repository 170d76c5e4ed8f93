"""The artifact `OpenVINOModel`, the stage that writes it, and OpenVINO, which runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.foreign.native_runtimes import open_vino, openvino_core
from compress.common.lazy_modules import torch
from compress.common.requirements import Requirement, pip_install
from compress.common.signature import TABLE_ROWS, Signature
from compress.export.common.compiled_code import checked
from compress.export.common.runtime import (
    NO_BFLOAT16,
    Reproducer,
    Runtime,
    TritonBackend,
    kernel_facts,
)
from compress.export.exporter import ExportedModel, Exporter, source_counts
from compress.export.onnx.stage import ONNX_TARGETS, ExportOnnx, OnnxModel

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.core.context import Context

    Source = EagerModel | GraphModel | OnnxModel

INTEGERS = {"i8", "u8"}
HEAVY = {
    *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNCell", "RNNSeq"),
    *("ScaledDotProductAttention",),
}
"""Kernels of OpenVINO's CPU device that multiply matrices."""


def write(onnx_file: Path, file: Path, signature: Signature) -> None:
    """Write an ONNX file as an OpenVINO model, with its weights as they are, beside the graph.

    Its inputs have the bounds that the signature declares, so that other programs have them too.
    """
    openvino = open_vino()

    def dimension(axis: int | str) -> Any:
        if axis in signature.axes:
            allowed = signature.bounds(str(axis))
            return openvino.Dimension(allowed.min, -1 if allowed.max is None else allowed.max)
        return openvino.Dimension(axis if isinstance(axis, int) else -1)  # -1: any

    shapes = {
        spec.name: openvino.PartialShape([*map(dimension, spec.shape)])
        for spec in signature.inputs
        if not signature.axes.keys().isdisjoint(spec.shape)
    }
    try:
        model = openvino_core().read_model(onnx_file)
        if shapes:
            model.reshape(shapes)
    except Exception as error:
        raise StageFailed(f"OpenVINO cannot read the model: {_reason(error)}") from error
    # Operators without a name get one by their place, so that a model is always written alike:
    # OpenVINO numbers them by how many the process has made, of all models.
    operators = model.get_ordered_ops()
    unnamed = {i for i, op in enumerate(operators) if _is_numbered(op)}
    taken = {op.get_friendly_name() for i, op in enumerate(operators) if i not in unnamed}
    for i in sorted(unnamed):
        name = f"{operators[i].get_type_name()}_{i}"
        operators[i].set_friendly_name(f"{name}_unnamed" if name in taken else name)
    open_vino().save_model(model, file, compress_to_fp16=False)


def _is_numbered(operator: Any) -> bool:
    """Whether an operator's name is a number of OpenVINO's, or a constant took over such a name."""
    name = operator.get_friendly_name()
    if name == operator.get_name():
        return True
    # One that the file names has a result of that name, which a constant in its place keeps.
    has_results = any(output.get_names() for output in operator.outputs())
    return not has_results and re.fullmatch(r"[A-Z]\w*_\d+", name) is not None


def compiled(file: Path, threads: int) -> Any:
    """Return `model.xml`, or an ONNX file, compiled for the CPU; ArtifactInvalid if it fails."""
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16, where the processor has it
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    try:
        return openvino_core().compile_model(file, "CPU", settings)
    except Exception as error:
        raise ArtifactInvalid(f"{file}: OpenVINO cannot load it: {_reason(error)}") from error


def predictor(model: Any) -> Predictor:
    """Return a predictor that runs a compiled model."""
    shapes = {port.get_any_name(): port.partial_shape for port in model.inputs}
    request = model.create_infer_request()

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = {n: x.detach().cpu().numpy() for n, x in zip(shapes, inputs, strict=True)}
        for name, array in arrays.items():
            # OpenVINO 2026.4 gives outputs without rows for other sizes, instead of an error.
            if not shapes[name].compatible(open_vino().PartialShape(list(array.shape))):
                found, expected = list(array.shape), shapes[name].to_string()
                raise ValueError(f"input {name} has shape {found}, expected {expected}")
        # Arrays of its own: those that OpenVINO shares are overwritten by the next call.
        answers = request.infer(arrays, share_outputs=False)
        return tuple(torch.from_numpy(y) for y in answers.values())

    return predict


def from_onnx(onnx_file: Path, signature: Signature) -> Path:
    """Write an ONNX file as an OpenVINO model in a folder beside it, and return the model."""
    file = onnx_file.parent / "openvino" / OpenVINOModel.payload
    file.parent.mkdir()
    write(onnx_file, file, signature)
    return file


def count_kernels(model: Any) -> dict[str, dict[str, int]]:
    """Return how many kernels for integers and for floats do the heavy work of a compiled model."""
    nodes = [node.get_rt_info() for node in model.get_runtime_model().get_ops()]
    kinds = [
        (kind, facts["runtimePrecision"].astype(str) in INTEGERS)
        for facts in nodes
        if (kind := facts["layerType"].astype(str)) in HEAVY
    ]
    return kernel_facts((k for k, integer in kinds if integer), (k for k, i in kinds if not i))


def _reason(error: Exception) -> str:
    """Return the line of OpenVINO's message that says what is wrong; the first name its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith(("Exception from", "Check '", "While"))]
    return named[0] if named else first_line(error)


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
    from_onnx=from_onnx,
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
        predict = predictor(compiled(file, threads))
        # Other programs take any size that OpenVINO does.
        return nullcontext(checked(predict, signature) if signature.axes else predict)


class ExportOpenVINO(Exporter[EagerModel | GraphModel | OnnxModel, OpenVINOModel]):
    """Write an OpenVINO model, checked against its source at several sizes of every named axis.

    It is made from the model as ONNX; integers of a quantized one stay as they are. For Intel's
    processors, where it is often faster than ONNX Runtime; `export_fastest` measures both.

        - {stage: export_openvino, gates: [{gate: min_speedup, ratio: 1.5, against: eager}]}
    """

    stage: Literal["export_openvino"] = "export_openvino"

    def write(self, model: Source, file: Path, context: Context) -> dict[str, Any]:
        """Write the model as ONNX, and that as OpenVINO's."""
        with TemporaryDirectory(prefix="compress-openvino-") as scratch:
            onnx_file, facts = self._as_onnx(model, Path(scratch, OnnxModel.payload))
            write(onnx_file, file, model.signature)
        return {"openvino": open_vino().__version__, **source_counts(model), **facts}

    @contextmanager
    def open(
        self, file: Path, model: Source, facts: dict[str, Any], context: Context
    ) -> Iterator[Predictor]:
        """Compile the model once, to run it and to count its kernels."""
        program = compiled(file, context.threads)
        facts |= count_kernels(program)
        yield predictor(program)

    def _as_onnx(self, model: Source, file: Path) -> tuple[Path, dict[str, Any]]:
        """Return the model as an ONNX file, and facts: its operators, the limits of axes."""
        from compress.export.onnx.graph import count_operators
        from compress.export.onnx.lowering import translate_small
        from compress.export.onnx.proto_io import read, write

        if isinstance(model, OnnxModel):
            known = ("axis_limits", TABLE_ROWS)
            limits = {k: v for k, v in model.manifest.facts.items() if k in known}
            operators = count_operators(read(model.payload_path))
            return model.payload_path, {"operators": operators, **limits}
        graph, facts = translate_small(model, self.title)
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
        return ExportOnnx().write_program(program, signature, file)
