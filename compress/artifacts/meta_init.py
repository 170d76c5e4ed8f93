"""Modules whose weights are not in them: on the meta device, on disk, or in another runtime."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.checkpoint.state_dict import (
    StoredTensor,
    Weights,
    as_dtype,
    describe_misfit,
    in_memory,
    storage_key,
)
from compress.common.errors import ArtifactInvalid
from compress.common.foreign.patching import patched_attribute

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.artifacts.recipe import Recipe
    from compress.common.forward import Predictor

log = logging.getLogger(__name__)


def build_skeleton(recipe: Recipe, folder: Path | None) -> nn.Module | None:
    """Return a module with parameters on the meta device; None if building reads values."""
    try:
        with parameters_on_meta():
            module = recipe.build(folder)
        obstacle: object = _unusable_tensor(module)
    except (ArtifactInvalid, RuntimeError) as error:  # meta tensors raise RuntimeError if read
        obstacle = error
    if obstacle is None:
        return module
    log.info("%s is built with its weights: %s", recipe.factory, obstacle)
    return None


def parameters_on_meta() -> AbstractContextManager[None]:
    """Move each parameter to the meta device as it is registered, for a block; ties survive."""
    # Not ``torch.device("meta")``: buffers would be there too, whose values the factory computes.
    register = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            twin: nn.Parameter | None = getattr(param, "_on_meta", None)
            if twin is None:
                twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                param._on_meta = twin  # type: ignore[attr-defined]  # a tied parameter has one twin
            param = twin
        register(self, name, param)

    return patched_attribute(nn.Module, "register_parameter", register_parameter)


def match_state_dict(weights: Weights, recipe: Recipe, folder: Path | None, source: str) -> Weights:
    """Return weights with the names, dtypes and ties of the state dict of a recipe's module.

    Tensors on disk stay there until they are read. Raises ArtifactInvalid, with the source in its
    message, where they are not the weights of such a module.
    """
    module = build_skeleton(recipe, folder)
    module = recipe.build(folder) if module is None else module
    own = module.state_dict(keep_vars=True)
    if refused := describe_misfit(source, repr(recipe.factory), own, weights):
        raise ArtifactInvalid(refused)
    by_storage: dict[tuple[object, ...], torch.Tensor | StoredTensor] = {}
    for name, tensor in own.items():
        if name in weights:
            by_storage.setdefault(storage_key(tensor), as_dtype(weights[name], tensor.dtype))
    return {name: by_storage[storage_key(tensor)] for name, tensor in own.items()}


def _unusable_tensor(module: nn.Module) -> str | None:
    """Describe a parameter that is not on the meta device, or another tensor that is; or None."""
    for name, param in module.named_parameters():
        if not param.is_meta:
            return f"{name} is a {type(param).__name__}"
    parameters = {id(param) for param in module.parameters()}
    for name, part in module.named_modules():
        for key, value in {**part._buffers, **vars(part)}.items():
            for tensor in value if isinstance(value, list | tuple) else (value,):
                on_meta = isinstance(tensor, torch.Tensor) and tensor.is_meta
                if on_meta and id(tensor) not in parameters:
                    return f"{name}.{key} is computed from weights".removeprefix(".")
    return None


def stream_weights_(module: nn.Module, weights: Weights, device: str = "cpu") -> None:
    """Let each submodule read its own parameters when it is called, and drop them afterwards.

    The parameters are on the meta device; buffers are read here, onto the device to run on. A
    module that reads the parameters of another one finds them on the meta device, and fails.
    """
    for prefix, part in module.named_modules():
        path = f"{prefix}." if prefix else ""
        names = {key: f"{path}{key}" for key, p in part._parameters.items() if p is not None}
        if names:
            part.register_forward_pre_hook(partial(_read_, names, weights, device))
            part.register_forward_hook(partial(_drop_, dict(part._parameters)), always_call=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {k: in_memory(weights[k]) for k in module.state_dict() if k not in parameters}
    module.load_state_dict(buffers, strict=False)
    for part in module.modules():
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else buffer.to(device)


def _read_(names: dict[str, str], weights: Weights, device: str, part: nn.Module, _: Any) -> None:
    for key, name in names.items():
        value = in_memory(weights[name]).to(device)
        part._parameters[key] = nn.Parameter(value, requires_grad=False)


def _drop_(on_meta: dict[str, Any], part: nn.Module, *_: Any) -> None:
    part._parameters.update(on_meta)


class PredictorModule(nn.Module):
    """Calls a predictor of another runtime; it has no parameters and cannot be trained."""

    def __init__(self, predict: Predictor) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the model's output, or all of them where it has several."""
        outputs = self.predict(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs
