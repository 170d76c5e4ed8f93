"""Finds the recipe of a module in memory, and checks that the recipe rebuilds the same model."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.artifacts.edits.independent_calls import call_effects, needed_hooks_alone, unchanged
from compress.artifacts.hf_folder import recipe_from
from compress.artifacts.in_process import is_in_process, register_module
from compress.artifacts.recipe import AnyEdit, CallByName, IndependentCalls, Recipe
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid, PipelineInvalid, raised_as
from compress.common.forward import (
    answer_one_row,
    forward_parameters,
    image_advice,
    match_outputs,
    positional_parameters,
    unbatched_advice,
)
from compress.common.tensor_difference import relative_error

if TYPE_CHECKING:
    import torch

    from compress.common.signature import Signature

log = logging.getLogger(__name__)


def recipe_from_module(
    module: torch.nn.Module, factory: str | None, arguments: dict[str, Any] | None
) -> Recipe:
    """Return a module's recipe; one of this process alone if no other can import its class."""
    if factory is not None:
        return Recipe(factory=factory, arguments=arguments or {})
    kind = type(module)
    transformers = sys.modules.get("transformers")
    if transformers and getattr(transformers, kind.__name__, None) is kind:
        return recipe_from(module)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return Recipe(factory=register_module(module))
    return Recipe(factory=f"{kind.__module__}:{kind.__qualname__}", arguments=arguments or {})


def rebuilding_recipe(
    module: torch.nn.Module,
    factory: str | None,
    arguments: dict[str, Any] | None,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
) -> tuple[Recipe, Signature]:
    """Return a recipe that is known to rebuild a module, and the completed signature.

    If the class alone, without factory and arguments, does not, the recipe is one of this process.
    Hooks that change no output are left out. Raises PipelineInvalid: names contradict the model, or
    the factory cannot be imported; ArtifactInvalid: as :func:`check_rebuild`.
    """
    call, _ = _by_signature(module, signature)
    with needed_hooks_alone(module, call, inputs):
        recipe = recipe_from_module(module, factory, arguments)
        try:
            return check_rebuild(module, recipe, signature, inputs)
        except (ArtifactInvalid, PipelineInvalid) as error:
            if factory is not None or arguments is not None or is_in_process(recipe.factory):
                raise
            log.info("%s is kept in this process: %s", type(module).__qualname__, error)
            recipe = Recipe(factory=register_module(module))
            return check_rebuild(module, recipe, signature, inputs)


def check_rebuild(
    module: torch.nn.Module, recipe: Recipe, signature: Signature, inputs: Sequence[torch.Tensor]
) -> tuple[Recipe, Signature]:
    """Return recipe and signature completed by `fit_call`; ArtifactInvalid: another model."""

    def rebuild() -> torch.nn.Module:
        built = recipe.build()
        load_state_(built, module.state_dict(), f"factory {recipe.factory!r}")
        return built

    rebuilt, kind = rebuild(), type(module)
    # The module is the caller's. The rebuilt one shows whether its forward writes to weights.
    versions = [(p, (p.data_ptr(), p._version)) for p in rebuilt.parameters()]
    edits, signature = fit_call(rebuilt, signature, inputs, kind.__qualname__)
    writes = any((p.data_ptr(), p._version) != before for p, before in versions)
    recipe = recipe.model_copy(update={"edits": (*recipe.edits, *edits)})
    if writes:
        rebuilt = rebuild()
    else:
        for edit in edits:
            edit.apply_(rebuilt)
    with unchanged(module, weights=writes):
        try:
            for edit in edits:
                edit.apply_(module)
            expected = answer_one_row(module, signature, inputs)
        finally:
            module.__class__ = kind
    got = answer_one_row(rebuilt, signature, inputs)
    if not all(relative_error(a, b) == 0 for a, b in zip(expected, got, strict=True)):
        raise ArtifactInvalid(
            f"factory {recipe.factory!r} builds a module with the same weights and other outputs; "
            "pass the arguments that the module was built with"
        )
    return recipe, signature


