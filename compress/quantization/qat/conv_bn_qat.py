"""A layer and the BatchNorm after it, trained as the one layer that will compute both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from compress.quantization.pt2e.bn_fusion import BATCH_NORM
from compress.quantization.pt2e.quantizer import LINEAR, WEIGHTED, is_constant
from compress.quantization.qat.fake_quantize import Switch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

SMALLEST_FACTOR = 1e-12
"""A channel whose weights are multiplied by less is dead, and its products are left undivided."""


@dataclass(frozen=True)
class BnParameters:
    """The tensors of a layer and of the BatchNorm after it, as they were before folding."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gain: torch.Tensor | None
    shift: torch.Tensor | None
    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    eps: float


def normed_layers(graph: GraphModule) -> dict[str, BnParameters]:
    """Return the layers that a BatchNorm follows, by the names of their nodes.

    Left out are those whose result or weight is read elsewhere too: they stay as they are folded.
    """
    found = {}
    for node in graph.graph.nodes:
        if node.target is not BATCH_NORM:
            continue
        layer, *tensors = node.args[:5]
        weight = layer.args[1] if _is_layer(layer) else None
        if is_constant(weight) and len(weight.users) == 1 and len(layer.users) == 1:
            bias = layer.args[2] if len(layer.args) > 2 else None
            held = [_held(graph, part) for part in (weight, bias, *tensors)]
            found[layer.name] = BnParameters(*held, *node.args[5:7])  # type: ignore[arg-type]
    return found


class ConvBnQat(nn.Module):
    """A convolution or linear layer with a BatchNorm folded in, whose statistics move meanwhile.

    After Jacob et al. (2018), section 3.2, and Krishnamoorthi, "Quantizing deep convolutional
    networks for efficient inference" (2018), section 3.2.2: the weight is rounded as it will be
    folded, with the moving statistics. What a batch is normalized with is its own statistics, until
    these are frozen and the layer computes what the integer one will.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    gain: torch.Tensor
    shift: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(
        self,
        product: Callable[..., torch.Tensor],
        normed: BnParameters,
        weight_grid: nn.Module,
        bias_grid: nn.Module,
    ) -> None:
        """Take over tensors.

        Args:
            product: of inputs, weight and bias.
            normed: the tensors.
            weight_grid: what rounds the folded weight.
            bias_grid: what rounds the folded bias.
        """
        super().__init__()
        self.product, self.momentum, self.eps = product, normed.momentum, normed.eps
        self.weight_grid, self.bias_grid = weight_grid, bias_grid
        self.frozen = Switch()
        """Whether the statistics stay as they are."""
        weight_OI, mean_O = normed.weight, normed.mean
        self.weight = nn.Parameter(weight_OI.detach().clone(), weight_OI.requires_grad)
        for name, tensor, default in (
            ("bias", normed.bias, torch.zeros_like(mean_O)),
            ("gain", normed.gain, torch.ones_like(mean_O)),
            ("shift", normed.shift, torch.zeros_like(mean_O)),
        ):
            if tensor is None:
                self.register_buffer(name, default)
            else:
                parameter = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
                self.register_parameter(name, parameter)
        self.register_buffer("mean", mean_O.detach().clone())
        self.register_buffer("variance", normed.variance.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the normalized products."""
        factor_O = self._factor()
        weight_OI = self.weight_grid(_by_channel(self.weight, factor_O))
        if self.training and not self.frozen.on:
            return self._normalized(self.product(inputs, weight_OI, None), factor_O)
        return self.product(inputs, weight_OI, self.bias_grid(self._folded_bias(factor_O)))

    @torch.no_grad()
    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and bias of the one layer, not rounded."""
        factor_O = self._factor()
        return _by_channel(self.weight, factor_O), self._folded_bias(factor_O)

    def _factor(self) -> torch.Tensor:
        return self.gain * torch.rsqrt(self.variance + self.eps)

    def _folded_bias(self, factor_O: torch.Tensor) -> torch.Tensor:
        return self.shift + (self.bias - self.mean) * factor_O

    def _normalized(self, folded: torch.Tensor, factor_O: torch.Tensor) -> torch.Tensor:
        """Undo the folding, and normalize with the statistics of the batch."""
        divisor_O = torch.where(factor_O.abs() > SMALLEST_FACTOR, factor_O, 1.0)
        shape = (1, -1, *[1] * (folded.dim() - 2))
        products = folded / divisor_O.view(shape) + self.bias.view(shape)
        return F.batch_norm(
            products,
            self.mean,
            self.variance,
            self.gain,
            self.shift,
            training=True,
            momentum=self.momentum,
            eps=self.eps,
        )


def product_of(node: Node) -> Callable[..., torch.Tensor]:
    """Return what a layer's node computes of inputs, weight and bias."""
    target: Any = node.target
    return partial(_product, target, tuple(node.args[3:]), dict(node.kwargs))


def _product(
    target: Callable[..., torch.Tensor],
    more: tuple[object, ...],
    named: dict[str, object],
    *tensors: torch.Tensor | None,
) -> torch.Tensor:
    return target(*tensors, *more, **named)


def _is_layer(node: object) -> bool:
    if not isinstance(node, Node):
        return False
    if node.target is LINEAR:
        return bool(node.args[0].meta["val"].dim() == 2)  # type: ignore[union-attr]
    return node.target in WEIGHTED


def _held(graph: GraphModule, node: object) -> torch.Tensor | None:
    return attrgetter(str(node.target))(graph) if isinstance(node, Node) else None


def _by_channel(weight_OI: torch.Tensor, factor_O: torch.Tensor) -> torch.Tensor:
    return weight_OI * factor_O.view(-1, *[1] * (weight_OI.dim() - 1))
