"""PackedModel: weights of a few bits by the names of a module's parameters, read part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from compress.artifacts.artifact import STREAMED, Step
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.hf_folder import FACTORY
from compress.checkpoint.state_dict import StoredTensor, Weights
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.forward import Predictor, opened_model, torch_predictor
from compress.common.lazy_modules import torch

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.recipe import Recipe

TABLE = ".rows"  # follows the name of a parameter whose integers are looked up, and not multiplied
PARTS = (".packed", ".scale", ".zero_point")
FACTOR = ".input_factor"
"""Follows the name of a module whose input is multiplied, channel by channel, before it is read."""
ROUNDS = "rounds_activations"
"""Fact: whether packed linear layers read activations rounded to 8 bits, by groups."""
LARGEST = 127  # largest integer of an activation; the range of each group is symmetric
SMALLEST_RANGE = 2.0**-100
"""Groups of smaller activations become zeros; the reciprocal of a still smaller range overflows."""


class PackedModel(GraphModel):
    """The result of `quantize_weights` for a model whose weights stay on disk: no graph."""

    kind: ClassVar[str] = "packed"
    payload: ClassVar[str] = "weights.safetensors"
    opened_with: ClassVar[tuple[str, ...]] = ("compress.checkpoint.safetensors_io",)

    @classmethod
    def create_packed(
        cls,
        path: Path,
        source: EagerModel,
        state: Weights,
        *,
        lineage: tuple[Step, ...],
        facts: dict[str, Any],
    ) -> PackedModel:
        """Write an artifact of tensors that may be on disk, one in memory at a time."""
        from compress.checkpoint.safetensors_io import write_safetensors

        with cls.atomic_write(
            path,
            source.signature,
            recipe=source.recipe,
            lineage=lineage,
            facts={**facts, STREAMED: True},
            carried=source.carried_files(),
        ) as partial_folder:
            write_safetensors(partial_folder / cls.payload, state)
        return cls.from_directory(path)

    def program(self, device: str = "cpu") -> NoReturn:
        """Refuse: such a model has no graph."""
        raise StageFailed(
            "was quantized block by block and has no graph, which would hold all of its weights; "
            "export_compressed_tensors takes it, and export_genai where its floats fit in memory"
        )

    @property
    def recipe(self) -> Recipe:
        """How to build the float module."""
        recipe = self.manifest.recipe
        if recipe is None or recipe.factory != FACTORY:  # no other has its weights on disk
            raise ArtifactInvalid(f"{self.path}: the manifest needs a recipe of {FACTORY}")
        return recipe

    def skeleton(self) -> torch.nn.Module:
        """Return the float module with its parameters on the meta device."""
        return _skeleton_of(self.recipe)

    def stored(self) -> dict[str, StoredTensor]:
        """Return the tensors of the file, still on disk; raise ArtifactInvalid for another file."""
        from compress.checkpoint.safetensors_io import read_safetensors

        self.verify_cached()
        return read_safetensors(self.payload_path)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Open the model as a predictor that dequantizes a layer when it is called."""
        with torch_predictor(self.load(device), device, threads) as predict:
            yield predict

    def load(self, device: str = "cpu") -> torch.nn.Module:
        """Return a module that reads and dequantizes a layer's weights when it is called."""
        return packed_module(self.recipe, self.stored(), device, rounds=bool(self.fact(ROUNDS)))

    def parameters(self) -> int:
        """Count the weights, tied ones once."""
        return sum(p.numel() for p in self.skeleton().parameters())

    def macs(self, sizes: Mapping[str, int] | None = None) -> int:
        """Count multiply-accumulates for one sample."""
        from compress.graph.flops import count_macs

        return count_macs(self.load(), self.signature.example(batch=1, sizes=sizes))


def _skeleton_of(recipe: Recipe) -> torch.nn.Module:
    from compress.artifacts.meta_init import build_skeleton

    module = build_skeleton(recipe, None)
    if module is None:
        raise ArtifactInvalid(f"{recipe.factory!r} cannot build the model without its weights")
    return module.eval()


def packed_module(
    recipe: Recipe, stored: Mapping[str, StoredTensor], device: str = "cpu", *, rounds: bool
) -> torch.nn.Module:
    """Return a module that dequantizes layers when called; `rounds` activations to 8 bits."""
    from compress.artifacts.meta_init import stream_weights_

    module = _skeleton_of(recipe)
    stream_weights_(module, _prepare_(module, stored, device, rounds=rounds), device)
    return module


