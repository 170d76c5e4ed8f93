"""Creates the first artifact of a pipeline: a checkpoint, a Hugging Face folder or a module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.artifacts.artifact import STREAMED
from compress.artifacts.carried_files import IMAGES
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.independent_calls import ROUNDING
from compress.artifacts.hf_folder import files_to_carry, read_architecture, read_json, recipe_from
from compress.artifacts.meta_init import build_skeleton, match_state_dict, stream_weights_
from compress.artifacts.recipe_inference import fit_call
from compress.checkpoint.loading import match_names, read_state_dict
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid
from compress.common.forward import answer_one_row
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.common.tensor_difference import relative_error

if TYPE_CHECKING:
    from compress.artifacts.hf_folder import Task
    from compress.artifacts.recipe import Recipe

    Inputs = tuple[tuple[TensorSpec, ...], dict[str, AxisBounds]]

SHORTEST_SOUND = 1600
"""Samples of a raw waveform, a tenth of a second: below, convolutions have nothing to read."""
OTHER_SEED = 2**31 - 1
"""One that nobody is likely to build a model with."""
USUAL_SIDE = 224  # of the images of a model whose config and preprocessor name no size


def import_checkpoint(
    path: Path,
    recipe: Recipe,
    signature: Signature,
    *,
    checkpoint: Path | None,
    folder: Path | None,
    seed: int = 0,
    inputs: Sequence[torch.Tensor] | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> EagerModel:
    """Create an artifact from a user's factory, whose source lies in a folder, and checkpoint.

    Without a checkpoint the factory's own weights, seeded, are kept. A forward pass on ``inputs``,
    or on seeded ones, checks the signature; ``carried`` are files beside the model. Raises
    ArtifactInvalid where the checkpoint is not the model's, or the model takes other inputs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = recipe.build(folder)
    if checkpoint is not None:
        source = f"checkpoint {checkpoint}"
        state = match_names(read_state_dict(checkpoint), module.state_dict(), source)
        load_state_(module, state, source)
    return import_module(
        path, recipe, module, signature, inputs=inputs, folder=folder, carried=carried
    )


def import_module(
    path: Path,
    recipe: Recipe,
    module: torch.nn.Module,
    signature: Signature,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    folder: Path | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> EagerModel:
    """Create an artifact from a module that its recipe built and that has its weights.

    It may be changed to take its inputs by name, and to leave itself and them as they are.
    ``inputs`` are an example, ``carried`` files beside the model. Raises PipelineInvalid: names
    contradict the model; ArtifactInvalid: it takes others, or answers otherwise when loaded again.
    """
    inputs = signature.example() if inputs is None else inputs
    edits, signature = fit_call(module, signature, inputs, repr(recipe.factory))
    for edit in edits:
        edit.apply_(module)
    recipe = recipe.model_copy(update={"edits": (*recipe.edits, *edits)})
    outputs = answer_one_row(module, signature, inputs)
    state = module.state_dict()
    model = EagerModel.create(path, recipe, state, signature, folder=folder, carried=carried)
    # Outputs may depend on more than the code and the state dict, such as on numbers drawn when the
    # model is built: by another seed, or they might be equal by chance.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(OTHER_SEED)
        again = model.load()
    reloaded = answer_one_row(again, signature, inputs)
    if not all(relative_error(a, b) <= ROUNDING for a, b in zip(outputs, reloaded, strict=True)):
        raise ArtifactInvalid(
            f"factory {model.recipe.factory!r}: loaded again with the same weights, the model "
            "answers differently; it keeps state outside its state_dict"
        )
    return model


def import_streamed(
    path: Path, folder: Path, task: Task | None, signature: Signature
) -> EagerModel:
    """Create an artifact from a folder of save_pretrained, a tensor at a time, in float32.

    One forward pass checks the signature. Raises PipelineInvalid: the names of inputs or outputs
    contradict the model; ArtifactInvalid: files are missing, or do not hold the model's weights.
    """
    recipe = recipe_from(read_architecture(folder, task))
    module = build_skeleton(recipe, None)
    if module is None:
        raise ArtifactInvalid(
            f"{folder}: transformers computes with the model's weights while it builds it, so that "
            "they cannot be read part by part; leave out `stream`"
        )
    state = match_names(read_state_dict(folder), module.state_dict(), str(folder))
    weights = match_state_dict(state, recipe, None, str(folder))
    carried = files_to_carry(folder, module)
    stream_weights_(module.eval(), weights)
    edits, signature = fit_call(module, signature, signature.example())
    recipe = recipe.model_copy(update={"edits": edits})
    facts = {STREAMED: True}
    return EagerModel.create(path, recipe, weights, signature, facts=facts, carried=carried)


def inputs_of_transformer(model: Any, folder: Path) -> Inputs:
    """Return the inputs that a transformers model's config describes, and bounds of axes."""
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
        if name.endswith("position_embeddings") and isinstance(layer, nn.Embedding):
            # RoBERTa and its kin count positions from the one after that of the padding.
            padding = -1 if layer.padding_idx is None else layer.padding_idx
            found = layer.num_embeddings - padding - 1
            break
    return found if isinstance(found, int) and found > 1 else None


def _image_size(config: Any, folder: Path) -> list[int]:
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
