"""The artifact `ExecuTorchModel`, and the stage `export_executorch` that writes it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.config import Count
from compress.common.forward import Predictor, opened_model, torch_predictor
from compress.common.requirements import Requirement, pip_install, require_all
from compress.core.stage import Stage
from compress.export.common.targets import SIGNED_8_BITS, warn_of_other_target
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

EXECUTORCH = Requirement(what="executorch", install=pip_install("executorch"))


class ExecuTorchModel(Artifact):
    """An ExecuTorch program for devices, computed by XNNPACK on their CPU."""

    kind: ClassVar[str] = "executorch"
    payload: ClassVar[str] = "model.pte"
    only_device: ClassVar[str] = "cpu"
    opened_with: ClassVar[tuple[str, ...]] = ("executorch.runtime",)
    reports_delegation: ClassVar[bool] = True
    reports_integer_share: ClassVar[bool] = True

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the program as a predictor; it runs on the CPU, whatever the device.

        More samples than the largest batch are answered in parts.

        Raises:
            ArtifactInvalid: it was altered after sealing, or cannot be loaded.
            Unavailable: ExecuTorch is not installed.
        """
        from compress.export.executorch.runtime import load

        require_all([EXECUTORCH], str(self.path))
        self.verify_cached()
        run = load(self.payload_path, self.signature, self.fact("sizes"), threads)
        with torch_predictor(run, "cpu", threads) as predict:
            yield predict


class ExportExecuTorch(ComparesStoredFile, Stage[EagerModel | GraphModel, ExecuTorchModel]):
    """Write an ExecuTorch program for devices, checked against its source.

    XNNPACK computes it on the device's CPU: in floats, or in integers after a quantization with
    `target: xnnpack`. The facts name what it has no kernels for.
    """

    stage: Literal["export_executorch"] = "export_executorch"
    largest_batch: Count = 32
    """Samples of a call for which memory is planned; larger batches are refused by the device, and
    answered in parts here."""
    requirements: ClassVar[tuple[Requirement, ...]] = (EXECUTORCH,)

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why XNNPACK has no kernels for such integers; empty where it has."""
        return SIGNED_8_BITS if {"uint8", "uint16"} & formats else ""

    def run(self, model: EagerModel | GraphModel, context: Context) -> ExecuTorchModel:
        """Trace, lower, load, compare with the source."""
        from importlib.metadata import version

        from compress.export.executorch.lowering import lower
        from compress.export.executorch.runtime import bounded_signature, load, planned_sizes
        from compress.export.parity.compare import check_parity
        from compress.export.parity.report import ParityContext, report_on_mismatch
        from compress.export.parity.repro_script import EXECUTORCH as SCRIPT_RUNTIME

        warn_of_other_target(model, ("xnnpack",), self.title)
        program = program_of(model)
        sizes = planned_sizes(program, model.signature, self.largest_batch)
        nodes = program.graph_module.graph.nodes
        operators = Counter(str(n.target) for n in nodes if n.op == "call_function")
        facts: dict[str, Any] = {
            "executorch": version("executorch"),
            "sizes": sizes,
            "parameters": model.parameters(),
            "macs": model.macs(),
            "operators": dict(sorted(operators.items())),
            **input_limit_facts(program, model.signature, self.title),
        }
        with ExecuTorchModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as partial:
            file = partial / ExecuTorchModel.payload
            lowered = lower(program, bounded_signature(model.signature, sizes))
            facts |= lowered.delegation
            file.write_bytes(lowered.content)
            run = load(file, model.signature, sizes, context.threads)
            with torch_predictor(run, "cpu", context.threads) as exported:
                parity = ParityContext(
                    *(self.title, model, exported, file, program),
                    *(self._reexport, SCRIPT_RUNTIME, context),
                )
                with report_on_mismatch(parity):
                    check_parity(model, exported, context, facts.get("axis_limits"), operators)
        self._log_delegation(lowered.delegation)
        return ExecuTorchModel.from_directory(context.root)

    def _log_delegation(self, facts: dict[str, Any]) -> None:
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

    def _reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Lower a part of the graph and return its outputs."""
        from compress.export.executorch.lowering import lower
        from compress.export.executorch.runtime import bounded_signature, load, planned_sizes

        sizes = planned_sizes(program, signature, self.largest_batch)
        file.write_bytes(lower(program, bounded_signature(signature, sizes)).content)
        return load(file, signature, sizes, threads=1)(*inputs)
