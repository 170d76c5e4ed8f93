"""QAT of a convolution or linear layer with the BatchNorm that will be folded into it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from compress.quantization.pt2e.quantizer import (
    BATCH_NORM,
    WEIGHTED,
    is_constant,
    is_sequence_linear,
)
from compress.quantization.qat.fake_quantize import FreezeFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

SMALLEST_FACTOR = 1e-12
"""A channel whose weights are multiplied by less is dead; its outputs are not divided by it."""


@dataclass(frozen=True)
class ConvBnParameters:
    """The tensors of a layer and of the BatchNorm after it, before folding."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    gain: torch.Tensor | None
    shift: torch.Tensor | None
    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    eps: float


def find_conv_bn(graph: GraphModule) -> dict[str, ConvBnParameters]:
    """Return the layers followed by a BatchNorm, by the names of their nodes."""
    layers = {}
    for node in graph.graph.nodes:
        layer, *tensors = node.args[:5] if node.target is BATCH_NORM else (None,)
        if not isinstance(layer, Node) or layer.target not in WEIGHTED or is_sequence_linear(layer):
            continue
        weight = layer.args[1]
        # Where another node reads the output or weight, torchao folds before training.
        bias = layer.args[2] if len(layer.args) > 2 else None
        computed = [t for t in (bias, *tensors) if isinstance(t, Node) and not is_constant(t)]
        is_read_once = is_constant(weight) and len(weight.users) == 1 and len(layer.users) == 1
        if is_read_once and not computed:
            values = [
                attrgetter(str(part.target))(graph) if isinstance(part, Node) else None
                for part in (weight, bias, *tensors)
            ]
            layers[layer.name] = ConvBnParameters(*values, *node.args[5:7])  # type: ignore[arg-type]
    return layers


class ConvBnQat(nn.Module):
    """A convolution or linear layer with a folded BatchNorm whose statistics still move.

    After Jacob et al. (2018), section 3.2, and Krishnamoorthi, "Quantizing deep convolutional
    networks for efficient inference" (2018), section 3.2.2: the weight is quantized as it will be
    folded, with the running statistics; outputs are normalized with the statistics of the batch,
    until these are frozen and the layer computes what the integer one will.
    """

    # The names of parameters, buffers and submodules are keys of training checkpoints.
    weight: torch.Tensor
    bias: torch.Tensor
    gain: torch.Tensor
    shift: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(
        self,
        operator: Callable[..., torch.Tensor],
        parameters: ConvBnParameters,
        weight_grid: nn.Module,
        bias_grid: nn.Module,
    ) -> None:
        """Copy the tensors; the grids fake-quantize the folded weight and bias."""
        super().__init__()
        self.operator, self.momentum, self.eps = operator, parameters.momentum, parameters.eps
        self.weight_grid, self.bias_grid = weight_grid, bias_grid
        self.frozen = FreezeFlag()
        """Whether the statistics stay as they are."""
        weight_OI, mean_O = parameters.weight, parameters.mean
        self.weight = nn.Parameter(weight_OI.detach().clone(), weight_OI.requires_grad)
        for name, tensor, default in (
            ("bias", parameters.bias, torch.zeros_like(mean_O)),
            ("gain", parameters.gain, torch.ones_like(mean_O)),
            ("shift", parameters.shift, torch.zeros_like(mean_O)),
        ):
            if tensor is None:
                self.register_buffer(name, default)
            else:
                parameter = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
                self.register_parameter(name, parameter)
        self.register_buffer("mean", mean_O.detach().clone())
        self.register_buffer("variance", parameters.variance.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the normalized outputs, computed with fake-quantized weights."""
        factor_O = self._factor()
        weight_OI = self.weight_grid(self._folded_weight(factor_O))
        if not self.training or self.frozen.on:
            return self.operator(inputs, weight_OI, self.bias_grid(self._folded_bias(factor_O)))
        # Undo the folding, then normalize with the statistics of the batch.
        outputs = self.operator(inputs, weight_OI, None)
        divisor_O = torch.where(factor_O.abs() > SMALLEST_FACTOR, factor_O, 1.0)
        shape = (1, -1, *[1] * (outputs.dim() - 2))
        return F.batch_norm(
            outputs / divisor_O.view(shape) + self.bias.view(shape),
            self.mean,
            self.variance,
            self.gain,
            self.shift,
            training=True,
            momentum=self.momentum,
            eps=self.eps,
        )

    @torch.no_grad()
    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and bias of the folded layer, not quantized."""
        factor_O = self._factor()
        return self._folded_weight(factor_O), self._folded_bias(factor_O)

    def _folded_weight(self, factor_O: torch.Tensor) -> torch.Tensor:
        return self.weight * factor_O.view(-1, *[1] * (self.weight.dim() - 1))

    def _folded_bias(self, factor_O: torch.Tensor) -> torch.Tensor:
        return self.shift + (self.bias - self.mean) * factor_O

    def _factor(self) -> torch.Tensor:
        return self.gain * torch.rsqrt(self.variance + self.eps)


def operator_of(node: Node) -> Callable[..., torch.Tensor]:
    """Return what a layer's node computes from inputs, weight and bias; it can be copied."""
    return partial(_call, node.target, tuple(node.args[3:]), dict(node.kwargs))


def _call(
    target: Any,
    options: tuple[object, ...],
    named: dict[str, object],
    *tensors: torch.Tensor | None,
) -> torch.Tensor:
    output: torch.Tensor = target(*tensors, *options, **named)
    return output
