"""The artifact `ExecuTorchModel`, and the stage `export_executorch` that writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.config import Count
from compress.common.forward import Predictor, torch_predictor
from compress.common.requirements import Requirement, pip_install
from compress.export.common.runtime import SIGNED_8_BITS, Reproducer, Runtime
from compress.export.exporter import ExportedModel, Exporter, graph_facts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram

    from compress.common.signature import Signature
    from compress.core.context import Context

logger = logging.getLogger(__name__)
EXECUTORCH = Requirement(what="executorch", install=pip_install("executorch"))
RUNTIME = Runtime(
    name="executorch",
    title="ExecuTorch",
    requirements=(EXECUTORCH,),
    targets=("xnnpack",),
    refused_formats=dict.fromkeys(("uint8", "uint16"), SIGNED_8_BITS),
    reproducer=Reproducer(
        file="model.pte",
        library="executorch",
        imports="from executorch.runtime import Runtime\n",
        run_lines=(
            'program = Runtime.get().load_program(HERE / "model.pte")',
            'return program.load_method("forward").execute([x.contiguous() for x in inputs])',
        ),
    ),
)


class ExecuTorchModel(ExportedModel):
    """An ExecuTorch program for devices, computed by XNNPACK on their CPU."""

    kind: ClassVar[str] = "executorch"
    payload: ClassVar[str] = "model.pte"
    only_device: ClassVar[str] = "cpu"
    opened_with: ClassVar[tuple[str, ...]] = ("executorch.runtime",)
    reports_delegation: ClassVar[bool] = True
    reports_integer_share: ClassVar[bool] = True
    runtime: ClassVar[Runtime] = RUNTIME
    needs_facts: ClassVar[tuple[str, ...]] = ("sizes",)

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Load a program; more samples than the largest batch are answered in parts."""
        from compress.export.executorch.runtime import load

        return torch_predictor(load(file, signature, facts["sizes"], threads), "cpu", threads)


class ExportExecuTorch(Exporter[EagerModel | GraphModel, ExecuTorchModel]):
    """Write an ExecuTorch program for devices, checked against its source.

    XNNPACK computes it on the device's CPU: in floats, or in integers after a quantization with
    `target: xnnpack`. The facts name what it has no kernels for. For phones and boards.

        - {stage: quantize_static, target: xnnpack}
        - {stage: export_executorch, largest_batch: 1}
    """

    stage: Literal["export_executorch"] = "export_executorch"
    largest_batch: Count = 32
    """Samples of a call for which memory is planned; larger batches are refused by the device, and
    answered in parts here."""

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Trace and lower."""
        program = program_of(model)
        lowered = self.write_program(program, model.signature, file)
        first = {"executorch": version("executorch"), "sizes": lowered["sizes"]}
        return {**first, **graph_facts(model, program, self.title), **lowered}

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log what XNNPACK computes, and what is left to other kernels."""
        portable = ", ".join(
            f"{name or 'the model itself'}: {' '.join(operators)}"
            for name, operators in facts["portable_operators"].items()
        )
        logger.info(
            "%s: XNNPACK computes %.4g %% of the multiply-accumulates, in %s and %s; left to "
            "portable kernels: %s",
            *(self.title, 100 * facts["delegated_share"]),
            *(facts["integer_kernels"], facts["float_kernels"], portable or "nothing"),
        )

    def write_program(
        self, program: ExportedProgram, signature: Signature, file: Path, device: str = "cpu"
    ) -> dict[str, Any]:
        """Lower a graph, and plan its memory."""
        from compress.export.executorch.runtime import bounded_signature, lower, planned_sizes

        sizes = planned_sizes(program, signature, self.largest_batch)
        content, delegation = lower(program, bounded_signature(signature, sizes))
        file.write_bytes(content)
        return {"sizes": sizes, **delegation}
