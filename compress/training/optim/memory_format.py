"""Channels-last memory format: the layout of images in which convolutions have faster kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

IMAGE_DIMENSIONS = 4


def use_channels_last_(module: nn.Module) -> None:
    """Lay out weights of four dimensions with channels last, and such inputs at each call."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.register_forward_pre_hook(_rearrange)


def _rearrange(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if x.dim() == IMAGE_DIMENSIONS else x
        for x in inputs
    )
