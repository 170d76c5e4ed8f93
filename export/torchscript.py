"""TorchScript: the artifact, and the stage that freezes a module into it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Literal

from compress.core.artifact import Artifact, Predictor
from compress.core.eager import EagerModel, predicting
from compress.core.stage import Context, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)


class TorchScriptModel(Artifact):
    """A frozen TorchScript module."""

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

        return count_weights(load(self.payload_path))

    def macs(self) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.core.measure import count_macs
        from export.torchscript_file import load

        return count_macs(load(self.payload_path), self.signature.example(batch=1))


class ExportTorchScript(Stage[EagerModel, TorchScriptModel]):
    """Write a frozen TorchScript file, proved to answer like its source."""

    stage: Literal["export_torchscript"] = "export_torchscript"
    method: Literal["trace", "script"] = "trace"
    """`trace` records one forward pass; `script` compiles the source, control flow included."""

    def run(self, model: EagerModel, context: Context) -> TorchScriptModel:
        """Trace or script, freeze, check and seal."""
        from export.agreement import check_agreement
        from export.torchscript_file import freeze, load, save

        frozen = freeze(model.load(), model.signature, self.method)
        with TorchScriptModel.sealing(
            context.root, model.signature, lineage=self.lineage(model)
        ) as partial:
            file = partial / TorchScriptModel.payload
            save(frozen, file)
            with (
                model.open(threads=context.threads) as expected,
                predicting(load(file), "cpu", context.threads) as got,
            ):
                check_agreement(expected, got, model.signature)
        logger.info("%s: written; torch itself calls TorchScript deprecated", self.title)
        return TorchScriptModel.at(context.root)
