"""The artifact `GgufModel`, and the stage `export_gguf` that writes it."""

from __future__ import annotations

import contextlib
import io
import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.common.forward import torch_predictor
from compress.common.requirements import Requirement, pip_install
from compress.export.common.runtime import Runtime
from compress.export.exporter import ExportedModel, Exporter, source_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.common.packed_weights import DecoderWeights
    from compress.export.gguf.tensors import FileTensor

logger = logging.getLogger(__name__)

GGUF = Requirement(what="gguf", install=pip_install("gguf"))
RUNTIME = Runtime(
    name="gguf",
    title="GGUF",
    requirements=(GGUF,),
    runs_in="eager",
)


class GgufModel(ExportedModel):
    """A decoder with its tokenizer in one file, which llama.cpp opens."""

    kind: ClassVar[str] = "gguf"
    payload: ClassVar[str] = "model.gguf"
    opened_with: ClassVar[tuple[str, ...]] = ("transformers", "gguf")
    runtime: ClassVar[Runtime] = RUNTIME

    @classmethod
    @contextlib.contextmanager
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> Iterator[Predictor]:
        """Open a file with transformers, which multiplies floats."""
        module = opened_file(file, signature).to(device)
        with torch_predictor(module, device, threads) as predict:
            yield predict


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

    @property
    def machine_parts(self) -> dict[str, Any]:
        """Which version of gguf wrote the file; None where none is installed."""
        return {"gguf": None if GGUF.missing() else version("gguf")}

    def write(self, model: EagerModel | GraphModel, file: Path, context: Context) -> dict[str, Any]:
        """Write settings, tokenizer and tensors, and read them back."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.gguf.tensors import check_family, file_tensors

        weights = decoder_weights(model, context, self.title)
        check_family(weights.module.config, self.title)
        tensors = [*file_tensors(weights)]
        weights.write_config(file.parent)
        self._write(file, weights, tensors, model.carried_files())
        return {**source_counts(model), **self._proof(file, model.signature, weights, tensors)}

    def prove(self, model: EagerModel | GraphModel, *_: Any) -> None:
        """Compare nothing more: :meth:`write` has read the file back."""

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log how many integers were compared."""
        logger.info("%s: %d integers read back", self.title, facts["equal_integers"])

    def check_parity(self, model: Artifact, artifact: Artifact, context: Context) -> None:
        """Raise StageFailed where a stored file has other weights or answers than the model."""
        from compress.export.common.packed_weights import decoder_weights
        from compress.export.gguf.tensors import file_tensors

        assert isinstance(model, EagerModel | GraphModel)
        weights = decoder_weights(model, context, self.title)
        tensors = [*file_tensors(weights)]
        self._proof(artifact.payload_path, model.signature, weights, tensors)

    def _write(
        self,
        file: Path,
        weights: DecoderWeights,
        tensors: list[FileTensor],
        carried: dict[str, bytes],
    ) -> None:
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType, GGUFWriter

        from compress.export.gguf.tensors import (
            FAMILIES,
            add_settings,
            add_vocabulary,
            block_type,
            blocks_of,
        )

        module: Any = weights.module
        family = FAMILIES[module.config.model_type]
        writer = GGUFWriter(file, family.architecture)
        add_settings(writer, module.config, type(module).__name__)
        reason = add_vocabulary(writer, carried, module)
        if reason:
            logger.warning("%s: the file reads and writes token ids alone: %s", self.title, reason)
        for name, source, values, row_order in tensors:
            if isinstance(values, torch.Tensor):
                rows = values.float().numpy()
                writer.add_tensor(name, rows if row_order is None else rows[row_order])
            elif values.is_table and block_type(values) is None:
                writer.add_tensor(name, values.dequantized().numpy().astype(np.float16))
            else:
                kind = GGMLQuantizationType[block_type(values) or "F32"]
                blocks = blocks_of(source, values)
                blocks = blocks if row_order is None else blocks[row_order]
                writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _proof(
        self,
        file: Path,
        signature: Signature,
        weights: DecoderWeights,
        tensors: list[FileTensor],
    ) -> dict[str, Any]:
        """Compare a file's weights and answers with its source; return what was found."""
        import torch

        from compress.common.tensor_difference import relative_error
        from compress.export.parity.sample_parity import FLOAT

        floats, count = self._read_back(file, tensors)
        weights.use_(floats)
        opened = opened_file(file, signature)
        with torch.inference_mode():
            found = opened(*signature.example())[0]
        error = relative_error(weights.scores(signature), found)
        if not error <= FLOAT.relative:
            raise StageFailed(
                f"{self.title}: transformers answers otherwise than the file's weights, by "
                f"{error:.2g} of the norm, expected at most {FLOAT.relative:g}"
            )
        return {
            "equal_integers": count,
            "scores_error": error,
            "opened_by": f"gguf {version('gguf')} and transformers {version('transformers')}",
        }

    def _read_back(
        self, file: Path, tensors: list[FileTensor]
    ) -> tuple[dict[tuple[str, bool], torch.Tensor], int]:
        """Return the floats of a file's packed weights, and how many integers were compared.

        Raises:
            StageFailed: an integer differs from the source's, or a float by more than the rounding
                of scales to half precision.
        """
        import torch
        from gguf import GGUFReader, dequantize

        from compress.export.gguf.tensors import block_type, integers_of

        stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
        floats, count = dict[tuple[str, bool], torch.Tensor](), 0
        for name, source, values, row_order in tensors:
            found = stored[name]
            rows = torch.tensor(dequantize(found.data, found.tensor_type))
            order = torch.arange(len(rows)) if row_order is None else row_order
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
            if isinstance(values, torch.Tensor):
                if not torch.equal(rows, values.float()):
                    raise StageFailed(f"{self.title}: {source} differs in the file")
                continue
            kind = block_type(values)
            if kind is not None:
                integers = torch.tensor(integers_of(found.data, kind))
                if not torch.equal(integers, values.integers()[order]):
                    raise StageFailed(f"{self.title}: {source}: integers differ in the file")
                count += integers.numel()
            expected = values.dequantized()
            # d and m have 11 bits each; beyond the smallest normal half they are coarser.
            largest = values.scale.amax() * 2**values.bits
            if not (rows - expected).abs().max() <= 2**-10 * largest:
                raise StageFailed(f"{self.title}: {source}: scales differ in the file")
            floats[source, values.is_table] = rows
        return floats, count


def opened_file(file: Path, signature: Signature) -> Any:
    """Return a file's model as transformers opens it, called with the signature's inputs."""
    import transformers
    from gguf import GGUFReader

    from compress.artifacts.hf_folder import reading_by_transformers
    from compress.artifacts.recipe import CallByName

    # transformers 5.24 shows a progress bar here that its own setting does not hide.
    with reading_by_transformers(file), contextlib.redirect_stderr(io.StringIO()):
        where = {"gguf_file": file.name, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(file.parent, **where)
        # transformers 5.24 does not read it for all families, and takes 128 for Qwen3.
        fields = GGUFReader(file).fields
        (length,) = (name for name in fields if name.endswith(".attention.key_length"))
        config.head_dim = fields[length].contents()
        kind: Any = transformers.AutoModelForCausalLM
        module = kind.from_pretrained(file.parent, config=config, dtype="float32", **where).eval()
    names = tuple(spec.name for spec in signature.inputs)
    CallByName(inputs=names, outputs=("logits",)).apply_(module)
    return module
