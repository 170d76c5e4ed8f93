"""The artifact `GgufModel`, and the stage `export_gguf` that writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.forward import Predictor, torch_predictor
from compress.common.requirements import Requirement, pip_install
from compress.export.common.runtime import Runtime
from compress.export.exporter import ExportedModel, Exporter, source_counts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context

GGUF = Requirement(what="gguf", install=pip_install("gguf"))
RUNTIME = Runtime(name="gguf", title="GGUF", requirements=(GGUF,), runs_in="eager")


class GgufModel(ExportedModel):
    """A decoder with its tokenizer in one file, which llama.cpp opens."""

    kind: ClassVar[str] = "gguf"
    payload: ClassVar[str] = "model.gguf"
    opened_with: ClassVar[tuple[str, ...]] = ("transformers", "gguf")
    runtime: ClassVar[Runtime] = RUNTIME

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Open a file with transformers, which multiplies floats."""
        from compress.export.gguf.tensors import opened_file

        return torch_predictor(opened_file(file, signature).to(device), device, threads)


class ExportGguf(Exporter[EagerModel | GraphModel, GgufModel]):
    """Write a decoder with its tokenizer as one GGUF file, for llama.cpp, ollama and LM Studio.

    The integers of `quantize_weights` are kept and read back: with `symmetric: true` as `Q8_0` or
    `Q4_0`, else those of 4 bits as `Q4_1`. Scales become half precision, as GGUF has no others, and
    so do tables of 8 bits that are not symmetric. Layers that were left in float stay float32.
    transformers opens the file and has to answer alike.

        - {stage: quantize_weights, bits: 4, group_size: 32, symmetric: true}
        - {stage: export_gguf}
    """

    stage: Literal["export_gguf"] = "export_gguf"
    keeps_outputs: ClassVar[bool] = False
    proves_itself: ClassVar[bool] = True
    opened_by: ClassVar[Requirement | None] = GGUF

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Write settings, tokenizer and tensors, and read them back."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.gguf import tensors

        weights = decoder_weights(model, context, self.title)
        tensors.check_family(weights.module.config, self.title)
        weights.write_config(file.parent)
        tensors.write_file(file, weights, model.carried_files(), self.title)
        compared = tensors.compare_file(file, model.signature, weights, self.title)
        return {**source_counts(model), **compared}

    def check_parity(self, model: Artifact, artifact: Artifact, context: Context) -> None:
        """Raise StageFailed where a stored file has other weights or answers than the model."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.gguf.tensors import compare_file

        assert isinstance(model, EagerModel | GraphModel)
        weights = decoder_weights(model, context, self.title)
        compare_file(artifact.payload_path, model.signature, weights, self.title)
