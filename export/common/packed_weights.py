"""Weights of a few bits, as `quantize_weights` leaves them in a graph, by a module's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context

PREFIXES = ("", "module.")
"""What names of a graph's weights begin with: tracing wraps modules that return a mapping."""
ROUND = torch.ops.aten.round.default


class PackedWeight(NamedTuple):
    """Integers of a weight, two in a byte where they have 4 bits, the earlier one lower."""

    packed: torch.Tensor
    """Bytes, `(outputs, inputs · bits / 8)`."""
    scale: torch.Tensor
    """Scale of each group of inputs, `(outputs, groups)`."""
    zero_point: torch.Tensor
    """Zero point of each group, `(outputs, groups)`: an integer, or a float between two."""
    bits: int
    is_table: bool
    """Whether rows are looked up, as an embedding's, and not multiplied."""

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.packed.shape[1] * 8 // self.bits // self.scale.shape[1]

    def integers(self) -> torch.Tensor:
        """Return the integers, one in a byte."""
        if self.bits == 8:
            return self.packed
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)

    def dequantized(self) -> torch.Tensor:
        """Return the floats that the integers stand for."""
        integers, groups = self.integers(), self.scale.shape[1]
        grouped = integers.view(len(integers), groups, -1).float()
        zeros = self.zero_point.float()[..., None]
        return ((grouped - zeros) * self.scale[..., None]).flatten(1)


class DecoderWeights(NamedTuple):
    """A module of transformers, and the weights that a stage left for it."""

    module: nn.Module
    """The float model; its own weights were replaced by those of the graph that are float."""
    packed: dict[tuple[str, bool], PackedWeight]
    """Name of a weight, and whether it is read as a table → its integers."""
    rounds_activations: bool
    """Whether packed linear layers read activations rounded to 8 bits, by groups."""

    def use_(self, floats: Mapping[tuple[str, bool], torch.Tensor]) -> None:
        """Give layers of the module these weights, by the keys of `packed`."""
        for (name, is_table), values in floats.items():
            layer = self.module.get_submodule(name.removesuffix(".weight"))
            if is_table == isinstance(layer, torch.nn.Embedding):
                layer.weight = torch.nn.Parameter(values, requires_grad=False)


def decoder_weights(model: EagerModel | GraphModel, context: Context, title: str) -> DecoderWeights:
    """Return the transformers module behind a model, and the model's weights for it.

    Raises:
        StageFailed: the module is none of transformers, or the graph was quantized otherwise than
            by `quantize_weights`.
    """
    module = _transformers_module(model, context, title)
    if isinstance(model, EagerModel):
        return DecoderWeights(module, {}, False)
    program = model.program()
    state = program.state_dict
    is_packed = any(name.endswith("_packed") for name in state)
    # Every quantization stage records how near to the float model its graph is.
    if "fidelity" in model.manifest.facts and not is_packed:
        raise StageFailed(
            f"{title}: takes float models and those of quantize_weights, found a graph that was "
            "quantized otherwise"
        )
    packed: dict[tuple[str, bool], PackedWeight] = {}
    for names, parameter in _shared_parameters(module):
        found = False
        for name in (prefix + own for own in names for prefix in PREFIXES):
            stem = name.replace(".", "_")
            for suffix, is_table in ((stem, False), (f"{stem}_rows", True)):
                if f"{suffix}_packed" in state:
                    integers = state[f"{suffix}_packed"]
                    scale, zeros = (state[f"{suffix}_{p}"] for p in ("scale", "zero_point"))
                    bits = integers.shape[1] * 8 // parameter.shape[1]
                    weight = PackedWeight(integers, scale, zeros, bits, is_table)
                    packed |= {(own, is_table): weight for own in names}
                    found = True
            if name in state:
                if state[name].shape != parameter.shape:
                    raise StageFailed(
                        f"{title}: {names[0]} has shape {list(state[name].shape)} in the graph and "
                        f"{list(parameter.shape)} in the model that it was made from"
                    )
                parameter.data.copy_(state[name])
                found = True
        if not found:
            raise StageFailed(f"{title}: the graph has no weight {names[0]}")
    rounds = any(node.target is ROUND for node in program.graph.nodes)
    return DecoderWeights(module, packed, rounds)


def _shared_parameters(module: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Return each parameter once, with all its names: tied ones have several."""
    shared: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [*shared.values()]


def _transformers_module(model: EagerModel | GraphModel, context: Context, title: str) -> Any:
    """Return the last eager model before a graph, as transformers' own class calls it."""
    import sys

    from compress.core.gate_kinds.baselines import nearest_float_model

    source = nearest_float_model(model, context)
    module: Any = source.load() if isinstance(source, EagerModel) else None
    transformers = sys.modules.get("transformers")
    own = next((kind for kind in type(module).__mro__ if _is_of(transformers, kind)), None)
    if module is None or own is None:
        raise StageFailed(
            f"{title}: takes a language model of transformers, found {type(module).__name__}; "
            "load it from a Hugging Face folder, or return it from the factory"
        )
    module.__class__ = own  # without the adapter of the call
    return module.eval()


def _is_of(transformers: Any, kind: type) -> bool:
    """Whether a class is a model of transformers, and no subclass made here."""
    return transformers is not None and getattr(transformers, kind.__name__, None) is kind
