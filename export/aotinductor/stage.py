"""The artifact `AotModel`, and the stage `export_aot` that compiles it with AOTInductor."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.forward import Predictor, opened_model, torch_predictor
from compress.common.requirements import COMPILER, Requirement
from compress.core.context import Context
from compress.core.stage import Stage
from compress.export.common.targets import NO_UINT16_KERNELS, warn_of_other_target
from compress.export.parity.stored_parity import ComparesStoredFile
from compress.graph.axis_bounds import input_limit_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.parity.bisect import Tensors

logger = logging.getLogger(__name__)


class AotModel(Artifact):
    """Native code and weights in one `.pt2` package, run by PyTorch without its Python code.

    It is refused on another processor, system or version of PyTorch than it was compiled for.
    Opening it runs the code it holds: open your own packages only.
    """

    kind: ClassVar[str] = "aot"
    payload: ClassVar[str] = "model.pt2"
    reports_integer_share: ClassVar[bool] = True

    @property
    def memory_unavailable_reason(self) -> str:
        """Why the memory of a call cannot be measured on a GPU; empty on the CPU."""
        built_for: Any = self.fact("built_for")
        reason = "compiled code takes memory of the GPU that PyTorch does not count"
        return reason if built_for["device"] == "cuda" else ""

    def runs_on(self, device: str) -> str:
        """Return what it was compiled for, with the number of a CUDA device that is asked for."""
        built_for: Any = self.fact("built_for")
        return _numbered(built_for["device"], device)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the code as a predictor; it runs on what it was compiled for, whatever the device.

        Raises:
            ArtifactInvalid: the package was altered after sealing, or cannot be loaded.
            Unavailable: it was compiled for another machine.
        """
        from compress.export.aotinductor.package import load
        from compress.export.common.host_check import refuse_other_host

        built_for: Any = self.fact("built_for")
        refuse_other_host(built_for, self.payload_path)
        self.verify()
        device = self.runs_on(device)
        module = load(self.payload_path, self.signature, device)
        with torch_predictor(module, device, threads) as predict:
            yield predict


class ExportAot(ComparesStoredFile, Stage[EagerModel | GraphModel, AotModel]):
    """Compile to native code ahead of time (AOTInductor), checked against its source.

    The package is tied to the kind of processor it is compiled on.
    """

    stage: Literal["export_aot"] = "export_aot"
    device: Literal["cpu", "cuda"] = "cpu"
    """What the code is compiled for; `cuda` needs such a device, here and where it runs."""

    requirements: ClassVar[tuple[Requirement, ...]] = (COMPILER,)

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return the compiler, and a CUDA device where one is compiled for."""
        from compress.export.common.host_check import CUDA

        return (*self.requirements, *((CUDA,) if self.device == "cuda" else ()))

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why there are no kernels for such formats; empty where there are."""
        return NO_UINT16_KERNELS if "uint16" in formats else ""

    @property
    def machine_parts(self) -> dict[str, Any]:
        """The processor and system that the code is compiled for."""
        from compress.export.common.host_check import built_for

        return {"built_for": built_for(self.device)}

    def run(self, model: EagerModel | GraphModel, context: Context) -> AotModel:
        """Trace, compile, load, compare with the source."""
        from compress.export.aotinductor.package import compile_package, load
        from compress.export.common.host_check import built_for
        from compress.export.parity.compare import check_parity, on_cpu
        from compress.export.parity.report import ParityContext, report_on_mismatch
        from compress.export.parity.repro_script import AOT

        warn_of_other_target(model, ("inductor-cpu",), self.title)
        program = program_of(model)
        nodes = program.graph_module.graph.nodes
        operators = Counter(str(n.target) for n in nodes if n.op == "call_function")
        facts: dict[str, Any] = {
            "built_for": built_for(self.device),
            "parameters": model.parameters(),
            "macs": model.macs(),
            "operators": dict(sorted(operators.items())),
            **input_limit_facts(program, model.signature, self.title),
        }
        device = _numbered(self.device, context.device)
        with AotModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as partial:
            file = partial / AotModel.payload
            facts |= compile_package(program, model.signature, file, device)
            module = load(file, model.signature, device)
            with torch_predictor(module, device, context.threads) as compiled:
                exported = on_cpu(compiled)
                parity = ParityContext(
                    self.title, model, exported, file, program, self._reexport, AOT, context
                )
                with report_on_mismatch(parity):
                    check_parity(model, exported, context, facts.get("axis_limits"), operators)
        logger.info("%s: %s, %s", self.title, facts["integer_kernels"], facts["float_kernels"])
        return AotModel.from_directory(context.root)

    def _reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Compile a part of the graph and return its outputs."""
        from compress.export.aotinductor.package import compile_package, load

        compile_package(program, signature, file, self.device)
        with torch_predictor(load(file, signature, self.device), self.device, 1) as compiled:
            return tuple(t.cpu() for t in compiled(*inputs))


def _numbered(compiled_for: str, device: str) -> str:
    """Return the device to run on, by its number where code for CUDA is to run on `cuda:1`."""
    return device if device.partition(":")[0] == compiled_for else compiled_for
