"""Imports a Hugging Face folder whose weights may not fit into memory, a tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.artifacts.artifact import STREAMED
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.hf_folder import files_to_carry, read_architecture, recipe_from
from compress.artifacts.meta_init import build_skeleton, match_state_dict
from compress.artifacts.recipe_inference import fit_call
from compress.checkpoint.loading import match_names, read_state_dict
from compress.checkpoint.streamed_module import stream_weights_
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.hf_folder import Task
    from compress.common.signature import Signature


def import_streamed(
    path: Path, folder: Path, task: Task | None, signature: Signature
) -> EagerModel:
    """Create an artifact from a folder of save_pretrained; one forward pass checks the signature.

    Its weights are float32, as of any imported model, and those of the folder may have any type.

    Raises:
        PipelineInvalid: the names of inputs or outputs contradict the model.
        ArtifactInvalid: files are missing, or hold other names or shapes than the model has.
    """
    recipe = recipe_from(read_architecture(folder, task))
    module = build_skeleton(recipe, None)
    if module is None:
        raise ArtifactInvalid(
            f"{folder}: transformers computes with the model's weights while it builds it, so that "
            "they cannot be read part by part; leave out `stream`"
        )
    own = module.state_dict()
    state = match_names(read_state_dict(folder), own, str(folder))
    weights = match_state_dict(state, recipe, None, str(folder))
    carried = files_to_carry(folder, module)
    stream_weights_(module.eval(), weights)
    edits, signature = fit_call(module, signature, signature.example())
    recipe = recipe.model_copy(update={"edits": edits})
    return EagerModel.create(
        path, recipe, weights, signature, facts={STREAMED: True}, carried=carried
    )
