"""Putting tensors into a module, and saying which do not fit."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from compress.core.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def load_state_(module: torch.nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy a state dict into a module, in place, refusing any difference.

    Raises:
        ArtifactInvalid: a tensor is missing, unexpected or of another shape; the message names it.
    """
    own = module.state_dict()
    missing = [k for k in own if k not in state]
    unexpected = [k for k in state if k not in own]
    shapes = [
        f"{k}: {tuple(state[k].shape)} instead of {tuple(own[k].shape)}"
        for k in own
        if k in state and state[k].shape != own[k].shape
    ]
    problems = [
        f"{label} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("shape of", shapes))
        if names
    ]
    if problems:
        built_by = inspect.getmodule(type(module))
        place = f"{getattr(built_by, '__name__', '')}.{type(module).__name__}"
        raise ArtifactInvalid(
            f"{source} does not hold the weights of {place}: {'; '.join(problems)}"
        )
    module.load_state_dict(dict(state), strict=True)
