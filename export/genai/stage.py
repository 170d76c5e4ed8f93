"""The artifact `GenaiModel`, and the stage `export_genai` that writes it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.carried_files import TOKENIZER
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.common.lazy_modules import torch
from compress.common.requirements import Requirement, require_all
from compress.export.common.runtime import NO_BFLOAT16, Runtime
from compress.export.exporter import ExportedModel, Exporter, source_counts
from compress.export.genai.runtime import GENAI, GenaiConfig, GreedyText, measure_speed, open_folder

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.genai.session import CacheProof

logger = logging.getLogger(__name__)
TAKES = "export_genai takes float32 models, and those of quantize_weights; found {}"
LONGEST = 4096  # tokens of a text where neither the setting nor the model's config limits them
# onnxruntime opens the file too, so that nothing else is required to write it.
RUNTIME = Runtime(
    name="genai", title="onnxruntime-genai", refused_formats={"bfloat16": NO_BFLOAT16}
)


class GenaiModel(ExportedModel):
    """A decoder with its cache as ONNX, in a folder that onnxruntime-genai opens."""

    kind: ClassVar[str] = "genai"
    payload: ClassVar[str] = "model.onnx"
    only_device: ClassVar[str] = "cpu"
    opened_with: ClassVar[tuple[str, ...]] = ("compress.export.onnx.session",)
    generates: ClassVar[bool] = True
    runtime: ClassVar[Runtime] = RUNTIME

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Open a file in onnxruntime, for the scores of whole inputs."""
        from compress.export.genai.session import prefill_predictor

        return nullcontext(prefill_predictor(file, threads, signature))

    def generation_speed(
        self, prompt_tokens: int, tokens: int, threads: int
    ) -> tuple[float, float]:
        """Return milliseconds to the first token, and tokens a second after it."""
        require_all([GENAI], str(self.path))
        self.verify_cached()
        vocabulary = int(self.fact("vocabulary"))
        return measure_speed(self.path, vocabulary, prompt_tokens, tokens, threads)


class ExportGenai(Exporter[EagerModel | GraphModel, GenaiModel]):
    """Write a folder for onnxruntime-genai: a decoder of transformers with its cache, in ONNX.

    Compared with its source: scores of whole texts, of the same read token by token, and 256 tokens
    of greedy text. Where onnxruntime-genai is installed, it has to generate the same.

        - {stage: quantize_weights, bits: 4}
        - {stage: export_genai, context: 2048}
    """

    stage: Literal["export_genai"] = "export_genai"
    context: Count | None = None
    """Tokens of a prompt and its continuation together, at most; by default what the model's config
    allows, up to 4096."""

    streams: ClassVar[bool] = True
    keeps_outputs: ClassVar[bool] = False
    opened_by: ClassVar[Requirement | None] = GENAI

    def unsupported_input_reason(self, formats: Set[str]) -> str:
        """Return why a format has no place in such a folder; empty where it has."""
        found = TAKES.format(", ".join(sorted(formats))) if formats else ""
        return super().unsupported_input_reason(formats) or found

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Trace with the cache, translate, write."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.genai.decoder import CachedDecoder, lower_decoder, use_packed_layers_
        from compress.export.onnx.graph import count_operators, strip_
        from compress.export.onnx.passes.stored_integers import compact_
        from compress.export.onnx.proto_io import write

        weights, folder = decoder_weights(model, context, self.title, by_config=False), file.parent
        module: Any = weights.module
        positions = getattr(module.config, "max_position_embeddings", None)
        if self.context is not None and positions is not None and self.context > positions:
            raise StageFailed(
                f"{self.title}: context: found {self.context}, and the model has {positions} "
                "positions (max_position_embeddings); lower it"
            )
        most = self.context or min(positions or LONGEST, LONGEST)
        use_packed_layers_(weights)
        decoder = CachedDecoder(module, most)
        shape = decoder.cache_shape()
        # The folder's config is the source's, and pruning may have changed the widths it states.
        weights.write_config(folder)
        if not (folder / TOKENIZER).exists():
            logger.warning(
                "%s: the model has no tokenizer.json, so the folder reads and writes token ids "
                "alone; load the model from a Hugging Face folder that has one",
                self.title,
            )
        with torch.no_grad():
            graph = lower_decoder(decoder, shape)
        compact_(graph)
        strip_(graph)
        operators = count_operators(graph)
        write(graph, file)
        GenaiConfig.of_decoder(module, shape, most).write(folder)
        return {
            **source_counts(model),
            "context": most,
            "vocabulary": module.config.vocab_size,
            "operators": operators,
            "rotary_in_attention": f"{shape.rotary_layers} of {shape.layers} layers",
        }

    def prove(
        self,
        model: EagerModel | GraphModel,
        file: Path,
        facts: dict[str, Any],
        context: Context,
        began: float,
    ) -> None:
        """Raise StageFailed where the folder answers or generates otherwise than its source."""
        found, text = self._compare(model, file, facts, context)
        facts |= found
        text.write(file.parent)

    def prove_baseline(
        self,
        model: EagerModel | GraphModel,
        file: Path,
        facts: dict[str, Any],
        context: Context,
        began: float,
    ) -> None:
        """Raise StageFailed where scores of whole texts are others; nothing is generated with it.

        Of 325 million weights the greedy text, twice, took a third of a run's time.
        """
        facts["scores_error"] = self._proof(model, file, facts, context).check_scores()

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log how the greedy text compares."""
        if "greedy_tokens" in facts:
            logger.info(
                "%s: %d of %d greedy tokens equal, scores differ by %.2g of their norm; opened by "
                "%s",
                *(self.title, facts["equal_tokens"], facts["greedy_tokens"], facts["scores_error"]),
                facts["opened_by"] or f"onnxruntime alone ({GENAI.install} opens it in genai too)",
            )

    def check_parity(self, model: Artifact, artifact: Artifact, context: Context) -> None:
        """Raise StageFailed where a stored folder answers otherwise than the model."""
        sizes = {name: artifact.fact(name) for name in ("vocabulary", "context")}
        self._compare(model, artifact.payload_path, sizes, context)

    def _compare(
        self, model: Artifact, file: Path, facts: Mapping[str, Any], context: Context
    ) -> tuple[dict[str, Any], GreedyText]:
        found, text = self._proof(model, file, facts, context).check()
        if GENAI.missing():
            return {**found, "opened_by": None}, text
        text.check(open_folder(file.parent, context.threads))
        return {**found, "opened_by": f"onnxruntime-genai {version('onnxruntime-genai')}"}, text

    def _proof(
        self, model: Artifact, file: Path, facts: Mapping[str, Any], context: Context
    ) -> CacheProof:
        from compress.export.genai.session import CachedSession, CacheProof

        session = CachedSession(file, context.threads)
        return CacheProof(model, session, context, facts["vocabulary"], facts["context"])
