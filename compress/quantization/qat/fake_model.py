"""The fake-quantized model, which rounds as the integer graph will, and when its ranges freeze."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from compress.common.errors import StageFailed
from compress.common.forward import Predictor, flatten_outputs
from compress.common.tensor_difference import largest_difference
from compress.core.metrics.builtin import predicted_labels
from compress.quantization.numeric_debug.fidelity_report import LabelParity
from compress.quantization.pt2e.observer_ranges import (
    observers_in,
    quantized_biases,
    smallest_weight_scale,
)
from compress.quantization.pt2e.quantizer import (
    BATCH_NORM,
    LINEAR,
    WEIGHTED,
    is_constant,
    is_sequence_linear,
    protect_shared_layers_,
)
from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize
from compress.quantization.qat.fake_quantize import (
    ActivationFakeQuantize,
    BiasFakeQuantize,
    FakeQuantize,
    FreezeFlag,
    WeightFakeQuantize,
)
from compress.training.objectives.objective import KeepZeros

if TYPE_CHECKING:
    from compress.common.signature import Signature
    from compress.core.objectives.task import Task

aten = torch.ops.aten
SHAPE_ONLY = {aten.clone.default, aten.reshape.default}
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
    """Return the layers into which a BatchNorm will be folded, by the names of their nodes."""
    protect_shared_layers_(graph)
    layers = {}
    for node in graph.graph.find_nodes(op="call_function", target=BATCH_NORM):
        operands: Any = node.args
        layer, *tensors = operands[:5]
        if layer.target not in WEIGHTED or is_sequence_linear(layer):
            continue
        weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
        if len(weight.users) == 1:  # a layer that is called twice is folded before training
            values: list[Any] = [
                attrgetter(str(part.target))(graph) if isinstance(part, Node) else None
                for part in (weight, bias, *tensors)
            ]
            layers[layer.name] = ConvBnParameters(*values, *operands[5:7])
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
        super().__init__()
        self.operator, self.momentum, self.eps = operator, parameters.momentum, parameters.eps
        self.weight_grid, self.bias_grid = weight_grid, bias_grid
        self.frozen = FreezeFlag()
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
        factor_O, folded_OI, bias_O = self.folded()
        weight_OI = self.weight_grid(folded_OI)
        if not self.training or self.frozen.on:
            return self.operator(inputs, weight_OI, self.bias_grid(bias_O))
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

    def folded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what folding multiplies by, and the folded weight and bias, not quantized."""
        factor_O = self.gain * torch.rsqrt(self.variance + self.eps)
        weight_OI = self.weight * factor_O.view(-1, *[1] * (self.weight.dim() - 1))
        return factor_O, weight_OI, self.shift + (self.bias - self.mean) * factor_O


