"""The settings file of a folder for onnxruntime-genai: its schema, by which it is written and read.

onnxruntime-genai does what the file says: it loads libraries of operators that it names, and writes
profiles. So no folder is opened whose file has an entry or a value that is not of this schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from compress.common.config import Count, Settings
from compress.common.sealed_json import parse_settings

if TYPE_CHECKING:
    from pathlib import Path

    from export.genai.decoder import CacheShape

CONFIG = "genai_config.json"


class SessionOptions(Settings):
    """Options of onnxruntime's session."""

    log_id: Literal["onnxruntime-genai"] = "onnxruntime-genai"
    provider_options: tuple[()] = ()


class DecoderInputs(Settings):
    """Names of the inputs, those of the cache by layer."""

    input_ids: Literal["input_ids"] = "input_ids"
    attention_mask: Literal["attention_mask"] = "attention_mask"
    past_key_names: Literal["past_key_values.%d.key"] = "past_key_values.%d.key"
    past_value_names: Literal["past_key_values.%d.value"] = "past_key_values.%d.value"


class DecoderOutputs(Settings):
    """Names of the outputs, those of the cache by layer."""

    logits: Literal["logits"] = "logits"
    present_key_names: Literal["present.%d.key"] = "present.%d.key"
    present_value_names: Literal["present.%d.value"] = "present.%d.value"


class Decoder(Settings):
    """The ONNX file and the sizes of its cache."""

    session_options: SessionOptions = SessionOptions()
    filename: Literal["model.onnx"] = "model.onnx"
    head_size: Count
    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    num_hidden_layers: Count
    inputs: DecoderInputs = DecoderInputs()
    outputs: DecoderOutputs = DecoderOutputs()


class Model(Settings):
    """The decoder and its special tokens."""

    type: Literal["decoder"] = "decoder"
    """The name of any decoder, whatever its architecture."""
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    pad_token_id: int
    context_length: Count
    """Tokens of a prompt and its continuation together, at most."""
    vocab_size: Count
    decoder: Decoder


class Search(Settings):
    """How tokens are chosen where no request says it."""

    do_sample: Literal[False] = False
    max_length: Count
    past_present_share_buffer: Literal[True] = True


class GenaiConfig(Settings):
    """Content of `genai_config.json`."""

    model: Model
    search: Search

    @classmethod
    def of_decoder(cls, module: Any, shape: CacheShape, context: int) -> GenaiConfig:
        """Return the settings of a decoder of transformers, whose config names the special tokens.

        Args:
            module: the model.
            shape: sizes of its cache.
            context: tokens of a prompt and its continuation together, at most.
        """
        end = _token(module, "eos_token_id", 0)
        one_end = end[0] if isinstance(end, list) else end
        decoder = Decoder(
            head_size=shape.head_size,
            hidden_size=shape.heads * shape.head_size,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.cached_heads,
            num_hidden_layers=shape.layers,
        )
        model = Model(
            bos_token_id=_token(module, "bos_token_id", one_end),
            eos_token_id=end,
            pad_token_id=_token(module, "pad_token_id", one_end),
            context_length=context,
            vocab_size=module.config.vocab_size,
            decoder=decoder,
        )
        return cls(model=model, search=Search(max_length=context))

    @classmethod
    def read(cls, folder: Path) -> GenaiConfig:
        """Return a folder's settings; ArtifactInvalid names an entry that is not of the schema."""
        return parse_settings(cls, (folder / CONFIG).read_bytes(), folder / CONFIG)

    def write(self, folder: Path) -> None:
        """Write the settings in a folder."""
        (folder / CONFIG).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _token(module: Any, name: str, default: int) -> Any:
    """Return a special token's id, or several, as the model generates with it."""
    for settings in (getattr(module, "generation_config", None), module.config):
        found = getattr(settings, name, None)
        if found is not None:
            return found
    return default
