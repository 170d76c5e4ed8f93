"""The artifact `TorchScriptModel`, and the stage `export_torchscript` that writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import Predictor, torch_predictor
from compress.common.lazy_modules import torch
from compress.export.common.runtime import UINT8_ONLY, Reproducer, Runtime, TritonBackend
from compress.export.exporter import ExportedModel, Exporter, source_counts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.parity.bisect import Tensors

logger = logging.getLogger(__name__)
Source: TypeAlias = EagerModel | GraphModel
DEPRECATED = "torch itself calls TorchScript deprecated; export_onnx and export_aot are not"


def refuse_nested_output(model: Artifact, title: str) -> None:
    """Raise StageFailed where a TorchScript model returns no tensor or flat list of tensors."""
    from compress.export.torchscript.file_io import load

    with torch.inference_mode():
        answer = load(model.payload_path)(*model.signature.example())
    parts = answer if isinstance(answer, list | tuple) else [answer]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise StageFailed(
            f"{title}: the TorchScript model answers with a {type(answer).__name__} that is no "
            "flat list of tensors, which Triton's PyTorch backend does not read; use export_onnx"
        )


RUNTIME = Runtime(
    name="torchscript",
    title="TorchScript",
    refused_formats={other: UINT8_ONLY.format(other) for other in ("int8", "uint16")},
    reproducer=Reproducer(
        file="model.ts",
        run_lines=(
            'module = torch.jit.load(HERE / "model.ts")',
            "with torch.no_grad():",
            "    outputs = module(*inputs)",
            "return outputs if isinstance(outputs, (tuple, list)) else [outputs]",
        ),
    ),
    triton=TritonBackend(
        backend="pytorch",
        platform="pytorch_libtorch",
        file="model.pt",
        thread_parameters=("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT"),
        kserve_format="pytorch",
        tensor_name="{name}__{index}",  # TorchScript has no names, and the backend wants the place
        refuse=refuse_nested_output,
    ),
)


class TorchScriptModel(ExportedModel):
    """A TorchScript module: a frozen one, or the graph of a quantized model."""

    kind: ClassVar[str] = "torchscript"
    payload: ClassVar[str] = "model.ts"
    opened_with: ClassVar[tuple[str, ...]] = ("compress.export.torchscript.file_io",)
    runtime: ClassVar[Runtime] = RUNTIME

    def runs_on(self, device: str) -> str:
        """Return the CPU for a quantized model, as torch has integer kernels for it alone."""
        return "cpu" if self.manifest.facts.get("integer_kernels") else device

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Load a module."""
        from compress.export.torchscript.file_io import load

        module = load(file, device, optimized=bool(facts.get("optimize_for_inference")))
        return torch_predictor(module, device, threads)

    def parameters(self) -> int:
        """Count the weights, BatchNorm folded into them where freezing did so."""
        from compress.export.torchscript.file_io import count_weights, load

        # The file of a graph holds packed weights, so its source was counted.
        return super().parameters() or count_weights(load(self.payload_path))

    def macs(self, sizes: Mapping[str, int] | None = None) -> int | None:
        """Count multiply-accumulates for one sample."""
        from compress.export.torchscript.file_io import load
        from compress.graph.flops import count_macs

        if "macs" in self.manifest.facts:
            return super().macs(sizes)
        inputs = self.signature.example(batch=1, sizes=sizes)
        return count_macs(load(self.payload_path), inputs)


class ExportTorchScript(Exporter[Source, TorchScriptModel]):
    """Write a TorchScript file, checked against its source.

    Eager models are frozen. Of quantized graphs, what lies between dequantize and quantize becomes
    torch's own integer kernels. For programs in C++ that load TorchScript already; new ones take
    `export_aot` or `export_onnx`.

        - {stage: export_torchscript, method: mixed, optimize_for_inference: true}
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

    def write(self, model: Source, file: Path, context: Context) -> dict[str, Any]:
        """Trace or script, and write."""
        from compress.export.torchscript.file_io import save, to_torchscript
        from compress.export.torchscript.lowering import script

        facts: dict[str, Any] = {"warnings": [DEPRECATED]}
        if isinstance(model, GraphModel):
            module, kernels = script(model.program())
            # The file holds packed weights, which cannot be counted.
            facts |= {**kernels, **source_counts(model)}
        else:
            module, guessed = to_torchscript(
                model.load(),
                model.signature,
                method=self.method,
                scripted=self.scripted,
                freeze=self.freeze,
            )
            if guessed:
                facts["warnings"].append(
                    f"the trace keeps what the example's data decided in {', '.join(guessed)}; "
                    "`method: mixed` scripts such parts"
                )
                logger.warning("%s: %s", self.title, facts["warnings"][-1])
        if self.optimize_for_inference:
            facts["optimize_for_inference"] = True
        save(module, file)
        return facts

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log the kernels, and that torch gives TorchScript up."""
        logger.info("%s: %s", self.title, DEPRECATED)
        super().log(facts)

    def reexport(
        self, program: ExportedProgram, signature: Signature, file: Path, inputs: Tensors
    ) -> Tensors:
        """Export a part of the graph and return its outputs."""
        from compress.export.parity.bisect import prefix
        from compress.export.torchscript.file_io import save, to_torchscript
        from compress.export.torchscript.lowering import script
        from compress.graph.torch_export import has_integer_operators

        if has_integer_operators(program.graph):
            scripted, _ = script(program)
        else:
            graph = program.module(check_guards=False)
            # A program's checks of its inputs cannot be traced; prefix() drops them.
            part = prefix(graph, graph.graph.output_node().all_input_nodes)
            scripted, _ = to_torchscript(part, signature, inputs)
        save(scripted, file)
        with TorchScriptModel.open_file(file, signature, {}, "cpu", threads=1) as predict:
            return predict(*inputs)
