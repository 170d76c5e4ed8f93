"""The artifact `TorchScriptModel`, and the stage `export_torchscript` that writes it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import model_validator

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.forward import opened_model
from compress.core.context import Context
from compress.core.stage import Stage
from export.common.targets import UINT8_ONLY
from export.parity.stored_parity import ComparesStoredFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Set
    from pathlib import Path

    from torch.export import ExportedProgram

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from export.parity.bisect import Tensors

logger = logging.getLogger(__name__)

Source: TypeAlias = EagerModel | GraphModel

NOT_UINT8 = {"int8", "uint16"}
"""Activations that torch's integer kernels do not take."""
DEPRECATED = "torch itself calls TorchScript deprecated; export_onnx and export_aot are not"


class TorchScriptModel(Artifact):
    """A TorchScript module: a frozen one, or the graph of a quantized model."""

    kind: ClassVar[str] = "torchscript"
    payload: ClassVar[str] = "model.ts"
    opened_with: ClassVar[tuple[str, ...]] = ("export.torchscript.file_io",)

    def runs_on(self, device: str) -> str:
        """Return the CPU for a quantized model, as torch has integer kernels for it alone."""
        return "cpu" if self.manifest.facts.get("integer_kernels") else device

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Load the module as a predictor."""
        from compress.common.forward import torch_predictor
        from export.torchscript.file_io import load

        self.verify_cached()
        device = self.runs_on(device)
        optimized = bool(self.manifest.facts.get("optimize_for_inference"))
        module = load(self.payload_path, device, optimized=optimized)
        with torch_predictor(module, device, threads) as predict:
            yield predict

    def parameters(self) -> int:
        """Count the weights, BatchNorm folded into them where freezing did so."""
        from export.torchscript.file_io import count_weights, load

        return self._recorded_count("parameters") or count_weights(load(self.payload_path))

    def macs(self) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.graph.flops import count_macs
        from export.torchscript.file_io import load

        recorded = self._recorded_count("macs")
        return recorded or count_macs(load(self.payload_path), self.signature.example(batch=1))

    def _recorded_count(self, count: str) -> int:
        """Return a count of the source graph, whose weights are packed in the file; 0 if none."""
        return int(str(self.manifest.facts.get(count, 0)))


class ExportTorchScript(ComparesStoredFile, Stage[Source, TorchScriptModel]):
    """Write a TorchScript file, checked against its source.

    Eager models are frozen. Of quantized graphs, what lies between dequantize and quantize becomes
    torch's own integer kernels.
    """

    stage: Literal["export_torchscript"] = "export_torchscript"
    method: Literal["trace", "script", "mixed"] = "trace"
    """How eager models are read: `trace` records one forward pass; `script` compiles the source,
    control flow included; `mixed` traces all but the submodules that branch by the data, which it
    scripts."""
    scripted: tuple[str, ...] = ()
    """Names of the submodules that `mixed` scripts, `*` and `?` standing for any characters; found
    by tracing when left out."""
    freeze: bool = True
    """Whether an eager model's weights become constants of its graph, with BatchNorm folded."""
    optimize_for_inference: bool = False
    """Whether the module is also given the layouts of the processor that it is opened on. torch
    cannot save these: the file stays plain, and whoever loads it without the toolkit calls
    torch.jit.optimize_for_inference."""

    @model_validator(mode="after")
    def _parts_are_for_mixed(self) -> Self:
        if self.scripted and self.method != "mixed":
            raise ValueError("scripted: names submodules for `method: mixed` alone")
        return self

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why torch has no kernels for such formats; empty where it has."""
        other = formats & NOT_UINT8
        return UINT8_ONLY.format(min(other)) if other else ""

    def run(self, model: Source, context: Context) -> TorchScriptModel:
        """Trace or script, write, read back, compare with the source."""
        from compress.common.forward import torch_predictor
        from export.parity.compare import check_parity
        from export.parity.report import ParityContext, report_on_mismatch
        from export.parity.repro_script import TORCHSCRIPT
        from export.torchscript.file_io import load, save

        facts: dict[str, Any] = {"warnings": [DEPRECATED]}
        scripted = self._to_torchscript(model, facts)
        if self.optimize_for_inference:
            facts["optimize_for_inference"] = True
        with TorchScriptModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as partial:
            file = partial / TorchScriptModel.payload
            save(scripted, file)
            module = load(file, optimized=self.optimize_for_inference)
            with torch_predictor(module, "cpu", context.threads) as exported:
                reexport = functools.partial(_reexport, isinstance(model, GraphModel))
                parity = ParityContext(
                    self.title, model, exported, file, None, reexport, TORCHSCRIPT, context
                )
                with report_on_mismatch(parity):
                    check_parity(model, exported, context)
        logger.info("%s: %s", self.title, DEPRECATED)
        if facts.get("integer_kernels"):
            kernels = facts["integer_kernels"], facts["float_kernels"]
            logger.info("%s: %s, in floats %s", self.title, *kernels)
        return TorchScriptModel.from_directory(context.root)

    def _to_torchscript(self, model: Source, facts: dict[str, Any]) -> Any:
        """Return the model as TorchScript; kernels and warnings are added to the facts."""
        from export.torchscript.file_io import ScriptMethod, to_torchscript
        from export.torchscript.lowering import script

        if isinstance(model, GraphModel):
            module, kernels = script(model.program())
            # The file holds packed weights, which cannot be counted: the source's counts are kept.
            facts |= {**kernels, "parameters": model.parameters(), "macs": model.macs()}
            return module
        method = ScriptMethod(self.method, self.scripted, self.freeze)
        module, guessed = to_torchscript(model.load(), model.signature, method)
        if guessed:
            facts["warnings"].append(
                f"the trace keeps what the example's data decided in {', '.join(guessed)}; "
                "`method: mixed` scripts such parts"
            )
            logger.warning("%s: %s", self.title, facts["warnings"][-1])
        return module


def _reexport(
    quantized: bool, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
) -> Tensors:
    """Export a part of the graph and return its outputs."""
    from compress.common.forward import torch_predictor
    from export.parity.bisect import prefix
    from export.torchscript.file_io import ScriptMethod, load, save, to_torchscript
    from export.torchscript.lowering import script

    if quantized:
        scripted, _ = script(program)
    else:
        graph = program.module(check_guards=False)
        # A program's checks of its inputs cannot be traced; prefix() drops them.
        part = prefix(graph, graph.graph.output_node().all_input_nodes)
        scripted, _ = to_torchscript(part, signature, ScriptMethod("trace"), inputs)
    save(scripted, file)
    with torch_predictor(load(file), "cpu", 1) as predict:
        return predict(*inputs)
