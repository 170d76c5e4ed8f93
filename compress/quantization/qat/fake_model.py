"""The fake-quantized model: a trainable float graph that rounds as the integer graph will."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from compress.quantization.pt2e.observer_ranges import quantized_biases, smallest_weight_scale
from compress.quantization.pt2e.quantizer import is_constant
from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize
from compress.quantization.qat.conv_bn_qat import ConvBnParameters, ConvBnQat, operator_of
from compress.quantization.qat.fake_quantize import (
    ActivationFakeQuantize,
    BiasFakeQuantize,
    FakeQuantize,
    WeightFakeQuantize,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.common.signature import Signature


class FakeQuantizedModel(nn.Module):
    """A graph that quantizes and dequantizes in float, and can be trained.

    It is captured in eval mode: dropout is off, and a BatchNorm that is not folded into a layer
    keeps its statistics.
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
        """Replace observers by fake quantization, and folded layers by :class:`ConvBnQat`.

        Args:
            prepared: a graph with observers; it cannot be used afterwards.
            conv_bn: the layers that had a BatchNorm, by the names of their nodes.
            learn_scale: whether scales are trained.
            track_ranges: whether the ranges of activations follow batches.
            calibrated: whether the observers are calibrated.
        """
        super().__init__()
        self.fake_quantizers: dict[str, FakeQuantize] = {}
        """By the names of the observers that they replace; some have several names."""
        by_observer: dict[int, FakeQuantize] = {}
        for node, observer in _observers(prepared):
            if isinstance(observer, DerivedObserverOrFakeQuantize):
                continue
            if id(observer) not in by_observer:
                by_observer[id(observer)] = _replace_observer(
                    prepared, node, observer, learn_scale, track_ranges, calibrated
                )
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
        """Move the module; tensors that its graph creates are then created on the new device."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
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
        """Put the trained weights and fake quantization into a graph, for `convert`; freeze both.

        Args:
            prepared: the same model's graph, prepared again.
            signature: the model's interface.
        """
        with torch.no_grad():
            self.eval()(*signature.example())  # weight ranges follow the weights as they are now
            self.freeze_(ranges=True, batch_norm=True)
            trained = self.graph.state_dict()
            for name, tensor in prepared.state_dict().items():
                if name in trained:
                    tensor.copy_(trained[name])
            for names, layer in self.conv_bns.items():
                for name, tensor in zip(names, layer.folded(), strict=True):
                    prepared.get_parameter(name).copy_(tensor)
            # Training can make a bias large beside a channel's weights: as in `fit_ranges_`.
            for source_node, weight_node, bias_node in quantized_biases(prepared):
                scale, _ = self.fake_quantizers[str(source_node.target)].calculate_qparams()
                weight = self.fake_quantizers[str(weight_node.target)]
                bias_O = prepared.get_parameter(_constant_name(bias_node))
                least_O = smallest_weight_scale(bias_O, scale)
                weight.set_scale_(torch.maximum(weight.scale, least_O))
        names_by_id = {id(observer): str(node.target) for node, observer in _observers(prepared)}
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
        layer = ConvBnQat(operator_of(node), parameters, *fake_quantizers)
        self.conv_bns[_constant_name(weight), _constant_name(bias)] = layer
        name = f"folded_{len(self.conv_bns)}"
        prepared.add_submodule(name, layer)
        with prepared.graph.inserting_before(node):
            node.replace_all_uses_with(prepared.graph.call_module(name, (node.args[0],)))
        prepared.graph.erase_node(node)
        prepared.graph.eliminate_dead_code()


def _observers(prepared: GraphModule) -> list[tuple[Node, Any]]:
    """Return the `call_module` nodes with their observers; nodes may share an observer."""
    nodes = [node for node in prepared.graph.nodes if node.op == "call_module"]
    return [(node, prepared.get_submodule(str(node.target))) for node in nodes]


def _bias_observers(prepared: GraphModule) -> dict[str, Any]:
    return {
        str(node.target): observer
        for node, observer in _observers(prepared)
        if isinstance(observer, DerivedObserverOrFakeQuantize)
    }


def _replace_observer(
    prepared: GraphModule,
    node: Node,
    observer: Any,
    learn_scale: bool,
    track_ranges: bool,
    calibrated: bool,
) -> FakeQuantize:
    """Create the fake quantization of an observed weight or activation."""
    if not is_constant(node.args[0]):
        activation = ActivationFakeQuantize(observer, learn_scale, track_ranges)
        if calibrated:
            activation.init_from_observer_(observer)
        return activation
    tensor = prepared.get_parameter(_constant_name(node)).detach()
    channels = 1 if observer.ch_axis is None else len(tensor)
    weight = WeightFakeQuantize(observer, channels, learn_scale)
    if calibrated:
        weight.init_from_observer_(observer, tensor)
    return weight


def _constant_name(node: Any) -> str:
    """Return the name of a tensor that is read directly or through an observer."""
    return str(node.target if node.op == "get_attr" else node.args[0].target)
