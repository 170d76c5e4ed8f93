"""The spaces: which model, on which data, and what is decided about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quantizer.sources import HERE as NETS

from compress import Context, Signature, TensorSpec, Train
from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import KeepBlocks, Recipe
from compress.data.splits import DataReference
from compress.pruning.loss_increases import WidthSpace
from pipelines.config.auto_settings import AutoSettings

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from pipelines.config.auto_settings import Format

HERE = Path(__file__).parent
IMAGE = TensorSpec(name="image", shape=("batch", 1, 8, 8))
IDS = TensorSpec(name="ids", shape=("batch", 48), dtype="int64")


@dataclass(frozen=True)
class Space:
    """A model, and the choices of which every one is made."""

    name: str
    title: str
    factory: str
    folder: Path
    """Of the factory's module."""
    data: str
    data_folder: Path
    input: TensorSpec
    training: dict[str, Any]
    widths: dict[str, Any]
    """Settings of `auto.space.widths`."""
    formats: tuple[Format, ...]
    float_layers: tuple[str, ...] = ()
    """Patterns of layers, each of which may stay in float in a quantized format."""
    blocks: str = ""
    """Container of the blocks of which one may be removed."""

    @property
    def file(self) -> Path:
        """What is kept of it."""
        return HERE.parent / f"auto_space_{self.name.lower()}.json"


SPACES = {
    "A": Space(
        "A",
        "five convolutions on digits, each of four widths",
        "shapes:chain",
        HERE.parent,
        "nets:easy",
        NETS,
        IMAGE,
        {"epochs": 12, "batch_size": 64},
        {"values": 4},
        ("float",),
    ),
    "B": Space(
        "B",
        "ResNet-20 on digits, four groups of channels of three widths, each stage in float or int8",
        "nets:resnet20",
        NETS,
        "nets:hard",
        NETS,
        IMAGE,
        {"epochs": 8, "batch_size": 64},
        {
            "values": 3,
            "include": ("layers.3.conv2", "layers.4.conv1", "layers.6.conv2", "layers.7.conv1"),
        },
        ("float", "int8_static"),
        ("layers.[0-2].*", "layers.[3-5].*", "layers.[6-8].*"),
    ),
    "C": Space(
        "C",
        "a text encoder of two layers, heads and inner widths of each of three sizes, in float or "
        "int8, with both layers or either of them",
        "encoder:encoder",
        HERE,
        "encoder:fragments",
        HERE,
        IDS,
        {"epochs": 12, "batch_size": 64, "optimizer": "adamw", "learning_rate": 0.002},
        {"values": 3},
        ("float", "int8_dynamic"),
        blocks="layers",
    ),
}


@dataclass
class Built:
    """The trained model of a space, and what follows from it, in a folder that is reused."""

    space: Space
    work: Path
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        space = self.space
        data = DataReference(space.data, {}, space.data_folder, 128).load()
        self.context = Context(root=self.work / "x", data=data)

    @cached_property
    def whole(self) -> EagerModel:
        """The trained model."""
        space, folder = self.space, self.work / "trained"
        if not folder.exists():
            torch.manual_seed(0)
            source = import_checkpoint(
                *(self.work / "source", Recipe(factory=space.factory)),
                Signature(inputs=(space.input,)),
                checkpoint=None,
                folder=space.folder,
            )
            Train(**space.training)(source, self.context.with_root(folder))
        return Artifact.from_directory(folder)

    @cached_property
    def models(self) -> dict[str, EagerModel]:
        """The model itself, and with each of its blocks left out."""
        found, container = {"": self.whole}, self.space.blocks
        if container:
            count = len(self.whole.load().get_submodule(container))
            for removed in range(count):
                name, module = f"without {container}.{removed}", self.whole.load()
                kept = tuple(i for i in range(count) if i != removed)
                edit = KeepBlocks(kept={container: kept})
                edit.apply_(module)
                folder = self.work / f"without-{removed}"
                if not folder.exists():
                    self.whole.derive(folder, module, edits=[edit])
                found[name] = Artifact.from_directory(folder)
        return found

    @cached_property
    def widths(self) -> dict[str, WidthSpace]:
        """Groups of channels and their widths, of each model."""
        return {
            name: WidthSpace.of_model(model, self.context, **self.space.widths)
            for name, model in self.models.items()
        }

    @property
    def settings(self) -> AutoSettings:
        """As in the pipeline file of a search."""
        widths = self.space.widths
        return AutoSettings.model_validate(
            {"space": {"widths": widths, "formats": self.space.formats}}
        )

    def layer_choices(self, format: Format) -> list[tuple[str, ...]]:
        """Return the sets of layers that may be in float, all quantized first."""
        patterns = () if format == "float" else self.space.float_layers
        chosen = product((False, True), repeat=len(patterns))
        return [
            tuple(p for p, is_float in zip(patterns, own, strict=True) if is_float)
            for own in chosen
        ]
