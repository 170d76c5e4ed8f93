"""Creates the first artifact of a pipeline: a user's checkpoint, or a module in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.edits.independent_calls import ROUNDING
from compress.artifacts.recipe_inference import fit_call
from compress.checkpoint.loading import match_names, read_state_dict
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid
from compress.common.forward import answer_one_row
from compress.common.tensor_difference import relative_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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
    inputs: Sequence[torch.Tensor] | None = None,
) -> EagerModel:
    """Create an artifact from a user's factory, whose source lies in a folder, and checkpoint.

    Without a checkpoint the factory's own weights, seeded, are kept. The signature is checked by
    a forward pass on ``inputs``, or on seeded ones.

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
    return import_module(path, recipe, module, signature, inputs=inputs, folder=folder)


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

    The module may be changed so that it takes its inputs by name, and that its calls leave it and
    them as they are. ``inputs`` are an example, and ``carried`` are files beside the model.

    Raises:
        PipelineInvalid: the names of inputs or outputs contradict the model.
        ArtifactInvalid: the model takes other inputs, or has other outputs when loaded again.
    """
    inputs = signature.example() if inputs is None else inputs
    edits, signature = fit_call(module, signature, inputs, repr(recipe.factory))
    for edit in edits:
        edit.apply_(module)
    recipe = recipe.model_copy(update={"edits": (*recipe.edits, *edits)})
    outputs = answer_one_row(module, signature, inputs)
    model = EagerModel.create(
        path, recipe, module.state_dict(), signature, folder=folder, carried=carried
    )
    # Outputs may depend on more than the code and the state dict.
    reloaded = answer_one_row(model.load(), signature, inputs)
    if not all(relative_error(a, b) <= ROUNDING for a, b in zip(outputs, reloaded, strict=True)):
        raise ArtifactInvalid(
            f"factory {model.recipe.factory!r}: loaded again with the same weights, the model "
            "answers differently; it keeps state outside its state_dict"
        )
    return model
