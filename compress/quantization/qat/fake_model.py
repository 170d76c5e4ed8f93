"""A float model that rounds as the integer one will, and becomes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from compress.quantization.pt2e.observer_ranges import least_weight_scale, rounded_biases
from compress.quantization.pt2e.quantizer import is_constant
from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize
from compress.quantization.ptq.calibrate import integer_program
from compress.quantization.qat.conv_bn_qat import BnParameters, ConvBnQat, product_of
from compress.quantization.qat.fake_quantize import (
    ActivationFakeQuantize,
    BiasFakeQuantize,
    FakeQuantize,
    WeightFakeQuantize,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.export import ExportedProgram

    from compress.common.signature import Signature


class FakeQuantized(nn.Module):
    """A graph that rounds in floats, and can be trained.

    It is traced in eval mode: dropout is off, and a BatchNorm that is folded into no layer keeps
    its statistics.
    """

    def __init__(
        self,
        prepared: GraphModule,
        normed: Mapping[str, BnParameters],
        *,
        learns: bool,
        follows: bool,
        calibrated: bool = False,
    ) -> None:
        """Put grids where observers are, and layers with BatchNorm where it was folded.

        Args:
            prepared: a graph with observers; it is used up.
            normed: the layers that had a BatchNorm, by the names of their nodes.
            learns: whether steps are trained.
            follows: whether the ranges of activations follow batches.
            calibrated: whether the observers know the ranges to begin with.
        """
        super().__init__()
        self.grids = _grids(prepared, learns, follows, calibrated)
        """By the names of the observers whose places they take."""
        grids: dict[str, nn.Module] = {**self.grids, **_bias_grids(prepared, self.grids)}
        for name, grid in grids.items():
            prepared.set_submodule(name, grid)
        self.folded: dict[tuple[str, str], ConvBnQat] = {}
        """By the names that weight and bias have in a prepared graph."""
        for node in list(prepared.graph.nodes):
            if node.name in normed:
                self._unfold_(prepared, node, normed[node.name])
        # A new graph module: the one that torchao prepared refuses train() and eval().
        self.graph = GraphModule(prepared, prepared.graph)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the graph's outputs."""
        return self.graph(*inputs)

    def _apply(self, *args: Any, **kwargs: Any) -> FakeQuantized:
        """Move the module; tensors that its graph makes are made where it is then."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        device = next(self.parameters()).device
        for node in self.graph.graph.nodes:
            if "device" in node.kwargs and node.kwargs["device"] != device:
                node.kwargs = {**node.kwargs, "device": device}
        self.graph.recompile()
        return self

    def freeze_(self, *, ranges: bool, batch_norm: bool) -> None:
        """Let ranges or statistics stay as they are from now on, in place."""
        for part in self.modules():
            if (ranges and isinstance(part, FakeQuantize)) or (
                batch_norm and isinstance(part, ConvBnQat)
            ):
                part.frozen.turn_on_()

    def converted(self, prepared: GraphModule, signature: Signature) -> ExportedProgram:
        """Return the integer graph, and freeze this one as it is.

        Args:
            prepared: the same model's graph, prepared anew; it is used up.
            signature: the model's interface.
        """
        with torch.no_grad():
            self.eval()(*signature.example())  # the grids of weights span them as they are now
        self.freeze_(ranges=True, batch_norm=True)
        self._put_weights_(prepared)
        self._make_room_for_biases_(prepared)
        names = _names(prepared)
        for observer in _bias_observers(prepared).values():
            observer.obs_or_fqs = [self.grids[names[id(o)]] for o in observer.obs_or_fqs]
        for name, grid in self.grids.items():
            prepared.set_submodule(name, grid)
        return integer_program(prepared, signature)

    def _unfold_(self, prepared: GraphModule, node: Node, normed: BnParameters) -> None:
        """Compute a layer by a module that folds the BatchNorm anew in each step, in place."""
        weight, bias = cast("tuple[Node, Node]", node.args[1:3])
        grids = [
            prepared.get_submodule(str(part.target)) if part.op == "call_module" else nn.Identity()
            for part in (weight, bias)
        ]
        layer = ConvBnQat(product_of(node), normed, *grids)
        self.folded[_constant(weight), _constant(bias)] = layer
        name = f"folded_{len(self.folded)}"
        prepared.add_submodule(name, layer)
        with prepared.graph.inserting_before(node):
            node.replace_all_uses_with(prepared.graph.call_module(name, (node.args[0],)))
        prepared.graph.erase_node(node)
        prepared.graph.eliminate_dead_code()

    @torch.no_grad()
    def _put_weights_(self, prepared: GraphModule) -> None:
        own = self.graph.state_dict()
        for name, tensor in prepared.state_dict().items():
            if name in own:
                tensor.copy_(own[name])
        for names, layer in self.folded.items():
            for name, tensor in zip(names, layer.folded(), strict=True):
                prepared.get_parameter(name).copy_(tensor)

    @torch.no_grad()
    def _make_room_for_biases_(self, prepared: GraphModule) -> None:
        """Make the grids of weights so coarse that each bias fits its 32 bits, in place.

        Training can make a bias large beside a channel's weights; see `fit_ranges_`.
        """
        for nodes in rounded_biases(prepared):
            source, weight = (self.grids[str(part.target)] for part in nodes[:2])
            bias_O = prepared.get_parameter(_constant(nodes[2]))
            least_O = least_weight_scale(bias_O, source.calculate_qparams()[0])
            weight.set_scale_(torch.maximum(weight.scale, least_O))


def _observers(prepared: GraphModule) -> list[tuple[Node, Any]]:
    """Return the nodes of observers, with these; some observe several nodes."""
    nodes = [node for node in prepared.graph.nodes if node.op == "call_module"]
    return [(node, prepared.get_submodule(str(node.target))) for node in nodes]


def _grids(
    prepared: GraphModule, learns: bool, follows: bool, calibrated: bool
) -> dict[str, FakeQuantize]:
    """Return a grid for each observer of an activation or weight, by name."""
    made: dict[int, FakeQuantize] = {}
    grids = {}
    for node, observer in _observers(prepared):
        if isinstance(observer, DerivedObserverOrFakeQuantize):
            continue
        if id(observer) not in made:
            made[id(observer)] = _grid(prepared, node, observer, learns, follows)
            if calibrated:
                _begin_(made[id(observer)], prepared, node, observer)
        grids[str(node.target)] = made[id(observer)]
    return grids


def _grid(
    prepared: GraphModule, node: Node, observer: Any, learns: bool, follows: bool
) -> FakeQuantize:
    if not is_constant(node.args[0]):
        return ActivationFakeQuantize(observer, learns, follows)
    each = observer.ch_axis is not None
    return WeightFakeQuantize(observer, len(_weight(prepared, node)) if each else 1, learns)


def _begin_(grid: FakeQuantize, prepared: GraphModule, node: Node, observer: Any) -> None:
    if isinstance(grid, WeightFakeQuantize):
        grid.begin_(observer, _weight(prepared, node))
    elif isinstance(grid, ActivationFakeQuantize):
        grid.begin_(observer)


def _weight(prepared: GraphModule, node: Node) -> torch.Tensor:
    return prepared.get_parameter(_constant(node)).detach()


def _bias_grids(
    prepared: GraphModule, grids: Mapping[str, FakeQuantize]
) -> dict[str, BiasFakeQuantize]:
    names = _names(prepared)
    return {
        name: BiasFakeQuantize(observer, *(grids[names[id(o)]] for o in observer.obs_or_fqs))
        for name, observer in _bias_observers(prepared).items()
    }


def _bias_observers(prepared: GraphModule) -> dict[str, Any]:
    return {
        str(node.target): observer
        for node, observer in _observers(prepared)
        if isinstance(observer, DerivedObserverOrFakeQuantize)
    }


def _names(prepared: GraphModule) -> dict[int, str]:
    """Return a name of each observer, by its identity."""
    return {id(observer): str(node.target) for node, observer in _observers(prepared)}


def _constant(node: Any) -> str:
    """Return the name of a weight that is read as it is, or rounded."""
    return str(node.target if node.op == "get_attr" else node.args[0].target)