class FakeQuantizedModel(nn.Module):
    """A graph, captured in eval mode, that quantizes and dequantizes in float, and can be trained.

    Dropout is off, and a BatchNorm that is not folded into a layer keeps its statistics.
    """

    def __init__(
        self,
        prepared: GraphModule,
        conv_bn: Mapping[str, ConvBnParameters],
        *,
        learn_scale: bool,
        track_ranges: bool,
        calibrated: bool = False,
    ) -> None:
        """Replace a graph's observers by fake quantization; it cannot be used afterwards.

        Layers that had a BatchNorm become :class:`ConvBnQat`. With `track_ranges` the ranges of
        activations follow batches.
        """
        super().__init__()
        self.fake_quantizers: dict[str, FakeQuantize] = {}
        """By the names of the observers that they replace; some have several names."""
        by_observer: dict[int, FakeQuantize] = {}
        for node, observer in observers_in(prepared):
            if isinstance(observer, DerivedObserverOrFakeQuantize):
                continue
            if id(observer) not in by_observer and is_constant(node.args[0]):
                tensor = prepared.get_parameter(_constant_name(node)).detach()
                channels = 1 if observer.ch_axis is None else len(tensor)
                weight = WeightFakeQuantize(observer, channels, learn_scale)
                if calibrated:
                    weight.init_from_observer_(observer, tensor)
                by_observer[id(observer)] = weight
            elif id(observer) not in by_observer:
                activation = ActivationFakeQuantize(observer, learn_scale, track_ranges)
                if calibrated:
                    activation.init_from_observer_(observer)
                by_observer[id(observer)] = activation
            self.fake_quantizers[str(node.target)] = by_observer[id(observer)]
        replacements: dict[str, nn.Module] = {**self.fake_quantizers}
        for name, observer in _bias_observers(prepared).items():
            inputs = (by_observer[id(part)] for part in observer.obs_or_fqs)
            replacements[name] = BiasFakeQuantize(observer, *inputs)
        for name, module in replacements.items():
            prepared.set_submodule(name, module)
        self.conv_bns: dict[tuple[str, str], ConvBnQat] = {}
        """By the names of weight and bias in a prepared graph."""
        for node in list(prepared.graph.nodes):
            if node.name in conv_bn:
                self._replace_layer_(prepared, node, conv_bn[node.name])
        # A new graph module: the one that torchao prepared refuses train() and eval().
        self.graph = GraphModule(prepared, prepared.graph)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the graph's outputs."""
        return self.graph(*inputs)

    def _apply(self, *args: Any, **kwargs: Any) -> FakeQuantizedModel:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        # torch.export writes the device of tensors that a graph creates into it.
        device = next(self.parameters()).device
        for node in self.graph.graph.nodes:
            if "device" in node.kwargs and node.kwargs["device"] != device:
                node.kwargs = {**node.kwargs, "device": device}
        self.graph.recompile()
        return self

    def freeze_(self, *, ranges: bool, batch_norm: bool) -> None:
        """Keep ranges or BatchNorm statistics as they are from now on."""
        for part in self.modules():
            if (ranges and isinstance(part, FakeQuantize)) or (
                batch_norm and isinstance(part, ConvBnQat)
            ):
                part.frozen.turn_on_()

    def transfer_to_(self, prepared: GraphModule, signature: Signature) -> None:
        """Put the trained weights and fake quantization, frozen, into the same prepared graph."""
        with torch.no_grad():
            self.eval()(*signature.example())  # weight ranges follow the weights as they are now
            self.freeze_(ranges=True, batch_norm=True)
            trained = self.graph.state_dict()
            for name, tensor in prepared.state_dict().items():
                if name in trained:
                    tensor.copy_(trained[name])
            for names, layer in self.conv_bns.items():
                for name, tensor in zip(names, layer.folded()[1:], strict=True):
                    prepared.get_parameter(name).copy_(tensor)
            # Training can make a bias large beside a channel's weights: as in `fit_ranges_`.
            for source_node, weight_node, bias_node in quantized_biases(prepared):
                scale, _ = self.fake_quantizers[str(source_node.target)].calculate_qparams()
                weight = self.fake_quantizers[str(weight_node.target)]
                bias_O = prepared.get_parameter(_constant_name(bias_node))
                weight.set_scale_(torch.maximum(weight.scale, smallest_weight_scale(bias_O, scale)))
        names_by_id = {id(observer): str(node.target) for node, observer in observers_in(prepared)}
        for observer in _bias_observers(prepared).values():
            observer.obs_or_fqs = [
                self.fake_quantizers[names_by_id[id(part)]] for part in observer.obs_or_fqs
            ]
        for name, fake_quantizer in self.fake_quantizers.items():
            prepared.set_submodule(name, fake_quantizer)

    def _replace_layer_(
        self, prepared: GraphModule, node: Node, parameters: ConvBnParameters
    ) -> None:
        """Compute a layer by a module that folds its BatchNorm anew in each step."""
        weight, bias = cast("tuple[Node, Node]", node.args[1:3])
        fake_quantizers = [
            prepared.get_submodule(str(part.target)) if part.op == "call_module" else nn.Identity()
            for part in (weight, bias)
        ]
        operator: Any = node.target
        # By name, as inputs, weight and bias come before them; a partial function can be copied.
        names = [argument.name for argument in operator._schema.arguments[3:]]
        options = {**dict(zip(names, node.args[3:], strict=False)), **node.kwargs}
        layer = ConvBnQat(partial(operator, **options), parameters, *fake_quantizers)
        self.conv_bns[_constant_name(weight), _constant_name(bias)] = layer
        name = f"folded_{len(self.conv_bns)}"
        prepared.add_submodule(name, layer)
        with prepared.graph.inserting_before(node):
            node.replace_all_uses_with(prepared.graph.call_module(name, (node.args[0],)))
        prepared.graph.erase_node(node)
        prepared.graph.eliminate_dead_code()


