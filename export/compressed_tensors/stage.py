"""The artifact `CompressedTensorsModel`, and the stage `export_compressed_tensors`."""

from __future__ import annotations

import json
import logging
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import Artifact
from compress.artifacts.carried_files import CONFIG
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.forward import opened_model, torch_predictor
from compress.common.requirements import Requirement
from compress.core.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from export.common.packed_weights import DecoderWeights

logger = logging.getLogger(__name__)

COMPRESSED_TENSORS = Requirement(
    what="compressed_tensors", install="pip install -e '.[compressed-tensors]'"
)


class CompressedTensorsModel(Artifact):
    """A Hugging Face folder with packed weights, which transformers and vLLM open."""

    kind: ClassVar[str] = "compressed-tensors"
    payload: ClassVar[str] = "model.safetensors"
    opened_with: ClassVar[tuple[str, ...]] = ("transformers",)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the folder with transformers as a predictor.

        Raises:
            ArtifactInvalid: it was altered after sealing, or cannot be opened.
            Unavailable: compressed-tensors is not installed.
        """
        from export.common.host_check import require_all

        require_all([COMPRESSED_TENSORS], str(self.path))
        self.verify_cached()
        with torch_predictor(opened_folder(self.path, self.signature), device, threads) as predict:
            yield predict


class ExportCompressedTensors(Stage[GraphModel, CompressedTensorsModel]):
    """Write the result of quantize_weights as a Hugging Face folder for transformers and vLLM.

    Linear layers keep their integers, which are read back and compared; tables of embeddings become
    floats. Activations are not rounded: what reads such folders multiplies floats. transformers
    opens the folder and has to answer alike.
    """

    stage: Literal["export_compressed_tensors"] = "export_compressed_tensors"
    # Without it, what a run measures of the folder could not be opened.
    requirements: ClassVar[tuple[Requirement, ...]] = (COMPRESSED_TENSORS,)

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Which version of compressed-tensors opened the folder; None where none is installed."""
        found = None if COMPRESSED_TENSORS.missing() else version("compressed-tensors")
        return {"compressed-tensors": found}

    def run(self, model: GraphModel, context: Context) -> CompressedTensorsModel:
        """Write the tensors and the config, and read both back."""
        from safetensors.torch import save_file

        from export.common.packed_weights import decoder_weights
        from export.compressed_tensors.tensors import quantization_config, state_of

        weights = decoder_weights(model, context, self.title)
        facts: dict[str, Any] = {"parameters": model.parameters(), "macs": model.macs()}
        with CompressedTensorsModel.atomic_write(
            context.root,
            model.signature,
            lineage=self.lineage(model),
            facts=facts,
            carried=model.carried_files(),
        ) as partial:
            module: Any = weights.module
            config = json.loads(module.config.to_json_string(use_diff=False))
            config["architectures"] = [type(module).__name__]
            config["quantization_config"] = quantization_config(weights)
            if ("lm_head.weight", False) in weights.packed:
                config["tie_word_embeddings"] = False  # the table is none of integers
            (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            file = partial / CompressedTensorsModel.payload
            save_file(state_of(weights), file, metadata={"format": "pt"})
            facts["equal_integers"] = self._compare_integers(file, weights)
            if COMPRESSED_TENSORS.missing():
                facts["opened_by"] = None
                logger.warning(
                    "%s: not opened by transformers, which needs compressed-tensors; %s",
                    *(self.title, COMPRESSED_TENSORS.install),
                )
            else:
                facts["scores_error"] = self._compare_scores(model, partial, weights)
                facts["opened_by"] = f"compressed-tensors {version('compressed-tensors')}"
        logger.info("%s: %d integers read back", self.title, facts["equal_integers"])
        return CompressedTensorsModel.from_directory(context.root)

    def check_parity(
        self, model: GraphModel, artifact: CompressedTensorsModel, context: Context
    ) -> None:
        """Raise StageFailed where a stored folder has other integers than the graph."""
        from export.common.packed_weights import decoder_weights

        weights = decoder_weights(model, context, self.title)
        self._compare_integers(artifact.payload_path, weights)

    def _compare_integers(self, file: Path, weights: DecoderWeights) -> int:
        """Return how many integers a file has; StageFailed where one differs from the graph's."""
        import torch
        from safetensors.torch import load_file

        from export.compressed_tensors.tensors import unpacked

        stored, count = load_file(file), 0
        for (name, is_table), weight in weights.packed.items():
            stem = name.removesuffix(".weight")
            if is_table or f"{stem}.weight_packed" not in stored:
                continue
            found = unpacked(stored, stem, weight.bits)
            for part in ("packed", "scale", "zero_point"):
                if not torch.equal(getattr(found, part), getattr(weight, part)):
                    raise StageFailed(f"{self.title}: {name}: {part} differs in the file")
            count += found.integers().numel()
        return count

    def _compare_scores(self, model: GraphModel, folder: Path, weights: DecoderWeights) -> float:
        """Return how far transformers' answers differ from those of the dequantized weights."""
        import torch

        from compress.common.tensor_difference import relative_error
        from export.parity.sample_parity import FLOAT

        opened = opened_folder(folder, model.signature)
        weights.use_({key: weight.dequantized() for key, weight in weights.packed.items()})
        inputs = model.signature.example()
        names = [spec.name for spec in model.signature.inputs]
        with torch.inference_mode():
            expected = weights.module(**dict(zip(names, inputs, strict=True))).logits
            found = opened(*inputs)[0]
        error = relative_error(expected, found)
        if not error <= FLOAT.relative:
            raise StageFailed(
                f"{self.title}: transformers answers otherwise than the quantized weights, by "
                f"{error:.2g} of the norm, expected at most {FLOAT.relative:g}"
            )
        return error


def opened_folder(folder: Path, signature: Signature) -> Any:
    """Return a folder's model as transformers opens it, called with the signature's inputs."""
    import transformers

    from compress.artifacts.hf_folder import transformers_silenced
    from compress.artifacts.recipe import CallByName

    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind: Any = getattr(transformers, config["architectures"][0])
        # Kept packed, transformers 5.24 with compressed-tensors 0.20 expects zero points of 4 bits
        # that are not packed, and refuses packed ones, which the format prescribes.
        dense = transformers.CompressedTensorsConfig(dequantize=True)
        with transformers_silenced(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")
            module = kind.from_pretrained(
                folder, dtype="float32", local_files_only=True, quantization_config=dense
            ).eval()
    except Exception as error:
        reason = first_line(error)
        raise ArtifactInvalid(f"{folder}: transformers cannot open it: {reason}") from error
    names = tuple(spec.name for spec in signature.inputs)
    CallByName(inputs=names, outputs=("logits",)).apply_(module)
    return module
