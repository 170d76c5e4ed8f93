"""The artifact `AotModel`, and the stage `export_aot` that compiles it with AOTInductor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.forward import Predictor, torch_predictor
from compress.common.requirements import COMPILER, Requirement
from compress.export.common.compiled_code import CUDA, built_for, refuse_other_host
from compress.export.common.runtime import NO_UINT16_KERNELS, Reproducer, Runtime, TritonBackend
from compress.export.exporter import ExportedModel, Exporter, graph_facts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context

RUNTIME = Runtime(
    name="aot",
    title="AOTInductor",
    requirements=(COMPILER,),
    targets=("inductor-cpu",),
    refused_formats={"uint16": NO_UINT16_KERNELS},
    reproducer=Reproducer(
        file="model.pt2",
        run_lines=(
            'path = str(HERE / "model.pt2")',
            'package = torch._C._aoti.AOTIModelPackageLoader(path, "model", True, 1, -1)',
            "return package.boxed_run([x.contiguous() for x in inputs])",
        ),
    ),
    triton=TritonBackend(
        backend="pytorch",
        platform="torch_aoti",  # Triton 26.03 and later
        file="model.pt2",
        thread_parameters=("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
        kserve_format="pytorch",
        tensor_name="{role}__{index}",
        not_batched=(
            "Triton's PyTorch backend does not batch AOTInductor packages; a client may send many "
            "rows in one request"
        ),
    ),
)


class AotModel(ExportedModel):
    """Native code and weights in one `.pt2` package, run by PyTorch without its Python code.

    It is refused on another processor, system or version of PyTorch than it was compiled for.
    Opening it runs the code it holds: open your own packages only.
    """

    kind: ClassVar[str] = "aot"
    payload: ClassVar[str] = "model.pt2"
    reports_integer_share: ClassVar[bool] = True
    runtime: ClassVar[Runtime] = RUNTIME
    is_native_code: ClassVar[bool] = True
    needs_facts: ClassVar[tuple[str, ...]] = ("built_for",)

    @property
    def memory_unavailable_reason(self) -> str:
        """Why the memory of a call cannot be measured on a GPU; empty on the CPU."""
        reason = "compiled code takes memory of the GPU that PyTorch does not count"
        return reason if self.fact("built_for")["device"] == "cuda" else ""

    def runs_on(self, device: str) -> str:
        """Return what it was compiled for, with the number of a CUDA device that is asked for."""
        return _numbered(self.fact("built_for")["device"], device)

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Load the code; Unavailable where it was compiled for another machine."""
        from compress.export.aotinductor.package import load

        refuse_other_host(facts["built_for"], file)
        device = _numbered(facts["built_for"]["device"], device)
        return torch_predictor(load(file, signature, device), device, threads)


class ExportAot(Exporter[EagerModel | GraphModel, AotModel]):
    """Compile to native code ahead of time (AOTInductor), checked against its source.

    The package is tied to the kind of processor it is compiled on. For serving with PyTorch alone,
    without the model's code; `export_onnx` gives a file for any processor.

        - {stage: export_aot, device: cuda}
    """

    stage: Literal["export_aot"] = "export_aot"
    device: Literal["cpu", "cuda"] = "cpu"
    """What the code is compiled for; `cuda` needs such a device, here and where it runs."""

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return the compiler, and a CUDA device where one is compiled for."""
        return (*super().all_requirements(), *((CUDA,) if self.device == "cuda" else ()))

    @property
    def machine_parts(self) -> dict[str, Any]:
        """The processor and system that the code is compiled for."""
        return {"built_for": built_for(self.device)}

    @classmethod
    def for_baseline(cls, result: Artifact, context: Context) -> Self:
        """Return the stage for the context's device."""
        return cls(device="cuda" if context.device.startswith("cuda") else "cpu")

    def device_for(self, context: Context) -> str:
        """Return what the code is compiled for, and the number of the context's CUDA device."""
        return _numbered(self.device, context.device)

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Trace and compile."""
        program = program_of(model)
        facts = graph_facts(model, program, self.title)  # before the program is rewritten
        compiled = self.write_program(program, model.signature, file, context.device)
        return {"built_for": compiled["built_for"], **facts, **compiled}

    def write_program(
        self, program: ExportedProgram, signature: Signature, file: Path, device: str = "cpu"
    ) -> dict[str, Any]:
        """Compile a graph, which is rewritten in place."""
        from compress.export.aotinductor.package import compile_package

        kernels = compile_package(program, signature, file, _numbered(self.device, device))
        return {"built_for": built_for(self.device), **kernels}


def _numbered(compiled_for: str, device: str) -> str:
    return device if device.partition(":")[0] == compiled_for else compiled_for
