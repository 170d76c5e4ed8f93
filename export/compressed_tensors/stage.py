"""The artifact `CompressedTensorsModel`, and the stage `export_compressed_tensors`."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.artifact import STREAMED
from compress.artifacts.carried_files import CONFIG
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.streaming.packed_model import PackedModel, shared_parameters
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs, torch_predictor
from compress.common.requirements import Requirement, pip_install
from compress.export.common.runtime import Runtime
from compress.export.exporter import ExportedModel, Exporter, source_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.common.packed_weights import DecoderWeights

logger = logging.getLogger(__name__)

COMPRESSED_TENSORS = Requirement(
    what="compressed_tensors", install=pip_install("compressed-tensors")
)
RUNTIME = Runtime(
    name="compressed-tensors",
    title="compressed-tensors",
    requirements=(COMPRESSED_TENSORS,),
    runs_in="eager",
)


class CompressedTensorsModel(ExportedModel):
    """A Hugging Face folder with packed weights, which transformers and vLLM open."""

    kind: ClassVar[str] = "compressed-tensors"
    payload: ClassVar[str] = "model.safetensors"
    opened_with: ClassVar[tuple[str, ...]] = ("transformers",)
    runtime: ClassVar[Runtime] = RUNTIME

    @property
    def needs_to_open(self) -> tuple[Requirement, ...]:
        """What must be installed: nothing for a folder that is read layer by layer."""
        return () if self.is_streamed else super().needs_to_open

    @classmethod
    @contextmanager
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> Iterator[Predictor]:
        """Open the folder with transformers; layer by layer where it was written so."""
        if facts.get(STREAMED):
            module = streamed_folder(file.parent, signature, device)
        else:
            module = opened_folder(file.parent, signature).to(device)
        with torch_predictor(module, device, threads) as predict:
            yield predict


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

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Which version of compressed-tensors opened the folder; None where none is installed."""
        found = None if COMPRESSED_TENSORS.missing() else version("compressed-tensors")
        return {"compressed-tensors": found}

    def write(self, model: GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Write the tensors and the config, and read both back."""
        from compress.checkpoint.safetensors_io import write_safetensors
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.compressed_tensors.tensors import (
            head_name,
            quantization_config,
            state_of,
            vllm_limits,
        )

        weights = decoder_weights(model, context, self.title)
        module: Any = weights.module
        config = json.loads(module.config.to_json_string(use_diff=False))
        config["architectures"] = [type(module).__name__]
        config["quantization_config"] = quantization_config(weights)
        scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        if any(name == f"{head_name(module)}.weight" for name, _ in weights.packed):
            config["tie_word_embeddings"] = False  # table and last layer now differ
        folder = file.parent
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tied = config.get("tie_word_embeddings", False)
        write_safetensors(file, state_of(weights, symmetric=scheme["symmetric"], tied=tied))
        facts: dict[str, Any] = {
            **source_counts(model),
            "equal_integers": self._compare_integers(file, weights),
        }
        if isinstance(model, PackedModel):
            facts |= {STREAMED: True, "opened_by": None}
            facts["scores_error"] = self._compare_streamed_scores(model, folder)
        elif COMPRESSED_TENSORS.missing():  # where `run` is called, which checks no requirement
            facts["opened_by"] = None
            logger.warning(
                "%s: not opened by transformers, which needs compressed-tensors; %s",
                *(self.title, COMPRESSED_TENSORS.install),
            )
        else:
            facts["scores_error"] = self._compare_scores(model, folder, weights)
            facts["opened_by"] = f"compressed-tensors {version('compressed-tensors')}"
        for limit in vllm_limits(weights, scheme):
            logger.warning("%s: %s", self.title, limit)
        return facts

    def prove(self, model: GraphModel, *_: Any) -> None:
        """Compare nothing more: :meth:`write` has read the file back."""

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log how many integers were compared."""
        logger.info("%s: %d integers read back", self.title, facts["equal_integers"])

    def check_parity(
        self, model: GraphModel, artifact: CompressedTensorsModel, context: Context
    ) -> None:
        """Raise StageFailed where a stored folder has other integers than the graph."""
        from compress.export.common.packed_weights import decoder_weights

        weights = decoder_weights(model, context, self.title)
        self._compare_integers(artifact.payload_path, weights)

    def _compare_integers(self, file: Path, weights: DecoderWeights) -> int:
        """Return how many integers a file has; StageFailed where one differs from the graph's."""
        import torch

        from compress.checkpoint.safetensors_io import read_safetensors
        from compress.export.compressed_tensors.tensors import unpacked

        stored, count = read_safetensors(file), 0
        for name, is_table in weights.packed:
            stem = name.removesuffix(".weight")
            if is_table or f"{stem}.weight_packed" not in stored:
                continue
            weight = weights.packed[name, is_table]
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

        opened: Any = opened_folder(folder, model.signature)
        weights.use_({key: weight.dequantized() for key, weight in weights.packed.items()})
        with torch.inference_mode():
            found = opened(*model.signature.example())[0]
        error = relative_error(weights.scores(model.signature), found)
        return self._refuse_error(error, "transformers")

    def _compare_streamed_scores(self, model: PackedModel, folder: Path) -> float:
        """Return how far the file's answers, layer by layer, differ from the model's."""
        import torch

        from compress.artifacts.streaming.packed_model import packed_module
        from compress.common.tensor_difference import relative_error

        inputs = model.signature.example()
        with torch.inference_mode():
            expected = packed_module(model.recipe, model.stored(), rounds=False)(*inputs)
            found = streamed_folder(folder, model.signature)(*inputs)
        return self._refuse_error(
            relative_error(flatten_outputs(expected)[0], found[0]), "the folder"
        )

    def _refuse_error(self, error: float, reader: str) -> float:
        """Return an error; raise StageFailed where it is more than rounding."""
        from compress.export.parity.sample_parity import FLOAT

        if not error <= FLOAT.relative:
            raise StageFailed(
                f"{self.title}: {reader} answers otherwise than the quantized weights, by "
                f"{error:.2g} of the norm, expected at most {FLOAT.relative:g}"
            )
        return error


def opened_folder(folder: Path, signature: Signature) -> Any:
    """Return a folder's model as transformers opens it, called with the signature's inputs."""
    import transformers

    from compress.artifacts.hf_folder import reading_by_transformers, refuse_lookups
    from compress.artifacts.recipe import CallByName

    with reading_by_transformers(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        refuse_lookups(config, folder / CONFIG)
        if config["quantization_config"]["quant_method"] != "compressed-tensors":
            raise ValueError(f"{CONFIG} names another quant_method than compressed-tensors")
        kind: Any = getattr(transformers, config["architectures"][0])
        # Kept packed, transformers 5.24 with compressed-tensors 0.20 expects zero points of 4 bits
        # that are not packed, and refuses packed ones, which the format prescribes.
        dense = transformers.CompressedTensorsConfig(dequantize=True)
        module = kind.from_pretrained(
            folder, dtype="float32", local_files_only=True, quantization_config=dense
        ).eval()
    names = tuple(spec.name for spec in signature.inputs)
    CallByName(inputs=names, outputs=("logits",)).apply_(module)
    return module


def streamed_folder(folder: Path, signature: Signature, device: str = "cpu") -> Any:
    """Return a folder's model, which reads and dequantizes a layer's weights when it is called."""
    from compress.artifacts.hf_folder import build
    from compress.artifacts.meta_init import parameters_on_meta, stream_weights_
    from compress.artifacts.recipe import CallByName
    from compress.checkpoint.safetensors_io import read_safetensors
    from compress.export.compressed_tensors.tensors import floats_of

    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    with parameters_on_meta():
        module = build(config["architectures"][0], config).eval()
    stored = read_safetensors(folder / CompressedTensorsModel.payload)
    floats = dict(floats_of(stored, config["quantization_config"]))
    for tied, _ in shared_parameters(module):  # such a weight is in the file once
        at = next((name for name in tied if name in floats), None)
        floats |= {name: floats[at] for name in tied if at is not None and name not in floats}
    stream_weights_(module, floats, device)
    names = tuple(spec.name for spec in signature.inputs)
    CallByName(inputs=names, outputs=("logits",)).apply_(module)
    return module