def fit_call(
    module: torch.nn.Module,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    name: str = "the model",
) -> tuple[tuple[AnyEdit, ...], Signature]:
    """Return the edits by which a module becomes a function of a signature's tensors.

    The module, ``name`` in errors, is called once, twice more if that changes it, and restored.
    Inputs named like parameters of forward are passed to them, others by position. Names of outputs
    select among the model's, or rename all. The completed signature is returned, too. Raises
    PipelineInvalid: names contradict forward; ArtifactInvalid: the module does not take the inputs.
    """
    call, keywords = _by_signature(module, signature)
    pairs = zip(signature.inputs, inputs, strict=False)
    shapes = ", ".join(f"{spec.name} {list(x.shape)} {spec.dtype}" for spec, x in pairs)
    what = f"model.inputs: {name} does not take {shapes}"
    try:
        output, state, changes_inputs, is_random = call_effects(module, call, inputs)
    except Exception:
        advice = image_advice(inputs) or _one_row_advice(
            partial(call_effects, module, call), signature, inputs
        )
        with raised_as(ArtifactInvalid, what, advice):
            raise
    if is_random:
        raise ArtifactInvalid(
            f"{name} draws random numbers in eval mode, so that equal calls answer differently; "
            "pass `training=self.training` to functional dropout, leave parts that forward puts "
            "into training mode in eval mode, or make the random numbers an input of forward"
        )
    selected, signature = match_outputs(output, signature)
    edits: list[AnyEdit] = []
    if keywords or selected:
        edits.append(CallByName(inputs=keywords, outputs=selected))
    if state is not None or changes_inputs:
        names, reads = (state.names, state.is_read) if state else ((), False)
        edits.append(IndependentCalls(state=names, in_training=reads, copies_inputs=changes_inputs))
    return tuple(edits), signature.model_copy(update={"state": state})


def _one_row_advice(call: Callable[..., Any], signature: Signature, inputs: Sequence[Any]) -> str:
    """Return how to declare a model that takes one row, or one sample without a batch axis."""
    has_rows = [spec.shape[:1] == (signature.batch_axis,) for spec in signature.inputs]
    first = signature.inputs[0]
    shape = ",".join(map(str, (1, *first.shape[1:])))
    one_row = f"a batch of one row is taken: declare its size as 1 ({first.name}={shape})"
    for rows, text in ((slice(1), one_row), (0, unbatched_advice(first))):
        with suppress(Exception):
            if any(has_rows):
                call([x[rows] if has else x for x, has in zip(inputs, has_rows, strict=True)])
                return f"; {text}"
    return ""


def _by_signature(
    module: torch.nn.Module, signature: Signature
) -> tuple[Callable[[Sequence[torch.Tensor]], Any], tuple[str, ...]]:
    """Return a function that calls a module, and forward's parameters where it does so by name."""
    keywords = _keywords(module, [spec.name for spec in signature.inputs])

    def call(inputs: Sequence[torch.Tensor]) -> Any:
        by_name = dict(zip(keywords, inputs, strict=True)) if keywords else {}
        return module(**by_name) if keywords else module(*inputs)

    return call, keywords


def _keywords(module: torch.nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return forward's parameters to pass inputs to by keyword; empty to pass them by position."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p.name for p in forward_parameters(module) if p.kind not in variable]
    if list(names) == positional_parameters(module)[: len(names)]:
        return ()
    if set(names) <= set(own):
        return tuple(names)
    misplaced = [n for i, n in enumerate(names) if n in own and n != "".join(own[i : i + 1])]
    if misplaced:
        unknown = [n for n in names if n not in own]
        raise PipelineInvalid(
            f"model.inputs: {misplaced[0]!r} is a parameter of forward and {unknown[0]!r} is none; "
            f"name each input as forward does ({', '.join(own)}), or none of them"
        )
    return ()
