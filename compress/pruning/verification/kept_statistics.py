"""Run a module whose statistics over channels leave out those that a slice removes.

LayerNorm of a sliced width takes mean and variance over fewer channels than LayerNorm of the masked
width, whose zeros count. So the twin that such a slice is compared with is the masked module's
exported graph, in which each normalisation gets the kept channels alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from compress.pruning.dependency.graph import export_graph, label_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.export import ExportedProgram

    from compress.pruning.dependency.channel_groups import Kept


class KeptStatisticsTwin:
    """A module's exported graph, which runs on any weights for inputs of the same shapes."""

    def __init__(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Export the module.

        Raises:
            StageFailed: torch.export cannot trace it.
        """
        self._program = export_graph(module, inputs)
        self._axes = label_axes(self._program, module, across_norms=True)

    def bind(self, masked: nn.Module, kept: Kept) -> nn.Module:
        """Return the graph with a masked module's weights, whose norms see the kept channels."""
        removed = [torch.tensor([], dtype=torch.int64)]
        for (tensor, axis), classes in self._axes.classes.items():
            if axis in kept.get(tensor, {}):
                is_removed = torch.ones(len(classes), dtype=torch.bool)
                is_removed[list(kept[tensor][axis])] = False
                removed.append(classes[is_removed])
        seen = {}
        for node, (axis, classes) in self._axes.statistics.items():
            stays = ~torch.isin(classes, torch.cat(removed))
            if not stays.all():
                seen[node] = axis, stays.nonzero().flatten()
        return _BoundGraph(self._program, masked, seen)


class _BoundGraph(nn.Module):
    """Interprets an exported graph with a module's weights."""

    def __init__(
        self,
        program: ExportedProgram,
        weights: nn.Module,
        seen: Mapping[str, tuple[int, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.weights = weights
        self._program, self._seen = program, seen

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = {
            **self._program.constants,
            **dict(self.weights.named_parameters(remove_duplicate=False)),
            **dict(self.weights.named_buffers(remove_duplicate=False)),
        }
        given = iter(inputs)
        arguments = [
            next(given) if spec.kind is InputKind.USER_INPUT else tensors[str(spec.target)]
            for spec in self._program.graph_signature.input_specs
        ]
        outputs: tuple[torch.Tensor, ...] = _KeptStatistics(
            self._program.graph_module, self._seen
        ).run(*arguments)
        return outputs


class _KeptStatistics(fx.Interpreter):
    """Gives the operators that take statistics over channels only some of these."""

    def __init__(
        self, module: fx.GraphModule, seen: Mapping[str, tuple[int, torch.Tensor]]
    ) -> None:
        """Interpret ``module``; ``seen`` has node → the axis of its input and the indices on it."""
        super().__init__(module)
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator of the graph."""
        if n.name not in self._seen:
            return super().run_node(n)
        axis, indices = self._seen[n.name]
        positional, keywords = self.fetch_args_kwargs_from_env(n)
        schema = n.target._schema  # type: ignore[union-attr]  # only ATen operators take statistics
        names = [argument.name for argument in schema.arguments]
        arguments = {**dict(zip(names, positional, strict=False)), **keywords}
        whole = arguments[names[0]]
        arguments[names[0]] = whole.index_select(axis, indices)
        shape = arguments.get("normalized_shape")
        first = whole.dim() - len(shape) if shape else axis
        if shape:
            arguments["normalized_shape"] = list(arguments[names[0]].shape[first:])
        for name in ("weight", "bias"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name].index_select(axis - first, indices)
        result = n.target(**arguments)  # type: ignore[operator]
        if "eps" not in names:  # a reduction
            return result
        return torch.zeros_like(whole).index_copy(axis, indices, result)
