"""Weights that share memory, such as a head that is the table of embeddings, made separate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from compress.artifacts.carried_files import TIED

if TYPE_CHECKING:
    from collections.abc import Sequence


def untie_(module: nn.Module, parameters: Sequence[str]) -> None:
    """Give parameters memory of their own, in place; a config of transformers says so."""
    for name in parameters:
        owner, _, key = name.rpartition(".")
        part = module.get_submodule(owner)
        value = part.get_parameter(key)
        part.register_parameter(key, nn.Parameter(value.detach().clone(), value.requires_grad))
    config: Any = getattr(module, "config", None)
    if getattr(config, TIED, False):
        setattr(config, TIED, False)
