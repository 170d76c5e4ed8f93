"""TorchScript: the artifact, and the stage that freezes a module into it."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.core.artifact import Artifact, Predictor
from compress.core.eager import EagerModel, predicting
from compress.core.graph import GraphModel
from compress.core.stage import Context, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torch.export import ExportedProgram

    from compress.core.signature import Signature

logger = logging.getLogger(__name__)


class TorchScriptModel(Artifact):
    """A TorchScript module: a frozen one, or the graph of a quantized model."""

    kind: ClassVar[str] = "torchscript"
    payload: ClassVar[str] = "model.ts"

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Give the module as a predictor."""
        from export.torchscript_file import load

        with predicting(load(self.payload_path, device), device, threads) as predict:
            yield predict

    def parameters(self) -> int:
        """Count the weights, BatchNorm folded into them where freezing did so."""
        from export.torchscript_file import count_weights, load

        return self._of_its_graph("parameters") or count_weights(load(self.payload_path))

    def macs(self) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.core.measure import count_macs
        from export.torchscript_file import load

        counted = self._of_its_graph("macs")
        return counted or count_macs(load(self.payload_path), self.signature.example(batch=1))

    def _of_its_graph(self, count: str) -> int:
        """Return what was counted in the graph it was made from; packed weights do not tell."""
        return int(str(self.manifest.facts.get(count, 0)))


class ExportTorchScript(Stage[EagerModel | GraphModel, TorchScriptModel]):
    """Write a TorchScript file, proved to answer like its source.

    Eager models are frozen. Of quantized graphs, what lies between dequantize and quantize becomes
    torch's own integer kernels.
    """

    stage: Literal["export_torchscript"] = "export_torchscript"
    method: Literal["trace", "script"] = "trace"
    """How eager models are read: `trace` records one forward pass; `script` compiles the source,
    control flow included."""

    def run(self, model: EagerModel | GraphModel, context: Context) -> TorchScriptModel:
        """Trace or script, check and seal."""
        from export.agreement import prove_equal
        from export.parity_report import Account, accounting
        from export.reproduction import TORCHSCRIPT
        from export.torchscript_file import freeze, load, save

        facts: dict[str, Any] = {}
        if isinstance(model, GraphModel):
            from export.torchscript_graph import script

            scripted, kernels = script(model.program())
            facts = {**kernels, "parameters": model.parameters(), "macs": model.macs()}
        else:
            scripted = freeze(model.load(), model.signature, self.method)
        with TorchScriptModel.sealing(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            file = partial / TorchScriptModel.payload
            save(scripted, file)
            with predicting(load(file), "cpu", context.threads) as got:
                again = functools.partial(_export_again, isinstance(model, GraphModel))
                account = Account(self.title, model, got, file, None, again, TORCHSCRIPT, context)
                with accounting(account):
                    prove_equal(model, got, context)
        self._tell(facts)
        return TorchScriptModel.at(context.root)

    def _tell(self, facts: dict[str, Any]) -> None:
        logger.info("%s: written; torch itself calls TorchScript deprecated", self.title)
        if facts.get("integer_kernels"):
            told = (self.title, facts["integer_kernels"], facts["float_kernels"])
            logger.info("%s: %s, in floats %s", *told)


def _export_again(
    quantized: bool,
    program: ExportedProgram,
    signature: Signature,
    file: Path,
    inputs: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    """Write a part of the graph and return its answers."""
    from export.graph_cut import prefix
    from export.torchscript_file import freeze, load, save
    from export.torchscript_graph import script

    if quantized:
        scripted, _ = script(program)
    else:
        graph = program.module(check_guards=False)
        # The checks of a program's module cannot be traced, nor its sizes: they become constants.
        part = prefix(graph, graph.graph.output_node().all_input_nodes)
        scripted = freeze(part, signature, "trace", inputs)
    save(scripted, file)
    with predicting(load(file), "cpu", 1) as got:
        return got(*inputs)