@dataclass(frozen=True)
class FreezeSchedule:
    """The shares of the training after which ranges and statistics stay; a weight constraint.

    After Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference" (2018),
    section 3.2.2. Entries of matrices and kernels that are zero stay so.
    """

    # Ranges that still move at the end would make the last weights fit another scale.

    ranges: float
    batch_norm: float

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Context of an optimizer step: restores zeros after it, and freezes what is due."""
        with KeepZeros().around(module, step, steps):  # an earlier stage may have pruned weights
            yield
        if isinstance(module, FakeQuantizedModel):
            self.apply_(module, (step + 1) / steps)

    def apply_(self, module: FakeQuantizedModel, share: float) -> None:
        """Freeze what is due after a share of the steps."""
        module.freeze_(ranges=share >= self.ranges, batch_norm=share >= self.batch_norm)

    def is_met(self, share: float) -> bool:
        """Return True: the weights of every epoch may be kept."""
        return True


def _bias_observers(prepared: GraphModule) -> dict[str, Any]:
    return {
        str(node.target): observer
        for node, observer in observers_in(prepared)
        if isinstance(observer, DerivedObserverOrFakeQuantize)
    }


def _constant_name(node: Any) -> str:
    """Return the name of a tensor that is read directly or through an observer."""
    return str(node.target if node.op == "get_attr" else node.args[0].target)


def compare_labels(trained: torch.Tensor, integer: torch.Tensor, step: float | None) -> LabelParity:
    """Count the labels that differ between two models' class scores, `(samples, classes, …)`.

    `step` is the last quantization step, in units of the outputs. StageFailed where one is NaN, or
    infinite where the other is not.
    """
    largest = largest_difference(trained, integer)
    if not math.isfinite(largest):
        raise StageFailed(
            "the integer graph's outputs are NaN or infinite at other places than the trained "
            "model's; leave the part that makes them in float with `exclude`"
        )
    differs = predicted_labels(trained) != predicted_labels(integer)
    top = trained.topk(2, dim=1).values
    margins = (top[:, 0] - top[:, 1])[differs]
    return LabelParity(
        labels=differs.numel(),
        differing=int(differs.sum()),
        near_ties=None if step is None else int((margins <= step).sum()),
        last_step=step,
        largest_difference=largest,
    )


def compare_with_trained(
    trained: nn.Module,
    integer: Predictor,
    inputs: Iterable[tuple[torch.Tensor, ...]],
    step: float | None,
    task: Task | None = None,
) -> LabelParity | None:
    """Compare a trained model, in eval mode, with its integer graph, on batches of inputs.

    None where outputs are no class scores. `step` is the last quantization step. The task says on
    which axis the classes are; without one on axis 1.
    """
    if task is not None and task.labels != "class":
        return None
    total: LabelParity | None = None
    with torch.no_grad():
        for batch in inputs:
            expected, actual = flatten_outputs(trained(*batch))[0], integer(*batch)[0]
            if task is not None:
                expected, actual = task.classes_first(expected), task.classes_first(actual)
            if expected.dim() < 2 or expected.shape[1] < 2:
                return None
            parity = compare_labels(expected, actual, step)
            total = parity if total is None else total.merge(parity)
    return total


def last_step(model: FakeQuantizedModel) -> float | None:
    """Return how far one step of the last quantization can move the margin between two outputs.

    Where outputs are quantized it is their scale; where a linear layer computes them, the scale of
    its input times the largest difference of two weights of one input. None elsewhere.
    """
    graph = model.graph
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    node: Node = outputs[0] if isinstance(outputs, tuple | list) else outputs
    while node.target in SHAPE_ONLY:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is LINEAR:
        source, weight = (_fake_quantizer(model, part) for part in node.args[:2])
        if isinstance(weight, WeightFakeQuantize) and source is not None:
            name = node.args[1].args[0].target  # type: ignore[union-attr]
            weight_OI = weight.quantized(graph.get_parameter(str(name)).detach())
            spread = (weight_OI.amax(0) - weight_OI.amin(0)).max()
            return float((source.scale * spread).detach())
        return None
    last = _fake_quantizer(model, node)
    return None if last is None else float(last.scale.detach())


def _fake_quantizer(model: FakeQuantizedModel, node: object) -> FakeQuantize | None:
    if not (isinstance(node, Node) and node.op == "call_module"):
        return None
    module = model.graph.get_submodule(str(node.target))
    return module if isinstance(module, FakeQuantize) else None
