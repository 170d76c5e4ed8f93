"""Inputs that models of transformers and timm declare, where nobody has listed them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from compress.artifacts.carried_files import IMAGES
from compress.artifacts.hf_folder import read_json
from compress.common.errors import ArtifactInvalid
from compress.common.signature import AxisBounds, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    Inputs = tuple[tuple[TensorSpec, ...], dict[str, AxisBounds]]

SHORTEST_SOUND = 1600
"""Samples of a raw waveform, a tenth of a second: below, convolutions have nothing to read."""
USUAL_SIDE = 224
"""Of the images of a model whose config and preprocessor name no size."""


def inputs_of_transformer(model: Any, folder: Path) -> Inputs:
    """Return the inputs of a transformers model, and bounds of their axes, from its config.

    Raises:
        ArtifactInvalid: it takes something that its config does not describe.
    """
    config, parameters = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    axes = {}
    if main == "input_ids":
        names = [n for n in ("input_ids", "attention_mask") if n in parameters]
        inputs = [_spec(name, ["batch", "length"], "int64") for name in names]
        if (longest := _longest_text(model)) is not None:
            axes["length"] = AxisBounds(max=longest)
        generates = "decoder_input_ids" in parameters and not hasattr(model, "classification_head")
        if config.is_encoder_decoder and generates:
            inputs.append(_spec("decoder_input_ids", ["batch", "decoder_length"], "int64"))
    elif main == "pixel_values":
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        size = [*frames, getattr(config, "num_channels", 3), *_image_size(config, folder)]
        inputs = [_spec(main, ["batch", *size])]
    elif main == "input_values" and hasattr(config, "num_mel_bins"):
        inputs = [_spec(main, ["batch", config.max_length, config.num_mel_bins])]
    elif main == "input_values":
        inputs = [_spec(main, ["batch", "samples"])]
        axes["samples"] = AxisBounds(min=SHORTEST_SOUND)
    else:
        raise ArtifactInvalid(
            f"{folder}: {type(model).__name__} takes {main!r}, whose shape its config does not "
            "tell; declare model.inputs"
        )
    return tuple(inputs), axes


def inputs_of_timm(model: Any) -> Inputs:
    """Return the one input of a timm model: the images that its configuration names."""
    channels, height, width = model.default_cfg.get("input_size", (3, USUAL_SIDE, USUAL_SIDE))
    return (_spec("x", ["batch", channels, height, width]),), {}


def _spec(name: str, shape: list[Any], dtype: str = "float32") -> TensorSpec:
    return TensorSpec.model_validate({"name": name, "shape": shape, "dtype": dtype})


def _longest_text(model: Any) -> int | None:
    """Return for how many tokens a model has positions; None where any number has."""
    found = getattr(model.config, "max_position_embeddings", None)
    for name, layer in model.named_modules():
        # RoBERTa and its kin count positions from the one after that of the padding.
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            offset = 0 if layer.padding_idx is None else layer.padding_idx + 1
            found = layer.num_embeddings - offset
            break
    return found if isinstance(found, int) and found > 1 else None


def _image_size(config: Any, folder: Path) -> list[int]:
    """Return height and width of a vision model's images."""
    size: Any = getattr(config, "image_size", None)
    if size is None:
        try:
            content = read_json(folder / IMAGES)
        except ArtifactInvalid:
            content = {}
        size = content.get("crop_size") or content.get("size")
    if isinstance(size, dict):
        edge = size.get("shortest_edge", USUAL_SIDE)
        size = [size.get("height", edge), size.get("width", edge)]
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(map(_is_size, size)):
        return [*size]
    side: int = size if _is_size(size) else USUAL_SIDE
    return [side, side]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0
