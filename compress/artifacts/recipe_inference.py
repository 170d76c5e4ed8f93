"""Recipes of modules that are in memory, and the proof that they build the same model."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import run_in_eval
from compress.artifacts.edits.call_adapter import fit_call
from compress.artifacts.recipe import Recipe
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid, PipelineInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.artifacts.recipe import CallByName
    from compress.common.signature import Signature


def recipe_of(
    module: torch.nn.Module, factory: str | None, arguments: dict[str, Any] | None
) -> Recipe:
    """Return the recipe of a module; without a factory its class, or its transformers config.

    Raises:
        PipelineInvalid: the class is one that no other process can import.
    """
    if factory is not None:
        return Recipe(factory=factory, arguments=arguments or {})
    kind = type(module)
    transformers = sys.modules.get("transformers")
    if transformers and getattr(transformers, kind.__name__, None) is kind:
        from compress.artifacts.hf_folder import recipe_from

        return recipe_from(module)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise PipelineInvalid(
            f"{kind.__qualname__} is defined in a script or a function, where no other process "
            "finds it; move it to a file of its own, or pass factory='module:callable'"
        )
    return Recipe(factory=f"{kind.__module__}:{kind.__qualname__}", arguments=arguments or {})


def fitted_recipe(
    module: torch.nn.Module, recipe: Recipe, signature: Signature, inputs: Sequence[torch.Tensor]
) -> tuple[Recipe, Signature]:
    """Return the recipe with the call, and the signature with names of outputs.

    Raises:
        ArtifactInvalid: the factory builds another architecture, or one that answers otherwise.
    """
    twin = recipe.build()
    load_state_(twin, module.state_dict(), f"factory {recipe.factory!r}")
    edit, signature = fit_call(module, signature, inputs)
    if edit is not None:
        recipe = recipe.model_copy(update={"edits": (edit,)})
        edit.apply_(twin)
    with _edited(module, edit):
        expected = run_in_eval(module, inputs)
    found = run_in_eval(twin, inputs)
    if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
        raise ArtifactInvalid(
            f"factory {recipe.factory!r} builds a module with the same weights and other outputs; "
            "pass the arguments that the module was built with"
        )
    return recipe, signature


@contextmanager
def _edited(module: torch.nn.Module, edit: CallByName | None) -> Iterator[None]:
    """Let a module be called by name for a block; it is the caller's, and stays as it was."""
    kind = type(module)
    if edit is not None:
        edit.apply_(module)
    try:
        yield
    finally:
        module.__class__ = kind
