"""The artifact `CompressedTensorsModel`, and the stage `export_compressed_tensors`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import STREAMED
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.streaming.packed_model import PackedModel
from compress.common.forward import Predictor, torch_predictor
from compress.common.requirements import Requirement, pip_install
from compress.export.common.runtime import Runtime
from compress.export.exporter import ExportedModel, Exporter, refuse_scores, source_counts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.common.signature import Signature
    from compress.core.context import Context

logger = logging.getLogger(__name__)
COMPRESSED_TENSORS = Requirement(
    what="compressed_tensors", install=pip_install("compressed-tensors")
)
NAME = "compressed-tensors"
RUNTIME = Runtime(name=NAME, title=NAME, requirements=(COMPRESSED_TENSORS,), runs_in="eager")


class CompressedTensorsModel(ExportedModel):
    """A Hugging Face folder with packed weights, which transformers and vLLM open."""

    kind: ClassVar[str] = NAME
    payload: ClassVar[str] = "model.safetensors"
    opened_with: ClassVar[tuple[str, ...]] = ("transformers",)
    runtime: ClassVar[Runtime] = RUNTIME

    @property
    def needs_to_open(self) -> tuple[Requirement, ...]:
        """What must be installed: nothing for a folder that is read layer by layer."""
        return () if self.is_streamed else super().needs_to_open

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Open the folder with transformers; layer by layer where it was written so."""
        from compress.export.compressed_tensors.tensors import opened_folder, streamed_folder

        if facts.get(STREAMED):
            module = streamed_folder(file.parent, signature, device)
        else:
            module = opened_folder(file.parent, signature).to(device)
        return torch_predictor(module, device, threads)


class ExportCompressedTensors(Exporter[GraphModel, CompressedTensorsModel]):
    """Write the result of quantize_weights as a Hugging Face folder for transformers and vLLM.

    Linear layers keep their integers, which are read back and compared; tables of embeddings become
    floats. Activations are not rounded: what reads such folders multiplies floats. transformers
    opens the folder and has to answer alike; a model of `stream: true` is written, read back and
    compared layer by layer instead.

        - {stage: quantize_weights, bits: 4, method: gptq}
        - {stage: export_compressed_tensors}
    """

    stage: Literal["export_compressed_tensors"] = "export_compressed_tensors"
    streams: ClassVar[bool] = True
    keeps_outputs: ClassVar[bool] = False
    proves_itself: ClassVar[bool] = True
    opened_by: ClassVar[Requirement | None] = COMPRESSED_TENSORS

    def write(self, model: GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Write the tensors and the config, and read both back."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.compressed_tensors import tensors

        weights = decoder_weights(model, context, self.title)
        scheme = tensors.write_folder(file, weights)
        counted = tensors.compare_integers(file, weights, self.title)
        facts = {**source_counts(model), "equal_integers": counted}
        wrong = "answers otherwise than the quantized weights"
        if isinstance(model, PackedModel):
            error = tensors.streamed_scores_error(model, file.parent)
            facts |= {STREAMED: True, "opened_by": None}
            facts["scores_error"] = refuse_scores(error, f"{self.title}: the folder {wrong}")
        elif COMPRESSED_TENSORS.missing():  # where `run` is called, which checks no requirement
            facts["opened_by"] = None
            logger.warning(
                "%s: not opened by transformers, which needs compressed-tensors; %s",
                *(self.title, COMPRESSED_TENSORS.install),
            )
        else:
            error = tensors.scores_error(model.signature, file.parent, weights)
            facts["scores_error"] = refuse_scores(error, f"{self.title}: transformers {wrong}")
            facts["opened_by"] = f"{NAME} {version(NAME)}"
        for limit in tensors.vllm_limits(weights, scheme):
            logger.warning("%s: %s", self.title, limit)
        return facts

    def check_parity(
        self, model: GraphModel, artifact: CompressedTensorsModel, context: Context
    ) -> None:
        """Raise StageFailed where a stored folder has other integers than the graph."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.compressed_tensors.tensors import compare_integers

        weights = decoder_weights(model, context, self.title)
        compare_integers(artifact.payload_path, weights, self.title)
