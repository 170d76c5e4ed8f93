"""Run a module whose weights stay on disk: a part's are read when it is called, then let go."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from compress.checkpoint.state_dict import in_memory
from compress.common.forward import torch_predictor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.checkpoint.state_dict import Weights
    from compress.common.forward import Predictor


def stream_weights_(module: nn.Module, weights: Weights, device: str = "cpu") -> None:
    """Let each submodule read its own parameters when it is called, and drop them afterwards.

    The module's parameters are on the meta device; its buffers are read here, onto the device that
    it is to run on. A module that reads the parameters of another one finds them on the meta
    device, and fails.
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


@contextmanager
def streamed_predictor(
    module: nn.Module, weights: Weights, device: str, threads: int
) -> Iterator[Predictor]:
    """Yield a predictor that reads all weights once in each call, one submodule's at a time."""
    stream_weights_(module, weights, device)
    with torch_predictor(module, device, threads) as predict:
        yield predict


def _read_(names: dict[str, str], weights: Weights, device: str, part: nn.Module, _: Any) -> None:
    for key, name in names.items():
        value = in_memory(weights[name]).to(device)
        part._parameters[key] = nn.Parameter(value, requires_grad=False)


def _drop_(on_meta: dict[str, Any], part: nn.Module, *_: Any) -> None:
    part._parameters.update(on_meta)
