"""Creates the first artifact of a pipeline: a user's checkpoint, or a module in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe_inference import fit_call
from compress.checkpoint.loading import match_names, read_state_dict
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid, CompressError, first_line
from compress.common.forward import image_advice, run_in_eval
from compress.common.tensor_difference import relative_error

ROUNDING = 1e-4
"""Part of the norm by which outputs may differ when a model is loaded again: where weights lie in
memory decides in which order products are added. On an EPYC with AVX2 a tiny BERT differed for 138
of 200 misaligned copies of its weights, by at most 3e-6."""
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from compress.artifacts.recipe import Recipe
    from compress.common.signature import Signature


def import_checkpoint(
    path: Path,
    recipe: Recipe,
    signature: Signature,
    *,
    checkpoint: Path | None,
    folder: Path | None,
    seed: int = 0,
) -> EagerModel:
    """Create an artifact from a user's factory, whose source lies in a folder, and checkpoint.

    Without a checkpoint the factory's own weights, seeded, are kept. The signature is checked by
    one forward pass.

    Raises:
        ArtifactInvalid: the checkpoint is not the model's, or the model takes other inputs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = recipe.build(folder)
    if checkpoint is not None:
        source = f"checkpoint {checkpoint}"
        state = match_names(read_state_dict(checkpoint), module.state_dict(), source)
        load_state_(module, state, source)
    return import_module(path, recipe, module, signature, folder=folder)


def import_module(
    path: Path,
    recipe: Recipe,
    module: torch.nn.Module,
    signature: Signature,
    *,
    folder: Path | None = None,
    carried: Mapping[str, bytes] | None = None,
) -> EagerModel:
    """Create an artifact from a module that its recipe built and that has its weights.

    The module may be changed so that it takes its inputs by name. ``carried`` are files beside it.

    Raises:
        PipelineInvalid: the names of inputs or outputs contradict the model.
        ArtifactInvalid: the model takes other inputs, or has other outputs when loaded again.
    """
    inputs = signature.example()
    try:
        edit, signature = fit_call(module, signature, inputs)
    except CompressError:
        raise
    except Exception as error:
        shapes = ", ".join(
            f"{s.name} {list(x.shape)} {s.dtype}"
            for s, x in zip(signature.inputs, inputs, strict=True)
        )
        raise ArtifactInvalid(
            f"model.inputs: {recipe.factory!r} does not take {shapes}: "
            f"{type(error).__name__}: {first_line(error)}{image_advice(inputs)}"
        ) from error
    if edit is not None:
        edit.apply_(module)
        recipe = recipe.model_copy(update={"edits": (*recipe.edits, edit)})
    outputs = run_in_eval(module, inputs)
    model = EagerModel.create(
        path, recipe, module.state_dict(), signature, folder=folder, carried=carried
    )
    # Outputs may depend on more than the code and the state dict.
    reloaded = run_in_eval(model.load(), inputs)
    if not all(relative_error(a, b) <= ROUNDING for a, b in zip(outputs, reloaded, strict=True)):
        raise ArtifactInvalid(
            f"factory {model.recipe.factory!r}: loaded again with the same weights, the model "
            "answers differently; it draws random numbers, or keeps state outside its state_dict"
        )
    return model