class PackedWeight(NamedTuple):
    """Integers of a weight, two in a byte where they have 4 bits, the earlier one lower."""

    packed: torch.Tensor
    """Bytes, `(outputs, inputs · bits / 8)`; of experts `(experts, outputs, …)`, as all parts."""
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
        return self.packed.shape[-1] * 8 // self.bits // self.scale.shape[-1]

    def integers(self) -> torch.Tensor:
        """Return the integers, one in a byte."""
        if self.bits == 8:
            return self.packed
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(-2)

    def dequantized(self) -> torch.Tensor:
        """Return the floats that the integers stand for."""
        grouped = self.integers().view(*self.scale.shape, -1).float()
        centred = grouped.sub_(self.zero_point.float()[..., None])
        return centred.mul_(self.scale[..., None]).flatten(-2)


class PackedWeights(Mapping[tuple[str, bool], PackedWeight]):
    """Name of a weight, and whether it is a table → its integers, read at each access."""

    def __init__(self, stored: Mapping[str, StoredTensor], stems: dict[tuple[str, bool], Any]):
        self._stored, self._stems = stored, stems

    def __getitem__(self, key: tuple[str, bool]) -> PackedWeight:
        stem, bits = self._stems[key]
        packed, scale, zero_point = (self._stored[stem + part].read() for part in PARTS)
        return PackedWeight(packed, scale, zero_point, bits, key[1])

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        return iter(self._stems)

    def __len__(self) -> int:
        return len(self._stems)

    def dequantized(self, key: tuple[str, bool]) -> torch.Tensor:
        """Return a weight's floats."""
        return self[key].dequantized()

    def format_of(self, key: tuple[str, bool]) -> tuple[int, int]:
        """Return bits and group size of a weight, without reading it."""
        stem, bits = self._stems[key]
        numbers = self._stored[stem + PARTS[0]].shape[-1] * 8 // bits
        return bits, numbers // self._stored[stem + PARTS[1]].shape[-1]


def packed_weights(module: torch.nn.Module, stored: Mapping[str, StoredTensor]) -> PackedWeights:
    """Return the packed weights of a file for a module's parameters; tied ones by all names."""
    stems: dict[tuple[str, bool], Any] = {}
    for names, parameter in shared_parameters(module):
        for name in names:
            for suffix, is_table in (("", False), (TABLE, True)):
                if (stem := name + suffix) + PARTS[0] in stored:
                    bits = stored[stem + PARTS[0]].shape[-1] * 8 // parameter.shape[-1]
                    stems |= {(own, is_table): (stem, bits) for own in names}
    return PackedWeights(stored, stems)


def shared_parameters(module: torch.nn.Module) -> list[tuple[list[str], torch.nn.Parameter]]:
    """Return each parameter once, with all its names: tied ones have several."""
    shared: dict[int, tuple[list[str], torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [*shared.values()]


def _prepare_(
    module: torch.nn.Module, stored: Mapping[str, StoredTensor], device: str, *, rounds: bool
) -> dict[str, StoredTensor]:
    """Let layers round or multiply their inputs, and return all weights as floats, on disk."""
    floats, weights = dict(stored), packed_weights(module, stored)
    for names, parameter in shared_parameters(module):
        at = next((name for name in names if name in stored), names[0])
        for name in names:
            layer = module.get_submodule(name.rpartition(".")[0])
            key = (name, isinstance(layer, torch.nn.Embedding))
            if key in weights:
                read = partial(weights.dequantized, key)
                floats[name] = StoredTensor(tuple(parameter.shape), torch.float32, read)
                if rounds and not key[1] and parameter.dim() == 2:
                    group_size = weights.format_of(key)[1]
                    layer.register_forward_pre_hook(partial(_round_input, group_size))
            elif at in stored:
                floats[name] = stored[at]
    for name, layer in module.named_modules():
        if name + FACTOR in stored:
            # Hooks run in reverse order where they are put first: the factor comes before rounding.
            factor = stored[name + FACTOR].read().to(device)
            layer.register_forward_pre_hook(partial(_multiply_input, factor), prepend=True)
    return floats


def _round_input(group_size: int, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (round_activations(args[0], group_size), *args[1:])


def _multiply_input(factor: torch.Tensor, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] * factor, *args[1:])


def round_activations(features: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round activations to 8 bits, each `group_size` numbers of a row with a scale of their own."""
    groups = torch.unflatten(features, -1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_RANGE)
    integers = (groups * (largest.reciprocal() * LARGEST)).round()
    floats: torch.Tensor = integers * (largest * (1 / LARGEST))
    return floats.flatten(-2)
