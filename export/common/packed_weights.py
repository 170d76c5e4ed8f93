"""Weights of a few bits, as `quantize_weights` leaves them in a graph, by a module's names."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compress.artifacts.carried_files import CONFIG
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import CallByName, KeepBlocks, KeepIndices
from compress.artifacts.streaming.packed_model import (
    FACTOR,
    ROUNDS,
    PackedModel,
    PackedWeight,
    packed_weights,
    shared_parameters,
)
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.tensor_difference import relative_error

if TYPE_CHECKING:
    from torch import nn

    from compress.artifacts.graph_model import GraphModel
    from compress.common.signature import Signature
    from compress.core.context import Context

PREFIXES = ("", "module.")
"""What names of a graph's weights begin with: tracing wraps modules that return a mapping."""
ROUND = torch.ops.aten.round.default


class DecoderWeights(NamedTuple):
    """A module of transformers, and the weights that a stage left for it."""

    module: nn.Module
    """The float model; its own weights were replaced by those of the graph that are float."""
    packed: Mapping[tuple[str, bool], PackedWeight]
    """Name of a weight, and whether it is read as a table → its integers."""
    rounds_activations: bool
    """Whether packed linear layers read activations rounded to 8 bits, by groups."""
    changed_config: Mapping[str, Any] | None = {}
    """Entries of the config that pruning changed; None where no config has the module's widths."""

    def scores_error(self, opened: Any, signature: Signature) -> float:
        """Return how far an opened module's scores of example inputs differ from this module's."""
        names, inputs = (spec.name for spec in signature.inputs), signature.example()
        with torch.inference_mode():
            expected = self.module(**dict(zip(names, inputs, strict=True))).logits
            return relative_error(expected, opened(*inputs)[0])

    def write_config(self, folder: Path) -> None:
        """Give a folder that carries a config one of the module's widths, or none."""
        file = folder / CONFIG
        if self.changed_config == {} or not file.exists():
            return
        content = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        if self.changed_config is not None:
            content |= self.changed_config
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def use_(self, floats: Mapping[tuple[str, bool], torch.Tensor]) -> None:
        """Give layers of the module these weights, by the keys of `packed`."""
        for (name, is_table), values in floats.items():
            layer = self.module.get_submodule(name.removesuffix(".weight"))
            if is_table == isinstance(layer, torch.nn.Embedding):
                layer.weight = torch.nn.Parameter(values, requires_grad=False)


def decoder_weights(
    model: EagerModel | GraphModel, context: Context, title: str, *, by_config: bool = True
) -> DecoderWeights:
    """Return the transformers module behind a model, and the model's weights for it.

    Weights of a few bits that stay on disk are on the meta device there, and are read when they are
    asked for. With `by_config` the format builds the model by its config, which then has to have
    the widths that pruning left. Raise StageFailed where it has not, for modules that are none of
    transformers, and for graphs quantized otherwise than by `quantize_weights`.
    """
    if isinstance(model, PackedModel):
        return _streamed_weights(model, title)
    module, changed = _transformers_module(model, context, title, by_config=by_config)
    if isinstance(model, EagerModel):
        return DecoderWeights(module, {}, False, changed)
    program = model.program()
    state = program.state_dict
    is_packed = any(name.endswith("_packed") for name in state)
    # Every quantization stage records how near to the float model its graph is.
    if "fidelity" in model.manifest.facts and not is_packed:
        raise StageFailed(
            f"{title}: takes float models and those of quantize_weights, found a graph that was "
            "quantized otherwise"
        )
    if any(name.endswith("_smoothing") for name in state):
        raise StageFailed(_multiplied(title, "a layer, such as down_proj"))
    packed: dict[tuple[str, bool], PackedWeight] = {}
    for names, parameter in shared_parameters(module):
        found = False
        for name in (prefix + own for own in names for prefix in PREFIXES):
            stem = name.replace(".", "_")
            for suffix, is_table in ((stem, False), (f"{stem}_rows", True)):
                if f"{suffix}_packed" in state:
                    integers = state[f"{suffix}_packed"]
                    scale, zeros = (state[f"{suffix}_{p}"] for p in ("scale", "zero_point"))
                    bits = integers.shape[-1] * 8 // parameter.shape[-1]
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
    return DecoderWeights(module, packed, rounds, changed)


def _streamed_weights(model: PackedModel, title: str) -> DecoderWeights:
    module, stored = model.skeleton(), model.stored()
    for name in stored:
        if name.endswith(FACTOR):
            raise StageFailed(_multiplied(title, name.removesuffix(FACTOR)))
    packed = packed_weights(module, stored)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for names, parameter in shared_parameters(module):
        at = next((name for name in names if name in stored), None)
        value = parameter if at is None else torch.nn.Parameter(stored[at].read(), False)
        for name in names:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = value
    buffers = {k: stored[k].read() for k in module.state_dict() if k not in parameters}
    module.load_state_dict(buffers, strict=False)
    return DecoderWeights(_as_transformers(module, title), packed, bool(model.fact(ROUNDS)))


def _multiplied(title: str, module: str) -> str:
    return (
        f"{title}: method awq multiplies the input of {module}, which nothing before it can absorb "
        "and the format has no place for; exclude that layer, or use gptq"
    )


def _transformers_module(
    model: EagerModel | GraphModel, context: Context, title: str, *, by_config: bool
) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the last eager model before a graph, and what pruning changed of its config."""
    from compress.artifacts.libraries.transformers_folder import described_by_config
    from compress.core.gates.runtime import nearest_float_model

    source = nearest_float_model(model, context)
    if not isinstance(source, EagerModel):
        return _as_transformers(None, title), {}
    edits = {type(edit) for edit in source.recipe.edits}
    if not edits & {KeepIndices, KeepBlocks}:
        return _as_transformers(source.load(), title), {}
    try:
        changed, module = described_by_config(source)
    except (ArtifactInvalid, StageFailed) as error:
        if by_config and KeepIndices in edits:
            raise StageFailed(f"{title}: {error}") from error
        return _as_transformers(source.load(), title), None
    return _as_transformers(module, title), changed


def _as_transformers(module: Any, title: str) -> Any:
    """Return a module with transformers' own class, without the adapter of the call."""
    transformers = sys.modules.get("transformers")
    # A class of transformers, and no subclass made here.
    kinds = (k for k in type(module).__mro__ if k is getattr(transformers, k.__name__, None))
    own = next(kinds, None)
    if module is None or own is None:
        raise StageFailed(
            f"{title}: takes a language model of transformers, found {type(module).__name__}; "
            "load it from a Hugging Face folder, or return it from the factory"
        )
    module.__class__ = own
    return module.eval()


def call_by_name(module: Any, signature: Signature) -> Any:
    """Return a module of transformers that now takes a signature's inputs, and returns scores."""
    names = tuple(spec.name for spec in signature.inputs)
    CallByName(inputs=names, outputs=("logits",)).apply_(module)
    return module
